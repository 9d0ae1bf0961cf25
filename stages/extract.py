"""Compute the features of every image: `diffcap extract`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("extract")
