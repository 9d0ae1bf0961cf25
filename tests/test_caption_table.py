"""`diffcap caption pairs.parquet --out captions/`: parts, shards, Ray, failures and continued commands."""
# ruff: noqa: F811  the fixture of the tests of pairs

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.commands import environment
from tests.test_caption_command import caption, checkpoint  # noqa: F401
from tests.test_pair_captioner import noise, reweighted

from diffcap.commands import caption_parts, caption_table
from diffcap.commands.caption_parts import fetch, list_files, read_rows, split
from diffcap.utils.errors import DiffcapError

FAILED = {1: "missing.png", 4: "", 9: "text.png"}  # row -> what its image after is


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 11 pairs in row groups of 4, three of them without an image after."""
    folder = tmp_path_factory.mktemp("table")
    for number in range(4):
        noise(number).save(folder / f"{number}.png")
    (folder / "text.png").write_text("not a picture")
    rows = [{"before": f"{n % 4}.png", "after": FAILED.get(n, f"{n % 3}.png"), "id": f"é{n}"} for n in range(11)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet", row_group_size=4)
    return folder / "pairs.parquet"


@pytest.fixture(scope="module")
def whole(table: Path, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The captions of one process in parts of 3 pairs."""
    out = tmp_path_factory.mktemp("whole") / "captions"
    message = str(caption(*words(table, out, checkpoint)))
    assert message.startswith("error: 3 pairs could not be captioned; ") and f"diffcap caption {out}/failed" in message
    return out


def words(table: Path | str, out: Path | str, checkpoint: str, *options: str) -> list[str]:
    size = ("--part", "3", "--batch_size", "2")
    return [str(table), "--out", str(out), "--checkpoint", checkpoint, *size, *options]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_each_pair_has_a_caption_or_an_error(whole: Path, table: Path, checkpoint: str, tmp_path: Path) -> None:
    assert sorted(path.name for path in whole.iterdir()) == [
        *("failed", "job.json"),
        *(f"part-{number:08d}.parquet" for number in range(4)),
    ]
    captioned = pq.read_table(whole, ignore_prefixes=["job", "failed"]).to_pylist()
    failed = pq.read_table(whole / "failed").to_pylist()
    assert [row["row"] for row in failed] == list(FAILED) and len(captioned) == 8
    for row, reason in zip(failed, ("file not found", "the path of an image is missing", "a text file"), strict=True):
        assert reason in row["error"]
    assert all(row["id"] == f"é{row['row']}" and row["caption"] and row["words"] for row in captioned)
    noise(9).save(tmp_path / "new.png")
    rows = [{**row, "after": str(tmp_path / "new.png")} for row in failed]
    (tmp_path / "again").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "again/part-0.parquet")
    assert caption(*words(tmp_path / "again", tmp_path / "out", checkpoint)) is None  # a folder of failed pairs
    assert len(pq.read_table(tmp_path / "out/part-00000000.parquet")) == 3 and not (tmp_path / "out/failed").exists()


def test_parts_do_not_depend_on_files_and_row_groups(tmp_path: Path) -> None:
    sizes = {"a": (7, 3), "b": (0, 1), "c": (5, 2)}  # rows of a file, and of its row groups
    for name, (count, group) in sizes.items():
        columns = {side: [f"{name}{n}.png" for n in range(count)] for side in ("before", "after")}
        schema = pa.schema(dict.fromkeys(columns, pa.large_string()))
        pq.write_table(pa.table(columns, schema), tmp_path / f"{name}.parquet", row_group_size=group)
    names = [f"{name}{n}.png" for name, (count, _) in sizes.items() for n in range(count)]
    for size in (1, 2, 4, 100):
        rows = [row for part in split(list_files(str(tmp_path)), size) for row in read_rows(part)]
        assert [Path(row["after"]).name for row in rows] == names
        assert [(row["row"], row["id"]) for row in rows] == [(n, str(n)) for n in range(12)]
    assert rows[0]["before"] == str(tmp_path / "a0.png")


class Flaky(fsspec.AbstractFileSystem):
    """A server whose file "ok" arrives at the third request, and which forbids "no"."""

    protocol = "flaky"
    cachable = False
    asked: ClassVar[list[str]] = []

    def cat_file(self, path: str, *_: Any, **__: Any) -> bytes:
        self.asked.append(path)
        error = ConnectionError(path)
        if path == "no":
            error.status = 403  # type: ignore[attr-defined]
        if len(self.asked) < 3:
            raise error
        return b"content"


def test_images_are_fetched_from_any_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_parts, "RETRY_SECONDS", [0, 0])
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    fsspec.filesystem("memory").pipe_file("/a [1].png", b"image")
    assert fetch("memory://a [1].png") == b"image" and fetch("/x/a.png") == Path("/x/a.png")
    assert "memory://b.png: cannot be fetched (not found)" in str(fetch("memory://b.png"))
    assert fetch("flaky://ok") == b"content" and len(Flaky.asked) == 3
    Flaky.asked.clear()
    assert isinstance(fetch("flaky://no"), DiffcapError) and Flaky.asked == ["no"]
    assert isinstance(fetch("unknown://a.png"), DiffcapError)


def test_table_images_and_captions_may_be_at_urls(whole: Path, table: Path, checkpoint: str) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(table.parent), "/table", recursive=True)
    found = words("memory://table/pairs.parquet", "memory://out", checkpoint)
    assert str(caption(*found)).startswith("error: 3 pairs could not be captioned; memory://out/failed has")
    for name in (path.name for path in whole.glob("*.parquet")):
        with memory.open(f"/out/{name}") as file:
            paths = "before", "after"
            assert pq.read_table(file).drop_columns(paths).equals(pq.read_table(whole / name).drop_columns(paths))
    assert str(caption(*found)).startswith("error: 3 pairs could not be captioned; memory://out/failed has")
    with memory.open("/out/failed/part-00000000.parquet") as file:
        assert "/table/missing.png: cannot be fetched (not found)" in pq.read_table(file).to_pylist()[0]["error"]


def test_shards_write_the_files_of_one_process(whole: Path, table: Path, checkpoint: str, tmp_path: Path) -> None:
    for shard in ("1/2", "0/2"):
        assert "could not be captioned" in str(caption(*words(table, tmp_path / "out", checkpoint, "--shard", shard)))
    assert content(tmp_path / "out") == content(whole)


def test_a_stale_file_of_failed_pairs_is_removed(table: Path, whole: Path, checkpoint: str, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "out")
    (tmp_path / "out/part-00000002.parquet").rename(tmp_path / "out/failed/part-00000002.parquet")
    assert caption(*words(table, tmp_path / "out", checkpoint)) and content(tmp_path / "out") == content(whole)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--beam", "3"], "was begun with beam 1, now 3; give another --out."),
        (["--part", "4"], "was begun with part 3, now 4; give another --out."),
        (["--checkpoint", "{other}"], "was begun with checkpoint "),
        (["--tile", "64"], "error: --tile has no effect on a Parquet table; remove it."),
        (["--json"], "error: --json has no effect on a Parquet table"),
        (["--heatmap", "x"], "error: --heatmap has no effect on a Parquet table"),
        (["--shard", "2/2"], "error: --shard=2/2 is not a part; give one of N parts as 0/N"),
        (["--part", "0"], "error: --part is 0; it must be at least 1."),
        (["--out", "x.csv"], "a Parquet table is captioned into a folder; give one, such as --out captions."),
    ],
)
def test_other_settings_are_refused(
    whole: Path, table: Path, checkpoint: str, tmp_path: Path, options: list[str], sentence: str
) -> None:
    shutil.copytree(whole, tmp_path / "out")
    if "{other}" in options:
        checkpoint = str(reweighted(Path(checkpoint), tmp_path / "other.ckpt"))
        options = []
    given = words(table, tmp_path / "out", checkpoint)
    assert sentence in str(caption(*given, *options)) and content(tmp_path / "out") == content(whole)


def test_bad_tables_are_one_sentence(checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, columns in {
        "odd": {"a": [1]},
        "numbers": {"before": [1], "after": [2]},
        "lists": {"before": [["a"]], "after": [["b"]]},
        "empty": {"before": [], "after": []},
    }.items():
        kinds = {"empty": pa.string(), "lists": pa.list_(pa.string())}
        kind = pa.schema(dict.fromkeys(columns, kinds.get(name, pa.int64())))
        pq.write_table(pa.table(columns, kind), f"{name}.parquet")
    Path("text.parquet").write_text("text")
    Path("folder").mkdir()
    shutil.copy("odd.parquet", "folder")
    Path("pairs.csv").write_text("before,after\na.png,b.png\n")
    for source, sentence in {
        "odd.parquet": 'odd.parquet: has no column "before" of strings; give a table with the columns before and after',
        "numbers.parquet": 'has no column "before" of strings',
        "lists.parquet": 'has no column "before" of strings',
        "empty.parquet": "empty.parquet: it contains no pair",
        "text.parquet": "text.parquet: not a table of pairs (",
        "none.parquet": "error: none.parquet: not found; give a .parquet file or a folder of them.",
        "unknown://x/a.parquet": "unknown://x/a.parquet: cannot be accessed (Protocol not known: unknown)",
        "folder": "error: --out folder/out: is in the folder of the table, folder; give a folder outside",
        "pairs.csv": "only a Parquet table has a folder of captions; make one: python -c ",
    }.items():
        out = "folder/out" if source == "folder" else "out"
        assert sentence in str(caption(*words(source, out, checkpoint)[:5])) and not Path("out").exists(), source
    message = str(caption("pairs.csv", "--engine", "ray"))
    program = json.loads(message[message.index('"') :].rstrip("."))
    subprocess.run([sys.executable, "-c", program], check=True)
    assert pq.read_table("pairs.parquet").to_pylist() == [{"before": "a.png", "after": "b.png"}]


KILLED = """
import os, signal
from diffcap.cli import main
from diffcap.commands import caption_parts, caption_table
write = caption_parts.write_file
def write_or_stop(location, content):
    if location.endswith("out/part-00000003.parquet"):
        os.kill(os.getpid(), signal.SIGKILL)
    write(location, content)
caption_parts.write_file = write_or_stop
main()
"""


@pytest.mark.slow
def test_a_killed_process_changes_nothing(whole: Path, table: Path, checkpoint: str, tmp_path: Path) -> None:
    given = ["caption", *words(table, tmp_path / "out", checkpoint)]
    command = [sys.executable, "-c", KILLED, *given]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert set(content(whole)) - set(content(tmp_path / "out")) == {"part-00000003.parquet"}
    assert "could not be captioned" in str(caption(*given[1:])) and content(tmp_path / "out") == content(whole)


@pytest.mark.thorough
def test_ray_goes_on_without_a_killed_worker_and_a_lost_node(
    table: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    rows = [{"before": f"{n % 4}.png", "after": FAILED.get(n, f"{n % 3}.png")} for n in range(150)]
    many = table.with_name("many.parquet")
    pq.write_table(pa.Table.from_pylist(rows), many)
    caption(*words(many, tmp_path / "one", checkpoint))
    store = {"object_store_memory": 100 << 20}
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **store}
    )
    try:
        first, second = (cluster.add_node(num_cpus=1, **store) for _ in range(2))
        command = [sys.executable, "-m", "diffcap", "caption", *words(many, tmp_path / "out", checkpoint)]
        environ = environment(RAY_ADDRESS=cluster.address)
        process = subprocess.Popen([*command, "--engine", "ray"], env=environ, stderr=subprocess.PIPE, text=True)
        wait_for_parts(tmp_path / "out", 4, process)
        next(worker for node in (first, second) for worker in workers(node)).kill()
        wait_for_parts(tmp_path / "out", 12, process)
        cluster.remove_node(second, allow_graceful=False)
        assert process.poll() is None
        _, errors = process.communicate(timeout=400)
    finally:
        cluster.shutdown()
    assert "3 pairs could not be captioned" in errors and process.returncode == 1
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.thorough
def test_ray_names_the_error_of_a_worker_and_the_same_command_goes_on(
    whole: Path, table: Path, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")

    class Worker(caption_table.RayWorker):
        def __init__(self, *_: Any) -> None:
            raise RuntimeError("CUDA error: out of memory")

    given = words(table, tmp_path / "out", checkpoint, "--engine=ray")
    with monkeypatch.context() as patched:
        patched.setattr(caption_table, "RayWorker", Worker)
        message = str(caption(*given))
    assert re.search(r"4 parts are missing .*: [\d.]+: RuntimeError: CUDA error: out of memory; run the same", message)
    assert "could not be captioned" in str(caption(*given)) and content(tmp_path / "out") == content(whole)


def workers(node: Any) -> list[Any]:
    """The processes of a node that caption."""
    import psutil

    raylet = psutil.Process(next(iter(node.all_processes["raylet"])).process.pid)
    return [process for process in raylet.children(recursive=True) if "MapWorker" in " ".join(process.cmdline())]


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(list(out.glob("part-*.parquet"))) < count and process.poll() is None:
        time.sleep(0.05)
