"""Half precision, the compiler, files."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.tensors import wide
from genmodels.nn.attention import (
    TransformerXL,
)
from genmodels.nn.attention import backend as paths
from tests.nn.attention.table import BY_NAME, draw, half_error, kinds, worst


def test_half_precision_is_near(case):
    """Found: 0.8 to 1.8."""
    for kind in kinds(case):
        attention = case.build(backend=kind, dtype=torch.float32)
        assert half_error(attention, draw(2, case.length, 8, dtype=torch.float32), space=case.space) < 4


def test_the_law_of_half_precision_catches_eight_bits(monkeypatch):
    """What comes in half precision loses four more bits on its way to the scores."""
    coarse = {torch.bfloat16: torch.float8_e4m3fn}
    monkeypatch.setattr(paths, "wide", lambda t: wide(t.to(coarse.get(t.dtype, t.dtype)).to(t.dtype)))
    attention = BY_NAME["none"].build(backend="explicit", dtype=torch.float32)
    assert half_error(attention, draw(2, 6, 8, dtype=torch.float32)) > 4


def test_a_module_in_half_precision(case):
    attention = case.build(dtype=torch.bfloat16)
    y = attention(draw(2, case.length, 8, dtype=torch.bfloat16), space=case.space)[0]
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())


def test_the_softmax_is_in_single_precision():
    q, k = (4 * draw(1, 1, 64, 4, seed=s).bfloat16() for s in (1, 2))
    exact = (q.double() @ k.double().mT / 2).softmax(-1)
    assert worst(paths.explicit_weights(q, k, None, None), exact) < 1e-4
    assert worst((q @ k.mT / 2).softmax(-1), exact) > 3e-2


def test_compiled_is_eager(case):
    for kind in kinds(case)[:1]:
        torch._dynamo.reset()
        attention = case.build(backend=kind, dtype=torch.float32)
        x = draw(2, case.length, 8, dtype=torch.float32)
        mask = torch.ones(2, 1, case.length, dtype=torch.bool)
        mask[1, 0, -1] = False
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        assert worst(compiled(x, mask=mask, space=case.space)[0], attention(x, mask=mask, space=case.space)[0]) < 1e-5


def test_a_compiled_cache(table):
    torch._dynamo.reset()
    attention, x = table["xl"].build(causal=True, dtype=torch.float32), draw(2, 4, 8, dtype=torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    y, cache = compiled(x[:, :2], cache=attention.empty_cache(x))
    z, _ = compiled(x[:, 2:], cache=cache)
    assert worst(torch.cat([y, z], 1), attention(x)[0]) < 1e-5


def test_compiled_once_for_many_lengths(table):
    torch._dynamo.reset()
    attention = table["xl"].build(window=(2, 0), dtype=torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="eager", dynamic=True)
    for L in (5, 9, 17, 300):  # the last in blocks
        x = draw(1, L, 8, dtype=torch.float32)
        assert worst(compiled(x)[0], attention(x)[0]) < 1e-5


def test_compiled_by_the_real_compiler(table):
    torch._dynamo.reset()
    attention, x = table["xl"].build(window=(2, 1), dtype=torch.float32), draw(2, 6, 8, dtype=torch.float32)
    assert worst(torch.compile(attention, fullgraph=True)(x)[0], attention(x)[0]) < 1e-5


class Reads(TransformerXL):
    """A fault: a value of a tensor is read."""

    def score_bias(self, q, *arguments):
        return super().score_bias(q, *arguments) * (1.0 if self.u.abs().max().item() >= 0 else 0.0)


def test_the_compiler_law_catches_a_value_that_is_read(table):
    torch._dynamo.reset()
    attention = table["xl"].build(replaced=Reads, dtype=torch.float32)
    with pytest.raises(Exception, match="item|data-dependent"):
        torch.compile(attention, fullgraph=True, backend="eager")(draw(1, 4, 8, dtype=torch.float32))


@torch.no_grad()
def test_weights_load_whatever_lengths_were_seen(case):
    attention = case.build()
    attention(draw(1, case.length, 8), space=case.space)
    if case.space is None:
        attention(draw(1, 11, 8))
    state = attention.state_dict()
    other = case.build(seed=1)
    other.load_state_dict(state)
    x = draw(1, case.length, 8)
    assert torch.equal(other(x, space=case.space)[0], attention(x, space=case.space)[0])
    allowed = {"project_q", "project_k", "project_v", "project_out"}
    for name, value in case.build().state_dict().items():
        assert name.split(".")[0] in allowed or value.shape == state[name].shape
