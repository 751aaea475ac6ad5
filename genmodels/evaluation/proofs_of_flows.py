"""What can be proved of a normalizing flow: its laws, those of its bijections, and of every kind of layer in them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from genmodels.data.spec import Batch
from genmodels.evaluation import laws_of_flows
from genmodels.evaluation.bijections import LAWS, check_bijection, show_shape
from genmodels.evaluation.findings import Findings, Options, counting
from genmodels.evaluation.laws import Report
from genmodels.evaluation.subject import EVERYWHERE, perturb, ranges
from genmodels.flows.bijection import Bijection, Compose, Step
from genmodels.flows.flow import Flow
from genmodels.models.base import GenerativeModel
from genmodels.random import KeyedGenerator

#: Laws of single layers that depend on the numbers in them, judged on every layer of a trained flow.
NUMERIC = ("round trip", "log-det forward", "log-det inverse", "log-dets cancel", "float32")
#: Rounding adds up over many layers (and whole flows are compiled layer by layer).
DEEP = {"round trip": 1e-9, "log-dets cancel": 1e-8, "rows independent": 1e-9, "padding": 1e-9, "masked log-det": 1e-9,
        "float32": 1e-3}


@dataclass(frozen=True)
class Seen:
    """A bijection of a model, and what it was given when the model was at work."""

    name: str
    bijection: Bijection
    x: Tensor
    cond: Tensor | None


def prove_flow(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The laws of flows on the flow, of bijections on every bijection as a whole and on every kind of layer in it."""
    if options.randomise:
        perturb(model.core, torch.Generator().manual_seed(options.seed))
    if initial is not None:
        model.initialize(initial)
    model.eval()
    new = fresh().to(model.device).eval()
    seen = list(at_work(model, batch, options.seed))
    plans = [plan for part in seen for plan in plans_of(part, new.core, options)]
    total = sum(len(LAWS.choose(plan.options.get("only"))) for plan in plans) + len(laws_of_flows.LAWS.laws)
    findings = Findings()
    with counting(total, options.progress) as watch:
        findings.wholes.append(_of_flow(model, new, seen, batch, watch))
        for plan in plans:
            report = check_bijection(plan.layer, tuple(plan.x.shape[1:]), x=plan.x, watch=watch, **plan.options)
            if plan.alike is None:
                findings.wholes.append(report)
            elif findings.layers and findings.layers[-1][0] is plan.alike:
                findings.layers[-1][1].append(report)
            else:
                findings.layers.append((plan.alike, [report]))
    return findings


@dataclass(frozen=True)
class Plan:
    """One call of `check_bijection`: the layer, its input, the rest; and the names of the layers it stands for."""

    layer: Bijection
    x: Tensor
    options: dict[str, Any]
    alike: list[str] | None = None


def plans_of(part: Seen, core: nn.Module, options: Options) -> Iterator[Plan]:
    """What is to be checked of a bijection: the whole, then one of each group of layers that are alike.

    Of a trained one the others too, for they differ in their numbers.
    """
    whole = copy.deepcopy(part.bijection).double()
    cond = part.cond.double() if part.cond is not None and part.cond.is_floating_point() else part.cond
    with torch.no_grad():
        steps = list(whole.walk(part.x.double(), cond, name=part.name))

    def checks(name: str, layer: Bijection, x: Tensor, z: Tensor, cond: Tensor | None, **more) -> dict:
        return {
            "z": near(z, layer, options.seed), "cond": cond, "fresh": lambda: copy.deepcopy(core.get_submodule(name)),
            "randomise": False, "max_dims": options.max_dims, "seed": options.seed,
            "name": f"{name} {type(layer).__name__} {show_shape(x.shape[1:])}", **more,
        }  # fmt: skip

    last = steps[-1].z if steps else part.x.double()
    together = checks(part.name, whole, part.x, last, cond, compiler=None, tolerances=DEEP)
    yield Plan(part.bijection, part.x, together)
    groups: dict[tuple, list[Step]] = {}
    for step in steps if len(steps) > 1 else []:
        if not isinstance(step.layer, Compose):  # the joined scales at the end of a multi-scale flow
            groups.setdefault((fingerprint(step.layer), tuple(step.x.shape[1:])), []).append(step)
    for group in groups.values():
        alike = [step.name for step in group]
        # With random parameters, layers that are alike are one layer.
        for number, (name, layer, x, z, _, own, _) in enumerate(group[:1] if options.randomise else group):
            only = None if number == 0 else NUMERIC
            yield Plan(layer, x, checks(name, layer, x, z, own, compiler=options.compiler, only=only), alike)


def near(z: Tensor, bijection: Bijection, seed: int) -> Tensor:
    """Latents close to those of data, yet not among them: far away the logit's inverse has no digits left."""
    if ranges(bijection)[1] != EVERYWHERE:
        return z
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype).to(z.device)
    return z + 0.1 * z.std() * noise


def _of_flow(model: GenerativeModel, new: GenerativeModel, seen: list[Seen], batch: Batch, watch) -> Report:
    """The laws of flows on `core.flow`."""
    flow: Flow = copy.deepcopy(model.core.flow).double()
    own = next(part for part in seen if part.bijection is model.core.flow.bijection)
    cond = batch.cond if flow.uses_cond else None
    subject = laws_of_flows.FlowSubject(flow, own.x.double(), cond, new.core.flow)
    verdicts = []
    for law in laws_of_flows.LAWS.laws.values():
        watch(law)
        verdicts += laws_of_flows.LAWS.judge(subject, [law])
    size = sum(parameter.numel() for parameter in model.core.parameters())
    return Report(f"{model.family} with {size:,} parameters", tuple(verdicts))


@torch.no_grad()
def at_work(model: GenerativeModel, batch: Batch, seed: int) -> Iterator[Seen]:
    """Every outermost bijection of a model with the input it gets from the model's own preprocessing."""
    caught: dict[str, Seen] = {}
    inner = {id(part) for module in model.core.modules() if isinstance(module, Bijection)
             for part in module.modules() if part is not module}
    hooks = []
    for name, module in model.core.named_modules():
        if isinstance(module, Bijection) and id(module) not in inner:

            def note(layer, given, named, name=name):
                x, cond, _ = (*given, None, None)[:3]
                caught.setdefault(name, Seen(name, layer, x.detach(), named.get("cond", cond)))

            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        model.loss(batch, KeyedGenerator(seed, torch.arange(len(batch), device=model.device), "verify"))
    finally:
        for hook in hooks:
            hook.remove()
    yield from caught.values()


def fingerprint(layer: nn.Module) -> tuple:
    """What makes two layers alike: classes, plain settings and shapes of parameters, all the way down.

    Example:
        >>> from genmodels.flows.permute import Flip
        >>> fingerprint(Flip(3)) == fingerprint(Flip(3)), fingerprint(Flip(3)) == fingerprint(Flip(4))
        (True, False)
    """
    return tuple(
        (name, type(module).__name__, _settings(module),
         *(tuple(t.shape) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None))
        for name, module in layer.named_modules()
    )


def _settings(owner: object) -> tuple:
    """The plain attributes of an object, and those of plain objects it holds."""
    found = []
    for key, value in sorted(vars(owner).items()):
        if isinstance(value, bool | int | float | str | tuple | None) and key != "place":
            found.append((key, str(value)))
        elif hasattr(value, "__dict__") and not callable(value) and not key.startswith("_"):
            found.append((key, type(value).__name__, _settings(value)))
    return tuple(found)
