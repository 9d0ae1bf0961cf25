"""Scores beside those of n-grams, on request only: the verdicts of a judge, and the similarity of sentence embeddings."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from huggingface_hub import snapshot_download

from diffcap.checkpoints.base_models import base_sha256
from diffcap.checkpoints.hub_access import check_repository_name, hub_errors
from diffcap.evaluation.bootstrap import bootstrap_sums
from diffcap.evaluation.captions import ALL_METRICS, Groups
from diffcap.record import digest
from diffcap.records import read_complete_lines, read_json
from diffcap.text.hub import cut_thinking, import_transformers
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import SERVED

# After a change of this prompt, its hash in metrics.json is another one, and all captions are judged again.
JUDGE_PROMPT = """Two images show the same scene at different times. These sentences by people describe what changed:
{references}
This sentence by a program describes the change, too:
- {caption}
Compare it with the sentences by people. Answer with these three words, each followed by yes or no, and with nothing else.
correct: does it state the same change?
hallucination: does it state a change or a property that no sentence by people has?
omission: does it leave out a change that the sentences by people have?"""
PROMPT_VERSION = 1
VERDICTS = ("correct", "hallucination", "omission")
_JUDGE_TOKENS = 1024  # maximum of an answer

Text = tuple[str, Sequence[str]]  # a caption and its references
Texts = Mapping[str, Text]  # by the id of the pair
Values = dict[str, Any]  # score -> value of one text; None if it is unknown


class Measure(NamedTuple):
    """Scores captions one by one."""

    origin: dict[str, Any]  # the model and all else that determines the scores
    names: tuple[str, ...]
    score: Callable[[Text], Values]
    num_threads: int = 1


def judge(source: str) -> Measure:
    """Return the verdicts of a language model: "openai:MODEL@http://HOST/v1", the folder of a model, or its name on the Hub."""
    from diffcap.models.answering import ServedModel, Unreachable

    is_served = source.startswith(SERVED)
    if is_served:
        model = ServedModel(source, "", max_length=_JUDGE_TOKENS)
        origin: dict[str, Any] = {"model": model.name}
    else:
        _, origin, pipeline = _load("text-generation", source)
        if not getattr(pipeline.tokenizer, "chat_template", None):
            raise DiffcapError(f"{source}: has no chat template, so it cannot judge; use an instruction-tuned model.")
    options = {"max_new_tokens": _JUDGE_TOKENS, "do_sample": False, "return_full_text": False}

    def score(text: Text) -> Values:
        caption, references = text
        prompt = JUDGE_PROMPT.format(caption=caption, references="\n".join(f"- {text}" for text in references))
        try:
            if is_served:
                return parse_verdicts(model.ask([prompt]).text)
            answer = pipeline([{"role": "user", "content": prompt}], **options)
            return parse_verdicts(cut_thinking(answer[0]["generated_text"]))
        except Unreachable:
            raise
        except DiffcapError as error:  # of this request only, such as an empty answer
            return dict.fromkeys(VERDICTS) | {"error": str(error)}

    origin |= {"prompt_version": PROMPT_VERSION, "prompt_sha256": hashlib.sha256(JUDGE_PROMPT.encode()).hexdigest()}
    return Measure(origin, VERDICTS, score, num_threads=8 if is_served else 1)


def parse_verdicts(answer: str) -> Values:
    """Read the verdicts in an answer. All are None unless the answer has each of them, and none as both yes and no."""
    verdicts: Values = {}
    for name in VERDICTS:
        words = set(re.findall(rf"\b{name}\W+(yes|no)\b", answer.lower()))
        if len(words) != 1:
            return dict.fromkeys(VERDICTS) | {"answer": answer}
        verdicts[name] = "yes" in words
    return verdicts | {"answer": answer}


def embedding(source: str) -> Measure:
    """Return the cosine similarity to the most similar reference ("best"), and the mean over all references ("mean").

    `source` is the folder of a model of sentence-transformers, or its name on the Hub. Its embedding is the mean over the tokens.
    """
    folder, origin, pipeline = _load("feature-extraction", source)
    file = folder / "1_Pooling/config.json"  # only sentence-transformers writes it
    pooling = read_json(file) if file.is_file() else {"pooling_mode": "mean"}
    modes = {key: value for key, value in pooling.items() if key.startswith("pooling_mode") and value}
    if modes not in ({"pooling_mode": "mean"}, {"pooling_mode_mean_tokens": True}):
        raise DiffcapError(f"{source}: its embedding is not the mean over the tokens; use a model with mean pooling.")

    @cache
    def embed(sentence: str) -> Any:
        vector = pipeline(sentence, return_tensors=True, truncation=True)[0].mean(0)  # of (T, D)
        return vector / vector.norm()

    def score(text: Text) -> Values:
        caption, references = text
        similarities = [float(embed(caption) @ embed(reference)) for reference in references]
        return {"best": max(similarities), "mean": fmean(similarities)}

    return Measure(origin, ("best", "mean"), score)


def _load(task: str, source: str) -> tuple[Path, dict[str, Any], Any]:
    """Return the folder of a model, which is in the Hub's cache for a name, what identifies the model, and its pipeline of transformers."""
    transformers = import_transformers()
    folder, (name, _, revision) = Path(source), source.partition("@")
    if is_name := not folder.is_dir():
        check_repository_name(name)
        patterns = ["*.json", "*.txt", "*.jinja", "*.model", "*.safetensors"]
        with hub_errors(name):
            folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    options = {"trust_remote_code": False, "model_kwargs": {"use_safetensors": True}}
    with wrap_errors(source, f"no model for {task}", "give the folder of a model, or its name on the Hugging Face Hub"):
        pipeline = transformers.pipeline(task, str(folder), **options)
    if is_name:
        return folder, {"model": name, "revision": folder.name}, pipeline
    return folder, {"model": folder.resolve().name, "sha256": base_sha256(folder)}, pipeline


def choose_metrics(
    metrics: list[str] | str | None, stem: str, loads: bool = True, **sources: str | None
) -> dict[str, Any]:
    """Return the arguments of `protocols.evaluate` for --metrics: "metrics" of n-grams, and "further", a function for other scores.

    `sources` are the models of `judge` and `embedding`, which are loaded if `loads` is true. For `stem`, see `score_further`.
    """
    names = metrics.split(",") if isinstance(metrics, str) else metrics
    kinds = {"judge": judge, "embedding": embedding}
    measures = {}
    for name, source in sources.items():
        if (name in (names or ())) != (source is not None):
            raise DiffcapError(f"--metrics {name} and --{name} MODEL belong together; give both.")
        if source is not None and loads:
            measures[name] = kinds[name](source)
    ngrams = [name for name in names or () if name not in kinds]
    scoring: dict[str, Any] = {"metrics": ngrams or (() if names == [] else ALL_METRICS)}
    if measures:
        scoring["further"] = partial(score_further, measures, stem)
    return scoring


def score_further(
    measures: Mapping[str, Measure], stem: str, texts: Texts, groups: Groups
) -> dict[str, dict[str, Any]]:
    """Score texts with each measure. The file <stem><name>.jsonl gets a line for each text, which is then not scored again.

    Returns:
        name -> {"model", ..., "unknown": number of texts without scores, "notes", "groups": group -> score -> [mean, low, high]}.
        Between low and high are 95 % of 1,000 bootstrap samples of the pairs.
    """
    results = {}
    for name, measure in measures.items():
        rows = _score_texts(measure, texts, Path(f"{stem}{name}.jsonl"))
        values = {id: [row[score] for score in measure.names] for id, row in rows.items()}
        known = {id: scores for id, scores in values.items() if None not in scores}
        notes = []
        if num_unknown := len(values) - len(known):
            notes.append(f"{num_unknown:,} of {len(values):,} answers cannot be read; these captions have no scores.")
        for score, column in zip(measure.names, zip(*known.values())):
            num_same = max(sum(value is verdict for value in column) for verdict in (True, False))
            if num_same > 0.95 * len(column):  # the judge may not compare the captions
                notes.append(
                    f'The judge\'s verdict "{score}" is the same for {num_same:,} of {len(column):,} captions; test it with captions '
                    "that you know to be wrong."
                )
        intervals = {}
        for group, ids in groups.items():
            table = np.array([known[id] for id in ids if id in known], dtype=float)
            if len(table):
                means = bootstrap_sums(table, 1000, np.random.default_rng(0)) / len(table)
                low, high = np.quantile(means[1:], [0.025, 0.975], axis=0)
                columns = np.stack([means[0], low, high], 1)
                intervals[group] = dict(zip(measure.names, columns.tolist()))
        results[name] = {**measure.origin, "unknown": num_unknown, "notes": notes, "groups": intervals}
    return results


def _score_texts(measure: Measure, texts: Texts, path: Path) -> dict[str, Values]:
    # The key is a hash of a text and of what determines its scores.
    rows = {row["key"]: row for row in read_complete_lines(path)}
    keys = {id: digest(measure.origin, text) for id, text in texts.items()}
    missing = {key: id for id, key in keys.items() if key not in rows}
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(measure.num_threads) as executor:
        all_values = executor.map(measure.score, [texts[id] for id in missing.values()])
        for (key, id), values in zip(missing.items(), all_values):
            rows[key] = {"id": id, "key": key, **values}
            if "error" not in values:
                print(json.dumps(rows[key], ensure_ascii=False), file=file, flush=True)
    return {id: rows[key] for id, key in keys.items()}
