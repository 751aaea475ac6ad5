"""The likelihood of score models by their ODE, in the data's units, against exact densities."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from genmodels.data.spec import Batch, DataSpec
from genmodels.energy import NoiseConditionalScore
from genmodels.errors import InputError
from genmodels.models.score import ScoreModel
from genmodels.models.score_ode import ScoreAsDenoiser

WEIGHTS, MEANS, SPREADS = torch.tensor([0.3, 0.7]), torch.tensor([-1.0, 0.6]), torch.tensor([0.2, 0.4])


def mixture(sigma: float = 0.0) -> MixtureSameFamily:
    """Two normal laws of one number, with noise on it."""
    widths = (SPREADS.double().square() + sigma**2).sqrt()
    return MixtureSameFamily(Categorical(WEIGHTS.double()), Normal(MEANS.double(), widths))


def exact(y, sigma, cond=None):
    """The score of that mixture at any noise level."""
    with torch.enable_grad():
        y = y if y.requires_grad else y.detach().requires_grad_()
        widths = (SPREADS.to(y).square() + sigma.view(-1, 1, 1).to(y) ** 2).sqrt()
        parts = Normal(MEANS.to(y), widths).log_prob(y[..., None]) + WEIGHTS.to(y).log()
        return torch.autograd.grad(parts.logsumexp(-1).sum(), y, create_graph=True)[0]


def model(dims: int = 1, smallest: float = 0.02) -> ScoreModel:
    made = ScoreModel(DataSpec("x", (dims,)), net={"hidden": 8, "depth": 1}, ema_decay=0.0, smallest=smallest)
    made.largest.fill_(600.0)
    made.encoding.location.fill_(3.0)
    made.encoding.scale.fill_(2.0)
    return made.double()


def of_the_mixture() -> ScoreModel:
    made = model(3)
    made.core = NoiseConditionalScore(exact)
    return made


def values(made: ScoreModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours and the exact log-densities of points in the data's units, of three independent coordinates."""
    z = mixture().sample((6, 3))
    found = made.ode_likelihood(Batch(3 + 2 * z), weights="raw", tolerance=1e-7)
    return found.nats, mixture(made.smallest).log_prob(z).sum(1) - 3 * math.log(2)


def test_the_density_is_the_exact_one_in_the_datas_units():
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() < 1e-3  # there is mean / largest left at the noisy end


@pytest.mark.parametrize("bug", ["level", "volume"])
def test_that_law_catches(monkeypatch, bug):
    if bug == "level":
        sound = ScoreAsDenoiser.forward
        monkeypatch.setattr(ScoreAsDenoiser, "forward", lambda self, x, t, *rest: sound(self, x, 0.98 * t, *rest))
    else:
        monkeypatch.setattr(ScoreModel, "_first_log_snr", lambda self: -2 * math.log(10 * self.smallest))
    torch.manual_seed(0)
    ours, truth = values(of_the_mixture())
    assert (ours - truth).abs().max() > 1e-2


def test_the_density_of_any_network_integrates_to_one():
    torch.manual_seed(1)
    made = model(smallest=0.2)
    made.largest.fill_(20.0)
    for p in made.core.parameters():
        p.data += 0.3 * torch.randn_like(p)
    x = torch.linspace(-400, 400, 4001, dtype=torch.float64)[:, None]
    found = made.ode_likelihood(Batch(x), weights="raw", solver="rk4", steps=160, rows=4001)
    assert found.kind == "ode" and abs(float(found.nats.exp().sum() * 0.2) - 1) < 0.01


def test_integers_are_bounded_by_importance_samples():
    spec = DataSpec("digits", (1, 4, 4), levels=17, num_classes=10)
    made = ScoreModel(spec, net={"channels": 8, "multipliers": [1], "blocks": 1}, ema_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    batch = Batch(torch.randint(0, 17, (4, 1, 4, 4), generator=generator).to(torch.uint8), torch.arange(4),
                  index=torch.arange(4))  # fmt: skip
    made.initialize(batch)
    few, many = (made.ode_likelihood(batch, weights="raw", importance_samples=k, tolerance=1e-2) for k in (1, 3))
    alone = made.ode_likelihood(batch.rows(slice(3, 4)), weights="raw", tolerance=1e-2)
    assert abs(float(alone.nats[0] - few.nats[3])) < 1e-3
    assert few.levels == 17 and few.made["given"] == "class" and bool((many.evaluations > few.evaluations).all())
    assert few.nats.mean() < many.nats.mean() + 3 * float(many.stderr.square().sum().sqrt()) / 4
    with pytest.raises(InputError, match="choose uniform"):
        made.ode_likelihood(batch, dequantisation="diffusion")
