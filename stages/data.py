"""Official files of a dataset in, manifest out: `diffcap data`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("data")
