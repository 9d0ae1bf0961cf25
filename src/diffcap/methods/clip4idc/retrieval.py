"""Retrieval of image pairs by captions and of captions by image pairs: recall and mean rank (CLIP4IDC, README).

Letters: P pairs, C captions, E embedding width.
"""

from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

import diffcap
from diffcap.checkpoints.loading import build_pretraining
from diffcap.checkpoints.reading import checkpoint_record, read_checkpoint, remedy
from diffcap.data.pair_table import PairTable, RetrievalDataset, identity_collate
from diffcap.data.workers import explain_lost_workers, worker_options
from diffcap.evaluation.protocols import dataset_protocol
from diffcap.evaluation.tables import metrics_table, print_table
from diffcap.features.store import FeatureStore
from diffcap.lit.decoding import evaluation_trainer
from diffcap.records import read_dataset, take_changes, write_json
from diffcap.run_folder import METRICS, check_finished
from diffcap.text.vocabularies import vocabulary_of
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.provenance import provenance

DIRECTIONS = {"t2p": "caption to pair", "p2t": "pair to caption"}
RECALL_KS = (1, 5, 10)
PairToText = Literal["captions", "pairs"]


class PairRetrieval(Metric):
    """R@1, R@5, R@10 and mean rank in both directions, by cosine similarity.

    "t2p": the rank of each caption's pair among all pairs. If similarities are equal, the worst rank counts, so equal embeddings
    and NaN get the worst score. "p2t" has two definitions, see `pair_to_text`.

    Args:
        pair_to_text: what "p2t" ranks for each pair. "captions": the pair's best caption among all captions; of equal
            similarities, the worst rank counts. "pairs": the pair itself among all pairs, by the greatest similarity of any of
            their captions; of equal similarities, the best rank counts, as for captions that several pairs share (CLIP4IDC,
            authors' code).

    Example:
        >>> metric = PairRetrieval()
        >>> pairs, captions = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.9, 0.1], [0.8, 0.6]])
        >>> metric.update(pairs, torch.tensor([0, 1]), captions, torch.tensor([0, 1]), owners=torch.tensor([0, 1]))
        >>> scores = metric.compute()
        >>> scores["t2p_R@1"].item(), scores["t2p_mean_rank"].item(), scores["p2t_R@1"].item()
        (0.5, 1.5, 1.0)
    """

    full_state_update = False
    higher_is_better = None
    pairs: list[Tensor]
    pair_numbers: list[Tensor]
    texts: list[Tensor]
    text_numbers: list[Tensor]
    owners: list[Tensor]

    def __init__(self, pair_to_text: PairToText = "captions", **options: Any) -> None:
        super().__init__(**options)
        self.pair_to_text = pair_to_text
        for name in ("pairs", "pair_numbers", "texts", "text_numbers", "owners"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, pairs: Tensor, numbers: Tensor, texts: Tensor, text_numbers: Tensor, owners: Tensor) -> None:
        """Add embeddings of pairs (P, E) and captions (C, E), their numbers in the dataset (P,), (C,), and each caption's pair (C,)."""
        self.pairs.append(F.normalize(pairs.float(), dim=-1))
        self.pair_numbers.append(numbers)
        self.texts.append(F.normalize(texts.float(), dim=-1))
        self.text_numbers.append(text_numbers)
        self.owners.append(owners)

    def compute(self) -> dict[str, Tensor]:
        """Return `t2p_R@1`, `t2p_R@5`, `t2p_R@10` (fractions), `t2p_mean_rank` (1 is best), and the same for `p2t`.

        A pair or caption counts once if several processes added it (Lightning repeats some to give all processes equally many).
        """
        first, numbers = _first_occurrences(dim_zero_cat(self.pair_numbers))
        pairs = dim_zero_cat(self.pairs)[first]
        first, _ = _first_occurrences(dim_zero_cat(self.text_numbers))
        texts = dim_zero_cat(self.texts)[first]
        owners = dim_zero_cat(self.owners)[first]
        similarity = texts @ pairs.T  # (C, P)
        matches = owners[:, None] == numbers  # (C, P)
        of_matches = similarity.masked_fill(~matches, float("-inf"))
        ranks = {  # 1 + number of non-matching candidates that are not less similar
            "t2p": 1 + (~(similarity < of_matches.amax(1, keepdim=True)) & ~matches).sum(1),
            "p2t": _rank_among_pairs(similarity, matches)
            if self.pair_to_text == "pairs"
            else 1 + (~(similarity < of_matches.amax(0)) & ~matches).sum(0),
        }
        scores: dict[str, Tensor] = {}
        for direction, rank in ranks.items():
            scores |= {f"{direction}_R@{k}": (rank <= k).float().mean() for k in RECALL_KS}
            scores[f"{direction}_mean_rank"] = rank.float().mean()
        return scores


def _rank_among_pairs(similarity: Tensor, matches: Tensor) -> Tensor:
    """Rank (P,) of each pair among all pairs by their best captions; of equal similarities, the best rank; NaN has the last rank.

    `similarity` is that of captions and pairs, (C, P), and `matches` says which pair a caption belongs to, (C, P).
    """
    pairs = similarity.shape[1]
    owner = matches.int().argmax(1)  # (C,)
    best = similarity.new_full((pairs, pairs), float("-inf"))
    best = best.scatter_reduce(0, owner[:, None].expand_as(similarity), similarity, "amax")  # (P of the captions, P)
    own = best.diagonal()
    return torch.where(own.isnan(), pairs, 1 + (best > own).sum(0))


def _first_occurrences(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the first occurrence of each distinct number, and the distinct numbers."""
    unique, inverse = numbers.unique(return_inverse=True)
    first = torch.full((len(unique),), len(numbers), device=numbers.device)
    first = first.scatter_reduce(0, inverse, torch.arange(len(numbers), device=numbers.device), "amin")
    return first, unique


def add_to_metric(metric: PairRetrieval, model: Any, batch: dict[str, Any]) -> None:
    """Add the embeddings of a batch's pairs and of all their captions; `model` is a `CLIP4IDCAdaptation`."""
    pairs = model.pair(batch["before"], batch["after"])
    texts = model.words(batch["texts"])
    metric.update(pairs, batch["number"], texts, batch["text_number"], batch["text_owner"])


class Retrieval(pl.LightningModule):
    """`trainer.test` over pairs with all their captions; afterwards `scores` holds the recalls and mean ranks."""

    def __init__(self, model: Any, pair_to_text: PairToText) -> None:
        super().__init__()
        self.model, self.metric = model, PairRetrieval(pair_to_text)
        self.scores: dict[str, float] = {}

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Add the vectors of the pairs and of all their captions to the metric."""
        add_to_metric(self.metric, self.model, batch)

    def on_test_epoch_end(self) -> None:
        """Compute the scores over the pairs of all ranks."""
        self.scores = {name: float(value) for name, value in self.metric.compute().items()}


def evaluate_retrieval(
    checkpoint: str,
    out: str,
    folder: str | None,
    features: str | None,
    split: Literal["test", "val", "train"],
    changes: Literal["single", "multi"] | None,
    batch_size: int,
    limit: int | None,
    devices: int,
    accelerator: str,
    pair_to_text: PairToText,
) -> None:
    """Compute recall and mean rank in both directions, print them, and write them to metrics.json.

    `checkpoint` is best.ckpt of the pre-training; `limit` counts change pairs. The other arguments are those of `evaluate`.
    """
    check_finished([checkpoint])
    state = read_checkpoint(checkpoint)
    metadata = state["diffcap"]
    with wrap_errors(checkpoint, f"diffcap {diffcap.__version__} cannot build its model", remedy(Path(checkpoint))):
        vocabulary = vocabulary_of(metadata["words"], metadata["vocabulary_layout"])
        module = Retrieval(build_pretraining(state).eval(), pair_to_text)
    place = Path(folder or f"data/{metadata['dataset']}")
    target = Path(out)
    dataset = read_dataset(place)
    changes = changes or metadata.get("changes") or dataset.info.get("changes")
    pairs = [
        pair
        for pair in take_changes([pair for pair in dataset.pairs if pair.split == split], changes)
        if pair.captions and not pair.is_distractor
    ][:limit]
    if not pairs:
        raise DiffcapError(f"{dataset.name} has no {split} change pair with a caption; choose another --split.")
    name = features or metadata["features"]["name"]
    store = FeatureStore.open(place / "features" / name, metadata["features"])
    table = PairTable(pairs, store, vocabulary, metadata["max_length"])
    trainer = evaluation_trainer(devices, accelerator)
    loader = DataLoader(
        RetrievalDataset(table), batch_size, collate_fn=identity_collate, **worker_options(None, trainer)
    )
    with explain_lost_workers():
        trainer.test(module, loader, verbose=False)
    if not trainer.is_global_zero:  # rank 0 writes
        return
    scores = module.scores
    captions = sum(len(pair.captions) for pair in pairs)
    notes = provenance(
        method=metadata["method"],
        seed=metadata["seed"],
        step=state["global_step"],
        features=name,
        manifest_sha256=dataset.info.get("manifest_sha256"),
        checkpoints=[checkpoint_record(checkpoint, target)],
    )
    protocol = {
        "dataset": dataset.name,
        "split": split,
        "limit": limit,
        **({"changes": changes} if changes else {}),
        **dataset_protocol(dataset.info),
        "pairs": len(pairs),
        "captions": captions,
        "pair_to_text": pair_to_text,
    }
    target.mkdir(parents=True, exist_ok=True)
    rows = {
        title: {f"R@{k}": scores[f"{direction}_R@{k}"] for k in RECALL_KS} for direction, title in DIRECTIONS.items()
    }
    title = f"retrieval on {dataset.name} {split}, {len(pairs):,} change pairs, {captions:,} captions"
    print_table(metrics_table(rows, title=title))
    ranks = ", ".join(f"{title} {scores[f'{direction}_mean_rank']:.1f}" for direction, title in DIRECTIONS.items())
    print(f"mean rank: {ranks}")
    write_json(target / METRICS, {"retrieval": scores, "protocol": protocol, "provenance": notes})
