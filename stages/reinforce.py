"""Train a fine-tuned captioner with a reward (self-critical training): `diffcap reinforce`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("reinforce")
