"""Adapt CLIP to pairs by retrieval, which is the pre-training of CLIP4IDC: `diffcap pretrain --method clip4idc`."""

import sys

from diffcap.pipeline import main

if __name__ == "__main__":
    main("pretrain", sys.argv[1:] or ["--method", "clip4idc"])
