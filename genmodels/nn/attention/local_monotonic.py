"""Local monotonic attention: a position that only moves forward, and a window around it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import Inputs, merge_heads, split_heads
from genmodels.nn.attention.scores import Additive
from genmodels.nn.attention.seq2seq import Keys, Stepwise


class Place(NamedTuple):
    """Where each head of each example has come to along the memory: position `(B, H)`, a real number."""

    position: Tensor


class LocalMonotonic(Stepwise):
    """Attention around a position that every query moves forward by a step computed from it.

        p_t = min(p_{t-1} + dp_t, T - 1),    dp_t = exp(z_t) or max_step sigmoid(z_t),    z_t = V_p^T tanh(W_p h_t)
        a_N(s) = lam_t exp(-(s - p_t)^2 / (2 sigma^2)) where |s - p_t| <= 2 sigma,    lam_t = exp(V_l^T tanh(W_l h_t))
        y_t = W_O [sum_s a_N(s) a_S(s) v_s]

    a_S is the additive score of query and memory, as it is or softmaxed over the window. p is a number of each example
    and head, T that example's own length (up to its last valid position), p_0 = 0; so the weights need not sum to 1.

    Arguments:
        dim: width D of x, memory and y.
        heads: number of heads; divides D.
        sigma: width of the Gaussian; the window ends at twice that.
        max_step: the longest step, None leaves it unbounded.
        score: `raw` for the additive score itself, as published; `softmax` for its softmax over the window.
        hidden: width of the hidden layers of each head, D / H by default.
        bias: whether the projections of values and output have biases.

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
        bias: bool = True,
    ):
        super().__init__(dim, heads)
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma}")
        if max_step is not None and not max_step > 0:
            raise ValueError(f"max_step must be positive or None, got {max_step}")
        if score not in ("raw", "softmax"):
            raise ValueError(f"score must be raw or softmax, got {score!r}")
        self.sigma, self.max_step, self.score = sigma, max_step, score
        self.additive = Additive(dim, heads, hidden=hidden)
        width = self.additive.hidden
        self.project_step = nn.Linear(dim, heads * width, bias=False)  # W_p
        self.V_p = nn.Parameter(torch.randn(heads, width) * width**-0.5)
        self.project_height = nn.Linear(dim, heads * width, bias=False)  # W_l
        self.V_l = nn.Parameter(torch.randn(heads, width) * width**-0.5)
        self.project_v = nn.Linear(dim, dim, bias=bias)
        self.project_out = nn.Linear(dim, dim, bias=bias)

    def start(self, memory: Tensor) -> Place:
        """The place before the first query: 0."""
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
        # The last place that an example has: of its own memory, not of the longest in the batch.
        index = torch.arange(there.shape[-1], device=step.device)
        last = torch.where(there, index, 0).amax(-1)  # (B or 1, 1, 1)
        # Once at the end p stays there, so the minimum may be taken after the sum.
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
