"""Flows over integers, with a lower bound on their log-mass, and over continuous data."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from genmodels.core.likelihood import log_mean_exp
from genmodels.core.random import Generator, KeyedGenerator
from genmodels.core.tensors import outside_inference, usable
from genmodels.flows.bijection import require_mask, undone_on_failure
from genmodels.flows.dequantize import Dequantize, GaussianNoise
from genmodels.flows.flow import (
    Flow,
    class_posterior,
    has_null_class,
    label_count,
    labels_fault,
    levels_fault,
    mask_fault,
    refuse,
    require_classes,
    require_initialized,
    require_tensor,
)


class DiscreteFlow(nn.Module):
    """A flow on dequantised integers, with K importance samples of the noise.

        w_k = log p(v_k) - D log L - log q(u_k | x),    nats_K = log (1/K) sum_k exp(w_k) <= log P(x) in expectation

    K = 1 is the ELBO; the expectation of nats_K does not decrease with K and tends to log P(x).

    Arguments:
        dequantize: maps integers to points in [0, 1).
        flow: the flow over these points, including its logit.

    Shapes: `x (B, *event)` integers, `cond` as the parts take it, `mask (B, 1, T)` bool; log-masses `(B,)` float64.
    Errors: ValueError for K < 1, integers or labels out of range, an unused condition, or a mask that `Flow` refuses;
    NotInitialized while a layer is not initialised.
    Source: Burda, Grosse, Salakhutdinov 2016 for the K-sample bound; Ho et al. 2019 (Flow++) for the ELBO itself.

    Example:
        >>> from genmodels.flows.bases import Uniform
        >>> from genmodels.flows.composition import Compose
        >>> from genmodels.flows.dequantize import UniformDequantize
        >>> model = DiscreteFlow(UniformDequantize(4), Flow(Compose([], (2,)), Uniform((2,))))
        >>> nats, _ = model.log_prob(torch.tensor([[0, 3]]), generator=torch.Generator().manual_seed(0))
        >>> nats.exp()
        tensor([0.0625], dtype=torch.float64)
    """

    def __init__(self, dequantize: Dequantize, flow: Flow):
        super().__init__()
        self.dequantize, self.flow = dequantize, flow
        self.kind = dequantize.kind
        self.uses_cond = flow.uses_cond
        self.num_classes = label_count(self)
        self.null_class = has_null_class(self)

    def initialize(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, generator: Generator,
        force: bool = False,
    ) -> None:
        """Data-dependent initialisation of the dequantisation, then of the flow, from a batch of integers."""
        self._check(x, cond, mask)
        with undone_on_failure(self):
            self.dequantize.initialize(x, generator, mask, force=force)
            with torch.no_grad():
                v, _ = self.dequantize(x, generator, mask)
            self.flow.initialize(v, cond, mask, force=force)

    def log_prob(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, generator: Generator,
        samples: int = 1, rows: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The K-sample bound `(nats (B,), stderr (B,))` in float64; no standard error from a single sample.

        Arguments:
            x, cond, mask: a batch of integers.
            generator: source of the noise; if keyed, draw k of a row depends only on its index, the step and k.
            samples: number K of importance samples.
            rows: largest batch in one pass of the flow; by default one draw of the whole batch.
        """
        return log_mean_exp(self.log_weights(x, cond, mask, generator=generator, samples=samples, rows=rows))

    def log_weights(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None, *, generator: Generator,
        samples: int = 1, rows: int | None = None,
    ) -> Tensor:
        """w_k of each example, (B, K) float64; its first K' columns are the weights of K' samples."""
        if samples < 1 or (rows is not None and rows < 1):
            raise ValueError(f"samples and rows must be at least 1, got samples = {samples}, rows = {rows}")
        require_initialized(self.dequantize, "DiscreteFlow.log_prob: dequantisation")
        self._check(x, cond, mask)
        if not len(x):
            return torch.zeros(0, samples, dtype=torch.float64, device=x.device)
        weights = []
        for pieces in _passes(len(x), samples, rows or len(x)):
            noise = [self._noise(x[part], part, draw, generator) for draw, part in pieces]
            x_here, mask_here, cond_here = (
                None if value is None else torch.cat([value[part] for _, part in pieces])
                for value in (x, mask, cond)
            )
            v, contribution = self.dequantize.with_noise(x_here, torch.cat(noise), mask_here)
            weights.append((self.flow.density(v, cond_here, mask_here) + contribution).double())
        return torch.cat(weights).view(samples, len(x)).T

    def sample(
        self, n: int, cond: Tensor | None = None, *, temperature: float = 1.0, generator: Generator,
        mask: Tensor | None = None, length: int | None = None,
    ) -> Tensor:
        """Integers (n, *event); the arguments are those of `Flow.sample`."""
        v = self.points(n, cond, temperature=temperature, generator=generator, mask=mask, length=length)
        return self.quantise(v)

    def points(self, n: int, cond: Tensor | None = None, **options) -> Tensor:
        """The points (n, *event) that `sample` quantises, some of them perhaps outside [0, 1)."""
        return self.flow.sample(n, cond, **options)

    def class_posterior(
        self, x: Tensor, num_classes: int, mask: Tensor | None = None, *, generator: Generator, samples: int = 1,
        rows: int | None = None, log_prior: Tensor | None = None,
    ) -> Tensor:
        """p(y | x) of every class, (B, num_classes) float64, from K-sample bounds; classes share keyed noise."""
        require_classes(self, num_classes)

        def bound(labels: Tensor) -> Tensor:
            return self.log_prob(x, labels, mask, generator=generator, samples=samples, rows=rows)[0]

        return class_posterior(bound, len(x), num_classes, log_prior, x.device)

    def centre(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The point of each integer at the median of the noise."""
        return self.dequantize.centre(x, mask)

    def quantise(self, v: Tensor) -> Tensor:
        """The integers whose cells hold the values; those outside [0, 1) become the end levels."""
        return self.dequantize.to_levels(v)

    def _check(self, x: Tensor, cond: Tensor | None, mask: Tensor | None) -> None:
        """Raise ValueError for invalid values; waits for the device once, not at every draw."""
        for name, value in (("x", x), ("cond", cond), ("mask", mask)):
            if value is not None or name == "x":
                require_tensor(name, value)
        if mask is not None:
            require_mask(type(self).__name__, mask, x)
        if not torch.compiler.is_compiling():
            of_mask = mask_fault(self.flow.bijection, self.flow.event_shape, mask)
            of_labels = labels_fault(cond, self.num_classes, self.null_class)
            refuse([levels_fault(x, self.dequantize.levels, mask), of_labels, of_mask])

    def _noise(self, x: Tensor, part: slice, draw: int, generator: Generator) -> Tensor:
        if isinstance(generator, KeyedGenerator):
            # A child and not another step, since the training step is part of the key.
            generator = generator.rows(part).child(f"draw {draw}")
        return self.dequantize.noise(tuple(x.shape), generator)


class NoisyFlow(DiscreteFlow):
    """A flow trained on noisy integers, whose samples are denoised by the score of its own density.

        y = v + sigma n,    x = y + sigma^2 grad log p(y) = E[v | y] if p is the density of y

    p is a density of noisy data and gives no log-mass of integers.

    Arguments:
        dequantize: the noise.
        flow: the flow over noisy points.

    Source: Zhai et al. 2024 (TarFlow), equation 8; Efron 2011 (Tweedie's formula).

    Example:
        >>> from genmodels.flows.bases import StandardNormal
        >>> from genmodels.flows.composition import Compose
        >>> model = NoisyFlow(GaussianNoise(4, 0.6), Flow(Compose([], (1,)), StandardNormal((1,))))
        >>> model.denoise(torch.tensor([[1.0]]))  # 0.36 of the variance of 1 is noise
        tensor([[0.6400]])
    """

    dequantize: GaussianNoise

    def points(self, n: int, cond: Tensor | None = None, mask: Tensor | None = None, **options) -> Tensor:
        """Denoised samples, (n, *event)."""
        return self.denoise(super().points(n, cond, mask=mask, **options), cond, mask)

    def denoise(self, y: Tensor, cond: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """y + sigma^2 grad log p(y)."""
        with outside_inference(), torch.enable_grad():
            y = usable(y).detach().requires_grad_()
            (score,) = torch.autograd.grad(self.flow.density(y, cond, mask).sum(), y)
        return y.detach() + self.dequantize.sigma**2 * score


def _passes(items: int, samples: int, rows: int) -> Iterator[list[tuple[int, slice]]]:
    """All (draw, item) pairs, draw by draw, in passes of at most `rows`: lists of (draw, slice of items).

    Example:
        >>> [[(draw, part.start, part.stop) for draw, part in pieces] for pieces in _passes(3, 2, 4)]
        [[(0, 0, 3), (1, 0, 1)], [(1, 1, 3)]]
    """
    for start in range(0, items * samples, rows):
        stop = min(start + rows, items * samples)
        draws = range(start // items, (stop - 1) // items + 1)
        yield [(k, slice(max(start - k * items, 0), min(stop - k * items, items))) for k in draws]


class ContinuousFlow(nn.Module):
    """A flow over continuous data: the exact density, with the methods of `DiscreteFlow` that models call.

    Arguments:
        flow: the flow, in the data's own units.

    Shapes: `x (B, *event)`; log-densities `(B,)` in nats.

    Example:
        >>> from genmodels.flows import Flow, StandardNormal, Flip
        >>> density = ContinuousFlow(Flow(Flip(2), StandardNormal((2,))))
        >>> density.log_prob(torch.zeros(1, 2))
        (tensor([-1.8379]), None)
    """

    kind = "exact"

    def __init__(self, flow: Flow):
        super().__init__()
        self.flow = flow

    def initialize(self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
                   *, generator: Generator | None = None) -> None:
        """Data-dependent initialisation of the bijection; the generator is not used."""
        self.flow.initialize(x, cond, mask)

    def log_prob(
        self, x: Tensor, cond: Tensor | None = None, mask: Tensor | None = None,
        *, generator: Generator | None = None, samples: int = 1, rows: int | None = None,
    ) -> tuple[Tensor, None]:
        """`(nats (B,), None)`: exact, hence without standard error; the options are not used."""
        return self.flow.log_prob(x, cond, mask), None

    def sample(
        self, n: int, cond: Tensor | None = None, *, temperature: float = 1.0, generator: Generator,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Events (n, *event) in the data's own units; frames outside the mask are zero."""
        return self.flow.sample(n, cond, temperature=temperature, generator=generator, mask=mask)

    def centre(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x itself."""
        return x.to(next((p.dtype for p in self.parameters()), torch.float32))

    def quantise(self, v: Tensor) -> Tensor:
        """v itself."""
        return v
