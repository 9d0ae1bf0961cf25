"""A method beside its papers' ablations on one dataset: every row by its own make targets, then the table."""

from pathlib import Path

from diffcap.chain import Make, Road, compare, side_by_side
from diffcap.console import run
from diffcap.errors import DiffcapError

# In the order and the words of the papers' tables; each is a file of configs/method/<method>/ablation.
ROWS = {
    "scorer": {
        "subtraction": "Subtraction",
        "rr": "RR",
        "rr_cbr": "RR+CBR",
        "scorer": "SCORER",
        "scorer_cbr": "SCORER+CBR",
    },
    "dirl": {
        "transformer": "Transformer",
        "dirl": "DIRL",
        "transformer_ccr": "Transformer+CCR",
        "dirl_ccr": "DIRL+CCR",
        "dirl_diagonal": "DIRL, diagonal term",
        "dirl_off_diagonal": "DIRL, off-diagonal term",
    },
    "clip4idc": {
        "ft1": "FT1",
        "ft2": "FT2",
        "unadapted": "CLIP4IDC without adaptation",
        "clip4idc": "CLIP4IDC",
    },
}
# Those with a pre-training stage, whose length is that of the method's settings.
PRETRAINED = {"clip4idc"}


def ablation(
    method: str,
    dataset: str,
    folder: str,
    features: str,
    backbone: str | None = None,
    seeds: str = "1234",
    steps: int | None = None,
    rows: str | None = None,
    out: str | None = None,
) -> None:
    """Train and score every row at equal steps, and write the table: BLEU-4, METEOR, ROUGE-L, CIDEr-D, by change type.

    Args:
        method: scorer, dirl or clip4idc.
        dataset: name; its manifest and features are made if they are missing.
        folder: data/<dataset>. features: name of the feature store in it. backbone: what makes them, where it is called otherwise.
        seeds: of the training, separated by commas; several give means and standard deviations.
        steps: of every row's captioning; the method's settings by default.
        rows: only these, separated by commas, as the files of configs/method/<method>/ablation are called.
        out: folder of the runs and of the table; runs/<dataset>/<method>-ablation by default.

    Raises:
        DiffcapError: an unknown method or row, or a stage failed.
    """
    if method not in ROWS:
        raise DiffcapError(f"METHOD={method} has no ablations here; choose one of {', '.join(ROWS)}.")
    chosen = rows.split(",") if rows else list(ROWS[method])
    unknown = [row for row in chosen if row not in ROWS[method]]
    if unknown:
        raise DiffcapError(f"{method} has no ablation {unknown[0]!r}; choose among {', '.join(ROWS[method])}.")
    place = Path(out or f"runs/{dataset}/{method}-ablation")
    make = Make(
        f"FOLDER={folder}",
        f"DATASET={dataset}",
        f"BACKBONE={backbone or features}",
        f"FEATURES={features}",
        "LOGGER=none",
    )
    make("the features", "extract")
    make = Make(*make.variables, "DATA=")  # the manifest is there now; its files need not be looked at for every row
    table = {
        ROWS[method][row]: [
            Road(
                f"{ROWS[method][row]}, seed {seed}",
                place / f"{row}-{seed}",
                method,
                int(seed),
                steps,
                None if row in PRETRAINED else 0,
                (f"ABLATION={row}",),
            )
            for seed in seeds.split(",")
        ]
        for row in chosen
    }
    # Seed by seed, so that an interrupted command leaves whole tables of fewer seeds.
    side_by_side(make, [[road] for roads in zip(*table.values()) for road in roads])
    compare(Path(folder), features, table, place / "report", "--pictures", "0", "--attention", "0")


if __name__ == "__main__":
    run(ablation)
