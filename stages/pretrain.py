"""Pre-train on masked words, masked patches and hard negatives; runs/<dataset>/<method>/pretrain/last.ckpt is the result."""

from diffcap.errors import plain_errors


def main() -> None:
    """Read the command line and train, from where an interrupted run stopped."""
    from diffcap.lit.run import TrainingCLI  # first: it makes --help quick

    # isort: split
    from diffcap.data.pretraining import PretrainData
    from diffcap.lit.pretraining import Pretraining

    TrainingCLI(Pretraining, PretrainData, save_config_callback=None).train("pretrain")


if __name__ == "__main__":
    with plain_errors():
        main()
