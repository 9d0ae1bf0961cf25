"""What stands beside every result: versions, commit, seed, the manifest's hash. Nothing that differs between two equal runs."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import diffcap

_PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "pycocoevalcap", "stanza", "open_clip_torch", "timm")


def git_commit() -> str | None:
    """Commit of the checkout that diffcap runs from, with "+changes" when files differ; None outside a checkout."""

    def git(*words: str) -> str:
        folder = Path(diffcap.__file__).parent
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout

    try:
        return git("rev-parse", "HEAD").strip() + ("+changes" if git("status", "--porcelain", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(**facts: Any) -> dict[str, Any]:
    """Versions and commit, and whatever the caller adds (seed, manifest hash, checkpoint, settings)."""
    versions = {"diffcap": diffcap.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"versions": versions, "commit": git_commit(), "platform": sys.platform, **facts}
