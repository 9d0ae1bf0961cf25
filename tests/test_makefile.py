"""What make runs: which stages, in which order, with which options, and what it leaves alone.

The bodies of the stages are replaced: each one notes its options and writes the files that the real one writes, with a content that
depends on the options and the contents of the input files.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
from tests.preloaded import write_program

from diffcap.cli import main
from diffcap.experiment import Experiment
from diffcap.registry import methods
from diffcap.stages import COMMANDS, STAGES, needed_by

pytestmark = pytest.mark.slow  # make

ROOT = Path(__file__).parents[1]
VARIABLES = {f.name.upper() for f in fields(Experiment)} | {"ARGS"}
ALL = ["data", "extract", "negatives", "pretrain", "finetune", "eval"]

ACTOR = """
import functools, pathlib, runpy, shlex, sys

ROOT = "{root}"
words = sys.argv[1:]
sys.executable = "{python}"  # the stages that a command starts play, too
if words and words[0].startswith("stages/"):  # these only run stages, so they are the real ones
    sys.argv = words
    sys.path.insert(0, ROOT)
    runpy.run_path(words[0], run_name="__main__")
    sys.exit()
if words[:2] == ["-m", "diffcap"]:
    words = words[2:]

from diffcap import cli, pipeline, record, stages
from diffcap.registry import import_object
from diffcap.run_folder import checkpoint_metadata

def act(stage, options, folder, names, inputs=""):
    options = [str(option).replace(ROOT + "/", "") for option in options]
    with open("log", "a") as log:
        log.write(shlex.join([stage, *options]) + chr(10))
    value = lambda name: options[options.index(name) + 1]
    files = [folder / name for name in names]
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        content = shlex.join([stage, *options, inputs])
        if not path.exists() or path.read_text() != content:
            path.write_text(content)
    {more}

def as_words(options):
    return [word for name, value in options.items() for word in (f"--{{name}}", value)]

def train(request):
    if request.is_check:
        sys.exit("--model.lrr=1" in request.words or request.settings["model"].get("lrr"))
    settings = request.settings
    folder = pathlib.Path(settings["run"]["out"])
    data = pathlib.Path(settings["data"]["folder"])
    inputs = [data / "manifest.jsonl", data / "negatives.jsonl", data / "features" / settings["data"]["features"] / "complete"]
    files = record.describe_files([*inputs, *record.named_files(settings)], {{}})
    options = [*as_words(record.flat(settings)), *request.words]
    act(request.stage, options, folder, ["last.ckpt", "best.ckpt"], record.result_id({{}}, files))
    name = "last.ckpt" if request.stage.startswith("pretrain") else "best.ckpt"
    done = {{"stage": request.stage, "train_seconds": 100, "steps": 9, **checkpoint_metadata(folder / name)}}
    record.write(folder / "finished.json", {{**done, **record.make(request.asked, "", files, [])}})

def extract(request):
    if request.is_check:
        sys.exit()
    settings = request.settings
    folder = pathlib.Path(settings["data"]["folder"], "features", settings["model"]["name"])
    names = ["complete", "sums.u32"]
    act(request.stage, [*as_words(record.flat(settings)), *request.words], folder, names)
    files = record.describe_files([*request.inputs, *record.named_files(settings)], {{}})
    record.write(folder / "extract.done.json", record.make(request.asked, "", files, [folder / name for name in names]))

def played(path):
    if path == "diffcap.lit.run:train":
        return train
    if path == "diffcap.commands.extract:extract_features":
        return extract
    real = import_object(path)
    stage = "import_features" if "import_features" in path else words[0]

    @functools.wraps(real)
    def body(**options):
        given = {{name: value for name, value in options.items() if value != real.__kwdefaults__.get(name)}}
        row = stages.STAGES[stage]
        act(stage, as_words(given), pathlib.Path(row.out(options)), row.products[:1])
    defaults = real.__defaults__ or ()
    names = real.__code__.co_varnames[: real.__code__.co_argcount]
    real.__kwdefaults__ = dict(zip(names[len(names) - len(defaults):], defaults))
    return body

pipeline.import_object = played
sys.argv = ["diffcap", *words]
if words[:1] == ["average"]:
    out = pathlib.Path(words[words.index("--out") + 1])
    act("average", words[1:], out.parent, [out.name])
    sys.exit()
cli.main()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the Makefile, the settings and a virtual environment that only plays."""
    for name in ("configs", "stages", "pyproject.toml", "requirements.lock"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    play(tmp_path)
    (tmp_path / ".venv" / "ready").touch()
    return tmp_path


def play(project: Path, more: str = "") -> None:
    """Write the programs that play; `more`: what a stage does at its end."""
    actor, programs = project / ".venv/actor.py", project / ".venv/bin"
    actor.write_text(ACTOR.format(python=programs / "python", root=ROOT, more=more))
    for name in ("python", "diffcap"):
        write_program(programs / name, [sys.executable, str(actor)])


def make(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    plain = {key: value for key, value in kept.items() if key not in VARIABLES}
    return subprocess.run(["make", *words], cwd=project, env=plain, capture_output=True, text=True, check=False)


def played(project: Path, *words: str) -> dict[str, str]:
    """Make something; each stage that ran, in order, with its options."""
    (project / "log").unlink(missing_ok=True)
    done = make(project, *words)
    assert done.returncode == 0, done.stderr
    log = project / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    stages = [line.partition(" ")[0] for line in lines]
    assert len(set(stages)) == len(stages), f"a stage ran twice: {stages}"
    time.sleep(0.02)  # the next files are newer, whatever the clock's grain
    return {stage: line.partition(" ")[2] for stage, line in zip(stages, lines)}


def logged(project: Path, *words: str) -> dict[str, list[str]]:
    """Make something that runs make targets side by side; the options of every run of each stage, sorted."""
    (project / "log").unlink(missing_ok=True)
    done = make(project, *words)
    assert done.returncode == 0, done.stderr
    runs: dict[str, list[str]] = {}
    for stage, _, options in (line.partition(" ") for line in sorted((project / "log").read_text().splitlines())):
        runs.setdefault(stage, []).append(options)
    return runs


def test_from_nothing_everything_runs_in_order_and_then_only_what_has_changed(project: Path) -> None:
    assert list(played(project, "eval")) == ALL
    for goal, option in (
        ("extract", "--other=1"),
        ("negatives", "--retrieve=1"),
        ("pretrain", "--x=1"),
        ("finetune", "--x=1"),
    ):
        played(project, "eval")
        assert list(played(project, goal)) == []  # nothing to do
        assert list(played(project, goal, f"{goal}_ARGS={option}")) == [goal]  # the stage compares its own options
    assert list(played(project, "data")) == ["data"]  # it looks at its files whenever it is requested
    played(project, "eval")
    assert list(played(project, "report")) == ["report"]
    assert list(played(project, "eval")) == list(played(project, "report")) == []
    assert list(played(project, "eval", "eval_ARGS=--beams=3")) == ["eval"]
    assert list(played(project, "report", "report_ARGS=--pictures=3")) == ["report"]


def test_without_an_environment_it_is_made_first(project: Path) -> None:
    (project / ".venv" / "ready").unlink()
    lines = make(project, "-n", "data").stdout
    assert lines.index("-m venv .venv") < lines.index("-r requirements.lock") < lines.index("bin/diffcap data")


@pytest.mark.parametrize("method", list(methods()))
def test_the_makefile_has_the_edges_of_the_table(project: Path, method: str) -> None:
    """`diffcap report` runs what is missing by the table."""
    cases: list[dict[str, str]] = [{}, {"pretrain": "no"}, {"captioner": "reinforce"}]
    cases += [{"eval": "retrieval"}] if method == "clip4idc" else []
    for variables in cases:
        goal = "eval" if "eval" in variables else "report"
        words = [f"{name.upper()}={value}" for name, value in variables.items()]
        shown = re.findall(r"bin/diffcap ([\w-]+)", make(project, "-n", goal, f"METHOD={method}", *words).stdout)
        needed = needed_by(Experiment(method=method, **variables), [goal])
        assert sorted(shown) == sorted(stage for stage, _ in needed)
        for stage, e in needed:
            assert all(shown.index(need) < shown.index(stage) for need, _ in STAGES[stage].needs(e))


def test_makes_of_two_methods_at_once_use_their_own_folders(project: Path) -> None:
    names = ["pcl", "scorer"]
    for method in names:
        played(project, "finetune", f"METHOD={method}")
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda method: make(project, "finetune", f"METHOD={method}").stdout, names))
    nothing = "nothing to do, finetune is complete with these settings"
    assert outputs == [f"runs/blocks/{method}/finetune: {nothing}\n" for method in names]


def test_what_is_missing_runs_again_and_what_comes_after_it(project: Path) -> None:
    played(project, "eval")
    (project / "data/blocks/negatives.jsonl").unlink()
    assert list(played(project, "eval")) == ["negatives"]  # to the same negatives
    (project / "runs/blocks/pcl/finetune/finished.json").unlink()
    assert list(played(project, "eval")) == ["finetune"]  # to the same weights
    (project / "runs/blocks/pcl/eval/metrics.json").unlink()
    assert list(played(project, "report")) == ["eval", "report"]
    (project / "data/blocks/features/blocks/complete").unlink()
    assert list(played(project, "eval")) == ["extract"]  # to the same features


def test_a_stage_that_is_done_over_makes_the_later_ones_old(project: Path) -> None:
    played(project, "eval")
    assert list(played(project, "pretrain", "ARGS=--again")) == ["pretrain"]
    assert list(played(project, "eval")) == ["finetune", "eval"]


def test_a_newer_input_that_changes_nothing_trains_nothing_and_is_noted_once(project: Path) -> None:
    """The user's run, which was trained with options, stays."""
    played(project, "pretrain", "finetune", "eval", "ARGS=--model.lr=5")
    for path in (project / "data/blocks").rglob("*"):
        path.touch()
    assert list(played(project, "report")) == ["report"]
    assert "bin/diffcap finetune" not in make(project, "-n", "report").stdout


def test_what_is_only_needed_stays_with_its_settings_until_its_files_change(project: Path) -> None:
    played(project, "pretrain", "finetune", "eval", "ARGS=--model.lr=5")
    assert list(played(project, "eval", "TRAINER=smoke")) == []
    done = make(project, "report", "negatives_ARGS=--retrieve=1")
    assert "runs/blocks/pcl/pretrain: data/blocks/negatives.jsonl changed, so pretrain runs again" in done.stdout


def test_options_of_a_stage_that_is_only_needed_are_used_although_it_is_complete(project: Path) -> None:
    played(project, "report")
    (project / "w.pth").touch()
    for word, stage in {
        "data_ARGS=--jitter=0.5": "data",
        "PAIRS=30": "data",
        "extract_ARGS=--data.batch_size=8": "extract",
        "WEIGHTS=w.pth": "extract",
        "negatives_ARGS=--scope=caption": "negatives",
        "TAGGER=tiles": "negatives",
        "finetune_ARGS=--model.lr=1": "finetune",
        "eval_ARGS=--beams=3": "eval",
    }.items():
        option = word.partition("=")[2].removeprefix("--").replace("=", " ").split()
        ran = played(project, "report", word)
        assert all(part in ran[stage] for part in option), word
    assert played(project, "report", "eval_ARGS=--beams=3") == {}


def test_replaced_files_that_options_name_run_a_stage_again(project: Path) -> None:
    played(project, "finetune")
    for name in "ab":
        (project / f"{name}.ckpt").write_text(name)
        (project / name / "eval").mkdir(parents=True)
        (project / name / "eval/metrics.json").write_text("{}")
    ensemble, runs = "eval_ARGS=--ensemble=a.ckpt,b.ckpt", '--runs=\'{"A": "a", "B": "b"}\''
    assert list(played(project, "eval", ensemble)) == ["eval"] and played(project, "eval", ensemble) == {}
    for name in "ab":
        (project / f"{name}.ckpt").write_text("another")
    assert list(played(project, "eval", ensemble)) == ["eval"]
    assert list(played(project, "report", f"ARGS={runs}")) == ["report"]
    assert played(project, "report", f"ARGS={runs}") == {}
    (project / "b/eval/metrics.json").write_text("{ }")
    assert list(played(project, "report", f"ARGS={runs}")) == ["report"]


def test_args_go_to_the_training_stages_or_to_the_one_that_is_asked_for(project: Path) -> None:
    for goals, option, expected in (
        (["eval"], "--beams=3", ["eval"]),
        (["data"], "--jitter=1", ["data"]),
        (["pretrain", "finetune", "eval"], "--x=1", ["pretrain", "finetune"]),
        (["finetune", "eval"], "--x=1", ["finetune"]),
    ):
        lines = make(project, "-n", *goals, f"ARGS={option}").stdout.splitlines()
        assert [re.findall(r"bin/diffcap (\w+)", line)[0] for line in lines if option in line] == expected
    assert played(project, "finetune", "ARGS=--x=1")["finetune"].endswith("--x=1")  # last, so that it wins


def test_the_page_offers_the_captioner_of_a_method_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []
    monkeypatch.setattr("diffcap.cli.run", lambda commands, words, **_: shown.append(words))
    for words in (["--method", "scorer", "--captioner", "reinforce"], ["--RUN=runs/mine", "--port=8000"]):
        main(["serve", *words])
    assert shown == [
        ["serve", '--checkpoint=["runs/blocks/scorer/reinforce/best.ckpt"]'],
        ["serve", "--port=8000", '--checkpoint=["runs/mine/finetune/best.ckpt"]'],
    ]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["serve", "--config", "nothere.yaml"], "CONFIG=nothere.yaml: no such file"),
        (["serve", "--trainer", "nonsense"], "TRAINER=nonsense is unknown"),
        (["serve", "--devices", "2"], "--devices has no effect on the page; leave it out"),
        (["caption", "--checkpoint", "a.ckpt", "b.ckpt", "pairs/"], "b.ckpt: a checkpoint, not images; give each one"),
        # Before the stages that are missing, which may take hours.
        (["eval", "--folder=none", "--run=none", "--ensembel=x"], "unknown option --ensembel, did you mean --ensemble"),
        (["finetune", "--folder=none", "--methd=scorer"], "unknown option --methd, did you mean --method"),
        (["pretrain", "--method=scorer", "--model.lr=1"], "--model.lr=1 has no effect: METHOD=scorer needs no"),
        (["finetune", "--folder=none", "--model.lrr=1"], "unknown option --model.lrr, did you mean --model.lr"),
    ],
)
def test_a_command_refuses_words_that_it_does_not_use(
    words: list[str], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert output in f"{stopped.value}{capsys.readouterr().err}"


def test_a_wrong_word_stops_make_before_anything_runs(project: Path) -> None:
    (project / "wrong.yaml").write_text("finetune: {model: {lrr: 1}}")
    for words, output in (
        (["eval", "METOD=scorer"], "METOD= is not a variable of this Makefile; known are"),
        (["finetune", "SEED=-1"], "SEED=-1 is not a seed; give a whole number from 0"),
        (["finetune", "finetune_ARGS=--model.lrr=1"], "*** see above"),
        (["data", "finetune_ARGS=--model.lr=1"], "finetune_ARGS: data with METHOD=pcl does not use finetune; omit it"),
        (["pretrain", "METHOD=scorer", "ARGS=--model.lr=1"], "pretrain_ARGS: pretrain with METHOD=scorer does not use"),
        (["test", "DATASET=tiles"], "make test does not use DATASET=; omit it"),
        (["finetune", "METHOD=scorer", "negatives_ARGS=--scope=pair"], "with METHOD=scorer does not use negatives"),
        (["demo", "extract_ARGS=--x=1"], "make demo does not use extract_ARGS=; omit it"),
        (["report", "METHOD=clip4idc", "EVAL=retrieval"], "EVAL=retrieval has no report"),
        (["ablation", "METHOD=card"], "METHOD=card is unknown"),
        (["ablation", "METHOD=scorer", "SEEDS=1,-1"], "--seeds 1,-1: not different whole numbers"),
        (["accuracy", "METHOD=scorer", "ARGS=--keep=0"], "--keep is 0; it must be at least 1"),
        (["ablation", "negatives_ARGS=--x=1"], "make ablation has no negatives_ARGS; its own options are ARGS"),
        (["demo", "MINUTES=4"], "are too few for training"),
        (["finetune", "SEEDS=1,2"], "make finetune does not use SEEDS=; omit it"),
        (["eval", "WEIGHTS=none.pth"], "none.pth: no weights file there; check the path given as WEIGHTS"),
        (["eval", "CONFIG=wrong.yaml"], "*** see above"),
        (["eval", "METHOD=scorer", "TAGGER=english"], "TAGGER=english: eval with METHOD=scorer does not use TAGGER"),
        (["pretrain", "PRETRAINING=x"], "PRETRAINING=x: pretrain with METHOD=pcl does not use PRETRAINING"),
        (["reinforce", "CAPTIONER=reinforce"], "CAPTIONER=reinforce: reinforce with METHOD=pcl does not use CAPTIONER"),
        (["ablation", "METHOD=scorer", "TAGGER=english"], "TAGGER=english: eval with METHOD=scorer does not use"),
        (["accuracy", "METHOD=scorer", "PRETRAINING=x"], "finetune with METHOD=scorer does not use PRETRAINING"),
    ):
        done = make(project, *words)
        assert done.returncode != 0 and output in done.stderr, done.stderr
    assert not (project / "log").exists()


def test_blanks_in_paths(project: Path) -> None:
    (project / "my weights.pth").touch()
    ran = played(project, "extract", "DATA=/o'brien's  photos~/", "WEIGHTS=my weights.pth", "DATASET=desk")
    assert "/o'brien's  photos~/" in shlex.split(ran["data"]) and "my weights.pth" in shlex.split(ran["extract"])
    ran = played(project, "negatives", "DATASET=desk", "TAGGER=~/stanza")
    assert f"--tagger {Path.home()}/stanza" in ran["negatives"]
    ran = played(project, "finetune", "METHOD=scorer", "FOLDER=data/my desk", "RUN=runs/my desk")
    assert "'data/my desk'" in ran["data"] and "--run.out 'runs/my desk/finetune'" in ran["finetune"]


def test_a_report_takes_args_too(project: Path) -> None:
    played(project, "eval")
    options = played(project, "report", "ARGS=--pictures 3", "report_ARGS=--bins 2")["report"]
    assert "--pictures 3 --bins 2" in options
    name, place = "an API, zero-shot", "my captions.json"
    words = f"report_ARGS='--predictions.{name}={place}'"
    (project / place).write_text("")
    options = shlex.split(played(project, "report", words)["report"])
    assert options[options.index("--predictions") + 1] == str({name: place})
    assert played(project, "report", words) == {}
    (project / place).write_text("another content")
    assert list(played(project, "report", words)) == ["report"]


def test_a_failed_stage_stops_the_chain(project: Path) -> None:
    play(project, 'sys.exit(stage == "negatives")')
    done = make(project, "eval")
    assert done.returncode != 0
    assert [line.split()[0] for line in (project / "log").read_text().splitlines()] == ["data", "extract", "negatives"]


def test_help_has_a_line_for_every_target(project: Path) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", text, re.M)[1].replace("$(STAGES)", " ".join(COMMANDS)).split())
    lines = make(project, "help").stdout.splitlines()
    assert lines == make(project).stdout.splitlines()  # the default
    found = {line.split()[1]: " ".join(line.split()[2:]) for line in lines}
    assert found.keys() == targets and all(len(words) > 5 for words in found.values())
    assert {"demo", "test", "lint", "help", "data", "extract", "negatives", "pretrain", "finetune", "eval"} <= targets
    for target in targets:
        assert make(project, "-n", target).returncode == 0


@pytest.mark.parametrize("method", ["scorer", "dirl"])
def test_a_method_without_pre_training_says_so_and_goes_on(project: Path, method: str) -> None:
    done = make(project, "pretrain", f"METHOD={method}")
    assert done.returncode == 0 and not (project / "log").exists()
    assert (
        done.stdout
        == f"{method} has no pre-training stage; continue with: make finetune METHOD={method} DATASET=blocks\n"
    )
    ran = played(project, "pretrain", "finetune", "eval", f"METHOD={method}", "DATASET=clevr_change", "ARGS=--x=1")
    assert list(ran) == ["data", "extract", "finetune", "eval"]  # no negatives either
    assert "resnet101_layer3" in ran["extract"] and "init_from" not in ran["finetune"]
    assert ran["finetune"].endswith("--x=1")
    again = played(project, "finetune", f"METHOD={method}", "DATASET=clevr_change", "PRETRAIN=yes")
    assert "init_from" not in again["finetune"]
