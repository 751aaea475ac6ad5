"""First and second derivatives, half precision and the compiler, for the mechanisms beside the core."""

from __future__ import annotations

import torch

from genmodels.nn.attention import LocalMonotonic
from tests.nn.attention.table import MECHANISM, PADDING, draw, half_error, worst


def gradients_hold(attention, x):
    names = [name for name, _ in attention.named_parameters()]

    def output(x, *values):
        return torch.func.functional_call(attention, dict(zip(names, values, strict=True)), (x,))[0]

    given = [x.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in attention.parameters())]
    return torch.autograd.gradcheck(output, given, raise_exception=False, fast_mode=True)


def test_first_derivatives(mechanism):
    assert gradients_hold(mechanism.build(), draw(1, 4, 8))


def test_hard_attention_in_training_has_the_derivatives_of_another_function():
    """In evaluation its own, so that divergences and log-determinants are not those of a softmax."""
    assert not gradients_hold(MECHANISM["hard"].build().train(), draw(1, 4, 8))


class Detached(LocalMonotonic):
    """A fault: the position has no gradient."""

    def _positions(self, given, place, there):
        return super()._positions(given, place, there).detach()


def test_the_derivative_law_catches_a_detached_term():
    assert not gradients_hold(MECHANISM["monotonic"].build(replaced=Detached), draw(1, 4, 8))


def test_second_derivatives_and_forward_mode(mechanism):
    attention, x = mechanism.build(), draw(1, 4, 8).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: attention(x)[0], x, fast_mode=True)
    direction = draw(*x.shape, seed=7)
    _, tangent = torch.func.jvp(lambda x: attention(x)[0], (x.detach(),), (direction,))
    step = 1e-6
    ends = [attention(x.detach() + sign * step * direction)[0] for sign in (1, -1)]
    assert worst(tangent, (ends[0] - ends[1]) / (2 * step)) < 1e-6


#: In half precision a bucket, a largest score or the edge of a window is another; and an exact pseudo-inverse of
#: landmarks that nearly depend on each other has no digits left.
DISCRETE = {"lsh rotation", "lsh sign", "hard", "monotonic bounded", "nystrom exact"}


@torch.no_grad()
def test_half_precision_is_near(mechanism):
    attention, x = mechanism.build(dtype=torch.float32), draw(2, 6, 8, dtype=torch.float32)
    error = half_error(attention, x)
    assert error < 4 or mechanism.name in DISCRETE
    y = attention.bfloat16()(x.bfloat16())[0]
    assert y.dtype == torch.bfloat16 and bool(y.isfinite().all())


@torch.no_grad()
def test_compiled_is_eager(mechanism):
    torch._dynamo.reset()
    attention, x = mechanism.build(dtype=torch.float32), draw(3, 6, 8, dtype=torch.float32)
    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    assert worst(compiled(x, mask=PADDING)[0], attention(x, mask=PADDING)[0]) < 1e-5
    if mechanism.carries:
        memory = draw(3, 4, 8, seed=2, dtype=torch.float32)
        state = attention.start(memory)
        assert worst(compiled(x, memory, cache=state)[0], attention(x, memory, cache=state)[0]) < 1e-5
