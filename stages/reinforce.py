"""Train a fine-tuned captioner on by the CIDEr-D of its own captions; runs/<dataset>/<method>/reinforce/best.ckpt is the result."""

from diffcap.errors import plain_errors


def main() -> None:
    """Read the command line and train, from where an interrupted run stopped."""
    from diffcap.lit.run import TrainingCLI  # first: it makes --help quick

    # isort: split
    from diffcap.data.reinforcement import ReinforceData
    from diffcap.lit.reinforcement import Reinforcement

    TrainingCLI(Reinforcement, ReinforceData, save_config_callback=None).train("reinforce")


if __name__ == "__main__":
    with plain_errors():
        main()
