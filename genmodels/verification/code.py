"""Checks of bijections as code: dtypes, side effects, extreme inputs, gradients, state dicts, compilation."""

from __future__ import annotations

import copy
import io
import math
from itertools import product

import torch
from torch import Tensor
from torch.nn import Module

from genmodels.core.errors import an
from genmodels.flows.bijection import Around, Bijection
from genmodels.flows.scaling import Logit
from genmodels.verification.check import CheckSet, Measured, NotApplicable, largest
from genmodels.verification.maps import relative, weighted, worst
from genmodels.verification.subject import Subject, cast, perturb, rows_of, shown_event, slopes_of, waits

CHECKS = CheckSet()

_AUTOCAST = 1e-4  # relative error of a round trip under autocast
_OWN_MATHS = ("compute the map itself without autocast, `with genmodels.flows.bijection.full_precision(x):`, and cast "
              "what a network gives to the dtype of x")
_EXTREMES = (0.0, 1e-30, -1e-30, 1.0, -1.0, 50.0, -50.0)


@CHECKS.add("shapes and dtypes", 0.0, "results have the declared shapes, log-determinants (B,); same dtype and device")
@torch.no_grad()
def shapes_and_dtypes(s: Subject) -> Measured:
    """Both directions in float64 and float32 (a `Bijection` in bfloat16 too), for the whole batch and for one row."""
    wrong = []
    widths = [(torch.float64, torch.float64), (torch.float32, torch.float32)]
    # A Bijection widens half precision; other modules need not.
    widths += [(torch.bfloat16, torch.float32)] if isinstance(s.layer, Bijection) else []
    for dtype, expected in widths:
        layer = s.copy(torch.promote_types(dtype, torch.float32))
        cond = cast(s.cond, expected)
        for name, inverse, value in s.directions():
            for rows in (len(value), 1):
                own = rows_of(cond, rows)
                try:
                    result, logdet = s.raw(value[:rows].to(dtype), inverse, cond=own, layer=layer)
                except Exception as error:
                    wrong.append(f"{name} of {dtype} raised {type(error).__name__}: {error}".splitlines()[0])
                    continue
                promised = getattr(layer, "in_shape" if inverse else "out_shape", lambda shape: shape)
                shape = (rows, *promised(tuple(value.shape[1:])))
                wrong += _unlike(f"{name} of {dtype}", result, shape, expected, value)
                wrong += _unlike(f"{name}'s log-det of {dtype}", logdet, (rows,), expected, value)
    return Measured(float(len(wrong)), "; ".join(wrong[:2]))


def _unlike(name: str, found, shape: tuple, dtype: torch.dtype, like: Tensor) -> list[str]:
    if not torch.is_tensor(found):
        return [f"{name} is {an(type(found).__name__)}, not a tensor"]
    parts = (("shape", tuple(found.shape), shape), ("dtype", found.dtype, dtype), ("device", found.device, like.device))
    return [f"{name} has {what} {given}, not {due}" for what, given, due in parts if given != due]


@CHECKS.add("bf16 autocast", 0.0, "under bfloat16 autocast the map itself stays float32, finite and invertible")
@torch.no_grad()
def autocast(s: Subject) -> Measured:
    """A float32 copy under `torch.autocast(bfloat16)`, which may affect networks but not the bijection itself.

    A single layer whose inverse costs the same must also return what came in. In a composition, a network gives
    something else for an input that is rounded otherwise.
    """
    layer, wrong, cond = s.copy(torch.float32), [], cast(s.cond, torch.float32)
    maps = [part for part in s.layer.modules() if isinstance(part, Bijection) and not isinstance(part, Around)]
    single = len(maps) == 1 and maps[0].inverse_cost == "same"
    for name, inverse, value in s.directions():
        errors = []
        for enabled in (True, False) if single else (True,):
            with torch.autocast(value.device.type, torch.bfloat16, enabled=enabled):
                result, logdet = s.raw(value.float(), inverse, cond=cond, layer=layer)
                back = s.raw(result, not inverse, cond=cond, layer=layer)[0] if single else value
            # The row with the least: in one of them, rounding may have moved what a network sees.
            errors.append(min(map(relative, back.double(), value.float().double())) if single else 0.0)
            found = ((name, result), (f"{name}'s log-det", torch.as_tensor(logdet))) if enabled else ()
            wrong += [f"{what} is {v.dtype}" for what, v in found if v.dtype != torch.float32]
            wrong += [f"{what} is not finite" for what, v in found
                      if v.dtype == torch.float32 and not bool(torch.isfinite(v).all())]
        # Not what float32 loses without autocast too.
        if single and errors[0] > max(_AUTOCAST, 10 * errors[1]):
            wrong.append(f"round trip, {name} first: off by {errors[0]:.0e}")
    advice = f": {_OWN_MATHS}" if any("finite" not in text for text in wrong) else ""
    return Measured(float(len(wrong)), f"{'; '.join(wrong)}{advice}")


@CHECKS.add("nothing modified", 0.0, "neither the inputs nor the layer's own state change, in training mode either")
@torch.no_grad()
def nothing_modified(s: Subject) -> Measured:
    """Inputs, conditions, masks and the state dict, compared bit for bit before and after, in both modes."""
    changed = []
    for training in (False, True):
        layer = s.copy().train(training)
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        for (name, inverse, value), masked in product(s.directions(), (False, True)[: 1 + s.masked]):
            mask = s.mask() if masked else None
            own = {"cond": s.cond, "mask": s.out_mask(mask) if masked and inverse else mask}
            given, copies = value.clone(), {key: v.clone() for key, v in own.items() if v is not None}
            (layer.inverse if inverse else layer)(given, **copies)
            changed += [] if torch.equal(given, value) else [f"{name} changes its input"]
            changed += [f"{name} changes {key}" for key, copy in copies.items() if not torch.equal(copy, own[key])]
        now = layer.state_dict()
        changed += [f"{name} changes{' in training' if training else ''}" for name in state
                    if not torch.equal(state[name], now[name])]
    return Measured(float(len(changed)), "; ".join(dict.fromkeys(changed)))


@CHECKS.add("training mode", 1e-10, "training mode gives results and gradients of evaluation, apart from networks")
def training_mode(s: Subject) -> Measured:
    """A copy in training mode against evaluation, each with the same random numbers; gradients to 1e-6.

    Only bijections are in training mode: what the network of a coupling drops changes its map but breaks no bijection.
    """
    layer = s.copy()
    for part in layer.modules():
        part.training = part is layer or isinstance(part, Bijection)
    errors = {}
    for name, inverse, value in s.directions():
        results = []
        for mode in (layer, s.copy()):
            with torch.random.fork_rng([s.x.device] if s.x.is_cuda else []):
                torch.manual_seed(s.seed)
                results.append(_with_slopes(s, mode, value, inverse))
        (*trained, slopes), (*usual, expected) = results
        errors |= {what: relative(a.detach(), b.detach()) for what, a, b in zip((name, f"{name}'s log-det"), trained,
                                                                                 usual, strict=True)}
        errors[f"{name}'s gradients"] = 1e-4 * largest(map(relative, slopes, expected))
    return worst(errors)


def _with_slopes(s: Subject, layer: Module, value: Tensor, inverse: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Result, log-determinant, and the gradients of their weighted sum by input and parameters."""
    leaves = [value.clone().requires_grad_(), *(p for p in layer.parameters() if p.requires_grad)]
    found = s.run(leaves[0], inverse, layer=layer)
    return *found, slopes_of(weighted(s, *found), leaves)


@CHECKS.add("extreme inputs", 0.0, "tiny and huge inputs, knots and ends give finite results and gradients")
def extreme_inputs(s: Subject) -> Measured:
    """0, 1e-30, 1, 50, their negatives and all knots, clipped to inside the domain, in float32 and float64."""
    bad = []
    for dtype in (torch.float32, torch.float64):
        # The knots are those at the start of training; later only their ends are the same.
        for moved, layer in ((True, s.copy(dtype)), (False, copy.deepcopy(s.blank).eval().to(dtype))):
            for name, inverse, like in s.directions():
                values = _extreme(s, like, inverse).to(dtype).requires_grad_()
                cond = cast(rows_of(s.cond, len(values)), dtype)
                result, logdet = s.run(values, inverse, cond=cond, layer=layer)
                parameters = [p for p in layer.parameters() if p.requires_grad]
                total = (result.sum() + logdet.sum()) / len(values)
                gradients = torch.autograd.grad(total, [values, *parameters], allow_unused=True)
                names = ["its input", *(n for n, p in layer.named_parameters() if p.requires_grad)]
                where = f"{name}, {str(dtype)[6:]}{'' if moved else ', as given'}"
                rows = torch.isfinite(result).flatten(1).all(1) & torch.isfinite(logdet)
                bad += [] if bool(rows.all()) else [f"{where}: not finite at {shown_event(values[~rows][0])}"]
                bad += [f"{where}: gradient of {n}" for n, g in zip(names, gradients, strict=True)
                        if g is not None and not bool(torch.isfinite(g).all())]
    return Measured(float(len(bad)), "; ".join(bad[:2]))


def _extreme(s: Subject, like: Tensor, inverse: bool) -> Tensor:
    """Events full of one special value, and random events with that value in every other position."""
    low, high = s.z_range if inverse else s.x_range
    if not any(isinstance(part, Logit) for part in s.layer.modules()):  # which takes its ends, as data have them
        margins = [min(1e-6 * (1 + abs(v)), 1e-3 * (high - low)) if math.isfinite(v) else 0.0 for v in (low, high)]
        low, high = low + margins[0], high - margins[1]
    points = dict.fromkeys(min(max(v, low), high) for v in (*_EXTREMES, *s.knots))
    full = [torch.full_like(like[:1], v) for v in points]
    other = torch.arange(like[0].numel(), device=like.device).reshape(like.shape[1:]) % 2 == 0
    return torch.cat([*full, *(torch.where(other, value, like[:1]) for value in full)])


@CHECKS.add("dead parameters", 0.0, "every trainable parameter has an influence, and finite gradients")
def dead_parameters(s: Subject) -> Measured:
    """The gradient of a random sum of all outputs: none may be missing, all zero or not finite.

    A parameter without influence in evaluation, as in hard attention, may have one in training.
    """
    layer = s.copy()
    perturb(layer, torch.Generator().manual_seed(s.seed + 1))
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not trained:
        raise NotApplicable("nothing to train")

    def faults() -> dict[str, list[str]]:
        total = weighted(s, *s.run(s.x, layer=layer), name="influence")
        gradients = torch.autograd.grad(total, list(trained.values()), allow_unused=True) if total.requires_grad else (
            [None] * len(trained))
        pairs = list(zip(trained, gradients, strict=True))
        return {"without influence": [name for name, g in pairs if g is None or not bool(g.any())],
                "not finite": [name for name, g in pairs if g is not None and not bool(g.isfinite().all())]}

    bad = faults()
    if dead := bad["without influence"]:
        layer.train()
        bad["without influence"] = [name for name in faults()["without influence"] if name in dead]
    notes = [f"{what}: {', '.join(names[:3])}" for what, names in bad.items() if names]
    return Measured(float(sum(map(len, bad.values()))), "; ".join(notes))


@CHECKS.add("save and load", 0.0, "a layer with the state of another equals it, bit for bit")
@torch.no_grad()
def save_and_load(s: Subject) -> Measured:
    """Through a file, into a new layer and into one that has run with other parameters and might cache them."""
    file = io.BytesIO()
    torch.save(s.layer.state_dict(), file)
    new, used = ((copy.deepcopy(s.blank) if s.fresh is None else s.fresh()).double().to(s.x.device) for _ in range(2))
    perturb(used, s.generator("load"))
    for _, inverse, value in s.directions():
        s.run(value, inverse, layer=used.eval())
    wrong = []
    for name, layer in (("a new layer", new), ("a layer that was used", used)):
        file.seek(0)
        layer.load_state_dict(torch.load(file, weights_only=True, map_location=s.x.device))
        wrong += [f"{name} waits for data although it was loaded"] if waits(layer) else []
        layer.train()
        s.run(s.x, layer=layer)
        layer.eval()
        for direction, inverse, value in s.directions():
            same = all(map(torch.equal, s.run(value, inverse, layer=layer), s.run(value, inverse)))
            wrong += [] if same else [f"{direction} of {name} differs"]
    return Measured(float(len(wrong)), "; ".join(wrong))


@CHECKS.add("float32", 1e-4, "float32 agrees with float64, log-determinants per dimension")
@torch.no_grad()
def single_precision(s: Subject) -> Measured:
    """The same weights in both precisions; the log-determinants are divided by the number of dimensions."""
    single = s.copy(torch.float32)
    double = copy.deepcopy(single).double()
    cond = cast(s.cond, torch.float32)
    errors = {}
    for name, inverse, value in s.directions():
        value = value.float()
        result, logdet = s.run(value, inverse, cond=cond, layer=single)
        true, true_logdet = s.run(value.double(), inverse, cond=cast(cond, torch.float64), layer=double)
        errors[name] = relative(result.double(), true)
        errors[f"{name} log-det"] = relative(logdet.double() / s.dims, true_logdet / s.dims)
    return worst(errors)


@CHECKS.add("compiled", 1e-5, "torch.compile without a graph break gives the same results and gradients, both ways")
def compiled(s: Subject) -> Measured:
    """With `fullgraph=True`; results, log-determinants and gradients against the call without compilation."""
    if s.compiler is None:
        raise NotApplicable("left out")
    if any(getattr(module, "memory", "store") == "inverse" for module in s.layer.modules()):
        raise NotApplicable("trains by inversion, which runs uncompiled")
    layer, cond = s.copy(torch.float32), cast(s.cond, torch.float32)
    errors = {}
    for name, inverse, value in s.directions():
        torch._dynamo.reset()

        def call(x: Tensor, inverse=inverse) -> tuple[Tensor, Tensor]:
            return (layer.inverse if inverse else layer)(x, **({} if cond is None else {"cond": cond}))

        results = []
        for function in (call, torch.compile(call, fullgraph=True, backend=s.compiler)):
            x = value.float().requires_grad_()
            result, logdet = function(x.clone())
            leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
            gradients = torch.autograd.grad(result.square().mean() + logdet.mean(), leaves, allow_unused=True)
            results.append((result.detach(), logdet.detach(), [g for g in gradients if g is not None]))
        (z, logdet, before), (other_z, other_logdet, after) = results
        errors[name] = relative(other_z, z)
        errors[f"{name} log-det"] = relative(other_logdet, logdet)
        same = len(before) == len(after)
        errors[f"{name} gradients"] = largest(map(relative, after, before)) if same else float("inf")
    torch._dynamo.reset()
    return worst(errors)


@CHECKS.add("identity at start", 1e-12, "the layer as given is the identity")
@torch.no_grad()
def identity_at_start(s: Subject) -> Measured:
    """z = x and a log-determinant of zero in both directions, if `starts_as_identity`."""
    if not s.starts_as_identity:
        raise NotApplicable("starts_as_identity is not set")
    layer = copy.deepcopy(s.blank).double().eval()
    errors = {}
    for name, inverse, value in s.directions():
        result, logdet = s.run(value, inverse, layer=layer)
        errors[name] = relative(result.flatten(1), value.flatten(1))
        errors[f"{name} log-det"] = relative(logdet, torch.zeros_like(logdet))
    return worst(errors)
