"""`genmodels export`: files that other programs read give the numbers of the model."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from genmodels.cli.export import Function, Graph, _parity, export, graphs_of, usage
from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.models.ddpm import DDPM, EnergyDDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.few_steps import MeanFlowModel
from genmodels.models.flow_matching import FlowMatchingModel
from genmodels.models.glow_tts import GlowTTS
from genmodels.models.masked_diffusion import MaskedDiffusionModel
from genmodels.models.normalizing_flows import NSF, Glow, RealNVP
from genmodels.speech.text import CHARACTERS
from tests.parameters import scattered

PLANE, DIGITS = DataSpec("plane", (2,)), DataSpec("digits", (1, 4, 4), levels=17, num_classes=3)
SMALL = {"hidden": 8, "depth": 1}


def perturbed(model):
    """Weights that are nowhere zero, and a flow that has seen data."""
    torch.manual_seed(0)
    x = torch.randn(64, 2) if model.spec.levels is None else torch.randint(0, model.spec.levels, (64, 1, 8, 8)).byte()
    model.initialize(Batch(x, index=torch.arange(64)))
    return scattered(model, 0.1).eval()


def ddpm():
    return perturbed(DDPM(PLANE, num_steps=8, net=SMALL, ema_decay=0.0))


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    """A DDPM, the file of its network and the lines about it; tracing takes seconds."""
    model, path = ddpm(), tmp_path_factory.mktemp("denoiser") / "network.pt2"
    model.location.copy_(torch.tensor([0.5, -2.0]))
    model.scale.copy_(torch.tensor([0.25, 3.0]))
    return model, path, export(model, model.header(), path)


def test_a_denoiser_as_torch_export_is_the_model(denoiser):
    model, path, lines = denoiser
    assert "largest difference of x0, eps by the file read again" in lines[1]
    held = {"genmodels.json": ""}
    read = torch.export.load(io.BytesIO(path.read_bytes()), extra_files=held).module()
    x, log_snr = torch.randn(5, 2), torch.linspace(-3, 3, 5)
    x0, eps = read(x, log_snr)
    expected = model.core.at_log_snr(x, log_snr)
    assert torch.allclose(x0, expected.x0, atol=1e-4) and torch.allclose(eps, expected.eps, atol=1e-4)
    about = json.loads(held["genmodels.json"])
    assert about["family"] == "ddpm"
    assert lines[0].startswith("x0 and eps of x =") and "x0 = (data - location) / scale, the `units`" in lines[0]
    location, scale = (torch.tensor(about["units"][key]) for key in ("location", "scale"))
    torch.testing.assert_close(x * scale + location, model.decode(x))
    alpha, sigma = torch.sigmoid(log_snr)[:, None].sqrt(), torch.sigmoid(-log_snr)[:, None].sqrt()
    assert torch.allclose(alpha * x0 + sigma * eps, x, atol=1e-4)  # what the printed line says of them


def test_a_network_that_gives_other_numbers_is_not_written(denoiser, tmp_path, monkeypatch):
    model, path, _ = denoiser
    program = torch.export.load(path)
    monkeypatch.setattr(torch.export, "export", lambda *given, **options: program)
    monkeypatch.setattr("genmodels.cli.export._TOLERANCE", -1.0)
    with pytest.raises(RunError, match="differ by"):
        export(model, model.header(), tmp_path / "network.pt2")
    assert not list(tmp_path.iterdir())


def test_a_flow_in_both_directions(tmp_path):
    """Of pixels, compared where it is defined: logits of values above one are no numbers, equal to any others."""
    model = perturbed(RealNVP(DataSpec("digits", (1, 8, 8), levels=17), layout=["checkerboard*1"], hidden=4, depth=1,
                              actnorm=False, ema_decay=0.0))
    lines = export(model, model.header(), tmp_path / "flow.pt2")
    assert len([line for line in lines if "largest difference" in line]) == 2
    largest, one = (float(line.rpartition(" ")[2]) for line in lines if "of values up to" in line)
    assert largest > 10 and 0.5 < one <= 1
    there, back = (torch.export.load(io.BytesIO((tmp_path / f"flow{end}.pt2").read_bytes())).module()
                   for end in ("", "_inverse"))
    (tmp_path / "other_inverse.pt2").write_text("mine")
    with pytest.raises(InputError, match="also writes .*other_inverse.pt2, which exists"):
        export(model, model.header(), tmp_path / "other.pt2")
    assert not (tmp_path / "other.pt2").exists() and (tmp_path / "other_inverse.pt2").read_text() == "mine"
    assert export(model, model.header(), tmp_path / "flow.pt2") == lines  # its own files are replaced
    x = torch.rand(4, 1, 8, 8)
    z, log_p = there(x)
    assert torch.allclose(log_p, model.core.flow.log_prob(x), atol=1e-4) and torch.allclose(back(z), x, atol=1e-4)


def test_onnx_by_onnxruntime(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (pip install 'genmodels[export]')")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = ddpm()
    lines = export(model, model.header(), tmp_path / "network.onnx")
    assert "by onnxruntime" in lines[1]
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx")
    x, log_snr = torch.randn(3, 2), torch.tensor([-17.0, 0.0, 17.0])  # its sigmoid has few digits there
    x0, eps = session.run(None, {"x": x.numpy(), "log_snr": log_snr.numpy()})
    expected = model.core.at_log_snr(x, log_snr)
    assert torch.allclose(torch.from_numpy(x0), expected.x0, atol=1e-6) and eps.shape == (3, 2)
    assert json.loads(session.get_modelmeta().custom_metadata_map["genmodels"])["data"]["name"] == "plane"


def test_onnx_is_given_only_what_it_has(tmp_path, monkeypatch):
    """It has neither hypot nor operations of linear algebra."""
    programs, made = [], SimpleNamespace(model_proto=SimpleNamespace(SerializeToString=bytes))

    def exporter(program, *given, **options):
        programs.append(program)
        if len(programs) == 3:
            raise RuntimeError("\x1b[96mStep 3 of 3") from ValueError("no ONNX function found")
        return made

    monkeypatch.setattr(torch.onnx, "export", exporter)
    helper = SimpleNamespace(set_model_props=lambda *given: None)
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(helper=helper))
    monkeypatch.setattr("genmodels.cli.export._parity_of_onnx", lambda *given: "not compared")
    straight = perturbed(FlowMatchingModel(PLANE, net=SMALL, ema_decay=0.0))
    mixed = perturbed(NSF(PLANE, layers=1, hidden=4, depth=1, transform="affine", mix="lu", ema_decay=0.0))
    export(straight, straight.header(), tmp_path / "straight.onnx")
    with pytest.raises(RunError, match="ONNX cannot hold x of this network .ValueError: no ONNX function found"):
        export(mixed, mixed.header(), tmp_path / "mixed.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["straight.onnx"]  # both of a flow's files, or neither
    used = {str(node.target) for program in programs for node in program.graph.nodes if node.op == "call_function"}
    assert len(used) > 20 and not [one for one in used if re.search("hypot|linalg", one)]
    x, log_snr = torch.randn(3, 2), torch.tensor([-17.0, 0.0, 17.0])
    x0, (z, log_p) = programs[0].module()(x, log_snr)[0], programs[1].module()(x)
    assert torch.allclose(x0, straight.core.at_log_snr(x, log_snr).x0, atol=1e-6)
    assert torch.allclose(log_p, mixed.core.flow.log_prob(x), atol=1e-5)
    assert torch.allclose(programs[2].module()(z), x, atol=1e-5)


def test_a_recogniser_is_used_to_transcribe():
    assert usage(SimpleNamespace(generates=True), "ckpt=a") == "genmodels sample ckpt=a"
    assert usage(SimpleNamespace(generates=False), "ckpt=a") == "genmodels transcribe ckpt=a a.wav"


def test_what_each_family_gives():
    net = {"channels": 8, "multipliers": [1, 2], "blocks": 1}
    text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
    pixels = DataSpec("digits", (1, 8, 8), levels=17)
    speech = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
    tts = GlowTTS(speech, encoder={"channels": 8, "depth": 1, "hidden": 8}, steps=1, hidden=8, depth=1).eval()
    found = {
        "mean_flow": graphs_of(MeanFlowModel(DIGITS, net=net)),
        "masked": graphs_of(MaskedDiffusionModel(DIGITS, net={"width": 16, "depth": 1})),
        "tts": graphs_of(tts),
        "mixture": graphs_of(perturbed(Glow(pixels, levels=1, steps=1, hidden=4, coupling="mixture"))),
    }
    assert [graph.outputs for graph in found["mean_flow"]] == [("velocity",)]
    assert list(found["mean_flow"][0].inputs) == ["x", "t", "until", "cond"]
    assert found["mean_flow"][0].meaning.endswith("x0 = 2 level / 16 - 1 of the data")
    assert [graph.outputs for graph in found["masked"]] == [("log_p",)]
    assert [graph.outputs for graph in found["tts"]] == [("frames",), ("mel",)]
    assert [graph.outputs for graph in found["mixture"]] == [("z", "log_p")]
    for graphs in found.values():
        for graph in graphs:
            with torch.no_grad():
                assert graph.module.eval()(*graph.inputs.values())[0].isfinite().all()


def test_a_flow_between_two_data_sets_has_the_units_of_both(tmp_path):
    spec = DataSpec("from_a_to_b", (2,), source={"name": "a", "levels": None})
    model = FlowMatchingModel(spec, net={"hidden": 8, "depth": 1}).eval()
    for k, name in enumerate(("location", "scale", "source_location", "source_scale")):
        getattr(model, name).fill_(k + 1.0)
    said = export(model, model.header(), tmp_path / "n.pt2")[0]
    assert "x0 = (data - location) / scale" in said and "eps = (source - source_location) / source_scale" in said
    torch.export.load(tmp_path / "n.pt2", extra_files=(held := {"genmodels.json": ""}))
    assert json.loads(held["genmodels.json"])["units"] == {
        "location": [1.0, 1.0], "scale": [2.0, 2.0], "source_location": [3.0, 3.0], "source_scale": [4.0, 4.0]}


def test_what_cannot_be_exported_says_why(tmp_path):
    energy = EnergyModel(PLANE)
    for model in (energy, EnergyDDPM(PLANE)):
        with pytest.raises(InputError, match="gradients of the network .* out=model.safetensors"):
            export(model, model.header(), tmp_path / "energy.onnx")
    with pytest.raises(InputError, match="end it in .safetensors"):
        export(energy, energy.header(), tmp_path / "energy.pth")


def test_another_network_is_found():
    graph = Graph("", "twice x", Function(lambda part, x: 2 * x, nn.Identity()), {"x": torch.ones(2, 1)}, ("y",))
    assert "0.0e+00" in _parity(graph, lambda x: 2 * x, "itself")
    with pytest.raises(RunError, match="differ by"):
        _parity(graph, lambda x: 2.01 * x, "another")
    with pytest.raises(RunError, match="differ by nan"):
        _parity(graph, lambda x: math.nan * x, "none")
    both = Function(lambda part, x: (1e4 * x, x), nn.Identity())
    with pytest.raises(RunError, match="differ by"):  # a large output hides no other one
        _parity(graph._replace(module=both), lambda x: (1e4 * x, 1.5 * x), "another")
