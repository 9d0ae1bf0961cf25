"""One rank of the two-process test of the contrast of pairs and sentences: RANK RENDEZVOUS IN OUT."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from diffcap.losses.gather import global_mean
from diffcap.losses.pair_text import pair_text_contrastive_loss

if __name__ == "__main__":
    number, meet, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    data = torch.load(source)
    mine = slice(0, data["cut"]) if number == 0 else slice(data["cut"], None)
    leaves = [part.clone().requires_grad_() for part in (data["text"][mine], data["pair"][mine], data["scale"])]
    loss = global_mean(pair_text_contrastive_loss(leaves[0], leaves[1], leaves[2].exp()))
    torch.save({"loss": loss.detach(), "gradients": torch.autograd.grad(loss, leaves)}, out)
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()
