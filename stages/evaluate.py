"""Caption the pairs of a split, and score the captions: `diffcap eval`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("eval")
