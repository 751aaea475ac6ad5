"""What every model has from its base: numbers of samples, classes, and the condition of a batch."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
import pytorch_lightning as lightning
import torch
from pytorch_lightning.core.mixins import HyperparametersMixin

from genmodels.core.data import Batch, DataSpec
from genmodels.core.errors import InputError
from genmodels.data.vision import Digits
from genmodels.models.base import GenerativeModel
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.normalizing_flows import NSF
from genmodels.models.score import ScoreModel
from genmodels.training.dashboards import density_of

SPEC = DataSpec("plane", (2,), num_classes=3)
SMALL = {"net": {"hidden": 8, "depth": 1}}
MODELS = {
    "flow": lambda conditional: NSF(SPEC, layers=1, hidden=8, class_conditional=conditional),
    "diffusion": lambda conditional: DDPM(SPEC, num_steps=4, class_conditional=conditional, **SMALL),
    "score": lambda conditional: ScoreModel(SPEC, class_conditional=conditional, **SMALL),
}


@pytest.mark.parametrize("name", MODELS)
def test_classes_are_conditioned_on_where_options_and_data_say_so(name):
    batch = Batch(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    conditional, blind = MODELS[name](True), MODELS[name](False)
    assert conditional.num_classes == 3 and torch.equal(conditional._cond(batch), batch.cond)
    assert blind.num_classes is None and blind._cond(batch) is None


@pytest.mark.parametrize("name", [*MODELS, "energy"])
def test_numbers_of_samples(name):
    model = MODELS[name](False) if name in MODELS else EnergyModel(SPEC, net={"hidden": [8]})
    assert model.numbered(3, 5).tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        model.sample(0)
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        model.sample(1, start=-1)


def test_options_of_optimiser_and_averages_that_do_not_exist():
    with pytest.raises(InputError, match="Optimizer has no option 'warmup': did you mean 'warmup_steps'"):
        NSF(SPEC, optimizer={"warmup": 5})
    model = NSF(SPEC, layers=1, hidden=8, ema_decay=0)
    assert model.weights("ema") is model.core
    with pytest.raises(InputError, match="no averaged weights: leave weights="):
        model.weights(0.9)


# ---- what needs derivatives works in torch's inference mode too, and gives the same numbers ----


PLANE = DataSpec("toy_moons", (2,))
TABLE = DataSpec("table", (3,))
MODELS_WITH_DERIVATIVES = {
    "score": lambda: ScoreModel(PLANE, net={"hidden": 8}),
    "ddpm": lambda: DDPM(PLANE, net={"hidden": 8}, num_steps=10),
    "nsf": lambda: NSF(PLANE, hidden=8),
    "energy": lambda: EnergyModel(PLANE, net={"hidden": [8, 8]}),
    "energy of a table": lambda: EnergyModel(TABLE, net={"hidden": [8, 8]}),
}
SHORT = {"ode_likelihood": {"solver": "heun", "steps": 2}, "sample": {"steps": 4}}


def answers(model, batch: Batch) -> dict:
    """Everything that a model is asked for apart from its loss."""
    likelihood = {"chains": 4, "densities": 3} if isinstance(model, EnergyModel) else {}
    found = {"likelihood": model.log_likelihood(batch, **likelihood).nats}
    found["samples"] = model.sample(3, **({} if isinstance(model, NSF) else SHORT["sample"])).x
    for divergence in ("exact", "hutchinson") if model.has_ode_likelihood else ():
        one = model.ode_likelihood(batch, divergence=divergence, **SHORT["ode_likelihood"])
        found[f"ode, {divergence}"] = one.nats
    if model.spec is PLANE:
        found["density"] = density_of(model, [-1, 1, -1, 1], 6)
        found |= {name: torch.tensor(list(picture.tobytes())) for name, picture in model.pictures().items()}
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", MODELS_WITH_DERIVATIVES)
def test_answers_are_those_without_inference_mode(name, short_pilot):
    torch.manual_seed(0)
    model = MODELS_WITH_DERIVATIVES[name]().eval()
    x = torch.randn(50, *model.spec.event_shape, generator=torch.Generator().manual_seed(0))
    model.initialize(Batch(x, index=torch.arange(50)))
    plain = answers(model, Batch(x[:4], index=torch.arange(4)))
    for kept in ("_samplers", "_normalisers"):  # so that inference mode finds nothing ready
        if hasattr(model, kept):
            setattr(model, kept, {})
    with torch.inference_mode():
        inside = answers(model, Batch(x[:4].clone(), index=torch.arange(4)))
    assert inside.keys() == plain.keys()
    for key, value in plain.items():
        torch.testing.assert_close(inside[key].clone(), value, equal_nan=True, msg=lambda text, k=key: f"{k}: {text}")
        assert not value.requires_grad


def test_derivatives_of_masked_fields_and_schedules():
    from genmodels.diffusion import CosineSchedule, NoiseSchedule
    from genmodels.diffusion.ode import exact_divergence, hutchinson

    class Numerically(CosineSchedule):
        log_snr_rate = NoiseSchedule.log_snr_rate

    def found():
        x, mask = torch.ones(1, 2, 3), torch.tensor([[[True, True, False]]])
        probes = torch.ones(1, 1, 2, 3)
        rate = Numerically().log_snr_rate(torch.tensor([0.3]))
        return exact_divergence(torch.sin, x, mask)[1], hutchinson(torch.sin, x, probes, mask)[1], rate

    plain = found()
    with torch.inference_mode():
        inside = found()
    torch.testing.assert_close([one.clone() for one in inside], list(plain))


def test_a_model_is_lightnings_where_lightning_is_imported(monkeypatch):
    trained = MODELS["diffusion"](True)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "pytorch_lightning")
        plain = MODELS["diffusion"](True)
        early, data = copy.deepcopy(plain), Digits()
        assert early.options == plain.options and type(early) is early.__class__ is type(plain)
    assert not issubclass(type(plain), lightning.LightningModule)
    for joined, of in ((plain, lightning.LightningModule), (data, lightning.LightningDataModule)):
        pickle.loads(pickle.dumps(joined))
        assert isinstance(joined, of) and isinstance(joined, of) and vars(joined).keys() >= vars(of()).keys()
    assert early.__class__.__name__ == "DDPM" and type(early) is type(plain) is early.__class__ is type(trained)
    assert isinstance(trained, DDPM) and type(trained) is type(MODELS["diffusion"](False))
    assert plain.header() == trained.header() and list(plain.state_dict()) == list(trained.state_dict())
    assert plain.device == trained.device == torch.device("cpu")
    for copied in (pickle.loads(pickle.dumps(trained)), copy.deepcopy(trained)):
        assert type(copied) is type(trained) and copied.header() == trained.header()
        torch.testing.assert_close(copied.state_dict(), trained.state_dict(), rtol=0, atol=0)


class _Own(GenerativeModel):
    def __init__(self, spec, *, width=3, lr=0.1):
        super().__init__(spec)
        self.save_hyperparameters(ignore=["spec"], logger=False)


class _Heir(_Own):
    def __init__(self, spec, *, depth=2, **options):
        super().__init__(spec, **options)


def test_options_are_those_that_lightning_keeps():
    class Lightnings(HyperparametersMixin):
        def __init__(self, spec, *, width=3, lr=0.1):
            super().__init__()
            self.save_hyperparameters(ignore=["spec"], logger=False)

    class Heir(Lightnings):
        def __init__(self, spec, *, depth=2, **options):
            super().__init__(spec, **options)

    for own, theirs in ((_Own, Lightnings), (_Heir, Heir)):
        assert own(SPEC, lr=0.5).hparams == dict(theirs(SPEC, lr=0.5).hparams)
    assert _Heir(SPEC, width=7).options == {"width": 7, "lr": 0.1, "depth": 2}
