"""Tables, pictures and a page of runs: `diffcap report`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("report")
