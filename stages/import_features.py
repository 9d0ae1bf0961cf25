"""Copy features that the authors of a method published into a feature store."""

from diffcap.pipeline import main

if __name__ == "__main__":
    main("import_features")
