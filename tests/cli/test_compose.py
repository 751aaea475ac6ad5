"""Composition: every file composes and is valid, later choices win, every error is one line and names its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from hydra import compose as hydra_compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from genmodels.cli.compose import composer, words_by_name
from genmodels.cli.schema import Schema
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError
from genmodels.core.files import CONFIG_DIR, groups, in_hydra, literal, quoted
from genmodels.models.build import NETWORKS, build

GROUPS = groups()
REQUIRED = {
    "image_folder": ["data.root=pictures"], "spoken_digits": ["data.root=clips"], "arrays": ["data.file=vectors.npy"],
    "shards": ["data.root=shards"], "text": ["data.file=book.txt"],
}


def compose(*overrides: str, command: str = "train", config_dir: str | None = None) -> dict:
    with composer(command, config_dir) as hydra:
        return hydra.compose(list(overrides))


def line(*overrides: str, **options) -> str:
    with pytest.raises(InputError) as caught:
        compose(*overrides, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def choices() -> list[tuple[str, str, str]]:
    """Each model with each data set that they have a preset for; every model, data set and trainer at least once.

    Without a preset nothing depends on both, so that no other pair can break what each of them does alone.
    """
    pairs = {f"{model}_{data}": (model, data) for model in GROUPS["model"] for data in GROUPS["data"]}
    alone = [(model, "digits") for model in GROUPS["model"]] + [("ddpm", data) for data in GROUPS["data"]]
    chosen = dict.fromkeys([*(pairs[preset.removesuffix("_long")] for preset in GROUPS["preset"]), *alone])
    return [(*pair, GROUPS["trainer"][k % len(GROUPS["trainer"])]) for k, pair in enumerate(chosen)]


@pytest.mark.parametrize(("model", "data", "trainer"), choices())
def test_models_with_data_sets_and_trainers(model, data, trainer):
    config = compose(f"model={model}", f"data={data}", f"trainer={trainer}", *REQUIRED.get(data, []))
    assert config["model"]["_target_"].startswith("genmodels.models.")
    assert config["data"]["_target_"].startswith("genmodels.data.")


@pytest.mark.parametrize("preset", [preset for preset in GROUPS["preset"] if preset.endswith("_long")])
def test_long_presets_cost_at_least_twice_as_much(preset):
    """In items times parameters."""
    name = preset.removesuffix("_long")
    model = max((model for model in GROUPS["model"] if name.startswith(f"{model}_")), key=len)
    data = name.removeprefix(f"{model}_")
    usual, longer = (compose(f"model={model}", f"data={data}", *more) for more in ([], [f"preset={preset}"]))
    assert {**usual["data"], "batch_size": 0} == {**longer["data"], "batch_size": 0}
    spec = DataSpec("mnist", (1, 28, 28), levels=256, num_classes=10)
    cost = [config["trainer"]["max_steps"] * config["data"]["batch_size"]
            * sum(p.numel() for p in build(config["model"], spec).core.parameters()) for config in (usual, longer)]
    assert longer["trainer"]["max_steps"] > usual["trainer"]["max_steps"] and cost[1] >= 2 * cost[0]


@pytest.mark.parametrize("logger", GROUPS["logger"])
def test_every_logger(logger):
    assert "logger" in compose(f"logger={logger}")


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
def test_every_experiment(experiment):
    config = compose(f"experiment={experiment}")
    assert config["model"]["_target_"].startswith("genmodels.models.")


def test_yaml_files_are_short():
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in CONFIG_DIR.rglob("*.yaml")}
    assert len(lines) > 50 and max(lines.values()) < 40


SHAPES = {"toy": (2,), "mnist": (1, 28, 28), "digits": (1, 8, 8)}


@pytest.mark.parametrize(
    "data, levels", [("toy", None), ("arrays", None), ("arrays", 256), ("mnist", 256), ("digits", 17)]
)
def test_every_ddpm_preset_makes_a_model_of_its_kind_of_data(data, levels):
    config = compose("model=ddpm", f"data={data}", *REQUIRED.get(data, []))
    assert f"ddpm_{data}" in GROUPS["preset"] and config["trainer"]["max_steps"] <= 3000
    shape = SHAPES.get(data, (5,) if levels is None else (3, 12, 9))
    model = build(config["model"], DataSpec(data, shape, levels=levels))
    assert model.variance in (("beta",) if levels is None else ("beta_tilde", "learned"))


def test_keys_that_no_yaml_file_names_can_be_set():
    config = compose("model.net.channels_last=true", "model.optimizer.betas=[0.8,0.9]", "checkpoint.every_n_steps=7")
    assert config["model"]["net"]["channels_last"] is True
    assert config["model"]["optimizer"]["betas"] == [0.8, 0.9]
    assert config["checkpoint"] == {"every_n_steps": 7}


def test_a_network_by_its_name_leaves_the_presets_options_of_another_out():
    net = {"_target_": "genmodels.nn.dit.DiT"}
    assert compose("model.net=dit")["model"]["net"] == net
    assert compose("model.net=dit", "model.net.patch=4")["model"]["net"] == {**net, "patch": 4}
    assert "takes" in line("model.net=dit", "model.net.multipliers=[1]") and "DiT" in line("model.net=dot")
    with composer("train") as hydra:
        assert len(hydra.points(["model.net=dit,unet"])) == 2
        points = hydra.points(["model.net.dropout=0.2", "model.net=dit,unet"])  # as they are passed on to Hydra itself
        for words, name in zip(points, ("dit.DiT", "unet.UNet"), strict=True):
            whole = OmegaConf.to_container(hydra_compose("train", words).model.net)
            assert whole == {"_target_": f"genmodels.nn.{name}", "dropout": 0.2}
    swept = {"model": {"_target_": "genmodels.models.ddpm.DDPM", "net": "dit"}, "data": {}}
    assert Schema("genmodels.cli.train.run").check(swept)["model"]["net"] == net


def test_a_network_by_its_name_keeps_the_words_before_it():
    given = {"_target_": "genmodels.nn.dit.DiT", "patch": 4}
    assert compose("model.net.patch=4", "model.net=dit")["model"]["net"] == given
    with composer("train") as hydra:
        for model in "ddpm", "masked_diffusion":  # the second has another network
            words = words_by_name(hydra, [f"model={model}"], {"data": "digits", "patch": 4, "net": "dit"})
            assert hydra.compose(words)["model"]["net"] == given


@pytest.mark.parametrize("choice, name", [
    (["model=ddpm"], "unet"), (["model=masked_diffusion"], "unet"), (["model=ddpm", "data=toy"], "mlp")])  # fmt: skip
def test_the_network_that_is_chosen_already_keeps_the_presets_options(choice, name):
    preset = compose(*choice)["model"]["net"]
    assert len(preset) > 1
    for words in [f"model.net={name}", "model.net.dropout=0.3"], ["model.net.dropout=0.3", f"model.net={name}"]:
        assert compose(*choice, *words)["model"]["net"] == {**preset, "_target_": NETWORKS[name], "dropout": 0.3}


def test_a_network_by_its_name_after_none_or_among_the_points_of_a_sweep():
    assert compose("~model.net", "model.net=unet")["model"]["net"] == {"_target_": NETWORKS["unet"]}
    with composer("train") as hydra:
        for words in ["data=digits,toy", "model.net=dit"], ["preset=ddpm_digits,ddpm_toy", "model.net=dit"]:
            nets = [hydra.compose(point)["model"]["net"] for point in hydra.points(["model=ddpm", *words])]
            assert nets == 2 * [{"_target_": NETWORKS["dit"]}]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_hydras_own_prefixes_mean_the_same(prefix):
    assert compose(f"{prefix}data.batch_size=3")["data"]["batch_size"] == 3
    assert compose(f"{prefix}seed=3")["seed"] == 3


def test_the_preset_follows_the_choice_and_the_trainer_wins_over_it():
    digits, toy = compose(), compose("data=toy")
    assert "channels" in digits["model"]["net"] and "hidden" in toy["model"]["net"]
    assert compose("trainer=smoke")["trainer"]["max_steps"] == 60 != digits["trainer"]["max_steps"]
    assert compose("trainer=smoke", "trainer.max_steps=5")["trainer"]["max_steps"] == 5


def test_an_experiment_replaces_choices_and_the_command_line_wins_over_it():
    assert compose("experiment=ddpm_mnist")["data"]["_target_"].endswith("MNIST")
    assert compose("experiment=ddpm_mnist", "data=digits")["data"]["_target_"].endswith("Digits")
    short = compose("experiment=ddpm_mnist", "trainer=smoke", "data.batch_size=9")
    assert (short["trainer"]["max_steps"], short["trainer"]["max_epochs"], short["data"]["batch_size"]) == (60, None, 9)
    assert "a sweep over trainer= has no effect" in line("trainer=smoke,default", "experiment=ddpm_mnist")
    with composer("train") as hydra:
        words = [o.input_line for o in hydra.parse(["trainer=gpu", "experiment=ddpm_mnist"])]
        assert [o.input_line for o in hydra.parse(words)] == words and "++trainer.compile=true" in words


def test_a_folder_of_ones_own(tmp_path):
    for name, text in {"data/mine": "_target_: genmodels.data.vision.Digits\nbatch_size: 9\n",
                       "experiment/bad": "# @package _global_\nmodel: {net: {chanels: 3}}\n"}.items():
        file = tmp_path / f"{name}.yaml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert compose("data=mine", config_dir=str(tmp_path))["data"]["batch_size"] == 9
    assert compose("data=toy", config_dir=str(tmp_path))["data"]["_target_"].endswith("Toy")
    assert f"(in {tmp_path}/experiment/bad.yaml)" in line("experiment=bad", config_dir=str(tmp_path))
    assert "mine" in line("data=nine", config_dir=str(tmp_path))
    assert "there is no such folder" in line(config_dir=str(tmp_path / "nowhere"))


LINES = [
    (["model=dppm"], "unknown model 'dppm': did you mean 'ddpm'? (configs/model has"),
    (["model=3"], "unknown model '3'"), (["trainer=[1]"], "unknown trainer '[1]' (configs/trainer has"),
    (["model=null"], "unknown model"),
    (["experiment=foo"], "unknown experiment 'foo'"),
    (["model=nsf", "preset=ddpm_digits"], "(in configs/preset/ddpm_digits.yaml, which '~preset' leaves out)"),
    (["preset=ddpm_digit"], "unknown preset 'ddpm_digit': did you mean 'ddpm_digits'?"),
    (["model=energy", "data=toy", "preset=nope"], "unknown preset 'nope'"),
    (["modle=ddpm"], "unknown key 'modle' (on the command line): did you mean 'model'?"),
    (["model.net.chanels=3"], "unknown key 'model.net.chanels' (on the command line): did you mean 'channels'?"),
    (["model.net={chanels: 3}"], "unknown key 'model.net.chanels' (on the command line)"),
    (["data=image_folder"], "data.root is missing"),
    (["trainer.max_steps=abc"], "trainer.max_steps must be an integer or null, got 'abc' (on the command line)"),
    (["trainer.max_steps.deep=3"], "trainer.max_steps must be an integer or null"),
    (["seed"], "cannot read 'seed': write key=value"),
    (["seed=(1"], "cannot read 'seed=(1'"),
    (["data.root=Mum's photos"], "as in \"data.root='Mum\\'s photos'\""),
    (["=3"], "cannot read '=3'"),
    (["seed=1,2"], "add -m to run one after the other"),
    (["seed=range(3)"], "add -m to run one after the other"),
    (["run_dir=${nothing}"], "nothing"),
    (["~nothing"], "nothing"),
    (["hydra.nothing=1"], "nothing"),
    (["hydra.run.dir=x"], "hydra.run.dir=x is a setting of sweeps, without effect on one run: add -m"),
    (["model@other=ddpm"], "model@other"),
]


@pytest.mark.parametrize(("overrides", "part"), LINES)
def test_one_line_for_each_mistake(overrides, part):
    assert part in line(*overrides)


def test_a_wrong_key_in_a_file_names_the_file(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "bad.yaml").write_text("_target_: genmodels.models.ddpm.DDPM\nschedul: linear\n")
    found = line("model=bad", "model.num_steps=10", config_dir=str(tmp_path))
    assert "unknown key 'model.schedul'" in found
    assert f"(in {tmp_path}/model/bad.yaml): did you mean 'schedule'?" in found


def test_every_point_of_a_sweep_is_checked():
    with composer("train") as hydra:
        points = hydra.points(["model=ddpm", "seed=0,1", "model.net.channels=8,16,32"])
        assert len(points) == 6 and len({tuple(p) for p in points}) == 6
        with pytest.raises(InputError, match="seed must be an integer, got 'x'"):
            hydra.points(["seed=0,1,x"])
        with pytest.raises(InputError, match="unknown model 'dppm'"):
            hydra.points(["model=ddpm,dppm"])


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_commands_that_start_from_a_checkpoint(command):
    assert line(command=command).startswith("ckpt is missing")
    assert compose("ckpt=a.ckpt", command=command) == {"ckpt": "a.ckpt"}
    assert "did you mean 'ckpt'?" in line("cktp=a.ckpt", command=command)


@pytest.mark.parametrize("file", ["/x/ok.csv", "../x/ok.csv", "./ok.csv", "x/ok-2.csv"])
def test_a_path_needs_no_quotes(file):
    assert in_hydra(file) == file
    assert compose(f"data.file={file}", "model=maf", "data=arrays")["data"]["file"] == file


@pytest.fixture
def run_of_glow(tmp_path):
    config = compose("model=glow", "data=mnist", "model.steps=3", "trainer=smoke", "seed=5", "trust=[os]")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "last.ckpt").touch()
    return tmp_path


@pytest.mark.parametrize("name", ["", "last.ckpt"])
def test_a_run_that_is_resumed_by_its_path_has_its_settings(run_of_glow, name):
    plain = compose("model=glow", "data=mnist", "model.steps=3", "trainer=smoke", "seed=5")
    path = str(run_of_glow / name)
    further = compose(f"resume={path}", "trainer.max_steps=99", "model.optimizer={lr: 0.5}", "data.root='a b'")
    assert further["resume"] == path and further["trust"] == []  # whom the folder trusts is its own affair
    assert further["trainer"] == {**plain["trainer"], "max_steps": 99}
    assert further["model"] == {**plain["model"], "optimizer": {**plain["model"]["optimizer"], "lr": 0.5}}
    assert further["data"] == {**plain["data"], "root": "a b"} and further["seed"] == 5


def test_torchrun_decides_how_many_processes_resume_a_run(run_of_glow, monkeypatch):
    config = yaml.safe_load((run_of_glow / "config.yaml").read_text())
    config["trainer"] |= {"devices": 4, "num_nodes": 2}
    (run_of_glow / "config.yaml").write_text(yaml.safe_dump(config))
    assert compose(f"resume={run_of_glow}")["trainer"] == config["trainer"]
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    assert not {"devices", "num_nodes"} & compose(f"resume={run_of_glow}")["trainer"].keys()


@pytest.mark.parametrize("words", [["model=ddpm"], ["trainer=default"], ["~preset"], ["~model.steps"]])
def test_words_that_choose_leave_a_run_aside(run_of_glow, words):
    rest = [] if words == ["model=ddpm"] else ["model=glow", "data=mnist"]
    assert compose(*rest, *words, f"resume={run_of_glow}") == {
        **compose(*rest, *words), "resume": str(run_of_glow)}  # fmt: skip


@pytest.mark.parametrize("content, said", [("a: [", "not YAML"), ("- 1", "holds no settings"), ("model: 3", "model")])
def test_a_damaged_file_of_settings(run_of_glow, content, said):
    (run_of_glow / "config.yaml").write_text(content)
    assert said in line(f"resume={run_of_glow}")


@pytest.mark.parametrize("value, written", [(np.float64(1e-3), "0.001"), (np.int64(3), "3"), (torch.tensor(2), "2")])
def test_a_number_of_numpy_or_torch_is_written_as_a_number(value, written):
    assert in_hydra(value) == written


@pytest.mark.parametrize("word, value", [
    ("data.file=Übung/x.npz", "Übung/x.npz"), ("data.file=~/x.npz", "~/x.npz"), ("data.file='Ü, b.npz'", "Ü, b.npz"),
])  # fmt: skip
def test_paths_beyond_ascii_and_from_home_need_no_quotes(word, value):
    with composer("train") as hydra:
        assert hydra.compose(["model=nsf", "data=arrays", word])["data"]["file"] == value
        assert hydra.points(["model=nsf", "data=arrays", word, "seed=0,1"])


def test_names_of_digits_keep_their_underscores_and_numbers_may_have_them():
    with composer("train") as hydra:
        found = hydra.compose(["run_dir=2024_01_31", "trainer.max_steps=1_000"])
    assert (found["run_dir"], found["trainer"]["max_steps"]) == ("2024_01_31", 1000)


@pytest.mark.parametrize("text", [
    "plain", "it's", "a\\b.wav", "C:\\", "C:\\\\", "a\\'b", "a\\\\'", "$5 {x}",
    "${x}.wav", "a\\${x}", "a\\\\${y}", "it's ${oc.env:HOME}",
])  # fmt: skip
def test_quoted_texts_are_read_as_they_are(text):
    """A literal text also where it looks like an interpolation, which a quoted one with `${` is."""
    parser = OverridesParser.create()
    for quote in (literal, quoted) if "${" not in text else (literal,):
        assert OmegaConf.create({"text": parser.parse_override(f"text={quote(text)}").value()})["text"] == text
