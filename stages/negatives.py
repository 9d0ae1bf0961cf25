"""Build hard negatives, captions that are similar but wrong: `diffcap negatives`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("negatives")
