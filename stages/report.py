"""Write tables, pictures and a page about runs: `diffcap report`."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("report")
