"""What models trained by score matching have in common: encoding of the data, divergence guard, validation."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from genmodels.core.data import Batch, DataSpec, dependent_columns, require_spread
from genmodels.core.errors import InputError, RunError, check_number, only_for
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import gather, rank_world
from genmodels.core.random import Generator, KeyedGenerator, uniform
from genmodels.energy import DivergenceGuard, ExactScoreMatching, SlicedScoreMatchingVR
from genmodels.energy.losses import half_square
from genmodels.flows.dequantize import UniformDequantize
from genmodels.flows.scaling import Logit
from genmodels.models.base import GenerativeModel

#: Largest dimension for which a full covariance matrix is kept.
MOST_PAIRS = 1024


class Encoding(nn.Module):
    """The map between data and the variables z whose score is learned.

        integers 0..L-1    v = (x + u) / L,   y = logit(alpha + (1 - 2 alpha) v)
        continuous data    y = x, or x + g u where a column takes values g apart
        both               z = W (y - m)

        log p(x) = log p(z) + log |det dz/dx|,    for integers, in the mean over u, a lower bound on their log-mass

    W is one number for images and sequences, one for each column of vectors, or the matrix that makes the training data
    white (`pca`).

    Arguments:
        spec: the data set.
        alpha: margin of the logit of dequantised integers.
        whitening: `scale` or `pca`.
        gaps: whether columns of continuous data with few distinct values get uniform noise as wide as their median gap.

    Shapes: `forward(x (B, *event), generator)` to `(z (B, *event), log |det dz/dx| (B,))`; `decode(z)` to data.
    Errors: InputError for options that do not fit the data, columns that are constant.

    Example:
        >>> encoding = Encoding(DataSpec("table", (2,)))
        >>> encoding.fit(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), torch.Generator().manual_seed(0))
        >>> z, volume = encoding(torch.tensor([[2.0, 20.0]]), torch.Generator().manual_seed(0))
        >>> z, bool((volume[0] + torch.tensor([2.0**0.5, 200**0.5]).log().sum()).abs() < 1e-6)
        (tensor([[0., 0.]]), True)
    """

    def __init__(
        self,
        spec: DataSpec,
        *,
        alpha: float = 1e-6,
        whitening: Literal["scale", "pca"] = "scale",
        gaps: bool = False,
    ):
        super().__init__()
        if whitening == "pca" and (spec.dims > MOST_PAIRS or len(spec.event_shape) > 1):
            raise InputError(f"whitening=pca is for vectors of at most {MOST_PAIRS} numbers, not events of "
                             f"{spec.event_shape}: use whitening=scale")
        if gaps and spec.levels is not None:
            raise InputError("gaps=true is for continuous data: integers are dequantised anyway")
        if spec.levels is None:
            only_for("integers, which are dequantised", alpha=(alpha, 1e-6))
        self.spec, self.whitening = spec, whitening
        self.dequantize = None if spec.levels is None else UniformDequantize(spec.levels)
        self.logit = None if spec.levels is None else Logit(alpha)
        event = spec.event_shape
        self.register_buffer("location", torch.zeros(event))
        self.register_buffer("scale", torch.ones(event))
        self.register_buffer("rotation", torch.eye(spec.dims) if whitening == "pca" else None)
        self.register_buffer("gap", torch.zeros(event) if gaps else None)

    @torch.no_grad()
    def fit(self, x: Tensor, generator: Generator) -> None:
        """Location, scale, rotation and gaps from training items."""
        if self.gap is not None:
            self.gap.copy_(torch.stack([_median_gap(column) for column in x.flatten(1).T]).view_as(self.gap))
        y = self._continuous(x, generator)[0].double()
        # One number for all pixels, since networks for images share weights over positions.
        together = len(self.spec.event_shape) > 1
        location, std = (y.mean(), y.std()) if together else (y.mean(0), y.std(0))
        require_spread(self.spec, std)
        self.location.copy_(location)
        self.scale.copy_(std)
        if self.rotation is not None:
            if len(y) <= y.shape[1]:
                raise InputError(f"{self.spec.name} has {len(y)} training rows for {y.shape[1]} columns: whitening=pca "
                                 "needs more rows than columns")
            if involved := dependent_columns(y, self.spec.names_of_columns):
                raise InputError(f"{self.spec.name}: columns {', '.join(involved)} depend on each other linearly: "
                                 "leave one out")
            values, vectors = torch.linalg.eigh(torch.cov(((y - location) / std).T).reshape(len(std), -1))
            self.rotation.copy_(vectors / values.sqrt())

    def forward(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """`(z, log |det dz/dx|)`, with fresh noise where integers or gaps are filled."""
        y, volume = self._continuous(x, generator)
        z = (y - self.location) / self.scale
        affine = -self.scale.double().log().sum()
        if self.rotation is not None:
            z = z @ self.rotation
            affine = affine + torch.linalg.slogdet(self.rotation.double()).logabsdet
        return z, volume + affine.to(self.scale.dtype)

    def decode(self, z: Tensor) -> Tensor:
        """The data of z; for integers the level of the cell."""
        v = self._points(z)
        return v if self.dequantize is None else self.dequantize.to_levels(v)

    def outside(self, z: Tensor) -> Tensor | None:
        """The share of each row's values that `decode` moves to the end levels, (B,); None for continuous data."""
        return None if self.dequantize is None else self.dequantize.outside(self._points(z))

    def _points(self, z: Tensor) -> Tensor:
        """z without whitening and logit: continuous data, or points of the unit cube."""
        if self.rotation is not None:
            z = torch.linalg.solve(self.rotation.T, z.T).T
        y = z * self.scale + self.location
        return y if self.logit is None else self.logit.inverse(y)[0]

    def _continuous(self, x: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        if self.dequantize is not None:
            v, volume = self.dequantize(x, generator)
            y, change = self.logit(v)
            return y, volume + change
        y = x.to(self.location.dtype)
        if self.gap is not None:
            y = y + self.gap * (uniform(y.shape, generator, dtype=y.dtype, device=y.device) - 0.5)
        return y, y.new_zeros(len(y))


def _median_gap(column: Tensor) -> Tensor:
    """The median distance between neighbouring distinct values; 0 where nearly all values differ.

    Example:
        >>> float(_median_gap(torch.tensor([1.0, 1.5, 1.5, 2.0, 1.0, 2.5])))
        0.5
    """
    values = column.unique()
    if len(values) < 2 or len(values) > 0.9 * len(column):
        return column.new_zeros(())
    return values.diff().median()


def covariance_of(z: Tensor) -> Tensor:
    """The covariance (D, D) of rows, or the variances (D,) where D is large; float64.

    Example:
        >>> covariance_of(torch.tensor([[0.0], [2.0]]))
        tensor([[2.]], dtype=torch.float64)
    """
    rows = z.flatten(1).double()
    if rows.shape[1] > MOST_PAIRS:
        return rows.var(0)
    return torch.cov(rows.T).reshape(rows.shape[1], rows.shape[1])


_EXACT = 64  # dimensions up to which validation takes the exact loss
_QUADRATURE = 2  # dimensions up to which validation computes log Z
_PROBES = 10
_GUARD_EVERY = 10


class ScoreMatched(GenerativeModel):
    """A model whose core has an energy and is trained by score matching, in units z of its encoding.

    A subclass defines `energies`, which the divergence guard watches.

    Validation takes the exact loss up to 64 dimensions and ten fixed projections beyond, whatever the training loss is,
    so that runs can be compared; in one and two dimensions, where log Z is cheap, the likelihood is logged too. So are
    early signs of divergence: the spread of the energies, the mean norm of the scores, the trace of their Jacobian, and
    the ratio of the loss on held-out and on training data.

    Arguments:
        spec: the data set this model is built for.
        encoding: between the data's units and z.
        noise: standard deviation of Gaussian noise that training adds to z.
    """

    tolerates_tf32 = False  # second derivatives
    needs_whole_weights = "its loss takes second derivatives, for which the weights have to be whole"

    def __init__(self, spec: DataSpec, encoding: Encoding, noise: float):
        super().__init__(spec)
        check_number("noise", noise, 0)
        self.encoding, self.noise = encoding, noise
        self.guard = DivergenceGuard(spec.dims, patience=100 // _GUARD_EVERY)
        self._probe: Tensor | None = None
        self._likelihoods: list[Likelihood] = []

    def points(self, x: Tensor, generator: KeyedGenerator) -> Tensor:
        """z with the noise of training."""
        z, _ = self.encoding(x, generator.child("encode"))
        if self.noise:
            z = z + self.noise * generator.child("noise").normal(z.shape, dtype=z.dtype, device=z.device)
        return z

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    # ---- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch; stops when the energy diverges."""
        step = self.batches_seen
        watched = batch.rows(slice(0, 32))
        noise = self.training_generator(len(watched))
        value = super().training_step(batch, batch_idx)
        _, loss = self.latest[-1]
        if len(loss.per_example) < len(batch):  # a deep kernel's; errors must name the right item
            self.latest[-1] = (batch.rows(slice(len(batch) - len(loss.per_example), None)), loss)
        if step % _GUARD_EVERY == 0:
            with torch.no_grad():
                energies = self.energies(self.points(watched.x, noise))
            self.guard.check(self.trainer.global_step, loss.per_example, energies)
        return value

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """The header, and the state of the divergence guard."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["energy_guard"] = self.guard.large

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """The inverse of `on_save_checkpoint`."""
        super().on_load_checkpoint(checkpoint)
        self.guard.large = checkpoint["energy_guard"]

    # ---- validation ---------------------------------------------------------------------------------------------

    def score_matching(self, core: nn.Module, z: Tensor, generator: KeyedGenerator) -> Tensor:
        """(B,) the loss of validation: exact up to 64 dimensions, else ten projections with reduced variance."""
        loss = ExactScoreMatching() if self.spec.dims <= _EXACT else SlicedScoreMatchingVR(projections=_PROBES)
        with torch.no_grad():
            return loss(core, z, generator.child("figure")).detach()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The loss of a validation batch under the averaged weights, keyed by item."""
        noise = KeyedGenerator(self.seed, batch.item_index, "validate")
        z = self.points(batch.x, noise)
        self._pending.append(self.score_matching(self.weights(), z, noise).cpu())
        if batch_idx == 0:
            self._probe = z[:64]
        if self.spec.dims <= _QUADRATURE and self.spec.levels is None:
            self._likelihoods += self._likelihood(batch)

    def _likelihood(self, batch: Batch) -> list[Likelihood]:
        """The likelihood of a batch if log Z is finite, which it need not be early in training."""
        try:
            found = self.log_likelihood(batch, seed=self.seed).cpu()
        except RunError:
            return []
        return [] if found.kind == "unnormalised" or len(found.nonfinite) else [found]

    def on_validation_epoch_end(self) -> None:
        """Log the loss of validation, by which checkpoints are chosen, and the monitor's figures."""
        losses = torch.cat(gather(self._pending)).double()
        value, self._pending = float(losses.mean()), []
        self.log("val/score_matching", value, rank_zero_only=False)
        self.figures, self.validated = {"val/score_matching": value}, None
        likelihoods, self._likelihoods = gather(self._likelihoods), []
        if sum(len(found.nats) for found in likelihoods) == len(losses):  # without some items it would be too good
            self.log_validation(Likelihood.concatenate(likelihoods))
        for name, number in self._monitored(value).items():
            self.log(f"monitor/{name}", number, sync_dist=rank_world()[1] > 1)
        self._probe = None

    def _monitored(self, held_out: float) -> dict[str, float]:
        core, z = self.weights(), self._probe
        noise = KeyedGenerator(self.seed, torch.arange(len(z), device=z.device), "monitor")
        with torch.no_grad():
            energy, score = core.energy_and_score(z)
            half = half_square(score)
            found = {
                "energy_spread": float(energy.std(unbiased=False)),
                "score_norm": float((2 * half).sqrt().mean()),
                "trace": float((self.score_matching(core, z, noise) - half).mean()),
            }
            if self.latest:
                batch = self.latest[-1][0].rows(slice(0, 256))
                noise = KeyedGenerator(self.seed, torch.arange(len(batch), device=z.device), "monitor")
                training = float(self.score_matching(core, self.points(batch.x, noise), noise).mean())
                found["held_out_over_training"] = held_out / training if training else 0.0
        return found
