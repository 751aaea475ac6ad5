"""Attention of a decoder to a memory: score functions, and masked softmax over them, whole or step by step."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.errors import at_least
from genmodels.core.random import Generator, dropout, uniform
from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import Inputs, Mechanism, merge_heads, split_heads
from genmodels.nn.attention.position import head_width


class Past(NamedTuple):
    """The weights of the last query and the sum of the weights of all earlier queries, both `(B, H, Lk)`."""

    previous: Tensor
    cumulative: Tensor

    def after(self, weights: Tensor, queries: Tensor | None) -> Past:
        """The past of the next query, from the weights `(B, H, Lq, Lk)` of these; invalid queries are skipped."""
        if queries is None:
            return Past(weights[:, :, -1], self.cumulative + weights.sum(2))
        weights = weights.masked_fill(~queries[..., None], 0)
        number = queries.cumsum(-1)
        last = queries & (number == number[..., -1:])
        previous = weights.masked_fill(~last[..., None], 0).sum(2)
        happened = number[..., -1:] > 0
        return Past(torch.where(happened, previous, self.previous), self.cumulative + weights.sum(2))


class Score(nn.Module):
    """A score function of projected keys and queries; its logits are finite and not masked.

    A subclass sets `project_k` and defines `logits`.

    Arguments:
        dim: width D of queries and memory.
        heads: number of heads H; divides D.

    Attributes:
        uses_past: whether the logits of a query depend on the weights of earlier queries, so that queries are scored
            one after the other.
    """

    uses_past: bool = False

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, head_width(dim, heads)

    def keys(self, memory: Tensor) -> Tensor:
        """The projected memory `(B, H, Lk, n)` of `(B, Lk, D)`."""
        return split_heads(self.project_k(memory), self.heads)

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        """The scores `(B, H, Lq, Lk)` of queries `x (B, Lq, D)`, float32 or wider."""
        raise NotImplementedError


class ScaledDot(Score):
    """The inner product of query and key: e_ij = s_i . h_j / sqrt(n), with s = W x and h = V m.

    Arguments:
        dim, heads: those of the attention.

    Source: Vaswani et al. 2017, equation 1.

    Example:
        >>> score = ScaledDot(8, 2)
        >>> score.logits(torch.randn(3, 4, 8), score.keys(torch.randn(3, 6, 8))).shape
        torch.Size([3, 2, 4, 6])
    """

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.project_q, self.project_k = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        q = split_heads(self.project_q(x), self.heads)
        with torch.autocast(x.device.type, enabled=False):
            return wide(q) @ wide(keys).mT / math.sqrt(self.head_dim)


class Additive(Score):
    """A network of one hidden layer over query and key: e_ij = w^T tanh(W s_i + V h_j + b).

    The hidden layers of all pairs take memory proportional to Lq Lk n.

    Arguments:
        dim, heads: those of the attention.
        hidden: width n of the hidden layer of each head, D / H by default.

    Errors: ValueError for hidden < 1.
    Source: Bahdanau et al. 2015, appendix A.1.2.

    Example:
        >>> score = Additive(8, 2, hidden=5)
        >>> score.logits(torch.randn(3, 4, 8), score.keys(torch.randn(3, 6, 8))).shape
        torch.Size([3, 2, 4, 6])
    """

    def __init__(self, dim: int, heads: int, *, hidden: int | None = None):
        super().__init__(dim, heads)
        self.hidden = self.head_dim if hidden is None else hidden
        at_least(1, hidden=self.hidden)
        self.project_q = nn.Linear(dim, heads * self.hidden)
        self.project_k = nn.Linear(dim, heads * self.hidden, bias=False)
        self.w = nn.Parameter(torch.randn(heads, self.hidden) * self.hidden**-0.5)

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        q = split_heads(self.project_q(x), self.heads)
        with torch.autocast(x.device.type, enabled=False):
            hidden = torch.tanh(wide(q)[:, :, :, None] + wide(keys)[:, :, None])  # (B, H, Lq, Lk, n)
            return torch.einsum("bhijn,hn->bhij", hidden, self.w.to(hidden.dtype))


class Location(Additive):
    """The additive score with features of the weights of earlier queries.

        e_ij = w^T tanh(W s_i + V h_j + U f_ij + b),    f_i = F * (a_{i-1}, sum_{k<i} a_k), or F * a_{i-1}

    F is a convolution along the keys, padded with zeros. Queries are scored one after the other.

    Arguments:
        dim, heads, hidden: see `Additive`.
        channels: number of filters of F.
        kernel: their length, odd.
        cumulative: whether the filters act on the sum of all earlier weights too, or only on those of the last query.

    Errors: ValueError for an even kernel, for channels or hidden < 1.
    Source: Chorowski et al. 2015, equations 8 and 9 (`cumulative=False`); the sum of weights: Shen et al. 2018
        (Tacotron 2), section 2.2.

    Example:
        >>> score, memory = Location(8, 2, channels=3, kernel=5), torch.randn(3, 6, 8)
        >>> past = Past(torch.zeros(3, 2, 6), torch.zeros(3, 2, 6))
        >>> score.logits(torch.randn(3, 1, 8), score.keys(memory), past).shape
        torch.Size([3, 2, 1, 6])
    """

    uses_past = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        hidden: int | None = None,
        channels: int = 32,
        kernel: int = 31,
        cumulative: bool = True,
    ):
        super().__init__(dim, heads, hidden=hidden)
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that a filter has a middle, got {kernel}")
        at_least(1, channels=channels)
        self.cumulative = cumulative
        self.filters = nn.Conv1d(2 if cumulative else 1, channels, kernel, padding=kernel // 2, bias=False)
        self.project_location = nn.Parameter(torch.randn(heads, channels, self.hidden) * channels**-0.5)

    def features(self, past: Past) -> Tensor:
        """U f of the next query, `(B, H, Lk, n)`."""
        seen = torch.stack([past.previous, past.cumulative] if self.cumulative else [past.previous], dim=2)
        seen = seen.flatten(0, 1)  # (B H, 2 or 1, Lk)
        found = self.filters(seen.to(self.filters.weight.dtype))
        found = found.unflatten(0, (len(past.previous), self.heads))  # (B, H, channels, Lk)
        return found.mT @ self.project_location

    def logits(self, x: Tensor, keys: Tensor, past: Past | None = None) -> Tensor:
        return super().logits(x, wide(keys) + wide(self.features(past)), past)


class Keys(NamedTuple):
    """A projected memory: keys `shown (B, H, Lk, n)` to the score function, and values `(B, H, Lk, d)`."""

    shown: Tensor
    values: Tensor


class Stepwise(Mechanism):
    """Attention to a memory with a state: for all queries in one call, or one after the other.

    A subclass sets `project_out` and `state`, and defines `start(memory) -> state`, `_keys(inputs) -> Keys` and
    `_attend(inputs, keys, state) -> (y, weights, state)` with y `(B, Lq, D)` before the output projection.
    """

    cross = True

    def _output(self, given: Inputs, state: tuple | None) -> tuple[Tensor, tuple]:
        y, _, state = self._attend(given, self._keys(given), state)
        return y, state

    def _all_weights(self, given: Inputs, state: tuple | None) -> Tensor:
        return self._attend(given, self._keys(given), state)[1]

    def keys(self, memory: Tensor, memory_mask: Tensor | None = None) -> Keys:
        """The projected memory `(B, Lk, D)`, for all steps."""
        return self._keys(self._admit(memory[:, :0], memory, None, memory_mask))

    def step(
        self, query: Tensor, memory: Tensor, keys: Keys | None, state: tuple, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple]:
        """One query: its context `(B, D)`, its weights `(B, H, Lk)` and the state of the next.

        Arguments:
            query: `(B, D)`.
            memory: `(B, Lk, D)`.
            keys: the result of `keys(memory)`; None computes it.
            state: the result of `start` or of the step before.
            mask: `(B, 1, Lk)`, True = valid position of memory.
        """
        given = self._admit(query[:, None], memory, None, mask, state)
        y, a, state = self._attend(given, self._keys(given) if keys is None else keys, state)
        return self.project_out(y)[:, 0].to(query.dtype), a[:, :, 0], state


class ScoredAttention(Stepwise):
    """Attention with any score function, for all queries at once or one after the other.

        a_i = softmax_j(e_ij) over the keys that may be attended to,    y_i = W_O [sum_j a_ij v_j]

    A query without keys gives exactly 0 before W_O. The state is a `Past`, which `step`, and `forward` as its cache,
    take and return.

    Arguments:
        score: score function, built for the same dim and heads; `Additive` by default.
        dim, heads, dropout: see `Mechanism`.

    Shapes: `x (B, Lq, D)`, `memory (B, Lk, D)`, x itself by default; `mask (B, 1, Lq)` bool, True = valid;
    `memory_mask (B, 1, Lk)`, or a full one that broadcasts to `(B, H, Lq, Lk)`. y is `(B, Lq, D)`.
    Errors: ValueError for sizes that do not fit, for masks that are not boolean or do not broadcast.
    Source: Bahdanau et al. 2015, section 3.1.

    Example:
        >>> attention, memory = ScoredAttention(8, 2, Location(8, 2, kernel=3)), torch.randn(3, 6, 8)
        >>> keys, state = attention.keys(memory), attention.start(memory)
        >>> context, weights, state = attention.step(torch.randn(3, 8), memory, keys, state)
        >>> context.shape, weights.shape
        (torch.Size([3, 8]), torch.Size([3, 2, 6]))
    """

    state = Past
    full = True

    def __init__(self, dim: int, heads: int, score: Score | None = None, *, dropout: float = 0.0):
        super().__init__(dim, heads, dropout)
        self.score = Additive(dim, heads) if score is None else score
        if (self.score.dim, self.score.heads) != (dim, heads):
            sizes = (self.score.dim, self.score.heads)
            raise ValueError(f"{type(score).__name__} has (dim, heads) = {sizes}, the attention {(dim, heads)}")
        self.project_v = nn.Linear(dim, dim)
        self.project_out = nn.Linear(dim, dim)

    def start(self, memory: Tensor) -> Past:
        """The initial state, without weights."""
        nowhere = wide(memory).new_zeros(len(memory), self.heads, memory.shape[1])
        return Past(nowhere, nowhere)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        reason = f"{type(self.score).__name__} scores every pair; slower than full attention at every length"
        if self.score.uses_past:
            reason = f"{reason}; {Lq} queries one after the other, since each sees where the last one looked"
        return reason, (2 + getattr(self.score, "hidden", 0)) * self.heads * Lq * Lk

    def choose(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        """Weights from logits; a subclass may override the softmax."""
        return masked_softmax(logits, allowed)

    def _keys(self, given: Inputs) -> Keys:
        values = split_heads(self.project_v(given.source), self.heads)
        return Keys(given.unseen(self.score.keys(given.source)), given.unseen(values))

    def _attend(self, given: Inputs, keys: Keys, past: Past | None) -> tuple[Tensor, Tensor, Past]:
        """The heads' outputs `(B, Lq, D)` in the dtype of the values, the weights, and the past of the next query."""
        past = self.start(given.source) if past is None else past
        if given.empty:
            a = wide(given.x).new_zeros(len(given.x), self.heads, given.x.shape[1], given.source.shape[1])
            return merge_heads(a.to(keys.values.dtype) @ keys.values), a, past
        if self.score.uses_past:
            a, past = self._one_by_one(given, keys, past)
        else:
            a = self.choose(self.score.logits(given.x, keys.shown), given.allowed)
            past = past.after(a, given.queries)
        kept = dropout(a, self.dropout) if self.dropout and self.training else a
        with torch.autocast(a.device.type, enabled=False):
            y = kept @ wide(keys.values)
        return merge_heads(y.to(keys.values.dtype)), a, past

    def _one_by_one(self, given: Inputs, keys: Keys, past: Past) -> tuple[Tensor, Past]:
        rows, allowed = [], given.allowed
        for i in range(given.x.shape[1]):
            row = slice(i, i + 1)
            may = allowed if allowed is None or allowed.shape[2] == 1 else allowed[:, :, row]
            a = self.choose(self.score.logits(given.x[:, row], keys.shown, past), may)
            past = past.after(a, None if given.queries is None else given.queries[..., row])
            rows.append(a)
        return torch.cat(rows, dim=2), past


def one_hot_of_largest(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """1 at the first largest allowed logit of each row and 0 elsewhere; 0 in rows without an allowed one.

    Example:
        >>> one_hot_of_largest(torch.tensor([1.0, 2.0, 2.0]), None)
        tensor([0., 1., 0.])
    """
    filled = logits if allowed is None else torch.where(allowed, logits, -torch.inf)
    best = filled == filled.amax(-1, keepdim=True)
    best = best & (best.cumsum(-1) == 1)
    return (best if allowed is None else best & allowed).to(logits.dtype)


def straight_through(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Weights that are one-hot at the largest logit, with the derivatives of the softmax.

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
    """Attention to the key with the largest score, with the derivatives of softmax attention in training.

        a_i = one-hot(argmax_j z_ij),    in training da_i := d softmax_j(z_ij),    z = e / temperature

    In evaluation the derivative is the exact one, through the values only, so that divergences and log-determinants of
    networks with this attention are exact. With a generator the key is random in training: z = (e + Gumbel noise) /
    temperature chooses key j with probability softmax(e)_j. In evaluation it is the first with the largest score.

    Arguments:
        temperature: temperature of the softmax of the derivatives.
        generator: source of the noise in training; None for no noise.
        dim, heads, score: see `ScoredAttention`.

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
    ):
        super().__init__(dim, heads, score)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature, self.generator = temperature, generator

    def choose(self, logits: Tensor, allowed: Tensor | None) -> Tensor:
        if self.generator is not None and self.training:
            u = uniform(logits.shape, self.generator, dtype=logits.dtype, device=logits.device)
            u = u.clamp(torch.finfo(u.dtype).tiny, 1 - torch.finfo(u.dtype).eps)
            logits = logits - torch.log(-torch.log(u))
        if not self.training:
            return one_hot_of_largest(logits, allowed)
        return straight_through(logits / self.temperature, allowed)
