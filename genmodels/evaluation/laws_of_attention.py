"""What every attention must obey: masks, batches, lengths, storage, derivatives."""

from __future__ import annotations

import copy
import inspect
import math

import torch
from torch import Tensor

from genmodels.evaluation.attention_subject import DOUBLE, AttentionSubject, gap
from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.laws_of_maps import worst
from genmodels.nn.attention import Attention

LAWS = Laws()


@LAWS.add("any length", 0.0, "short, odd, prime and long inputs are taken, and give finite outputs of the same shape")
@torch.no_grad()
def any_length(s: AttentionSubject) -> Measured:
    errors = {}
    for size in s.sizes():
        length = size if s.space is None else size[0] * size[1]
        x = s.draw(1, length)
        try:
            y = s.run(x, space=size)
        except Exception as refused:
            said = (str(refused).splitlines() or [""])[0][:120]
            return Measured(math.inf, f"refuses {size}: {said or type(refused).__name__}")
        errors[f"{size} positions"] = 0.0 if y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all() else 1.0
    return worst(errors)


@LAWS.add("double loop", 1e-10, "the output is that of two loops over positions")
@torch.no_grad()
def double_loop(s: AttentionSubject) -> Measured:
    if s.reference is None:
        raise NotApplicable("no reference is known: pass reference=(module, x, mask, space) -> y")
    errors = {}
    for length in [s.length] if s.space is not None else filter(s.takes, range(1, 8)):
        x, mask = s.draw(1, length), torch.ones(1, 1, length, dtype=torch.bool)
        mask[..., length // 2 : length // 2 + 2] = length < 3
        for name, m in (("", None), (", masked", mask)):
            expected = s.reference(s.module, x, m, s.space)
            valid = mask[:, 0] if m is not None else torch.ones_like(mask[:, 0])
            errors[f"length {length}{name}"] = gap(s.run(x, m)[valid], expected[valid])
    return worst(errors)


@LAWS.add("paths", 1e-12, "fused and explicit give the same")
@torch.no_grad()
def paths(s: AttentionSubject) -> Measured:
    module = copy.deepcopy(s.module)
    if not isinstance(module, Attention) or module.position.adds_values:
        raise NotApplicable("there is one path alone")
    mask, x, outputs = s.masks(s.lengths()), s.draw(3), []
    module.derivatives = 1
    for module.backend in ("explicit", "sdpa"):
        outputs.append([s.run(x, module=module), s.run(x, mask, module=module)])
    return worst({name: gap(a, b) for name, a, b in zip(("", "masked"), *outputs, strict=True)})


@LAWS.add("padding", 0.0, "what stands in padded positions changes nothing and gets no gradient")
def padding(s: AttentionSubject) -> Measured:
    mask = s.masks(s.lengths())
    valid, x, errors = mask[:, 0, :, None], s.draw(3), {}
    plain, gradients = _with_gradients(s, x, mask, valid)
    contents = {"NaN": torch.full_like(x, math.nan), "10000": torch.full_like(x, 1e4), "random": 50 * s.draw(3, name=1)}
    for name, content in contents.items():
        y, others = _with_gradients(s, torch.where(valid, x, content), mask, valid)
        errors[f"{name}: values"] = gap(y, plain)
        errors[f"{name}: gradients"] = max(map(gap, others, gradients))
    errors["gradient of padding"] = float(gradients[0].masked_fill(valid, 0).abs().max())
    return worst(errors)


def _with_gradients(s: AttentionSubject, x: Tensor, mask: Tensor, valid: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.detach().requires_grad_()
    y = s.run(x, mask).masked_fill(~valid, 0)
    learned = [p for p in s.module.parameters() if p.requires_grad]
    found = torch.autograd.grad(y.square().sum(), [x, *learned], allow_unused=True)
    return y.detach(), [torch.zeros_like(p) if g is None else g for g, p in zip(found, [x, *learned], strict=True)]


@LAWS.add("padded = alone", 1e-6, "a padded example gives what it gives alone, values and gradients")
def padded_is_alone(s: AttentionSubject) -> Measured:
    if s.space is not None and s.says("resampled"):
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


@LAWS.add("batch = single", 1e-6, "an example does not depend on the others of its batch")
@torch.no_grad()
def batch_is_single(s: AttentionSubject) -> Measured:
    x = s.draw(3) * torch.tensor([1.0, 3.0, 0.2], dtype=DOUBLE)[:, None, None]
    y = s.run(x)
    return worst({f"row {b}": gap(y[b : b + 1], s.run(x[b : b + 1])) for b in range(3)})


@LAWS.add("empty rows", 0.0, "a query that may attend to nothing gives a constant, with finite and zero gradients")
def empty_rows(s: AttentionSubject) -> Measured:
    mask = s.masks(s.lengths())
    mask[1] = False
    errors = _emptiness(s, mask, (1, slice(None)), "an example without valid positions")
    if s.says("full"):
        full = torch.ones(s.length, s.length, dtype=torch.bool).tril()
        full[2] = False
        errors |= _emptiness(s, full, (slice(None), 2), "a query without keys")
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


@LAWS.add("row sums", 1e-6, "weights are positive, sum to one over what may be attended to, and are zero elsewhere")
@torch.no_grad()
def row_sums(s: AttentionSubject) -> Measured:
    if not callable(getattr(s.module, "weights", None)):
        raise NotApplicable("has no method weights(x, mask)")
    mask, x = s.masks(s.lengths()), s.draw(3)
    given = {} if s.space is None else {"space": s.space}
    a = s.module.weights(x, mask=mask, **given)
    hidden = ~mask[:, :, None].expand_as(a)
    errors = {"weight of padding": float(a.masked_fill(~hidden, 0).abs().max())}
    if not s.says("unnormalised"):
        sums = a.sum(-1).masked_fill(~mask.expand(-1, a.shape[1], -1), 1)
        errors |= {"sums": gap(sums, torch.ones_like(sums)), "below zero": float((-a).clamp(min=0).max())}
    return worst(errors)


@LAWS.add("boolean masks", 0.0, "a mask of numbers is refused, or means what the boolean one means")
@torch.no_grad()
def boolean_masks(s: AttentionSubject) -> Measured:
    mask, x = s.masks(s.lengths()), s.draw(3)
    valid = mask[:, 0]
    try:
        y = s.run(x, mask.double())
    except (ValueError, TypeError, RuntimeError, AssertionError):
        return Measured(0.0, "refused")
    return Measured(0.0 if gap(y[valid], s.run(x, mask)[valid]) < 1e-9 else 1.0, "0 and 1 mean something else")


@LAWS.add("dropout", 0.0, "dropout acts on weights, and in training alone")
@torch.no_grad()
def dropout(s: AttentionSubject) -> Measured:
    module, x = copy.deepcopy(s.module), s.draw(1, name=2)
    still = gap(s.run(x), s.run(x))
    if still:
        return Measured(still, "two evaluations differ")
    if s.says("piecewise"):
        raise NotApplicable("draws in training anyway")
    y = s.run(x)
    torch.manual_seed(s.seed)
    drops = [m for m in module.modules() if getattr(m, "dropout", 0.0) or isinstance(m, torch.nn.Dropout)]
    dropped = s.run(x, module=module.train())
    if not drops or torch.equal(dropped, y):
        raise NotApplicable("was built without dropout")
    ratios = (dropped / y).flatten()
    # On the output, every number is either dropped or scaled by 1 / (1 - p); on the weights, they all mix.
    scaled = ratios[ratios.abs() > 1e-9]
    masked = len(scaled) < len(ratios) and gap(scaled, scaled[:1].expand_as(scaled)) < 1e-6
    return Measured(1.0 if masked else 0.0, "on the output, not on the weights" if masked else "")


@LAWS.add("state", 0.0, "nothing in the state depends on the length, is changed by a call, or is a table of all pairs")
@torch.no_grad()
def state(s: AttentionSubject) -> Measured:
    before = {name: value.clone() for name, value in s.module.state_dict().items()}
    x = s.draw(2)
    given, y = x.clone(), s.run(x)
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


@LAWS.add("longest length", 1e-9, "weights mean the same in a module made for another longest length")
@torch.no_grad()
def longest_length(s: AttentionSubject) -> Measured:
    if s.fresh is None:
        raise NotApplicable("has no longest length")
    other, x = s.fresh().double().eval(), s.draw(2)
    other.load_state_dict(s.module.state_dict())
    return Measured(gap(s.run(x, module=other), s.run(x)))


@LAWS.add("gradients", 0.0, "gradients of input and parameters are those of finite differences, float64")
def gradients(s: AttentionSubject) -> Measured:
    if s.says("piecewise"):
        raise NotApplicable("finite differences may cross a border")
    names, parameters = _learned(s)
    length = 4 if s.space is None and s.takes(4) else s.length
    x = s.draw(1, length).requires_grad_()

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(_Run(s), dict(zip(names, values, strict=True)), (x,))

    right = torch.autograd.gradcheck(output, (x, *parameters), raise_exception=False, fast_mode=True)
    return Measured(0.0 if right else 1.0, "" if right else "differ from finite differences")


@LAWS.add("second derivatives", 0.0, "second derivatives and forward mode exist and are those of finite differences")
def second_derivatives(s: AttentionSubject) -> Measured:
    if not s.says("derivatives"):
        raise NotApplicable("derivatives is not among its capabilities")
    x = s.draw(1, 3 if s.space is None and s.takes(3) else s.length).requires_grad_()
    right = torch.autograd.gradgradcheck(lambda x: s.run(x), (x,), raise_exception=False, fast_mode=True)
    v = s.draw(1, x.shape[1], name=3)
    _, forward = torch.func.jvp(lambda x: s.run(x), (x.detach(),), (v,))
    step = 1e-6
    ahead, behind = s.run(x + step * v), s.run(x - step * v)
    difference = gap(forward, (ahead - behind) / (2 * step))
    parts = {"second derivatives": 0.0 if right else 1.0, "forward mode": 0.0 if difference < 1e-6 else difference}
    return worst(parts)


def _learned(s: AttentionSubject) -> tuple[list[str], list[Tensor]]:
    named = [(f"module.{n}", p.detach().clone().requires_grad_()) for n, p in s.module.named_parameters()
             if p.requires_grad]  # fmt: skip
    return [name for name, _ in named], [parameter for _, parameter in named]


class _Run(torch.nn.Module):
    """A subject as a module of one argument."""

    def __init__(self, s: AttentionSubject):
        super().__init__()
        self.module, self.subject = s.module, s

    def forward(self, x: Tensor) -> Tensor:
        return self.subject.run(x, module=self.module)


@LAWS.add("compiled", 1e-5, "the module compiles as one graph, and gives the same")
def compiled(s: AttentionSubject) -> Measured:
    if s.compiler is None:
        raise NotApplicable("compilation is left out")
    mask = None if s.says("resampled") else s.masks(s.lengths())
    given = {} if s.space is None else {"space": s.space}
    x = s.draw(3)
    torch._dynamo.reset()
    graph = torch.compile(s.module, fullgraph=True, backend=s.compiler)
    with torch.no_grad():
        result = s.full_result(x, mask, module=s.module)
        named = {"mask": mask} if _takes_mask_by_name(s) else {}
        traced = graph(x, **named, **given) if named else graph(x, mask, **given)
    y, z = (r[0] if isinstance(r, tuple) else r for r in (result, traced))
    return Measured(gap(y, z))


def _takes_mask_by_name(s: AttentionSubject) -> bool:
    return "mask" in inspect.signature(s.module.forward).parameters


@LAWS.add("bfloat16", 3e-2, "under autocast the output is that of float32, relative to its size")
@torch.no_grad()
def bfloat16(s: AttentionSubject) -> Measured:
    if s.says("piecewise"):
        raise NotApplicable("rounding may cross a border")
    module, x = copy.deepcopy(s.module).float(), s.draw(2).float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    exact = s.run(x, module=module)
    with torch.autocast("cpu", torch.bfloat16):
        y = s.run(x, module=module)
    size = float(exact.abs().max())
    return worst({"values": gap(y.float(), exact) / size, "dtype": 0.0 if y.dtype == x.dtype else 1.0})
