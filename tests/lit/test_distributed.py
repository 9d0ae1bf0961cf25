"""Two gloo processes train to the weights of one at the same global batch, by the real commands."""

import subprocess
from pathlib import Path

import pytest
import torch
from tests.commands import command, environment, same_logs, weights
from tests.toy import SHAPE, write_toy
from tests.toy_checkpoints import write_checkpoint

from diffcap.data.datamodules import CaptionData
from diffcap.methods.pcl.pretraining_model import PCLPretraining

pytestmark = pytest.mark.slow  # two processes

# The released settings but for size, and no dropout, whose draws belong to a rank. 7 pairs are 4 and 3 on two ranks, and
# in FDA, where the three negatives leave one pair, 1 and none.
SMALL = (
    *(
        "--model.captioner.init_args.width=16",
        "--model.captioner.init_args.heads=2",
        "--model.captioner.init_args.ffn=24",
    ),
    *("--model.captioner.init_args.dropout=0", "--data.batch_size=7", "--data.max_length=20", "--data.swap=true"),
    *("--model.lr=1e-3", "--trainer.max_steps=8", "--trainer.val_check_interval=4", "--trainer.accelerator=cpu"),
    *("--data.features=toy", "--run.patience=null", "--run.select_after=0", "--data.eval_batch_size=3"),
    *("--data.val_limit=7", "--run.monitor=val/BLEU-1", "--trainer.log_every_n_steps=2"),
)
STAGES = {
    "pretrain": ("--data.tasks={mlm: 1, mvcl: 1, fda: 1}", "--model.warmup=2", "--run.monitor=null"),
    "finetune": ("--model.tokenizer=raw", "--model.init_from=start.ckpt"),
}


def write_start(folder: Path) -> None:
    """Pre-trained weights that give "the" at every position: such captions have a BLEU-1 above 0 on every processor."""
    words = CaptionData(str(folder), "toy").words
    torch.manual_seed(0)
    model = PCLPretraining(6 + len(words), SHAPE[0], width=16, heads=2, ffn=24)
    with torch.no_grad():
        model.trunk.output_layer.bias[6 + words.index("the")] = 10
    write_checkpoint(folder / "start.ckpt", model, "pretrain", words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every stage trained by one process and by two, at the same time."""
    folder = write_toy(tmp_path_factory.mktemp("ddp"))
    write_start(folder)
    processes = []
    for stage, options in STAGES.items():
        for devices in (1, 2):
            configs = ["configs/trainer/ddp.yaml"] if devices > 1 else []
            settings = (
                f"--data.folder={folder}",
                f"--run.out={folder / stage}{devices}",
                f"--trainer.devices={devices}",
            )
            words = command(stage, configs, *SMALL, *options, *settings)
            processes.append(
                subprocess.Popen(
                    words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
    for process in processes:
        output = process.communicate(timeout=300)
        assert process.returncode == 0, output
    return folder


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_train_to_the_weights_of_one(runs: Path, stage: str) -> None:
    one, two = weights(runs / f"{stage}1" / "last.ckpt"), weights(runs / f"{stage}2" / "last.ckpt")
    assert one.keys() == two.keys()
    for name, value in one.items():
        if name.endswith("qkv.bias"):
            # The keys' bias moves all scores of a query alike: its gradient is rounding, which Adam makes a full step.
            value, other = (
                torch.stack([part for n, part in enumerate(v.chunk(3)) if n != 1]) for v in (value, two[name])
            )
            torch.testing.assert_close(
                value, other, atol=1e-5, rtol=0, msg=lambda output, name=name: f"{name}: {output}"
            )
        else:
            torch.testing.assert_close(
                value, two[name], atol=1e-5, rtol=0, msg=lambda output, name=name: f"{name}: {output}"
            )


@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_log_the_losses_of_one(runs: Path, stage: str) -> None:
    """Validation has 7 pairs, 4 on each rank: the sampler gives the first pair to both."""
    names = same_logs(runs / f"{stage}1", runs / f"{stage}2")
    wanted = {
        "pretrain": {"train/mlm", "train/mvcl", "train/fda", "val/mlm", "val/mlm_accuracy"},
        "finetune": {"train/loss", "train/word_loss", "train/distractor_loss", "val/word_loss", "val/distractor_loss"},
    }
    assert wanted[stage] <= names


def test_validation_says_the_same(runs: Path) -> None:
    scores = [(runs / f"finetune{devices}" / "finished.json").read_text() for devices in (1, 2)]
    best = [[line for line in text.splitlines() if '"best"' in line or '"steps"' in line] for text in scores]
    assert best[0] == best[1] and len(best[0]) == 2
    assert float(best[0][-1].partition(":")[2].strip(", ")) > 0
