"""What every model has from its base: numbers of samples, classes, and the condition of a batch."""

import pytest
import torch

from genmodels.core.data import Batch, DataSpec
from genmodels.models.ddpm import DDPM
from genmodels.models.energy import EnergyModel
from genmodels.models.nsf import NSF
from genmodels.models.score import ScoreModel

SPEC = DataSpec("plane", (2,), num_classes=3)
SMALL = {"net": {"hidden": 8, "depth": 1}}
MODELS = {
    "flow": lambda told: NSF(SPEC, layers=1, hidden=8, class_conditional=told),
    "diffusion": lambda told: DDPM(SPEC, num_steps=4, class_conditional=told, **SMALL),
    "score": lambda told: ScoreModel(SPEC, class_conditional=told, **SMALL),
}


@pytest.mark.parametrize("name", MODELS)
def test_classes_are_told_where_options_and_data_say_so(name):
    batch = Batch(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    told, blind = MODELS[name](True), MODELS[name](False)
    assert told.num_classes == 3 and torch.equal(told._cond(batch), batch.cond)
    assert blind.num_classes is None and blind._cond(batch) is None


@pytest.mark.parametrize("name", [*MODELS, "energy"])
def test_numbers_of_samples(name):
    model = MODELS[name](False) if name in MODELS else EnergyModel(SPEC, net={"hidden": [8]})
    assert model.numbered(3, 5).tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        model.sample(0)
    with pytest.raises(ValueError, match="start must be at least 0, got -1"):
        model.sample(1, start=-1)
