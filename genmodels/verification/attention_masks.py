"""Checks of masks, batches and lengths in attention, and the subject that all checks of attention share."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from genmodels.nn.attention import Attention
from genmodels.verification.check import CheckSet, Measured, NotApplicable, largest
from genmodels.verification.maps import relative, worst
from genmodels.verification.subject import slopes_of, training_twin

#: Capabilities that a module may declare; each adds checks.
CAPABILITIES = {
    "relative": "positions enter as distances: a shift of everything changes nothing, past and future differ",
    "symmetric": "past and future at the same distance are alike",
    "unordered": "no positions at all: a permutation of the input permutes the output",
    "causal": "nothing depends on later positions",
    "cache": "module(x, cache=...) continues where the last call ended, from module.empty_cache(x)",
    "2d": "the positions are those of a map, row by row; module(x, mask, space=(height, width))",
    "full": "the mask may be (L, L), the keys of each query",
    "derivatives": "the output can be differentiated twice, and in forward mode",
    "rows": "the rows of maps are absolute, the columns relative",
    "resampled": "the positions of a map are resampled for its size",
    "unnormalised": "weights need not be positive, nor sum to one",
    "sensitive": "small differences of the input may be large ones of the output: not compared in half precision",
    "piecewise": "a function of buckets or a maximum: finite differences and rounding may cross a boundary",
}

DOUBLE = torch.float64


@dataclass
class AttentionSubject:
    """An attention module in float64 and evaluation mode, and how it is called; the fields are those of `check`."""

    module: nn.Module
    dim: int
    capabilities: frozenset[str]
    space: tuple[int, int] | None = None
    reach: tuple[int | None, int | None] = (None, None)
    reference: Callable[..., Tensor] | None = None
    fresh: Callable[[], nn.Module] | None = None
    compiler: str | None = "eager"
    seed: int = 0
    _taken: dict[int, bool] = field(default_factory=dict)

    @cached_property
    def length(self) -> int:
        """The number of positions of most checks: the first of a few that the module takes."""
        if self.space is not None:
            return self.space[0] * self.space[1]
        return next((n for n in (7, 8, 12, 16, 32, 64) if self.takes(n)), 7)

    @torch.no_grad()
    def takes(self, length: int) -> bool:
        """Whether the module takes sequences of that length, which only `any_length` requires."""
        if self.space is None and length not in self._taken:
            try:
                self._taken[length] = self.run(self.draw(1, length)) is not None
            except Exception:
                self._taken[length] = False
        return self.space is not None or self._taken[length]

    def draw(self, batch: int = 2, length: int | None = None, name: int = 0) -> Tensor:
        """Random input `(batch, length, D)`."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + name)
        length = self.length if length is None else length
        return torch.randn(batch, length, self.dim, generator=generator, dtype=DOUBLE)

    def sizes(self) -> list:
        """Lengths or maps, short, odd, prime and long."""
        if self.space is None:
            return [1, 2, 3, 5, 11, 64, 700]
        maps = [(1, 1), (1, 5), (3, 2), (4, 7), (13, 11)]
        return [(self.space[0], width) for _, width in maps] if self.has("rows") else maps

    def run(self, x: Tensor, mask: Tensor | None = None, *, module: nn.Module | None = None, space=None, **more):
        """The output y alone."""
        result = self.full_result(x, mask, module=module, space=space, **more)
        return result[0] if isinstance(result, tuple) else result

    def full_result(self, x: Tensor, mask: Tensor | None = None, *, module=None, space=None, **more):
        """The result of a call; the mask is passed by name if the module's forward has that name."""
        module = self.module if module is None else module
        if self.space is not None:
            more["space"] = self.space if space is None else space
        parameters = inspect.signature(self.module.forward).parameters
        if mask is None:
            if "mask" not in parameters or parameters["mask"].default is not inspect.Parameter.empty:
                return module(x, **more)
            mask = torch.ones(len(x), 1, x.shape[1], dtype=torch.bool)
        if "mask" in parameters:
            return module(x, mask=mask, **more)
        return module(x, mask, **more)

    def masks(self, lengths: Iterable[int]) -> Tensor:
        """Padding `(B, 1, L)`: the first positions of each sequence; of a map, the first columns of each row."""
        counts = torch.tensor(list(lengths))[:, None]
        if self.space is None:
            return (torch.arange(self.length) < counts)[:, None]
        return (torch.arange(self.length) % self.space[1] < counts)[:, None]

    def crop(self, x: Tensor, length: int) -> tuple[Tensor, tuple[int, int] | None]:
        """One example without the positions that `masks` hides, and its space."""
        if self.space is None:
            return x[:, :length], None
        height, width = self.space
        return x.unflatten(1, (height, width))[:, :, :length].flatten(1, 2), (height, length)

    def lengths(self) -> list[int]:
        """Unequal lengths for a batch of three, preferably those that the module takes alone."""
        full = self.length if self.space is None else self.space[1]
        shorter = [n for n in (full // 2, full // 4, 1) if n and self.takes(n)] or [max(full // 2, 1)]
        return [full, shorter[0], shorter[-1]]

    def has(self, name: str) -> bool:
        """Whether the module declares a capability."""
        return name in self.capabilities


def prepare(module: nn.Module, seed: int, randomise: bool) -> nn.Module:
    """A copy in float64 and evaluation mode, with random parameters, also those that are initialised to zero."""
    module = copy.deepcopy(module).cpu().double().eval()
    if randomise:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, module.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) * 0.5)
    return module


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; infinite if one is not finite or the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).detach().abs().nan_to_num(float("inf")).max()) if a.numel() else 0.0


CHECKS = CheckSet()


@CHECKS.add("any length", 0.0, "short, odd, prime and long inputs give finite outputs of the same shape")
@torch.no_grad()
def any_length(s: AttentionSubject) -> Measured:
    """Every one of `sizes()`."""
    errors = {}
    for size in s.sizes():
        length = size if s.space is None else size[0] * size[1]
        x = s.draw(1, length)
        try:
            y = s.run(x, space=size)
        except Exception as refused:
            message = (str(refused).splitlines() or [""])[0][:120]
            return Measured(math.inf, f"refuses {size}: {message or type(refused).__name__}")
        errors[f"{size} positions"] = 0.0 if y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all() else 1.0
    return worst(errors)


@CHECKS.add("double loop", 1e-10, "the output equals two plain loops over positions")
@torch.no_grad()
def double_loop(s: AttentionSubject) -> Measured:
    """Against `reference`, with and without invalid positions, at every length from 1 to 7 that the module takes.

    A module that takes none of these is checked at the first longer one it takes.
    """
    if s.reference is None:
        raise NotApplicable("there is no reference: pass reference=(module, x, mask, space) -> y")
    errors = {}
    for length in [s.length] if s.space is not None else list(filter(s.takes, range(1, 8))) or [s.length]:
        x, mask = s.draw(1, length), torch.ones(1, 1, length, dtype=torch.bool)
        mask[..., length // 2 : length // 2 + 2] = length < 3
        for name, m in (("", None), (", masked", mask)):
            expected = s.reference(s.module, x, m, s.space)
            valid = mask[:, 0] if m is not None else torch.ones_like(mask[:, 0])
            errors[f"length {length}{name}"] = gap(s.run(x, m)[valid], expected[valid])
    return worst(errors)


@CHECKS.add("paths", 1e-12, "fused and explicit give the same")
@torch.no_grad()
def paths(s: AttentionSubject) -> Measured:
    """The module with both backends, once differentiable, as fused kernels are."""
    module = copy.deepcopy(s.module)
    if not isinstance(module, Attention) or module.position.adds_values:
        raise NotApplicable("there is only one path")
    mask, x, outputs = s.masks(s.lengths()), s.draw(3), []
    module.derivatives = 1
    for module.backend in ("explicit", "sdpa"):
        outputs.append([s.run(x, module=module), s.run(x, mask, module=module)])
    return worst({name: gap(a, b) for name, a, b in zip(("", "masked"), *outputs, strict=True)})


@CHECKS.add("padding", 0.0, "values in padded positions change nothing and get no gradient")
def padding(s: AttentionSubject) -> Measured:
    """NaN, 10,000 or noise at the end, and in a gap: outputs and all gradients must not depend on them."""
    ends, x, errors = s.masks(s.lengths()), s.draw(3), {}
    contents = {"NaN": torch.full_like(x, math.nan), "10000": torch.full_like(x, 1e4), "random": 50 * s.draw(3, name=1)}
    for where, mask in (("", ends), ("in a gap, ", ends & ~s.masks([2] * 3) | s.masks([1] * 3))):
        valid, (plain, gradients) = mask[:, 0, :, None], _with_gradients(s, x, mask)
        for name, content in contents.items():
            y, others = _with_gradients(s, torch.where(valid, x, content), mask)
            errors[f"{where}{name}: values"] = gap(y, plain)
            errors[f"{where}{name}: gradients"] = largest(map(gap, others, gradients))
        errors[f"{where}gradient of padding"] = float(gradients[0].masked_fill(valid, 0).abs().max())
    return worst(errors)


def _with_gradients(
    s: AttentionSubject, x: Tensor, mask: Tensor | None, module: nn.Module | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The valid output, and the gradients of its square by the input and by the parameters."""
    module, x = s.module if module is None else module, x.detach().requires_grad_()
    y = s.run(x, mask, module=module)
    y = y if mask is None else y.masked_fill(~mask[:, 0, :, None], 0)
    return y.detach(), slopes_of(y.square().sum(), [x, *(p for p in module.parameters() if p.requires_grad)])


@CHECKS.add("masks of pairs", 1e-10, "a mask of pairs hides from each query the keys that it marks, and no others")
def masks_of_pairs(s: AttentionSubject) -> Measured:
    """Against `reference`, else by the gradient of each output: none by hidden keys, one by those that are left."""
    if not s.has("full"):
        raise NotApplicable("full is not among its capabilities")
    generator = torch.Generator().manual_seed(s.seed)
    if s.reference is not None:
        x, mask = s.draw(2), torch.rand(s.length, s.length, generator=generator) < 0.6
        with torch.no_grad():
            return Measured(gap(s.run(x, mask), s.reference(s.module, x, mask, s.space)))
    # Two groups, each in an order: what a key of a query sees this query sees too, so that layers may follow layers.
    order, group = torch.randperm(s.length, generator=generator), torch.arange(s.length) % 3 > 0
    mask = (group[:, None] == group) & (order[:, None] >= order)
    found = seen(s, mask)
    lost = mask & (seen(s) > 0) & (found == 0)
    return worst({"hidden keys are seen": float(found.masked_fill(mask, 0).max()),
                  "keys that are left are not seen": float(lost.any() and not s.has("piecewise"))})


def seen(s: AttentionSubject, mask: Tensor | None = None) -> Tensor:
    """(L, L): the largest gradient of output i by input j."""
    x = s.draw(2).requires_grad_()
    rows = (s.run(x, mask) * s.draw(2, name=4)).sum((0, 2))
    return torch.stack([torch.autograd.grad(row, x, retain_graph=True)[0].abs().amax((0, 2)) for row in rows])


@CHECKS.add("padded = alone", 1e-6, "a padded example has the values and gradients of the example alone")
def padded_is_alone(s: AttentionSubject) -> Measured:
    """Unequal lengths in one batch against each example cropped to its length, output and input gradient."""
    if s.space is not None and s.has("resampled"):
        raise NotApplicable("positions are resampled for the size of the map")
    lengths = s.lengths()
    mask, x, errors = s.masks(lengths), s.draw(3).requires_grad_(), {}
    y = s.run(x, mask)
    (gradient,) = torch.autograd.grad(y.masked_fill(~mask[:, 0, :, None], 0).square().sum(), x)
    for b, length in enumerate(lengths):
        if s.space is None and not s.takes(length):
            continue
        cropped, space = s.crop(x[b : b + 1].detach(), length)
        cropped.requires_grad_()
        alone = s.run(cropped, space=space)
        (own,) = torch.autograd.grad(alone.square().sum(), cropped)
        errors[f"length {length}"] = gap(s.crop(y[b : b + 1], length)[0], alone)
        errors[f"gradient, length {length}"] = gap(s.crop(gradient[b : b + 1], length)[0], own)
    return worst(errors)


@CHECKS.add("batch = single", 1e-6, "an example does not depend on the others of its batch")
@torch.no_grad()
def batch_is_single(s: AttentionSubject) -> Measured:
    """Rows of very different magnitude in one batch, against each of them alone."""
    x = s.draw(3) * torch.tensor([1.0, 3.0, 0.2], dtype=DOUBLE)[:, None, None]
    y = s.run(x)
    return worst({f"row {b}": gap(y[b : b + 1], s.run(x[b : b + 1])) for b in range(3)})


@CHECKS.add("empty rows", 0.0, "a query without keys gives a constant, with finite and zero gradients")
def empty_rows(s: AttentionSubject) -> Measured:
    """One example without a valid position; for masks of pairs, also one query without a key."""
    mask = s.masks(s.lengths())
    mask[1] = False
    errors = _emptiness(s, mask, (1, slice(None)), "an example without valid positions")
    if s.has("full"):
        full = torch.ones(s.length, s.length, dtype=torch.bool).tril()
        full[-1] = False
        errors |= _emptiness(s, full, (slice(None), -1), "a query without keys")
    return worst(errors)


def _emptiness(s: AttentionSubject, mask: Tensor, row: tuple, name: str) -> dict[str, float]:
    x = s.draw(3).requires_grad_()
    y, other = s.run(x, mask), s.run(s.draw(3, name=1), mask)
    (own,) = torch.autograd.grad(y[row].square().sum(), x, retain_graph=True)
    (whole,) = torch.autograd.grad(y.square().sum(), x)
    return {
        f"{name}: depends on the input": gap(y[row], other[row]),
        f"{name}: not finite": 0.0 if y.isfinite().all() and whole.isfinite().all() else math.inf,
        f"{name}: gradient": float(own.abs().nan_to_num(math.inf).max()),
    }


@CHECKS.add("row sums", 1e-6, "weights are positive, sum to one over the valid keys, and are zero elsewhere")
@torch.no_grad()
def row_sums(s: AttentionSubject) -> Measured:
    """The result of `weights` under padding; `unnormalised` weights need not sum to one."""
    if not callable(getattr(s.module, "weights", None)):
        raise NotApplicable("has no method weights(x, mask)")
    mask, x = s.masks(s.lengths()), s.draw(3)
    given = {} if s.space is None else {"space": s.space}
    a = s.module.weights(x, mask=mask, **given)
    hidden = ~mask[:, :, None].expand_as(a)
    errors = {"weight of padding": float(a.masked_fill(~hidden, 0).abs().max())}
    if not s.has("unnormalised"):
        sums = a.sum(-1).masked_fill(~mask.expand(-1, a.shape[1], -1), 1)
        errors |= {"sums": gap(sums, torch.ones_like(sums)), "below zero": float((-a).clamp(min=0).max())}
    return worst(errors)


@CHECKS.add("boolean masks", 0.0, "a mask of numbers is refused, or means what the boolean one means")
@torch.no_grad()
def boolean_masks(s: AttentionSubject) -> Measured:
    """The mask as zeros and ones: either an error or the result of the boolean mask."""
    mask, x = s.masks(s.lengths()), s.draw(3)
    valid = mask[:, 0]
    try:
        y = s.run(x, mask.double())
    except (ValueError, TypeError, RuntimeError, AssertionError):
        return Measured(0.0, "refused")
    same = gap(y[valid], s.run(x, mask)[valid]) < 1e-9
    return Measured(0.0, "means the same") if same else Measured(1.0, "0 and 1 mean something else")


@CHECKS.add("training mode", 1e-9, "training gives what evaluation gives, apart from dropout and batch statistics")
def training_mode(s: AttentionSubject) -> Measured:
    """Results and gradients of a copy in training mode without dropout, with a mask and without."""
    if s.has("piecewise"):
        raise NotApplicable("draws in training")
    module, x, errors = training_twin(s.module), s.draw(3), {}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(s.seed)
        if gap(*(s.run(x, module=module) for _ in range(2))):
            raise NotApplicable("draws in training")
    for name, mask in (("", None), ("masked", s.masks(s.lengths()))):
        (trained, slopes), (usual, expected) = (_with_gradients(s, x, mask, own) for own in (module, s.module))
        errors[name] = gap(trained, usual)
        errors[f"gradients{name and ', '}{name}"] = largest(map(relative, slopes, expected))
    return worst(errors)


@CHECKS.add("dropout", 0.0, "dropout acts on weights, and in training alone")
@torch.no_grad()
def dropout(s: AttentionSubject) -> Measured:
    """Dropout of the output scales all values that are left by one number; dropout of the weights does not."""
    module, x = copy.deepcopy(s.module), s.draw(1, name=2)
    still = gap(s.run(x), s.run(x))
    if still:
        return Measured(still, "two evaluations differ")
    if s.has("piecewise"):
        raise NotApplicable("draws in training anyway")
    y = s.run(x)
    drops = [m for m in module.modules() if getattr(m, "dropout", 0.0) or isinstance(m, torch.nn.Dropout)]
    with torch.random.fork_rng():
        torch.manual_seed(s.seed)
        dropped = s.run(x, module=module.train())
    if not drops or torch.equal(dropped, y):
        raise NotApplicable("was built without dropout")
    ratios = (dropped / y).flatten()
    scaled = ratios[ratios.abs() > 1e-9]
    masked = len(scaled) < len(ratios) and gap(scaled, scaled[:1].expand_as(scaled)) < 1e-6
    return Measured(1.0 if masked else 0.0, "on the output, not on the weights" if masked else "")
