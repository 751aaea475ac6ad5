"""Paths: which is taken and why, and that all give the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from genmodels.nn.attention import ALiBi, Attention, Rotary, Shaw, Swin2d, T5Bias, TransformerXL, masked_softmax
from genmodels.nn.attention.backend import attend_flex, attend_fused, choose, explicit_weights


def build(make, **options):
    return Attention(8, 2, make and make(8, 2), **options)


@pytest.mark.parametrize("make, options, call, kind, words, extra", [
    (None, {}, {}, "sdpa", "nothing is added", 0),
    (Rotary, {}, {}, "sdpa", "turn q and k", 3 * 8 * (20 + 20) * 4),
    (None, {"causal": True}, {}, "sdpa", "causal within the kernel", 0),
    (None, {"window": (2, 1)}, {}, "sdpa", "boolean mask", 3 * 20 * 20),
    (None, {}, {"masked": True}, "sdpa", "boolean mask", 3 * 20 * 20),
    (T5Bias, {}, {}, "sdpa", "that the batch shares", 4 * 2 * 20 * 20),
    (ALiBi, {}, {"masked": True}, "sdpa", "joined with the mask", 4 * (1 + 3) * 2 * 20 * 20),
    (TransformerXL, {}, {}, "sdpa", "content and distance", 4 * 3 * 2 * 20 * 40),
    (lambda D, H: Shaw(D, H, values=False), {}, {}, "sdpa", "content and distance", 4 * 3 * 2 * 20 * 20),
    (Shaw, {}, {}, "explicit", "relative values", 4 * 3 * 3 * 2 * 20 * 20),
    (None, {"derivatives": 2}, {}, "explicit", "second derivatives", 2 * 4 * 3 * 2 * 20 * 20),
    (None, {"backend": "explicit"}, {}, "explicit", "asked for", 2 * 4 * 3 * 2 * 20 * 20),
    (None, {"backend": "flex"}, {"device": "cuda"}, "flex", "asked for", 2 * 40 * 4),
])  # fmt: skip
def test_explain(make, options, call, kind, words, extra):
    path = build(make, **options).explain(20, 20, batch=3, **call)
    assert (path.kind, path.extra_bytes) == (kind, extra) and words in path.reason


def test_explain_of_a_bounded_reach_counts_blocks():
    attention = Attention(8, 2, TransformerXL(8, 2), window=(10, 0))
    short, long = attention.explain(2048, 2048), attention.explain(8192, 8192)
    assert "in 64 blocks" in long.reason and short.extra_bytes == long.extra_bytes
    turned = Attention(64, 4, Rotary(64, 4), window=(16, 16))  # queries and keys are rotated whole, before the blocks
    growth = turned.explain(8192, 8192).extra_bytes - turned.explain(2048, 2048).extra_bytes
    assert growth == 64 * 2 * (8192 - 2048) * 4


@pytest.mark.parametrize("backend", ["auto", "explicit"])
def test_explain_of_dropout_in_training(backend):
    attention = Attention(8, 2, dropout=0.1, window=(2, 0), backend=backend)
    path = attention.explain(2048, 2048)
    assert path.kind == "explicit" and "blocks" not in path.reason
    assert ("dropout in training" in path.reason) == (backend == "auto")
    again = attention.eval().explain(2048, 2048)
    assert again.kind == {"auto": "sdpa"}.get(backend, backend) and "in 16 blocks" in again.reason


@pytest.mark.parametrize("make, said", [(None, False), (ALiBi, False), (T5Bias, True), (TransformerXL, True)])
def test_a_bias_that_is_differentiated_is_not_fused_on_the_cpu(make, said):
    """Torch's own rule, which the reason repeats: asked of the operations that run."""
    attention, x = build(make), torch.randn(1, 6, 8)
    with torch.profiler.profile() as profile:
        attention(x)
    plain = any("attention_math" in event.key for event in profile.key_averages())
    assert plain == ("in training unfused" in attention.explain(6, 6).reason) == said


def test_half_precision_halves_the_bias():
    attention = Attention(8, 2, TransformerXL(8, 2))
    assert 2 * attention.explain(9, 9, dtype=torch.bfloat16).extra_bytes == attention.explain(9, 9).extra_bytes


def test_flex_is_never_chosen_and_only_for_cuda():
    assert choose("auto", 1, TransformerXL(8, 2), "cuda")[0] == "sdpa"
    with pytest.raises(ValueError, match="FlexAttention has no backward on cpu: .* needs CUDA, use 'auto'"):
        Attention(8, 2, backend="flex")(torch.zeros(1, 3, 8))


@pytest.mark.parametrize("make, options, words", [
    (None, {"backend": "sdpa", "derivatives": 2}, "no second derivatives"),
    (Shaw, {"backend": "sdpa"}, "never forms the weights"),
    (None, {"backend": "flex", "dropout": 0.1}, "no dropout on weights"),
    (TransformerXL, {"backend": "flex"}, "unlike TransformerXL"),
    (lambda D, H: Swin2d(D, H, size=(2, 2)), {"backend": "flex"}, "unlike Swin2d"),
])  # fmt: skip
def test_backends_that_cannot_serve(make, options, words):
    with pytest.raises(ValueError, match=words):
        build(make, **options)


@pytest.mark.parametrize("make", [None, T5Bias, ALiBi, Rotary, TransformerXL, lambda D, H: Shaw(D, H, values=False)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 5e-6), (torch.float64, 1e-12)])
@torch.no_grad()
def test_fused_is_explicit(make, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    fused = Attention(64, 4, make and make(64, 4)).to(dtype)
    explicit = Attention(64, 4, make and make(64, 4), backend="explicit").to(dtype)
    explicit.load_state_dict(fused.state_dict())
    x = torch.randn(2, 48, 64, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.ones(2, 1, 48, dtype=torch.bool)
    mask[0, 0, 30:] = False
    assert float((fused(x, mask=mask)[0] - explicit(x, mask=mask)[0]).abs().max()) < bound


POSITIONS = [None, T5Bias, ALiBi, Rotary]
REACHES = [{}, {"causal": True}, {"window": (3, 2)}, {"chunk": (4, 1)}]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("make, reach, mask", [
    (make, reach, (i + j) % 4) for i, make in enumerate(POSITIONS) for j, reach in enumerate(REACHES)
])  # fmt: skip
@torch.no_grad()
def test_flex_has_the_same_forward(make, reach, mask):
    """FlexAttention without its compiler, which runs forward anywhere: each scheme, reach and mask with each other."""
    torch.manual_seed(0)
    attention = Attention(32, 2, make and make(32, 2), **reach)
    x, padding = torch.randn(2, 16, 32), torch.rand(2, 1, 16) < 0.7
    padding[..., 0] = True
    mask = (None, padding, torch.rand(2, 2, 16, 16) < 0.7, torch.zeros(16, 16, dtype=torch.bool))[mask]
    call = attention._prepare(x, None, mask, None, None, 5, None)
    allowed = attention._masks(call)
    y = attend_flex(call.q, call.k, call.v, attention.position, attention.reach, allowed, call.q0, call.k0,
                    kernel=flex_attention)  # fmt: skip
    assert float((y - attention._attend(call, "explicit")).abs().max()) < 1e-5


def test_masked_softmax_of_nothing_is_zero_with_zero_gradient():
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    allowed = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    weights = masked_softmax(scores, allowed)
    assert weights[1].tolist() == [0] * 4 and weights[0, [1, 3]].tolist() == [0, 0]
    gradient = torch.autograd.grad((weights * torch.arange(4)).sum(), scores)[0]
    assert gradient[1].tolist() == [0] * 4 and gradient.isfinite().all()
    assert torch.autograd.gradcheck(lambda s: masked_softmax(s, allowed), scores)
    assert masked_softmax(scores.detach().bfloat16(), allowed).dtype == torch.float32


def test_empty_rows_do_not_depend_on_the_kernel():
    q, k, v = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    y = attend_fused(q, k, v, torch.randn(1, 1, 3, 3), torch.zeros(1, 1, 3, 3, dtype=torch.bool))
    gradients = torch.autograd.grad(y.sum(), (q, k, v))
    assert not y.any() and all(not g.any() for g in gradients)


def test_the_mask_of_weights_is_hard():
    q = torch.full((1, 1, 2, 4), 50.0)
    weights = explicit_weights(q, q, None, torch.eye(2, dtype=torch.bool))
    assert weights[0, 0].tolist() == [[1, 0], [0, 1]]
