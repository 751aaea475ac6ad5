"""Options and result of a model's `sample`, and the trajectory from noise to data."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from genmodels.core.data import TextCondition
from genmodels.core.errors import InputError, at_least, check_number, none_or_at_least

#: Numeric options with their least values; the largest is a million.
_LEAST = {"temperature": 0, "guidance": -1e6, "churn": 0, "step_size": 0,
          "inverse_temperature": 0, "speed": 0}


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options of one call of `sample`, whatever the model; a family takes those that its `sampling_options` name.

    Arguments:
        n: number of samples.
        cond: class, or classes that are cycled; None for every class in turn, or no class where items are inpainted or
            edited. With text the speaker, by name or number; None for the first.
        temperature: factor on the standard deviation of all noise, 1 for the model's own distribution; None for the
            family's default: 1, with text 0.667, and 0 for a tacotron. Where items are inpainted it is 1, because
            weaker noise biases the drawn part.
        seed: sample k of a seed depends on (seed, k) alone.
        start: number of the first sample.
        weights: `ema`, `raw`, or one of the decays kept.
        sampler: ddpm, ddim, euler, heun, edm, dpmpp_2m, unipc, flow, sde, flow_map or consistency for diffusion and
            flow matching; those, predictor_corrector or annealed_langevin for scores; annealed, hmc, mala or ula for
            energies; those of diffusion or annealed_langevin for mels around the mean of a text; sequential,
            gauss_seidel or jacobi for a tarflow; ancestral or confidence for masked diffusion. None for the family's
            default.
        steps: number of sampling steps: of a diffusion or a chain, densities of `annealed`, noise levels of scores;
            None for the sampler's default.
        spacing: spacing of the times of a diffusion: uniform_t, uniform_log_snr, karras, integer_trailing or
            integer_leading; None for the sampler's default.
        eta: share of ancestral noise in `ddim`, 0 by default.
        churn: noise that `edm` adds during sampling, S_churn, 10 by default.
        diffusion: squared diffusion coefficient of `sde` over time: sigma (the default), constant, decreasing or sine.
        along: path to sample along in place of the model's own: linear, cosine, or vp_ and a noise schedule's name.
        step_size: first step size of an energy's chains, in standard deviations of the data (`hmc`, `annealed`) or
            variances (`ula`, `mala`); it adapts, but for `ula`.
        inverse_temperature: beta > 0 of the density p^beta that energies and scores are sampled from.
        clip: keep the estimate of the data in its range at every step: `static` (true), `dynamic`, or false; None for
            static where the data are integers.
        guidance: scale of classifier-free guidance: 1 for the class alone, 0 for no class, more for samples that are
            more typical of their class.
        guidance_rescale: share of the excess contrast of guidance that is removed, 0 to 1.
        guidance_interval: lowest and highest log-SNR where guidance applies; None for everywhere.
        known: an event in the data's own units, of which `keep` is returned as it is and the rest drawn anew.
        keep: bool, broadcastable to the event, True where `known` holds.
        rounds: how often each step is taken where items are inpainted, for the drawn part to settle.
        edit: an event in the data's own units, from which sampling starts after noise has been added.
        source: (N, *event) items of the data set that a flow starts from, in its units, of which sample k is number
            k modulo N; None for those of its test split.
        strength: time from which `edit` is sampled: near 0 it hardly changes, at 1 it is replaced.
        size: height and width, or length, where it is not that of the data; the channels stay.
        lengths: numbers of valid frames of sequences, cycled; samples are zero beyond them, mels silent. None for mels
            of their usual length.
        text: a text, or several that are taken in turn; None for the examples that the checkpoint carries.
        speed: speaking rate, above 1 is faster.
        seconds: total time of a text; None for the sum of the durations.
        durations: frames of every token, a list for each text; None for predicted ones.
        max_frames: where a mel without a stop is cut; None for twenty frames per symbol and a hundred more.
        on_unknown: `drop` characters without a symbol, or stop with an `error`.
        path: number of frames of the trajectory from noise to data to keep, 0 for none.
        progress: called after every step with the number of steps done and their total.

    Errors: InputError for values out of their range.

    Example:
        >>> SamplingOptions(n=4, temperature=0.7).with_default(temperature=1.0).temperature
        0.7
        >>> SamplingOptions(n=0)
        Traceback (most recent call last):
        ...
        genmodels.core.errors.OptionError: n must be at least 1, got 0
    """

    n: int = 1
    cond: int | str | list[int | str] | None = None
    temperature: float | None = None
    seed: int = 0
    start: int = 0
    weights: str | float = field(default="ema", metadata={"configurable": False})  # on the command line: ema=
    sampler: str | None = None
    steps: int | None = None
    spacing: str | None = None
    eta: float | None = None
    churn: float | None = None
    diffusion: str | None = None
    along: str | None = None
    step_size: float | None = None
    inverse_temperature: float = 1.0
    clip: bool | Literal["static", "dynamic"] | None = None
    guidance: float = 1.0
    guidance_rescale: float = 0.0
    guidance_interval: list[float] | None = None
    known: Tensor | None = field(default=None, metadata={"configurable": False})
    keep: Tensor | None = field(default=None, metadata={"configurable": False})
    rounds: int = 10
    edit: Tensor | None = field(default=None, metadata={"configurable": False})
    source: Tensor | None = field(default=None, metadata={"configurable": False})
    strength: float = 0.6
    size: list[int] | None = None
    lengths: list[int] | None = None
    text: str | list[str] | None = None
    speed: float = 1.0
    seconds: float | None = None
    durations: list[list[int]] | None = None
    max_frames: int | None = None
    on_unknown: Literal["error", "drop"] = "error"
    path: int = 0
    progress: Callable[[int, int], None] | None = field(default=None, metadata={"configurable": False})

    def __post_init__(self):
        at_least(1, n=self.n)
        at_least(0, seed=self.seed, start=self.start)
        if self.start + self.n > 2**63 - 1:
            raise InputError(
                f"samples are numbered by 64 bits: start + n must be below 2**63, got {self.start} + {self.n}")
        for key, least in _LEAST.items():
            if getattr(self, key) is not None:
                check_number(key, getattr(self, key), least)
        interval = self.guidance_interval
        if interval is not None and not (len(interval) == 2 and all(map(math.isfinite, interval))
                                         and interval[0] < interval[1]):
            raise InputError("guidance_interval takes two finite log-SNRs, the lower one first, got "
                             f"{list(interval)}")
        if self.known is not None and self.edit is not None:
            raise InputError("inpainting (known) and edit exclude each other: leave one out")
        if (self.known is None) != (self.keep is None):
            raise InputError("known needs keep, the mask of where it holds: give both")
        if self.guidance == 0 and self.cond is not None:
            raise InputError("guidance=0 draws without a class: leave cond out")
        none_or_at_least(1, max_frames=self.max_frames)
        if self.path < 0:
            raise InputError(f"path is a number of frames, 0 for none, got {self.path}")

    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults.

        Example:
            >>> SamplingOptions(n=4, seed=0, steps=5).given()
            {'n': 4, 'steps': 5}
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(SamplingOptions)}
        return {key: value for key, (value, default) in values.items()
                if value is not default and (isinstance(value, Tensor) or value != default)}

    def require_levels(self, levels: int | None) -> None:
        """Raise InputError for a known or edited event that holds other values than the levels of integers."""
        for key in ("known", "edit") if levels is not None else ():
            x = getattr(self, key)
            low, high = (0, 0) if x is None else (float(x.min()), float(x.max()))
            if not 0 <= low <= high < levels:
                raise InputError(f"{key} holds values from {low:g} to {high:g}, and the data are integers from 0 to "
                                 f"{levels - 1}")

    @property
    def from_item(self) -> bool:
        """Whether samples start from an item that is inpainted or edited."""
        return self.known is not None or self.edit is not None

    def with_default(self, **values: Any) -> SamplingOptions:
        """The same, with these values where there is None."""
        missing = {key: value for key, value in values.items() if getattr(self, key) is None}
        return dataclasses.replace(self, **missing) if missing else self


#: Options that have no effect without one of these.
_PARTNERS = {"inpaint": ("mask", "text"), "mask": ("inpaint",), "rounds": ("inpaint", "known"), "strength": ("edit",),
             "chunk": ("stream",), "frames": ("path", "interpolate")}


def require_guidance(options: SamplingOptions, num_classes: int | None, has_null_class: bool) -> None:
    """Raise InputError for guidance of a model that cannot be guided, or towards no class."""
    if options.guidance == 1:
        return
    if num_classes is None:
        raise InputError("guidance needs a model with classes: leave it out")
    if not has_null_class:
        raise InputError("guidance needs a model trained with model.cond_drop above 0, not with cond_drop=0")
    if options.guidance != 0 and options.cond is None and options.from_item:
        raise InputError("guidance leads to a class, and an item that is inpainted or edited has none by itself: "
                         "give cond, or leave guidance out")


def require_events(options: SamplingOptions, shape: tuple[int, ...]) -> None:
    """Raise InputError for a known or edited event that does not have the shape of the data, or a mask that misfits."""
    for event in (options.known, options.edit):
        if event is not None and event.shape != shape:
            raise InputError(f"events are {tuple(shape)} here, got {tuple(event.shape)}")
    own = None if options.keep is None else tuple(options.keep.shape)
    sizes = zip(reversed(own or ()), reversed(shape), strict=False)
    if own is not None and (len(own) > len(shape) or any(size not in (1, there) for size, there in sizes)):
        raise InputError(f"keep must broadcast to the event {tuple(shape)}, got {own}")


def require_partners(given: Mapping[str, Any]) -> None:
    """Raise InputError for an option without the one that it needs, which would have no effect.

    Example:
        >>> require_partners({"strength": 0.5, "edit": None})
        Traceback (most recent call last):
        ...
        genmodels.core.errors.InputError: strength=0.5 needs edit=: give both
    """
    for key, partners in _PARTNERS.items():
        if given.get(key) is not None and all(given.get(partner) is None for partner in partners):
            both = "both" if len(partners) == 1 else f"{key} and one of them"
            raise InputError(f"{key}={given[key]} needs {'= or '.join(partners)}=: give {both}")


#: The default number of samples.
DEFAULT_NUMBER = 64
#: Options that every model takes.
COMMON = ("n", "cond", "temperature", "seed", "start", "weights")


@dataclass
class Samples:
    """Samples in the data's own units: `x (n, *event)`, `cond` or None, `index (n,)`, and `made`, how they were drawn.

    `path (steps, n, *event)`, with the option of that name, is the trajectory from noise to data, in the data's units.
    Sequences of different lengths have a `mask (n, 1, T)`; mels synthesised from text have the frames of every token,
    `durations (n, N)`. If a density of real numbers is quantised, `outside (n,)` is the share of each sample's values
    that were clipped to the range of the levels. `source (n, *event)` are the items from which a flow between two data
    sets started.
    """

    x: Tensor
    cond: Tensor | TextCondition | None
    index: Tensor
    made: dict[str, Any]
    path: Tensor | None = None
    mask: Tensor | None = None
    durations: Tensor | None = None
    outside: Tensor | None = None
    source: Tensor | None = None


class Trajectory:
    """Frames of a sampler's steps, spread evenly over them with the first and the last.

    Arguments:
        frames: number of frames, 0 for none; all steps if there are fewer, only the first for 1.
        steps: number of steps.
        progress: called after every step with the number of steps done and their total.

    Example:
        >>> seen = Trajectory(2, 5, lambda done, total: print(done, "of", total) if done == total else None)
        >>> for step in range(5):
        ...     seen(step, lambda: torch.full((1,), step))
        5 of 5
        >>> seen.kept
        tensor([[0],
                [4]])
    """

    def __init__(self, frames: int, steps: int, progress: Callable[[int, int], None] | None = None):
        self.steps, self.progress = steps, progress
        self._wanted = set(torch.linspace(0, steps - 1, min(frames, steps)).round().int().tolist())
        self._frames: list[Tensor] = []

    def __call__(self, step: int, frame: Callable[[], Tensor]) -> None:
        """Record that step number `step` (from 0) is done; `frame()` returns its frame `(n, *event)`."""
        if step in self._wanted:
            self._frames.append(frame())
        if self.progress is not None:
            self.progress(step + 1, self.steps)

    @property
    def kept(self) -> Tensor | None:
        """(frames, n, *event), or None if there are none."""
        return torch.stack(self._frames) if self._frames else None


def check_companions(target: Path, others: Iterable[Path] | None = None) -> None:
    """Refuse to replace what is not known to be ours: sound, arrays, or files next to a `target` that does not exist.

    A record without samples is left by a process that was killed.

    Arguments:
        target: the file that was asked for.
        others: what is written next to it; None for the companions of samples.

    Raises:
        InputError: naming such a file.
    """
    companions = {".csv": (".json",), ".txt": (".json",), ".wav": (".png", ".json")}
    if others is None:
        others = [target.with_suffix(suffix) for suffix in companions.get(target.suffix.lower(), ())]
        held = target.is_file() and target.stat().st_size
        if held and target.suffix.lower() in (".wav", ".npz") and not says_how(target):
            raise InputError(f"out={target} exists, is no file of samples and would be replaced: give another name")
    if not (others := list(others)):
        return
    alone = not any(target.with_suffix(suffix).exists() for suffix in companions) and says_how(target)
    for place in others:
        if place.exists() and not target.exists() and not (alone and place.suffix == ".json"):
            raise InputError(f"out={target} also writes {place}, which exists: give another name")


def says_how(file: Path) -> bool:
    """Whether a file of arrays, or a .json next to another one, has a record of how samples were made."""
    try:
        if file.suffix.lower() == ".npz":
            with np.load(file) as held:
                return "made" in held.files
        about = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        return isinstance(about, dict) and ("sentences" in about or re.fullmatch(r"\d+-\d+", str(about.get("index")))
                                            is not None)
    except (OSError, EOFError, TypeError, ValueError, AttributeError, BadZipFile):
        return False


def merged_record(parts: Sequence[Samples]) -> dict[str, Any]:
    """How samples of several parts were made: the record of the first, with what chains and decoders say of all.

    Divergences, effective samples and the evaluations of chains add up, of R-hat the largest counts, shares are means.

    Example:
        >>> records = ({"acceptance": 0.25, "r_hat": 1, "divergences": 1},
        ...            {"acceptance": 0.75, "r_hat": 3, "divergences": 2})
        >>> merged_record([Samples(torch.zeros(n, 1), None, torch.arange(n), made) for n, made in zip((1, 3), records)])
        {'acceptance': 0.625, 'r_hat': 3, 'divergences': 3}
    """
    made = dict(parts[0].made)
    merge = {"divergences": sum, "ess": sum, "r_hat": max, "not_stopped": _chained, "words_missing_repeated": _chained}
    if "acceptance" in made:
        merge["evaluations"] = sum  # of all chains; the others count those of one sample
    for key, function in merge.items():
        if made.get(key) is not None:
            made[key] = function([part.made[key] for part in parts if part.made.get(key) is not None])
    for key in ("acceptance", "step_size"):
        if made.get(key) is not None and "acceptance" in made:
            made[key] = sum(len(part.x) * part.made[key] for part in parts) / sum(len(part.x) for part in parts)
    return made


def _chained(lists: list[list]) -> list:
    return [entry for one in lists for entry in one]
