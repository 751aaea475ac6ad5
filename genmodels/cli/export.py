"""`genmodels export`: a model as a file for other programs, checked against itself: .safetensors, .onnx, .pt2."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError, an, with_class
from genmodels.core.files import check_writable, located, typed, write_whole
from genmodels.core.samples import check_companions
from genmodels.diffusion import Denoiser
from genmodels.diffusion.denoiser import FlowMap, TokenDenoiser
from genmodels.flows.elementwise import LogisticMixture
from genmodels.flows.flow import Flow
from genmodels.flows.linear import MATRICES
from genmodels.models.base import GenerativeModel
from genmodels.models.checkpoint import load_model, weights_of, write_exported
from genmodels.models.density import is_flow, is_of_noisy_data
from genmodels.models.diffusion import DiffusionModel
from genmodels.models.glow_tts import GlowTTS

_ROWS = 5  # of an example: unlikely to equal another size, with which the tracer would confuse it
_TOLERANCE = 1e-3  # relative to the largest value: rounding of float32 with operations in another order
#: Replaced for ONNX, which has no hypot, and whose log-sigmoid, the logarithm of a sigmoid, is imprecise far below 0.
_DECOMPOSITIONS = {
    torch.ops.aten.hypot.default: lambda a, b: torch.sqrt(a * a + b * b),
    torch.ops.aten.log_sigmoid.default: lambda x: x.clamp(max=0) - torch.log1p(torch.exp(-x.abs())),
}


def run(
    *, ckpt: str, out: str = "model.safetensors", ema: bool | float = True, trust: list[str] | None = None
) -> None:
    """Write a trained model to a file that other programs read.

    Arguments:
        ckpt: a checkpoint, a run folder, an exported .safetensors, or hf://user/name.
        out: a .safetensors (all weights and the configuration; sample and evaluate read it as ckpt=), a .onnx or a
            .pt2 (torch.export) with the network of a denoiser, a flow in both directions, or a text-to-speech flow.
        ema: averaged weights (true), raw ones (false), or the average with one decay, of the network.
        trust: further packages whose classes the checkpoint may name.
    """
    model, header = load_model(located(ckpt), device="cpu", trust=trust or [])
    for line in export(model, header, out, ema, trust or []):
        print(line)


def export(
    model: GenerativeModel, header: dict, out: str | Path, ema: bool | float = True, trust: Sequence[str] = (),
) -> list[str]:
    """Write a model to a file, or one for each of its functions; lines for the user, whose commands trust packages.

    Raises:
        InputError: for another kind of file, a model that has no such form, or a package that is missing.
        RunError: for a network that cannot be traced, or an exported one that gives other numbers.
    """
    target = Path(out).expanduser()
    if target.suffix not in (".safetensors", ".onnx", ".pt2"):
        raise InputError(f"out={out}: end it in .safetensors (weights and configuration), .onnx or .pt2 (the network)")
    check_writable("out", target)
    if target.suffix == ".safetensors":
        if ema is not True:
            raise InputError("ema is for .onnx and .pt2: a .safetensors holds all weights, leave it out")
        write_exported(target, {"genmodels": header, "state_dict": model.state_dict()})
        return [f"{header['parameters']:,} parameters with their configuration: {target}",
                f"use:      {usage(model, typed('ckpt', target, trust))}"]
    if model.device.type != "cpu":
        model = copy.deepcopy(model).cpu()  # where the example inputs are
    header = header | ({"units": units} if (units := _units_of(model)) else {})
    graphs, lines = graphs_of(model, weights_of(ema)), []
    places = [target.with_name(f"{target.stem}{graph.suffix}{target.suffix}") for graph in graphs]
    check_companions(target, places)
    files = [_exported(graph, header, target) for graph in graphs]
    # Only now, so that nothing is written where one of them cannot be exported.
    for graph, place, (content, parity) in zip(graphs, places, files, strict=True):
        write_whole(place, lambda file, content=content: file.write(content))
        lines += [f"{graph.meaning}: {place}", parity]
    return lines


def usage(model: GenerativeModel, named: str) -> str:
    """The command that uses a model: it samples, or transcribes."""
    return f"genmodels sample {named}" if model.generates else f"genmodels transcribe {named} a.wav"


class Function(nn.Module):
    """`function(part, *tensors)` as a module, where `part` holds the weights."""

    def __init__(self, function: Callable, part: nn.Module):
        super().__init__()
        self.function, self.part = function, part

    def forward(self, *inputs: Tensor):
        return self.function(self.part, *inputs)


class FixedMatrix(nn.Module):
    """A matrix of channels, its inverse and its log-determinant as numbers, which ONNX cannot compute from factors."""

    def __init__(self, matrix: nn.Module):
        super().__init__()
        for name in ("weight", "inverse", "log_abs_det"):
            self.register_buffer(f"_{name}", getattr(matrix, name)(torch.float32).detach())

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self._weight.to(dtype)

    def inverse(self, dtype: torch.dtype) -> Tensor:
        return self._inverse.to(dtype)

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return self._log_abs_det.to(dtype)


def _with_fixed_matrices(core: nn.Module) -> nn.Module:
    """The same core, or a copy where it has such matrices."""
    if not any(isinstance(part, tuple(MATRICES.values())) for part in core.modules()):
        return core
    core = copy.deepcopy(core)
    for part in core.modules():
        if isinstance(getattr(part, "matrix", None), tuple(MATRICES.values())):
            part.matrix = FixedMatrix(part.matrix)
    return core


class Graph(NamedTuple):
    """A function to be exported.

    Attributes:
        suffix: end of the file's name, where a model has several.
        meaning: its result, in words.
        module: the function.
        inputs: examples by name, a batch; of texts one, of any length.
        outputs: names of what it returns.
        any_length: whether it takes one text (and mel) of any length; otherwise a batch of events of one size.
    """

    suffix: str
    meaning: str
    module: Function
    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    any_length: bool = False


def graphs_of(model: GenerativeModel, weights: str | float = "ema") -> list[Graph]:
    """The functions of a model that make sense without this library.

    Raises:
        InputError: for a model of which there are none, with the reason.

    Example:
        >>> from genmodels.core.data import DataSpec
        >>> from genmodels.models.ddpm import DDPM
        >>> [graph.outputs for graph in graphs_of(DDPM(DataSpec("plane", (2,)), num_steps=4))]
        [('x0', 'eps')]
    """
    core, spec = _with_fixed_matrices(model.weights(weights)), model.spec
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, *spec.event_shape, generator=generator)
    classes = {} if model.num_classes is None else {"cond": torch.arange(_ROWS) % model.num_classes}
    if spec.text is not None:
        return _spoken(model, core)
    if is_flow(model):
        points = torch.rand(x.shape, generator=generator) if spec.levels else x
        return _both_ways(model, core.flow, points, classes)
    if isinstance(core, TokenDenoiser):
        tokens = torch.randint(0, spec.levels + 1, x.shape, generator=generator)
        return [Graph("", f"log_p of every value (tokens: 0..{spec.levels - 1}, {spec.levels} where masked)",
                      Function(lambda part, *given: part(*given), core), {"tokens": tokens, **classes}, ("log_p",))]
    if isinstance(core, FlowMap):
        times = {"t": torch.linspace(0.3, 0.9, _ROWS), "until": torch.linspace(0.0, 0.2, _ROWS)}
        meaning = "velocity: x at time until is x - (t - until) velocity, x = (1 - t) x0 + t noise"
        return [Graph("", meaning + _units(spec),
                      Function(lambda part, *given: part.mean_velocity(*given), core), {"x": x, **times, **classes},
                      ("velocity",))]
    if isinstance(core, Denoiser) and not hasattr(core.net, "energy"):
        log_snr = {"log_snr": torch.linspace(-30.0, 3.0, _ROWS)}
        return [Graph("", "x0 and eps of x = sqrt(sigmoid(log_snr)) x0 + sqrt(sigmoid(-log_snr)) eps" + _units(spec),
                      Function(_ends, core), {"x": x, **log_snr, **classes}, ("x0", "eps"))]
    raise InputError(f"{an(model.family)} has no function to export but its weights: its samples follow gradients of "
                     "the network or a loop over earlier draws; out=model.safetensors holds all of it")


def _units_of(model: GenerativeModel) -> dict:
    """Location and scale by which continuous data, and those that a flow starts from, are standardised."""
    if not isinstance(model, DiffusionModel):
        return {}
    own = {} if model.spec.levels is not None else {"location": model.location, "scale": model.scale}
    start = {} if not model.spec.source or model.spec.source["levels"] is not None else {
        "source_location": model.source_location, "source_scale": model.source_scale}
    return {key: value.tolist() for key, value in (own | start).items()}


def _units(spec: DataSpec) -> str:
    """What a network's x0 is of the data, and eps of the source where there is one, in words."""
    parts = [("x0", "data", "", spec.levels)]
    parts += [("eps", "source", "source_", spec.source["levels"])] if spec.source else []
    return "".join(
        f", {name} = 2 level / {levels - 1} - 1 of the {what}" if levels is not None else
        f", {name} = ({what} - {prefix}location) / {prefix}scale, the `units` in the file's metadata"
        for name, what, prefix, levels in parts
    )


def _ends(core: Denoiser, x: Tensor, log_snr: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor]:
    found = core.at_log_snr(x, log_snr, cond)
    return found.x0, found.eps


def _forward(flow: Flow, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor]:
    z, logdet = flow.bijection(x, cond if flow.bijection.uses_cond else None)
    return z, flow.base.log_prob(z, cond if flow.base.uses_cond else None, None) + logdet


def _inverse(flow: Flow, z: Tensor, cond: Tensor | None = None) -> Tensor:
    return flow.bijection.inverse(z, cond if flow.bijection.uses_cond else None)[0]


def _noise(model: GenerativeModel) -> str:
    """The noise u that the flow was trained with, in words."""
    if is_of_noisy_data(model):
        return f"u = 1/2 + {model.augment / 2 * model.spec.levels:g} n, n normal: the density is that of noisy data"
    if model.dequantisation == "uniform":
        return "u uniform in [0, 1)"
    return "u in [0, 1), of a learned noise that is not exported"


def _both_ways(model: GenerativeModel, flow: Flow, points: Tensor, classes: dict[str, Tensor]) -> list[Graph]:
    classes = classes if flow.uses_cond else {}
    scale = "" if model.spec.levels is None else f", x = (level + u) / {model.spec.levels} with {_noise(model)}"
    with torch.no_grad():
        z, _ = _forward(flow, points, **classes)
    there = Graph("", f"latent z and log-density in nats of x{scale}", Function(_forward, flow),
                  {"x": points, **classes}, ("z", "log_p"))
    # An inverse that draws one token after the other, or searches by an operation that only this library has.
    if model.family == "tarflow" or any(isinstance(part, LogisticMixture) for part in flow.modules()):
        return [there]
    back = Graph("_inverse", f"x of the latent z{scale}", Function(_inverse, flow), {"z": z, **classes}, ("x",))
    return [there, back]


def _spoken(model: GenerativeModel, core: nn.Module) -> list[Graph]:
    if not model.generates:
        raise InputError(f"{an(model.family)} reads texts from mels and is exported as weights alone: "
                         "out=model.safetensors")
    if not isinstance(model, GlowTTS):
        raise InputError(f"{an(model.family)} makes a mel in a loop whose length its text decides, which no graph "
                         "holds: out=model.safetensors holds all of it, and glow_tts can be exported")
    if core.embedding is not None:
        raise InputError("a glow_tts of several speakers is not exported: only models of one voice are")
    tokens = torch.arange(1, 7)[None] % len(model.spec.text["symbols"])
    path = torch.eye(6).repeat_interleave(2, 1)[None]
    both = nn.ModuleDict({"flow": core.tts, "units": model.units})
    noise = torch.randn(1, model.spec.event_shape[0], 12, generator=torch.Generator().manual_seed(0))
    return [
        Graph("_durations", "frames of every token", Function(_frames, both), {"tokens": tokens}, ("frames",),
              any_length=True),
        Graph("", "log-mel for a vocoder of one text: path (1, N, T) is 1 where token n is heard in frame t, T even, "
              "at least 4; noise is normal, times the temperature", Function(_mel, both),
              {"tokens": tokens, "path": path, "noise": noise}, ("mel",), any_length=True),
    ]


def _frames(both: nn.ModuleDict, tokens: Tensor) -> Tensor:
    h, _, _ = both["flow"].encoder(tokens, None, None)
    return both["flow"].durations.frames(h)


def _mel(both: nn.ModuleDict, tokens: Tensor, path: Tensor, noise: Tensor) -> Tensor:
    _, mu, log_sigma = both["flow"].encoder(tokens, None, None)
    z = mu @ path + torch.exp(log_sigma @ path) * noise
    return both["units"].inverse(both["flow"].decoder.inverse(z)[0])


def _exported(graph: Graph, header: dict, target: Path) -> tuple[bytes, str]:
    """The content of a function's file, and a line on how it compares with the function on other inputs."""
    examples, names = tuple(graph.inputs.values()), list(graph.inputs)
    batch, auto = torch.export.Dim("batch"), torch.export.Dim.AUTO
    axes = tuple({axis: auto for axis in range(1, x.dim())} if graph.any_length else {0: batch} for x in examples)
    try:
        with torch.no_grad():
            program = torch.export.export(graph.module.eval(), examples, dynamic_shapes=(axes,), strict=True)
    except Exception as error:  # the tracer raises errors of many classes
        raise RunError(f"{target}: torch.export cannot trace this network ({with_class(error)}); "
                       "out=model.safetensors holds its weights") from error
    text = json.dumps(header)
    if target.suffix == ".pt2":
        with warnings.catch_warnings():  # of tensors that share memory; the file is compared below
            warnings.filterwarnings("ignore", "No complete tensor found")
            torch.export.save(program, buffer := io.BytesIO(), extra_files={"genmodels.json": text})
        content = buffer.getvalue()
        return content, _parity(graph, torch.export.load(io.BytesIO(content)).module(), "the file read again")
    content = _onnx(program, examples, names, graph.outputs, text)
    return content, _parity_of_onnx(graph, content)


def _onnx(program, examples: tuple[Tensor, ...], names: list[str], outputs: tuple[str, ...], text: str) -> bytes:
    try:
        import onnx
        import onnxscript  # used by torch's exporter
    except ImportError as error:
        raise InputError(f"a .onnx needs the package {error.name}: pip install 'genmodels[export]'; a .pt2 needs none"
                         ) from None
    del onnxscript
    try:
        program = program.run_decompositions(_DECOMPOSITIONS)
        written = torch.onnx.export(program, examples, input_names=names, output_names=outputs, dynamo=True,
                                    verbose=False)  # fmt: skip
    except Exception as error:  # the exporter raises errors of many classes, of which the first names the operation
        first = error
        while first.__cause__ is not None:
            first = first.__cause__
        raise RunError(f"ONNX cannot hold {', '.join(outputs)} of this network ({with_class(first)}); out=model.pt2 or "
                       "out=model.safetensors can") from error
    proto = written.model_proto
    onnx.helper.set_model_props(proto, {"genmodels": text})
    return proto.SerializeToString()


def _parity_of_onnx(graph: Graph, content: bytes) -> str:
    try:
        from onnxruntime import InferenceSession
    except ImportError:
        return "not checked: onnxruntime is not installed (pip install 'genmodels[export]')"
    session = InferenceSession(content)

    def found(*inputs: Tensor) -> list[np.ndarray]:
        return session.run(None, {name: x.numpy() for name, x in zip(graph.inputs, inputs, strict=True)})

    return _parity(graph, found, "onnxruntime")


def _parity(graph: Graph, exported: Callable, by: str) -> str:
    """Compare on three inputs (of a text, one) that the tracer has not seen, and return a line on the difference.

    They are interpolated between examples, and so stay where the graph is defined: data of a flow between the levels.
    """
    generator = torch.Generator().manual_seed(1)

    def unseen(name: str, x: Tensor) -> Tensor:
        if len(x) == 1:
            return x + 0.1 * torch.rand(x.shape, generator=generator) if x.is_floating_point() and name != "path" else x
        one, other = (x[torch.randint(len(x), (3,), generator=generator)] for _ in range(2))
        return torch.lerp(one, other, 0.1) if x.is_floating_point() else one

    inputs = [unseen(name, x) for name, x in graph.inputs.items()]
    with torch.no_grad():
        ours, theirs = graph.module(*inputs), exported(*inputs)
    ours = ours if isinstance(ours, tuple) else (ours,)
    theirs = theirs if isinstance(theirs, tuple | list) else (theirs,)
    # By rows: x0 at a low log-SNR may be a thousand times as large as that of another row.
    differences = torch.cat([(a - torch.as_tensor(b)).abs().reshape(len(a), -1).amax(1)
                             for a, b in zip(ours, theirs, strict=True)])
    sizes = torch.cat([a.abs().reshape(len(a), -1).amax(1) for a in ours])
    worst, largest = float(differences.max()), float(sizes.max())  # NaN is the largest difference
    if not bool((differences <= _TOLERANCE * sizes.clamp(min=1)).all()):
        raise RunError(f"the exported {', '.join(graph.outputs)} differ by {worst:.1e} from those of the model ({by})")
    return f"largest difference of {', '.join(graph.outputs)} by {by}: {worst:.1e}, of values up to {largest:.2g}"
