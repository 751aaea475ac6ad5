"""`genmodels push`: the files, the card, and the hub, by a server on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import yaml

import genmodels as gm
from genmodels.cli.main import main
from genmodels.core.checkpoint import checkpoint_hash
from genmodels.core.data import Batch, DataSpec
from genmodels.core.likelihood import SingleValues
from genmodels.evaluation.report import BitsLine, NatsLine
from genmodels.models.normalizing_flows import NSF
from tests.untrained import write


def line_of(how: str, *, value: float, unit: str, kind: str, mark: str, error: float | None) -> dict:
    """A likelihood as a report holds it; another of its numbers would stand out."""
    named = {"nats": "nll", "nats_per_dim": "nll_per_dim"}.get(unit, "bits_per_dim")
    numbers = dict.fromkeys(("bits_per_dim",) if named == "bits_per_dim" else ("nll", "nll_per_dim"), 7777.0)
    return asdict((BitsLine if named == "bits_per_dim" else NatsLine)(
        label=how, kind=kind, mark=mark, unit=unit, mean_nats=-7777.0, se_data=error, se_items=None, se_mc=None,
        single=SingleValues(None, 0.0), how=how, n=9, nonfinite=0, nonfinite_first=[], worst=[], best=[],
        parts_nats={}, made={}, **(numbers | {named: value})))


REPORT = {
    "likelihood": [
        line_of("density", value=2.5, unit="nats", kind="exact", mark="=", error=0.0123),
        line_of("20 terms", value=2.25, unit="bits_per_dim", kind="lower_bound", mark="<=", error=None),
        line_of("aligned", value=-1.5, unit="nats_per_dim", kind="exact", mark="=", error=0.002),
        line_of("bytes", value=3.125, unit="bits_per_character", kind="lower_bound", mark="<=", error=0.01),
        line_of("energy", value=9.0, unit="nats", kind="unnormalised", mark="-", error=None),
    ],
    "data": {"name": "plane", "split": "test", "items": 1000, "limited": True},
}


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = NSF(DataSpec("plane", (2,)), layers=1, hidden=4, ema_decay=0.0)
    model.initialize(Batch(torch.randn(64, 2), index=torch.arange(64)))
    write(model, tmp_path / "run" / "best.ckpt")
    return tmp_path / "run"


def card_of(folder, tmp_path) -> str:
    """The card of a model that is written to a folder."""
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={tmp_path / 'card'}"]) == 0
    return (tmp_path / "card" / "README.md").read_text()


def evaluated(folder) -> dict:
    return REPORT | {"checkpoint": {"sha256": checkpoint_hash(folder / "best.ckpt"), "weights": "ema"}}


def test_a_report_of_other_weights_is_not_published(folder, tmp_path, capsys):
    (folder / "report.json").write_text(json.dumps(evaluated(folder)))
    model = NSF(DataSpec("plane", (2,)), layers=1, hidden=4, ema_decay=0.0)
    model.initialize(Batch(torch.randn(64, 2), index=torch.arange(64)))
    write(model, folder / "best.ckpt")
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={tmp_path / 'card'}"]) == 2
    assert f"report.json is of other weights than {folder}: evaluate again" in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_the_folder_loads_and_its_card_says_what_was_measured(folder, tmp_path, capsys):
    (folder / "report.json").write_text(json.dumps(evaluated(folder)))
    card = card_of(folder, tmp_path)
    assert "model.safetensors, README.md, samples.png" in capsys.readouterr().out
    assert card.startswith("---\nlicense: mit\n") and "![samples](samples.png)" in card
    assert "| `= 2.5000(123)` | nats | exact | density |" in card and "`<= 2.2500` | bits/dim | lower_bound" in card
    assert "| `= -1.5000(20)` | nats/dim | exact | aligned |" in card
    assert "| `<= 3.1250(100)` | bits/character | lower_bound | bytes |" in card
    assert "| `none` | nats | unnormalised | energy |" in card and "7777" not in card
    assert "1,000 items of the test split of plane (not all)" in card
    assert gm.load(tmp_path / "card").sample(2).x.shape == (2, 2)


def test_a_card_marks_what_is_unreliable(folder, tmp_path):
    doubtful = line_of("2 chains", value=5.75, unit="nats", kind="ais", mark="~?", error=0.2) | {
        "optimistic": True, "unreliable": "few chains count"}
    open_ = line_of("3 chains", value=None, unit="nats", kind="ais", mark="~?", error=None) | {
        "unreliable": "chains disagree", "bracket": {"lower": 3.89, "upper": 7.42}}
    (folder / "report.json").write_text(json.dumps(evaluated(folder) | {"likelihood": [doubtful, open_]}))
    card = card_of(folder, tmp_path)
    assert "\ngenmodels evaluate ckpt=<this folder>\n" in card and "evaluate license" not in card
    assert "| `~? 5.7500(2000)` | nats | ais, optimistic, unreliable | 2 chains |" in card
    assert "| `~? 3.8900 to 7.4200` | nats | ais, unreliable | 3 chains |" in card
    assert "`~?` estimated by annealed importance sampling" in card


@pytest.mark.parametrize(("change", "said"), [
    ({"likelihood": []}, "Not evaluated yet"),
    ({"weights": "raw"}, "of plane (not all), by the raw weights (ema=false)."),
    ({"weights": "0.99"}, "by the average with ema=0.99."),
])  # fmt: skip
def test_a_card_says_what_is_not_usual(folder, tmp_path, change, said):
    report = evaluated(folder)
    report = report | {"likelihood": change.get("likelihood", report["likelihood"])}
    report["checkpoint"]["weights"] = change.get("weights", "ema")
    (folder / "report.json").write_text(json.dumps(report))
    card = card_of(folder, tmp_path)
    assert said in card and ("items of" in card) == bool(report["likelihood"])


@pytest.mark.parametrize("licence", ["a: b", "[x", "no", "mit # and more", "- y", "{a}", "'"])
def test_any_name_of_a_licence_is_yaml(folder, licence, tmp_path):
    gm.load(folder).push(licence=licence, out=tmp_path / "card")
    card = (tmp_path / "card" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == licence


@pytest.mark.parametrize("words, said", [
    (["licence=mit"], "to=user/name"), (["licence='a\nb'", "out=card"], "licence is a name on one line"),
    (["licence=mit", "to=name"], "is user/name"), (["licence=mit", "to=user/name@main"], "is user/name"),
    (["to=a/b"], "licence"),
    (["licence=mit", "out=a.zip"], "written to a folder"),
])  # fmt: skip
def test_what_is_missing_is_one_line(folder, words, said, capsys):
    assert main(["push", f"ckpt={folder}", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_push_that_was_killed_can_be_repeated(folder, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("genmodels.cli.push.write_samples", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["push", f"ckpt={folder}", "licence=mit", f"out={tmp_path / 'card'}"]) != 0
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={tmp_path / 'card'}"]) == 0


def test_a_readme_of_something_else_is_kept_and_a_card_is_replaced(folder, tmp_path, capsys):
    place = tmp_path / "v1.0"
    place.mkdir()
    (place / "README.md").write_text("# My notes")
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={place}"]) == 2
    assert "no card of a model of genmodels" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("README.md", "# My notes")]
    (place / "README.md").rename(place / "samples.png")
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={place}"]) == 2
    assert "samples.png is there already, with no card" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in place.iterdir()] == [("samples.png", "# My notes")]
    (place / "samples.png").unlink()
    for licence in ("mit", "cc0-1.0"):
        assert main(["push", f"ckpt={folder}", f"licence={licence}", f"out={place}"]) == 0
    assert "license: cc0-1.0" in (place / "README.md").read_text()


def test_a_report_of_the_first_items_serves_where_there_is_no_whole_one(folder, tmp_path):
    for items in (20, 1000, 300):
        report = evaluated(folder)
        report |= {"data": report["data"] | {"items": items, "limited": True}}
        (folder / f"report_first{items}.json").write_text(json.dumps(report))
    for name, content in {"first9999_before": evaluated(folder), "first2000": REPORT, "first3000": {}}.items():
        (folder / f"report_{name}.json").write_text(json.dumps(content))  # kept, of other weights, and broken
    assert "On 1,000 items of the test split of plane (not all)" in card_of(folder, tmp_path)


def test_without_a_report_the_card_says_so(folder, tmp_path):
    assert "Not evaluated yet" in card_of(folder, tmp_path)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload, a download and a refusal take."""

    held: dict[str, bytes] = {}

    def do_POST(self):
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        here, answer = f"http://{self.headers['Host']}/user/plane", {}
        if self.path == "/api/repos/create":
            answer = {"url": here}
        elif self.path == "/api/models/user/plane/preupload/main":
            names = [file["path"] for file in json.loads(lines[0])["files"]]
            answer = {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        elif self.path == "/api/models/user/plane/commit/main":
            files = [entry["value"] for entry in map(json.loads, lines) if entry["key"] == "file"]
            self.held.update({file["path"]: base64.b64decode(file["content"]) for file in files})
            answer = {"commitUrl": f"{here}/commit/{'a' * 40}", "commitOid": "a" * 40, "success": True}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_GET(self):
        content = self.held.get(self.path.removeprefix("/user/plane/resolve/main/"))
        if content is None:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            self._send(200, content, {"ETag": '"0123abcd"', "X-Repo-Commit": "a" * 40})

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


_CODE = """
import sys
from pathlib import Path
from genmodels.cli.push import upload
from genmodels.core.files import located
print(upload(Path(sys.argv[1]), ["README.md", "model.safetensors"], "user/plane", False))
print(located("hf://user/plane"))
try:
    located("hf://user/nothing")
except ValueError as error:
    print(error)
"""


def test_a_model_goes_to_the_hub_and_back(folder, tmp_path):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed (pip install 'genmodels[hub]')")
    assert main(["push", f"ckpt={folder}", "licence=mit", f"out={tmp_path / 'card'}"]) == 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": "127.0.0.1",
                   "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_test"}
    done = subprocess.run([sys.executable, "-c", _CODE, str(tmp_path / "card")], env=environment, capture_output=True,
                          text=True, timeout=120)
    server.shutdown()
    assert done.returncode == 0, done.stderr
    address, place, refused = done.stdout.splitlines()
    assert address.endswith("/user/plane/commit/" + "a" * 40) and "hf://user/nothing: " in refused
    assert set(Hub.held) == {"README.md", "model.safetensors"} and gm.load(place).family == "nsf"
