"""Caption the pairs of a split with a trained captioner, on one device or several."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import RichProgressBar
from torch.utils.data import DataLoader, Dataset, Subset

from diffcap.checkpoints.combining import as_ensemble
from diffcap.checkpoints.loading import Checkpoint
from diffcap.data.pair_table import PairDataset, PairTable, identity_collate, maps_as_float
from diffcap.data.workers import explain_lost_workers, read_maps, worker_options
from diffcap.features.store import FeatureStore
from diffcap.lit.launch import compare_processes, launcher_options
from diffcap.lit.progress import LogProgress
from diffcap.lit.stage_cli import wrap_invalid_settings
from diffcap.losses.gather import world_size
from diffcap.models.answering import AnsweringModel
from diffcap.models.generation import NAN_PROBABILITIES, beam_search, greedy, token_log_probabilities
from diffcap.record import digest
from diffcap.records import ChangePair, file_hash, read_complete_lines
from diffcap.utils.errors import DiffcapError


class DecodedSplit(NamedTuple):
    """The captions of a split."""

    captions: dict[str, str]  # id of a pair -> its caption
    unfinished: set[str]  # ids of the pairs whose captions were cut at `max_length`, so they have no end token
    usage: dict[str, Any] | None = None  # tokens and seconds, if the model only answers with text
    # id of a pair -> probability that nothing changed, as the method or the probabilities of sentences tell it; None: see `decode`
    no_change: dict[str, float] | None = None


class EnsembleDataset(Dataset):
    """Pairs with the features of each ensemble member. "before" and "after" of a batch are lists with feature maps (B, ...) per member."""

    def __init__(self, tables: Sequence[PairTable]) -> None:
        self.datasets = [PairDataset(table) for table in tables]

    def __len__(self) -> int:
        return len(self.datasets[0])

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        batches = [dataset.__getitems__(indices) for dataset in self.datasets]
        maps = {side: [batch[side] for batch in batches] for side in ("before", "after")}
        return {"id": batches[0]["id"], **maps}


class Decoding(pl.LightningModule):
    """A module that captions pairs in `trainer.predict`.

    After the prediction, every rank has the captions of all pairs in `captions` (id -> caption), in `unfinished` the ids of the pairs
    whose captions were cut at `max_length`, and with `sentences` the probabilities `no_change` of `DecodedSplit`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        beams: int = 1,
        length_penalty: float = 0.0,
        sentences: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.captioner = checkpoint.captioner
        self.checkpoint = checkpoint
        self.beams = beams
        self.length_penalty = length_penalty
        self.captions: dict[str, str] = {}
        self.unfinished: set[str] = set()
        self.no_change: dict[str, float] | None = None if sentences is None else {}
        self.sentence_ids = []  # of the sentences without an unknown word, (T,) each
        for sentence in sentences or ():
            ids = checkpoint.vocabulary.encode(sentence, checkpoint.max_length)
            if checkpoint.vocabulary.unk not in ids:
                self.sentence_ids.append(torch.tensor(ids))

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Convert float16 feature maps to float32 on the device, because float16 is copied there faster."""
        return maps_as_float(batch)

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Decode a batch of {"id", "before", "after"}."""
        memory = self.captioner.encode(batch["before"], batch["after"])
        if self.beams == 1:
            tokens = greedy(self.captioner, memory, self.checkpoint.max_length)
        else:
            options = self.checkpoint.max_length, self.beams, self.length_penalty
            tokens = beam_search(self.captioner, memory, *options)[:, 0]
        tokens = tokens.cpu()  # waits for the device; except in the decoding, nothing else waits
        self.captions.update(zip(batch["id"], map(self.checkpoint.vocabulary.decode, tokens.tolist())))
        has_end = self.captioner.is_eos(tokens[:, 1:]).any(1).tolist()
        self.unfinished.update(pair_id for pair_id, ended in zip(batch["id"], has_end) if not ended)
        if self.no_change is None:
            return
        probabilities = self.captioner.nothing_changed(batch["before"], batch["after"])
        if probabilities is None:  # the method has no estimate
            probabilities = torch.zeros(len(batch["id"]), device=self.device)
            for ids in self.sentence_ids:
                sentences = ids.to(self.device).expand(len(probabilities), -1)
                scores = token_log_probabilities(self.captioner, memory, sentences)
                probabilities += scores.sum(1).exp()
        values = probabilities.clamp(max=1).tolist()
        if any(map(math.isnan, values)):
            raise DiffcapError(NAN_PROBABILITIES)
        self.no_change.update(zip(batch["id"], values))

    def on_predict_epoch_end(self) -> None:
        """Gather the results of all ranks. The sampler repeats pairs until all ranks have the same number; each pair is kept once."""
        if world_size() > 1:
            gathered: list[Any] = [None] * world_size()
            dist.all_gather_object(gathered, (self.captions, self.unfinished, self.no_change or {}))
            self.captions = {key: caption for captions, _, _ in gathered for key, caption in captions.items()}
            self.unfinished = {pair_id for _, unfinished, _ in gathered for pair_id in unfinished}
            if self.no_change is not None:
                for _, _, probabilities in gathered:
                    self.no_change.update(probabilities)


def evaluation_trainer(devices: int, accelerator: str) -> pl.Trainer:
    """Return a trainer without logs and checkpoints. It shows a progress bar if stderr is a terminal, else prints a line a minute."""
    options = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", **launcher_options(devices)}
    has_terminal = sys.stderr.isatty()
    progress = RichProgressBar(console_kwargs={"stderr": True}) if has_terminal else LogProgress("decoding")
    with wrap_invalid_settings(TypeError):
        return pl.Trainer(
            **options,
            accelerator=accelerator,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=has_terminal,
            enable_model_summary=False,
            callbacks=[progress],
        )


def _open_store(folder: Path, member: Checkpoint) -> FeatureStore:
    # shape is None: an untrained vision-language model reads any images
    store = FeatureStore.open(folder, member.features if member.features["shape"] else None)
    if store.meta.get("dtype") != member.features["dtype"]:  # uint8 for pixels
        raise DiffcapError(f"{folder}: contains no pixels, which this captioner reads; give pixels as --features.")
    return store


def _answer_split(
    captioner: Any, settings: Any, pairs: Sequence[ChangePair], store: FeatureStore, folder: Path, size: int
) -> DecodedSplit:
    """Caption pairs, `size` at once, with a `PairCaptioner` that only answers. answers-<hash>.jsonl keeps the answers for the next run.

    The hash is of `settings`, which are the model and its prompt, and of the images.
    """
    from diffcap.utils.progress import progress_bar

    images = [file_hash(store.folder / name) for name in ("meta.json", "index.json")]
    file = folder / f"answers-{digest(settings, images)}.jsonl"
    rows = {row["id"]: row for row in read_complete_lines(file)}
    pending = [pair for pair in pairs if pair.id not in rows]
    maps = (read_maps(store, store.rows(pair.images)).permute(0, 2, 3, 1).numpy() for pair in pending)
    captions = captioner.batch(((before, after) for before, after in maps), batch_size=size, errors="return")
    failures = []
    with file.open("a", encoding="utf-8") as output, progress_bar("asking", len(pairs), len(rows)) as advance:
        for pair, caption in zip(pending, captions):
            advance(1)
            if isinstance(caption, DiffcapError):
                failures.append(f"{pair.id}: {caption}")
            else:
                rows[pair.id] = {"id": pair.id, "caption": caption.text, **caption.answer._asdict()}
                output.write(json.dumps(rows[pair.id]) + "\n")
                output.flush()
    if failures:
        raise DiffcapError(
            f"{len(failures):,} of {len(pairs):,} pairs have no answer (first: {failures[0].rstrip('.')}); run the same command again. "
            f"The other answers are kept in {file}."
        )
    found = [rows[pair.id] for pair in pairs]
    usage = {name: sum(row[name] for row in found) for name in ("prompt_tokens", "answer_tokens", "seconds")}
    is_cut = {row["id"] for row in found if row["is_cut"]}
    return DecodedSplit({row["id"]: row["caption"] for row in found}, is_cut, usage)


def decode(
    checkpoint: Checkpoint,
    pairs: Sequence[ChangePair],
    feature_folder: Path,
    batch_size: int = 128,
    beams: int = 1,
    length_penalty: float = 0.0,
    devices: int = 1,
    accelerator: str = "auto",
    others: Sequence[tuple[Checkpoint, Path]] = (),
    answer_folder: Path | None = None,
    sentences: Sequence[str] | None = None,
) -> DecodedSplit | None:
    """Caption pairs whose features are in a folder. The first rank returns the captions, and the other ranks return None.

    `others` are further members of an ensemble with the same vocabulary, each with the folder of its features. The smallest
    `max_length` of all members limits the captions. `batch_size` is per rank. With `beams` = 1, decoding is greedy, else by beam search.
    A model that only answers with text is asked by one process, and its answers are kept in `answer_folder`. With `sentences`, which say
    that nothing changed, the result of other models has `no_change`.
    """
    if isinstance(checkpoint.captioner, AnsweringModel):
        if devices > 1:
            raise DiffcapError(
                f"--devices is {devices}; {checkpoint.metadata['base']} is asked by one process: leave it out."
            )
        from diffcap.pair_captioner import PairCaptioner

        captioner = PairCaptioner(checkpoint, "cpu" if accelerator == "cpu" else "auto")
        captioner.check_options(beams, length_penalty)
        settings, store = checkpoint.captioner.hyperparameters, _open_store(feature_folder, checkpoint)
        return _answer_split(captioner, settings, pairs, store, answer_folder or feature_folder, batch_size)
    tables = []
    members = [(checkpoint, feature_folder), *others]
    for member, folder in members:
        tables.append(PairTable(pairs, _open_store(folder, member), member.vocabulary, member.max_length))
    pair_dataset: Dataset = EnsembleDataset(tables) if others else PairDataset(tables[0])
    if others:
        checkpoint = as_ensemble([member for member, _ in members])
    trainer = evaluation_trainer(devices, accelerator)
    compare_processes("decodes")
    module = Decoding(checkpoint, beams, length_penalty, sentences)
    workers = worker_options(None, trainer)
    # Every rank needs a pair, so a few pairs may be repeated; the captions of a repeated pair are equal.
    rows = [row % len(pairs) for row in range(max(len(pairs), trainer.world_size))]
    loader = DataLoader(Subset(pair_dataset, rows), batch_size, collate_fn=identity_collate, **workers)
    with explain_lost_workers():
        trainer.predict(module, loader, return_predictions=False)
    if not trainer.is_global_zero:
        return None
    captions = {pair.id: module.captions[pair.id] for pair in pairs}
    return DecodedSplit(captions, module.unfinished, no_change=module.no_change)
