"""One rank of the two-process test of the losses of SCORER and DIRL: RANK RENDEZVOUS IN OUT."""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diffcap.losses.gather import world_size
from diffcap.models.dirl import DIRL
from diffcap.models.scorer import SCORER

METHODS: dict[str, type[SCORER] | type[DIRL]] = {"scorer": SCORER, "dirl": DIRL}


def share(batch: dict[str, Tensor], pairs: slice) -> dict[str, Tensor]:
    """The rows of some pairs, of every stream."""
    size = len(batch["before"])
    return {name: torch.cat([part[pairs] for part in rows.split(size)]) for name, rows in batch.items()}


def learn(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The scalars and the gradients of a batch, averaged over the ranks as DDP does."""
    model.zero_grad()
    parts = model.train().loss(batch)
    parts["loss"].backward()
    found = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    if world_size() > 1:
        for gradient in found.values():
            dist.all_reduce(gradient)
    scalars = {name: value.detach() for name, value in parts.items()}
    return scalars, {name: gradient / world_size() for name, gradient in found.items()}


if __name__ == "__main__":
    number, meet, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    data = torch.load(source)
    result = {}
    for name, (method, options, state) in data["models"].items():
        model = METHODS[method](**options)
        model.load_state_dict(state)
        for streams, batch in data["batches"].items():
            for cut in data["cuts"]:
                mine = slice(0, cut) if number == 0 else slice(cut, None)
                result[name, streams, cut] = learn(model, share(batch, mine))
    torch.save(result, out)
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()
