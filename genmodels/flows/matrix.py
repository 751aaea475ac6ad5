"""Square matrices that stay invertible while they are learned: triangular factors, plain, products of reflections."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from genmodels.flows.elementwise import bounded, unbounded

_LIMIT = 10.0


def random_rotation(size: int, generator: torch.Generator | None = None) -> Tensor:
    """A rotation drawn uniformly, in float64: the orthogonal factor of a Gaussian matrix, signs as its QR wants them.

    Example:
        >>> w = random_rotation(3, torch.Generator().manual_seed(0))
        >>> bool(torch.allclose(w @ w.mT, torch.eye(3).double())), round(float(torch.det(w)), 6)
        (True, 1.0)
    """
    device = generator.device if generator is not None else None
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64, device=device)
    q, r = torch.linalg.qr(gaussian)
    q = q * r.diagonal().sign()
    return torch.cat([q[:, :1] * torch.linalg.det(q).sign(), q[:, 1:]], dim=1)


class LUMatrix(nn.Module):
    """A permutation times two triangular factors.

        W = P L (U + diag(sign exp(l))),    log|det W| = sum l,    l = 10 tanh(raw / 10)

    One square of numbers holds it all: L (with ones on its diagonal) below, U above, raw on the diagonal. P and the
    signs are fixed. The start is a random rotation. The bound of l is approached smoothly in training, where
    `flows.monitor` shows it as the smallest singular value; a matrix beyond it is not taken by `set_weight`.

    Arguments:
        size: rows and columns.
        generator: source of the rotation.

    Errors: see `set_weight`.
    Source: Kingma and Dhariwal 2018 (Glow), section 3.2 and equation 10.

    Example:
        >>> matrix = LUMatrix(2)
        >>> matrix.set_weight(torch.tensor([[2.0, 1.0], [1.0, -3.0]]))
        >>> matrix.weight(torch.float32).detach().round(decimals=4), matrix.log_abs_det(torch.float32).detach()
        (tensor([[ 2.,  1.],
                 [ 1., -3.]]), tensor(1.9459))
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.factors = nn.Parameter(torch.empty(size, size))
        self.register_buffer("order", torch.arange(size))  # P, as the row of L U that each row of W is
        self.register_buffer("sign", torch.ones(size))
        self.set_weight(random_rotation(size, generator))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Take the factors of a given matrix.

        Raises:
            ValueError: for a singular matrix, and one whose diag(U) is not between exp(-9.99) and exp(9.99), which is
                all that l can hold.
        """
        permutation, lower, upper = torch.linalg.lu(weight.to(torch.float64))
        diagonal = upper.diagonal()
        sizes = diagonal.abs()
        if not bool((sizes.log().abs() < 0.999 * _LIMIT).all()):  # NaN too
            raise ValueError(f"LUMatrix holds pivots |u| of W = P L U between {math.exp(-0.999 * _LIMIT):.2g} and "
                             f"{math.exp(0.999 * _LIMIT):.2g}, this matrix has {float(sizes.min()):.2g} to "
                             f"{float(sizes.max()):.2g}: scale it, or use kind = full")
        self.order.copy_(permutation.argmax(1))
        self.sign.copy_(torch.where(diagonal < 0, -1.0, 1.0))
        self.factors.copy_(lower.tril(-1) + upper.triu(1) + unbounded(sizes.log(), _LIMIT).diag())

    def log_diagonal(self, dtype: torch.dtype) -> Tensor:
        """l, between -10 and 10."""
        return bounded(self.factors.diagonal().to(dtype), _LIMIT)

    def weight(self, dtype: torch.dtype) -> Tensor:
        below, upper = self._triangles(dtype)
        return torch.addmm(upper, below, upper).index_select(0, self.order)  # (L - I) U + U, rows in order

    def inverse(self, dtype: torch.dtype) -> Tensor:
        # Both solves are of the size of the matrix, and one product then serves every position.
        below, upper = self._triangles(torch.float64)
        rows = torch.eye(len(upper), dtype=torch.float64, device=upper.device).index_select(0, self.order).mT  # P'
        rows = torch.linalg.solve_triangular(below, rows, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(upper, rows, upper=True).to(dtype)

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return self.log_diagonal(dtype).sum()

    def _triangles(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """L - I and U + diag(sign exp(l))."""
        factors = self.factors.to(dtype)
        diagonal = self.sign.to(dtype) * torch.exp(self.log_diagonal(dtype))
        return factors.tril(-1), factors.triu(1) + diagonal.diag()


class FullMatrix(nn.Module):
    """A plain matrix, free to come close to singular; its log-determinant costs a factorisation in float64.

        log|det W| = sum log|diag U| of W = P L U   (slogdet: the determinant may be negative)

    Arguments:
        size: rows and columns.
        generator: source of the random rotation that it starts as.

    Source: Kingma and Dhariwal 2018 (Glow), section 3.2 and equation 9.

    Example:
        >>> matrix = FullMatrix(2)
        >>> matrix.set_weight(torch.tensor([[2.0, 1.0], [1.0, -3.0]]))
        >>> matrix.log_abs_det(torch.float32).detach()
        tensor(1.9459)
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.entries = nn.Parameter(torch.empty(size, size))
        self.set_weight(random_rotation(size, generator))

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Take a given matrix."""
        self.entries.copy_(weight)

    def weight(self, dtype: torch.dtype) -> Tensor:
        return self.entries.to(dtype)

    def inverse(self, dtype: torch.dtype) -> Tensor:
        # Without the check for singularity, which waits for the device: a singular matrix gives values that are not
        # finite, and those are noticed.
        return torch.linalg.inv_ex(self.entries.to(torch.float64)).inverse.to(dtype)

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return torch.linalg.slogdet(self.entries.to(torch.float64)).logabsdet.to(dtype)


class HouseholderMatrix(nn.Module):
    """An orthogonal matrix, as the product of as many reflections as it has columns.

        W = prod_i (I - 2 v_i v_i' / |v_i|^2),    log|det W| = 0,    W^-1 = W'

    The product is I - V T V' with V the unit vectors as columns and T^-1 = strict upper triangle of V'V + I/2, so it
    takes one triangular solve and no loop. |v|^2 is floored at 1e-12. It starts with random reflections.

    Arguments:
        size: rows and columns.
        generator: source of the vectors.

    Source: Tomczak and Welling 2016 (Householder flow); closed form: Joffrain et al. 2006.

    Example:
        >>> matrix = HouseholderMatrix(3)
        >>> w = matrix.weight(torch.float64)
        >>> bool(torch.allclose(w @ w.mT, torch.eye(3).double()))
        True
    """

    def __init__(self, size: int, generator: torch.Generator | None = None):
        super().__init__()
        self.vectors = nn.Parameter(torch.empty(size, size))  # rows v_i
        device = generator.device if generator is not None else None
        with torch.no_grad():
            self.vectors.copy_(torch.randn(size, size, generator=generator, device=device))

    def weight(self, dtype: torch.dtype) -> Tensor:
        vectors = self.vectors.to(dtype)
        unit = vectors * vectors.square().sum(1, keepdim=True).clamp(min=1e-12).rsqrt()
        eye = torch.eye(unit.shape[1], dtype=dtype, device=unit.device)
        half = 0.5 * torch.eye(len(unit), dtype=dtype, device=unit.device)
        return eye - unit.mT @ torch.linalg.solve_triangular((unit @ unit.mT).triu(1) + half, unit, upper=True)

    def inverse(self, dtype: torch.dtype) -> Tensor:
        return self.weight(dtype).mT

    def log_abs_det(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros((), dtype=dtype, device=self.vectors.device)


#: Each has `weight(dtype)`, `inverse(dtype)` and `log_abs_det(dtype)`, computed from the parameters at every call.
MATRICES: dict[str, type[nn.Module]] = {"lu": LUMatrix, "full": FullMatrix, "householder": HouseholderMatrix}
