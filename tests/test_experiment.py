"""Variables of an experiment: from the command line, from a file, from the config.yaml of a run."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from tests.commands import logged, run, same_logs, weights
from tests.test_makefile import make, project  # noqa: F401

from diffcap.compose import parts
from diffcap.experiment import Experiment, parse
from diffcap.pipeline import print_paths, run_stage
from diffcap.record import describe_files, named_files, result_id
from diffcap.stages import STAGES
from diffcap.utils.errors import DiffcapError


def test_variables_are_told_from_the_options_of_a_stage() -> None:
    words = ["--features-from", "a b", "--METHOD=pcl", "--model.lr=1e-4", "--seed", "3", "--trainer.max_steps", "4"]
    variables, own = parse([*words, "--", "--seed=9"])
    assert variables == {"features_from": "a b", "method": "pcl", "seed": "3"}
    assert own == ["--model.lr=1e-4", "--trainer.max_steps", "4", "--seed=9"]
    for incomplete in (["--seed"], ["--seed", "--devices", "2"]):
        with pytest.raises(DiffcapError, match="--seed: the value is missing"):
            parse(incomplete)
    assert parse(["--extract_args", "--model.lr=1", "x"]) == ({"extract_args": "--model.lr=1"}, ["x"])


@pytest.mark.parametrize(
    ("variables", "output"),
    [
        ({"method": "scorrer"}, "METHOD=scorrer is unknown; known methods: pcl, scorer, dirl, clip4idc"),
        ({"backbone": "resnet"}, "BACKBONE=resnet is unknown; give one of blocks"),
        ({"trainer": "smok"}, "TRAINER=smok is unknown"),
        ({"method": "scorer", "ablation": "rrr"}, "ABLATION=rrr is unknown; scorer has: change_head, rr, rr_cbr"),
        ({"devices": "two"}, "DEVICES=two is not a number of processes"),
        ({"seed": "x"}, "SEED=x is not a seed"),
        ({"logger": "tb"}, "LOGGER=tb is unknown; give wandb or none or tensorboard"),
        ({"config": "nowhere.yaml"}, "CONFIG=nowhere.yaml: no such file"),
        ({"method": "scorer", "eval": "retrieval"}, "EVAL=retrieval is for a pre-training that learns retrieval"),
        ({"method": "clip4idc", "ablation": "ft1", "eval": "retrieval"}, "EVAL=retrieval is for a pre-training"),
        ({"offline": "maybe"}, "OFFLINE=maybe is unknown; give yes or no"),
        ({"dataset": "desk", "offline": "yes", "weights": "w.pth"}, "OFFLINE=yes and WEIGHTS=w.pth"),
    ],
)
def test_a_wrong_value_is_one_sentence(variables: dict[str, str], output: str) -> None:
    with pytest.raises(DiffcapError) as error:
        Experiment(**variables)
    assert output in str(error.value)


def test_a_file_describes_a_run_and_the_command_line_has_priority(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "dataset: blocks\nMETHOD: scorer\nseed: 7\npairs: 60\nfinetune:\n  model: {lr: 0.5}\ndata: {jitter: 0.2}\n"
    )
    e = Experiment(config=str(path), seed="8", trainer="smoke")
    assert (e.method, e.seed, e.trainer, e.run) == ("scorer", "8", "smoke", "runs/blocks/scorer-seed8")
    defaults = Experiment(config=str(path), method="pcl", seed="1234")  # given, although they are the defaults
    assert (defaults.method, defaults.seed) == ("pcl", "1234")
    assert STAGES["data"].settings(e)["pairs"] == 60 and e.sections["data"] == {"jitter": 0.2}
    settings = STAGES["finetune"].settings(e)
    assert settings["model"]["lr"] == 0.5 and settings["trainer"]["max_steps"] == 4  # the section is above all files
    assert settings["run"]["out"] == "runs/blocks/scorer-seed8/finetune" and settings["seed_everything"] == 8


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("metod: scorer", "the key 'metod' is unknown, did you mean method"),
        ("seeds: [7]", "the key 'seeds' is unknown"),
        ("{datasets: [blocks], methods: [pcl], seeds: [7]}", "is a grid of experiments; run `diffcap benchmark"),
        ("- a", "not an experiment"),
        ("a: [", "not YAML"),
        ("run: {out: x}", "`run.method` is missing"),
        ("method: [pcl]", "method must be a single value, found ['pcl']"),
        ("finetune: 3", "finetune must be a section of options, found 3"),
    ],
)
def test_a_malformed_file_is_one_sentence(tmp_path: Path, text: str, output: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(DiffcapError) as error:
        Experiment(config=str(path))
    assert str(path) in str(error.value) and output in str(error.value)


def test_a_run_is_repeated_in_its_folder_and_with_another_seed_in_another_folder(tmp_path: Path) -> None:
    run = {"method": "scorer", "dataset": "blocks", "out": "runs/mine/finetune"}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"run": run, "seed_everything": 7, "data": {"features": "resnet101_layer3"}}))
    same = Experiment(config=str(path))
    assert (same.run, same.seed, same.backbone) == ("runs/mine", "7", "resnet101_layer3")
    assert Experiment(config=str(path), seed="7").run == "runs/mine"
    assert Experiment(config=str(path), seed="8").run == "runs/blocks/scorer-seed8"
    assert Experiment(config=str(path), seed="8", run="runs/other").run == "runs/other"
    assert Experiment(config=str(path), method="scorer").run == "runs/mine"
    for other in ({"method": "dirl"}, {"dataset": "cub"}, {"ablation": "no_cbr"}):
        with pytest.raises(DiffcapError, match=f"holds the settings of a run with {next(iter(other)).upper()}="):
            Experiment(config=str(path), **other)


def test_offline_chooses_what_ships_with_the_package() -> None:
    for method, backbone in (("scorer", "blocks"), ("pcl", "blocks"), ("clip4idc", "blocks_pixels")):
        e = Experiment(dataset="desk", method=method, offline="yes")
        assert (e.backbone, e.features, e.tagger) == (backbone, backbone, "blocks")
        sources = [part.source for part in parts(e, "finetune")]
        assert any(source.endswith(": offline") for source in sources) == (method == "clip4idc")
    e = Experiment(dataset="desk", method="dirl", offline="yes", backbone="resnet101_layer3", weights="w.pth")
    assert e.backbone == "resnet101_layer3"


@pytest.mark.parametrize(
    ("variables", "output"),
    [
        ({"method": "scorer", "backbone": "pixels"}, r"BACKBONE=pixels gives pixels, and METHOD=scorer reads features"),
        ({"method": "clip4idc", "backbone": "blocks"}, r"=blocks gives features, and METHOD=clip4idc reads pixels"),
        (
            {"method": "clip4idc", "features_from": "x"},
            r"FEATURES_FROM=x gives features, .* give BACKBONE=pixels and leave out FEATURES_FROM=\.",
        ),
    ],
)
def test_a_method_refuses_features_that_it_cannot_read(variables: dict[str, str], output: str) -> None:
    words = [word for name, value in {"dataset": "desk", **variables}.items() for word in (f"--{name}", value)]
    for command in (partial(run_stage, "finetune", words), partial(print_paths, [*words, "--goals", "finetune"])):
        with pytest.raises(DiffcapError, match=output):  # before the features are extracted
            command()


def test_features_that_are_there_decide_what_they_hold(tmp_path: Path) -> None:
    store = tmp_path / "features/mine"
    store.mkdir(parents=True)
    (store / "meta.json").write_text('{"dtype": "uint8"}')
    Experiment(method="clip4idc", folder=str(tmp_path), features="mine", backbone="blocks").check_inputs({"finetune"})
    with pytest.raises(DiffcapError, match=f"{store} holds pixels, and METHOD=dirl reads features"):
        Experiment(method="dirl", folder=str(tmp_path), features="mine").check_inputs({"finetune"})


WORDS = ["--pairs", "60", "--method", "scorer", "--trainer", "smoke", "--logger", "none", "--ablation", "rr"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that `diffcap finetune` has trained."""
    folder = tmp_path_factory.mktemp("experiment")
    for stage in ("data", "extract", "finetune"):
        done = run([sys.executable, "-m", "diffcap", stage, *WORDS], folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_training_is_repeated_from_the_config_of_its_run(trained: Path) -> None:
    config = "runs/blocks/scorer-rr/finetune/config.yaml"
    done = run([sys.executable, "-m", "diffcap", "finetune", "--config", config], trained)
    assert done.returncode == 0 and "already finished with these settings" in done.stdout
    done = run([sys.executable, "-m", "diffcap", "finetune", "--config", config, "--run", "runs/again"], trained)
    assert done.returncode == 0, done.stderr
    one, two = trained / "runs/blocks/scorer-rr/finetune", trained / "runs/again/finetune"
    assert same_logs(one, two) >= {"train/loss", "val/CIDEr-D"} and logged(one)
    first, second = weights(one / "best.ckpt"), weights(two / "best.ckpt")
    assert all((second[name] == value).all() for name, value in first.items())
    assert yaml.safe_load((two / "config.yaml").read_text())["run"]["ablation"] == "rr"


@pytest.mark.slow
def test_a_finished_stage_is_found_without_torch_and_a_changed_one_runs(trained: Path) -> None:
    code = (
        "import sys; from diffcap.pipeline import run_stage; run_stage('finetune', sys.argv[1:]);"
        "assert 'torch' not in sys.modules"
    )
    run([sys.executable, "-m", "diffcap", "finetune", *WORDS], trained)  # another test may have asked in other words
    done = run([sys.executable, "-c", code, *WORDS], trained)
    assert done.returncode == 0 and "nothing to do" in done.stdout, done.stderr
    (trained / "runs/blocks/scorer-rr/finetune/best.ckpt").unlink()
    done = run([sys.executable, "-m", "diffcap", "finetune", *WORDS], trained)
    assert done.returncode == 0 and "best.ckpt of the finished training is missing" in done.stdout, done.stderr
    assert (trained / "runs/blocks/scorer-rr/finetune/best.ckpt").is_file()


@pytest.mark.slow
def test_the_parts_of_the_settings_are_in_the_header_of_the_runs_configuration(trained: Path) -> None:
    text = (trained / "runs/blocks/scorer-rr/finetune/config.yaml").read_text()
    header = [line for line in text.splitlines() if line.startswith("# settings: ")]
    assert [line.split("configs/")[1] for line in header] == [
        "trainer/default.yaml",
        "method/scorer.yaml: finetune",
        "dataset/blocks.yaml",
        *["method/scorer.yaml: datasets.blocks"] * 2,
        "method/scorer.yaml: ablations.rr",
        "trainer/smoke.yaml",
    ]
    assert text.startswith(header[0])


@pytest.mark.slow
def test_a_class_that_has_moved_is_the_same_training(trained: Path) -> None:
    out = trained / "runs/blocks/scorer-rr/finetune"
    for name in ("config.yaml", "finished.json"):
        text = (out / name).read_text()
        (out / name).write_text(text.replace("diffcap.methods.scorer.model.SCORER", "diffcap.elsewhere.SCORER"))
    finished = json.loads((out / "finished.json").read_text())
    (out / "finished.json").write_text(json.dumps({**finished, "asked": "", "id": "of other paths"}))
    done = run([sys.executable, "-m", "diffcap", "finetune", *WORDS], trained)
    assert done.returncode == 0 and "already finished with these settings" in done.stdout, done.stderr


def test_negatives_are_built_only_for_methods_that_need_them(capsys: pytest.CaptureFixture[str]) -> None:
    run_stage("negatives", ["--dataset", "desk", "--method", "scorer", "--goals", "negatives"])
    assert "scorer needs no hard negatives" in capsys.readouterr().out


def test_offline_downloads_no_dataset(tmp_path: Path) -> None:
    words = ["--dataset", "spot_the_diff", "--offline", "yes", "--folder", str(tmp_path)]
    with pytest.raises(DiffcapError, match="OFFLINE=yes: the files of DATASET=spot_the_diff would be downloaded"):
        run_stage("data", words)
    (tmp_path / "manifest.jsonl").write_text("")
    run_stage("data", ["--needed", *words])  # prepared earlier: nothing is downloaded


def test_the_features_of_a_run_must_be_there_or_their_network_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    run = {"method": "scorer", "dataset": "desk", "out": "runs/mine/finetune"}
    path.write_text(yaml.safe_dump({"run": run, "data": {"features": "mine", "folder": str(tmp_path)}}))
    with pytest.raises(DiffcapError, match="does not say which network they are from; give BACKBONE="):
        Experiment(config=str(path))
    assert Experiment(config=str(path), backbone="blocks").features == "mine"
    (tmp_path / "features/mine").mkdir(parents=True)
    (tmp_path / "features/mine/meta.json").write_text("{}")
    assert Experiment(config=str(path)).features == "mine"


def test_a_section_run_is_not_the_config_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("dataset: desk\nmethod: scorer\nfinetune: {run: {keep_last_k: 3}}\n")
    e = Experiment(config=str(path))
    assert (e.dataset, e.backbone) == ("desk", "resnet101_layer3")
    assert STAGES["finetune"].settings(e)["run"]["keep_last_k"] == 3


@pytest.mark.slow
def test_a_replaced_option_is_refused_before_the_missing_stages_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("finetune: {model: {half_precision_clip: true}}")
    words = ["--method", "scorer", "--folder", str(tmp_path)]
    message = "model.half_precision_clip is True, but that option was replaced by model.optimizer"
    for command in (
        partial(print_paths, [*words, "--goals", "eval", "--", "finetune --model.half_precision_clip=true"]),
        partial(print_paths, [*words, "--goals", "eval", "--config", str(path)]),
        partial(run_stage, "eval", [*words, "--config", str(path)]),
    ):
        with pytest.raises(DiffcapError, match=message):
            command()
    assert list(tmp_path.iterdir()) == [path]


def test_the_variables_of_a_file_may_be_for_other_stages(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: scorer\ntagger: english\ncaptioner: reinforce\npretraining: other\n")
    print_paths(["--goals", "finetune", "--config", str(path)])
    with pytest.raises(DiffcapError, match="TAGGER=english: finetune with METHOD=scorer does not use TAGGER; omit it"):
        print_paths(["--goals", "finetune", "--config", str(path), "--tagger", "english"])


def test_a_long_section_of_a_config_is_not_taken_for_a_path(tmp_path: Path) -> None:
    """A text of 256 to 999 characters is longer than the name of a file may be."""
    long = {"text": "x" * 300, "list": ["y" * 900, str(tmp_path / "file")]}
    (tmp_path / "file").touch()
    assert list(named_files(long)) == [tmp_path / "file"]


def test_a_changed_base_model_in_a_folder_makes_a_stage_old(tmp_path: Path) -> None:
    base = tmp_path / "tiny"
    base.mkdir()
    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        (base / name).write_text("1")
    options = {"base": str(base)}

    def identity() -> str:
        return result_id(options, describe_files(named_files(options), {}))

    for name in ("config.json", "model.safetensors", "chat_template.jinja"):
        before = identity()
        (base / name).write_text(f"another {name}")
        assert identity() != before
    before = identity()
    (base / "README.md").write_text("a note")
    assert identity() == before
    options["base"] = str(base.rename(tmp_path / "moved"))
    assert identity() == before
