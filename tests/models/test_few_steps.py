"""Models of few steps: one network for every step length, under the contract of diffusion models."""

from __future__ import annotations

import types

import pytest
import torch

import genmodels as gm
from genmodels.core.data import Batch, DataSpec, Latents
from genmodels.core.errors import InputError
from genmodels.core.random import KeyedGenerator
from genmodels.core.samples import SamplingOptions
from genmodels.diffusion import X0
from genmodels.models.checkpoint import load_model
from genmodels.models.ddpm import DDPM
from genmodels.models.few_steps import ConsistencyModel, MeanFlowModel, ProgressiveModel, ShortcutModel
from genmodels.models.flow_matching import FlowMatchingModel
from tests.models.test_flow_matching import DIGITS, SMALL, batch, small
from tests.untrained import write

DIT = {"_target_": "genmodels.nn.dit.DiT", "width": 16, "depth": 1, "heads": 2}
FLOW_MAPS = [ShortcutModel, MeanFlowModel]


@pytest.mark.parametrize("net", [SMALL, DIT], ids=["unet", "dit"])
@pytest.mark.parametrize("kind", FLOW_MAPS)
def test_losses_are_keyed_and_have_gradients(kind, net):
    model = small(kind, net=net, share=0.5)
    losses = [model.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")) for _ in range(2)]
    assert torch.equal(losses[0].per_example, losses[1].per_example) and losses[0].per_example.shape == (6,)
    losses[0].value.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.core.parameters())


@pytest.mark.parametrize("net", [SMALL, DIT], ids=["unet", "dit"])
def test_mean_flow_trains_in_half_precision(net):
    model, keyed = small(MeanFlowModel, net=net, share=0.5), KeyedGenerator(0, torch.arange(6), "train")
    whole = model.loss(batch(), keyed).value
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model.loss(batch(), keyed).value, whole, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", FLOW_MAPS)
def test_samples_of_few_steps_and_what_else_the_velocity_serves(kind):
    model = small(kind)
    for steps in (1, 2, 4):
        several = model.sample(3, steps=steps, guidance=2.0)
        assert several.made["sampler"] == "flow_map" and several.made["evaluations"] == steps
        assert (several.x[2].int() - model.sample(1, steps=steps, start=2, guidance=2.0).x[0].int()).abs().max() <= 1
    assert model.sample(2, sampler="heun", steps=3).x.shape == (2, 1, 8, 8)
    few = batch(1)
    assert model.log_likelihood(few, weights="raw").nats.isfinite().all()
    found = model.ode_likelihood(few, weights="raw", solver="heun", steps=2, divergence="hutchinson", probes=1)
    assert found.kind == "ode" and found.nats.isfinite().all()


def test_the_length_of_a_step_reaches_the_network():
    model = small(ShortcutModel, DataSpec("plane", (2,)), net={"hidden": 16, "depth": 1})
    t, x = torch.ones(3), torch.randn(3, 2)
    one, other = (model.core(x, t, until=torch.full((3,), s)).output for s in (0.0, 0.5))
    assert (one - other).abs().max() > 1e-4
    assert torch.equal(model.core(x, t).output, model.core(x, t, until=t).output)


# ---- students ----


@pytest.mark.parametrize("kind, options", [(ConsistencyModel, {}), (ProgressiveModel, {"steps": 2})])
def test_a_student_begins_as_its_teacher_and_needs_it_no_more_when_trained(kind, options, tmp_path):
    teacher = small(FlowMatchingModel)
    student = kind(DIGITS, distill=write(teacher, tmp_path / "t.ckpt"), net=SMALL, **options)
    student.initialize(batch())
    assert all(torch.equal(a, b) for a, b in zip(student.core.parameters(), teacher.core.parameters(), strict=True))
    assert torch.equal(student.weights().net.head.weight, teacher.core.net.head.weight)
    drawn = torch.get_rng_state()
    losses = [student.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(losses[0].per_example, losses[1].per_example)
    losses[0].value.backward()
    assert all(torch.isfinite(p.grad).all() for p in student.core.parameters())
    again, _ = load_model(write(student, tmp_path / "s.ckpt"), device="cpu")
    (tmp_path / "t.ckpt").unlink()
    made = again.sample(2).made
    assert made["sampler"] == kind.default_sampler and made["evaluations"] == 2
    assert again.sample(2, sampler=kind.default_sampler).made["evaluations"] == 2


def test_teachers_of_another_kind_teach_and_those_of_other_data_do_not(tmp_path):
    """A DDPM on its own path; its weights mean something else, so that the student begins with its own."""
    path = write(small(DDPM, parameterisation="eps"), tmp_path / "ddpm.ckpt")
    student = ProgressiveModel(DIGITS, distill=path, net=SMALL, steps=1, teacher_steps=2)
    student.initialize(batch())
    assert float(student.core.net.head.weight.detach().abs().max()) == 0
    assert student.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")).value.isfinite()
    other = write(small(FlowMatchingModel, DataSpec("other", (1, 4, 4), levels=17)), tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"distill=.* holds a flow_matching of \(1, 4, 4\)"):
        ConsistencyModel(DIGITS, distill=other, net=SMALL).initialize(batch())
    continuous = write(small(FlowMatchingModel, DataSpec("grey", (1, 8, 8))), tmp_path / "continuous.ckpt")
    with pytest.raises(ValueError, match="distill=.* was trained on continuous data, and this model is for integer"):
        ConsistencyModel(DIGITS, distill=continuous, net=SMALL, class_conditional=False).initialize(batch())
    with pytest.raises(ValueError, match="needs a teacher"):
        ProgressiveModel(DIGITS, net=SMALL)
    with pytest.raises(InputError, match="steps=20: a sampler of this model takes at most num_steps=8"):
        ProgressiveModel(DIGITS, distill=continuous, net=SMALL, steps=20, num_steps=8)


def test_a_student_goes_on_with_the_teacher_it_began_with(tmp_path):
    path, checkpoint = write(small(FlowMatchingModel), tmp_path / "t.ckpt"), {"optimizer_states": [{"state": {}}]}
    begun, again, other = (ConsistencyModel(DIGITS, distill=path, net=SMALL) for _ in range(3))
    begun.initialize(batch())
    begun.on_save_checkpoint(checkpoint)
    for student in (again, other):
        student.on_load_checkpoint(checkpoint)
    step = batch(), KeyedGenerator(0, torch.arange(6), "train")
    assert again.loss(*step).value.isfinite()
    torch.manual_seed(1)
    changed = small(FlowMatchingModel)
    with torch.no_grad():
        next(changed.core.parameters()).add_(1)
    write(changed, tmp_path / "t.ckpt")
    with pytest.raises(InputError, match="distill=.* has changed since this run began"):
        other.loss(*step)


def test_a_teacher_may_be_a_run_folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write(small(FlowMatchingModel), folder / "best.ckpt")
    student = ConsistencyModel(DIGITS, distill=str(folder), net=SMALL)
    student.initialize(batch())
    assert student.loss(batch(), KeyedGenerator(0, torch.arange(6), "train")).value.isfinite()


def test_teachers_without_a_velocity_teach_steps_of_their_own_kind_alone(tmp_path):
    """Estimates of a consistency model are ends of trajectories: following them as means leads nowhere."""
    of_consistency = write(small(ConsistencyModel), tmp_path / "consistency.ckpt")
    teacher = write(small(FlowMatchingModel), tmp_path / "teacher.ckpt")
    steps = write(small(ProgressiveModel, distill=teacher), tmp_path / "steps.ckpt")
    ProgressiveModel(DIGITS, distill=steps, net=SMALL, steps=2).initialize(batch())
    refused = ((ConsistencyModel, of_consistency), (ConsistencyModel, steps), (ProgressiveModel, of_consistency))
    for kind, path in refused:
        with pytest.raises(ValueError, match="has no velocity to follow"):
            kind(DIGITS, distill=path, net=SMALL).initialize(batch())
    student = FlowMatchingModel(DIGITS, net=SMALL, reflow=of_consistency, reflow_pairs=4)
    with pytest.raises(ValueError, match="has no velocity to follow"):
        student.loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))


def test_a_teacher_is_not_asked_for_a_class_that_it_has_not_learned(tmp_path):
    path = write(small(FlowMatchingModel, cond_drop=0.0), tmp_path / "teacher.ckpt")
    for options in ({}, {"class_conditional": False}):
        with pytest.raises(ValueError, match="was trained with cond_drop=0"):
            ConsistencyModel(DIGITS, distill=path, net=SMALL, **options).initialize(batch())
    ConsistencyModel(DIGITS, distill=path, net=SMALL, cond_drop=0.0).initialize(batch())
    FlowMatchingModel(DIGITS, net=SMALL, reflow=path, reflow_pairs=4).loss(
        batch(), KeyedGenerator(0, torch.arange(6), "train"))


def test_without_a_velocity_there_is_no_likelihood():
    model = small(ConsistencyModel)
    found = model.log_likelihood(batch())
    assert found.kind == "unnormalised" and found.nats.isnan().all() and "no velocity" in found.made["reason"]
    with pytest.raises(InputError, match="a consistency has no velocity, and no likelihood by the ODE"):
        model.ode_likelihood(batch())
    assert not model.has_ode_likelihood and small(ShortcutModel).has_ode_likelihood


def test_without_a_velocity_only_its_own_sampler_and_no_latents(tmp_path):
    """f(x, t) = x is the exact consistency function of N(0, I), which Heun's method takes to twice the deviation."""
    plane = DataSpec("plane", (2,))
    model = small(ConsistencyModel, plane, net={"hidden": 16, "depth": 1}, num_steps=1000)
    at_log_snr = X0().to_prediction
    model.core.at_log_snr = lambda x, log_snr, cond=None, mask=None, estimate=None: at_log_snr(x, x, log_snr)
    part = {"known": torch.zeros(2), "keep": torch.tensor([True, False]), "rounds": 3}
    drawn = [model.sample(2000, steps=2).x, model.sample(2000, steps=1, along="cosine").x,
             model.sample(2000, steps=20, **part).x[:, 1]]
    assert all(abs(float(x.std()) - 1) < 4 / (2 * x.numel()) ** 0.5 for x in drawn)
    for sampler in ("heun", "ddpm", "flow_map"):
        with pytest.raises(InputError, match=f"no velocity, which sampler={sampler} follows"):
            model.sample(2, sampler=sampler)
    item = Batch(torch.zeros(1, 2), index=torch.arange(1))
    with pytest.raises(InputError, match="no velocity, and no latents"):
        model.latents(item)
    with pytest.raises(InputError, match="no velocity to follow"):
        model.from_latents(Latents((torch.zeros(1, 2),)))


def test_a_student_takes_only_the_steps_it_has_learned(tmp_path):
    student = small(ProgressiveModel, distill=write(small(FlowMatchingModel), tmp_path / "t.ckpt"), steps=2)
    made = student.sample(1, steps=2).made
    assert made["evaluations"] == 2 and made["sampler"] == "flow_map" and student.swept_steps == (2,)
    with pytest.raises(InputError, match="steps=4: this model has learned 2 equal steps"):
        student.sample(1, steps=4)
    for key, value in {"spacing": "karras", "along": "cosine", "rounds": 3}.items():
        with pytest.raises(InputError, match=key):
            student.sample(1, **{key: value})
    times = []
    student.core.register_forward_pre_hook(lambda module, given: times.append(float(given[1][0])))
    for strength, taken in ((0.2, [0.5]), (0.6, [0.5]), (0.9, [1.0, 0.5])):
        times.clear()
        edited = student.sample(1, edit=batch().x[0], strength=strength).made
        assert times == taken and edited["strength"] == taken[0]


def test_a_student_edits_items_by_their_number(tmp_path):
    student = small(ProgressiveModel, distill=write(small(FlowMatchingModel), tmp_path / "t.ckpt"), steps=2)
    student.run_config = {"data": {"_target_": "genmodels.data.vision.Digits"}}
    write(student, tmp_path / "s.ckpt")
    loaded = gm.load(tmp_path / "s.ckpt", device="cpu")
    assert loaded.sample(1, edit=3, strength=0.3, progress=False).made["strength"] == 0.5
    with pytest.raises(InputError, match="inpaint is not possible with a progressive, which .*s.ckpt holds"):
        loaded.sample(1, inpaint=3, mask="left")


def test_a_weighting_without_the_noisy_end_is_refused_by_a_plain_trainer_too(tmp_path):
    teacher = write(small(FlowMatchingModel), tmp_path / "t.ckpt")
    student = small(ProgressiveModel, distill=teacher, weighting="min_snr", path="vp_cosine")
    with pytest.raises(InputError, match="nearly 0 at the noisy end"):
        student.loss(batch(), KeyedGenerator(0, torch.arange(len(batch())), "train"))


@pytest.mark.parametrize("kind", FLOW_MAPS)
def test_the_steps_of_a_flow_map_are_of_its_own_path(kind):
    model = small(kind)
    for sampler in (None, "flow_map"):
        with pytest.raises(InputError, match="those of its own path"):
            model.sample(1, along="linear", sampler=sampler)
    assert model.sample(1, along="cosine", sampler="heun", steps=2).made["along"] == "cosine"


@pytest.mark.parametrize("steps, most", [(8, -1), (4, 4)])
def test_the_stages_are_those_of_the_whole_training(steps, most):
    """Of a trainer without a number of steps too."""
    model = small(ConsistencyModel)
    model._trainer = types.SimpleNamespace(max_steps=most, estimated_stepping_batches=8, global_step=2)
    model.loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))
    assert model.objective.progress == 2 / steps
    model._trainer = types.SimpleNamespace(max_steps=-1, estimated_stepping_batches=-1, global_step=3)
    model.loss(batch(), KeyedGenerator(0, torch.arange(6), "train"))
    assert model.objective.progress == 2 / steps  # of a loader of unknown length nothing is known


def test_validation_is_the_energy_distance_of_samples():
    """Of a model whose samples are its items it is about zero, of one far away it is not."""
    plane = DataSpec("plane", (2,))
    distances = []
    for shift in (0.0, 3.0):
        model = small(ConsistencyModel, plane, net={"hidden": 16, "depth": 1})
        model.log = lambda *args, **kwargs: None
        near = model.sampler(model.sampler.plan(model.core.schedule, SamplingOptions(steps=1)), model.weights(),
                             (600, 2), SamplingOptions(), KeyedGenerator(1, torch.arange(600), "sample")).x
        model.validation_step(Batch(near + shift, index=torch.arange(600)), 0)
        model.on_validation_epoch_end()
        distances.append(model.figures["val/energy_distance"])
    assert abs(distances[0]) < 0.03 < 1 < distances[1]


def test_validation_of_one_item_has_a_figure():
    model = small(ConsistencyModel, DataSpec("plane", (2,)), net={"hidden": 16, "depth": 1})
    model.log = lambda *args, **kwargs: None
    model.validation_step(Batch(torch.ones(1, 2), index=torch.arange(1)), 0)
    model.on_validation_epoch_end()
    assert 0 < model.figures["val/energy_distance"] < 100


def test_the_figure_of_validation_does_not_depend_on_the_number_of_processes():
    """It compares the first thousand items of the split, whichever process has them."""
    plane = DataSpec("plane", (2,))
    model = small(ConsistencyModel, plane, net={"hidden": 16, "depth": 1})
    model.log = lambda *args, **kwargs: None
    x = torch.linspace(0, 5, 2400).cumsum(0)[:, None].expand(-1, 2) / 1000
    figures = []
    for shares in ([slice(None)], [slice(0, None, 2), slice(1, None, 2)]):
        for rows in shares:
            model.validation_step(Batch(x[rows], index=torch.arange(2400)[rows]), 0)
        model.on_validation_epoch_end()
        figures.append(model.figures["val/energy_distance"])
    assert abs(figures[0] - figures[1]) < 1e-6 * figures[0]


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match="leave fourier out"):
        ShortcutModel(DIGITS, net=SMALL | {"fourier": [2]})
    with pytest.raises(ValueError, match="power of two"):
        ShortcutModel(DIGITS, net=SMALL, finest=100)


@pytest.mark.parametrize("kind", FLOW_MAPS)
def test_a_coupling_pairs_the_items_of_a_flow_map_with_their_noise(kind):
    """With the exact assignment the straight lines of a batch are shorter, and all noise is used."""
    plane, n = DataSpec("plane", (2,)), 64
    x0 = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    drawn = []
    for coupling in ("independent", "ot"):
        objective = small(kind, plane, net={"hidden": 16, "depth": 1}, coupling=coupling).objective
        drawn.append(objective.noise(x0, None, KeyedGenerator(0, torch.arange(n), "train")))
    assert torch.equal(*(noise.sort(0).values for noise in drawn))
    assert (drawn[1] - x0).square().sum() < 0.5 * (drawn[0] - x0).square().sum()
