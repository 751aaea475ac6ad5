"""Attention through a few landmarks: the softmax matrix by the method of Nystrom."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.core.tensors import wide
from genmodels.nn.attention.backend import masked_softmax
from genmodels.nn.attention.mechanism import AtOnce, Inputs, split_heads

#: How many times slower many small products are than those of a fused kernel, about.
SMALL_PRODUCTS = 8


def nystrom(A: Tensor, S: Tensor, rcond: float = 1e-6) -> Tensor:
    """A matrix from some of its rows and columns: A[:, S] pinv(A[S, S]) A[S, :].

    Exact in the rows and columns S when A[S, S] is regular, and everywhere when S spans the rank of A. Singular values
    below `rcond` times the largest count as zero: those of more landmarks than the rank are noise.

    Shapes: `A (.., L, L)`, `S (m,)` indices.
    Source: Williams and Seeger 2001, section 3.

    Example:
        >>> u = torch.tensor([[1.0, 2.0, 3.0]])
        >>> nystrom(u.T @ u, torch.tensor([0]))
        tensor([[1., 2., 3.],
                [2., 4., 6.],
                [3., 6., 9.]])
    """
    rows = A[..., S, :]
    return A[..., S] @ torch.linalg.pinv(rows[..., S], rtol=rcond) @ rows


def iterated_inverse(A: Tensor, iterations: int) -> Tensor:
    """The pseudo-inverse by an iteration of third order, which converges for every A.

        Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4,    Z_0 = A^T / (norm_1(A) norm_inf(A))

    Each matrix has norms of its own. Rows and columns of zeros stay zero. Six iterations are a few per cent off.

    Source: Razavi et al. 2014, equation 11; Xiong et al. 2021, section 3.3.

    Example:
        >>> iterated_inverse(torch.diag(torch.tensor([2.0, 0.0])), 12)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.0000]])
    """
    columns, rows = A.abs().sum(-2).amax(-1), A.abs().sum(-1).amax(-1)
    scale = (columns * rows)[..., None, None]
    Z = A.mT / torch.where(scale > 0, scale, 1.0)
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ))) / 4
    return Z


def pseudo_inverse(A: Tensor) -> Tensor:
    """The pseudo-inverse of square matrices, with derivatives as accurate as the inverse where they are regular.

        dZ = -Z dA Z                                                    for regular A
        dZ = -Z dA Z + Z Z^T dA^T (I - A Z) + (I - Z A) dA^T Z^T Z      else (constant rank)

    The projections vanish for regular A, but not their rounding: it is multiplied by cond(A)^2 there.

    Source: Golub and Pereyra 1973, equation 4.12.

    Example:
        >>> pseudo_inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[2.0, 0.0], [0.0, 0.0]]])).diagonal(dim1=1, dim2=2)
        tensor([[0.5000, 0.2500],
                [0.5000, 0.0000]])
    """
    with torch.no_grad():
        regular = (torch.linalg.matrix_rank(A) == A.shape[-1])[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    inverse = torch.linalg.inv(torch.where(regular, A, identity))
    return torch.where(regular, inverse, torch.linalg.pinv(torch.where(regular, identity, A)))


def segments(valid: Tensor, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Which of `count` segments each valid position belongs to, as weights of a mean: `(B, count, L)`.

    The n valid positions of an example are cut into segments of n / count each, whatever the padding between and after
    them. An example of fewer than `count` has segments of one position or none; the weights of these are 0.

    Shapes: `valid (B, 1, L)` bool.

    Example:
        >>> segments(torch.tensor([[[True, True, False, True]]]), 2)
        tensor([[[0.5000, 0.5000, 0.0000, 0.0000],
                 [0.0000, 0.0000, 0.0000, 1.0000]]])
    """
    number = valid.cumsum(-1)
    total = number[..., -1:].clamp(min=1)
    own = torch.div((number - 1) * count, total, rounding_mode="floor")
    member = (valid & (own == torch.arange(count, device=valid.device)[:, None])).to(dtype)
    return member / member.sum(-1, keepdim=True).clamp(min=1)


class Nystrom(AtOnce):
    """Softmax attention through m landmarks, in time and memory linear in the length.

        y = W_O softmax(q k_L^T) Z softmax(q_L k^T) v,    Z = pinv(softmax(q_L k_L^T))

    q and k are scaled by d^(-1/4); landmarks q_L, k_L are means over segments of the valid positions. With as many
    landmarks as positions and the exact pseudo-inverse this is attention itself; with fewer, no accuracy is promised:
    the weights may be negative and need not sum to 1.

    Arguments:
        dim: width D of x, memory and y.
        heads: number of heads; divides D.
        landmarks: number m of segments; any length goes, shorter ones use fewer.
        iterations: steps towards the pseudo-inverse, None for the exact one.
        causal: not possible, since a landmark averages over the future.
        bias: whether the four projections have biases.

    Shapes: `x (B, Lq, D)`, `memory (B, Lk, D)`, x itself by default; `mask (B, 1, Lq)` and `memory_mask (B, 1, Lk)`
    bool, True = valid. y is `(B, Lq, D)`.
    Errors: ValueError for `causal`, landmarks or iterations < 1, a cache, a mask of pairs.
    Source: Xiong et al. 2021, equations 13 to 15.

    Example:
        >>> attention = Nystrom(8, 2, landmarks=3)
        >>> attention(torch.randn(3, 7, 8))[0].shape
        torch.Size([3, 7, 8])
    """

    cross = True

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        landmarks: int = 32,
        iterations: int | None = 6,
        causal: bool = False,
        bias: bool = True,
    ):
        super().__init__(dim, heads)
        if causal:
            raise ValueError("Nystrom has no causal form: a landmark averages over the future")
        if landmarks < 1:
            raise ValueError(f"landmarks must be at least 1, got {landmarks}")
        if iterations is not None and iterations < 1:
            raise ValueError(f"iterations must be at least 1, or None for the exact inverse, got {iterations}")
        self.landmarks, self.iterations = landmarks, iterations
        self.project_q = nn.Linear(dim, dim, bias=bias)
        self.project_k = nn.Linear(dim, dim, bias=bias)
        self.project_v = nn.Linear(dim, dim, bias=bias)
        self.project_out = nn.Linear(dim, dim, bias=bias)

    def _cost(self, Lq: int, Lk: int) -> tuple[str, int]:
        m = self.landmarks
        reason = f"through {m} landmarks, linear in the length"
        # Products: with the landmarks and through them, and four of m x m in each iteration.
        work = 2 * m * (Lq + Lk) * self.head_dim + 4 * m**3 * (self.iterations or 20)
        if work * SMALL_PRODUCTS >= 2 * Lq * Lk * self.head_dim:
            reason = f"{reason}; slower than full attention at this length"
        return reason, self.heads * (2 * m * (Lq + Lk) + 5 * m * m) + m * (Lq + Lk)

    def _mix(self, given: Inputs, values: Tensor, drop: float) -> Tensor:
        q = split_heads(self.project_q(given.x), self.heads)
        k = split_heads(self.project_k(given.source), self.heads)
        with torch.autocast(q.device.type, enabled=False):
            q, k, values = wide(q) * self.head_dim**-0.25, wide(k) * self.head_dim**-0.25, wide(values)
            if given.empty:
                return q @ k.mT @ values
            ones = torch.ones(len(q), 1, 1, dtype=torch.bool, device=q.device)
            q_mean = self._means(ones.expand(-1, -1, q.shape[2]) if given.queries is None else given.queries, q.dtype)
            k_mean = self._means(ones.expand(-1, -1, k.shape[2]) if given.keys is None else given.keys, k.dtype)
            qL, kL = q_mean @ q, k_mean @ k  # (B, H, m, d)
            q_there, k_there = q_mean.any(-1), k_mean.any(-1)[:, :, None]  # (B, 1, m), (B, 1, 1, m)
            middle = masked_softmax(qL @ kL.mT, k_there)
            middle = torch.where(q_there[..., None], middle, 0)  # an empty segment has neither row nor column
            if self.iterations is None:
                # Nothing reads the ones of segments that neither side has: they keep the matrix regular.
                neither = ~(q_there[..., None] | k_there) & torch.eye(self.landmarks, dtype=torch.bool, device=q.device)
                Z = pseudo_inverse(torch.where(neither, 1, middle))
            else:
                Z = iterated_inverse(middle, self.iterations)
            right = masked_softmax(qL @ k.mT, given.allowed) @ values
            return masked_softmax(q @ kL.mT, k_there) @ (Z @ right)

    def _means(self, valid: Tensor, dtype: torch.dtype) -> Tensor:
        return segments(valid, self.landmarks, dtype)[:, None]  # (B, 1, m, L)
