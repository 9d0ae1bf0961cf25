"""The provenance of a result: versions, commit, seed and hash of the manifest (the list of pairs). Equal runs have the same provenance."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import diffcap

_PACKAGES = (
    *("torch", "torchvision", "lightning", "torchmetrics", "pycocoevalcap", "stanza"),
    *("open_clip_torch", "timm", "transformers", "peft"),
)


def provenance(**entries: Any) -> dict[str, Any]:
    """Return the versions and the commit, with the caller's entries (seed, manifest hash, checkpoints, ...).

    The commit is that of the checkout that diffcap runs from, with "+changes" if tracked files were changed; None outside a checkout.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(diffcap.__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions = {"diffcap": diffcap.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": commit, "platform": sys.platform, **entries}
