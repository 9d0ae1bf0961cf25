"""Read a dataset's official files, and write its manifest (the list of pairs): `diffcap data`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("data")
