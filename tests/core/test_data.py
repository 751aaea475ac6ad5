"""The contract between data and models: what a batch may hold."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.data import Batch, DataSpec, require_continuous
from genmodels.core.errors import InputError


def _levels(value: int, dtype=torch.uint8, levels: int = 17) -> tuple[DataSpec, Batch]:
    x = torch.zeros(4, 1, 2, 2, dtype=dtype)
    x[2, 0, 1, 1] = value
    return DataSpec("digits", (1, 2, 2), levels, 10), Batch(x, torch.tensor([0, 9, 1, 2]), index=torch.arange(40, 44))


@pytest.mark.parametrize("levels", [2, 17, 255, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64])
def test_every_level_is_accepted(levels, dtype):
    highest = min(levels - 1, torch.iinfo(dtype).max)
    spec, batch = _levels(highest, dtype, levels)
    spec.check(batch)
    assert int(batch.x.long().max()) == highest  # and nothing was changed


@pytest.mark.parametrize(
    ("value", "dtype", "levels"), [(17, torch.uint8, 17), (-1, torch.int64, 17), (256, torch.int32, 256)]
)
def test_a_value_outside_the_levels_is_named(value, dtype, levels):
    spec, batch = _levels(value, dtype, levels)
    with pytest.raises(ValueError, match=rf"item 42 of digits: value {value} outside 0\.\.{levels - 1}"):
        spec.check(batch)


def test_shapes_types_and_classes_are_checked():
    spec, batch = _levels(3)
    with pytest.raises(ValueError, match="events of shape"):
        spec.check(Batch(batch.x[:, :, :1]))
    with pytest.raises(ValueError, match="17 integer levels"):
        spec.check(Batch(batch.x.float()))
    with pytest.raises(ValueError, match=r"item 1 of digits: class 10 outside 0\.\.9"):
        spec.check(Batch(batch.x, torch.tensor([0, 10, 1, 2])))
    with pytest.raises(ValueError, match=r"4 items of digits, but conditions of shape \(5,\)"):
        spec.check(Batch(batch.x, torch.arange(5)))
    with pytest.raises(ValueError, match="toy has real numbers, but the batch is torch.complex64"):
        DataSpec("toy", (2,)).check(Batch(torch.ones(2, 2) + 1j))
    with pytest.raises(ValueError, match="item 1 of toy holds a value that is not finite"):
        DataSpec("toy", (2,)).check(Batch(torch.tensor([[0.0, 1.0], [torch.inf, 0.0]])))


def test_constructor_refuses_nonsense_and_plain_types_round_trip():
    for arguments in [("a", ()), ("a", (0, 2)), ("a", (2,), 1), ("a", (2,), None, 3, ("one",))]:
        with pytest.raises(ValueError):
            DataSpec(*arguments)
    with pytest.raises(ValueError, match=r"longest length of sequences, not None, got \(80, None\)"):
        DataSpec("a", (80, None))
    spec = DataSpec("pets", (3, 4, 4), 256, 2, ("cat", "dog"))
    assert DataSpec.from_dict({**spec.to_dict(), "of_a_later_version": 1}) == spec
    assert spec.dims == 48 and spec.is_image and spec.with_name("x").name == "x"


def test_batches_move_and_select():
    _, batch = _levels(3)
    part = batch.rows(torch.tensor([2, 0]))
    assert len(part) == 2 and part.index.tolist() == [42, 40] and part.mask is None
    assert part.to("cpu").cond.tolist() == [1, 0]


def rows(n=200, dims=3):
    return torch.randn(n, dims, generator=torch.Generator().manual_seed(0))


BAD_DATA = {
    "column b is constant": lambda x: torch.stack([x[:, 0], torch.full((200,), 3.0), x[:, 2]], 1),
    "column c has only": lambda x: torch.stack([x[:, 0], x[:, 1], x[:, 2].round()], 1),
    "100 of 200 rows are copies": lambda x: x[:100].repeat(2, 1),
    "columns a, c depend on each other": lambda x: torch.stack([x[:, 0], x[:, 1], -2 * x[:, 0] + 1], 1),
}


@pytest.mark.parametrize("message", BAD_DATA)
def test_data_without_a_density(message, refuses):
    refuses(InputError, message, require_continuous, BAD_DATA[message](rows()), ["a", "b", "c"])


def test_sound_data_pass():
    for data in (rows(), rows(5, 8), torch.cat([rows(), rows()[:1]])):
        assert require_continuous(data) is None
