"""What every diffusion model does with a trained denoiser: draw samples, freely or from something known."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from genmodels.core.data import Batch, Latents
from genmodels.core.errors import check_temperature, one_of
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import (
    SAMPLERS,
    SPACINGS,
    GuidedDenoiser,
    HeunSampler,
    Inpainting,
    ThresholdedDenoiser,
    invert,
    noised_start,
    times_from,
)
from genmodels.diffusion import (
    sample as run_sampler,
)
from genmodels.models.base import Samples
from genmodels.models.mels import frames_of, silent_beyond
from genmodels.models.trajectory import Path

SamplerName = Literal["ddpm", "ddim", "euler", "heun", "edm", "dpmpp_2m", "unipc"]


@dataclass(frozen=True)
class Usual:
    """What a sampler does when nothing is said: its steps (None for T), their spacing; and the option it alone has."""

    steps: int | None
    spacing: str
    option: str | None = None


USUAL: dict[str, Usual] = {
    "ddpm": Usual(None, "integer_trailing"),
    "ddim": Usual(50, "integer_trailing", "eta"),
    "euler": Usual(50, "uniform_log_snr"),
    "heun": Usual(18, "karras"),
    "edm": Usual(40, "karras", "churn"),
    "dpmpp_2m": Usual(20, "uniform_log_snr"),
    "unipc": Usual(20, "uniform_log_snr"),
}
_INPAINTING_STEPS = 50


class DiffusionCourse:
    """The way from noise to data, mixed into a model with `core.schedule`, `num_steps` and `variance`."""

    def course(
        self, name: str, steps: int | None = None, spacing: str | None = None, eta: float | None = None,
        churn: float | None = None, inpaints: bool = False,
    ) -> tuple[Tensor, object, dict]:
        """The decreasing times of a sampler, the sampler, and what to note of both.

        Arguments:
            name: an entry of SAMPLERS.
            steps, spacing, eta, churn: as `sample` takes them; None for what the sampler usually does.
            inpaints: whether a part of the event is kept, which takes each step several times.

        Raises:
            ValueError: for a name that does not exist, and options that are not the sampler's.
        """
        one_of("sampler", name, USUAL)
        usual = USUAL[name]
        if steps is None:
            steps = min(self.num_steps, _INPAINTING_STEPS if inpaints else usual.steps or self.num_steps)
        if not 1 <= steps <= self.num_steps:
            raise ValueError(f"steps must lie in 1..{self.num_steps} (T of this model), got {steps}")
        for option, value in (("eta", eta), ("churn", churn)):
            if value is not None and usual.option != option:
                owner = next(key for key, other in USUAL.items() if other.option == option)
                raise ValueError(f"{option} is an option of sampler={owner}, not of {name}: leave it out")
        options = {
            "ddpm": {"variance": self.variance},
            "ddim": {"eta": 0.0 if eta is None else eta},
            "edm": {"steps": steps, "churn": 10.0 if churn is None else churn},
        }.get(name, {})
        made = {"sampler": name, "steps": steps, "spacing": spacing or usual.spacing}
        made |= {key: options[key] for key in ("eta", "churn") if key in options}
        return self.sampling_times(name, steps, spacing).to(self.device), SAMPLERS[name](**options), made

    def sampling_times(self, sampler: str, steps: int, spacing: str | None = None) -> Tensor:
        """The decreasing times of a sampler, (steps + 1,), ending at the clean end."""
        name = spacing or USUAL[sampler].spacing
        one_of("spacing", name, SPACINGS)
        return SPACINGS[name](self.core.schedule, steps, self.num_steps)


#: Steps of Heun between data and their latents, each way.
_LATENT_STEPS = 100


class DiffusionSampling(DiffusionCourse):
    """The sampling half of a diffusion model, mixed into a GenerativeModel with `encode`, `decode` and `core`."""

    @property
    def has_null_class(self) -> bool:
        """Whether training hid the class now and then, so that the model knows what holds for all classes."""
        return self.conditional and self.cond_drop > 0

    def sample(
        self,
        n: int,
        cond: int | str | list | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        *,
        start: int = 0,
        sampler: SamplerName | None = None,
        steps: int | None = None,
        spacing: str | None = None,
        eta: float | None = None,
        churn: float | None = None,
        clip: bool | Literal["static", "dynamic"] | None = None,
        guidance: float = 1.0,
        guidance_rescale: float = 0.0,
        guidance_interval: list[float] | tuple[float, float] | None = None,
        known: Tensor | None = None,
        keep: Tensor | None = None,
        rounds: int = 10,
        edit: Tensor | None = None,
        strength: float = 0.6,
        weights: str | float = "ema",
        path: int = 0,
        size: list[int] | tuple[int, ...] | None = None,
        lengths: list[int] | None = None,
        progress=None,
    ) -> Samples:
        """Samples `start` .. `start + n - 1` of a seed.

        Arguments:
            n: how many.
            cond: class, classes (cycled), or None: every class in turn, or no class at all with `known` and `edit`.
            temperature: factor on the standard deviation of all noise, 1 for the model's own distribution.
            seed: sample k of a seed depends on (seed, k) alone.
            start: number of the first sample.
            sampler: `ddpm` (ancestral), `ddim`, `euler`, `heun`, `edm`, `dpmpp_2m` (default) or `unipc`; with `known`
                the default is `ddpm`.
            steps: number of steps, at most T; default T for `ddpm`, 50 for `ddim`, `euler` and with `known`, 40 for
                `edm`, 18 for `heun`, 20 else. `heun` and `edm` call the network twice a step.
            spacing: how the times are spaced; by default integer steps for `ddpm` and `ddim`, Karras' for `heun` and
                `edm`, uniform in log-SNR else.
            eta: share of ancestral noise in `ddim`, 0 by default.
            churn: noise that `edm` adds on its way, S_churn, 10 by default.
            clip: keep the estimate of the data in its range at every step: `static` (true), `dynamic`, or false;
                default static for integers.
            guidance: scale of classifier-free guidance: 1 for the class alone, 0 for no class, more for samples that
                are more typical of their class.
            guidance_rescale: share of the excess contrast that guidance is made to give back, 0 to 1.
            guidance_interval: lowest and highest log-SNR where guidance applies.
            known: an event in the data's own units, of which `keep` is returned as it is and the rest drawn anew.
            keep: bool, broadcastable to the event, True where `known` holds.
            rounds: how often each step is taken with `known`, for the drawn part to settle.
            edit: an event in the data's own units, from which sampling starts after noise has been added.
            strength: time from which `edit` is sampled: near 0 it hardly changes, at 1 nothing of it is left.
            weights: `ema`, `raw`, or one of the decays kept.
            path: number of frames of the way from noise to data to keep, 0 for none.
            size: height and width, or length, where it is not that of the data; the channels stay.
            lengths: numbers of valid frames of sequences, cycled; samples are zero beyond them, mels silent. Mels have
                their usual length when nothing is said.
            progress: called after every step with the number of steps done and their total.
        """
        index = self.numbered(n, start)
        check_temperature(temperature)
        self._check_material(known, keep, edit, size)
        generator = KeyedGenerator(seed, index, "sample")
        name = sampler or ("dpmpp_2m" if known is None else "ddpm")
        times, stepper, made = self.course(name, steps, spacing, eta, churn, known is not None)
        labels = self._asked(cond, index, guidance, known is not None or edit is not None)
        core = self._steered(self.weights(weights), clip, guidance, guidance_rescale, guidance_interval)
        shape, beginning = (n, *self._shape_of(size)), None
        whole = lengths is None and any(given is not None for given in (size, known, edit))
        mask = None if whole else frames_of(lengths, index, replace(self.spec, event_shape=shape[1:]))
        if known is not None:
            known, keep = known.to(self.device), keep.to(self.device)
            stepper = Inpainting(stepper, self.encode(known[None]), keep, rounds=rounds)
            made |= {"rounds": rounds, "kept": int(keep.expand(self.spec.event_shape).sum())}
        if edit is not None:
            times = times_from(times, strength)
            repeated = self.encode(edit[None].to(self.device)).expand(shape)
            beginning = noised_start(self.core.schedule, repeated, float(times[0]), generator)
            made |= {"strength": strength}
        seen = Path(path, len(times) - 1, progress)

        def finished(x: Tensor) -> Tensor:
            """x in the data's units, with what is known as it was given, and zero where there is no frame."""
            x = silent_beyond(self.decode(x), mask, self.spec)
            return x if known is None else torch.where(keep, known, x)

        def after(done: int, x: Tensor, x0: Tensor) -> None:
            seen(done, lambda: finished(x) if done + 1 == seen.steps else self.decode(x))

        with torch.no_grad():
            out = run_sampler(
                core, shape, times, stepper, generator, cond=labels, mask=mask, temperature=temperature,
                dtype=self.location.dtype, device=self.device, start=beginning, callback=after,
            )
        made |= {"evaluations": out.evaluations, "seed": seed, "weights": str(weights), "temperature": temperature}
        made |= {"clip": self._threshold(clip) or "none"} | ({"guidance": guidance} if guidance != 1 else {})
        made |= {"guidance_rescale": guidance_rescale} if guidance_rescale else {}
        made |= {} if guidance_interval is None else {"guidance_interval": list(guidance_interval)}
        return Samples(finished(out.x), labels, index, made, seen.kept, mask=mask)

    def _check_material(self, known: Tensor | None, keep: Tensor | None, edit: Tensor | None, size) -> None:
        if known is not None and edit is not None:
            raise ValueError("a part of an event is kept, or all of it is edited: leave one of the two out")
        if (known is None) != (keep is None):
            raise ValueError("what is known goes with a mask of where it is known: give both")
        for event in (known, edit):
            if event is not None and (event.shape != self.spec.event_shape or size is not None):
                raise ValueError(
                    f"events are {tuple(self.spec.event_shape)} here, got {tuple(event.shape)}: leave size out"
                )

    def _asked(self, cond, index: Tensor, guidance: float, has_material: bool) -> Tensor | None:
        """The labels of the samples, None for no class."""
        if not math.isfinite(guidance):
            raise ValueError(f"guidance must be a finite number, got {guidance}")
        if guidance != 1 and self.num_classes is None:
            raise ValueError("guidance needs a model with classes: leave it out")
        if guidance != 1 and not self.has_null_class:
            raise ValueError("this model was trained with cond_drop=0, it knows no class that guidance could leave")
        if guidance == 0 and cond is not None:
            raise ValueError("guidance=0 draws without a class: leave cond out")
        if guidance == 0 or (cond is None and has_material and guidance == 1 and self.has_null_class):
            return None
        return self.labels(cond, index)

    def _threshold(self, clip: bool | str | None) -> str | None:
        if clip is None:
            clip = self.spec.levels is not None
        return {True: "static", False: None}.get(clip, clip)

    def _steered(self, core, clip, guidance: float, rescale: float, interval):
        """The denoiser with guidance, and with its estimate kept in range."""
        if guidance not in (0, 1):
            interval = () if interval is None else (tuple(interval),)
            if interval and len(interval[0]) != 2:
                raise ValueError(f"guidance_interval takes two log-SNRs, got {list(interval[0])}")
            between = {"interval": interval[0]} if interval else {}
            core = GuidedDenoiser(core, guidance, self.num_classes, rescale=rescale, **between)
        elif rescale or interval is not None:
            raise ValueError("guidance_rescale and guidance_interval go with guidance=, a scale that is not 0 or 1")
        threshold = self._threshold(clip)
        return core if threshold is None else ThresholdedDenoiser(core, threshold)

    def _shape_of(self, size: list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
        """The shape of events of such a size."""
        channels, *space = self.spec.event_shape
        if size is None or list(size) == space:
            return self.spec.event_shape
        if not space or len(size) != len(space) or min(size) < 1:
            like = "samples of vectors have no size" if not space else f"size has {len(space)} numbers of at least 1"
            raise ValueError(f"{like}, got {list(size)}")
        if self.spec.levels is None:
            raise ValueError(
                f"continuous data are standardised place by place: their size is {space}, not {list(size)}"
            )
        return channels, *size

    # ---- latents: where the deterministic sampler starts ---------------------------------------------------------

    @torch.no_grad()
    def latents(self, batch: Batch, weights: str | float = "ema", steps: int = _LATENT_STEPS) -> Latents:
        """The noise from which the probability-flow ODE leads to these data; without labels, under no class."""
        x0, times = self.encode(batch.x), self._latent_times(steps)
        return Latents((invert(self.weights(weights), x0, times, cond=self._cond(batch)),))

    @torch.no_grad()
    def from_latents(
        self, latents: Latents, cond: Tensor | None = None, weights: str | float = "ema", steps: int = _LATENT_STEPS
    ) -> Tensor:
        """The data that latents stand for, in the data's own units; the inverse of `latents`."""
        z = latents[0]
        out = run_sampler(
            self.weights(weights), z.shape, self._latent_times(steps), HeunSampler(),
            KeyedGenerator(0, torch.arange(len(z), device=z.device)), cond=cond, dtype=z.dtype, start=z,
        )
        return self.decode(out.x)

    def _latent_times(self, steps: int) -> Tensor:
        return self.sampling_times("dpmpp_2m", min(steps, self.num_steps))
