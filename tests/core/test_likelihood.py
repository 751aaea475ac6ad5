"""The result type: bits/dim against numbers worked by hand, and errors that are never mixed up."""

from __future__ import annotations

import math

import pytest
import torch

from genmodels.core.errors import RunError
from genmodels.core.likelihood import Likelihood, Profile, bits_per_dim, paired


def made(nats, **kwargs):
    options = {"kind": "lower_bound", "dims": 784, "levels": 256} | kwargs
    return Likelihood(torch.as_tensor(nats, dtype=torch.float64), **options)


def test_bits_per_dim_by_hand():
    assert math.isclose(float(bits_per_dim(torch.tensor(-2000.0), 784, 256)), 3.6803444921, rel_tol=1e-10)
    result = made([-1800.0, -2000.0, -2200.0])
    assert math.isclose(result.mean_bits_per_dim(), 3.6803444921, rel_tol=1e-10)
    assert math.isclose(result.standard_error("bits_per_dim").total, 0.2124847883, rel_tol=1e-9)


@pytest.mark.parametrize("levels", [2, 17, 256, 65536])
def test_the_uniform_model_scores_log2_levels(levels):
    nats = -torch.full((5,), 64 * math.log(levels), dtype=torch.float64)
    assert math.isclose(made(nats, dims=64, levels=levels).mean_bits_per_dim(), math.log2(levels), rel_tol=1e-12)


def test_eight_bits_are_not_hard_coded():
    nats = -torch.full((1,), 64 * math.log(17), dtype=torch.float64)
    wrong = -float(nats) / 64 / math.log(2) + (8 - math.log2(17))
    assert not math.isclose(wrong, made(nats, dims=64, levels=17).mean_bits_per_dim(), rel_tol=1e-3)


def test_lengths_are_weighed_by_their_dimensions():
    result = made([-10.0, -100.0], dims=torch.tensor([5, 200]))
    assert math.isclose(result.mean_bits_per_dim(), 110 / 205 / math.log(2))
    mean_of_ratios = (10 / 5 + 100 / 200) / 2 / math.log(2)
    assert abs(result.mean_bits_per_dim() - mean_of_ratios) > 0.5


def test_batches_do_not_matter():
    nats = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 300
    whole = made(nats, index=torch.arange(50), stderr=torch.ones(50))
    parts = [
        made(nats[i : i + 7], index=torch.arange(i, min(i + 7, 50)), stderr=torch.ones(min(7, 50 - i)))
        for i in (35, 0, 7, 42, 14, 21, 28, 49)
    ]
    joined = Likelihood.concatenate(parts).in_index_order()
    assert torch.equal(joined.nats, whole.nats) and torch.equal(joined.index, whole.index)
    assert joined.standard_error() == whole.standard_error()
    assert whole.standard_error().draws == pytest.approx(math.sqrt(50) / 50)


@pytest.mark.parametrize("index", [[0, 1, 1], [0, 1, 3]])
def test_a_lost_or_repeated_item_is_named(index):
    with pytest.raises(RunError, match="missing .*repeated"):
        made([-1.0, -2.0, -3.0], index=torch.tensor(index)).in_index_order()


@pytest.mark.parametrize("change", [{"kind": "exact"}, {"levels": 17}, {"made": {"steps": 3}}])
def test_unlike_results_are_not_joined(change):
    with pytest.raises(ValueError, match="likelihoods differ"):
        Likelihood.concatenate([made([-1.0]), made([-1.0], **change)])


def test_a_value_that_is_not_finite_is_reported_never_dropped():
    result = made([-1.0, math.nan, -3.0], index=torch.tensor([4, 5, 6]))
    assert result.nonfinite.tolist() == [5]
    assert result.mean_nats() is None and result.mean_bits_per_dim() is None and result.standard_error() is None


def test_continuous_data_have_no_bits_per_dim():
    result = made([-1.0, -2.0], levels=None, dims=2)
    assert result.mean_nats() == -1.5 and result.standard_error().total == pytest.approx(0.5)
    with pytest.raises(ValueError, match="integer data"):
        result.mean_bits_per_dim()


@pytest.mark.parametrize("options, shown", [
    ({"levels": None, "dims": 2, "kind": "exact"}, "= 1.5000(5000) nats"),
    ({"levels": None, "dims": 2, "kind": "unnormalised"}, "- 1.5000(5000) nats"),
    ({"levels": 2, "dims": 2, "kind": "exact", "made": {"reason": "of no weight here"}}, "= 1.0820(3607) bits/dim"),
    ({"levels": 2, "dims": 2, "kind": "unnormalised", "made": {"reason": "samples alone"}},
     "no likelihood: samples alone"),
])  # fmt: skip
def test_what_is_printed_is_the_negative_logarithm(options, shown):
    assert str(made([-1.0, -2.0], **options)) == shown


def test_unknown_kind():
    with pytest.raises(ValueError, match="lower_bound"):
        made([-1.0], kind="bound")


def test_profiles_add_only_over_equal_bins():
    edges = torch.tensor([5.0, 0.0, -5.0])
    a, b = (Profile(edges, torch.tensor([1.0, 2.0]), items) for items in (3, 4))
    both = a + b
    assert both.items == 7 and both.nats.tolist() == [2.0, 4.0]
    with pytest.raises(ValueError, match="different"):
        a + Profile(edges + 1, torch.tensor([1.0, 2.0]), 1)


def test_the_error_of_items_of_unlike_length_is_that_of_a_ratio():
    """Against the spread of the value over many draws of items; length by itself has no part in it."""
    generator = torch.Generator().manual_seed(0)
    dims = 80 * torch.randint(100, 900, (4000, 30), generator=generator)
    each = 0.3 + 0.05 * torch.randn(4000, 30, generator=generator, dtype=torch.float64)
    found = [Likelihood(-rate * size, "exact", size) for rate, size in zip(each, dims, strict=True)]
    values = torch.tensor([one.mean_nll_per_dim() for one in found])
    stated = torch.tensor([one.standard_error("nats_per_dim").total for one in found])
    # The mean of 4,000 stated errors against the standard deviation of 4,000 values, itself known to 1/sqrt(8000).
    assert float(stated.mean() / values.std()) == pytest.approx(1, abs=0.05)
    assert Likelihood(-0.3 * dims[0].double(), "exact", dims[0]).standard_error("nats_per_dim").total < 1e-9
    # Taking every item for one of mean length is seen.
    wrong = found[0].standard_error().total / float(dims[0].double().mean())
    assert wrong > 3 * float(stated.mean())
    same = made([-100.0, -120.0, -90.0])
    assert same.standard_error("nats_per_dim").total == pytest.approx(same.standard_error().total / float(same.dims[0]))


def estimates(spread: float, noise: float, n: int = 40, trials: int = 2000, replicates: int = 2) -> list[Likelihood]:
    """Values of items of a known spread, each the mean of replicates with a noise of its own size, as bounds are."""
    generator = torch.Generator().manual_seed(0)
    size = noise * (0.5 + torch.rand(trials, n, 1, generator=generator, dtype=torch.float64))
    drawn = -100 + spread * torch.randn(trials, n, 1, generator=generator, dtype=torch.float64)
    drawn = drawn + size * torch.randn(trials, n, replicates, generator=generator, dtype=torch.float64)
    errors = drawn.std(2) / math.sqrt(replicates)
    return [made(values, stderr=error) for values, error in zip(drawn.mean(2), errors, strict=True)]


@pytest.mark.parametrize("spread, noise", [(3.0, 0.5), (3.0, 3.0), (1.0, 8.0), (0.0, 2.0)])
def test_the_parts_of_an_error_add_up_and_none_is_larger_than_the_whole(spread, noise):
    """Against the spread of the mean over new items and draws, and against its known parts."""
    found = estimates(spread, noise)
    parts = [one.standard_error() for one in found]
    for one in parts:
        assert one.total == pytest.approx(math.hypot(one.items, one.draws)) and one.draws <= one.total
    means = torch.tensor([one.mean_nats() for one in found], dtype=torch.float64)
    total = torch.tensor([one.total**2 for one in parts]).mean().sqrt()
    assert 0.95 * means.std() < total < 1.1 * means.std()  # where the items vanish the larger of two estimates is taken
    size = noise * math.sqrt(13 / 12 / 2)  # of the mean of two draws; E (1/2 + U)^2 = 13/12
    draws = math.sqrt(sum(one.draws**2 for one in parts) / len(parts))
    assert draws == pytest.approx(size / math.sqrt(40), rel=0.05)
    if spread >= noise:
        items = math.sqrt(sum(one.items**2 for one in parts) / len(parts))
        assert items == pytest.approx(spread / math.sqrt(40), rel=0.05)


def test_without_replicates_the_draws_are_in_the_part_of_the_items():
    known = estimates(3.0, 3.0)[0]
    alone = made(known.nats).standard_error()
    assert alone.draws is None and alone.total == alone.items == pytest.approx(float(known.nats.std() / math.sqrt(40)))


def test_the_error_of_a_constant_is_shared_by_all_items():
    values = torch.linspace(-2, 2, 101)
    of = {"levels": None, "dims": 1}
    without = made(values, kind="exact", **of).standard_error().total
    error = made(values, kind="ais", made={"log_z_stderr": 0.4}, **of).standard_error()
    assert error.log_z == 0.4 and error.total == pytest.approx(math.hypot(without, 0.4))


@pytest.mark.parametrize("spread, noise, shown", [(3.0, 0.5, True), (3.0, 3.0, False), (0.0, 2.0, False)])
def test_values_of_single_items_are_shown_where_they_stand_out_of_their_noise(spread, noise, shown):
    found = [one.single_values() for one in estimates(spread, noise, n=400, trials=50)]
    size = noise * math.sqrt(13 / 12 / 2) / 784
    assert math.sqrt(sum(one.noise**2 for one in found) / 50) == pytest.approx(size, rel=0.03)
    assert math.sqrt(sum(one.spread**2 for one in found) / 50) == pytest.approx(spread / 784, rel=0.05, abs=0.6 * size)
    assert {one.shown for one in found} == {shown}
    from genmodels.core.data import DataSpec
    from genmodels.evaluation.likelihood import row

    entry = row(estimates(spread, noise, n=400, trials=1)[0], DataSpec("squares", (784,), levels=256))
    assert bool(entry.worst) == bool(entry.best) == shown
    assert entry.single.noise == pytest.approx(size / math.log(2), rel=0.1)  # in bits/dim, the line's unit


@pytest.mark.parametrize("options, noise", [
    ({"kind": "exact", "levels": None}, 0.0), ({"kind": "exact", "levels": None, "made": {"noise": 0.1}}, None),
    ({"kind": "lower_bound"}, None), ({"kind": "ode", "levels": None, "made": {"divergence": "exact"}}, 0.0),
    ({"kind": "ode", "levels": None, "made": {"divergence": "rademacher"}}, None), ({"kind": "ais"}, None),
    ({"kind": "exact"}, 0.0), ({"kind": "ais", "levels": None}, 0.0),
    ({"kind": "ais", "levels": None, "made": {"dequantisation": "uniform within gaps"}}, None),
])  # fmt: skip
def test_noise_is_none_or_unknown_by_how_a_value_is_made(options, noise):
    assert made([-100.0, -120.0, -90.0], **options).single_values().noise == noise


def test_pairs_by_hand():
    a, b = (torch.tensor(v, dtype=torch.float64) for v in ([3.1, 3.3, 3.6], [3.0, 3.25, 3.4]))
    assert paired(a, b) == (pytest.approx(0.1166666667, abs=1e-10), pytest.approx(0.0440958552, abs=1e-10))


def test_the_error_of_pairs_of_unlike_lengths_is_that_of_their_ratio():
    """Length is no difference: against the spread of 400 repetitions."""
    found, generator = [], torch.Generator().manual_seed(0)
    for _ in range(400):
        dims = torch.randint(100, 900, (100,), generator=generator)
        noise = 0.01 * dims * torch.randn(100, generator=generator, dtype=torch.float64)
        mean, error = paired(0.02 * dims + noise, torch.zeros(100), dims)
        found.append((100 * mean / float(dims.sum()), error / float(dims.double().mean())))
    values, errors = torch.tensor(found).unbind(1)
    assert float(errors.mean()) == pytest.approx(float(values.std()), rel=0.15)
    assert paired(0.02 * dims + noise, torch.zeros(100))[1] > 1.2 * error


@pytest.mark.parametrize("unit, of_text", [("bits_per_character", True), ("bits_per_dim", False)])
def test_the_error_of_a_text_holds_the_dependence_of_neighbours(unit, of_text):
    """An autoregression of coefficient 0.5 against the spread of 200 repetitions; as if independent it is 1.7 times."""
    generator, n, found = torch.Generator().manual_seed(0), 900, []
    for _ in range(200):
        steps, nats = torch.randn(n, generator=generator, dtype=torch.float64).tolist(), [0.0]
        for step in steps:
            nats.append(0.5 * nats[-1] + step)
        values = torch.tensor(nats[1:], dtype=torch.float64) - 100
        one = Likelihood(values, "exact", 64, 256)
        found.append((float(values.mean()), one.standard_error(unit).total * 64 * math.log(2),
                      paired(values, torch.zeros(n), of_text=of_text)[1]))
    values, errors, pairs = torch.tensor(found).unbind(1)
    low, high = (0.85, 1.15) if of_text else (0.5, 0.7)  # mutant
    assert low < float(errors.mean() / values.std()) < high and low < float(pairs.mean() / values.std()) < high


def test_an_unknown_error_of_the_draws_leaves_that_of_the_items_unknown():
    error = Likelihood(torch.tensor([-1.0, -2.0, 0.0]), "lower_bound", 4,
                       stderr=torch.tensor([0.1, math.nan, 0.1])).standard_error()
    assert math.isnan(error.items) and math.isnan(error.draws)


def test_items_without_dimensions_have_no_value_of_their_own():
    values = [Likelihood(torch.tensor(nats), "exact", torch.tensor(dims)).single_values()
              for nats, dims in (([-3.0, -8.0, 0.0], [3, 4, 0]), ([-3.0, -8.0], [3, 4]))]
    assert values[0] == values[1] and values[0].spread > 0
