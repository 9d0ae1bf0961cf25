"""Pre-train a method: `diffcap pretrain`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("pretrain")
