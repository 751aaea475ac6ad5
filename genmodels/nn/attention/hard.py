"""Hard attention: one key for each query, trained as if it were soft."""

from __future__ import annotations

import torch
from torch import Tensor

from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.scores import Score
from genmodels.nn.attention.seq2seq import ScoredAttention
from genmodels.nn.precision import wide
from genmodels.random import Generator, uniform


def one_hot_of_largest(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """1 at the largest allowed logit of each row, the first of equals, and 0 elsewhere; 0 where nothing is allowed.

    Example:
        >>> one_hot_of_largest(torch.tensor([1.0, 2.0, 2.0]), None)
        tensor([0., 1., 0.])
    """
    filled = logits if allowed is None else torch.where(allowed, logits, -torch.inf)
    best = filled == filled.amax(-1, keepdim=True)
    best = best & (best.cumsum(-1) == 1)
    return (best if allowed is None else best & allowed).to(logits.dtype)


def straight_through(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Weights that are one-hot at the largest logit in value, and the softmax in their derivatives.

    Shapes: `logits (.., Lq, Lk)` finite, `allowed` bool of a shape that broadcasts, None = all.
    Source: Bengio et al. 2013, section 3.1; Jang et al. 2017, section 2.2.

    Example:
        >>> e = torch.tensor([[1.0, 2.0, 0.5]], requires_grad=True)
        >>> y = (straight_through(e) * torch.tensor([1.0, 10.0, 100.0])).sum()
        >>> y.item(), torch.autograd.grad(y, e)[0]
        (10.0, tensor([[-4.5183, -6.6253, 11.1437]]))
    """
    soft = masked_softmax(logits, allowed)
    # The difference is exactly 0, so that the sum is exactly one-hot.
    return one_hot_of_largest(wide(logits.detach()), allowed) + (soft - soft.detach())


class HardAttention(ScoredAttention):
    """Attention to a single key: the value of the one with the largest score, with the derivatives of the soft mean.

        a_i = one-hot(argmax_j z_ij),    da_i := d softmax_j(z_ij),    z = e / temperature

    With a generator the choice is drawn in training, by noise on the scores: z = (e + Gumbel noise) / temperature, so
    that key j is chosen with probability softmax(e)_j. In evaluation it is the largest score, the first of equals.

    Arguments:
        dim: width D of x, memory and y.
        heads: number of heads; divides D.
        score: score function, built for the same dim and heads; `Additive` by default.
        temperature: of the softmax that lends its derivatives.
        generator: where the noise comes from; None is for no noise.
        bias: whether the projections of values and output have biases.

    Shapes: as in `ScoredAttention`. Errors: ValueError for a temperature that is not positive.
    Source: Xu et al. 2015, section 4.1; Jang et al. 2017, section 2.2.

    Example:
        >>> attention = HardAttention(8, 2)
        >>> attention.weights(torch.randn(3, 4, 8)).detach().unique()
        tensor([0., 1.])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        score: Score | None = None,
        *,
        temperature: float = 1.0,
        generator: Generator | None = None,
        bias: bool = True,
    ):
        super().__init__(dim, heads, score, bias=bias)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature, self.generator = temperature, generator

    def choose(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        if self.generator is not None and self.training:
            u = uniform(logits.shape, self.generator, dtype=logits.dtype, device=logits.device)
            u = u.clamp(torch.finfo(u.dtype).tiny, 1 - torch.finfo(u.dtype).eps)
            logits = logits - torch.log(-torch.log(u))
        return straight_through(logits / self.temperature, allowed)
