"""Results that are kept: parts of a stage are computed once, and none counts twice."""

from __future__ import annotations

import sys

import pytest
import torch

from genmodels.core.errors import RunError
from genmodels.core.likelihood import Likelihood, packed, unpacked
from genmodels.evaluation import features
from genmodels.evaluation.features import Cache, code_hash, device_of
from genmodels.evaluation.likelihood import in_one
from genmodels.models import build


def of_items(*indices: int) -> dict:
    index = torch.tensor(indices)
    return packed(Likelihood(-index.double(), "exact", 3, 4, index=index))


def test_every_item_counts_once():
    whole = unpacked(in_one(torch.arange(5), [of_items(0, 2, 4), of_items(1, 3)]))
    assert torch.equal(whole.nats, -torch.arange(5).double())
    with pytest.raises(RunError, match="repeated \\[0\\]"):
        in_one(torch.arange(5), [of_items(0, 2, 4), of_items(1, 3, 0)])  # as many for each, the way training likes it
    with pytest.raises(RunError, match="missing \\[1, 3\\]"):
        in_one(torch.arange(5), [of_items(0, 2, 4)])
    with pytest.raises(RunError, match=r"missing \[4\], repeated \[\]"):
        in_one(torch.arange(5), [of_items(0, 2), of_items(1, 3)])


def test_results_that_cannot_be_stored_are_returned_all_the_same(tmp_path):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match="going on without a cache; set GENMODELS_CACHE to a folder"):
        assert cache.put("a", 1.5) == 1.5
    assert cache.put("b", 2.5) == 2.5 and cache.get("b") is None


def test_code_of_a_trusted_package_counts(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(build, "USED_PACKAGES", set())
    monkeypatch.setattr(features, "USED_PACKAGES", build.USED_PACKAGES)
    package = tmp_path / "package_to_edit"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text("class Net:\n    pass\n")
    (package / "helpers.py").write_text("FACTOR = 1\n")
    without = code_hash()
    build.locate("package_to_edit.parts.Net", trust=["package_to_edit"])
    first = code_hash()
    assert first == code_hash() != without and first.startswith(without)
    (package / "helpers.py").write_text("FACTOR = 2\n")
    changed = code_hash()
    assert changed != first
    (package / ".#gone.py").symlink_to(tmp_path / "nowhere")  # as an editor leaves them
    assert code_hash() != changed
    for name in [name for name in sys.modules if name.startswith("package_to_edit")]:
        monkeypatch.delitem(sys.modules, name)  # as a test or a notebook may
    assert code_hash() != changed


def test_only_times_are_of_one_computer(monkeypatch):
    device = torch.device("cpu")
    before = {stage: device_of(device, stage) for stage in ("likelihood", "cost", "speech")}
    monkeypatch.setattr("platform.node", lambda: "another")
    after = {stage: device_of(device, stage) for stage in before}
    assert [stage for stage in before if before[stage] == after[stage]] == ["likelihood"]


def test_parts_are_kept_until_the_stage_is_finished(tmp_path):
    cache, computed = Cache(tmp_path), []

    def compute(missing):
        for number in missing:
            if len(computed) == 2:
                raise RunError("killed")
            computed.append(number)
            yield number, {"x": torch.tensor(number)}

    with pytest.raises(RunError, match="killed"):
        cache.parts("key", range(4), compute)
    assert computed == [0, 1]
    computed.clear()
    found = cache.parts("key", range(4), compute)
    assert computed == [2, 3] and [int(found[number]["x"]) for number in range(4)] == [0, 1, 2, 3]
    cache.put("key", {})
    cache.forget("key")
    assert [path.name for path in tmp_path.iterdir()] == ["key.pt"]
