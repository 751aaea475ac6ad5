"""Mels as diffused around the mean that their texts give: what text-to-mel models of this kind have in common."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, check_temperature, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.core.tensors import hide
from genmodels.diffusion import Denoiser, NoiseSchedule, alpha_sigma
from genmodels.diffusion import sample as run_sampler
from genmodels.diffusion.decoder import Gaussian
from genmodels.energy import NoiseConditionalScore, annealed_langevin
from genmodels.flows.composition import Compose
from genmodels.models.base import Loss, Samples
from genmodels.models.build import construct
from genmodels.models.ddpm import DiffusionTraining
from genmodels.models.diffusion_likelihood import DiffusionBound
from genmodels.models.diffusion_sampling import USUAL, DiffusionCourse
from genmodels.models.mels import even_lengths
from genmodels.models.text_model import AlignedModel, Asked, Voices
from genmodels.nn import UNet
from genmodels.speech.alignment import log_paths, path_of
from genmodels.speech.glow_tts import Aligned, GlowTTS, Latent
from genmodels.speech.text_encoder import TextEncoder

FINEST = 10.0  # log-SNR of the last level at most: a hundred and fiftieth of the deviation of the data
_NOISIEST = -12.0  # log-SNR of the first level at least: the data are lost in four hundred times their deviation
_LEVELS = 50  # where nobody says
_FEWEST = 10  # levels; fewer leave noise of one level in the next
_EACH = 2  # Langevin steps at each of them
_STEP = 1.0  # step size over the squared noise level: a tenth of it, as is usual, needs ten times as many levels


class Unscaled(NoiseConditionalScore):
    """The scores of a denoiser as those of data with noise added and nothing scaled down, for annealed Langevin.

        y = x/alpha,   sigma_bar = sigma/alpha = exp(-lambda/2),   score(y) = -eps/sigma_bar

    Arguments:
        denoiser: predicts at any log-SNR lambda.
        mask: `(B, 1, T)`, of the valid frames, or None.

    Example:
        >>> from genmodels.diffusion import CosineSchedule, GaussianDenoiser
        >>> exact = GaussianDenoiser(CosineSchedule(), torch.zeros(1, 1), 3.0)
        >>> y = torch.ones(1, 1, 2, dtype=torch.float64)
        >>> Unscaled(exact).score_at(y, torch.ones(1).double()).flatten().tolist()  # -y/(3 + 1)
        [-0.25, -0.25]
    """

    def __init__(self, denoiser: nn.Module, mask: Tensor | None = None):
        super().__init__(denoiser)
        self.mask = mask

    def score_at(self, x: Tensor, sigma: Tensor, cond: Tensor | None = None) -> Tensor:
        log_snr = -2 * torch.log(sigma.double())
        alpha, _ = alpha_sigma(log_snr)
        column = (-1, *(1,) * (x.dim() - 1))
        eps = self.network.at_log_snr(x * alpha.to(x).view(column), log_snr, cond, self.mask).eps
        return -eps / sigma.view(column)


def langevin_levels(schedule: NoiseSchedule, steps: int | None = None) -> list[float]:
    """The noise levels sigma/alpha of annealed Langevin, geometric from that of t = 1 down.

    Raises:
        ValueError: for fewer than ten.

    Example:
        >>> from genmodels.diffusion import CosineSchedule
        >>> levels = langevin_levels(CosineSchedule(), 10)
        >>> len(levels), round(levels[0], 1), round(levels[-1], 4)
        (10, 403.4, 0.0067)
    """
    steps = _LEVELS if steps is None else steps
    if steps < _FEWEST:
        raise ValueError(f"steps must be at least {_FEWEST} noise levels for annealed_langevin, got {steps}: "
                         "sampler=dpmpp_2m takes fewer")
    ends = schedule.log_snr(torch.tensor([1.0, 0.0], dtype=torch.float64)).clamp(_NOISIEST, FINEST)
    return torch.exp(-0.5 * torch.linspace(*ends.tolist(), steps, dtype=torch.float64)).tolist()


def by_langevin(
    denoiser: Denoiser, levels: list[float], mean: Latent, beside: Tensor, generator: KeyedGenerator,
    temperature: float,
) -> tuple[Tensor, int]:
    """What is drawn around the means from N(0, temperature^2 I) down, and the evaluations of the network it took."""
    u = annealed_langevin(
        Unscaled(denoiser, mean.mask), mean.z.shape, levels, generator, cond=beside, steps_per_level=_EACH,
        step=_STEP * levels[-1] ** 2, temperature=temperature, dtype=mean.z.dtype, device=mean.z.device,
    )
    return u, len(levels) * _EACH + 1


_LANGEVIN = "annealed_langevin"


class Accompanied(nn.Module):
    """A U-Net over frames that sees further channels beside the noisy ones: what the text says of each frame.

    Sequences shorter than its levels take are padded, which changes nothing where the padding is masked.

    Arguments:
        unet: built with that many `extra_channels`.

    Shapes: `x (B, C, T)`, `log_snr (B,)`, `cond (B, E, T)`, `mask (B, 1, T)`; the result is `(B, C, T)`, or `(B, 2 C,
        T)` for a U-Net with `double_output`.
    """

    def __init__(self, unet: UNet):
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor, log_snr: Tensor, cond: Tensor, mask: Tensor | None = None) -> Tensor:
        frames, least = x.shape[2], 2 ** (self.unet.levels - 1)
        x = torch.cat([x, cond.to(x.dtype)], dim=1)
        if frames < least:
            mask = x.new_ones(len(x), 1, frames).bool() if mask is None else mask
            x, mask = pad(x, (0, least - frames)), pad(mask, (0, least - frames))
        return self.unet(x, log_snr, None, mask)[:, :, :frames]


class Diffused(Voices):
    """The aligner with its text encoder, the denoiser, and the vectors of the speakers.

    Arguments:
        speakers, channels: see `Voices`.
        tts: the aligner, of mels as they are.
        denoiser: of what mels are beyond the mean of their texts.
    """

    def __init__(self, speakers: int, channels: int, *, tts: GlowTTS, denoiser: Denoiser):
        super().__init__(speakers, channels, tts=tts, denoiser=denoiser)

    @property
    def schedule(self):
        """The noise schedule."""
        return self.denoiser.schedule

    def beside(self, mean: Tensor, voice: Tensor | None) -> Tensor:
        """What the denoiser sees beside the noise, (B, E, T): the mean of every frame, and the speaker's vector."""
        if voice is None:
            return mean
        return torch.cat([mean, voice[:, :, None].expand(-1, -1, mean.shape[2])], dim=1)


class MelDiffusion(DiffusionTraining, DiffusionBound, DiffusionCourse, AlignedModel):
    """A model of u = y - m, what a whitened mel is beyond the mean m of its text, by a denoiser at every noise level.

    A subclass builds its denoiser in `__init__` (`assemble`) and names its `usual_sampler`.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        noise: width of the noise in log-mel units.
        num_steps: T of the discrete-time terms.
        variance: of the reverse kernel.
    """

    #: What draws samples where nobody says.
    usual_sampler: str

    def __init__(self, spec: DataSpec, *, noise: float, num_steps: int, variance: str):
        super().__init__(spec, noise=noise)
        if num_steps < 2:
            raise InputError(f"num_steps must be at least 2, got {num_steps}")
        self.num_steps, self.variance, self.decoder = num_steps, variance, Gaussian()

    def make_unet(self, options: UNet | dict | None, speaker_channels: int, further: int = 0) -> Accompanied:
        """The U-Net of these options, which sees the mean of every frame, the speaker, and `further` channels."""
        n_mels = self.spec.event_shape[0]
        beside = n_mels + (speaker_channels if self.spec.speakers else 0) + further
        return Accompanied(construct(UNet, self.spec.event_shape, None, self.variance == "learned", beside,
                                     **(options or {})))

    def assemble(
        self, encoder: TextEncoder | dict | None, denoiser: Denoiser, duration_channels: int, speaker_channels: int
    ) -> None:
        """The core: encoder, aligner and durations around a denoiser.

        Raises:
            InputError: for an encoder that learns deviations, which nothing here reads.
        """
        reader = self.make_encoder(encoder, speaker_channels)
        if reader.learn_sigma:
            raise InputError(f"encoder.learn_sigma is for model=glow_tts: a {self.family} has noise of deviation one")
        # The aligner of Glow-TTS with nothing for a flow: it scores mels as they are.
        nothing = Compose([], (self.spec.event_shape[0], None))
        aligner = GlowTTS(reader, nothing, self.make_durations(reader, duration_channels))
        self.core = Diffused(len(self.spec.speakers), speaker_channels, tts=aligner, denoiser=denoiser)

    # ---- the contract -------------------------------------------------------------------------------------------

    def _around(self, core: Diffused, u: Tensor, batch: Batch) -> tuple[Aligned, Tensor, Tensor]:
        """The alignment of whitened mels, what they are beyond its mean, and what the denoiser sees beside that."""
        aligned = self.align(core, u, batch)
        with torch.autocast(u.device.type, enabled=False):
            mean = aligned.mu @ aligned.path.to(aligned.mu.dtype)
        return aligned, hide(u - mean, batch.mask), core.beside(mean, core.voice(batch.cond))

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The diffusion's objective (bounds in nats per cell), the encoder's likelihood per cell, and the durations."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        aligned, x0, beside = self._around(self.core, u, batch)
        encoder, duration = self.core.tts.loss(aligned, batch.mask, batch.cond.mask)
        encoder = encoder - volume / self.dims_of(batch)
        noise = FrameKeyedGenerator(generator.seed, generator.index, f"{generator.stream}/diffusion", generator.step)
        out = self.measure(self.core.denoiser, x0, beside, noise, batch.mask)
        diffusion = out.per_example / self.dims_of(batch) if self.objective.in_nats else out.per_example
        total = diffusion + encoder + duration
        parts = {"encoder_nll_per_dim": encoder.detach(), "duration": duration.detach()}
        return Loss(total.mean(), total, parts | {name: part.detach() for name, part in out.parts.items()}, out.times)

    def log_likelihood(
        self,
        batch: Batch,
        *,
        weights: str | float = "ema",
        seed: int = 0,
        alignment: Literal["marginal", "best"] = "marginal",
        bound: Literal["discrete", "continuous"] = "continuous",
        draws: int | None = None,
        replicates: int = 2,
        rows: int = 32,
    ) -> Likelihood:
        """The lower bound on log p(mel | text) of mels with uniform noise, estimated at `draws` noise levels.

        Arguments:
            batch: items in the data's own units.
            weights: `ema`, `raw`, or one of the decays kept.
            seed: seed of the noise, which is keyed by (seed, item, term, frame).
            alignment: `marginal`, a bound on the sum over all alignments through the best one and its prior; or `best`:
                a bound on the density given the alignment that suits the mel best, which has seen it.
            bound, draws, replicates: see `DDPM.log_likelihood`. The schedule of mels spends a third of its log-SNRs on
                its first hundredth, where strata in time are noisy: the bound of `continuous` time has none.
            rows: most mels in one call of the network.
        """
        one_of("alignment", alignment, ("marginal", "best"))
        batch, noise = self.keyed(batch, seed)
        with torch.no_grad():
            core = self.weights(weights)
            u, volume = self.units(batch, noise)
            _, x0, beside = self._around(core, u, batch)
        out, profile, made = self.bounded(
            core.denoiser, x0, beside, batch.mask, FrameKeyedGenerator(seed, noise.index, "elbo"),
            bound=bound, draws=draws, replicates=replicates, rows=rows,
        )
        parts = out.parts | {"scale": -volume.double()}
        if alignment == "marginal":
            parts["alignment"] = log_paths(batch.cond.mask.sum((1, 2)), batch.mask.sum((1, 2))).double()
        given = "text, through its best alignment" if alignment == "marginal" else "text and its best alignment"
        made |= {"alignment": alignment, "noise": self.units.noise, "variance": self.variance, "weights": str(weights),
                 "seed": seed, "given": given}
        return Likelihood(-sum(parts.values()), "lower_bound", self.dims_of(batch), None, out.stderr, made, noise.index,
                          parts=parts, profile=profile)

    def told(self, batch: Batch) -> tuple[Denoiser, Tensor]:
        """The denoiser, and what it is told of a batch: the mean of every frame, and the speakers."""
        batch, noise = self.keyed(batch, 0)
        with torch.no_grad():
            return self.core.denoiser, self._around(self.core, self.units(batch, noise)[0], batch)[2]

    # ---- samples ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _means(
        self, asked: Asked, core: Diffused, noise: KeyedGenerator, temperature: float, speed: float,
        seconds: float | None, durations: list[list[int]] | None,
    ) -> tuple[Latent, Tensor]:
        """The mean of every frame of the texts, and what the denoiser sees beside the noise.

        Raises:
            InputError: for a temperature below 0 or not finite, texts or durations that cannot be spoken.
        """
        frames, given = self.frames_of(seconds, asked, durations)
        said, voice = asked.said, core.voice(asked.said)
        with self.speakable(said, seconds):
            check_temperature(temperature)
            mean = core.tts.latent(said.tokens, said.mask, voice, generator=noise, temperature=0.0,
                                   speed=asked.speed(speed), frames=frames, durations=given)
        return mean, core.beside(mean.z, voice)

    def sample(
        self,
        n: int,
        cond: int | str | None = None,
        temperature: float = 0.667,
        seed: int = 0,
        *,
        start: int = 0,
        text: str | list[str] | None = None,
        speed: float = 1.0,
        seconds: float | None = None,
        durations: list[list[int]] | None = None,
        sampler: Literal[
            "annealed_langevin", "ddpm", "ddim", "euler", "heun", "edm", "dpmpp_2m", "unipc"
        ] | None = None,
        steps: int | None = None,
        spacing: str | None = None,
        eta: float | None = None,
        churn: float | None = None,
        weights: str | float = "ema",
        on_unknown: Literal["error", "drop"] = "error",
    ) -> Samples:
        """Mels number `start` .. `start + n - 1` of a seed, of the texts in turn.

        Arguments:
            n: how many.
            cond: the speaker, by name or number; None for the first.
            temperature: scale of all noise around the text's mean; 1 for the model's own distribution.
            seed: the noise depends on (seed, text, which of that text's samples it is) alone.
            start: number of the first sample.
            text: a text, or several that are taken in turn; None for the examples that the checkpoint carries.
            speed: above 1 is faster.
            seconds: total time, instead of what the durations come to.
            durations: frames of every token, a list for each text, instead of predicted ones.
            sampler: one that runs the diffusion back, or `annealed_langevin`; None for the family's usual one.
            steps: as for `DDPM.sample`; noise levels of annealed Langevin, at least 10, with two steps at each: 50,
                which makes deviations 8 % too large (200: 2 %, 20: 22 %).
            spacing, eta, churn: of the samplers of diffusion, see `DDPM.sample`.
            weights: `ema`, `raw`, or one of the decays kept.
            on_unknown: `drop` characters without a symbol, or stop with an `error`.

        Raises:
            ValueError: for samplers and steps that do not exist.
            InputError: for texts or durations that cannot be spoken.
        """
        sampler = self.usual_sampler if sampler is None else sampler
        one_of("sampler", sampler, (_LANGEVIN, *USUAL))
        asked = self.asked(n, start, text, cond, on_unknown)
        noise, core = FrameKeyedGenerator(seed, asked.rows, "sample"), self.weights(weights)
        if sampler == _LANGEVIN:
            if any(value is not None for value in (spacing, eta, churn)):
                raise ValueError("spacing, eta and churn are options of the other samplers, not of annealed_langevin")
            levels = langevin_levels(core.schedule, steps)
            made = {"sampler": sampler, "steps": len(levels)}
        else:
            times, stepper, made = self.course(sampler, steps, spacing, eta, churn)
        mean, beside = self._means(asked, core, noise, temperature, speed, seconds, durations)
        if sampler == _LANGEVIN:
            u, evaluations = by_langevin(core.denoiser, levels, mean, beside, noise.child("langevin"), temperature)
        else:
            out = run_sampler(core.denoiser, mean.z.shape, times, stepper, noise.child("diffusion"), cond=beside,
                              mask=mean.mask, temperature=temperature, dtype=mean.z.dtype, device=self.device)
            u, evaluations = out.x, out.evaluations
        made |= {"evaluations": evaluations, "seed": seed, "weights": str(weights), "temperature": temperature,
                 "speed": speed} | ({} if seconds is None else {"seconds": seconds})
        longest = int(mean.durations.sum(1).max())
        valid = path_of(mean.durations, longest).any(1, keepdim=True)
        return self.as_samples(hide((mean.z + u)[:, :, :longest], valid), valid, mean.durations, asked, made)
