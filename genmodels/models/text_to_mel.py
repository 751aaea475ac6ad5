"""Text to mel: diffusion around the mean of the text, flow matching, an energy-based model; frame by frame."""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from genmodels.core.data import Batch, DataSpec, TextCondition
from genmodels.core.errors import InputError, an, as_input_errors
from genmodels.core.likelihood import Likelihood
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import Samples, SamplingOptions
from genmodels.diffusion import (
    PARAMETERISATIONS,
    Denoiser,
    V,
    alpha_sigma,
    default_ends,
    default_variance,
    make_objective,
    make_schedule,
)
from genmodels.diffusion.flow_matching import FlowMatching, PathName, make_path, velocity_of
from genmodels.diffusion.objectives import ObjectiveName
from genmodels.diffusion.schedule_discrete import ScheduleName
from genmodels.diffusion.weighting import TimeSamplerName, WeightingName
from genmodels.energy import Potential
from genmodels.models.base import Loss
from genmodels.models.build import construct
from genmodels.models.mel_diffusion import FINEST, MelDiffusion
from genmodels.models.mels import even_lengths
from genmodels.models.text_model import SpeakerEmbeddings, TextModel
from genmodels.nn import UNet
from genmodels.speech.measures import read_faults, words_of_tokens
from genmodels.speech.tacotron import AttentionKind, Decoded, Synthesised
from genmodels.speech.tacotron import Tacotron as Decoder
from genmodels.speech.text import Symbols

_FRAMES_A_SYMBOL, _FRAMES_MORE = 20, 100  # most frames of a text without max_frames: 20 for each symbol, and 100


class MelDDPM(MelDiffusion):
    """Text to mel by a diffusion model of the difference between a mel and the mean of its text.

        P_ij = log N(y_j; mu_i, I),  y the whitened noisy mel;    A* = the best monotonic alignment,  m_j = mu_A*(j)
        u = y - m,   u_t = alpha_t u + sigma_t eps,    at t = 1 the mel is N(m, temperature^2 I)
        loss = objective(u | m) - sum P A* / (80 T) + mean (log d - log d_A*)^2
        log p(x | text) >= ELBO(u | m) - log C(T-1, N-1) - D log s

    The shift by m has no volume, so a bound on log p(u | m) is one on log p(y | text, A*), and with the prior of that
    alignment, 1 / C(T-1, N-1), one on the sum over all alignments: the quantity that `model=glow_tts` states. The value
    without the prior is reported separately, since A* depends on the mel.

    Arguments:
        schedule: the noise schedule.
        zero_terminal_snr: change the schedule so that no signal is left at t = 1.
        parameterisation: what the network predicts, see `DDPM`.
        objective: what is minimised, see `DDPM`.
        weighting: of the noise levels in `simple` and `hybrid`.
        time_sampler: how training draws its times.
        variance: variance of the reverse steps; by default `learned` with `hybrid`, else `beta`.
        self_conditioning: the network also sees its last estimate of the data.
        spec, **shared: see `MelDiffusion`.

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
    default_sampler = "dpmpp_2m"

    def __init__(
        self,
        spec: DataSpec,
        *,
        schedule: ScheduleName = "grad_tts",
        zero_terminal_snr: bool = False,
        parameterisation: Literal["eps", "x0", "v", "edm"] = "v",
        objective: ObjectiveName = "simple",
        weighting: WeightingName = "none",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        variance: Literal["beta", "beta_tilde", "learned"] | None = None,
        self_conditioning: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        self.set_variance(variance or default_variance(objective, None))
        self.decide(variance=self.variance)
        denoiser = Denoiser(
            self.make_unet(spec.event_shape[0] if self_conditioning else 0),
            make_schedule(schedule, self.num_steps, ends=default_ends(schedule, self.decoder.finest_log_snr),
                          zero_terminal_snr=zero_terminal_snr),
            PARAMETERISATIONS[parameterisation](), learned_variance=self.variance == "learned",
            self_conditioning=self_conditioning,
        )
        trained = make_objective(
            objective, denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance=self.variance,
            weighting=weighting, time_sampler=time_sampler,
        )
        self.assemble_around(denoiser, trained)


class MelFlowMatching(MelDiffusion):
    """Text to mel by a flow from noise to the difference between a mel and the mean of its text.

        u = y - m as for `MelDDPM`,    u_t = alpha(t) u + sigma(t) eps,    du_t/dt = v(u_t, t | m)
        loss = E |alpha' u + sigma' eps - v(u_t, t | m)|^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    At t = 1 the mel is N(m, temperature^2 I); the paths are straight, so that a few Euler steps suffice. Matcha-TTS
    learns y itself, given m, from N(0, temperature^2 I), with sigma_min 1e-4. Encoder, aligner, durations, bound and
    samplers are those of `MelDDPM`.

    Arguments:
        path: `linear`, `cosine`, or a noise schedule of `DDPM` by its name after `vp_`.
        sigma_min: noise that `linear` leaves at t = 0.
        time_sampler: how training draws its times.
        spec, **shared: see `MelDiffusion`.

    Source: Mehta et al., "Matcha-TTS: a fast TTS architecture with conditional flow matching", 2024, section 3.

    Example: as for `MelDDPM`.
    """

    family = "mel_flow_matching"
    default_sampler = "euler"
    default_steps = {"steps": 10, "spacing": "uniform_t"}

    def __init__(
        self,
        spec: DataSpec,
        *,
        path: PathName = "linear",
        sigma_min: float = 0.0,
        time_sampler: TimeSamplerName = "antithetic",
        **shared,
    ):
        super().__init__(spec, **shared)
        schedule = make_path(path, self.num_steps, sigma_min=sigma_min)
        denoiser = Denoiser(self.make_unet(), schedule, velocity_of(schedule))
        objective = FlowMatching(time_sampler=time_sampler)
        objective.check(denoiser)
        self.assemble_around(denoiser, objective)


class MelEnergy(MelDiffusion):
    """Text to mel by an energy of the difference between a mel and the mean of its text, at every noise level.

        u = y - m as for `MelDDPM`,   u_t = alpha_t u + sigma_t eps
        E(u_t, t | m) = 1/2 |u_t|^2 + (alpha_t/sigma_t) sum u_t f(u_t, t, m),    f a U-Net
        loss = |eps - sigma_t grad E(u_t, t | m)|^2 / alpha_t^2 - sum P A* / (80 T) + mean (log d - log d_A*)^2

    The first term is denoising score matching at the noise levels of the schedule, the error of v; the
    others are those of all aligned models of texts. The energies of different levels have unrelated constants, so that
    E alone gives no likelihood. Reported is the ELBO of the reverse diffusion with these scores:

        log p(x | text) >= bound(u | m) - log C(T-1, N-1) - D log s

    `model=mel_ddpm` reports the same bound for scores that need not be gradients. Samples are drawn by annealed
    Langevin from N(m, I), or by the samplers of diffusion.

    Arguments:
        schedule: the noise schedule.
        time_sampler: how noise levels are drawn in training.
        net: options of the U-Net; each evaluation also takes its gradient, at two to three times the cost of `MelDDPM`.
        spec, **shared: see `MelDiffusion`.

    Source: Song and Ermon 2019 (annealed Langevin); Salimans and Ho 2021 (energies of this form); Popov et al. 2021
    (the mean and the schedule).

    Example: as for `MelDDPM`.
    """

    family = "mel_energy"
    default_sampler = "annealed_langevin"
    tolerates_tf32 = False  # second derivatives

    def __init__(
        self,
        spec: DataSpec,
        *,
        schedule: Literal[
            "cosine", "linear", "linear_continuous", "grad_tts", "cosine_discrete", "sigmoid", "linear_log_snr"
        ] = "grad_tts",
        time_sampler: Literal["uniform", "stratified", "antithetic", "loss_aware"] = "antithetic",
        net: UNet | dict | None = None,
        **shared,
    ):
        super().__init__(spec, net=net, **shared)
        unet = self.make_unet()
        if not isinstance(unet.unet, UNet):
            raise InputError("model=mel_energy takes a U-Net: its scores are gradients of an energy, and the attention "
                             f"of {an(type(unet.unet).__name__)} can be differentiated once only")
        if unet.unet.checkpointing:
            raise InputError("model.net.checkpointing is not for model=mel_energy, whose scores are gradients already: "
                             "smaller batches (data.batch_size) take less memory")
        denoiser = Denoiser(Potential(unet), make_schedule(schedule, self.num_steps), V())
        trained = make_objective(
            "simple", denoiser, self.decoder, self.elbo.steps(denoiser.schedule), variance="beta",
            time_sampler=time_sampler,
        )
        self.assemble_around(denoiser, trained)

    def compiled_parts(self) -> list[nn.Module]:
        """Nothing: compiled code has no second derivatives."""
        return []

    @torch.no_grad()
    def energies(self, batch: Batch, *, log_snr: float = FINEST, weights: str | float = "ema", seed: int = 0) -> Tensor:
        """(B,) E of noisy mels around the means of their best alignments, scaled by alpha of a noise level.

        The noise is that of the mel, of width `noise`; no noise of the level is added. Only differences between mels of
        the same text, durations and level are meaningful: they are those of -log p.

        Arguments:
            batch: items in the data's own units.
            log_snr: the noise level of the energy.
            weights, seed: see `log_likelihood`.
        """
        batch, noise = self.keyed(batch, seed)
        core = self.weights(weights)
        _, u, cond = self._around_mean(core, self.units(batch, noise)[0], batch)
        level = torch.full((len(batch),), float(log_snr), device=u.device)
        alpha, _ = alpha_sigma(level)
        return core.denoiser.net.energy(alpha[:, None, None] * u, level, cond, batch.mask)


class Tacotron(TextModel):
    """Text to mel frame by frame, by an LSTM with attention to the text: the baseline for parallel models.

        p(x_t | x_<t, text) = prod_c exp(-|u_tc - m_tc| / b_c) / 2 b_c s,    u the whitened noisy mel
        loss = -(1 / 80 T) sum_t log p(x_t | x_<t, text) + cross-entropy of the stop

    The prenet drops half of its units in sampling too, so that the density is a mean over these draws. Reported is
    log p for one draw of each item, by Jensen's inequality a lower bound in expectation. It is the density given the
    number of frames, as for `model=glow_tts`, without the probability of the stop.

    Arguments:
        attention: of the decoder to the text: `location`; `location_previous` without the sum of earlier weights;
            `additive`, `scaled_dot`, `hard` or `local_monotonic`.
        hidden: width of the LSTM cells.
        prenet, dropout: width of the prenet's layers, and the probability of dropping one of their units.
        postnet: channels of the network that refines a finished mel, 0 for none; the likelihood is that of the frames
            before it.
        frames_per_step: how many frames a step of the decoder predicts, the reduction factor.
        checkpointing: recompute the decoder in the backward pass, 64 steps at a time, instead of storing its
            activations.
        spec, **shared: see `TextModel`.

    Raises:
        InputError: for data without texts or without mels, and options that the decoder refuses.

    Example:
        >>> from genmodels.speech.text import CHARACTERS
        >>> text = {"symbols": list(CHARACTERS), "blanks": False, "language": "en", "examples": ["hello"]}
        >>> spec = DataSpec("speech", (4, 40), mel={}, statistics={"mean": -5.0, "std": 2.0}, text=text)
        >>> model = Tacotron(spec, encoder={"channels": 8, "depth": 1, "hidden": 8}, hidden=8, prenet=8)
        >>> model.sample(1, text="a cab", max_frames=6).x.shape[1]
        4
    """

    family = "tacotron"
    default_temperature = 0.0
    sampling_options = ("text", "speed", "seconds", "durations", "on_unknown", "max_frames")

    def __init__(
        self,
        spec: DataSpec,
        *,
        attention: AttentionKind = "location",
        hidden: int = 1024,
        prenet: int = 256,
        dropout: float = 0.5,
        postnet: int = 0,
        frames_per_step: int = 1,
        checkpointing: bool = False,
        **shared,
    ):
        super().__init__(spec, **shared)
        decoder = construct(Decoder, self.make_encoder(), attention=attention, hidden=hidden, prenet=prenet,
                            dropout=dropout, postnet=postnet, frames_per_step=frames_per_step,
                            checkpointing=checkpointing)
        self.assemble(SpeakerEmbeddings(len(spec.speakers), self.speaker_channels, tacotron=decoder))

    def compiled_parts(self) -> list[nn.Module]:
        """The modules for torch.compile: the text encoder; the loop over frames is not compiled."""
        return [self.core.tacotron.encoder]

    # ---- the contract -------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, generator: KeyedGenerator) -> Loss:
        """Nats per cell of the noisy mel by teacher forcing, cross-entropy of the stop, and the error of a post-net."""
        batch = even_lengths(batch)
        u, volume = self.units(batch, generator)
        condition = self.forced(self.core, u, batch, generator)
        nll, stop = self.core.tacotron.loss(u, condition, batch.mask)
        nll = nll - volume / self.dims_of(batch)
        parts = {"nll_per_dim": nll, "stop": stop}
        refined = self.core.tacotron.refinement(u, condition, batch.mask)
        if refined is not None:
            parts["refinement"] = refined
        total = sum(parts.values())
        return Loss(total.mean(), total, {name: part.detach() for name, part in parts.items()})

    def forced(self, core: SpeakerEmbeddings, u: Tensor, batch: Batch, generator: KeyedGenerator) -> Decoded:
        """Teacher forcing: every frame of whitened mels from the true ones before it."""
        condition = batch.cond
        memory = core.tacotron.remember(condition.tokens, condition.mask, core.voice(condition))
        return core.tacotron(u, memory, generator, batch.mask)

    def log_likelihood(self, batch: Batch, *, weights: str | float = "ema", seed: int = 0) -> Likelihood:
        """log p(mel | text, number of frames) of mels with uniform noise, for one draw of the prenet's dropout."""
        batch, generator = self.keyed(batch, seed)
        with torch.no_grad():
            u, volume = self.units(batch, generator)
            core = self.weights(weights)
            condition = self.forced(core, u, batch, generator)
            nats = core.tacotron.log_prob(u, condition, batch.mask) + volume
        made = {"estimate": "teacher forcing", "noise": self.units.noise, "seed": seed, "weights": str(weights),
                "given": "text"}
        return Likelihood(nats, "lower_bound", self.dims_of(batch), None, None, made, generator.index)

    def draw(self, options: SamplingOptions) -> Samples:
        """Mels of the texts in turn, each until the model predicts its stop; the temperature scales the frames' noise.

        A warning names mels that are broken off at `max_frames`, and `made` lists them. `speed`, `seconds` and
        `durations` are refused: an autoregressive model predicts the length.
        """
        refused = [name for name, given in (("speed", options.speed != 1), ("seconds", options.seconds is not None),
                                            ("durations", options.durations is not None)) if given]  # fmt: skip
        if refused:
            raise InputError(f"{refused[0]}: a tacotron stops by itself; with {refused[0]} take model=glow_tts")
        request = self.asked(options)
        if request.stretch is not None:
            raise InputError("[slow]: a tacotron chooses every duration by itself; model=glow_tts follows the mark")
        noise, condition = KeyedGenerator(options.seed, request.rows, "sample"), request.condition
        most = options.max_frames
        if most is None:
            most = _FRAMES_A_SYMBOL * (condition.tokens > 1).sum(1) + _FRAMES_MORE
        core = self.weights(options.weights)
        with as_input_errors():
            drawn = core.tacotron.sample(condition.tokens, condition.mask, core.voice(condition), generator=noise,
                                         temperature=options.temperature, max_frames=most)
        broken_off = request.index[~drawn.stopped].tolist()
        if broken_off:
            logging.getLogger(__name__).warning(
                "%d of %d mels did not stop and were cut at max_frames (samples %s)", len(broken_off), options.n,
                ", ".join(map(str, broken_off[:8])))
        # The token with the largest attention weight, of any sign, of each frame; tokens may be skipped or repeated.
        looked = one_hot(drawn.weights.abs().argmax(1), condition.tokens.shape[1]) * drawn.mask.mT
        made = {"sampler": "autoregressive", "seed": options.seed, "weights": str(options.weights),
                "temperature": options.temperature, "not_stopped": broken_off,
                "words_missing_repeated": self._read(condition, drawn)}
        return self.as_samples(drawn.mel, drawn.mask, looked.sum(1), request, made)

    def _read(self, condition: TextCondition, drawn: Synthesised) -> list[list[int]]:
        """The numbers of words of each text that the attention skipped, and that it repeated."""
        symbols = Symbols(tuple(self.spec.text["symbols"]), self.spec.text["blanks"])
        found = []
        rows = zip(condition.tokens, condition.mask[:, 0], drawn.weights, drawn.mask, strict=True)
        for tokens, valid, weights, frames in rows:
            own = tokens[valid].tolist()
            looked = weights[: len(own), : int(frames.sum()) : self.core.tacotron.frames_per_step]  # of each step
            found.append(list(read_faults(looked, words_of_tokens(own, symbols))))
        return found

    # ---- pictures while training --------------------------------------------------------------------------------

    @torch.no_grad()
    def seen_alignment(self, batch: Batch) -> Tensor:
        """The magnitudes of the attention weights by teacher forcing."""
        batch, generator = self.keyed(batch, 0)
        u, _ = self.units(batch, generator)
        return self.forced(self.weights(), u, batch, generator).weights.abs()
