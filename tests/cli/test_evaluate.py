"""Where `genmodels evaluate` writes, found out before its work."""

from pathlib import Path

import pytest

from genmodels.cli import evaluate
from genmodels.evaluation.checkpoint import Request


@pytest.mark.parametrize("ckpt, out, places", [
    (["a/best.ckpt"], None, ["a/report.json"]),
    (["runs/a/best.ckpt", "runs/b/best.ckpt"], None, ["runs/a/report.json", "runs/b/report.json", "runs/table.json"]),
    (["link/best.ckpt"], None, ["link/report.json"]),
    (["a/best.ckpt"], "~/r.json", ["home/r.json"]),
    (["/one/best.ckpt", "/two/best.ckpt"], None, ["comparison"]),
])  # fmt: skip
def test_every_place_is_tried_before_the_work(ckpt, out, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in ("store", "link", "a"):
        Path(folder).mkdir()
    Path("store/best.ckpt").touch()
    Path("link/best.ckpt").symlink_to(tmp_path / "store/best.ckpt")
    tried = []
    monkeypatch.setattr(evaluate, "check_writable", lambda _key, place, **_: tried.append(place))
    _, request = evaluate.asked(ckpt, Request(out=out))
    assert [place.absolute().relative_to(tmp_path).as_posix() for place in tried] == places
    given = "comparison" if "/one/best.ckpt" in ckpt else None
    assert request.out == (given if out is None else str(tmp_path / "home/r.json"))
