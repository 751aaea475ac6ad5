"""Text to mel by diffusion around the mean that the text gives (Popov et al. 2021, Grad-TTS), judged by its bound."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.data.spec import Batch, DataSpec
from genmodels.diffusion import PARAMETERISATIONS, Denoiser
from genmodels.diffusion import sample as run_sampler
from genmodels.diffusion.decoder import Gaussian
from genmodels.diffusion.masks import hide
from genmodels.errors import InputError
from genmodels.evaluation.likelihood import Likelihood
from genmodels.flows.boundary import one_of
from genmodels.flows.composition import Compose
from genmodels.models.base import Loss, Samples
from genmodels.models.build import construct
from genmodels.models.diffusion_bound import DiffusionBound
from genmodels.models.diffusion_course import DiffusionCourse, SamplerName
from genmodels.models.diffusion_training import DiffusionTraining, ScheduleName
from genmodels.models.mels import even_lengths
from genmodels.models.optimizer import Optimizer
from genmodels.models.text_model import AlignedModel, Voices
from genmodels.nn import UNet
from genmodels.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.speech.alignment import log_paths
from genmodels.speech.durations import path_of
from genmodels.speech.glow_tts import Aligned, GlowTTS
from genmodels.speech.text_encoder import TextEncoder


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


class MelDDPM(DiffusionTraining, DiffusionBound, DiffusionCourse, AlignedModel):
    """Text to mel by a diffusion model of what a mel is beyond the mean that its text gives.

        P_ij = log N(y_j; mu_i, I),  y the whitened noisy mel;    A* = the best monotonic alignment,  m_j = mu_A*(j)
        u = y - m,   u_t = alpha_t u + sigma_t eps,    at t = 1 the mel is N(m, temperature^2 I)
        loss = objective(u | m) - sum P A* / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    The shift by m has no volume, so a bound on log p(u | m) is one on log p(y | text, A*), and with the prior of that
    one alignment, 1 / C(T-1, N-1), one on the sum over all of them: the quantity that `model=glow_tts` states. The
    value without the prior is told apart, since A* has seen the mel.

    Arguments:
        spec: the data set this model is built for, mels with texts.
        encoder: options of the text encoder, the one that all models of texts have.
        schedule, zero_terminal_snr, parameterisation, objective, weighting, num_steps, time_sampler, variance,
            self_conditioning: see `DDPM`.
        net: options of the U-Net.
        duration_channels: width of the duration predictor.
        speaker_channels: length of the speakers' vectors, where there are several.
        noise: width of the noise in log-mel units.
        optimizer: options of the optimiser.
        ema_decay: decay of the averaged weights, or several, 0 for none.

    Raises:
        InputError: for data without texts or without mels, and options that do not go together.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> small = {"channels": 8, "depth": 1, "hidden": 8}
        >>> model = MelDDPM(spec, encoder=small, net={"channels": 8, "multipliers": [1, 2]}).eval()
        >>> model.sample(1, text="a cab", durations=[[2] * 5], steps=3).x.shape
        torch.Size([1, 4, 10])
    """

    family = "mel_ddpm"

    def __init__(
        self,
        spec: DataSpec,
        *,
        encoder: TextEncoder | dict | None = None,
        schedule: ScheduleName = "grad_tts",
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: Literal["simple", "vlb", "hybrid", "continuous"] = "simple",
        weighting: Literal["none", "min_snr", "p2", "edm", "sigmoid"] = "none",
        num_steps: int = 1000,
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] = "beta_tilde",
        self_conditioning: bool = False,
        net: UNet | dict | None = None,
        duration_channels: int = 256,
        speaker_channels: int = 64,
        noise: float = 0.05,
        optimizer: Optimizer | dict | None = None,
        ema_decay: float | list[float] = 0.999,
    ):
        super().__init__(spec, noise=noise)
        self.save_hyperparameters(ignore=["spec"], logger=False)
        if num_steps < 2:
            raise InputError(f"num_steps must be at least 2, got {num_steps}")
        self.num_steps, self.variance, self.decoder = num_steps, variance, Gaussian()
        reader = self.make_encoder(encoder, speaker_channels)
        if reader.learn_sigma:
            raise InputError("encoder.learn_sigma is for model=glow_tts: the noise of a mel_ddpm has deviation one")
        n_mels, speakers = spec.event_shape[0], len(spec.speakers)
        beside = n_mels + (speaker_channels if speakers else 0) + (n_mels if self_conditioning else 0)
        unet = construct(UNet, spec.event_shape, None, variance == "learned", beside, **(net or {}))
        denoiser = Denoiser(
            Accompanied(unet), self.make_schedule(schedule, zero_terminal_snr), PARAMETERISATIONS[parameterisation](),
            learned_variance=variance == "learned", self_conditioning=self_conditioning,
        )
        # The aligner of Glow-TTS with nothing for a flow: it scores mels as they are.
        aligner = GlowTTS(reader, Compose([], (n_mels, None)), self.make_durations(reader, duration_channels))
        self.core = Diffused(speakers, speaker_channels, tts=aligner, denoiser=denoiser)
        self.train_by(denoiser, objective, weighting, time_sampler)
        self.finish_setup(optimizer, ema_decay)

    def compiled_parts(self) -> list[nn.Module]:
        """What torch.compile is applied to: the U-Net."""
        return [self.core.denoiser.net.unet]

    # ---- the contract -------------------------------------------------------------------------------------------

    def _around(self, core: Diffused, u: Tensor, batch: Batch) -> tuple[Aligned, Tensor, Tensor]:
        """The alignment of whitened mels, what they are beyond its mean, and what the denoiser sees beside that."""
        aligned = self.align(core, u, batch)
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
        sampler: SamplerName = "dpmpp_2m",
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
            sampler, steps, spacing, eta, churn: see `DDPM.sample`.
            weights: `ema`, `raw`, or one of the decays kept.
            on_unknown: `drop` characters without a symbol, or stop with an `error`.

        Raises:
            ValueError: for samplers and steps that do not exist.
            InputError: for texts or durations that cannot be spoken.
        """
        asked = self.asked(n, start, text, cond, on_unknown)
        times, stepper, made = self.course(sampler, steps, spacing, eta, churn)
        noise, said, core = FrameKeyedGenerator(seed, asked.rows, "sample"), asked.said, self.weights(weights)
        frames, given = self.frames_of(seconds, asked, durations)
        voice = core.voice(said)
        with self.speakable(said, seconds):
            if temperature < 0:
                raise ValueError(f"temperature must not be negative, got {temperature}")
            mean = core.tts.latent(said.tokens, said.mask, voice, generator=noise, temperature=0.0,
                                   speed=asked.speed(speed), frames=frames, durations=given)
        out = run_sampler(
            core.denoiser, mean.z.shape, times, stepper, noise.child("diffusion"), cond=core.beside(mean.z, voice),
            mask=mean.mask, temperature=temperature, dtype=mean.z.dtype, device=self.device,
        )
        longest = int(mean.durations.sum(1).max())
        valid = path_of(mean.durations, longest).any(1, keepdim=True)
        made |= {"evaluations": out.evaluations, "seed": seed, "weights": str(weights), "temperature": temperature,
                 "speed": speed} | ({} if seconds is None else {"seconds": seconds})
        y = hide((mean.z + out.x)[:, :, :longest], valid)
        return self.as_samples(y, valid, mean.durations, asked, made)
