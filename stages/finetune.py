"""Train a method to caption pairs: `diffcap finetune`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("finetune")
