"""Captions and scores of a split: `diffcap eval`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("eval")
