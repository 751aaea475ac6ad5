"""Checkpoints in parts: what two processes wrote is what one would have, or the file before."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from genmodels.core.errors import RunError
from genmodels.models.checkpoint import join_parts, read_checkpoint, write_checkpoint, write_parts
from tests.core.test_checkpoint import HEADER
from tests.two_processes import fork, in_two

WEIGHT = torch.arange(15.0).reshape(5, 3)  # one process has a row more than the other


def state(step: int, spread=lambda value: value) -> dict:
    """As Lightning gives it: weights, and the optimiser's state by number; the counter of steps is never spread."""
    moments = {"step": torch.tensor(float(step)), "exp_avg": spread(-WEIGHT)}
    return {"genmodels": {**HEADER, "step": step}, "global_step": step,
            "optimizer_states": [{"state": {0: moments}, "param_groups": [{"params": [0]}]}],
            "state_dict": {"weight": spread(step * WEIGHT), "row": spread(WEIGHT[:1]), "count": torch.tensor(7)}}


def plain(value):
    """Tensors as lists, so that == compares them."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: plain(item) for key, item in items}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def written(ranks, folder) -> list[str]:
    said, mesh = [], init_device_mesh("cpu", (2,))
    for step in (1, 2):
        write_parts(folder / "last.ckpt", state(step, lambda value: distribute_tensor(value, mesh, [Shard(0)])))
    try:
        write_parts(folder / "last.ckpt", state(3, lambda value: distribute_tensor(value / 0, mesh, [Shard(0)])))
    except RunError as error:
        said = [str(error)]
    if ranks.rank:
        ranks.serve()
    return said


@fork
def test_parts_are_the_checkpoint_of_one_process(tmp_path):
    path = tmp_path / "last.ckpt"
    complaints = in_two(tmp_path / "work", written, tmp_path)
    assert all("weight weight is not finite at step 3: last.ckpt is not overwritten" in c for (c,) in complaints)
    parts = sorted((tmp_path / "last.parts").iterdir())
    assert [part.name[:15] for part in parts] == ["step_00000002_0", "step_00000002_1"]
    assert all(part.stat().st_size < 3500 for part in parts)
    wanted = state(2)
    found = read_checkpoint(path)
    found.pop("parts")
    assert plain(found) == plain(wanted)

    for name, harm in (("altered", lambda part: part.write_bytes(part.read_bytes()[:-1] + b"x")),
                       ("missing", lambda part: part.unlink())):
        other = tmp_path / name
        shutil.copytree(tmp_path / "last.parts", other / "last.parts")
        shutil.copy(path, other)
        harm(sorted((other / "last.parts").iterdir())[1])
        with pytest.raises(RunError, match=name):
            read_checkpoint(other / "last.ckpt")

    join_parts(path)
    assert not (tmp_path / "last.parts").exists()
    assert plain(read_checkpoint(path)) == plain(wanted)
    write_checkpoint(path, wanted)
    before = path.read_bytes()
    join_parts(path)
    assert path.read_bytes() == before
