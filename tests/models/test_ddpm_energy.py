"""model=energy_ddpm: scores that are gradients of an energy at every noise level, and log Z of a level."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.diffusion import Denoiser, V, alpha_sigma
from genmodels.energy import Potential
from genmodels.models.ddpm import EnergyDDPM
from genmodels.models.optimizer import Optimizer
from tests.models.test_ddpm import DIGITS, SMALL, batch
from tests.parameters import scattered

PLANE = DataSpec("gauss", (2,), levels=None)


def model(spec: DataSpec = DIGITS, **options) -> EnergyDDPM:
    torch.manual_seed(0)
    found = EnergyDDPM(spec, **({"num_steps": 12} | ({"net": SMALL} if spec is DIGITS else {}) | options)).eval()
    for core in (found.core, *found.ema.averages):  # away from the start, where the energy is that of N(0, I)
        scattered(core, 0.05)
    return found


# ---- the scores are those of the energy ---------------------------------------------------------------------------


def score_error(found: EnergyDDPM) -> float:
    """Between the denoiser's score -eps/sigma at three levels and minus the gradient of the energies, relative."""
    found = found.double()
    x, cond = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(2)).double(), torch.arange(3)
    total = torch.zeros(())
    for log_snr in (-3.0, 0.5, 6.0):
        level = torch.full((3,), log_snr).double()
        with torch.no_grad():
            score = -found.core.at_log_snr(x, level, cond).eps / float(alpha_sigma(level)[1][0])
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(found.level(log_snr, "raw").energy(leaf, cond).sum(), leaf)
        total = torch.maximum(total, (score + gradient).norm() / gradient.norm())
    return float(total)


def test_the_score_is_minus_the_gradient_of_the_energy_at_every_level(monkeypatch):
    assert score_error(model()) < 1e-12
    right = Potential.energy
    monkeypatch.setattr(Potential, "energy", lambda self, x, log_snr, *rest: right(self, x, 1.1 * log_snr, *rest))
    assert score_error(model()) > 1e-2  # of another level


def asymmetry(found: EnergyDDPM) -> float:
    """Of the Jacobian of the predicted noise: zero for a gradient."""
    denoiser = found.double().core
    x, level, cond = torch.randn(1, 1, 4, 4).double(), torch.tensor([1.0]).double(), torch.tensor([3])
    jacobian = torch.autograd.functional.jacobian(lambda y: denoiser.at_log_snr(y, level, cond).eps, x)
    square = jacobian.reshape(16, 16)
    return float((square - square.T).norm() / (square - square.diagonal().diag()).norm())


def test_the_field_is_a_gradient_and_that_of_a_free_network_is_not():
    found = model()
    assert asymmetry(found) < 1e-12
    found.core = Denoiser(found.core.net.network, found.core.schedule, V())
    assert asymmetry(found) > 0.1


def test_gradients_are_there_when_nobody_asks_for_any():
    found = model()
    outside = found.log_likelihood(batch(), draws=3).nats
    with torch.inference_mode():
        inside, drawn = found.log_likelihood(batch(), draws=3).nats, found.sample(2, steps=3, guidance=2.0).x
        energies = found.energies(batch())
    assert torch.allclose(outside, inside) and not inside.requires_grad and drawn.dtype == torch.uint8
    assert energies.shape == (6,) and not energies.requires_grad


def test_training_lowers_the_loss_and_reaches_every_parameter():
    torch.manual_seed(0)
    found, data = EnergyDDPM(DIGITS, net=SMALL, ema_decay=0), batch(16)
    data.x = (16 * (torch.arange(16) % 2)).view(-1, 1, 1, 1).expand_as(data.x).to(torch.uint8)  # black, white
    optimizer = Optimizer(lr=3e-3).build(found.core.parameters(), 30)[0]
    losses = []
    for step in range(30):
        loss = found.loss(data, KeyedGenerator(0, torch.arange(16), "train", step)).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in found.core.parameters())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


# ---- energies and log Z of a known Gaussian -----------------------------------------------------------------------


class Exact(nn.Module):
    """f of the energies of N(m, s^2 I) in the network's units, see tests/energy/test_denoising.py."""

    def __init__(self, mean: torch.Tensor, spread: float):
        super().__init__()
        self.mean, self.spread = nn.Parameter(mean), spread

    def forward(self, x, log_snr, cond):
        alpha, sigma = (value[:, None] for value in alpha_sigma(log_snr))
        variance = (alpha * self.spread) ** 2 + sigma**2
        return -sigma * (0.5 * alpha * (self.spread**2 - 1) * x + self.mean) / variance


LOCATION, SCALE, MEAN, SPREAD = 3.0, 20.0, (0.5, -1.0), 0.4


def gaussian() -> EnergyDDPM:
    """A model that knows data 3 + 20 N(m, s^2 I)."""
    found = EnergyDDPM(PLANE, ema_decay=0.0).double()
    found.core.net.network = Exact(torch.tensor(MEAN).double(), SPREAD)
    found.location.fill_(LOCATION)
    found.scale.fill_(SCALE)
    return found


def test_energies_of_items_differ_by_minus_the_log_density():
    x = torch.tensor([[13.0, -17.0], [13.0, 23.0]]).double()  # at the mean in units of the data, and 40 = 5 s away
    low, high = gaussian().energies(Batch(x), log_snr=12.0).tolist()
    assert high - low == pytest.approx(0.5 * (40 / (SCALE * SPREAD)) ** 2, rel=1e-3)
    low, high = gaussian().energies(Batch(x), log_snr=0.0).tolist()  # with as much noise as data
    assert high - low == pytest.approx(0.5 * 2.0**2 / (SPREAD**2 + 1), rel=1e-6)


@pytest.mark.parametrize("log_snr", [0.0, 4.0])
def test_the_partition_function_of_a_level_is_that_of_the_gaussian(log_snr):
    alpha, sigma = (float(value) for value in alpha_sigma(torch.tensor(log_snr).double()))
    variance, mean = (alpha * SPREAD) ** 2 + sigma**2, alpha**2 * (MEAN[0] ** 2 + MEAN[1] ** 2)
    found = gaussian().partition(weights="raw", log_snr=log_snr, chains=300, steps=30)
    truth = math.log(2 * math.pi * variance) + 0.5 * mean / variance
    assert found.least < truth < found.most < found.least + 0.4 and found.reliable
    other = gaussian().partition(weights="raw", log_snr=log_snr + 1, chains=300, steps=30)
    assert not other.least < truth < other.most


def test_the_bound_and_the_flow_are_those_of_the_gaussian():
    z = torch.randn(40, 2, generator=torch.Generator().manual_seed(3))
    x = LOCATION + SCALE * (torch.tensor(MEAN) + SPREAD * z)
    exact = torch.distributions.Normal(LOCATION + SCALE * torch.tensor(MEAN).double(), SCALE * SPREAD)
    exact = exact.log_prob(x.double()).sum(1)
    found, data = gaussian(), Batch(x.double(), index=torch.arange(40))
    assert torch.allclose(found.ode_likelihood(data, weights="raw").nats, exact, atol=3e-3)
    bound = found.log_likelihood(data, weights="raw")
    gap, error = float((exact - bound.nats).mean()), float(bound.standard_error().total)
    assert bound.kind == "lower_bound" and -4 * error < gap < 0.2 + 4 * error


def test_the_partition_function_of_a_class():
    found = model()
    one, other = (found.partition(label, chains=8, steps=3) for label in (3, 4))
    assert one.log_z != other.log_z and one == found.partition(3, chains=8, steps=3)
    assert not one.reliable and one.reverse == "approximate"  # of a network drawn at random
    with pytest.raises(ValueError, match="class 10 does not exist"):
        found.partition(10)


def test_data_that_it_does_not_take_are_refused_in_good_english():
    with pytest.raises(InputError, match="and an energy_ddpm is not conditioned on texts"):
        EnergyDDPM(DataSpec("speech", (80, 64), text={"symbols": ["a"]}))


LEVELS = torch.zeros(2, *DIGITS.event_shape, dtype=torch.uint8)


@pytest.mark.parametrize("cond, said", [
    (torch.tensor([1, 99]), "must be 2 classes from 0 to 9"), (torch.tensor([1, -1]), "from 0 to 9"),
    (torch.tensor([1.0, 2.0]), "from 0 to 9"), (torch.tensor([1, 2, 3]), "2 classes"), ([3], "2 classes"),
    ([1, 99], "class 99 does not exist"),
])  # fmt: skip
def test_labels_of_energies_that_do_not_exist_are_refused(cond, said):
    with pytest.raises(InputError, match=said):
        model().energies(Batch(LEVELS, cond))


def test_a_list_of_classes_is_taken_as_a_tensor_is():
    found = model()
    assert torch.equal(found.energies(Batch(LEVELS, [3, 4])), found.energies(Batch(LEVELS, torch.tensor([3, 4]))))
    assert found.partition([3], chains=4, steps=3) == found.partition(torch.tensor(3), chains=4, steps=3)
    for cond, said in (([3, 4], "names several classes"), (2.5, "class 2.5 does not exist"), (True, "class True")):
        with pytest.raises(InputError, match=said):
            found.partition(cond, chains=4, steps=3)


def test_energies_without_a_class_need_a_model_that_learned_them():
    found = model(cond_drop=0.0)
    for call in (lambda: found.energies(Batch(LEVELS)), lambda: found.partition(chains=4, steps=3)):
        with pytest.raises(InputError, match="trained with cond_drop=0"):
            call()
    assert math.isfinite(found.partition(3, chains=4, steps=3).log_z)


@pytest.mark.parametrize("weights, said", [
    ("emma", "'emma' is not ema, raw or a decay"), (0.5, "no average with decay"), (None, "weights=None"),
])  # fmt: skip
def test_weights_that_are_not_kept_are_refused(weights, said):
    for call in (lambda: model().energies(Batch(LEVELS), weights=weights),
                 lambda: model().partition(3, weights=weights, chains=4, steps=3)):
        with pytest.raises(InputError, match=said):
            call()


@pytest.mark.parametrize("log_snr", [-15.1, 15.1, 100.0, math.nan, math.inf])
def test_a_level_that_is_not_on_the_schedule_is_refused(log_snr):
    found = model(PLANE, log_snr_ends=[15.0, -15.0])
    for call in (lambda: found.energies(Batch(torch.zeros(2, 2)), log_snr=log_snr),
                 lambda: found.partition(log_snr=log_snr, chains=8, steps=3)):
        with pytest.raises(InputError, match="outside of the schedule, -15 to 15"):
            call()
    assert found.energies(Batch(torch.zeros(2, 2)), log_snr=15.0).shape == (2,)  # the ends are on it
    discrete = model(PLANE, schedule="cosine_discrete")  # without noise at t = 0
    with pytest.raises(InputError, match="outside of the schedule"):
        discrete.partition(log_snr=100.0, chains=8, steps=3)


@pytest.mark.parametrize("options, reason", [
    ({"log_snr": -9.0}, "must be above -8"),
    ({"log_snr": -8.0}, "must be above -8"),
    ({"chains": 1}, "chains must be at least 2, got 1"),
    ({"chains": -3}, "chains must be at least 2, got -3"),
])  # fmt: skip
def test_a_partition_function_without_a_path_or_chains_is_refused(options, reason):
    with pytest.raises(InputError, match=reason):
        model(PLANE).partition(**{"chains": 8, "steps": 3} | options)


@pytest.mark.parametrize("options, reason", [
    ({"net": {"_target_": "genmodels.nn.dit.DiT", "depth": 1}}, "a U-Net or an MLP"),
    ({"net": SMALL | {"checkpointing": True}}, "model.net.checkpointing"),
    ({"variance": "learned"}, "trains no variance"),
])  # fmt: skip
def test_what_has_no_second_derivative_is_refused(options, reason):
    with pytest.raises(InputError, match=reason):
        model(**options)
    with pytest.raises(InputError, match="trainer.strategy=fsdp"):
        model().sharded_networks()
    assert model().compiled_parts() == []
