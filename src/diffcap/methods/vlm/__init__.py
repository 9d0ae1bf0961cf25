"""Open vision-language models, fine-tuned on change captions or used without training."""
