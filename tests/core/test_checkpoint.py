"""Checkpoint files: whole or not at all; every cut, every flipped bit and every foreign file is one line."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from genmodels.cli import info
from genmodels.core import checkpoint as archive
from genmodels.core import files
from genmodels.core.data import DataSpec
from genmodels.core.errors import InputError, RunError
from genmodels.core.files import write_whole
from genmodels.models.checkpoint import load_model, read_checkpoint, read_resumable, write_checkpoint
from genmodels.models.normalizing_flows import RealNVP
from tests import commands

HEADER = {
    "format": 1, "family": "ddpm", "genmodels": "0.1.0", "torch": "2.6.0",
    "model": {"_target_": "genmodels.models.ddpm.DDPM"}, "config": {},
    "data": {"name": "digits", "event_shape": [1, 8, 8]}, "parameters": 500, "step": 3, "batches_seen": 3,
    "seed": 0, "figures": {}, "finished": False,
}  # fmt: skip


def state(value: float = 1.0) -> dict:
    return {"genmodels": dict(HEADER), "state_dict": {"w": torch.full((50, 10), value)}}


@pytest.fixture
def pair(tmp_path):
    write_checkpoint(tmp_path / "last.ckpt", state())
    write_checkpoint(tmp_path / "best.ckpt", state())
    return tmp_path


def test_round_trip_and_header(pair):
    read = read_checkpoint(pair / "last.ckpt")
    assert torch.equal(read["state_dict"]["w"], state()["state_dict"]["w"])
    assert archive.read_header(pair / "last.ckpt") == state()["genmodels"]
    mapped = read_checkpoint(pair / "last.ckpt", mmap=True)
    assert torch.equal(mapped["state_dict"]["w"], read["state_dict"]["w"])
    assert [p.name for p in pair.iterdir() if p.name.startswith(".")] == []


def test_every_flipped_bit_is_found(pair, refuses):
    path, whole = pair / "last.ckpt", (pair / "last.ckpt").read_bytes()
    rng = random.Random(0)
    places = [rng.randrange(len(whole)) for _ in range(150)] + list(range(len(whole) - 100, len(whole)))
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << rng.randrange(8)
        path.write_bytes(altered)
        message = refuses(RunError, None, archive.verify, path)
        assert str(path) in message and "best.ckpt" in message


def test_the_zip_checksums_alone_would_miss_some(pair):
    import zipfile

    path, whole = pair / "last.ckpt", (pair / "last.ckpt").read_bytes()
    missed = 0
    for place in range(0, len(whole), 37):
        altered = bytearray(whole)
        altered[place] ^= 1
        path.write_bytes(altered)
        try:
            with zipfile.ZipFile(path) as zipped:
                missed += zipped.testzip() is None
        except Exception:
            continue
    assert missed > 0


@pytest.mark.parametrize("keep", [0, 3, 100, 0.3, 0.9, -1])
def test_every_cut_is_found(pair, keep):
    path, whole = pair / "last.ckpt", (pair / "last.ckpt").read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(RunError, match="newest intact checkpoint in this folder is .*best.ckpt"):
        read_checkpoint(path)


def test_foreign_files(tmp_path):
    cases = {"text.ckpt": b"hello", "missing.ckpt": None}
    torch.save({"state_dict": {}}, tmp_path / "torch.ckpt")
    cases["torch.ckpt"] = (tmp_path / "torch.ckpt").read_bytes()
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(RunError, match="not a genmodels checkpoint|no such checkpoint"):
            archive.verify(tmp_path / name)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path):
    proof, path = tmp_path / "ran", tmp_path / "evil.ckpt"
    bad = state() | {"extra": Malicious(proof)}

    def write(file):
        torch.save(bad, file)
        archive.seal(file, bad["genmodels"])

    write_whole(path, write)
    archive.verify(path)  # the file is whole: it is its content that is refused
    with pytest.raises(RunError, match="more than tensors and plain types"):
        read_checkpoint(path)
    assert not proof.exists()
    pickle.loads(pickle.dumps(Malicious(proof)))
    assert proof.exists()  # unrestricted, it would have run


def test_weights_that_are_not_finite_overwrite_nothing(pair):
    before = (pair / "last.ckpt").read_bytes()
    with pytest.raises(RunError, match="weight w is not finite at step 3"):
        write_checkpoint(pair / "last.ckpt", state(float("nan")))
    assert (pair / "last.ckpt").read_bytes() == before


def test_weights_that_are_not_finite_are_not_read(tmp_path):
    path, spoilt = tmp_path / "nan.ckpt", state(float("nan"))

    def write(file):
        torch.save(spoilt, file)
        archive.seal(file, spoilt["genmodels"])

    write_whole(path, write)
    with pytest.raises(RunError, match="nan.ckpt: weight w is not finite"):
        read_checkpoint(path)


def test_a_full_disk_loses_nothing(pair, refuses):
    big = {"genmodels": HEADER, "state_dict": {"w": torch.zeros(100_000)}}
    before, usual = (pair / "last.ckpt").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, usual[1]))
    try:
        refuses(RunError, "^no space left", write_checkpoint, pair / "last.ckpt", big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert (pair / "last.ckpt").read_bytes() == before
    assert sorted(p.name for p in pair.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_a_failing_writer_leaves_the_target(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(target, fail)
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


MISSING = object()
MEL = {"sample_rate": 22050, "n_fft": 1024, "hop": 256, "n_mels": 2, "f_min": 0.0, "f_max": 8000.0}
TEXT = {"symbols": ["a", "b"], "blanks": True, "language": "en", "form": "characters", "examples": ["ab"]}


def small() -> RealNVP:
    model = RealNVP(DataSpec("plane", (2,), entropy=1.5), couplings=1, hidden=4, depth=1)
    model.run_config = {"model": {"couplings": 1}, "data": {"_target_": "genmodels.data.toy.Toy"}, "trainer": {}}
    model.figures = {"val/nll": 1.25}
    return model


@pytest.fixture(scope="module")
def whole() -> dict:
    """A checkpoint's content as it should be."""
    model = small()
    return {"genmodels": model.header(), "state_dict": model.state_dict()}


def forge(path: Path, state: dict, text: bytes | None = None, extra=(), packed: bool = False) -> Path:
    """A checkpoint with its checksum in order, whatever its header says."""
    torch.save(state, path)
    text = json.dumps(state["genmodels"]).encode() if text is None else text
    with zipfile.ZipFile(path, "a") as zipped:
        root = zipped.namelist()[0].split("/")[0]
        zipped.writestr(f"{root}/genmodels.json", text, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED,
                        compresslevel=1)
        for name, content in extra:
            zipped.writestr(name.format(root=root), content)
        zipped.comment = b"0" * 64
    content = path.read_bytes()[:-64]
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())
    archive.verify(path) if text is None else None
    return path


def refusals_of(path: Path, readers) -> list[str]:
    """What each reader says; every one must refuse in one plain line that names the file."""
    said = []
    for read in readers:
        with pytest.raises((RunError, InputError)) as caught:
            read(path)
        line = str(caught.value)
        assert line.isprintable() and str(path) in line and len(line) < 1000, (read, line)
        said.append(line)
    return said


def changed(header: dict, key: str, value) -> dict:
    header = copy.deepcopy(header)
    *above, last = key.split(".")
    node = header
    for name in above:
        node[name] = node.get(name) or {}
        node = node[name]
    if value is MISSING:
        del node[last]
    else:
        node[last] = value
    return header


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


#: (key, what stands there): each is refused by everything that reads a header.
MALFORMED = [
    *((key, MISSING) for key in ("format", "family", "genmodels", "torch", "model", "config", "data", "parameters",
                                 "step", "batches_seen", "seed", "figures", "finished", "data.name",
                                 "data.event_shape", "model._target_")),
    *(("format", value) for value in (99, 0, -1, "1", True, 1.0, None, [1])),
    *(("family", value) for value in (None, 3, "", "x" * 1000, "\x1b[2J", "a\nb", ["ddpm"], "\u202edpm")),
    ("genmodels", 0.1), ("genmodels", "0.1\x1b]0;owned\x07"), ("torch", None), ("torch", {"version": 2}),
    *(("model", value) for value in (None, [], "ddpm", 7)),
    *(("model._target_", value) for value in (None, 7, ["a"], {}, "", "x" * 999, "genmodels.models.\x1b[31m.RealNVP")),
    ("model.deep", nested(40)), ("model.wide", "x" * 100_000), ("model.huge", 10**30), ("model.depth", 10**9),
    ("model.\x1b[2J", 1), ("model." + "k" * 300, 1),
    *(("config", value) for value in (None, [], "seed=0")),
    ("config.model", []), ("config.data", "toy"), ("config.trainer", [1]),
    ("config.trainer.limit_evaluation", "many"), ("config.trainer.limit_evaluation", 0), ("config.trust", "os"),
    ("config.trust", [1]), ("config.seed", "0"), ("config.logger", 1),
    *(("data", value) for value in (None, [], "digits")),
    ("data.name", None), ("data.name", ["digits"]),
    *(("data.event_shape", value) for value in (None, [], [0], [-2], [2.0], ["2"], [True], 2, [2**40], [2**16, 2**16],
                                                [1] * 9, [[2]], {"0": 2})),
    *(("data.levels", value) for value in (0, 1, -256, 256.0, "256", True, 2**40, [256])),
    *(("data.num_classes", value) for value in (0, -1, 2**40, "10", 1.5, [10])),
    ("data.class_names", None), ("data.class_names", "ab"), ("data.class_names", ["a", "b"]), ("data.class_names", [1]),
    ("data.entropy", "1"), ("data.entropy", [1.0]), ("data.speakers", [None]), ("data.speakers", {}),
    *(("data.mel", value) for value in ([], "mel", {"hop": 0}, {"hop": 2**40}, {"n_mels": 2**31}, {"frobnicate": 1},
                                        MEL | {"f_max": -1}, MEL | {"n_fft": "1024"}, MEL | {"padding": None})),
    *(("data.statistics", value) for value in ([], {"mean": 0.0}, {"mean": "0", "std": 1.0}, {"mean": [], "std": []},
                                               {"mean": 0.0, "std": 1.0, "frames": 0},
                                               {"mean": [[0.0]], "std": [1.0]})),
    *(("data.text", value) for value in ([], {}, TEXT | {"symbols": "ab"}, TEXT | {"symbols": [1]},
                                         TEXT | {"blanks": 1}, TEXT | {"language": None}, TEXT | {"examples": "ab"})),
    *((key, value) for key in ("parameters", "step", "batches_seen")
      for value in (-1, "3", 1.5, None, True, 2**64, [3])),
    *(("seed", value) for value in ("0", None, 0.5, 2**65)),
    *(("figures", value) for value in (None, [], {"val/nll": "1.9"}, {"val/nll": None}, {"val/nll": [1.9]},
                                       {"\x1b[31mval": 1.0})),
    *(("finished", value) for value in (None, 1, "true")),
    ("extra", 1), ("data.extra", 1), ("loops", {}),
]  # fmt: skip


def shown(value) -> str:
    return "missing" if value is MISSING else repr(value)[:40]


@pytest.mark.parametrize(("key", "value"), MALFORMED, ids=shown)
def test_a_malformed_header_is_one_line_for_every_reader(key, value, whole, tmp_path):
    bad = whole | {"genmodels": changed(whole["genmodels"], key, value)}
    path = forge(tmp_path / "x.ckpt", bad)
    for line in refusals_of(path, (archive.read_header, info.describe, read_checkpoint, load_model)):
        assert any(word in line for word in (key.split(".")[0], "nested", "characters", "key", "number")), line
    with pytest.raises(RunError, match="invalid checkpoint header"):
        write_checkpoint(tmp_path / "y.ckpt", bad)
    assert not (tmp_path / "y.ckpt").exists()


#: What stands in the record instead of a header.
RECORDS = {
    "empty": b"", "no JSON": b"{", "null": b"null", "a list": b"[]", "text": b'"header"', "not UTF-8": b'{"a": "\xff"}',
    "NaN": b'{"figures": {"val/nll": NaN}}', "infinite": b'{"seed": 1e999}', "many digits": b"1" * 100_000,
    "deep": b"[" * 100_000 + b"]" * 100_000, "deep mappings": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "twice": b'{"format": 1, "format": 1}', "long": b" " * (5 << 20) + b"{}", "many": b"[" + b"0," * 999_999 + b"0]",
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_no_header(name, whole, tmp_path):
    refusals_of(forge(tmp_path / "x.ckpt", whole, RECORDS[name]), (archive.read_header, info.describe, read_checkpoint))


def test_millions_of_values_are_refused_unread(tmp_path, monkeypatch):
    """Python's reader takes seconds for them."""
    text = b"[" + b"[]," * (1 << 20) + b"[]]"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was read"))
    assert files.index_of(tmp_path / "x.safetensors") is None
    with pytest.raises(ValueError, match="it holds more than 500,000 values"):
        archive.parse(text)


#: Options that a header may hold and that no model can be built from, or another than the one whose weights these are.
UNBUILDABLE = {
    "_target_": ["genmodels.models.normalizing_flows.Missing", "genmodels.missing.RealNVP", "os.system", "RealNVP",
                 "..", "a b", "genmodels.models.optimizer.Optimizer", "genmodels.models.build.locate",
                 "genmodels.models.normalizing_flows.Glow", "genmodels.cli.os.system",
                 "genmodels.models.base.GenerativeModel"],
    "couplings": [0, -1, "many", 1.5, None, [], {}, 3, 10**5],
    "hidden": [0, -1, "x", 8, 10**6, {"a": 1}],
    "depth": ["x", 2, 10**6],
    "preprocess": ["unheard", 1, {"_target_": "os.system"}],
    "optimizer": [[1], {"lr": "fast"}, {"unheard": 1}],
    "unheard": [1],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in UNBUILDABLE.items() for value in values])
def test_options_from_which_no_such_model_can_be_built(key, value, whole, tmp_path):
    bad = whole | {"genmodels": changed(whole["genmodels"], f"model.{key}", value)}
    line, = refusals_of(forge(tmp_path / "x.ckpt", bad), (load_model,))
    if (key, value) in (("couplings", 10**5), ("depth", 10**6)):
        assert "describe a model of more than" in line  # of which no more than that was built


def test_a_header_that_is_not_the_one_of_the_weights(whole, tmp_path):
    other = json.dumps(whole["genmodels"] | {"step": 77}).encode()
    line, = refusals_of(forge(tmp_path / "x.ckpt", whole, other), (read_checkpoint,))
    assert "not the one that was saved with its weights" in line


def test_what_is_no_record_of_torch(whole, tmp_path):
    readers = (archive.verify, info.describe, load_model)
    first = forge(tmp_path / "twice.ckpt", whole, extra=[("other/genmodels.json", b"{}")])
    assert "the same name" in refusals_of(first, readers)[0]
    text = json.dumps(whole["genmodels"]).encode() + b" " * 50_000
    packed = forge(tmp_path / "packed.ckpt", whole, text, packed=True)
    assert "packed" in refusals_of(packed, readers)[0]


@pytest.mark.parametrize("bad", [
    None, [1], {"w": 1}, {"w": torch.zeros(1).expand(10**9)}, {"w": torch.zeros(2).to_sparse()},
    {"w": torch.empty(10**12, device="meta")},
], ids=["missing", "a list", "no tensor", "expanded", "sparse", "meta"])  # fmt: skip
def test_weights_that_are_not_there(bad, whole, tmp_path):
    refusals_of(forge(tmp_path / "x.ckpt", whole | {"state_dict": bad}), (read_checkpoint, load_model))


def run_in(memory: int, code: str) -> subprocess.CompletedProcess:
    """Run Python in a process that may not take more bytes of memory."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))\n"
    return subprocess.run([sys.executable, "-c", limit + code], capture_output=True, text=True, timeout=120)


def bombs(folder: Path, whole: dict) -> dict[str, Path]:
    """Small files that ask for a great deal."""
    text = json.dumps(whole["genmodels"]).encode()
    found = {"packed": forge(folder / "packed.ckpt", whole, text + b" " * (400 << 20), packed=True)}
    found["lists"] = forge(folder / "lists.ckpt", whole, b"[" + b"[]," * ((4 << 20) // 3 - 2) + b"[]]")
    found["depth"] = forge(folder / "depth.ckpt", whole, b"[" * (4 << 20))
    found["overlap"] = overlapping(folder / "overlap.ckpt", whole)
    return found


def overlapping(path: Path, whole: dict) -> Path:
    """Three thousand records that are all the same megabyte."""
    torch.save(whole, path)
    with zipfile.ZipFile(path, "a") as zipped:
        root = zipped.namelist()[0].split("/")[0]
        zipped.writestr(f"{root}/genmodels.json", json.dumps(whole["genmodels"]))
        zipped.writestr(f"{root}/large", os.urandom(1 << 20))
        large = zipped.getinfo(f"{root}/large")
        for number in range(3000):
            record = copy.copy(large)
            record.filename = f"{root}/large{number}"
            zipped.filelist.append(record)
            zipped.NameToInfo[record.filename] = record
        zipped.comment = b"0" * 64
    content = path.read_bytes()[:-64]
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())
    return path


def test_small_files_that_ask_for_a_great_deal_are_refused_within_300_megabytes(whole, tmp_path):
    paths = bombs(tmp_path, whole)
    assert max(path.stat().st_size for path in paths.values()) < 6 << 20
    words = ["info", *map(str, paths.values())]
    code = f"import sys; from genmodels.cli.main import main; sys.exit(main({words!r}))"
    done = run_in(300 << 20, code)
    assert done.returncode == 1 and done.stdout == "", done
    lines = done.stderr.splitlines()
    assert len(lines) == len(paths) and all(line.startswith("genmodels info: ") for line in lines), done.stderr


def test_models_larger_than_their_files_are_refused_before_their_memory_is_touched(whole, tmp_path):
    wants = {"hidden": 10**6, "depth": 10**6}
    for key, value in wants.items():
        forge(tmp_path / f"{key}.ckpt", whole | {"genmodels": changed(whole["genmodels"], f"model.{key}", value)})
    code = f"""
import resource
from genmodels.core.errors import RunError
from genmodels.models.checkpoint import load_model
import genmodels.models.normalizing_flows
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for key in {list(wants)!r}:
    try:
        load_model({str(tmp_path)!r} + f"/{{key}}.ckpt")
    except RunError as error:
        print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = commands.run("-c", code, cwd=tmp_path)
    *lines, grown = done.stdout.splitlines()
    assert len(lines) == len(wants) and int(grown) < 1000, done.stdout + done.stderr


def test_what_a_run_goes_on_from_must_be_there(whole, tmp_path):
    fit = {"epoch_loop.state_dict": {"_batches_that_stepped": 0},
           "epoch_loop.batch_progress": {"total": {"completed": 0}, "current": {"ready": 0}}}
    good = whole | {"loops": {"fit_loop": fit}, "callbacks": {"a": {}}, "optimizer_states": [{}], "lr_schedulers": [{}],
                    "global_step": 0, "epoch": 0, "pytorch-lightning_version": "2.6.4"}  # fmt: skip
    read = read_resumable
    assert read(forge(tmp_path / "x.ckpt", good))["global_step"] == 0
    elsewhere = copy.deepcopy(good)
    elsewhere["loops"]["fit_loop"]["epoch_loop.state_dict"]["_batches_that_stepped"] = 500
    bad = [{k: v for k, v in good.items() if k != key} for key in good if key not in whole]
    bad += [good | {"loops": {}}, good | {"loops": {"fit_loop": 3}}, good | {"global_step": "0"}, elsewhere]
    for state in bad:
        refusals_of(forge(tmp_path / "x.ckpt", state), (read,))


def test_nothing_of_a_file_controls_the_terminal(whole, tmp_path, capsys):
    header = changed(whole["genmodels"], "data.name", "moons\x1b]0;owned\x07\nverdict:       whole")
    header = changed(header, "config.data.root", "/data\x1b[2J\u202e\udcff")
    header = changed(header, "config.trainer.max_steps", [["\x1b[2J"], {"a": "\r"}])
    path = forge(tmp_path / "x.ckpt", whole | {"genmodels": header})
    assert info.main([str(path), "--full"]) == 0
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.splitlines()) and printed.count("verdict:  ") == 2
    assert len([line for line in printed.splitlines() if line.startswith("verdict:")]) == 1
    assert "trainer.max_steps=" in printed
    assert r"moons\x1b]0;owned\x07\nverdict" in printed and r"/data\x1b[2J\u202e\udcff" in printed
    assert load_model(path)[0].spec.name.isprintable()
    assert DataSpec("a", (1,), num_classes=1, class_names=("\x1b[2J",)).class_names == (r"\x1b[2J",)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)],
                         ids=["pipe", "folder", "device"])  # fmt: skip
def test_what_is_no_file_is_neither_read_nor_waited_for(make, whole, tmp_path, capsys):
    make(tmp_path / "a.ckpt")
    cut = forge(tmp_path / "b.ckpt", whole)
    cut.write_bytes(cut.read_bytes()[:-100])
    assert info.main([str(tmp_path / "a.ckpt"), str(cut)]) == 1
    assert capsys.readouterr().err.count("\n") == 2


def test_checkpoints_as_they_were_written_before_still_load(whole, tmp_path):
    older = copy.deepcopy(whole)
    for key in ("mel", "statistics", "text", "speakers"):  # of the first version, whose data were not yet speech
        del older["genmodels"]["data"][key]
    model, header = load_model(forge(tmp_path / "x.ckpt", older))
    assert header == older["genmodels"] and model.figures == {"val/nll": 1.25}
    assert struct.calcsize("P") == 8 and resource.getrlimit(resource.RLIMIT_AS)[0] != 300 << 20
