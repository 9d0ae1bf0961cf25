"""Fine-tune a captioner; runs/<dataset>/<method>/finetune/best.ckpt is the result."""

from diffcap.errors import plain_errors


def main() -> None:
    """Read the command line and train, from where an interrupted run stopped."""
    from diffcap.lit.run import TrainingCLI  # first: it makes --help quick

    # isort: split
    from diffcap.data.captioning import CaptionData
    from diffcap.lit.captioning import Captioning

    TrainingCLI(Captioning, CaptionData, save_config_callback=None).train("finetune")


if __name__ == "__main__":
    with plain_errors():
        main()
