"""Checkpoint files: whole or not at all; every cut, every flipped bit and every foreign file is one line."""

from __future__ import annotations

import os
import pickle
import random
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

from genmodels.errors import RunError
from genmodels.files import write_whole
from genmodels.training import archive
from genmodels.training.checkpoint import read_checkpoint, write_checkpoint

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


def test_every_flipped_bit_is_found(pair):
    path, whole = pair / "last.ckpt", (pair / "last.ckpt").read_bytes()
    rng = random.Random(0)
    places = [rng.randrange(len(whole)) for _ in range(150)] + list(range(len(whole) - 100, len(whole)))
    for place in places:
        altered = bytearray(whole)
        altered[place] ^= 1 << rng.randrange(8)
        path.write_bytes(altered)
        with pytest.raises(RunError) as caught:
            archive.verify(path)
        message = str(caught.value)
        assert "\n" not in message and str(path) in message and "best.ckpt" in message


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
    with pytest.raises(RunError, match="last good one beside it is .*best.ckpt"):
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
    assert proof.exists()  # the planted bug would have run


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


def test_a_full_disk_loses_nothing(pair):
    script = f"""
        import resource, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        from genmodels.training.checkpoint import write_checkpoint
        big = {{"genmodels": {HEADER!r}, "state_dict": {{"w": torch.zeros(100_000)}}}}
        try:
            write_checkpoint({str(pair / "last.ckpt")!r}, big)
        except Exception as error:
            print(type(error).__name__, error)
    """
    before = (pair / "last.ckpt").read_bytes()
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("RunError no space left") and out.stdout.count("\n") == 1, out.stdout + out.stderr
    assert (pair / "last.ckpt").read_bytes() == before
    assert sorted(p.name for p in pair.iterdir()) == ["best.ckpt", "last.ckpt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 20_000


def test_a_failing_writer_leaves_the_target(tmp_path):
    target = tmp_path / "file"
    target.write_text("old")

    def fail(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(target, fail)
    assert target.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
