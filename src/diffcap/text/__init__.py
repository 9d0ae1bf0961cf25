"""Words: vocabulary, tokenisation, part-of-speech tags."""
