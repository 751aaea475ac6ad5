"""Checks of flows: density, latents, samples, and of every bijection and layer in a model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

from genmodels.core.data import Batch
from genmodels.core.random import KeyedGenerator
from genmodels.core.tensors import event_sum
from genmodels.flows.bijection import Bijection, NotInitialized, Step, shown
from genmodels.flows.composition import Compose
from genmodels.flows.flow import Flow
from genmodels.flows.multiscale import MultiScale
from genmodels.models.base import GenerativeModel
from genmodels.verification.bijections import CHECKS, check_bijection
from genmodels.verification.check import (
    NOT_APPLICABLE,
    NOT_VERIFIED,
    PASSED,
    CheckSet,
    CheckSpec,
    Findings,
    Measured,
    NotApplicable,
    Options,
    Report,
    counting,
)
from genmodels.verification.maps import relative, worst
from genmodels.verification.subject import EVERYWHERE, cast, perturb, prepare, ranges

FLOW_CHECKS = CheckSet()


@dataclass(frozen=True)
class FlowSubject:
    """A flow in float64, a batch of its inputs, and another instance that is not initialised (or None)."""

    flow: Flow
    x: Tensor
    cond: Tensor | None
    blank: Flow | None

    def sample(self, index: Tensor, temperature: float = 1.0) -> Tensor:
        """Samples of these numbers."""
        noise = KeyedGenerator(0, index.to(self.x.device), "verify")
        cond = None if self.cond is None else self.cond[index % len(self.cond)]
        return self.flow.sample(len(index), cond, temperature=temperature, generator=noise)


@FLOW_CHECKS.add("log-density", 1e-12, "log p(x) = log base(z) + log-determinant")
@torch.no_grad()
def log_density(s: FlowSubject) -> Measured:
    """The sum of bijection and base, against `flow.log_prob`."""
    z, logdet = s.flow.bijection(s.x, s.cond if s.flow.bijection.uses_cond else None)
    base = s.flow.base.log_prob(z, s.cond if s.flow.base.uses_cond else None)
    return Measured(relative(s.flow.log_prob(s.x, s.cond), base + logdet))


@FLOW_CHECKS.add("latents", 1e-9, "from_latents(latents(x)) = x")
@torch.no_grad()
def latents(s: FlowSubject) -> Measured:
    """A round trip with all scales."""
    return Measured(relative(s.flow.from_latents(s.flow.latents(s.x, s.cond), s.cond), s.x))


@FLOW_CHECKS.add("samples", 1e-9,
               "sample k is the same alone and among others, and z(sample at temperature 0) is the mode")
@torch.no_grad()
def samples(s: FlowSubject) -> Measured:
    """Sample 2 of four against itself drawn alone; the latents at temperature 0 against the mode of the base."""
    together, alone = s.sample(torch.arange(4)), s.sample(torch.tensor([2]))
    errors = {"sample 2 alone": relative(alone[0], together[2])}
    cold = s.sample(torch.arange(2), temperature=0.0)
    cond = None if s.cond is None else s.cond[:2]
    z = s.flow.bijection(cold, cond if s.flow.bijection.uses_cond else None)[0]
    own = cond if s.flow.base.uses_cond else None
    mode = s.flow.base.sample(2, own, temperature=0.0, generator=KeyedGenerator(1, torch.arange(2).to(z.device)),
                              dtype=z.dtype, device=z.device)
    return worst({**errors, "temperature 0": relative(z, mode.reshape(z.shape))})


@FLOW_CHECKS.add("base", 0.0, "samples of the base follow its density, and this is normalised")
@torch.no_grad()
def base(s: FlowSubject) -> Measured:
    """No other density has a higher mean logarithm over samples, by the inequality of Gibbs: not the base over samples
    of a normal distribution with the base's means and variances, nor this one over samples of the base.

    The excess in nats, less four standard errors. It is blind to what differs from the normal distribution by less.
    """
    base, z = s.flow.base, s.flow.bijection(s.x, s.cond if s.flow.bijection.uses_cond else None)[0]
    n = max(64, min(4096, 2_000_000 // z[0].numel()))
    cond = s.cond[:1].expand(2 * n, *s.cond.shape[1:]) if base.uses_cond else None
    noise = KeyedGenerator(0, torch.arange(2 * n).to(z.device), "base")
    first, own = base.sample(2 * n, cond, generator=noise, event_shape=tuple(z.shape[1:]), dtype=z.dtype,
                             device=z.device).split(n)
    normal = Normal(first.mean(0), first.std(0))
    others = normal.mean + normal.stddev * torch.randn(first.shape, generator=torch.Generator().manual_seed(0)).to(z)
    excess = {}
    for name, points, sign in (("its density at its samples", own, -1), ("its density elsewhere", others, 1)):
        ratio = base.log_prob(points, None if cond is None else cond[:n])
        ratio = ratio - event_sum(normal.log_prob(points))
        ratio = (sign * ratio).clamp(min=-1e4)  # where the base has no density
        beyond = float(ratio.mean() - 4 * ratio.std() / math.sqrt(n))
        excess[name] = max(0.0, beyond) if math.isfinite(beyond) else math.inf
    return worst(excess)


@FLOW_CHECKS.add("waits for data", 0.0, "before initialisation densities, samples and latents raise NotInitialized")
@torch.no_grad()
def waits_for_data(s: FlowSubject) -> Measured:
    """On an instance that is not initialised; names the methods that do not raise."""
    if s.blank is None or next(iter(s.blank.bijection.uninitialized()), None) is None:
        raise NotApplicable("needs no data to start from")
    generator = KeyedGenerator(0, torch.arange(2).to(s.x.device))
    cond = None if s.cond is None else s.cond[:2]
    x = s.x[:2].float()
    calls = {
        "log_prob": lambda: s.blank.log_prob(x, cond),
        "sample": lambda: s.blank.sample(2, cond, generator=generator),
        "latents": lambda: s.blank.latents(x, cond),
    }
    silent = []
    for name, call in calls.items():
        try:
            call()
        except NotInitialized:
            continue
        silent.append(name)
    return Measured(float(len(silent)), ", ".join(silent))


#: Checks that depend on the values of the parameters, run on every layer of a trained flow.
NUMERIC = ("round trip", "log-det forward", "log-det inverse", "log-dets cancel", "float32")
#: Rows of random events.
_ROWS = 3
#: Tolerances of whole flows, where rounding accumulates over many layers.
DEEP = {"round trip": 1e-9, "log-dets cancel": 1e-8, "rows independent": 1e-9, "padding": 1e-9, "masked log-det": 1e-9,
        "float32": 1e-3}


@dataclass(frozen=True)
class Seen:
    """A bijection of a model, and its inputs when the model computed its loss."""

    name: str
    bijection: Bijection
    x: Tensor
    cond: Tensor | None


def verify_flow(
    model: GenerativeModel, fresh: Callable[[], GenerativeModel], batch: Batch, initial: Batch | None, options: Options
) -> Findings:
    """The checks of flows on the flow, of bijections on every bijection as a whole and on every kind of layer in it."""
    if options.randomise:
        perturb(model.core, torch.Generator().manual_seed(options.seed))
    if initial is not None:
        model.initialize(initial)
    model.eval()
    new = fresh().to(model.device).eval()
    seen = list(at_work(model, batch, options.seed))
    plans = [plan for part in seen for plan in plans_of(part, new.core, options)]
    total = sum(len(CHECKS.choose(plan.options.get("only"))) for plan in plans) + len(FLOW_CHECKS.specs)
    with counting(total, options.progress) as watch:
        flow = _of_flow(model, new, seen, batch, watch)
        return _carried_out(plans, Findings([flow]), watch)


def verify_bijection(
    make: Callable[[], nn.Module], shape: Sequence[int], cond: Tensor | None, options: Options
) -> Findings:
    """The checks of bijections on one as a whole and, if it is a composition, on every layer in it.

    Arguments:
        make: makes it; called again for fresh ones.
        shape: event shape of x.
        cond: conditions of a few rows, None for none.
        options: how it is checked.

    Raises:
        ValueError: for a shape it does not take, or a missing condition.
    """
    layer = make()
    common = {"seed": options.seed, "max_dims": options.max_dims, "patience": options.patience}
    together = {**common, "cond": cond, "fresh": make, "compiler": options.compiler}
    plans = []
    if isinstance(layer, Compose | MultiScale):
        # The parameters and inputs on which `check_bijection` will check the whole.
        whole = prepare(layer, shape, cond=cond, batch=_ROWS, randomise=True, seed=options.seed)
        # Every layer, not one of each group: user classes may keep settings that `fingerprint` does not see.
        one_by_one = replace(options, randomise=False)
        plans = list(plans_of(Seen("", whole.layer, whole.x, whole.cond), layer, one_by_one))[1:]
        if plans:
            together |= {"tolerances": DEEP, "compiler": None}
    total = sum(len(CHECKS.choose(plan.options.get("only"))) for plan in plans) + len(CHECKS.specs)
    with counting(total, options.progress) as watch:
        report = check_bijection(layer, shape, watch=watch, **together)
        return _carried_out(plans, Findings([report]), watch)


def _carried_out(plans: Iterable[Plan], findings: Findings, watch: Callable[[CheckSpec], None]) -> Findings:
    """The findings and the reports of the plans; large compositions follow from their layers."""
    whole = len(findings.wholes) - 1
    of_whole: dict[int, list[Report]] = {whole: []}
    for plan in plans:
        report = check_bijection(plan.layer, tuple(plan.x.shape[1:]), x=plan.x, watch=watch, **plan.options)
        if plan.alike is None:
            findings.wholes.append(report)
            whole += 1
            of_whole[whole] = []
            continue
        of_whole[whole].append(report)
        if findings.layers and findings.layers[-1][0] is plan.alike:
            findings.layers[-1][1].append(report)
        else:
            findings.layers.append((plan.alike, [report]))
    for number, layers in of_whole.items():
        findings.wholes[number] = by_layers(findings.wholes[number], layers)
    return findings


def by_layers(whole: Report, layers: Sequence[Report]) -> Report:
    """The report on a composition that is too large for a Jacobian, by the chain rule if every layer was verified.

    Its log-determinant is the sum over its layers, by "sum of layers"; that of the inverse is its negative, by
    "log-dets cancel" and "round trip". Without one of these it stays not verified.
    """
    passed = {check.name for check in whole.checks if check.status == PASSED}
    tested = bool(layers) and all(report["log-det forward"].status == PASSED for report in layers)
    needed = {"log-det forward": {"sum of layers"},
              "log-det inverse": {"sum of layers", "log-dets cancel", "round trip"}}  # fmt: skip
    return replace(whole, checks=tuple(
        replace(check, status=NOT_APPLICABLE, note=f"follows from its layers: {check.note.partition(':')[0]}")
        if check.status == NOT_VERIFIED and tested and needed.get(check.name, {""}) <= passed else check
        for check in whole.checks
    ))


@dataclass(frozen=True)
class Plan:
    """One call of `check_bijection`: the layer, its input, the options; and the names of the layers it represents."""

    layer: Bijection
    x: Tensor
    options: dict[str, Any]
    alike: list[str] | None = None


def plans_of(part: Seen, core: nn.Module, options: Options) -> Iterator[Plan]:
    """The calls for a bijection: the whole, then one of each group of layers that are alike.

    For a trained one the others too, since their parameters differ.
    """
    whole = copy.deepcopy(part.bijection).double()
    cond = cast(part.cond, torch.float64)
    with torch.no_grad():
        steps = list(whole.walk(part.x.double(), cond, name=part.name))

    def checks(name: str, layer: Bijection, x: Tensor, z: Tensor, cond: Tensor | None, **more) -> dict:
        return {
            "z": near(z, layer, options.seed), "cond": cond if layer.uses_cond else None,
            "fresh": lambda: copy.deepcopy(core.get_submodule(name)),
            "randomise": False, "max_dims": options.max_dims, "patience": options.patience, "seed": options.seed,
            "name": f"{name} {type(layer).__name__} {shown(x.shape[1:])}", **more,
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
    """Latents close to but not equal to those of data: far away the inverse of the logit loses all digits."""
    if ranges(bijection)[1] != EVERYWHERE:
        return z
    noise = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype).to(z.device)
    return z + 0.1 * z.std() * noise


def _of_flow(model: GenerativeModel, new: GenerativeModel, seen: list[Seen], batch: Batch, watch) -> Report:
    """The checks of flows on `core.flow`."""
    flow: Flow = copy.deepcopy(model.core.flow).double()
    own = next(part for part in seen if part.bijection is model.core.flow.bijection)
    cond = batch.cond if flow.uses_cond else None
    subject = FlowSubject(flow, own.x.double(), cond, new.core.flow)
    checks = tuple(FLOW_CHECKS.run(subject, watch=watch))
    size = sum(parameter.numel() for parameter in model.core.parameters())
    return Report(f"{model.family} with {size:,} parameters", checks)


@torch.no_grad()
def at_work(model: GenerativeModel, batch: Batch, seed: int) -> Iterator[Seen]:
    """Every outermost bijection of a model with its input after the model's preprocessing."""
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
    """Equal for layers that are alike: classes, plain settings and shapes of parameters, recursively.

    Example:
        >>> from genmodels.flows.linear import Flip
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
