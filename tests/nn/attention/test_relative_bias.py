"""ALiBi: slopes, and the two forms under causality."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import interpolate

from genmodels.nn.attention import (
    ALiBi,
    Attention,
    MelPosition,
    MusicTransformer,
    Rotary,
    Rotary2d,
    Shaw,
    Swin2d,
    T5Bias,
    TransformerXL,
)
from genmodels.nn.attention.relative_bias import cubic_weights, resample
from genmodels.verification.attention_reference import t5_bucket
from tests.mutants.attention_positions import SwappedSides
from tests.nn.attention.table import draw, worst


def slopes(heads):
    return (-ALiBi(heads, heads).table(torch.tensor([-1])))[:, 0].tolist()


def test_slopes():
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert slopes(1) == [2.0**-8]
    assert slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    assert len(set(slopes(13))) == 13


def test_precision_of_the_module_does_not_round_the_slopes():
    there_and_back = ALiBi(16, 16).half().double()
    assert torch.equal(there_and_back.table(torch.tensor([-1])), ALiBi(16, 16).table(torch.tensor([-1])))


def test_both_forms_agree_when_causal():
    torch.manual_seed(0)
    both = Attention(8, 2, ALiBi(8, 2), causal=True)
    past = Attention(8, 2, ALiBi(8, 2, symmetric=False), causal=True)
    past.load_state_dict(both.state_dict())
    x = torch.randn(1, 6, 8)
    assert torch.equal(both(x)[0], past(x)[0])
    assert ALiBi(8, 2, symmetric=False).table(torch.tensor([3]))[0] == 0


def test_nothing_is_stored():
    assert list(ALiBi(8, 2).state_dict()) == []


# ---- swin: the published order of the index, and resampling ----


def test_index_vectors():
    assert Swin2d.index((2, 2)).tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]
    assert Swin2d.index((2, 3)).tolist() == [
        [7, 6, 5, 2, 1, 0], [8, 7, 6, 3, 2, 1], [9, 8, 7, 4, 3, 2],
        [12, 11, 10, 7, 6, 5], [13, 12, 11, 8, 7, 6], [14, 13, 12, 9, 8, 7],
    ]  # fmt: skip
    assert Swin2d.index((3, 2))[0].tolist() == [7, 6, 4, 3, 1, 0]


def table_of(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2 * size[0] - 1) * (2 * size[1] - 1), 3, generator=generator, dtype=torch.float64)


SIZES = [((3, 3), (5, 5)), ((4, 3), (2, 7)), ((2, 5), (5, 2)), ((4, 4), (3, 4)), ((1, 4), (3, 2)), ((7, 7), (8, 12))]


@pytest.mark.parametrize("size, space", SIZES)
def test_resampling_is_bicubic_with_aligned_corners(size, space):
    table = table_of(size)
    grid = table.view(2 * size[0] - 1, 2 * size[1] - 1, 3).permute(2, 0, 1)[None]
    target = (2 * space[0] - 1, 2 * space[1] - 1)
    wanted = interpolate(grid, target, mode="bicubic", align_corners=True)[0].permute(1, 2, 0).flatten(0, 1)
    assert torch.allclose(resample(table, size, space), wanted, atol=1e-12)


@pytest.mark.parametrize("size, space", [*SIZES, ((3, 4), (1, 4)), ((5, 2), (3, 1)), ((3, 3), (1, 1))])
def test_properties_of_resampling(size, space):
    table, shape = table_of(size), (2 * size[0] - 1, 2 * size[1] - 1, 3)
    target = (2 * space[0] - 1, 2 * space[1] - 1, 3)
    assert torch.allclose(resample(table, size, size), table, atol=1e-12)
    assert torch.allclose(resample(torch.ones_like(table), size, space), torch.ones(1, dtype=torch.float64), atol=1e-12)
    got = resample(table, size, space).view(target)
    for axis in (0, 1):
        mirrored = resample(table.view(shape).flip(axis).flatten(0, 1), size, space).view(target)
        assert torch.allclose(mirrored, got.flip(axis), atol=1e-12)
    assert torch.allclose(got[space[0] - 1, space[1] - 1], table.view(shape)[size[0] - 1, size[1] - 1], atol=1e-12)


def test_weights_of_cubic_convolution():
    for source, target in [(5, 9), (9, 5), (3, 1), (1, 3), (7, 7)]:
        weights = cubic_weights(source, target, like=torch.zeros((), dtype=torch.float64))
        assert weights.shape == (target, source)
        assert torch.allclose(weights.sum(1), torch.ones(target, dtype=torch.float64), atol=1e-12)


def test_the_index_is_not_saved_and_other_sizes_work():
    torch.manual_seed(0)
    attention = Attention(8, 2, Swin2d(8, 2, size=(3, 4)))
    assert list(attention.position.state_dict()) == ["table"] and attention.position.table.shape == (35, 2)
    for space in [(3, 4), (5, 7), (1, 6), (1, 1), (8, 2)]:
        assert attention(torch.randn(2, space[0] * space[1], 8), space=space)[0].isfinite().all()
    with pytest.raises(ValueError, match="35 positions are not the 3 x 4 of Swin2d"):
        attention(torch.randn(2, 35, 8))


def test_errors():
    with pytest.raises(ValueError, match="at least 1 each"):
        Swin2d(8, 2, size=(0, 3))


# ---- t5: where buckets begin, exactly ----


def bucket(r, **options):
    return T5Bias(8, 2, **options).bucket(torch.tensor(r)).tolist()


def first_of_each(buckets):
    """The n at which a new bucket begins."""
    return [n for n in range(1, len(buckets)) if buckets[n] != buckets[n - 1]]


def test_two_ways():
    past = bucket([-n for n in range(1000)])
    assert past[:8] == list(range(8))
    assert first_of_each(past)[7:] == [8, 12, 16, 23, 32, 46, 64, 91] and past[91:] == [15] * 909
    assert bucket([1, 8, 128]) == [17, 24, 31]
    assert bucket(list(range(1, 1000))) == [16 + b for b in past[1:]]


def test_one_way():
    past = bucket([-n for n in range(1000)], bidirectional=False)
    assert past[:16] == list(range(16))
    starts = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert first_of_each(past)[15:] == starts and past[113:] == [31] * 887
    assert bucket([1, 5, 900], bidirectional=False) == [0, 0, 0]


@pytest.mark.parametrize("buckets, max_distance, two_ways",
                         [(32, 128, True), (32, 128, False), (8, 6, True), (64, 500, True), (10, 40, False)])
def test_the_published_formula(buckets, max_distance, two_ways):
    r = list(range(-600, 601))
    got = bucket(r, buckets=buckets, max_distance=max_distance, bidirectional=two_ways)
    assert got == [t5_bucket(n, buckets, max_distance, two_ways) for n in r]


@pytest.mark.parametrize("exact, buckets", [(8, 16), (16, 32)])
def test_both_precisions_of_the_logarithm_agree_with_the_integers(exact, buckets):
    n = torch.arange(exact, 128)
    for dtype in (torch.float32, torch.float64):
        far = torch.log(n.to(dtype) / exact) / math.log(128 / exact) * (buckets - exact)
        wanted = (exact + far.long()).clamp(max=buckets - 1)
        got = T5Bias(8, 2, buckets=buckets, bidirectional=False).bucket(-n)
        assert torch.equal(got, wanted)


def test_the_bias_is_not_scaled():
    position = T5Bias(8, 2)
    bias = position.score_bias(torch.zeros(1, 2, 3, 4), 0, 0, 3, 3)
    assert torch.equal(bias[0, :, 0, 1], position.weight[17]) and torch.equal(bias[0, :, 2, 1], position.weight[1])


@pytest.mark.parametrize("options, words", [
    ({"buckets": 7}, "cannot be halved"),
    ({"buckets": 2}, "at least 2 are needed"),
    ({"buckets": 32, "max_distance": 8}, "must exceed the 8 exact"),
])  # fmt: skip
def test_errors_of_t5(options, words):
    with pytest.raises(ValueError, match=words):
        T5Bias(8, 2, **options)


# ---- mel positions: a shift in time changes nothing, one in frequency does ----


TIMES = [None, TransformerXL, lambda D, H: Shaw(D, H, K=2), ALiBi, Rotary]


def build(time):
    torch.manual_seed(0)
    position = MelPosition(8, 2, n_freq=4, time=time and time(8, 2))
    attention = Attention(8, 2, position).double()
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


@torch.no_grad()
def moved(attention, axis):
    """How the output changes when a sound in silence moves by one along an axis (0 frequency, 1 time)."""
    x = torch.zeros(1, 4, 6, 8, dtype=torch.float64)
    x[0, 1:3, 1:4] = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    sound = x.any(-1)
    shifted = x.roll(1, axis + 1)

    def run(x, valid):
        return attention(x.flatten(1, 2), mask=valid.flatten(1)[:, None])[0].view_as(x)

    before, after = run(x, sound), run(shifted, sound.roll(1, axis + 1))
    return float((before.roll(1, axis + 1) - after).abs().max())


@pytest.mark.parametrize("time", TIMES)
def test_time_is_relative_and_frequency_is_absolute(time):
    attention = build(time)
    assert moved(attention, 1) < 1e-10
    assert moved(attention, 0) > 1e-3


def test_the_frequency_bias_begins_at_zero():
    assert not MelPosition(8, 2, n_freq=3).F.any()


def test_mel_maps_of_any_duration_but_one_number_of_bands():
    attention = Attention(8, 2, MelPosition(8, 2, n_freq=2, time=Shaw(8, 2, K=2)))
    assert [attention(torch.zeros(1, n, 8))[0].shape[1] for n in (2, 6, 10)] == [2, 6, 10]
    with pytest.raises(ValueError, match="no map of 2 frequency bands"):
        attention(torch.zeros(1, 5, 8))
    with pytest.raises(ValueError, match="built for 2 frequency bands, the map has 3"):
        attention(torch.zeros(1, 6, 8), space=(3, 2))


@pytest.mark.parametrize("make, words", [
    (lambda: MelPosition(8, 2, n_freq=0), "at least 1"),
    (lambda: MelPosition(8, 2, n_freq=2, time=ALiBi(8, 4)), r"\(8, 4\), MelPosition \(8, 2\)"),
    (lambda: MelPosition(8, 2, n_freq=2, time=MusicTransformer(8, 2)), "MusicTransformer is not"),
    (lambda: MelPosition(8, 2, n_freq=2, time=Rotary2d(8, 2)), "Rotary2d is not"),
])  # fmt: skip
def test_errors_of_mel(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# ---- maps of any height and width: turned, mirrored, of any duration ----


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Swin2d(8, 2, size=(3, 4)), lambda: Rotary2d(8, 2)])
@pytest.mark.parametrize("space", [(3, 4), (2, 5), (1, 3), (4, 1)])
def test_turning_a_map_over_its_diagonal(make, space):
    """A map with its axes exchanged, and a scheme with its axes exchanged, give the output with its axes exchanged."""
    torch.manual_seed(0)
    attention = Attention(8, 2, make()).double()
    other = Attention(8, 2, make()).double()
    other.load_state_dict(attention.state_dict())
    position = other.position
    if isinstance(position, Swin2d):
        grid = position.table.data.unflatten(0, (5, 7))
        position.table.data, position.size = grid.transpose(0, 1).flatten(0, 1), (4, 3)
        attention.position.table.data.mul_(50)
        position.table.data.mul_(50)
    else:  # the first half of each head is for rows: exchange the halves of q and k
        for projection in (other.project_q, other.project_k):
            for tensor in (projection.weight, projection.bias):
                tensor.data = tensor.data.unflatten(0, (2, 2, 2)).flip(1).flatten(0, 2)
    height, width = space
    x = draw(1, height * width, 8)
    turned = x.unflatten(1, space).transpose(1, 2).flatten(1, 2)
    y = attention(x, space=space)[0].unflatten(1, space).transpose(1, 2).flatten(1, 2)
    assert worst(other(turned, space=(width, height))[0], y) < 1e-6


@torch.no_grad()
def mirror_error(position, space=(3, 4)):
    """With the table mirrored, the mirrored map has the mirrored output."""
    attention, x = Attention(8, 2, position).double(), draw(1, 12, 8)
    y = attention(x, space=space)[0]
    rows, columns = (2 * n - 1 for n in position.size)
    position.table.data = position.table.data.unflatten(0, (rows, columns)).flip(1).flatten(0, 1)
    mirrored = attention(x.unflatten(1, space).flip(2).flatten(1, 2), space=space)[0]
    return worst(mirrored.unflatten(1, space).flip(2).flatten(1, 2), y)


@pytest.mark.parametrize("size", [(3, 4), (2, 2), (5, 3)])
def test_a_mirrored_table_mirrors_the_output(size):
    torch.manual_seed(0)
    for kind, bound in ((Swin2d, 1e-6), (SwappedSides, None)):
        position = kind(8, 2, size=size)
        torch.nn.init.normal_(position.table, std=2.0)
        error = mirror_error(position)
        assert error < bound if bound else error > 1e-2
