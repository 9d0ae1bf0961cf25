"""Hard negative captions for fine-grained difference aligning: retrieve, replace, confuse."""
