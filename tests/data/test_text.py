"""A text file cut into sequences: which bytes each split has, and what is refused."""

from __future__ import annotations

import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.data.text import TextFile, to_text


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "numbers.txt"
    place.write_bytes(bytes(k % 251 for k in range(1000)))
    return place


@pytest.mark.parametrize("stride", [None, 3])
def test_splits_follow_one_another_without_a_byte_in_common(file, stride):
    data = TextFile(file=str(file), length=16, stride=stride, val_fraction=0.1, test_fraction=0.2).prepare()
    found = {name: next(iter(data.loader(name, 1000))).x for name in ("train", "val", "test")}
    begins = {name: [k for k in range(start, end - 15, step)] for name, start, end, step in
              (("train", 0, 700, stride or 16), ("val", 700, 800, 16), ("test", 800, 1000, 16))}  # fmt: skip
    for name, x in found.items():
        wanted = torch.tensor([[(k + i) % 251 for i in range(16)] for k in begins[name]])
        assert x.dtype == torch.uint8 and torch.equal(x[:, 0].long(), wanted)
    assert data.spec.encoding == "utf-8" and data.spec.levels == 256 and data.spec.unit == "bits_per_byte"
    file.write_bytes(bytes(k % 128 for k in range(1000)))
    assert TextFile(file=str(file), length=16).prepare().spec.unit == "bits_per_character"


def test_bytes_that_are_no_text_are_shown_all_the_same():
    assert to_text(torch.tensor([[195, 169, 32, 195]])) == "\u00e9 \ufffd"


@pytest.mark.parametrize("options, said", [
    ({"file": "nowhere.txt"}, "data.file=nowhere.txt cannot be read"),
    ({"length": 200}, "its smallest split 100: too few"),
    ({"length": 0}, "data.length must be at least 1"), ({"stride": 0}, "data.stride must be at least 1"),
    ({"val_fraction": 1.0}, "must be >= 0 with a sum below 1"),
])  # fmt: skip
def test_what_cannot_be_cut(file, options, said):
    with pytest.raises(InputError, match=said):
        TextFile(**{"file": str(file), **options}).prepare()


@pytest.mark.parametrize("text, line", [
    ("Mr. Bo's  Room!\n\n* * *\nAnd THEN?\n", "mister bo's room!\nand then?\n"),
    ("Room 130.\n\n* * *\nMr. Bo's, 2nd!\n", "room one hundred thirty.\nmister bo's, second!\n"),
    ("One\u2028line.\r\nTwo.\rThree.\r\n", "one line.\ntwo.\nthree.\n"),
], ids=["words", "numbers", "ends of lines"])  # fmt: skip
def test_spoken_lines_are_in_the_normal_form(tmp_path, text, line):
    if any(c.isdigit() for c in text):
        pytest.importorskip("num2words")
    (tmp_path / "book.txt").write_text(text * 9, newline="")
    data = TextFile(file=tmp_path / "book.txt", length=8, spoken=True, val_fraction=0.2, test_fraction=0.2).prepare()
    whole = "".join(to_text(data.split(name).__getitems__([k]).x[0]) for name in ("train", "val", "test")
                    for k in range(len(data.split(name))))
    assert whole.startswith(line) and set(whole) <= set(line)


def test_the_mark_of_byte_order_is_no_text_and_other_encodings_are_mentioned(tmp_path):
    place = tmp_path / "a.txt"
    place.write_bytes(b"\xef\xbb\xbf" + b"to be or not to be, " * 60)
    for spoken in (False, True):
        data = TextFile(file=str(place), length=16, spoken=spoken).prepare()
        assert data.spec.encoding == "ascii" and data.notes() == []
        assert to_text(data.split("train").__getitems__([0]).x[0]).startswith("to be or")
    place.write_bytes("caf\u00e9 ".encode("latin-1") * 80)
    assert "is not UTF-8 (byte 3): its bytes are modelled" in TextFile(file=str(place), length=16).prepare().notes()[0]
    place.write_bytes(b"\xef\xbb\xbfcaf\xe9 " * 80)
    assert "is not UTF-8 (byte 6)" in TextFile(file=str(place), length=16).prepare().notes()[0]
    with pytest.raises(InputError, match=r"is not UTF-8 \(byte 6\): convert it"):
        TextFile(file=str(place), length=16, spoken=True).prepare()
