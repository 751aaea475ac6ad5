"""Diffusion of mels around the mean of their texts: what text-to-mel models of this kind have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError, an, at_least, one_of
from genmodels.core.likelihood import Likelihood
from genmodels.core.processes import rank_world
from genmodels.core.random import FrameKeyedGenerator, KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.core.tensors import hide
from genmodels.diffusion import SAMPLERS, Denoiser, DiffusionSampler, Elbo, NoiseSchedule, Objective, OdeLikelihood
from genmodels.diffusion.decoder import Gaussian
from genmodels.diffusion.ode import OdeDensity
from genmodels.energy import annealed_langevin
from genmodels.flows.composition import Compose
from genmodels.models.base import Loss
from genmodels.models.build import make_network
from genmodels.models.mels import alone, even_lengths
from genmodels.models.score import VarianceExplodingScore
from genmodels.models.text_model import AlignedModel, SpeakerEmbeddings
from genmodels.nn import DiT, UNet
from genmodels.speech.alignment import log_paths, path_of
from genmodels.speech.glow_tts import Aligned, GlowTTS

FINEST = 10.0  # largest log-SNR of a level: noise of 1/150 of the standard deviation of the data
_NOISIEST = -12.0  # smallest log-SNR of a level: noise of 400 times the standard deviation of the data
_LEVELS = 50  # default number of levels
_FEWEST = 10  # least number of levels; with fewer, noise of one level is left in the next
_EACH = 2  # Langevin steps at each level
_STEP = 1.0  # step size over the squared noise level; the usual 0.1 needs ten times as many levels


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


_LANGEVIN = "annealed_langevin"


class FrameConditionedUNet(nn.Module):
    """A U-Net over frames with further input channels: the condition of each frame.

    Sequences that are too short for its levels are padded, and the padding is masked.

    Arguments:
        unet: a U-Net with E `extra_channels`; or a `DiT`, which takes sequences of any length.

    Shapes: `x (B, C, T)`, `log_snr (B,)`, `cond (B, E, T)`, `mask (B, 1, T)`, `scale (B,)` as of a U-Net; the result is
        `(B, C, T)`, or `(B, 2 C, T)` for a U-Net with `double_output`.
    """

    def __init__(self, unet: UNet | DiT):
        super().__init__()
        self.unet, self.takes_scale = unet, getattr(unet, "takes_scale", False)

    def forward(
        self, x: Tensor, log_snr: Tensor, cond: Tensor, mask: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        frames, least = x.shape[2], 2 ** (self.unet.levels - 1) if isinstance(self.unet, UNet) else 1
        x = torch.cat([x, cond.to(x.dtype)], dim=1)
        if frames < least:
            mask = x.new_ones(len(x), 1, frames).bool() if mask is None else mask
            x, mask = pad(x, (0, least - frames)), pad(mask, (0, least - frames))
        return self.unet(x, log_snr, None, mask, *(() if scale is None else (scale,)))[:, :, :frames]


class AlignedDenoiser(SpeakerEmbeddings):
    """The aligner with its text encoder, the denoiser, and the speaker embeddings.

    Arguments:
        speakers, channels: see `SpeakerEmbeddings`.
        tts: the aligner of whitened mels, a `GlowTTS`.
        denoiser: the `Denoiser` of mels minus the mean of their texts.
    """

    @property
    def schedule(self):
        """The noise schedule."""
        return self.denoiser.schedule

    def condition(self, mean: Tensor, voice: Tensor | None) -> Tensor:
        """The condition of the denoiser, (B, E, T): the mean of every frame, and the speaker's vector."""
        if voice is None:
            return mean
        return torch.cat([mean, voice[:, :, None].expand(-1, -1, mean.shape[2])], dim=1)


class MelDiffusion(AlignedModel):
    """A model of u = y - m, a whitened mel minus the mean m of its text, by a denoiser at every noise level.

    A subclass builds its denoiser around `self.make_unet()`, ends with `self.assemble_around(...)`, and names its
    `default_sampler`.

    Arguments:
        num_steps: T, the number of steps of the ELBO, and the most that a sampler of diffusion takes.
        net: options of the U-Net, or of the class that `_target_` names (`model.net=dit`).
        spec, **shared: see `AlignedModel`.

    Raises:
        InputError: for data without texts or without mels, and options that do not go together.
    """

    #: The default sampler, and its steps and spacing where these are not the sampler's defaults.
    default_sampler: str
    default_steps: dict = {}
    samplers = (_LANGEVIN, *SAMPLERS)
    has_ode_likelihood = True
    default_temperature = 0.667
    sampling_options = (
        "text", "speed", "seconds", "durations", "on_unknown", "sampler", "steps", "spacing", "eta", "churn",
        "diffusion", "known", "keep", "rounds", "edit", "strength",
    )  # fmt: skip

    def __init__(self, spec: DataSpec, *, num_steps: int = 1000, net: UNet | DiT | dict | None = None, **shared):
        super().__init__(spec, **shared)
        at_least(2, num_steps=num_steps)
        self.num_steps, self.decoder = num_steps, Gaussian()
        self.set_variance("beta")

    def set_variance(self, variance: str) -> None:
        """Choose the variance of the reverse steps, `beta` by default, before the network is made."""
        self.variance = variance
        self.elbo = Elbo(self.decoder, self.num_steps, variance)
        self.sampler = DiffusionSampler(self.num_steps, variance)

    def make_unet(self, further: int = 0) -> FrameConditionedUNet:
        """The network of the option `net`, which sees the mean of every frame, the speaker, and `further` channels."""
        extra = self.spec.event_shape[0] + (self.speaker_channels if self.spec.speakers else 0) + further
        learned = self.variance == "learned"
        return FrameConditionedUNet(make_network(self.hparams["net"], self.spec.event_shape, None, learned, extra))

    def assemble_around(self, denoiser: Denoiser, objective: Objective) -> None:
        """Add encoder, aligner and durations to a denoiser, with its objective; called last in a subclass' constructor.

        Raises:
            InputError: for an encoder that learns standard deviations, which are not used here.
        """
        encoder = self.make_encoder()
        if encoder.learn_sigma:
            raise InputError(f"encoder.learn_sigma is for model=glow_tts: {an(self.family)} has noise of "
                             "standard deviation one")
        # The aligner of Glow-TTS with the identity as its flow: it scores the whitened mels.
        identity = Compose([], (self.spec.event_shape[0], None))
        aligner = GlowTTS(encoder, identity, self.make_durations(encoder))
        core = AlignedDenoiser(len(self.spec.speakers), self.speaker_channels, tts=aligner, denoiser=denoiser)
        self.objective = objective
        if isinstance(objective.time_sampler, nn.Module):
            self.time_sampler = objective.time_sampler  # registered, so that checkpoints hold its history
        self.assemble(core)

    def fewest_steps(self, sampler: str | None = None) -> int:
        """The least number of steps of a sampler, None for the default one."""
        return _FEWEST if (sampler or self.default_sampler) == _LANGEVIN else 1

    def compiled_parts(self) -> list[nn.Module]:
        """The modules for torch.compile: the network."""
        return [self.core.denoiser.net.unet]

    # ---- the contract -------------------------------------------------------------------------------------------

    def _around_mean(self, core: AlignedDenoiser, u: Tensor, batch: Batch) -> tuple[Aligned, Tensor, Tensor]:
        """The alignment of whitened mels, u around its mean, and the denoiser's condition."""
        aligned = self.align(core, u, batch)
        with torch.autocast(u.device.type, enabled=False):
            mean = aligned.mu @ aligned.path.to(aligned.mu.dtype)
        return aligned, hide(u - mean, batch.mask), core.condition(mean, core.voice(batch.cond))

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """The diffusion's objective (bounds in nats per cell), the encoder's likelihood per cell, and the durations."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        aligned, x0, cond = self._around_mean(self.core, u, batch)
        encoder, duration = self.core.tts.loss(aligned, batch.mask, batch.cond.mask)
        encoder = encoder - volume / self.dims_of(batch)
        noise = FrameKeyedGenerator(generator.seed, generator.index, f"{generator.stream}/diffusion", generator.step)
        out = self.objective(self.core.denoiser, x0, cond, noise, *rank_world(), batch.mask)
        self.objective.observe(out)
        diffusion = out.per_example / self.dims_of(batch) if self.objective.in_nats else out.per_example
        total = diffusion + encoder + duration
        parts = {"encoder_nll_per_dim": encoder.detach(), "duration": duration.detach()}
        return Loss(total.mean(), total, parts | {name: part.detach() for name, part in out.parts.items()}, out.times)

    def on_before_optimizer_step(self, optimizer) -> None:
        """As for every model, which stops at a non-finite loss; then a loss-aware time sampler learns from it."""
        super().on_before_optimizer_step(optimizer)
        self.objective.learn(self.all_gather)

    def log_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0,
        alignment: Literal["marginal", "best"] = "marginal", bound: Literal["discrete", "continuous"] = "continuous",
        draws: int | None = None, replicates: int = 2, rows: int = 32,
    ) -> Likelihood:
        """The lower bound on log p(mel | text) of mels with uniform noise, estimated at `draws` noise levels.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            alignment: `marginal`, a bound on the sum over all alignments through the best one and its prior; or `best`:
                a bound on the density given the best alignment, which depends on the mel.
            bound, draws, replicates: see `DDPM.log_likelihood`. The schedule of mels passes a third of its log-SNRs in
                the first hundredth of the time, where strata in time are noisy; the `continuous` bound has none.
            rows: most mels in one call of the network.
        """
        one_of("alignment", alignment, ("marginal", "best"))
        batch, noise = self.keyed(batch, seed)
        with torch.no_grad():
            core = self.weights(weights)
            u, volume = self.units(batch, noise)
            _, x0, cond = self._around_mean(core, u, batch)
        out, profile, made = self.elbo(
            core.denoiser, x0, self.elbo.times(self.core.schedule), FrameKeyedGenerator(seed, noise.index, "elbo"),
            cond=cond, mask=batch.mask, bound=bound, draws=draws, replicates=replicates, rows=rows,
        )
        parts = out.parts | {"scale": -volume.double()} | self._prior(alignment, batch)
        made |= {"variance": self.variance} | self._made(alignment, weights, seed)
        return Likelihood(-sum(parts.values()), "lower_bound", self.dims_of(batch), None, out.stderr, made, noise.index,
                          parts=parts, profile=profile)

    def ode_likelihood(
        self, batch: Batch, *, weights: str | float = "ema", seed: int = 0,
        alignment: Literal["marginal", "best"] = "marginal", **options,
    ) -> Likelihood:
        """The log-likelihood of noisy mels by the probability-flow ODE around the mean of their best alignment.

        Each mel is solved alone at its own length, so that neither padding nor batch changes its steps.

        Arguments:
            batch, weights, seed: see `GenerativeModel.log_likelihood`.
            alignment: as for `log_likelihood`.
            options: see `OdeLikelihood`.
        """
        one_of("alignment", alignment, ("marginal", "best"))
        ode, core = OdeLikelihood(**options), self.weights(weights)
        if not OdeDensity(divergence=ode.divergence).exact(self.spec.dims):
            ode = replace(ode, divergence="hutchinson")  # for short mels too
        first = self.elbo.first_log_snr(self.core.schedule)
        batch, noise = self.keyed(batch, seed)
        found = []

        def start_of(x0: Tensor, volume: Tensor):
            def start(_, cond: Tensor, mask: Tensor, keyed: KeyedGenerator) -> tuple[Tensor, Tensor]:
                z, change = ode.start(core.denoiser, x0, first, keyed, self.decoder, cond=cond, mask=mask)
                return z, change + volume

            return start

        for k in range(len(batch)):
            one = alone(batch, k)
            with torch.no_grad():
                u, volume = self.units(one, noise.rows(slice(k, k + 1)))
                _, x0, cond = self._around_mean(core, u, one)
            volume = volume.double() - sum(self._prior(alignment, one).values())
            found.append(ode(core.denoiser, self.spec, one, cond, start_of(x0, volume), first, seed=seed))
        result = Likelihood.concatenate(found)
        result.made |= self._made(alignment, weights, seed)
        return result

    def _prior(self, alignment: str, batch: Batch) -> dict[str, Tensor]:
        """-log of the prior of one alignment of each item, as a part of the negative ELBO; empty given the best one."""
        if alignment == "best":
            return {}
        return {"alignment": log_paths(batch.cond.mask.sum((1, 2)), batch.mask.sum((1, 2))).double()}

    def _made(self, alignment: str, weights: str | float, seed: int) -> dict:
        given = "text, through its best alignment" if alignment == "marginal" else "text and its best alignment"
        return {"alignment": alignment, "noise": self.units.noise, "weights": str(weights), "seed": seed,
                "given": given}

    def denoiser_and_cond(self, batch: Batch) -> tuple[Denoiser, Tensor]:
        """The denoiser, and its condition for a batch: the mean of every frame, and the speaker."""
        batch, noise = self.keyed(batch, 0)
        with torch.no_grad():
            return self.core.denoiser, self._around_mean(self.core, self.units(batch, noise)[0], batch)[2]

    # ---- samples ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, options: SamplingOptions) -> Samples:
        """Mels of the texts in turn, by a sampler of diffusion or by annealed Langevin dynamics.

        The noise depends only on (seed, text, number of the text's sample). `temperature` scales all noise around the
        mean of the text. `steps` of annealed Langevin are noise levels, at least 10, with two steps at each; 50, the
        default, makes standard deviations 8 % too large (200: 2 %, 20: 22 %).
        With `known` the frames of `keep` are given, and the others drawn; with `edit` sampling starts from a mel with
        noise. Either has the total length of `durations`.
        """
        options = self._with_sampler(options)
        request = self.asked(options)
        noise, core = FrameKeyedGenerator(options.seed, request.rows, "sample"), self.weights(options.weights)
        frames, given = self.frames_of(options.seconds, request, options.durations)
        condition, voice = request.condition, core.voice(request.condition)
        with self.explained(condition, options.seconds):
            mean = core.tts.latent(condition.tokens, condition.mask, voice, generator=noise, temperature=0.0,
                                   speed=request.speed(options.speed), frames=frames, durations=given)
        cond = core.condition(mean.z, voice)
        longest = int(mean.durations.sum(1).max())
        options, known, edit = self._from_mel(options, mean.z, longest)
        if options.sampler == _LANGEVIN:  # from N(0, temperature^2 I)
            levels = langevin_levels(core.schedule, options.steps)
            score = VarianceExplodingScore(core.denoiser, mean.mask)
            u = annealed_langevin(
                score, mean.z.shape, levels, noise.child("langevin"), cond=cond,
                steps_per_level=_EACH, step=_STEP * levels[-1] ** 2,
                temperature=options.temperature, dtype=mean.z.dtype, device=self.device)
            made = {"sampler": options.sampler, "steps": len(levels),
                    "evaluations": len(levels) * _EACH + 1}
        else:
            plan = self.sampler.plan(self.core.schedule, options)
            out = self.sampler(plan, core.denoiser, mean.z.shape, options, noise.child("diffusion"), cond=cond,
                               mask=mean.mask, known=known, edit=edit, dtype=mean.z.dtype, device=self.device)
            u, made = out.x, plan.made | {"evaluations": out.evaluations}
        made |= {"seed": options.seed, "weights": str(options.weights),
                 "temperature": options.temperature, "speed": options.speed}
        made |= {} if options.seconds is None else {"seconds": options.seconds}
        valid = path_of(mean.durations, longest).any(1, keepdim=True)
        samples = self.as_samples(hide((mean.z + u)[:, :, :longest], valid), valid, mean.durations, request, made)
        if known is not None:
            keep = options.keep[..., :longest].to(self.device)
            samples.x = torch.where(keep, options.known[..., :longest].to(samples.x), samples.x)
            samples.made["kept"] = int(keep.sum())
        return samples

    def _with_sampler(self, options: SamplingOptions) -> SamplingOptions:
        """The options with the default sampler; to complete a mel it is `ddpm`, for which inpainting is defined."""
        if options.sampler is None and options.known is not None:
            return replace(options, sampler="ddpm")
        if options.sampler is None and options.edit is not None and self.default_sampler == _LANGEVIN:
            return replace(options, sampler="dpmpp_2m")
        if options.sampler is None:
            options = options.with_default(sampler=self.default_sampler, **self.default_steps)
        one_of("sampler", options.sampler, self.samplers)
        if options.sampler == _LANGEVIN and (options.known is not None or options.edit is not None):
            raise InputError("known and edit go with the samplers of diffusion, not with annealed_langevin")
        for name in ("spacing", "eta", "churn", "diffusion"):
            if options.sampler == _LANGEVIN and getattr(options, name) is not None:
                raise InputError(f"{name} is an option of the other samplers, "
                                 "not of annealed_langevin")
        return options

    def _from_mel(
        self, options: SamplingOptions, mean: Tensor, length: int
    ) -> tuple[SamplingOptions, Tensor | None, Tensor | None]:
        """The options with a mask of T frames, then `known` and `edit` as u around the means (n, n_mels, T)."""
        given = {"known": options.known, "edit": options.edit}
        for name, mel in given.items():
            if mel is None:
                continue
            wanted = (self.spec.event_shape[0], length)
            if tuple(mel.shape) != wanted:
                raise InputError(f"{name} is a mel {tuple(mel.shape)}, and the durations of this text come to "
                                 f"{wanted}: give those of the mel")
            u = (mel.to(mean) - self.units.location) / self.units.scale
            given[name] = pad(u, (0, mean.shape[2] - length)) - mean
        if options.keep is not None:
            options = replace(options, keep=pad(options.keep, (0, mean.shape[2] - length)))
        return options, given["known"], given["edit"]
