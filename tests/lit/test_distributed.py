"""Two gloo processes pre-train to the weights of one at the same global batch, by the real command; test_launch.py fine-tunes."""

from pathlib import Path

import pytest
import torch
from tests.commands import command, run, same_logs, weights
from tests.stages.small_runs import TINY
from tests.toy import write_toy

pytestmark = pytest.mark.slow  # two processes

# The released settings but for size, and no dropout, whose draws belong to a rank. 7 pairs are 4 and 3 on two ranks, and
# in FDA, where the three negatives leave one pair, 1 and none.
SMALL = (
    *TINY,
    *("--model.captioner.init_args.dropout=0", "--data.batch_size=7", "--data.max_length=20", "--data.swap=true"),
    *("--model.lr=1e-3", "--trainer.max_steps=8", "--trainer.val_check_interval=4", "--trainer.accelerator=cpu"),
    *("--data.features=toy", "--run.patience=null", "--run.select_after=0", "--data.eval_batch_size=3"),
    *("--data.val_limit=7", "--run.monitor=null", "--trainer.log_every_n_steps=2", "--model.warmup=2"),
    "--data.tasks={mlm: 1, mvcl: 1, fda: 1}",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-training by one process and by two."""
    folder = write_toy(tmp_path_factory.mktemp("ddp"))
    for devices in (1, 2):
        configs = ["configs/trainer/ddp.yaml"] if devices > 1 else []
        settings = f"--data.folder={folder}", f"--run.out={folder / str(devices)}", f"--trainer.devices={devices}"
        done = run(command("pretrain", configs, *SMALL, *settings), folder)
        assert done.returncode == 0, done.stderr
    return folder


def test_two_processes_train_to_the_weights_of_one(runs: Path) -> None:
    one, two = weights(runs / "1/last.ckpt"), weights(runs / "2/last.ckpt")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith("qkv.bias"):
            # The keys' bias moves all scores of a query alike: its gradient is rounding, which Adam makes a full step.
            value, two[name] = (torch.cat([v.chunk(3)[0], v.chunk(3)[2]]) for v in (value, two[name]))
        torch.testing.assert_close(value, two[name], atol=1e-5, rtol=0, msg=name)


def test_two_processes_log_the_losses_of_one(runs: Path) -> None:
    """Validation has 7 pairs, 4 on each rank: the sampler gives the first pair to both."""
    names = same_logs(runs / "1", runs / "2")
    assert {"train/mlm", "train/mvcl", "train/fda", "val/mlm", "val/mlm_accuracy"} <= names
