"""Local attention: weights over fixed neighbours, and a window around a monotonic position."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from genmodels.core.errors import at_least, one_of
from genmodels.core.random import dropout
from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import AtOnce, Inputs, merge_heads, split_heads
from genmodels.nn.attention.seq2seq import Additive, Keys, Stepwise

#: Positions whose neighbours are summed by one product.
BLOCK = 64


class LocalDenseSynthesizer(AtOnce):
    """Weights over c neighbours from a small network of each position, without comparison of positions.

        B_t = softmax(relu(x_t W1) W2),    Y_t = sum_{j<c} B_tj V_{t+j-floor(c/2)},    y = concat(Y) W_O

    with W1 (D x d) and W2 (d x c) of each head. For even c the window has one more position in the past. Time and
    memory are linear in the length.

    Arguments:
        c: number of neighbours, the position itself among them.
        boundary: neighbours that do not exist or are invalid: `renormalise` excludes them from the softmax, `zero` sets
            their weights to zero.
        dim, heads, dropout: see `Mechanism`.

    Shapes: `x (B, L, D)`, `mask (B, 1, L)` bool, True = valid; y is `(B, L, D)`, zero at invalid positions.
    Errors: ValueError for c < 1, an unknown boundary, a memory, a cache, a mask of pairs.
    Source: Xu et al. 2021 (local dense synthesizer attention), section 2.3.

    Example:
        >>> attention = LocalDenseSynthesizer(8, 2, c=5)
        >>> attention(torch.randn(3, 4, 8))[0].shape, attention.local_weights(torch.randn(3, 4, 8)).shape
        (torch.Size([3, 4, 8]), torch.Size([3, 2, 4, 5]))
    """

    kinked = "relu"  # which it calls, for `require_smooth`

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        c: int = 15,
        boundary: Literal["renormalise", "zero"] = "renormalise",
        dropout: float = 0.0,
    ):
        super().__init__(dim, heads, dropout)
        at_least(1, c=c)
        one_of("boundary", boundary, ("renormalise", "zero"))
        self.c, self.boundary = c, boundary
        self.project_hidden = nn.Linear(dim, dim, bias=False)  # W1 of every head, side by side
        self.W2 = nn.Parameter(torch.randn(heads, self.head_dim, c) * self.head_dim**-0.5)
        self.project_v = nn.Linear(dim, dim)
        self.project_out = nn.Linear(dim, dim)

    def local_weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """B `(B, H, L, c)`, without dropout; entry j is for offset j - floor(c/2)."""
        given = self._admit(x, None, mask, None)
        return self._weigh(given.x, given.keys)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        reason = f"each position weighs {self.c} neighbours by itself, linear in the length"
        if Lk <= self.c:
            reason = f"{reason}; no cheaper than full attention below {self.c + 1} positions"
        block = min(max(BLOCK, self.c), max(Lq, 1))
        rows = block * -(-Lq // block)
        return reason, rows * (self.heads * (block + 3 * self.c - 1) + self.dim * (block + self.c - 1) // block)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        """The weighted sums of values, block by block, as products with banded matrices of weights.

        Row i of a band is shifted by i: rows of c weights and n zeros, read as rows of one element less.
        """
        if given.empty:
            return wide(values)
        B = self._weigh(given.x, given.keys)
        B = dropout(B, drop) if drop else B
        length = B.shape[2]
        n = min(max(BLOCK, self.c), length)
        missing, width = -length % n, n + self.c - 1
        with torch.autocast(values.device.type, enabled=False):
            near = self._around(wide(values), missing).unfold(2, width, n)  # (B, H, blocks, d, width)
            rows = pad(B, (0, n, 0, missing)).unflatten(2, ((length + missing) // n, n))
            band = rows.flatten(3)[..., : n * width].unflatten(3, (n, width))
            return (band @ near.mT).flatten(2, 3)[:, :, :length]

    def _weigh(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Weights `(B, H, L, c)` over neighbours, 0 outside the sequence and at invalid positions."""
        hidden = relu(split_heads(self.project_hidden(x), self.heads))
        with torch.autocast(x.device.type, enabled=False):
            logits = wide(hidden) @ wide(self.W2)
            if not x.shape[1]:
                return logits
            there = x.new_ones(1, 1, x.shape[1], dtype=torch.bool) if valid is None else valid
            there = self._around(there[..., None])[..., 0].unfold(2, self.c, 1)  # (B or 1, 1, L, c)
            if self.boundary == "renormalise":
                return masked_softmax(logits, there)
            return torch.where(there, logits.softmax(-1), 0)

    def _around(self, values: Tensor, more: int = 0) -> Tensor:
        """`(B, H, L, d)` with zeros for the neighbours before the first and after the last position, and some more."""
        past = self.c // 2
        return pad(values, (0, 0, past, self.c - 1 - past + more))


class Place(NamedTuple):
    """The position `(B, H)` in the memory of each head of each example, a real number."""

    position: Tensor


class LocalMonotonic(Stepwise):
    """Attention around a position that every query advances by a step computed from the query.

        p_t = min(p_{t-1} + dp_t, T - 1),    dp_t = exp(z_t) or max_step sigmoid(z_t),    z_t = V_p^T tanh(W_p h_t)
        a_N(s) = lam_t exp(-(s - p_t)^2 / (2 sigma^2)) where |s - p_t| <= 2 sigma,    lam_t = exp(V_l^T tanh(W_l h_t))
        y_t = W_O [sum_s a_N(s) a_S(s) v_s]

    a_S is the additive score of query and memory, or its softmax over the window. Each example and head has its p, with
    p_0 = 0; T is the length of the example, up to its last valid position. The weights need not sum to 1.

    Arguments:
        dim, heads: see `Mechanism`.
        sigma: standard deviation of the Gaussian; the window ends at twice that.
        max_step: the longest step, None = unbounded.
        score: `raw` for the additive score, as published; `softmax` for its softmax over the window.
        hidden: width of the hidden layers of each head, D / H by default.

    Shapes: `x (B, Lq, D)`, `memory (B, Lk, D)`, x itself by default; `mask (B, 1, Lq)` and `memory_mask (B, 1, Lk)`
    bool, True = valid; invalid queries move nothing. y is `(B, Lq, D)`.
    Errors: ValueError for sigma or max_step that are not positive, an unknown score, a mask of pairs.
    Source: Tjandra et al. 2017, section 3.

    Example:
        >>> attention, memory = LocalMonotonic(8, 2, sigma=1.5), torch.randn(3, 6, 8)
        >>> _, place = attention(torch.randn(3, 2, 8), memory, cache=attention.start(memory))
        >>> bool((place.position > 0).all())
        True
    """

    state = Place

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        sigma: float = 2.0,
        max_step: float | None = None,
        score: Literal["raw", "softmax"] = "raw",
        hidden: int | None = None,
    ):
        super().__init__(dim, heads)
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma}")
        if max_step is not None and not max_step > 0:
            raise ValueError(f"max_step must be positive or None, got {max_step}")
        one_of("score", score, ("raw", "softmax"))
        self.sigma, self.max_step, self.score = sigma, max_step, score
        self.additive = Additive(dim, heads, hidden=hidden)
        width = self.additive.hidden
        self.project_step = nn.Linear(dim, heads * width, bias=False)  # W_p
        self.V_p = nn.Parameter(torch.randn(heads, width) * width**-0.5)
        self.project_height = nn.Linear(dim, heads * width, bias=False)  # W_l
        self.V_l = nn.Parameter(torch.randn(heads, width) * width**-0.5)
        self.project_v = nn.Linear(dim, dim)
        self.project_out = nn.Linear(dim, dim)

    def start(self, memory: Tensor) -> Place:
        """The initial position, 0."""
        return Place(wide(memory).new_zeros(len(memory), self.heads))

    def gaussian(self, position: Tensor, height: Tensor, there: Tensor) -> Tensor:
        """a_N `(B, H, Lq, Lk)` around positions `(B, H, Lq)`, with zeros where `there (B or 1, 1, 1, Lk)` is not."""
        distance = self._distance(position, there)
        bell = height[..., None] * torch.exp(-(distance**2) / (2 * self.sigma**2))
        return torch.where(self._window(distance, there), bell, 0)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        reason = "scores of every pair, then a Gaussian window; slower than full attention at every length"
        return reason, (4 + self.additive.hidden) * self.heads * Lq * Lk

    def _keys(self, given: Inputs) -> Keys:
        return Keys(self.additive.keys(given.source), split_heads(self.project_v(given.source), self.heads))

    def _attend(self, given: Inputs, keys: Keys, place: Place | None) -> tuple[Tensor, Tensor, Place]:
        """The heads' outputs `(B, Lq, D)` in the dtype of the values, the weights, and the place of the next query."""
        place = self.start(given.source) if place is None else place
        length = given.source.shape[1]
        if given.empty:
            a = wide(given.x).new_zeros(len(given.x), self.heads, given.x.shape[1], length)
            return merge_heads(a.to(keys.values.dtype) @ keys.values), a, place
        there = given.keys
        if there is None:
            there = torch.ones(1, 1, length, dtype=torch.bool, device=given.x.device)
        there = there[:, :, None]  # (B or 1, 1, 1, Lk)
        position = self._positions(given, place, there)
        height = self._number(self.project_height, self.V_l, given.x).exp()
        logits = self.additive.logits(given.x, keys.shown)
        if self.score == "softmax":
            logits = masked_softmax(logits, self._window(self._distance(position, there), there))
        a = self.gaussian(position, height, there) * logits
        with torch.autocast(a.device.type, enabled=False):
            y = a @ wide(keys.values)
        return merge_heads(y.to(keys.values.dtype)), a, Place(position[..., -1])

    def _positions(self, given: Inputs, place: Place, there: Tensor) -> Tensor:
        """p of every query, `(B, H, Lq)`."""
        z = self._number(self.project_step, self.V_p, given.x)
        step = z.exp() if self.max_step is None else self.max_step * z.sigmoid()
        if given.queries is not None:
            step = step.masked_fill(~given.queries, 0)
        # The last valid position of each example.
        index = torch.arange(there.shape[-1], device=step.device)
        last = torch.where(there, index, 0).amax(-1)  # (B or 1, 1, 1)
        # Steps are positive, so the minimum may be taken after the sum.
        return torch.minimum(place.position.to(step.dtype)[..., None] + step.cumsum(-1), last.to(step.dtype))

    def _number(self, projection: nn.Linear, vector: Tensor, x: Tensor) -> Tensor:
        """V^T tanh(W x) of each head, `(B, H, L)`."""
        hidden = split_heads(projection(x), self.heads)
        with torch.autocast(x.device.type, enabled=False):
            hidden = torch.tanh(wide(hidden))
            return torch.einsum("bhln,hn->bhl", hidden, vector.to(hidden.dtype))

    def _distance(self, position: Tensor, there: Tensor) -> Tensor:
        """s - p `(B, H, Lq, Lk)`."""
        return torch.arange(there.shape[-1], device=position.device) - position[..., None]

    def _window(self, distance: Tensor, there: Tensor) -> Tensor:
        return there & (distance.abs() <= 2 * self.sigma)
