"""One rank of the two-process test of `losses.gather`: RANK RENDEZVOUS IN OUT."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from diffcap.losses.gather import ddp_scaled_sum, gather_rows, global_mean, rank, world_size
from diffcap.losses.pcl import masked_visual_nce


def losses(model: torch.nn.Module, rows: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """A rank's share of three losses of `rows` (n, D): two that add up over rows, and one where each row sees all."""
    out = model(rows)
    each = out.square().sum(1)
    return {
        "mean": global_mean(each),
        "sum": ddp_scaled_sum(each),
        "nce": global_mean(masked_visual_nce(out, target, out[: len(out) // 2])),
    }


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Gradient of all parameters, averaged over the ranks as DDP does."""
    model.zero_grad()
    loss.backward(retain_graph=True)  # the losses share what the model gave
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    if world_size() > 1:
        dist.all_reduce(flat)
    return flat / world_size()


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
        rows, target = data["rows"][mine], data["target"][mine]
        parts = losses(model, rows, target)
        result[case] = {name: (loss.detach(), gradients(model, loss)) for name, loss in parts.items()}
        gathered, first = gather_rows(rows)
        result[case]["gathered"], result[case]["first"] = gathered, first
    torch.save({"rank": rank(), "world": world_size(), "cases": result}, out)
    dist.barrier()  # a rank that leaves while the other is still talking makes gloo abort
    dist.destroy_process_group()
