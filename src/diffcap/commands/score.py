"""Score a file of captions against a file of references, or against a split of a dataset."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from diffcap import __version__
from diffcap.datasets.registry import ProtocolName, datasets
from diffcap.evaluation.captions import check_ids
from diffcap.evaluation.coco import read_other_predictions, read_predictions, read_references
from diffcap.evaluation.protocols import dataset_protocol, evaluate
from diffcap.evaluation.remote_sensing import WordIdScoring, word_id_protocol, word_id_scoring
from diffcap.evaluation.tables import print_scores
from diffcap.records import ChangePair, JsonDict, file_hash, read_dataset, take_changes
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError


def score(
    predictions: Path,
    references: Path | None = None,
    tokenizer: Literal["ptb", "raw"] = "ptb",
    json: bool = False,
    dataset: str | None = None,
    folder: Path | None = None,
    split: Literal["test", "val", "train"] = "test",
    protocol: ProtocolName = "text",
    metrics: list[str] | str | None = None,
    judge: str | None = None,
    embedding: str | None = None,
) -> None:
    """Score a file of captions: BLEU-1..4, METEOR, ROUGE-L, CIDEr-D, and SPICE if its jars are installed.

    The references are those of a file or of a dataset (--dataset). With a dataset, its groups, such as change types, are also scored.

    Args:
        predictions: COCO results file, a list of {"image_id", "caption"}; or an object from id to caption; or a .jsonl file with
            {"id", "caption"} on every line. Every id of the references needs one caption.
        references: COCO captions file, {"annotations": [{"image_id", "caption"}, ...]}.
        tokenizer: ptb lower-cases, splits words and drops punctuation, as in most papers; raw splits at spaces only.
        json: Print the content of metrics.json (scores as fractions) instead of a table.
        dataset: Name of a dataset that the data stage has prepared, instead of a file of references.
        folder: Folder of the dataset's manifest; data/<dataset> by default.
        split: The split of the dataset to which the captions belong.
        protocol: text; or levir_cc, for datasets of remote-sensing change captioning and for your own datasets in Karpathy's form.
            levir_cc adds the metrics of word ids that the released evaluators print, change accuracy, no-change accuracy and S*m.
        metrics: Names of the metrics, as for `eval`. The values of "judge" and "embedding" for each pair are written next to the
            predictions: <predictions>.judge.jsonl.
        judge: Language model for --metrics judge, as for `eval`.
        embedding: Model of sentence-transformers for --metrics embedding: folder or user/name.
    """
    from diffcap.evaluation.further import choose_metrics  # imports torch

    scoring = choose_metrics(metrics, f"{predictions.with_suffix('')}.", judge=judge, embedding=embedding)
    scoring["tokenizer"] = tokenizer
    if dataset is None and folder is None:
        if protocol != "text":
            raise DiffcapError(
                f"--protocol {protocol} needs the groups and the words of a whole dataset; give --dataset instead of references."
            )
        if references is None:
            raise DiffcapError("there is nothing to score against; give a file of references, or --dataset.")
        captions, reference_captions = read_predictions(predictions), read_references(references)
        check_ids(captions, reference_captions, prefix=f"{predictions} against {references}: ")
        pairs = [ChangePair(id, "", "", texts, "test") for id, texts in reference_captions.items()]
        provenance = _provenance(predictions=predictions, references=references)
        result = evaluate(captions, pairs, provenance=provenance, **scoring)
        title = f"{predictions.name}: {result['protocol']['pairs']['total']:,} pairs, "
    else:
        if references is not None:
            raise DiffcapError(f"{references}: references are those of the dataset; remove the file, or --dataset.")
        result = _score_split(predictions, scoring, folder or Path("data") / str(dataset), dataset, split, protocol)
        title = f"{predictions.name} on {result['protocol']['dataset']} {split}, "
    if json:
        print_json(result)
        return
    print_scores(result, title)
    echo(*(f"note: {note}" for note in result.get("notes", [])))
    for name, remedy in result["provenance"].get("unavailable", {}).items():
        echo(f"{name} is unavailable: {remedy}.")


def _score_split(
    predictions: Path, scoring: Mapping[str, Any], folder: Path, dataset_name: str | None, split: str, protocol: str
) -> JsonDict:
    dataset = read_dataset(folder)
    if dataset_name is not None and dataset.name != dataset_name:
        raise DiffcapError(f"{folder}: holds {dataset.name}, not {dataset_name}; give its own --dataset or --folder.")
    id_protocol = word_id_protocol(dataset.name, dataset.pairs)  # settings of the protocol levir_cc, or None
    if protocol != "text" and (id_protocol is None or id_protocol.accuracy_only):
        supported = ", ".join(spec.name for spec in datasets().values() if spec.protocol)
        raise DiffcapError(
            f"{dataset.name} has no protocol {protocol}, only {supported} and your own datasets in Karpathy's form have; remove --protocol."
        )
    changes = dataset.info.get("changes")
    split_pairs = [pair for pair in dataset.pairs if pair.split == split]
    scored_pairs = take_changes([pair for pair in split_pairs if pair.captions], changes)  # multi: joins captions
    if not scored_pairs:
        raise DiffcapError(f"{dataset.name} has no {split} pair with a reference caption; choose another --split.")
    scored_ids, split_ids = [pair.id for pair in scored_pairs], [pair.id for pair in split_pairs]
    captions = read_other_predictions(predictions, scored_ids, split_ids, f"the {split} split of {dataset.name}")
    protocol_entries = {"dataset": dataset.name, "split": split, **dataset_protocol(dataset.info, changes)}
    provenance = {**_provenance(predictions=predictions), "manifest_sha256": dataset.info["manifest_sha256"]}
    id_scoring = None  # settings of further scores: accuracies, S*m (a mean of four metrics), metrics of word ids
    if id_protocol and protocol == "text":  # without the metrics that compare ids of words
        id_scoring = WordIdScoring(id_protocol.no_change, accuracy_only=id_protocol.accuracy_only)
    elif id_protocol:
        id_scoring = word_id_scoring(id_protocol, dataset.pairs)
    options: JsonDict = {"protocol": protocol_entries, "provenance": provenance, "id_scoring": id_scoring}
    return evaluate(captions, scored_pairs, **scoring, **options)


def _provenance(**files: Path) -> JsonDict:
    hashed_files = {name: {"file": str(path), "sha256": file_hash(path)} for name, path in files.items()}
    return {"diffcap": __version__, **hashed_files}
