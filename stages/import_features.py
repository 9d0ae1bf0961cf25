"""Features that the authors of a method released into a store."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("import_features")
