"""`python -m diffcap` is the command `diffcap`."""

from diffcap.cli import main

if __name__ == "__main__":
    main()
