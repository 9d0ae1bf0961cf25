"""Hard negative captions: `diffcap negatives`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("negatives")
