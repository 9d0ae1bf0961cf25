"""One rank of a two-process run of `CaptionMetric`: RANK, a rendezvous file, and where to write the scores."""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from diffcap.evaluation.metric import CaptionMetric

if __name__ == "__main__":
    rank, rendezvous, data, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    content = json.loads(data.read_text())
    metric = CaptionMetric(content["references"], tokenizer="raw")
    ids = list(content["predictions"])
    ids = [*ids, *ids[: -len(ids) % 2]]  # padded as a distributed sampler pads: the first ones again
    mine = ids[rank::2]
    for start in range(0, len(mine), 3):
        batch = mine[start : start + 3]
        metric.update(batch, [content["predictions"][id] for id in batch])
    out.write_text(
        json.dumps({"seen": len(mine), "gathered": len(metric.gather_captions()), "scores": metric.compute()})
    )
    dist.destroy_process_group()
