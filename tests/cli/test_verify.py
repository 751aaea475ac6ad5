"""`genmodels verify`: check tables, exit codes, and what it says when there is nothing to judge."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import genmodels as gm
from genmodels.cli import verify as command
from genmodels.cli.main import main
from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.flows.coupling import ChannelSplit, Checkerboard, Coupling
from genmodels.flows.elementwise import Affine
from genmodels.flows.flow import Flow
from genmodels.flows.scaling import ActNorm
from genmodels.models.ddpm import DDPM
from genmodels.models.energy_sampling import STEPS
from genmodels.models.normalizing_flows import NSF, RealNVP
from genmodels.nn.coupling_networks import ConvNet
from genmodels.verification import attention as mechanisms
from genmodels.verification.attention import MECHANISMS
from genmodels.verification.check import PASSED, Check, Findings, Options, Report
from genmodels.verification.checkpoints import verify
from genmodels.verification.flows import NUMERIC, fingerprint
from tests.mutants.bijections_layers import Stretch
from tests.mutants.models import BaseAlone, FlowMutant

MINE = '''
import torch
from torch import nn

from genmodels.flows import ActNorm, Compose, Flip
from genmodels.flows.bijection import Bijection
from genmodels.flows.multiscale import glow


class Doubling(nn.Module):
    """z = 2^w x."""

    def __init__(self, channels: int, wrong: float = 1.0):
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.zeros(channels)), wrong

    def forward(self, x):
        x = x.float() if x.dtype == torch.bfloat16 else x
        return x * 2**self.weight, self.wrong * self.weight.sum().expand(len(x)) * 0.6931471805599453

    def inverse(self, z):
        z = z.float() if z.dtype == torch.bfloat16 else z
        return z / 2**self.weight, -self.wrong * self.weight.sum().expand(len(z)) * 0.6931471805599453


def doubling_of_three():
    return Doubling(3)


class OneLogTwo(Bijection):
    """z = 2 x + 1 with the log-determinant of a single value."""

    def _forward(self, x, cond, mask):
        return 2 * x + 1, x.new_full((len(x),), 0.6931471805599453)

    def _inverse(self, z, cond, mask):
        return (z - 1) / 2, z.new_full((len(z),), -0.6931471805599453)


def before_glow():
    shape = (1, 28, 28)
    return Compose([OneLogTwo(), glow(shape, levels=1, steps=1, hidden=4)], shape)


def many_flips():
    return Compose([Flip(5000), Flip(5000)], (5000,))


def blocks(wrong: bool):
    """Too large for a Jacobian as a whole, but not its layers."""
    shape = (2, 60, 60)
    return Compose([ActNorm(2), *([OneLogTwo()] if wrong else []), ActNorm(2)], shape)


def number():
    return 3
'''
QUICK = ["compiler=none", "progress=false"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package of the user's in the working directory, of this name and content."""
    def make(name: str, content: str) -> None:
        (tmp_path / f"{name}.py").write_text(content)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return make


@pytest.fixture
def mine(package):
    package("mylayers", MINE)


# ---- a bijection of one's own ----


def test_a_sound_layer(mine, capsys):
    words = ["what=mylayers:Doubling", "shape=[4]", "options.channels=4", "trust=[mylayers]", "out=results.json"]
    assert main(["verify", *words, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "Doubling (4,): " in shown and "every check passed" in shown and "log-det inverse" in shown
    written = json.loads(Path("results.json").read_text())
    assert written["format"] == 2 and written["passed"] is True
    assert {check["status"] for check in written["wholes"][0]["checks"]} == {"passed", "not applicable"}


def test_a_wrong_layer_is_exit_code_1_and_one_line(mine, capsys):
    words = ["what=mylayers.Doubling", "shape=[4]", "options.channels=4", "options.wrong=1.001", "trust=[mylayers]"]
    assert main(["verify", *words, *QUICK]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "2 checks failed: log-det forward (Doubling (4,)), log-det inverse (Doubling (4,))" in shown.err
    assert "FAILED" in shown.out and "every check passed" not in shown.out


@pytest.mark.parametrize(("name", "shape"), [("OneLogTwo", "[300]"), ("OneLogTwo", "[1,28,28]"),
                                             ("before_glow", "[1,28,28]")])  # fmt: skip
def test_a_wrong_log_det_of_a_large_event(mine, capsys, name, shape):
    assert main(["verify", f"what=mylayers:{name}", f"shape={shape}", "trust=[mylayers]", *QUICK]) == 1
    shown = capsys.readouterr()
    assert "every check passed" not in shown.out and "OneLogTwo" in shown.err
    assert "checks failed: log-det forward" in shown.err
    if name == "before_glow":
        assert "layers.0 OneLogTwo" in shown.out and "layers.1.stages.0.layers.2 InvertibleLinear" in shown.out


def test_what_is_too_large_is_not_verified_and_exit_code_1(mine, capsys):
    words = ["shape=[5000]", "trust=[mylayers]", "out=results.json"]
    for name in ("OneLogTwo", "many_flips"):
        assert main(["verify", f"what=mylayers:{name}", *words, *QUICK]) == 1
        shown = capsys.readouterr()
        assert "NOT VERIFIED" in shown.out and "every check passed" not in shown.out
        assert "no check failed, but not verified: log-det forward" in shown.err and shown.err.count("\n") == 1
        assert json.loads(Path("results.json").read_text())["passed"] is False


@pytest.mark.parametrize("wrong", [False, True])
def test_a_large_composition_follows_from_its_layers(mine, capsys, wrong):
    words = ["what=mylayers:blocks", "shape=[2,60,60]", f"options.wrong={str(wrong).lower()}", "trust=[mylayers]"]
    assert main(["verify", *words, "max_dims=32", "compiler=none", "progress=false"]) == int(wrong)
    shown = capsys.readouterr()
    assert ("every check passed" in shown.out) != wrong
    assert not wrong or "log-det forward (layers.1 OneLogTwo (2, 60, 60))" in shown.err


def test_a_function_may_make_it(mine, capsys):
    assert main(["verify", "what=mylayers:doubling_of_three", "shape=[3]", "trust=[mylayers]", *QUICK]) == 0


def test_layers_of_genmodels_need_no_trust(capsys):
    assert main(["verify", "what=genmodels.flows.squeeze:Squeeze2d", "shape=[2,4,4]", *QUICK]) == 0
    assert "Squeeze2d (2, 4, 4)" in capsys.readouterr().out


def test_verbose_shows_checks_that_do_not_apply(capsys):
    assert main(["verify", "what=genmodels.flows.linear:Flip", "options.channels=3", "shape=[3]", "verbose=true",
                 *QUICK]) == 0  # fmt: skip
    assert "masks are for sequences" in capsys.readouterr().out


@pytest.mark.parametrize(("cond", "shape"), [("labels:4", [3]), ("vector:2", [3]), ("map:2", [3, 4, 4])])
def test_conditions(cond, shape):
    made = command._condition(cond, shape, 0)
    assert len(made) == 3 and (made[0] != made[1]).any() and made.is_floating_point() == (cond != "labels:4")


WRONG = [
    ([], "no model is given: give one of model=glow"),
    (["model=glow", "ckpt=a.ckpt"], "got model and ckpt"),
    (["model=glow", "shape=[3]"], "shape needs what="),
    (["what=schedule"], "what=schedule names no class: what=package.module:Class"),
    (["what=os:system", "shape=[3]"], "to allow it add its package: trust=[os]"),
    (["what=genmodels.flows.linear:Flip"], "shape is missing"),
    (["what=genmodels.flows.linear:Flip", "shape=[0]", "options.channels=3"], "positive sizes"),
    (["what=genmodels.flows.linear:Flop", "shape=[3]"], "cannot be found"),
    (["what=genmodels.flows.linear:torch", "shape=[3]"], "no class or function defined in genmodels"),
    (["what=genmodels.flows.linear:Flip", "shape=[3]"], "missing 1 required positional argument: 'channels'; give"),
    (["what=genmodels.flows.linear:Flip", "shape=[4]", "options.channels=3"], "takes events of shape"),
    (["what=genmodels.flows.linear:Flip", "shape=[3]", "options.channels=3", "cond=labels"], "cond must be labels:"),
    (["what=genmodels.flows.linear:Flip", "shape=[3]", "options.channels=3", "cond=labels:3"], "leave cond out"),
    (["what=mylayers:Doubling", "shape=[4]", "options.channels=3", "trust=[mylayers]"],
     "Doubling: forward fails on events of shape (4,): RuntimeError: The size of tensor a (4) must match"),
    (["what=mylayers:Doubling", "shape=[3]", "options.channels=3", "cond=vector:2", "trust=[mylayers]"],
     "makes one that uses none"),
    (["model=glow", "patience=0"], "patience must be positive"),
    (["what=mylayers:number", "shape=[3]", "trust=[mylayers]"], "not a module with forward and inverse"),
    (["model=glow", "out=."], "out=.: the results are a file, end it in .json"),
    (["model=glow", "max_dims=0"], "max_dims must be at least 1"),
    (["model=glow", "compilr=none"], "did you mean 'compiler'"),
]


@pytest.mark.parametrize(("words", "part"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_wrong_words_are_one_line_and_exit_code_2(mine, capsys, words, part):
    assert main(["verify", *words]) == 2
    shown = capsys.readouterr().err
    assert part in shown and shown.count("\n") == 1


def test_a_missing_checkpoint_is_exit_code_1(capsys):
    assert main(["verify", "ckpt=nowhere.ckpt"]) == 1
    assert "nowhere.ckpt" in capsys.readouterr().err


# ---- models ----


SMALL = ["model.hidden=8", "model.steps=1", "data.batch_size=32"]


def test_a_model_from_configuration(capsys):
    assert main(["verify", "model=glow", "data=digits", *SMALL, *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "log-density" in shown and "flow.bijection Compose (1, 8, 8)" in shown and "InvertibleLinear" in shown
    assert "every check passed" in shown and "FAILED" not in shown


def test_a_broken_layer_deep_in_a_model_is_named(capsys, monkeypatch):
    right = ActNorm._inverse
    monkeypatch.setattr(ActNorm, "_inverse", lambda self, z, cond, mask: (
        right(self, z, cond, mask)[0], -right(self, z, cond, mask)[1]
    ))
    assert main(["verify", "model=glow", "data=digits", *SMALL, *QUICK]) == 1
    shown = capsys.readouterr()
    assert "log-det inverse (flow.bijection.layers.1.stages.0.layers.1 ActNorm (4, 4, 4))" in shown.err
    assert "log-dets cancel" in shown.err and "InvertibleLinear" not in shown.err and shown.err.count("\n") == 1
    assert "14 passed" not in shown.out.split("ActNorm")[0].splitlines()[-1]


def test_a_trained_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train = ["model=realnvp", "data=toy", "model.hidden=8", "model.couplings=4", "data.n_train=256", "data.n_val=32",
             "data.n_test=32", "data.batch_size=32", "trainer.max_steps=3", "trainer.max_epochs=null",
             "trainer.progress=false", "logger=csv", "run_dir=run", "trainer.sample_every_n_steps=0"]
    assert main(["train", *train]) == 0
    capsys.readouterr()
    assert main(["verify", "ckpt=run", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "integrates to one" in shown and "results: run/verify.json" in shown
    written = json.loads(Path("run/verify.json").read_text())
    groups = written["layers"]
    reports = [report for group in groups for report in group["reports"]]
    assert len(reports) == sum(len(group["alike"]) for group in groups)  # trained layers are all looked at
    assert {check["name"] for check in groups[1]["reports"][-1]["checks"]} == set(NUMERIC)
    found = gm.load("run/last.ckpt").verify(ema=False, compiler=None, progress=False)
    assert found.passed and "integrates to one" in str(found)


def of(model_class, spec: DataSpec, batch: Batch, *, patience: float = 60.0, **options) -> Findings:
    def make():
        torch.manual_seed(0)
        return model_class(spec, **options)

    how = Options(randomise=True, patience=patience, compiler=None, progress=False)
    return verify(make(), make, batch.rows(slice(0, 3)), batch, how)


def test_conditional_with_learned_dequantisation():
    """Every bijection of a model is found, with the inputs that the model itself gives it."""
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(0, 17, (64, 1, 4, 4), generator=generator), torch.arange(64) % 10)
    spec = DataSpec("pixels", (1, 4, 4), levels=17, num_classes=10)
    layout = ["checkerboard*2", "squeeze", "channel*2"]
    found = of(RealNVP, spec, batch, class_conditional=True, dequantisation="variational", hidden=8, depth=1,
               layout=layout)
    assert not found.failed, found.text()
    wholes = [report.subject.split()[0] for report in found.wholes]
    assert wholes[0] == "realnvp" and sorted(wholes[1:]) == ["dequantize.bijection", "flow.bijection"]
    assert all(report["condition"].status == PASSED for report in found.wholes[1:])


def test_continuous_vectors():
    batch = Batch(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))
    found = of(NSF, DataSpec("table", (3,)), batch, layers=2, hidden=8)
    assert not found.failed, found.text()


def test_events_too_large_for_a_jacobian_are_cropped_and_the_table_says_so():
    batch = Batch(torch.randint(0, 17, (16, 1, 24, 24), generator=torch.Generator().manual_seed(0)))
    found = of(RealNVP, DataSpec("pixels", (1, 24, 24), levels=17), batch, hidden=4, depth=1, layout=["checkerboard*2"],
               patience=1e-9)
    assert found.passed, found.text()
    assert "follows from its layers: the Jacobian of 576 values takes more than 1e-09 s" in found.text()
    name = "flow.bijection.layers.1.stages.0.layers.0 Coupling"
    row = next(line for line in found.text().splitlines() if line.startswith(name))
    assert "(1, 24, 24)" in row and "(1, 17, 15)" in row


def test_a_family_without_checks():
    spec = DataSpec("pixels", (1, 8, 8), levels=17)
    model = DDPM(spec)
    model.core, model.family = torch.nn.Identity(), "unknown"
    with pytest.raises(ValueError, match="nothing to verify for the family unknown"):
        verify(model, lambda: model, None, None, Options(randomise=True))


def test_layers_are_alike_only_if_their_settings_are():
    def coupling(split):
        return Coupling(split, Affine(split.changed), ConvNet(split.kept, 2 * split.changed, hidden=4))

    swapped = fingerprint(coupling(ChannelSplit(4, swap=True)))
    assert fingerprint(coupling(ChannelSplit(4))) == fingerprint(coupling(ChannelSplit(4))) != swapped
    boards = [fingerprint(coupling(Checkerboard(2, parity=parity))) for parity in (0, 1)]
    assert boards[0] != boards[1]
    assert fingerprint(Stretch(3)) != fingerprint(ActNorm(3))


def test_findings_name_the_check_closest_to_its_tolerance():
    checks = (Check("a", PASSED, 1e-12, 1e-10), Check("b", PASSED, 1e-5, 1e-4))
    found = Findings([], [(["x", "y"], [Report("x Flip (3,)", checks)])])
    assert "x Flip  (3,)" in found.text() and "b 1e-05 of 0.0001" in found.text()


# ---- `genmodels verify what=attention`: one's own module, every mechanism, the mutants, and what it refuses ----


MY_ATTENTION = '''
import torch
from torch import nn


class Mine(nn.Module):
    """Attention by distance through a table that may be cut from the middle."""

    def __init__(self, dim, heads, cut, max_len):
        super().__init__()
        self.project, self.slope = nn.Linear(dim, dim), nn.Parameter(torch.ones(()))
        self.start = max_len // 2 if cut else 0

    def forward(self, x, mask=None):
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("mask must be boolean")
        x = x if mask is None else x.masked_fill(~mask.mT, 0)
        place = torch.arange(x.shape[1], dtype=x.dtype)
        r = place - place[:, None] + self.start
        s = torch.sin(self.slope * r).expand(len(x), -1, -1)
        if mask is not None:
            s = torch.where(mask | ~mask.any(-1, keepdim=True), s, -torch.inf)
        y = s.softmax(-1).to(x.dtype) @ x
        return self.project(y).to(x.dtype)


def table(dim, heads, cut=False, max_len=100):
    return Mine(dim, heads, cut, max_len)


def number(dim, heads):
    return 3
'''
RELATIVE = "capabilities=[relative]"


@pytest.fixture
def my_attention(package):
    package("myattention", MY_ATTENTION)


def verify_attention(*words):
    return main(["verify", "what=attention", *words, *QUICK])


def own(*words):
    return verify_attention("object=myattention.table", "trust=[myattention]", *words)


def test_a_sound_module(my_attention, capsys):
    assert own(RELATIVE, "out=results.json") == 0
    shown = capsys.readouterr().out
    assert "Mine: " in shown and "every check passed" in shown
    written = json.loads(Path("results.json").read_text())
    checks = {check["name"]: check for check in written["wholes"][0]["checks"]}
    assert checks["shift"]["status"] == checks["longest length"]["status"] == "passed"
    assert checks["cache"]["status"] == checks["double loop"]["status"] == "not applicable"
    assert checks["longest length"]["error"] == 0


def test_a_broken_module(my_attention, capsys):
    assert own(RELATIVE, "options.cut=true") == 1
    shown, error = capsys.readouterr()
    assert "longest length" in error and "shift" not in error
    assert "longest length  FAILED" in shown


def test_checks_that_were_not_asked_for_are_not_made(my_attention, capsys):
    assert own("verbose=true") == 0
    assert "relative is not among its capabilities" in capsys.readouterr().out


def test_every_mechanism(capsys, monkeypatch):
    few = {name: MECHANISMS[name] for name in ("Transformer-XL", "Swin", "local dense")}
    monkeypatch.setattr(mechanisms, "MECHANISMS", few)
    assert verify_attention() == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in few) and "every check passed" in shown


@pytest.mark.parametrize("words, said", [
    (["object=myattention.number", "trust=[myattention]"], "makes an int, not a module"),
    (["object=myattention.absent", "trust=[myattention]"], "object=myattention.absent cannot be found"),
    (["object=myattention.table"], r"object=myattention.table is not of genmodels; .* trust=\[myattention\]"),
    (["object=myattention.table", "trust=[myattention]", "capabilities=[relatve]"], "did you mean 'relative'"),
    (["object=myattention.table", "trust=[myattention]", "capabilities=[2d]"], "capability 2d and space"),
    (["object=myattention.table", "trust=[myattention]", "shape=[2]"], "shape is that of a map here"),
    (["object=myattention.table", "trust=[myattention]", "options.wide=3"], "unexpected keyword argument 'wide'"),
    (["capabilities=[relative]"], "capabilities needs object="),
    (["options.dim=16"], "options needs object="),
])  # fmt: skip
def test_what_is_refused(my_attention, capsys, words, said):
    assert verify_attention(*words) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert re.search(said, error), error


def test_object_goes_with_attention(my_attention, capsys):
    assert main(["verify", "model=glow", "object=myattention.table", *QUICK]) == 2
    assert "object needs what=attention" in capsys.readouterr().err


def test_the_kinds_of_attention_are_spelled_out_and_checked(capsys):
    assert main(["train", "model=ddpm", "--keys"]) == 0
    assert "one of none, plain, absolute, swin2d" in " ".join(capsys.readouterr().out.split())
    for key in ("model=ddpm", "model.net.attention=swin"), ("model=glow", "model.attention=swin"):
        assert main(["train", *key]) == 2
        assert "must be one of none, plain, absolute, swin2d" in capsys.readouterr().err


# ---- `genmodels verify` on what is no bijection, of a user's own, and on models that are no flows ----


MY_KINDS = """
import torch
from genmodels.diffusion.schedule import NoiseSchedule
from genmodels.energy import EnergyFunction

class Straight(NoiseSchedule):
    def __init__(self, *, top: float = 8.0):
        super().__init__()
        self.top = top
    def log_snr(self, t):
        return self.top * (1 - 2 * torch.as_tensor(t, dtype=torch.float64))

class Backwards(Straight):
    def log_snr(self, t):
        return -super().log_snr(t)

class Bowl(EnergyFunction):
    def energy(self, x, cond=None):
        return x.flatten(1).square().sum(1)

class Uphill(Bowl):
    def score(self, x, cond=None):
        return 2 * x

from genmodels.diffusion import CosineSchedule, Denoiser, EulerSampler, V
from genmodels.nn import MLPDenoiser

def euler(denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
    return EulerSampler()(denoiser, x, t, s, memory, generator, cond, temperature)

class Late(EulerSampler):
    def __call__(self, denoiser, x, t, s, memory, generator, cond=None, temperature=1.0):
        return super().__call__(denoiser, x, t, 0.9 * s, memory, generator, cond, temperature)

def of_points(classes=None):
    return Denoiser(MLPDenoiser((2,), classes, hidden=8), CosineSchedule(), V())

class Negative(Denoiser):
    def __init__(self):
        super().__init__(MLPDenoiser((2,), hidden=8), CosineSchedule(), V())
    def at_log_snr(self, x, *rest):
        return super().at_log_snr(-x, *rest)
"""


@pytest.fixture
def my_kinds(package):
    package("my_own_kinds", MY_KINDS)


def verify_kind(name: str, *words: str) -> int:
    return main(["verify", f"what=my_own_kinds:{name}", "trust=[my_own_kinds]", *words])


@pytest.mark.usefixtures("my_kinds")
def test_sound_ones_pass(capsys):
    assert verify_kind("Straight", "options.top=5") == 0 and verify_kind("Bowl", "shape=[3]") == 0
    out = capsys.readouterr().out
    assert "Straight, a noise schedule: 8 passed" in out and "Bowl, an energy: 5 passed" in out
    assert verify_kind("euler") == 0
    assert verify_kind("of_points", "shape=[2]", "options.classes=4", "cond=labels:4") == 0
    out = capsys.readouterr().out
    assert "euler, a sampler: 10 passed" in out and "order 0.99" in out and "Denoiser, a denoiser: 13 passed" in out


@pytest.mark.usefixtures("my_kinds")
def test_broken_ones_are_named_and_exit_with_one(capsys):
    assert verify_kind("Backwards") == 1 and verify_kind("Uphill", "shape=[3]") == 1
    captured = capsys.readouterr()
    assert "decreasing" in captured.err and "score (Uphill, an energy)" in captured.err
    assert captured.err.count("\n") == 2
    assert verify_kind("Late") == 1 and verify_kind("Negative", "shape=[2]") == 1
    captured = capsys.readouterr()
    assert "trajectory (Late, a sampler)" in captured.err and "signal and noise (Negative, a denoiser)" in captured.err


@pytest.mark.usefixtures("my_kinds")
@pytest.mark.parametrize("words, said", [(["Bowl"], "shape is missing"), (["Straight", "shape=[3]"], "has no shape"),
                                         (["Straight", "options.peak=3"], "peak"),
                                         (["euler", "shape=[3]"], "a sampler has no shape"),
                                         (["of_points"], "shape is missing"),
                                         (["Straight", "cond=labels:3"], "leave cond out")])
def test_bad_input_is_one_line(capsys, words, said):
    assert verify_kind(*words) == InputError.exit_code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words, said", [
    (["model=ddpm", "data=toy", "model.num_steps=20", "model.net.hidden=16"],
     ["the whole model: 6 passed", "a denoiser: 12 passed"]),
    (["model=energy", "data=toy", "model.net.hidden=[16,16]"], ["an energy: 8 passed", "density integrates to one"]),
    (["model=score", "data=toy", "model.net.hidden=16"], ["the whole model: 6 passed", "a denoiser: 12 passed"]),
])
def test_models_that_are_no_flows(capsys, monkeypatch, short_pilot, words, said):
    monkeypatch.setitem(STEPS, "annealed", 5)  # of samples of an energy
    assert main(["verify", *words, "progress=false"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in said)


def test_a_broken_model_is_named(capsys, monkeypatch):
    encode = DDPM.encode
    monkeypatch.setattr(DDPM, "encode", lambda model, x: encode(model, x) + 0.1 * x.mean())
    assert main(["verify", "model=ddpm", "data=toy", "model.num_steps=20", "progress=false"]) == 1
    assert "batch size 1 against 64" in capsys.readouterr().err


# ---- mutants ----


def test_every_check_of_flows_notices_its_error(monkeypatch, tmp_path, capsys):
    """All tables would take a minute; tests/verification goes through them."""
    monkeypatch.setattr(command, "_MUTANTS", {"flows": "models.FLOW_MUTANTS", "energies": "densities.MUTANTS"})
    assert main(["verify", "self_test=true", f"out={tmp_path}/v.json", "progress=false"]) == 0
    shown = capsys.readouterr().out
    assert "log-density     base alone" in shown and "every check detected its mutants: 21 checks" in shown
    detected = json.loads((tmp_path / "v.json").read_text())["detected"]
    assert detected["flows"]["latents"] == ["latents scaled"] and "score" in detected["energies"]


def test_an_error_that_no_check_notices_is_exit_code_1(monkeypatch, capsys):
    blind = {"blind": FlowMutant(Flow, frozenset({"samples"})), "sound": FlowMutant(BaseAlone)}
    monkeypatch.setattr("tests.mutants.models.FLOW_MUTANTS", blind)
    monkeypatch.setattr(command, "_MUTANTS", {"flows": "models.FLOW_MUTANTS"})
    assert main(["verify", "self_test=true", "progress=false"]) == 1
    shown = capsys.readouterr()
    assert "samples (flows: blind), log-density (flows: sound)" in shown.err and shown.err.count("\n") == 1
    assert "every check detected" not in shown.out


def test_every_table_of_errors_is_in_the_self_test():
    tables = {f"{file.stem}.{name}" for file in Path("tests/mutants").glob("*.py")
              for name in re.findall(r"^(\w*MUTANTS)\b", file.read_text(), re.M)}
    assert tables == set(command._MUTANTS.values())


def test_the_self_test_needs_the_source(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "genmodels" / "cli" / "verify.py"))
    assert main(["verify", "self_test=true"]) == 2
    assert "self_test needs tests/mutants" in capsys.readouterr().err
    assert main(["verify", "self_test=true", "what=attention"]) == 2
