"""Self-supervised training of a method: `diffcap pretrain`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("pretrain")
