"""What an attention must be as a piece of code: storable, trainable, compilable, precise."""

from __future__ import annotations

import copy
import inspect
import math

import torch
from torch import Tensor

from genmodels.evaluation.attention_subject import AttentionSubject, gap
from genmodels.evaluation.laws import Laws, Measured, NotApplicable
from genmodels.evaluation.laws_of_maps import worst

LAWS = Laws()
#: How far sums of some numbers may be from 1 in single precision; in half precision they are further.
SINGLE = 1e-5


@LAWS.add("state", 0.0, "nothing in the state depends on the length, is changed by a call, or is a table of all pairs")
@torch.no_grad()
def state(s: AttentionSubject) -> Measured:
    """The state dict before and after calls at two lengths, its large square buffers, and a copy that loads it."""
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
    """Weights are loaded into the module that `fresh` makes."""
    if s.fresh is None:
        raise NotApplicable("has no longest length")
    other, x = s.fresh().double().eval(), s.draw(2)
    other.load_state_dict(s.module.state_dict())
    return Measured(gap(s.run(x, module=other), s.run(x)))


@LAWS.add("gradients", 0.0, "gradients of input and parameters are those of finite differences, float64")
def gradients(s: AttentionSubject) -> Measured:
    """By `gradcheck` in a random direction."""
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
    """By `gradgradcheck`, and the forward mode beside a central difference."""
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
    """Traced whole, or not at all; the output is that without compilation."""
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
    """Relative to the largest output; weights that sum to one do so to single precision, also under autocast."""
    if s.says("piecewise"):
        raise NotApplicable("rounding may cross a border")
    module, x = copy.deepcopy(s.module).float(), s.draw(2).float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    exact, sums = s.run(x, module=module), _sums(s, module, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, half_sums = s.run(x, module=module), _sums(s, module, x)
    size = float(exact.abs().max())
    errors = {"values": gap(y.float(), exact) / size}
    if type(s.module).__module__.startswith("genmodels."):  # ours give back the type of x; layers of torch do not
        errors["dtype"] = 0.0 if y.dtype == x.dtype else 1.0
    if sums is not None and gap(sums, torch.ones_like(sums)) < SINGLE:  # else another law has said so
        errors["sums of weights"] = 0.0 if gap(half_sums, torch.ones_like(sums)) < SINGLE else 1.0
    return worst(errors)


def _sums(s: AttentionSubject, module: torch.nn.Module, x: Tensor) -> Tensor | None:
    """Of the weights of each query, where the module shows them."""
    if not callable(getattr(module, "weights", None)):
        return None
    return module.weights(x, **({} if s.space is None else {"space": s.space})).double().sum(-1)
