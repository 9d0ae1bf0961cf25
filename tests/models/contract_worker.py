"""One rank of the contract's test on two processes: RANK RENDEZVOUS IN OUT."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.models.test_contract import learn, share

if __name__ == "__main__":
    number, meet, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    data = torch.load(source)
    mine = slice(0, data["cut"]) if number == 0 else slice(data["cut"], None)
    result = {key: learn(key[0], share(batch, mine)) for key, batch in data["batches"].items()}
    torch.save(result, out)
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()
