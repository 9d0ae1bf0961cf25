"""Captioners to and from the Hugging Face hub, with a model card made of what is known of them."""

import glob
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from diffcap.checkpoints.exporting import Scores, scores_of
from diffcap.checkpoints.reading import CAPTIONING_STAGES, CONFIG, WEIGHTS, read_checkpoint, write_folder
from diffcap.methods import methods
from diffcap.records import write_json, write_text
from diffcap.run_folder import METRICS, report_of
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

STAGES_TOLD = {"finetune": "fine-tuned on captions", "reinforce": "fine-tuned, then self-critical training on CIDEr-D"}
PICTURES = "*.png"  # of a repository
SHOWN = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D", "SPICE")

T = TypeVar("T")


def push(
    checkpoint: str | Path,
    name: str,
    metrics: str | Path | None = None,
    pictures: Sequence[str | Path] | None = None,
    license: str = "other",
    private: bool = False,
) -> str:
    """Upload a captioner in its exported form, with a model card.

    Args:
        checkpoint: a captioner's file, or an exported folder. name: user/name. metrics: metrics.json of its evaluation, None for
            the one of its run that is of the same weights, if there is one. pictures: PNG files, None for the run's report's.
            No two may have one name.
        license: as the hub names it. private: make a new repository private, and refuse one that others can see already.

    Returns:
        The address of the repository.

    Raises:
        DiffcapError: the checkpoint, the metrics or a picture cannot be had, the metrics are of other weights, the repository
            is not private and should be, or the hub refuses.
    """
    _check_name(name)
    state = read_checkpoint(checkpoint)
    if state["diffcap"]["stage"] not in CAPTIONING_STAGES:
        raise DiffcapError(
            f"{checkpoint}: of the {state['diffcap']['stage']} stage; push a captioner, of the finetune or the reinforce stage."
        )
    scores = scores_of(Path(checkpoint), state, metrics)
    if scores.metrics is None:
        echo(f"note: the card goes without scores: {scores.why}; `make eval` writes them.", err=True)
    shown = [Path(path) for path in pictures] if pictures is not None else _pictures(Path(checkpoint))
    _check_pictures(shown)
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder, state)
        for path in shown:
            (folder / path.name).write_bytes(path.read_bytes())
        if scores.metrics is not None:
            write_json(folder / METRICS, scores.metrics)
        write_text(folder / "README.md", model_card(name, state, scores, [path.name for path in shown], license))
        api = HfApi()
        _asked(name, lambda: api.create_repo(name, private=private or None, exist_ok=True))
        if private and not _asked(name, lambda: api.repo_info(name).private):
            raise DiffcapError(
                f"{name}: is there already and not private, so nothing was uploaded; make it private in its settings on the "
                "hub, or leave --private out."
            )
        earlier = [file for file in _asked(name, lambda: api.list_repo_files(name)) if fnmatchcase(file, PICTURES)]
        done = _asked(
            name,
            lambda: api.upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message="Upload from diffcap",
                # of the weights that were there before; what lies in folders is the owner's
                delete_patterns=[METRICS, *(glob.escape(file) for file in earlier if "/" not in file)],
            ),
        )
    return str(getattr(done, "repo_url", None) or name)


def fetch(name: str, folder: str | Path | None = None) -> Path:
    """Download a captioner's exported form.

    Args:
        name: user/name. folder: where to; None for the hub's own cache.

    Raises:
        DiffcapError: it is not there, is none of diffcap's, or the hub cannot be reached.
    """
    _check_name(name)
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, WEIGHTS, METRICS, "README.md", PICTURES]
    place = Path(
        _asked(
            name, lambda: snapshot_download(name, local_dir=None if folder is None else folder, allow_patterns=wanted)
        )
    )
    for file in (CONFIG, WEIGHTS):
        if not (place / file).is_file():
            raise DiffcapError(f"{name}: no captioner of diffcap, it has no {file}; check the name on the hub.")
    return place


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        raise DiffcapError(f"{name!r}: not the name of a repository on the hub; write user/name.")


def _asked(name: str, ask: Callable[[], T]) -> T:
    """Ask the hub; whatever it says is one sentence."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return ask()
    except Exception as error:  # of its client's libraries, of which it has had several
        code = getattr(getattr(error, "response", None), "status_code", None)
        reason = " ".join(str(error).split())[:160].rstrip(". ")
        if code in (401, 403) and isinstance(error, HfHubHTTPError):
            raise DiffcapError(
                f"{name}: the hub refuses ({code}); log in with `hf auth login`, or set HF_TOKEN to a token that may write "
                "there, and check the name."
            ) from None
        if code == 404:
            raise DiffcapError(f"{name}: nothing of that name on the hub; check it.") from None
        raise DiffcapError(f"{name}: the hub cannot be used ({reason}); check the network and HF_ENDPOINT.") from None


def _pictures(checkpoint: Path) -> list[Path]:
    stage = checkpoint.absolute().parent
    folder = checkpoint if checkpoint.is_dir() else stage.parent / report_of(stage.name)
    return sorted(folder.glob(PICTURES))


def _check_pictures(paths: Sequence[Path]) -> None:
    """They lie beside each other and the weights on the hub, by their names."""
    names = [path.name for path in paths]
    for path in paths:
        if not path.is_file():
            raise DiffcapError(f"{path}: no picture there; check --pictures.")
        if path.suffix != ".png":
            raise DiffcapError(f"{path}: not called .png; give PNG files as --pictures.")
        if names.count(path.name) > 1:
            raise DiffcapError(f"{path}: another of --pictures is called {path.name}, too; rename one.")


def model_card(name: str, state: dict[str, Any], scores: Scores, pictures: Sequence[str], license: str) -> str:
    """The README of a repository on the hub: what it is, how to use it, what it was trained on, its scores and pictures.

    Args:
        state: as `read_checkpoint` gives it. scores: see `exporting.scores_of`. pictures: names of files beside the card.
    """
    facts = state["diffcap"]
    method = methods().get(facts["method"])
    title, paper = (method.title, method.paper) if method else (facts["method"], "")
    features = facts["features"]
    backbone = ", ".join(str(features[key]) for key in ("library", "network", "stage") if features.get(key))
    head = {
        "license": license,
        "library_name": "diffcap",
        "pipeline_tag": "image-to-text",
        "tags": ["image-difference-captioning", "change-captioning", facts["method"]],
        "language": "en",
    }
    lines = ["---", *_yaml(head), "---", "", f"# {name.rpartition('/')[2]}", ""]
    origin = f"imported from the authors' `{facts['imported_from']}`" if facts.get("imported_from") else "trained"
    lines += [
        f"{title}, {origin} on `{facts['dataset']}`: says in a sentence what changed between two similar images.",
        "",
        "```",
        f"diffcap caption before.png after.png --checkpoint {name}",
        "```",
        "",
        "```python",
        "from diffcap import load_captioner",
        "",
        f'print(load_captioner("{name}")("before.png", "after.png").text)',
        "```",
        "",
        "## How it was made",
        "",
        f"* Method: {title}" + (f" ({paper})." if paper else "."),
        f"* Dataset: `{facts['dataset']}`"
        + (f", manifest {facts['manifest_sha256'][:12]}." if facts.get("manifest_sha256") else "."),
        f"* Stage: {STAGES_TOLD[facts['stage']]}"
        + (f"; the mean of the weights of {len(facts['averaged'])} checkpoints." if facts.get("averaged") else "."),
        f"* Features: {backbone or features.get('name')}.",
        f"* Steps: {state['global_step']:,}; seed {facts.get('seed')}; diffcap {facts['version']}.",
        f"* Vocabulary: {len(facts['words']) or 'all'} {'words' if facts['words'] else 'tokens of CLIP'}.",
        "",
    ]
    lines += _score_lines(scores)
    if pictures:
        lines += ["## Examples", "", *(f"![{Path(picture).stem}]({picture})" for picture in pictures), ""]
    lines += [
        "## Licence",
        "",
        f"{license}. The method and the dataset are their authors'; what may be done with these weights depends on the "
        "dataset's terms, too. Please cite the paper.",
        "",
    ]
    return "\n".join(lines)


def _yaml(values: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in values.items():
        lines += [f"{key}:", *(f"- {one}" for one in value)] if isinstance(value, list) else [f"{key}: {value}"]
    return lines


def _score_lines(scores: Scores) -> list[str]:
    metrics = scores.metrics
    if metrics is None:
        return ["## Scores", "", f"None of these weights: {scores.why}.", ""]
    protocol = {
        key: value for key, value in (metrics.get("protocol") or {}).items() if not isinstance(value, dict | list)
    }
    told = ", ".join(f"{key} {value}" for key, value in protocol.items() if value is not None)
    groups = {group: row for group, row in metrics["groups"].items() if isinstance(row, dict)}
    columns = [metric for metric in SHOWN if any(metric in row for row in groups.values())]
    lines = ["## Scores", "", f"Protocol: {told}. Fractions x 100; each group is scored on its own.", ""]
    lines += [f"| group | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for group, row in groups.items():
        cells = [f"{100 * row[metric]:.2f}" if isinstance(row.get(metric), int | float) else "-" for metric in columns]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return [*lines, ""]
