"""`diffcap caption pairs.parquet --out captions/`: a Parquet table of pairs, captioned by one process, several jobs or a Ray cluster."""

import json
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from diffcap.commands.caption_parts import Job, Part, caption_part, list_files, list_names, split, write_file
from diffcap.commands.model import load_model
from diffcap.utils.console import echo, parse_shard
from diffcap.utils.cores import MAX_THREADS, available_cores
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.progress import progress_bar

MIN_PART_SIZE, MAX_PARTS = 1_000, 10_000
MAX_TRIES = 3  # for a part whose worker is lost
Result = tuple[int, str]  # (number of pairs of a part, ""), or (0, why the part is not done)


def caption_table(
    table: str,
    out: Sequence[str] | None,
    engine: str | None,
    shard: str | None,
    part_size: int | None,
    model_options: Mapping[str, Any],
    beam: int,
    length_penalty: float,
    batch_size: int,
) -> None:
    """Caption the pairs of a table with the arguments of `caption`.

    `model_options` has the values of --checkpoint, --device, --backbone_weights, --base and --prompt.
    """
    if not out or len(out) > 1 or out[0].endswith((".csv", ".jsonl", ".parquet")) or Path(out[0]).is_file():
        given = " ".join(f"--out {name}" for name in out) if out else "--out is missing"
        raise DiffcapError(f"{given}: a Parquet table is captioned into a folder; give one, such as --out captions.")
    folder, source = (path if "://" in path else os.path.realpath(path) for path in (out[0].rstrip("/"), table))
    if f"{folder}/".startswith(f"{source.rstrip('/')}/"):
        raise DiffcapError(f"--out {out[0]}: is in the folder of the table, {table}; give a folder outside it.")
    if part_size is not None and part_size < 1:
        raise DiffcapError(f"--part is {part_size}; it must be at least 1.")
    shard_index, num_shards = parse_shard("--shard", shard or "0/1")
    job = Job(folder, beam, length_penalty, batch_size)
    files = list_files(table)
    # The workers of Ray load the captioner themselves, and use the GPUs. Then this process only needs the hash of the weights.
    options = {**model_options, "device": "cpu"} if engine else model_options
    captioner = load_model("blocks", options, beam, length_penalty)
    min_size = batch_size if captioner.only_answers else MIN_PART_SIZE  # an interruption loses a part's answers
    part_size = part_size or max(min_size, -(-sum(file.rows for file in files) // MAX_PARTS))
    parts = split(files, part_size)[shard_index::num_shards]
    settings = {
        "checkpoint": captioner.weights_sha256(),
        "prompt": model_options["prompt"],
        "beam": beam,
        "length_penalty": length_penalty,
        "batch_size": batch_size,
        "part": part_size,
        "files": [[PurePosixPath(file.path).name, file.size, file.rows] for file in files],
    }
    names = _begin(job.out, settings)
    pending = [part for part in parts if part.name not in names]
    num_pairs, num_pending = (sum(part.size for part in some) for some in (parts, pending))
    results: Iterator[Result]
    if engine and pending:
        results = _run_on_ray(job, pending, model_options, settings["checkpoint"])
    else:
        job = replace(job, threads=min(MAX_THREADS, available_cores()))
        results = ((sum(caption_part(captioner, job, part)), "") for part in pending)
    reason = "the processes that captioned them have ended"
    with progress_bar("captioning", num_pairs, num_pairs - num_pending) as advance:
        for size, error in results:
            advance(size)
            reason = error.rstrip(". ") or reason
    names = list_names(job.out)
    earlier = f", {num_pairs - num_pending:,} of them earlier" if num_pairs > num_pending else ""
    num_done = sum(part.size for part in parts if part.name in names)
    echo(f"{num_done:,} of {num_pairs:,} pairs are done{earlier}; written to {job.out}")
    if missing := [str(part.number) for part in parts if part.name not in names]:
        numbers = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise DiffcapError(f"{len(missing):,} parts are missing ({numbers}): {reason}; run the same command again.")
    failed_folder = f"{job.out}/failed"
    if failed_names := {part.name for part in parts} & list_names(failed_folder):
        failed = [file for file in list_files(failed_folder) if PurePosixPath(file.path).name in failed_names]
        raise DiffcapError(
            f"{sum(file.rows for file in failed):,} pairs could not be captioned; {failed_folder} has their errors, and the others are "
            f"captioned. To try them again: diffcap caption {failed_folder} --out FOLDER."
        )


def _begin(out: str, settings: Mapping[str, Any]) -> set[str]:
    """Write the settings into `out`/job.json, or check that they are equal to those there. Return the names of the files in `out`."""
    names = list_names(out)
    if "job.json" not in names:
        if any(name.startswith("part-") for name in names):
            raise DiffcapError(f"{out}: has no job.json, so its parts are not of this command; give another --out.")
        write_file(f"{out}/job.json", json.dumps(settings, indent=1).encode())
        return names
    with wrap_errors(f"{out}/job.json", "cannot be read", "give another --out"), fsspec.open(f"{out}/job.json") as file:
        earlier = json.load(file)
    for name, value in settings.items():
        if earlier.get(name) != value:
            values = f"{name} {earlier.get(name)}, now {value}"
            values = "another table, or its files have changed" if name == "files" else values
            raise DiffcapError(f"{out}: was begun with {values}; give another --out.")
    return names


class RayWorker:
    """A process of Ray, which loads the captioner once and captions a part per call.

    Args:
        parts: all parts; a call gets an index of this list, so that Ray stores only numbers.
        weights: hash of the weights that the main process has loaded.
    """

    def __init__(self, job: Job, parts: Sequence[Part], model_options: Mapping[str, Any], weights: str) -> None:
        from diffcap.pair_captioner import load_captioner

        self.job, self.parts = job, parts
        options = dict(model_options)
        self.captioner = load_captioner(options.pop("checkpoint"), **options)
        if self.captioner.weights_sha256() != weights:
            raise DiffcapError("the checkpoint differs from that of the command; copy the same file to every host.")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Caption a part. An error is returned and not raised, so that the other parts are captioned."""
        part = self.parts[int(batch["id"][0])]
        try:
            return {"size": [sum(caption_part(self.captioner, self.job, part))], "error": [""]}
        except Exception as error:
            return {"size": [0], "error": [f"{socket.gethostname()}: {str(error) or type(error).__name__}"]}


def _absolute(value: Any) -> Any:
    """Make existing paths absolute, because the workers of Ray may run in another folder. Other values stay the same."""
    if isinstance(value, list):
        return [_absolute(path) for path in value]
    return str(Path(value).absolute()) if value and Path(value).exists() else value


def _run_on_ray(job: Job, parts: Sequence[Part], model_options: Mapping[str, Any], weights: str) -> Iterator[Result]:
    """Caption parts on the Ray cluster at RAY_ADDRESS, else on this machine. A part is left out if its process ends three times."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports its use on the internet
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's default 15, workers get no time on a busy machine
    try:
        import ray.data
    except ModuleNotFoundError:
        raise DiffcapError("--engine ray: Ray is not installed; run: pip install 'diffcap[ray]'.") from None
    warnings.filterwarnings("ignore", category=ray.util.annotations.RayDeprecationWarning)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    paths = {name: _absolute(model_options[name]) for name in ("checkpoint", "base", "backbone_weights")}
    with wrap_errors("--engine ray", "Ray cannot be started or reached", "check RAY_ADDRESS"):
        session = ray.init(log_to_driver=False, logging_level=logging.ERROR)
    with session:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # an error in one part does not stop the others
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpu_nodes = [node for node in nodes if node.get("GPU") and model_options["device"] != "cpu"]
        num_workers = int(sum(node["GPU"] for node in gpu_nodes) or sum(node.get("CPU", 0) for node in nodes))
        cores = min((int(node.get("CPU", 0) // node["GPU"]) for node in gpu_nodes), default=1)  # of each worker
        job = replace(job, threads=max(1, min(MAX_THREADS, cores)))
        # Ray's own retries are used up within a second after the loss of a host, before Ray notices the loss.
        for _ in range(MAX_TRIES):
            names = list_names(job.out)
            if not (missing := [part for part in parts if part.name not in names]):
                return
            # Not `ray.data.range`: it computes its rows in tasks, which never start if the workers have all cores.
            indices = ray.data.from_items(
                [{"id": index} for index in range(len(missing))], override_num_blocks=len(missing)
            )
            rows = indices.map_batches(
                RayWorker,
                batch_size=1,
                fn_constructor_args=(job, missing, {**model_options, **paths}, weights),
                # A worker gets one part at a time, so that a part that ends its process takes no other part with it.
                compute=ray.data.ActorPoolStrategy(
                    min_size=1, max_size=max(1, num_workers), max_tasks_in_flight_per_actor=1
                ),
                num_cpus=max(1, cores),
                num_gpus=1 if gpu_nodes else 0,
                ray_remote_args_fn=lambda: {"max_task_retries": 0},
            )
            try:
                for row in rows.iter_rows():
                    yield row["size"], row["error"]
            except ray.exceptions.RayError as error:
                host = re.search(r"ip=([\w.:]+)", str(error))
                where = host[1] if host else "a worker of Ray"
                _, is_sentence, sentence = str(error).rpartition(f"{DiffcapError.__name__}: ")
                if is_sentence:  # the worker cannot load the captioner
                    raise DiffcapError(f"{where}: {sentence.strip()}") from None
                cause = (str(error).strip() or type(error).__name__).splitlines()[-1]  # the last line of a traceback
                yield 0, f"{where}: {cause.strip():.200}"
