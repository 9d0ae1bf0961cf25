"""One rank of the two-process test of the class contrast: RANK RENDEZVOUS IN OUT."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.losses.gather_worker import gradients

from diffcap.losses.gather import global_mean
from diffcap.losses.pcl import class_contrastive_loss


def contrast(model: torch.nn.Module, rows: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """A rank's share of the loss."""
    return global_mean(class_contrastive_loss(model(rows), classes))


if __name__ == "__main__":
    number, meet, source, out = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    data = torch.load(source)
    model = torch.nn.Linear(6, 6)
    model.load_state_dict(data["model"])
    result = {}
    for case, cut in data["cuts"].items():
        mine = slice(0, cut) if number == 0 else slice(cut, None)
        loss = contrast(model, data["rows"][mine], data["classes"][mine])
        result[case] = loss.detach(), gradients(model, loss)
    torch.save(result, out)
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()
