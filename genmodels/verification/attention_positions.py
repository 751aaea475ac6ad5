"""Checks of positions in attention (distances, reach, caches, maps) and of its code (state, gradients, compilation)."""

from __future__ import annotations

import copy
import inspect
import math

import torch
from torch import Tensor

from genmodels.nn.attention import Position, TransformerXL
from genmodels.verification.attention_masks import DOUBLE, AttentionSubject, gap, seen
from genmodels.verification.check import CheckSet, Measured, NotApplicable
from genmodels.verification.maps import worst

CHECKS = CheckSet()
#: The least difference that counts as one.
VISIBLE = 1e-3


@CHECKS.add("sign", 0.0, "past and future differ: the output of the reversed input is not the reversed output")
@torch.no_grad()
def sign(s: AttentionSubject) -> Measured:
    """The input, or a map along each axis, is reversed."""
    _needs(s, "relative")
    if s.has("symmetric"):
        raise NotApplicable("treats past and future alike")
    x = s.draw(2)
    flips = {"": lambda t: t.flip(1)} if s.space is None else {
        name: lambda t, axis=axis: t.unflatten(1, s.space).flip(axis).flatten(1, 2)
        for axis, name in ((1, "rows"), (2, "columns")) if s.space[axis - 1] > 1}
    if not flips:
        raise NotApplicable("a single position")
    errors = {}
    for name, flip in flips.items():
        difference = gap(s.run(flip(x)), flip(s.run(x)))
        errors[f"{name or 'reversed'}: differs by {difference:.0e}"] = 0.0 if difference > VISIBLE else 1.0
    return worst(errors)


@CHECKS.add("distance zero", 1e-9, "a position's bias to itself is the same everywhere; its sinusoids are 0 1 0 1")
@torch.no_grad()
def distance_zero(s: AttentionSubject) -> Measured:
    """The score of the same query with itself, at many positions; for Transformer-XL, the encoding of 0 itself."""
    position = getattr(s.module, "position", None)
    if not isinstance(position, Position) or s.has("rows") or not s.has("relative"):
        raise NotApplicable("has no relative position: only the double loop checks it, if there is a reference")
    errors, first = {}, None
    q = s.draw(1, 1)[0, 0].view(1, position.heads, 1, position.head_dim)
    for length in (1, 4, 7) if s.space is None else (s.length,):
        for start in (0, 1000) if s.space is None else (0,):
            rows = q.expand(-1, -1, length, -1)
            turned, keys = position.rotate(rows, rows, start, start, s.space)
            scores = turned @ keys.mT
            bias = position.score_bias(rows, start, start, length, length, s.space)
            own = (scores if bias is None else scores + bias).diagonal(dim1=-2, dim2=-1)
            first = own[..., :1] if first is None else first
            errors[f"{length} positions from {start}"] = gap(own, first.expand_as(own))
    if isinstance(position, TransformerXL):
        errors["sinusoids"] = _sinusoids_of_zero(position)
    return worst(errors)


def _sinusoids_of_zero(position: TransformerXL) -> float:
    """The error of the encoding of distance 0, read through an identity projection."""
    position = copy.deepcopy(position)
    position.project.weight.copy_(torch.eye(position.dim))
    position.v.zero_()
    found = []
    for c in range(position.head_dim):
        q = torch.zeros(1, position.heads, 3, position.head_dim, dtype=DOUBLE)
        q[..., c] = math.sqrt(position.head_dim)
        found.append(position.score_bias(q, 0, 0, 3, 3)[0, :, 1, 1])
    encoded = torch.stack(found, -1).flatten()
    return gap(encoded, (torch.arange(position.dim) % 2).to(DOUBLE))


@CHECKS.add("shift", 1e-5, "moving everything by the same amount changes nothing")
@torch.no_grad()
def shift(s: AttentionSubject) -> Measured:
    """Invalid positions in front, or a map moved within a larger one; an offset, if the module takes one."""
    _needs(s, "relative")
    errors = {}
    if s.space is None:
        n, x = s.length, s.draw(2)
        alone = s.run(x)
        for moved in (m for m in (1, 3, n) if s.takes(n + m)):
            padded, mask = x.new_zeros(2, n + moved, s.dim), torch.zeros(2, 1, n + moved, dtype=torch.bool)
            padded[:, moved:], mask[..., moved:] = x, True
            errors[f"{moved} invalid positions before"] = gap(s.run(padded, mask)[:, moved:], alone)
        if "offset" in inspect.signature(s.module.forward).parameters:
            errors["offset = 1000"] = gap(s.run(x, offset=1000), alone)
        return worst(errors)
    (height, width), x = s.space, s.draw(2)
    size = (height, width + 2) if s.has("rows") else (height + 1, width + 2)
    outputs = []
    for down, right in ((0, 0), (0, 2), (size[0] - height, 1)):
        padded, mask = x.new_zeros(2, *size, s.dim), torch.zeros(2, 1, *size, dtype=torch.bool)
        there = slice(down, down + height), slice(right, right + width)
        padded[:, there[0], there[1]], mask[:, :, there[0], there[1]] = x.unflatten(1, s.space), True
        y = s.run(padded.flatten(1, 2), mask.flatten(2), space=size)
        outputs.append(y.unflatten(1, size)[:, there[0], there[1]])
        errors[f"moved by {down, right}"] = gap(outputs[-1], outputs[0])
    return worst(errors)


@CHECKS.add("permutation", 1e-6, "without positions, a permutation of the input permutes the output")
@torch.no_grad()
def permutation(s: AttentionSubject) -> Measured:
    """One random order."""
    _needs(s, "unordered")
    order = torch.randperm(s.length, generator=torch.Generator().manual_seed(s.seed))
    x = s.draw(2)
    return Measured(gap(s.run(x[:, order]), s.run(x)[:, order]))


@CHECKS.add("cache", 1e-5, "piece by piece with a cache = the whole at once, for pieces of every size")
@torch.no_grad()
def cache(s: AttentionSubject) -> Measured:
    """Every size of piece from 1 to the whole, the last one ragged, with and without invalid positions.

    Of attention in chunks the pieces are of whole chunks.
    """
    _needs(s, "cache")
    x, errors, chunk = s.draw(2), {}, getattr(getattr(s.module, "reach", None), "chunk", None)
    together = 1 if chunk is None else chunk[0]
    padded = torch.ones(2, 1, s.length, dtype=torch.bool)
    padded[1, :, :2] = False
    for name, mask in (("", None), (", masked", padded)):
        whole = s.run(x, mask)
        for size in range(together, s.length + together, together):
            past, pieces = s.module.empty_cache(x), []
            for start in range(0, s.length, size):
                piece = slice(start, start + size)
                own = None if mask is None else mask[..., piece]
                s.full_result(x[:, piece] + 1, own, cache=past)  # another continuation must not change the past
                y, past = s.full_result(x[:, piece], own, cache=past)
                pieces.append(y)
            errors[f"pieces of {size}{name}"] = gap(torch.cat(pieces, dim=1), whole)
    return worst(errors)


@CHECKS.add("causality", 0.0, "no output depends on a later input")
def causality(s: AttentionSubject) -> Measured:
    """By the gradient of each output with respect to the whole input."""
    _needs(s, "causal")
    errors = {}
    for i, gradient in enumerate(seen(s)[:-1]):
        errors[f"position {i} sees later ones"] = float(gradient[i + 1 :].max())
    return worst(errors)


@CHECKS.add("locality", 0.0, "an output depends on the inputs in its reach, up to its ends, and on no others")
def locality(s: AttentionSubject) -> Measured:
    """By gradients: zero beyond `reach`, and not at its ends."""
    left, right = s.reach
    if left is None and right is None:
        raise NotApplicable("its reach is unbounded")
    errors, last = {}, s.length - 1
    for i, gradient in enumerate(seen(s)):
        first, end = (0 if left is None else max(i - left, 0)), (last if right is None else min(i + right, last))
        outside = torch.cat([gradient[:first], gradient[end + 1 :]])
        errors[f"position {i} sees beyond its reach"] = float(outside.max()) if len(outside) else 0.0
        errors[f"position {i} does not see the ends of its reach"] = float(not min(gradient[first], gradient[end]) > 0)
    return worst(errors)


@CHECKS.add("resolution", 1e-6, "maps of other sizes, square or not, are taken and leave no trace in later results")
@torch.no_grad()
def resolution(s: AttentionSubject) -> Measured:
    """Results for other heights and widths are finite and those of the reference, if any; the first map again."""
    if s.space is None:
        raise NotApplicable("is for sequences")
    x = s.draw(2)
    before, errors = s.run(x), {}
    for size in [(s.space[0], n) for n in (1, 4, 9)] if s.has("rows") else [(4, 4), (2, 5), (5, 2), (1, 6), (7, 3)]:
        given = s.draw(1, size[0] * size[1])
        y = s.run(given, space=size)
        errors[f"{size}: finite"] = 0.0 if y.shape == given.shape and y.isfinite().all() else math.inf
        if s.reference is not None:
            errors[f"{size}: double loop"] = gap(y, s.reference(s.module, given, None, size))
    errors["the first size again"] = gap(s.run(x), before)
    return worst(errors)


def _needs(s: AttentionSubject, capability: str) -> None:
    if not s.has(capability):
        raise NotApplicable(f"{capability} is not among its capabilities")


CODE_CHECKS = CheckSet()
#: Tolerance of sums to 1 in single precision, which half precision does not meet.
SINGLE = 1e-5


@CODE_CHECKS.add("state", 0.0,
               "nothing in the state depends on the length, is changed by a call, or is a table of all pairs")
@torch.no_grad()
def state(s: AttentionSubject) -> Measured:
    """The state dict before and after calls at two lengths, its large square buffers, and a copy that loads it."""
    before = {name: value.clone() for name, value in s.module.state_dict().items()}
    x = s.draw(2)
    given, y = x.clone(), s.run(x)
    s.run(x, s.masks(s.lengths()[:2]))
    other = next((n for n in s.sizes()[3:] if s.space is not None or s.takes(n)), s.length)
    s.run(s.draw(1, other if s.space is None else other[0] * other[1]), space=other)
    after, errors = s.module.state_dict(), {"the input is changed": gap(x, given)}
    errors["other entries after a call"] = 0.0 if list(after) == list(before) else 1.0
    for name, value in before.items():
        errors[name] = gap(value.double(), after[name].double()) if name in after else math.inf
    for name, buffer in s.module.named_buffers():
        pairs = buffer.dim() > 1 and buffer.shape[-1] == buffer.shape[-2] >= 64 and name in before
        errors[f"{name} is a table of all pairs, {tuple(buffer.shape)}"] = 1.0 if pairs else 0.0
    loaded = copy.deepcopy(s.module)
    loaded.load_state_dict(before)
    errors["loaded again"] = gap(s.run(x, module=loaded), y)
    return worst(errors)


@CODE_CHECKS.add("longest length", 1e-9, "weights mean the same in a module made for another longest length")
@torch.no_grad()
def longest_length(s: AttentionSubject) -> Measured:
    """The weights are loaded into the module that `fresh` makes."""
    if s.fresh is None:
        raise NotApplicable("has no longest length")
    other, x, state = s.fresh().double().eval(), s.draw(2), s.module.state_dict()
    if any(state[name].shape != value.shape for name, value in other.state_dict().items() if name in state):
        return Measured(math.inf, "the shapes of weights depend on the longest length")
    other.load_state_dict(state)
    return Measured(gap(s.run(x, module=other), s.run(x)))


@CODE_CHECKS.add("gradients", 0.0, "gradients of input and parameters are those of finite differences, float64")
def gradients(s: AttentionSubject) -> Measured:
    """By `gradcheck` in a random direction."""
    if s.has("piecewise"):
        raise NotApplicable("finite differences may cross a boundary")
    learned = {n: p.detach().clone().requires_grad_() for n, p in s.module.named_parameters() if p.requires_grad}
    length = 4 if s.space is None and s.takes(4) else s.length
    x = s.draw(1, length).requires_grad_()

    def output(x: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(learned, values, strict=True))
        return s.run(x, module=lambda *x, **more: torch.func.functional_call(s.module, parameters, x, more))

    right = torch.autograd.gradcheck(output, (x, *learned.values()), raise_exception=False, fast_mode=True)
    return Measured(0.0 if right else 1.0, "" if right else "differ from finite differences")


@CODE_CHECKS.add("second derivatives", 0.0,
               "second derivatives and forward mode exist and are those of finite differences")
def second_derivatives(s: AttentionSubject) -> Measured:
    """By `gradgradcheck`, and the forward mode against a central difference."""
    if not s.has("derivatives"):
        raise NotApplicable("derivatives is not among its capabilities")
    x = s.draw(1, 3 if s.space is None and s.takes(3) else s.length).requires_grad_()
    with torch.random.fork_rng(devices=[]):  # it draws the output's gradients
        torch.manual_seed(s.seed)
        right = torch.autograd.gradgradcheck(lambda x: s.run(x), (x,), raise_exception=False, fast_mode=True)
    v = s.draw(1, x.shape[1], name=3)
    _, forward = torch.func.jvp(lambda x: s.run(x), (x.detach(),), (v,))
    step = 1e-6
    ahead, behind = s.run(x + step * v), s.run(x - step * v)
    difference = gap(forward, (ahead - behind) / (2 * step))
    parts = {"second derivatives": 0.0 if right else 1.0, "forward mode": 0.0 if difference < 1e-6 else difference}
    return worst(parts)


@CODE_CHECKS.add("compiled", 1e-5, "the module compiles as one graph, and gives the same")
def compiled(s: AttentionSubject) -> Measured:
    """With `fullgraph=True`, against the output without compilation."""
    if s.compiler is None:
        raise NotApplicable("compilation is left out")
    mask = None if s.has("resampled") else s.masks(s.lengths())
    x = s.draw(3)
    torch._dynamo.reset()
    graph = torch.compile(s.module, fullgraph=True, backend=s.compiler)
    with torch.no_grad():
        return Measured(gap(s.run(x, mask), s.run(x, mask, module=graph)))


@CODE_CHECKS.add("bfloat16", 3e-2, "under autocast the output is that of float32, relative to its size")
@torch.no_grad()
def bfloat16(s: AttentionSubject) -> Measured:
    """Relative to the largest output; weights that sum to one must do so to single precision under autocast."""
    if s.has("piecewise") or s.has("sensitive"):
        raise NotApplicable("rounding may cross a boundary, or be enlarged")
    module, x = copy.deepcopy(s.module).float(), s.draw(2).float()
    for parameter in module.parameters():
        parameter.mul_(0.5)
    exact, sums = s.run(x, module=module), _sums(s, module, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, half_sums = s.run(x, module=module), _sums(s, module, x)
    size = max(float(exact.abs().max()), torch.finfo(torch.float32).tiny)
    errors = {"values": gap(y.float(), exact) / size}
    if type(s.module).__module__.startswith("genmodels."):  # unlike layers of torch, ours return the dtype of x
        errors["dtype"] = 0.0 if y.dtype == x.dtype else 1.0
    if sums is not None and gap(sums, torch.ones_like(sums)) < SINGLE:  # otherwise another check fails
        errors["sums of weights"] = 0.0 if gap(half_sums, torch.ones_like(sums)) < SINGLE else 1.0
    return worst(errors)


def _sums(s: AttentionSubject, module: torch.nn.Module, x: Tensor) -> Tensor | None:
    """The sum of the weights of each query, if the module has a method `weights`."""
    if not callable(getattr(module, "weights", None)):
        return None
    return module.weights(x, **({} if s.space is None else {"space": s.space})).double().sum(-1)
