"""Caption a split with a checkpoint and score the captions; or score how well a pre-trained model retrieves captions and pairs."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from diffcap import run_folder
from diffcap.checkpoints.hub_access import check_connection
from diffcap.records import file_hash, read_dataset, take_changes, write_json
from diffcap.run_folder import CHANGED, GROUPS, METRICS, PREDICTIONS, REFERENCES, SWAPPED, UNSCORED
from diffcap.utils.errors import DiffcapError


def evaluate(
    checkpoint: str,
    out: str,
    folder: str | None = None,
    features: str | None = None,
    split: Literal["test", "val", "train"] = "test",
    tokenizer: Literal["ptb", "raw"] | None = None,
    changes: Literal["single", "multi"] | None = None,
    metrics: list[str] | str | None = None,
    judge: str | None = None,
    embedding: str | None = None,
    batch_size: int = 128,
    beams: int = 1,
    length_penalty: float = 0.0,
    limit: int | None = None,
    devices: int = 1,
    accelerator: str = "auto",
    ensemble: str | None = None,
    task: Literal["captions", "retrieval", "swap"] = "captions",
    pair_to_text: Literal["pairs", "captions"] = "pairs",
    base: str | None = None,
    prompt: str | None = None,
    sentences: int = 1,
    max_length: int | None = None,
) -> None:
    """Caption every pair of a split, score the captions by the dataset's protocol, and print a table of the scores.

    With `task` retrieval, instead rank the captions of a split for each change pair, and the pairs for each caption.
    With `task` captions, predictions-unscored.json has the captions of the pairs without references, which are not scored.

    If metrics.json has scores with raw tokens (IDC-PCL on Birds-to-Words), metrics-ptb.json has the scores with PTB tokens. For the
    datasets of remote-sensing change captioning, "id_tokens" in metrics.json are the scores of the authors' evaluation programs, which
    compare ids of words. "unfinished" in metrics.json is the number of captions of maximum length without an end token.
    For a model that only answers with text, "usage" in metrics.json has the tokens and seconds.

    If some pairs have no change, changed.json has the probability of a change of each pair, and "change_probability" in metrics.json says
    how well it tells the two kinds of pairs apart.

    Args:
        checkpoint: best.ckpt of the finetune or reinforce stage; or folder or user/name of a vision-language model, or
            openai:MODEL@http://HOST/v1, whose answers are kept in `out` and not asked for again.
        out: Folder for predictions.json, references.json and metrics.json.
        folder: Folder of the dataset; by default data/<training dataset of the checkpoint>.
        features: Name of the feature store in `folder`; by default the one that the checkpoint was trained on.
        split: Split to evaluate.
        tokenizer: Tokenizer of the metrics; by default that of the scores that selected the checkpoint; ptb if they are of word ids.
        changes: Protocol of a dataset with several changes per pair (Spot-the-Diff). single: every sentence is a reference.
            multi: all sentences of a pair together are one reference. By default the protocol that the checkpoint was trained for.
        metrics: Names of the metrics; by default all of n-grams that this machine can compute. "judge" and "embedding" can be added.
        judge: Language model for --metrics judge: openai:MODEL@http://HOST/v1, or folder or user/name of a text model.
        embedding: Model of sentence-transformers for --metrics embedding: folder or user/name.
        batch_size: Number of pairs decoded at once; it does not change the captions.
        beams: Beam size; 1 is greedy decoding, as in the papers.
        length_penalty: The log-probability of a hypothesis is divided by its number of words to the power of this exponent.
        limit: Evaluate only this number of pairs, the first of the split.
        devices: Number of processes that decode.
        accelerator: cpu, gpu or auto.
        ensemble: More checkpoints with the same vocabulary, separated by commas; the probabilities of all are averaged at each
            word. Each reads the features that it was trained on, unless `features` is given.
        task: captions; swap, which also captions (after, before) for "reversibility" in metrics.json; or retrieval with the checkpoint
            of CLIP4IDC's pre-training.
        pair_to_text: With `task` retrieval, the items that are ranked for a pair. pairs: all pairs, each with the score of its best
            caption (authors' code); the right pair is first among equal scores. captions: all captions; the right one is last among equals.
        base: Folder of the vision-language model that was fine-tuned for a checkpoint, if the checkpoint names another place.
        prompt: Question to a vision-language model without training.
        sentences: Number of sentences of the answer to `prompt` that are used as the caption.
        max_length: Maximal number of tokens of the answer to `prompt`; by default 64, or 1,024 of a served model.
    """
    for name, value in {"batch_size": batch_size, "devices": devices, "limit": limit, "max_length": max_length}.items():
        if value is not None and value < 1:
            raise DiffcapError(f"--{name} is {value}; it must be at least 1.")
    sources = [checkpoint, *(ensemble.split(",") if ensemble else [])]
    check_connection([*sources, base])
    from diffcap.checkpoints.loading import fetch_if_on_hub, retrieval_function
    from diffcap.lit.stage_cli import hide_lightning_messages

    hide_lightning_messages()
    if task == "retrieval":
        caption_options: dict[str, Any] = {"tokenizer": tokenizer, "metrics": metrics, "ensemble": ensemble}
        caption_options |= {"judge": judge, "embedding": embedding}
        caption_options |= {"beams": beams != 1, "length_penalty": length_penalty}
        if unused_options := [option for option, value in caption_options.items() if value]:
            raise DiffcapError(f"--{unused_options[0]} has no effect on retrieval; remove it, or --task=retrieval.")
        retrieval_function(checkpoint)(
            checkpoint, out, folder, features, split, changes, batch_size, limit, devices, accelerator, pair_to_text
        )
        return
    from diffcap.change import Caption, change_probability, scored_sentences
    from diffcap.checkpoints.base_models import ZERO_SHOT, base_record, describe_origin, names_base_model
    from diffcap.checkpoints.combining import load_members
    from diffcap.checkpoints.reading import checkpoint_record
    from diffcap.evaluation.captions import unavailable_metrics
    from diffcap.evaluation.change import change_scores
    from diffcap.evaluation.coco import write_predictions, write_references
    from diffcap.evaluation.further import choose_metrics
    from diffcap.evaluation.protocols import dataset_protocol, groups_of, remarks
    from diffcap.evaluation.protocols import evaluate as score
    from diffcap.evaluation.remote_sensing import word_id_protocol, word_id_scoring
    from diffcap.evaluation.slots import ATTRIBUTES, check_reversible, reversibility
    from diffcap.evaluation.tables import metrics_table, print_scores, print_table
    from diffcap.lit.decoding import decode
    from diffcap.models.generation import check_search
    from diffcap.utils.provenance import provenance

    check_search(beams, length_penalty, "--beams")
    scoring = choose_metrics(metrics, f"{out}/", run_folder.is_main_process(), judge=judge, embedding=embedding)
    unavailable = unavailable_metrics(scoring["metrics"])
    if not set(scoring["metrics"]) - set(unavailable):
        raise DiffcapError(
            f"--metrics: {next(iter(unavailable.values()), 'the list is empty; omit the option for all metrics.')}"
        )
    member_paths = [source if names_base_model(source) else fetch_if_on_hub(source) for source in sources]
    run_folder.check_finished(member_paths)
    answer_options = {"sentences": sentences, **({"max_length": max_length} if max_length else {})}  # zero-shot
    first_member, *other_members = load_members(member_paths, base, prompt, **answer_options)
    if first_member.metadata["dataset"] is None and (folder is None or features is None):
        raise DiffcapError(
            f"{checkpoint}: was trained on no dataset; give --folder and --features (a store of pixels)."
        )
    dataset_folder = Path(folder or f"data/{first_member.metadata['dataset']}")
    dataset = read_dataset(dataset_folder)
    changes = changes or first_member.metadata.get("changes") or dataset.info.get("changes")
    split_pairs = [pair for pair in dataset.pairs if pair.split == split]
    pairs = take_changes(split_pairs[:limit], changes)  # multi: joins the captions of a pair to one
    if not pairs:
        raise DiffcapError(f"{dataset.name} has no {split} pairs; choose another --split.")
    swapped_pairs = []
    if task == "swap":
        check_reversible(pairs, dataset.name)
        # Line breaks separate the lines of a manifest, so that no other id has one.
        swapped_pairs = [replace(pair, id=f"{pair.id}\n", before=pair.images[1], after=pair.before) for pair in pairs]
    main_tokenizer = tokenizer or first_member.metadata["tokenizer"]
    protocol = {
        "dataset": dataset.name,
        "split": split,
        "beams": beams,
        "length_penalty": length_penalty,
        "limit": limit,
        **dataset_protocol(dataset.info, changes),
        **({"ensemble": len(member_paths)} if other_members else {}),
    }
    out_folder = Path(out)
    title_remarks = remarks(protocol) + (f"{changes} change, " if changes else "")  # such as "single change, "
    provenance_entries = provenance(
        method=first_member.metadata["method"],
        seed=first_member.metadata["seed"],
        step=first_member.metadata["step"],
        features=features or first_member.features["name"],
        **({"prompt": first_member.metadata["prompt"], **answer_options} if "prompt" in first_member.metadata else {}),
        manifest_sha256=dataset.info.get("manifest_sha256"),
        checkpoints=[
            base_record(member) if member.metadata["stage"] == ZERO_SHOT else checkpoint_record(path, out_folder)
            for member, path in zip([first_member, *other_members], member_paths)
        ],
    )
    if first_member.metadata["stage"] == ZERO_SHOT and run_folder.is_main_process():
        print(describe_origin(*(first_member.metadata[name] for name in ("base", "revision", "licence"))), flush=True)
    out_folder.mkdir(parents=True, exist_ok=True)
    feature_folder = dataset_folder / "features"
    has_both_kinds = len({pair.is_distractor for pair in pairs}) == 2  # pairs with a change, and without
    decoded = decode(
        first_member,
        [*pairs, *swapped_pairs],
        feature_folder / (features or first_member.features["name"]),
        batch_size,
        beams,
        length_penalty,
        devices=devices,
        accelerator=accelerator,
        answer_folder=out_folder,
        others=[(member, feature_folder / (features or member.features["name"])) for member in other_members],
        sentences=scored_sentences(first_member) if has_both_kinds else None,
    )
    if decoded is None:  # only rank 0 gets the captions and writes the files
        return
    captions = decoded.captions
    swapped_captions = {pair.id: captions.pop(other.id) for pair, other in zip(pairs, swapped_pairs)}
    changed = {}  # id -> probability of a change
    for pair in pairs if has_both_kinds else ():
        no_change = decoded.no_change.get(pair.id) if decoded.no_change else None
        caption = Caption(captions[pair.id], None, (), no_change)
        changed[pair.id] = change_probability(caption)
    # The old scores are deleted first, so that a killed process does not leave them next to new captions.
    for filename in (METRICS, *map(run_folder.metrics_filename, ("ptb", "raw")), UNSCORED, SWAPPED, CHANGED):
        (out_folder / filename).unlink(missing_ok=True)
    scored_pairs = [pair for pair in pairs if pair.captions]
    unscored_captions = {pair.id: captions.pop(pair.id) for pair in pairs if not pair.captions}
    if unscored_captions:
        unscored_file = out_folder / UNSCORED
        write_predictions(unscored_file, unscored_captions)
        print(f"{len(unscored_captions):,} of {len(pairs):,} pairs have no reference caption: see {unscored_file}")
    if not scored_pairs:
        raise DiffcapError(
            f"{dataset.name}: none of its {len(pairs):,} {split} pairs has a reference caption to score against."
        )
    num_unfinished = sum(id in decoded.unfinished for id in captions)
    if num_unfinished:
        print(f"{num_unfinished:,} of {len(captions):,} captions have no end token; they are scored as they are")
    write_predictions(out_folder / PREDICTIONS, captions)
    write_references(out_folder / REFERENCES, {pair.id: pair.captions for pair in scored_pairs})
    groups = groups_of(scored_pairs)  # "total" or a change type -> ids of its pairs
    write_json(out_folder / GROUPS, groups)
    entries: dict[str, Any] = {"unfinished": num_unfinished}
    if decoded.usage:
        entries["usage"] = decoded.usage
    if changed:
        write_json(out_folder / CHANGED, changed)
        if change_result := change_scores(changed, scored_pairs):
            entries["change_probability"] = change_result
    if swapped_captions:
        write_predictions(out_folder / SWAPPED, swapped_captions)
        entries["reversibility"] = reversibility(captions, swapped_captions, groups)
    provenance_entries["files"] = {name: file_hash(out_folder / name) for name in (PREDICTIONS, REFERENCES, GROUPS)}
    id_protocol = word_id_protocol(dataset.name, dataset.pairs)  # None for datasets without scores of word ids
    id_scoring = word_id_scoring(id_protocol, dataset.pairs, first_member.vocabulary) if id_protocol else None
    scoring |= {"protocol": protocol, "provenance": provenance_entries, "id_scoring": id_scoring}
    results = {}
    for tokenizer_name in dict.fromkeys([main_tokenizer, "ptb"]):
        results[tokenizer_name] = {**score(captions, scored_pairs, tokenizer_name, **scoring), **entries}
    for tokenizer_name, result in results.items():
        print_scores(result, f"{first_member.metadata['method']} on {dataset.name} {split}, {title_remarks}")
        if tokenizer_name != main_tokenizer:
            write_json(out_folder / run_folder.metrics_filename(tokenizer_name), result)
    main_result = results[main_tokenizer]
    for note in main_result.get("notes", []):
        print(f"note: {note}")
    if "slots" in main_result:  # shares of captions of `blocks` with the right change type, object, color, ...
        slots = main_result["slots"]
        shown_slots = {name: slots[name] for name in ("type", "object", "to", *ATTRIBUTES) if name in slots}
        print_table(metrics_table({"slots": shown_slots}, title="slot accuracy"))
    if "change_probability" in main_result:
        change_rows = {"P(changed)": main_result["change_probability"]}
        print_table(metrics_table(change_rows, title="probability of a change"))
    if "reversibility" in main_result:
        print_table(metrics_table(main_result["reversibility"], title="reversibility"))
    write_json(out_folder / METRICS, main_result)  # written last, because a folder with this file counts as complete
