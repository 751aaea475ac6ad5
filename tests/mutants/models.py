"""Mutants of whole models and flows, each with the checks of a checkpoint that must notice it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.core.likelihood import Likelihood
from genmodels.flows.bases import Distribution, Logistic, StandardNormal
from genmodels.flows.bijection import Bijection
from genmodels.flows.composition import Compose
from genmodels.flows.discrete import ContinuousFlow
from genmodels.flows.flow import Flow
from genmodels.flows.linear import InvertibleLinear
from genmodels.flows.scaling import ActNorm
from genmodels.models.base import GenerativeModel
from genmodels.models.ddpm import DDPM
from genmodels.models.flow import FlowModel
from genmodels.verification.check import Check
from genmodels.verification.checkpoints import ModelSubject, verify_checkpoint
from genmodels.verification.flows import FLOW_CHECKS, FlowSubject
from tests.gaussian_models import GaussianDiffusion, GaussianEnergy, GaussianFlow, Whitening
from tests.mutants.bijections_layers import Stretch

PLANE = DataSpec("plane", (2,))
MEAN, COVARIANCE = [0.3, -0.2], [[1.0, 0.5], [0.5, 2.0]]


@dataclass(frozen=True)
class ModelMutant:
    """A broken model, exactly the checks that fail with it, and those that are left open; none for a sound one.

    Arguments:
        make: makes the model.
        failing, unverified: names of the checks.
        made: how its likelihood was made, as in the first line of a table.
    """

    make: Callable[[], GenerativeModel]
    failing: frozenset[str] = frozenset()
    unverified: frozenset[str] = frozenset()
    made: dict | None = None

    def run(self) -> list[Check]:
        """The result of every check that applies."""
        torch.manual_seed(0)
        model = self.make().eval()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32, *model.spec.event_shape, generator=generator)
        if model.spec.levels is not None:
            x = torch.randint(0, model.spec.levels, x.shape, generator=generator)
        line = None
        if self.made is not None:
            line = Likelihood(torch.zeros(1), "ais", 2, None, None, self.made, torch.arange(1))
        given, until = {"weights": "raw", "seed": 0}, time.monotonic() + 600
        batch = Batch(x, index=torch.arange(len(x)))
        return verify_checkpoint(ModelSubject(model, batch, "raw", 0, given, line, until, x))


# ---- likelihoods and samples ---------------------------------------------------------------------------------------


class OwnFlow(GaussianFlow):
    """The sound flow of a Gaussian, to break."""

    def __init__(self, spec: DataSpec = PLANE):
        super().__init__(spec, mean=MEAN, covariance=COVARIANCE)

    def changed(self, found: Likelihood, batch: Batch) -> Likelihood:
        """What becomes of a likelihood."""
        return found

    def log_likelihood(self, batch, **options):
        return self.changed(super().log_likelihood(batch, **options), batch)


class CallsCounted(OwnFlow):
    """A value that creeps up with every call."""

    calls = 0

    def changed(self, found, batch):
        self.calls += 1
        return replace(found, nats=found.nats.double() + 1e-9 * self.calls)


class BatchSeen(OwnFlow):
    """An item alone has another density than one of many."""

    def changed(self, found, batch):
        return replace(found, nats=found.nats + 1e-3 * (len(batch) == 1))


class NumberSeen(OwnFlow):
    """A sample alone is another one than in a batch."""

    def sample(self, n, *given, **options):
        found = super().sample(n, *given, **options)
        return replace(found, x=found.x + 0.1 * (n == 1))


class CoarseSum(OwnFlow):
    """Log-densities that are 0.002 nats per dimension off in float32, and right in float64."""

    def changed(self, found, batch):
        return replace(found, nats=found.nats + 4e-3 * (batch.x.dtype == torch.float32))


class TooMuch(OwnFlow):
    """Seven percent too much density everywhere."""

    def changed(self, found, batch):
        return replace(found, nats=found.nats + math.log(1.07))


# ---- layers of flows -----------------------------------------------------------------------------------------------


class LayeredFlow(FlowModel):
    """The Gaussian flow with one more layer."""

    family = "layered flow"

    def __init__(self, layers: Callable[[], list[Bijection]], kind: type[Compose] = Compose):
        super().__init__(PLANE, ema_decay=0.0)
        whitening = Whitening(torch.tensor(MEAN), torch.tensor(COVARIANCE))
        self.core = ContinuousFlow(Flow(kind([whitening, *layers()], (2,)), StandardNormal((2,))))
        self.finish_setup(None, 0.0)


class WrongWayBack(Stretch):
    """The inverse misses x by 0.02."""

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x + 0.02, logdet


class CoarseWayBack(Stretch):
    """The same in float32 alone."""

    def _inverse(self, z, cond, mask):
        x, logdet = super()._inverse(z, cond, mask)
        return x + 0.02 * (z.dtype == torch.float32), logdet


class CoarseLayer(Stretch):
    """A layer that moves what it gets by `amount` in float32 alone, and knows of it on the way back."""

    def __init__(self, amount: float):
        super().__init__(2)
        self.amount = amount

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z + self.amount * (x.dtype == torch.float32), logdet

    def _inverse(self, z, cond, mask):
        return super()._inverse(z - self.amount * (z.dtype == torch.float32), cond, mask)


class WrongSum(Compose):
    """The sum of the log-determinants is off by 1e-5."""

    def _forward(self, x, cond, mask):
        z, logdet = super()._forward(x, cond, mask)
        return z, logdet + 1e-5


class WrongVolume(Stretch):
    """Both log-determinants are off by 1e-5."""

    def volume(self, x, mask):
        return super().volume(x, mask) + 1e-5


def _of_wide_data() -> Bijection:
    layer = ActNorm(2)
    layer.initialize(3000 * torch.randn(64, 2))
    return layer


def _nearly_singular() -> Bijection:
    layer = InvertibleLinear(2, kind="full")
    with torch.no_grad():
        next(layer.parameters()).copy_(torch.tensor([[200.0, 0.0], [0.0, 0.004]]))
    return layer


# ---- diffusion and energies ----------------------------------------------------------------------------------------


class OwnDiffusion(GaussianDiffusion):
    """The sound diffusion of a Gaussian, to break."""

    def __init__(self):
        super().__init__(PLANE, mean=MEAN, covariance=COVARIANCE, num_steps=10)


class LostPart(OwnDiffusion):
    """The first part of the bound is named twice as large as it is."""

    def log_likelihood(self, batch, **options):
        found = super().log_likelihood(batch, **options)
        (name, part), *_ = found.parts.items()
        return replace(found, parts={**found.parts, name: 2 * part})


class OffStrata(OwnDiffusion):
    """Strata estimate another number than the sum of all terms."""

    def log_likelihood(self, batch, *, draws=None, **options):
        found = super().log_likelihood(batch, draws=draws, **options)
        return replace(found, nats=found.nats + 100.0 * (draws is not None))


class Pixels(DDPM):
    """A small diffusion of pixels with five levels."""

    def __init__(self):
        super().__init__(DataSpec("pixels", (1, 4, 4), levels=5), ema_decay=0.0, num_steps=4,
                         net={"channels": 8, "multipliers": [1]})


class LeakyPixels(Pixels):
    """A decoder whose masses of all levels sum to 1.001."""

    def __init__(self):
        super().__init__()
        kind = type(self.decoder)
        log_mass = {"log_mass": lambda decoder, *given: kind.log_mass(decoder, *given) + 1e-3}
        self.decoder.__class__ = type("Leaky", (kind, ), log_mass)


class OwnEnergy(GaussianEnergy):
    """The sound energy of a Gaussian, to break."""

    def __init__(self):
        super().__init__(PLANE, mean=MEAN, covariance=COVARIANCE)


class Uphill(OwnEnergy):
    """The score is the gradient of the energy."""

    def __init__(self):
        super().__init__()
        kind = type(self.core)
        score = {"score": lambda core, *given: -kind.score(core, *given)}
        self.core.__class__ = type("Uphill", (kind, ), score)


def _flow(make: Callable, *failing: str, unverified: tuple[str, ...] = ()) -> ModelMutant:
    return ModelMutant(make, frozenset(failing), frozenset(unverified))


def _layers(make: Callable[[], Bijection], *failing: str, unverified: tuple[str, ...] = (), **options) -> ModelMutant:
    return _flow(lambda: LayeredFlow(lambda: [make()], **options), *failing, unverified=unverified)


_LAYERS, _WHOLE = "log-determinant of each layer", "log-determinant of the whole"
_ROUND_TRIP, _DRIFT = "round trip in float32", "float32 against float64 after each layer"
_SIDES = {"log_z": 1.0, "log_z_upper": 1.2, "log_z_stderr": 0.05, "upper_stderr": 0.05}

#: Sound models, then one mutant after the other.
MUTANTS: dict[str, ModelMutant] = {
    "nothing (flow)": _flow(OwnFlow),
    "nothing (layers)": _layers(lambda: Stretch(2)),
    "nothing (diffusion)": ModelMutant(OwnDiffusion),
    "nothing (decoder)": ModelMutant(Pixels),
    "nothing (energy)": ModelMutant(OwnEnergy, made=_SIDES),
    "another value at every call": _flow(CallsCounted, "same seed, same value"),
    "an item alone": _flow(BatchSeen, "batch size 1 against 64"),
    "a sample alone": _flow(NumberSeen, "sample 3 alone and in a batch"),
    "sums in float32": _flow(CoarseSum, "float32 against float64", "density integrates to one"),
    "seven percent too much": _flow(TooMuch, "density integrates to one"),
    "inverse misses x": _layers(lambda: WrongWayBack(2), _ROUND_TRIP, "round trip in float64"),
    "inverse misses x in float32": _layers(lambda: CoarseWayBack(2), _ROUND_TRIP),
    "a layer is off in float32": _layers(lambda: CoarseLayer(1.0), _DRIFT, "float32 against float64"),
    "a layer is a little off in float32": _layers(lambda: CoarseLayer(0.01), unverified=(_DRIFT,)),
    "volume of a layer": _layers(lambda: WrongVolume(2), _LAYERS, _WHOLE),
    "volume of the whole": _layers(lambda: Stretch(2), _WHOLE, kind=WrongSum),
    "scale of three thousand": _layers(_of_wide_data, unverified=("largest log-scale",)),
    "matrix nearly singular": _layers(_nearly_singular, unverified=("largest condition number",)),
    "a part counted twice": ModelMutant(LostPart, frozenset({"prior + terms + reconstruction = bound"})),
    "strata of another bound": ModelMutant(OffStrata, frozenset({"all terms = stratified estimate"})),
    "decoder gives away too much": ModelMutant(LeakyPixels, frozenset({"masses of the decoder sum to one"})),
    "score with the other sign": ModelMutant(Uphill, frozenset({"score = - gradient of the energy"})),
    "log Z above its upper estimate": ModelMutant(
        OwnEnergy, frozenset({"forward log Z <= reverse"}), made={**_SIDES, "log_z": 1.6}
    ),
}


# ---- flows beyond their bijection ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowMutant:
    """A broken flow and exactly the checks of flows that fail with it; none for a sound one."""

    kind: type[Flow]
    failing: frozenset[str] = frozenset()
    base: type[Distribution] = StandardNormal

    def run(self) -> list[Check]:
        """The result of every check."""
        torch.manual_seed(0)
        x = torch.randn(3, 2, dtype=torch.float64)
        flow, blank = (self.kind(Compose([ActNorm(2), Stretch(2)], (2,)), self.base((2,))) for _ in range(2))
        flow.initialize(torch.randn(64, 2))
        return list(FLOW_CHECKS.run(FlowSubject(flow.double().eval(), x, None, blank.eval())))


class BaseAlone(Flow):
    """The log-determinant is left out of the log-density."""

    def log_prob(self, x, cond=None, mask=None):
        return super().log_prob(x, cond, mask) - self.bijection(x, cond, mask)[1]


class ScaledLatents(Flow):
    """Latents do not lead back to what they were made of."""

    def from_latents(self, latents, cond=None, mask=None):
        return 1.01 * super().from_latents(latents, cond, mask)


class CentredSamples(Flow):
    """Samples are centred over their batch."""

    def sample(self, n, cond=None, **options):
        x = super().sample(n, cond, **options)
        return x - 0.1 * x.mean(0)


class Hasty(Flow):
    """Starts from the first batch by itself."""

    def latents(self, x, cond=None, mask=None):
        if next(self.bijection.uninitialized(), None) is not None:
            self.initialize(x)
        return super().latents(x, cond, mask)


class WithoutConstant(StandardNormal):
    """The density is not normalised."""

    def _entries(self, z, cond):
        return -0.5 * z.square()


class WideNoise(StandardNormal):
    """Samples spread twice as far as the density says."""

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return 2 * super()._sample(shape, cond, temperature, generator, dtype, device)


class NarrowNoise(StandardNormal):
    """Samples spread half as far as the density says."""

    def _sample(self, shape, cond, temperature, generator, dtype, device):
        return 0.5 * super()._sample(shape, cond, temperature, generator, dtype, device)


#: A sound flow, then one mutant after the other.
FLOW_MUTANTS: dict[str, FlowMutant] = {
    "nothing": FlowMutant(Flow),
    "base alone": FlowMutant(BaseAlone, frozenset({"log-density"})),
    "latents scaled": FlowMutant(ScaledLatents, frozenset({"latents"})),
    "samples centred": FlowMutant(CentredSamples, frozenset({"samples"})),
    "starts by itself": FlowMutant(Hasty, frozenset({"waits for data"})),
    "nothing (another base)": FlowMutant(Flow, base=Logistic),
    "base without its constant": FlowMutant(Flow, frozenset({"base"}), WithoutConstant),
    "base with wide samples": FlowMutant(Flow, frozenset({"base"}), WideNoise),
    "base with narrow samples": FlowMutant(Flow, frozenset({"base"}), NarrowNoise),
}
