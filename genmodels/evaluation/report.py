"""The report of an evaluation: the results of its stages, and their form in report.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Literal

from scipy.special import stdtrit

from genmodels.core.likelihood import SingleValues, value_of
from genmodels.speech.measures import AlignmentShape, Pitch, SpokenAt
from genmodels.speech.recognition import Recognition, Transcription
from genmodels.verification.check import Check


@dataclass
class CheckpointFacts:
    """The checkpoint that was evaluated."""

    path: str
    sha256: str
    step: int
    epoch: int | None
    family: str
    parameters: int
    weights: str
    training_seconds: float | None


@dataclass
class DataFacts:
    """The items that were evaluated."""

    name: str
    split: str
    items: int
    limited: bool
    item_hash: str
    event_shape: list[int]
    levels: int | None
    units: str
    mel: dict | None
    num_classes: int | None
    class_names: list[str]
    encoding: str | None = None


@dataclass
class Item:
    """One of the least or the most likely items: its index, log-likelihood in nats, and standard error."""

    index: int
    nats: float
    error: float


@dataclass
class Bracket:
    """Bounds on the value by those of log Z, in its unit; `upper` is None if there is none."""

    lower: float
    upper: float | None


@dataclass(kw_only=True)
class LikelihoodLine:
    """One likelihood: its mean with its errors, the extreme items, the named parts, and how it was computed.

    `values` names the array of its single values. Fields that do not apply are None: the bracket and the error of log Z
    of annealed importance sampling, the cost of a class, the gap to a known entropy or density.
    """

    label: str
    kind: str
    mark: str
    unit: str
    mean_nats: float | None
    se_data: float | None
    se_items: float | None
    se_mc: float | None
    single: SingleValues
    how: str
    n: int
    nonfinite: int
    nonfinite_first: list[int]
    worst: list[Item]
    best: list[Item]
    parts_nats: dict[str, float]
    made: dict
    se_log_z: float | None = None
    optimistic: bool | None = None
    unreliable: str | None = None
    bracket: Bracket | None = None
    reason: str | None = None
    ess_median: float | None = None
    class_cost: float | None = None
    entropy: float | None = None
    kl_gap: float | None = None
    kl_paired: float | None = None
    se_gap: float | None = None
    values: str | None = None
    seconds: float | None = None

    @property
    def value(self) -> float | None:
        """The value in its unit, lower is better; None if there is none."""
        return value_of(vars(self))[1]

    @property
    def parts_of_error(self) -> dict[str, float]:
        """The known parts of the standard error, whose squares add up."""
        parts = {"the items": self.se_items, "the draws": self.se_mc, "log Z": self.se_log_z}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def gap(self) -> tuple[float | None, float | None]:
        """The KL gap to the true density and its standard error, paired by item if that density is known."""
        return (self.kl_gap, self.se_data) if self.kl_paired is None else (self.kl_paired, self.se_gap)


@dataclass(kw_only=True)
class BitsLine(LikelihoodLine):
    """A likelihood of integers."""

    bits_per_dim: float | None


@dataclass(kw_only=True)
class NatsLine(LikelihoodLine):
    """A likelihood of real numbers."""

    nll: float | None
    nll_per_dim: float | None


@dataclass(kw_only=True)
class Measures:
    """Distances, precision and recall of n samples and as many held-out items, each with its standard error."""

    n: int
    frechet: float | None
    frechet_error: float | None
    kernel: float
    kernel_error: float
    precision: float
    precision_error: float | None
    recall: float
    recall_error: float | None


@dataclass
class Scale:
    """Measures of items that are not samples, n in each row, in the features of the same network."""

    network: dict | str
    n: int
    rows: dict[str, Measures]


@dataclass(kw_only=True)
class Fidelity(Measures):
    """Measures of a model's samples in the features of one network, their memorisation, and their classes."""

    network: dict
    memorisation: dict
    class_accuracy: dict | None = None
    likelihood_accuracy: dict | None = None


@dataclass
class Skipped:
    """Why samples were not compared."""

    skipped: str


@dataclass(kw_only=True)
class SamplingCost:
    """The cost of a sample; latency in seconds, memory in bytes."""

    sampler: str | None
    steps: int | None
    evaluations: float | None
    samples_per_second: float
    batch_size: int
    latency: dict
    peak_memory: int | None
    seconds: float
    context: str
    seed: int


@dataclass(kw_only=True)
class SampleFacts:
    """The samples that were evaluated: names of their arrays, how they were made, and the share outside the range."""

    x: str
    cond: str | None
    index: str
    made: dict
    outside: dict | None


@dataclass(kw_only=True)
class Sweep:
    """Measures and cost at several values of one option of sampling."""

    key: str
    sampler: str | None
    n: int
    values: list[float]
    frechet: list[float | None] = field(default_factory=list)
    frechet_error: list[float | None] = field(default_factory=list)
    kernel: list[float] = field(default_factory=list)
    kernel_error: list[float] = field(default_factory=list)
    precision: list[float] = field(default_factory=list)
    precision_error: list[float | None] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    recall_error: list[float | None] = field(default_factory=list)
    evaluations: list[float | None] = field(default_factory=list)
    samples_per_second: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class OtherData:
    """Another data set by the same line: AUROC and standard error by likelihood and by the scores of `SCORES`."""

    name: str
    overrides: dict
    n: int
    kind: str
    label: str
    values: str
    inside: str
    value: str
    auroc: float | None
    said: str
    se: float | None = None
    mean_in: float | None = None
    mean_out: float | None = None
    reason: str | None = None
    scores: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(kw_only=True)
class SpeechFigures:
    """Synthesised texts against recordings: distortion in dB, lengths, failures, seconds of work and of sound.

    `first_audio` is the median time in seconds from a text to its first sound, in chunks if `streamed`. `played` are
    the first texts: the synthesis of text k is the array `sound_k`, its vocoded recording `vocoded_k`.
    """

    utterances: int
    mcd_mel13: float
    mcd_each: list[float]
    length_ratio: float
    failures_per_100: dict[str, float]
    real_time_factor: float
    seconds: list[float]
    sound: list[float]
    duration_error: float | None = None
    alignment: AlignmentShape | None = None
    recognition: Recognition | Skipped | None = None
    pitch: Pitch | Skipped | None = None
    first_audio: float | None = None
    streamed: bool = False
    played: list[str] = field(default_factory=list)


@dataclass
class Token:
    """The token of a text with the longest duration: its symbol, position and frames."""

    token: str
    position: int
    frames: int


@dataclass(kw_only=True)
class Utterance:
    """An utterance of the audit; fields that need named texts or alignments are None without them.

    For a recogniser, `frames` and dimensions are the characters of the text, and `heard` is its transcript.
    """

    rank: int
    index: int
    frames: int
    nats_per_dim: float
    z: float | None
    name: str | None = None
    text: str | None = None
    tokens: list[str] | None = None
    durations: list[int] | None = None
    longest: Token | None = None
    evidence: float | None = None
    heard: str | None = None
    rank_by_evidence: int | None = None


@dataclass
class Reference:
    """A value to compare with, such as a baseline or the entropy, in its unit, with its standard error."""

    name: str
    unit: str
    value: float | None
    error: float | None = None


@dataclass
class ExtremeItems:
    """The least and the most likely items, by the line of that index."""

    line: int
    least: list[Item]
    most: list[Item]


@dataclass
class NoiseLevels:
    """Mean nats per item of the noise levels between two edges of log-SNR."""

    log_snr_edges: list[float]
    nats: list[float]


@dataclass
class Layer:
    """A layer of a flow at a real input, as measured by `verification.maps`."""

    name: str
    kind: str
    log_det_per_dim: float | None
    drift: float
    round_trip: float | None
    log_scale: float | None
    condition: float | None


@dataclass
class Profile:
    """Where a likelihood comes from: the noise levels of a diffusion model, the layers of a flow."""

    diffusion: NoiseLevels | None = None
    flow: list[Layer] | None = None


@dataclass
class Drift:
    """The first layer after which the error of float32 exceeds `warn`, and the limits."""

    first_over: str | None
    warn: float
    fail: float


@dataclass
class Neighbours:
    """The training items nearest to the samples that are closest to any."""

    distance: list[float]
    index: list[int]


@dataclass
class DensityMap:
    """The part (x0, x1, y0, y1) of the plane in which the density was computed, and the kind of likelihood."""

    extent: list[float]
    kind: str
    unit: str = "nats"


@dataclass(kw_only=True)
class Report:
    """The results of one checkpoint after the stages done so far; fields of other stages are empty."""

    format: Literal[2] = 2
    created: str
    genmodels: dict
    name: str
    checkpoint: CheckpointFacts
    config: dict
    data: DataFacts
    likelihood: list[BitsLine | NatsLine] = field(default_factory=list)
    references: list[Reference] = field(default_factory=list)
    items: ExtremeItems | dict = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    drift: Drift | dict = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    fidelity: Fidelity | Skipped | dict = field(default_factory=dict)
    sampling: SamplingCost | dict = field(default_factory=dict)
    sweeps: list[Sweep] = field(default_factory=list)
    samples: SampleFacts | dict = field(default_factory=dict)
    neighbours: Neighbours | dict = field(default_factory=dict)
    density: DensityMap | dict = field(default_factory=dict)
    ood: list[OtherData] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    scale: Scale | None = None
    speech: SpeechFigures | None = None
    spoken_at: list[SpokenAt] | None = None
    transcription: Transcription | None = None
    audit: list[Utterance] | None = None
    partial: bool | None = None
    arrays: str | None = None


def plain(value):
    """A value in the types of JSON; numbers that are not finite become None.

    Fields of a dataclass that are None by default are left out if they are None.

    Example:
        >>> plain({1: (float("nan"), 2.0)})
        {'1': [None, 2.0]}
    """
    if is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in fields(value)
                 if f.default is not None or getattr(value, f.name) is not None}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def faults(line: LikelihoodLine) -> list[str]:
    """Errors in a line, which make the evaluation fail; a gap as improbable as -3 normal errors is one."""
    found = []
    if line.nonfinite and line.kind != "unnormalised":
        listed = str(line.nonfinite_first)[1:-1]
        found.append(f"{line.nonfinite} of {line.n} likelihoods are not finite (first items: {listed})")
    gap, error = line.kl_paired, line.se_gap
    if line.kind in ("exact", "lower_bound") and gap is not None and gap < -float(stdtrit(line.n - 1, 0.99865)) * error:
        found.append(f"{line.label}: better than the true density by {-gap:.4f} +- {error:.4f} nats: a fault of the "
                     "evaluation")
    return found


def notes_on(line: LikelihoodLine) -> list[str]:
    """Notes on a line."""
    few, k = line.ess_median, line.made.get("importance_samples", 1)
    loose = few is not None and few < k / 4 and k >= 8
    return [f"{line.label}: of {k} importance samples {few:.1f} count in the median: a loose bound"] if loose else []
