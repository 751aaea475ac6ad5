"""What models trained by score matching have in common: encoded data, guards, and the figure that checkpoints go by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from genmodels.data.spec import Batch, DataSpec
from genmodels.energy import DivergenceGuard, ExactScoreMatching, SlicedScoreMatchingVR
from genmodels.energy.losses import half_square
from genmodels.errors import RunError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.models.base import GenerativeModel, gather
from genmodels.models.encoding import Encoding
from genmodels.random import KeyedGenerator

_EXACT = 64  # dimensions up to which validation takes the exact loss
_QUADRATURE = 2  # dimensions up to which validation knows log Z
_PROBES = 10
_GUARD_EVERY = 10


class ScoreMatched(GenerativeModel):
    """A model whose core has an energy and is trained by score matching, in units z of its encoding.

    Validation takes the exact loss up to 64 dimensions and ten fixed projections beyond, whatever loss trains, so that
    runs compare; in one and two dimensions, where log Z is cheap, the likelihood is logged too. It logs what tells
    early that an energy goes wrong: the spread of the energies, the mean length of the scores, the trace of their
    Jacobian, and the loss on held-out over that on training data.

    Arguments:
        spec: the data set this model is built for.
        encoding: between the data's units and z.
        noise: deviation of normal noise that training adds to z.
    """

    tolerates_tf32 = False  # second derivatives

    def __init__(self, spec: DataSpec, encoding: Encoding, noise: float):
        super().__init__(spec)
        if noise < 0:
            raise ValueError(f"noise must not be negative, got {noise}")
        self.encoding, self.noise = encoding, noise
        self.guard = DivergenceGuard(spec.dims, patience=100 // _GUARD_EVERY)
        self._probe: Tensor | None = None
        self._likelihoods: list[Likelihood] = []

    def points(self, x: Tensor, generator: KeyedGenerator) -> Tensor:
        """z as training sees it, noise included."""
        z, _ = self.encoding(x, generator.child("encode"))
        if self.noise:
            z = z + self.noise * generator.child("noise").normal(z.shape, dtype=z.dtype, device=z.device)
        return z

    def energies(self, z: Tensor) -> Tensor | None:
        """(B,) energies that the guard watches, None where training does not know them."""
        return self.core.energy(z)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    # ---- training -----------------------------------------------------------------------------------------------

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch; stops where the energy runs away."""
        step = self.batches_seen
        some = batch.rows(slice(0, 32))
        noise = self.training_generator(len(some))
        value = super().training_step(batch, batch_idx)
        _, loss = self.latest
        if len(loss.per_example) < len(batch):  # so that an error names the right item
            self.latest = (batch.rows(slice(len(batch) - len(loss.per_example), None)), loss)
        if step % _GUARD_EVERY == 0:
            with torch.no_grad():
                energies = self.energies(self.points(some.x, noise))
            self.guard.check(self.trainer.global_step, loss.per_example, energies)
        return value

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """The header, and how long the energy has been large."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["energy_guard"] = self.guard.large

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """The inverse of `on_save_checkpoint`."""
        super().on_load_checkpoint(checkpoint)
        self.guard.large = checkpoint["energy_guard"]

    # ---- validation ---------------------------------------------------------------------------------------------

    def score_matching(self, core: nn.Module, z: Tensor, generator: KeyedGenerator) -> Tensor:
        """(B,) the figure: the exact loss up to 64 dimensions, else ten projections with reduced variance."""
        loss = ExactScoreMatching() if self.spec.dims <= _EXACT else SlicedScoreMatchingVR(projections=_PROBES)
        with torch.no_grad():
            return loss(core, z, generator.child("figure")).detach()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The figure of a validation batch under the averaged weights, keyed by item."""
        noise = KeyedGenerator(self.seed, batch.index, "validate")
        z = self.points(batch.x, noise)
        self._pending.append(self.score_matching(self.weights(), z, noise).cpu())
        if batch_idx == 0:
            self._probe = z[:64]
        if self.spec.dims <= _QUADRATURE and self.spec.levels is None:
            self._likelihoods += self._likelihood(batch)

    def _likelihood(self, batch: Batch) -> list[Likelihood]:
        """The likelihood of a batch as far as log Z is known; an energy that does not fall off yet has none."""
        try:
            found = self.log_likelihood(batch, seed=self.seed).cpu()
        except RunError:
            return []
        return [] if found.kind == "unnormalised" or len(found.nonfinite) else [found]

    def on_validation_epoch_end(self) -> None:
        """Log the figure and what is monitored beside it."""
        value = float(torch.cat(gather(self._pending)).double().mean())
        self._pending = []
        self.log("val/score_matching", value, rank_zero_only=False)
        self.figures["val/score_matching"] = value
        likelihoods, self._likelihoods = gather(self._likelihoods), []
        if likelihoods:
            self.log_validation(Likelihood.concatenate(likelihoods))
        for name, number in self._monitored(value).items():
            self.log(f"monitor/{name}", number, sync_dist=self._rank_world[1] > 1)
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
            if self.latest is not None:
                batch = self.latest[0].rows(slice(0, 256))
                noise = KeyedGenerator(self.seed, torch.arange(len(batch), device=z.device), "monitor")
                training = float(self.score_matching(core, self.points(batch.x, noise), noise).mean())
                found["held_out_over_training"] = held_out / training if training else 0.0
        return found
