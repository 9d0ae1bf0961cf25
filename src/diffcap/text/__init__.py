"""Caption vocabularies and the part-of-speech tagger."""
