"""Arrays of all layouts and containers, and what is said about those that cannot be understood."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.data import arrays
from genmodels.data.arrays import Arrays, MappedArray, MappedData, columns_of, read_arrays
from genmodels.data.loading import TensorData

RNG = np.random.default_rng(0)
NHWC = RNG.integers(0, 256, (50, 6, 7, 3), dtype=np.uint8)
NCHW = np.ascontiguousarray(NHWC.transpose(0, 3, 1, 2))
SPLITS = ("train", "val", "test")


def items(module) -> list[torch.Tensor]:
    """Every item of every split, in the order of its bytes."""
    rows = [x for split in SPLITS for batch in module.loader(split, 16) for x in batch.x]
    return sorted(rows, key=lambda x: x.numpy().tobytes())


def same_items(module, truth: np.ndarray) -> None:
    """The splits together hold exactly these items."""
    expected = sorted(torch.from_numpy(truth), key=lambda x: x.numpy().tobytes())
    served = items(module)
    assert len(served) == len(expected) and all(torch.equal(a, b) for a, b in zip(served, expected, strict=True))


def save(path, container: str, x: np.ndarray, **more):
    """x in a container, under the key of each."""
    file = path / f"set{'.npy' if container == 'npy' else '.npz'}"
    if container == "npy":
        np.save(file, x)
    elif container == "npz":
        np.savez(file, x=x, **more)
    else:
        np.savez_compressed(file, images=x, **more)
    return str(file)


LAYOUTS = {
    "nhwc": (NHWC, {}, NCHW),
    "nchw": (NCHW, {}, NCHW),
    "nchw_said": (NCHW, {"layout": "nchw"}, NCHW),
    "nhwc_of_two_channels": (NHWC[..., :2], {"layout": "nhwc"}, NCHW[:, :2]),
    "grey": (NHWC[..., 0], {}, NCHW[:, :1]),
    "grey_last": (NHWC[..., :1], {}, NCHW[:, :1]),
    "fortran": (np.asfortranarray(NHWC), {}, NCHW),
    "bool": (NHWC[..., 0] > 127, {}, (NCHW[:, :1] > 127).astype(np.uint8)),
    "few_levels": (NHWC.astype(np.int64) // 16, {"levels": 16}, NCHW // 16),
    "many_levels": (NHWC.astype(np.uint16) * 4, {"levels": 1024}, NCHW.astype(np.int32) * 4),
    "level_vectors": (NHWC[:, 0, :, 0], {}, NHWC[:, 0, :, 0]),
    "vectors": (RNG.normal(size=(50, 5)), {}, None),
    "vectors_half": (RNG.normal(size=(50, 5)).astype(np.float16), {}, None),
    "vectors_other_byte_order": (RNG.normal(size=(50, 5)).astype(">f8"), {}, None),
    "fields": (RNG.normal(size=(50, 2, 4, 4)), {"layout": "nchw"}, None),
}


@pytest.mark.parametrize("container", ["npy", "npz", "compressed"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mapped", [False, True])
def test_layouts(name, container, mapped, tmp_path, monkeypatch):
    x, options, truth = LAYOUTS[name]
    truth = x.astype(np.float32) if truth is None else truth
    if mapped:
        monkeypatch.setattr(arrays, "_MEMORY", 0)
    module = Arrays(file=save(tmp_path, container, x), **options).prepare()
    assert module.spec.event_shape == truth.shape[1:] and module.spec.name == "set"
    levels = options.get("levels", None if x.dtype.kind == "f" else 2 if x.dtype == bool else 256)
    assert module.spec.levels == levels and module.spec.num_classes is None
    assert isinstance(module.split("val"), MappedData if mapped and container != "compressed" else TensorData)
    same_items(module, truth)
    assert module.problems() == []


@pytest.mark.parametrize("mapped", [False, True])
def test_labels_stay_with_their_items(mapped, tmp_path, monkeypatch):
    if mapped:
        monkeypatch.setattr(arrays, "_MEMORY", 0)
    x = np.repeat(np.arange(60, dtype=np.uint8)[:, None], 4, 1)
    for labels, names in (
        (np.arange(60) % 3, ()),
        ((np.arange(60) % 3)[:, None], ()),
        (np.arange(60) % 3 + 1, ("1", "2", "3")),
        (np.array(["ant", "bee", "cow"])[np.arange(60) % 3], ("ant", "bee", "cow")),
    ):
        np.savez(tmp_path / "a.npz", x=x, y=labels)
        module = Arrays(file=str(tmp_path / "a.npz")).prepare()
        assert (module.spec.num_classes, module.spec.class_names) == (3, names)
        for split in SPLITS:
            for batch in module.loader(split, 16):
                assert torch.equal(batch.cond, batch.x[:, 0].long() % 3)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(60) % 3)
    for labels in ("y.npy", "a.npz"):  # the latter holds items too
        module = Arrays(file=str(tmp_path / "x.npy"), labels=str(tmp_path / labels)).prepare()
        batch = next(iter(module.loader("train", 60)))
        assert torch.equal(batch.cond, batch.x[:, 0].long() % 3)


@pytest.mark.parametrize("spelling", ["x_{}", "{}_images", "{}", "X_{}"])
@pytest.mark.parametrize("given", [("train", "test"), ("train", "val", "test"), ("train",), ("train", "valid", "test")])
def test_given_splits_are_honoured(spelling, given, tmp_path):
    parts = {split: NHWC[k * 15 : (k + 1) * 15] for k, split in enumerate(given)}
    np.savez(tmp_path / "a.npz", **{spelling.format(split): x for split, x in parts.items()})
    module = Arrays(file=str(tmp_path / "a.npz")).prepare()
    for split in given[1:]:
        served = next(iter(module.loader("val" if split == "valid" else split, 100))).x.permute(0, 2, 3, 1).numpy()
        assert (served == parts[split]).all()
    same_items(module, np.concatenate(list(parts.values())).transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "one,two\n1,2\n3,4.5\n-1e-3,6\n" + "7,8\n" * 17),
        ("a.txt", "1 2\n3 4.5\n-1e-3   6\n\n" + "7 8\n" * 17),
        ("a.tsv", "\ufeffone\ttwo\n1\t2\n3\t4.5\n-1e-3\t6\n" + "7\t8\n" * 17),
        ("a.data", "one;two\n1;2\n3;4.5\n-1e-3;6\n" + "7;8\n" * 17),
        ("bars.txt", "one|two\n1|2\n3|4.5\n-1e-3|6\n" + "7|8\n" * 17),
        ("quoted.csv", '"one","two"\n"1","2"\n3,"4.5"\n"-1e-3","6"\n' + '"7","8"\n' * 17),
    ],
)
def test_tables(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    module = Arrays(file=str(tmp_path / name)).prepare()
    assert (module.spec.event_shape, module.spec.levels) == ((2,), None)
    same_items(module, np.array([[1, 2], [3, 4.5], [-1e-3, 6]] + [[7, 8]] * 17, dtype=np.float32))


def test_real_tables(shared_data):
    wine = {"winequality-red.csv": (1599, 12), "winequality-white.csv": (4898, 12)}
    for name, (count, width) in {**wine, "parkinsons_updrs.data": (5875, 22)}.items():
        module = Arrays(file=str(shared_data / "uci" / name)).prepare()
        assert module.spec.event_shape == (width,)
        assert sum(len(module.split(split)) for split in SPLITS) == count


def test_mirroring_is_for_images_on_request(tmp_path):
    file = save(tmp_path, "npz", NHWC)
    assert not Arrays(file=file).flip and Arrays(file=file, flip=True).prepare().flip
    np.save(tmp_path / "v.npy", np.zeros((20, 3)))
    with pytest.raises(InputError, match="data.flip=true is for images"):
        Arrays(file=str(tmp_path / "v.npy"), flip=True).prepare()


def test_mapped_arrays_are_not_carried_along_with_the_process(tmp_path):
    import pickle

    np.save(tmp_path / "a.npy", np.zeros((1000, 1000)))
    array = MappedArray.of_npy(tmp_path / "a.npy")
    array.whole()
    assert len(pickle.dumps(array)) < 1000


BAD = {
    "both_axes": (np.zeros((9, 3, 5, 3), np.uint8), {}, "both the second and the last axis could be"),
    "neither_axis": (np.zeros((9, 5, 5, 5), np.uint8), {}, "neither the second nor the last axis"),
    "float_images": (np.zeros((9, 5, 5, 3)), {}, "float64 images: save them as uint8"),
    "int_without_levels": (np.zeros((9, 5), np.int64), {}, "the values are int64: set data.levels"),
    "above_levels": (np.eye(9, dtype=np.uint8) * 40, {"levels": 17}, r"item 0 holds 40, which is outside 0\.\.16"),
    "negative": (-np.eye(9, dtype=np.int16), {"levels": 17}, r"item 0 holds -1, which is outside 0\.\.16"),
    "more_than_31_bits": (np.full((9, 5), 2**40), {"levels": 2**41}, "more than 31 bits are not held exactly"),
    "coarse": ((1.6e9 + np.arange(45.0)).astype(">f8").reshape(9, 5), {}, "rounded to steps of 128 in single"),
    "levels_of_floats": (np.zeros((9, 5)), {"levels": 17}, "data.levels=17 is for integers"),
    "nan": (np.where(np.arange(45).reshape(9, 5) == 23, np.nan, 0.0), {}, "item 4 holds nan, which is not finite"),
    "overflow": (np.where(np.arange(45).reshape(9, 5) == 23, 1e300, 0.0), {}, "item 4 holds 1e[+]300, which is not"),
    "one_axis": (np.zeros(9), {}, r"items of shape \(9,\); expected"),
    "five_axes": (np.zeros((9, 1, 2, 3, 4), np.uint8), {}, "more than three axes"),
    "empty": (np.zeros((0, 4), np.uint8), {}, "holds no items"),
    "complex": (np.zeros((9, 4), complex), {}, "complex128 cannot be modelled"),
    "text": (np.array([["a", "b"]] * 9), {}, "cannot be modelled"),
    "objects": (np.array([[1, "b"]] * 9, dtype=object), {}, "Python objects"),
    "two_items": (np.zeros((2, 4), np.uint8), {}, "split is empty, .*: raise val_fraction"),
}


@pytest.mark.parametrize("container", ["npy", "npz"])
@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_give_one_line(name, container, tmp_path, refuses):
    x, options, says = BAD[name]
    module = Arrays(file=save(tmp_path, container, x), **options)
    message = refuses(InputError, says, module.prepare)
    assert "set" in message and module.problems() == [message]


def test_bad_files_give_one_line(tmp_path, capsys, refuses):
    def line(name, content=None, **options):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        return refuses(InputError, name, Arrays(file=str(tmp_path / name), **options).prepare)

    assert "does not exist" in line("none.npz")
    assert "must end in .npy, .npz, .csv" in line("a.h5", b"x")
    assert "cannot be read" in line("a.npz", b"not a zip file")
    assert "cannot be read" in line("a.npy", b"")
    np.save(tmp_path / "cut.npy", np.zeros((100, 10)))
    assert "cannot be read" in line("cut.npy", (tmp_path / "cut.npy").read_bytes()[:-8])
    np.savez_compressed(tmp_path / "cut.npz", x=RNG.normal(size=(100, 10)))
    assert "cannot be read" in line("cut.npz", (tmp_path / "cut.npz").read_bytes()[:-400])
    content = bytearray((tmp_path / "cut.npz").read_bytes())
    assert "is empty" in line("a.csv", b"\n")
    assert "holds a heading and no items" in line("h.csv", b"a,b\n")
    assert "b.csv, line 4, column 2 (b): 'x' is not a number" in line("b.csv", b"a,b\n\n1,2\n3, x\n")
    assert "b.csv, line 2 has 3 cells, where the table has 2 columns" in line("b.csv", b"1,2\n3,4,\n")
    assert "b.csv, line 2, column 3 (c): the cell is empty" in line("b.csv", b"a,b,c\n1,2,\n")
    assert "b.csv, line 1, column 2: the cell is empty" in line("b.csv", b"1,,3\n4,5,6\n")
    assert "b.csv, line 1, column 1: 'NA' is not a number" in line("b.csv", b"NA,2,3\n4,5,6\n")
    assert "c.csv, line 3 has 1 cell, where the table has 2 columns" in line("c.csv", b"a,b\n1,2\n3\n")
    assert "d.txt, line 2, column 1: 'NA' is not a number" in line("d.txt", b"1 2\nNA 4\n")
    assert "line 1, column 1: 'NA' is not a number" in line("n.csv", b"NA,2\n4,5\n")
    assert "line 1, column 1: 'NA' is not a number" in line("m.csv", b"NA,NA\n4,5\n")
    assert "q.csv, line 3, column 2 (b): 'x,y' is not a number" in line("q.csv", b'a,b\n1,2\n1,"x,y"\n')
    assert "line 2, column 1 (a): '1,5' is not a number; write decimals with a" in line("q.csv", b'a,b\n"1,5",2\n')
    assert "line 2, column 1 (0,5): '0,75' is not a number; write decimals" in line("q2.csv", b"0,5;0,25\n0,75;1,5\n")
    assert "u.csv, line 2, column 1 (a): '1_000' is not a number" in line("u.csv", b"a,b\n1_000,2\n3,4\n")
    assert "cannot be read: " in line("long.csv", b"1" * 200_000)
    assert "b.csv, line 4, column 2 (b): nan is not a finite" in line("b.csv", b"a,b\n\n1,2\n3, nan\n")
    assert "b.csv, line 2, column 1: 1e300 is not a finite" in line("b.csv", b"1,2\n1e300,4\n")
    assert "c.csv, line 1: 3 names, where the table has 2 columns" in line("c.csv", b"a,b,c\n1,2\n")
    np.savez_compressed(tmp_path / "flipped.npz", x=RNG.normal(size=(100, 10)))
    content = bytearray((tmp_path / "flipped.npz").read_bytes())
    content[len(content) // 2] ^= 255
    assert "cannot be read" in line("flipped.npz", bytes(content))
    damaged = (tmp_path / "cut.npy").read_bytes().replace(b"}", b"(", 1)  # tokenize.TokenError
    assert "cannot be read" in line("header.npy", damaged)
    with zipfile.ZipFile(tmp_path / "lzma.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", content)
    content = bytearray((tmp_path / "lzma.npz").read_bytes())
    content[100:110] = bytes(10)  # lzma.LZMAError
    assert "cannot be read" in line("lzma.npz", bytes(content))
    np.savez(tmp_path / "cond.npz", x=NHWC, cond=np.arange(len(NHWC)))
    Arrays(file=str(tmp_path / "cond.npz")).prepare()
    assert "cond not read; labels are called y" in capsys.readouterr().out
    np.savez(tmp_path / "d.npz", a=NHWC, b=NHWC)
    assert "holds a, b: name the items x" in line("d.npz")
    np.savez(tmp_path / "e.npz", x=NHWC, x_test=NHWC)
    assert "both undivided items and splits" in line("e.npz")
    np.savez(tmp_path / "e2.npz", x=NHWC, train=NHWC, test=NHWC)  # x must not be left out without a word
    Arrays(file=str(tmp_path / "e2.npz")).prepare()
    assert "test, train not read" in capsys.readouterr().out
    np.savez(tmp_path / "f.npz", x_train=NHWC, x_test=NHWC[:, :5])
    assert "items of different shapes" in line("f.npz")
    np.savez(tmp_path / "g.npz", x=NHWC, y=np.arange(49))
    assert "labels of shape (49,) for 50 items" in line("g.npz")
    np.savez(tmp_path / "g.npz", x=NHWC, y=3)
    assert "labels of shape () for 50 items" in line("g.npz")
    np.savez_compressed(tmp_path / "g.npz", x=NHWC, y=3)
    assert "labels of shape () for 50 items" in line("g.npz")
    np.savez(tmp_path / "h.npz", x=NHWC, y=np.linspace(0, 1, 50))
    assert "labels of type float64" in line("h.npz")
    np.savez(tmp_path / "h.npz", x=NHWC, y=(2**63 + np.arange(50, dtype=np.uint64) % 3))
    assert "label 9223372036854775810 is above 2^63 - 1" in line("h.npz")
    np.savez(tmp_path / "i.npz", x_train=NHWC, x_test=NHWC, y_train=np.arange(50))
    assert "only train has labels" in line("i.npz")


@pytest.mark.parametrize("other", [float, complex, str])
def test_splits_of_other_types_are_refused(other, tmp_path):
    np.savez(tmp_path / "a.npz", x_train=NHWC, x_test=NHWC.astype(other))
    with pytest.raises(InputError, match="items of different shapes or types"):
        Arrays(file=str(tmp_path / "a.npz")).prepare()


def test_labels_of_other_integer_types_are_the_same_classes(tmp_path):
    """numpy joins int64 and uint64 as floats, in which large numbers are one."""
    y = 2**60 + np.arange(50) % 3
    np.savez(tmp_path / "a.npz", x_train=NHWC, x_test=NHWC, y_train=y, y_test=y.astype(np.uint64))
    spec = Arrays(file=str(tmp_path / "a.npz")).prepare().spec
    assert spec.class_names == tuple(str(2**60 + k) for k in range(3))


def test_splits_by_their_plain_names_have_their_labels(tmp_path):
    np.savez(tmp_path / "a.npz", train=NHWC, test=NHWC, y_train=np.arange(50) % 3, y_test=np.arange(50) % 3)
    data = Arrays(file=str(tmp_path / "a.npz")).prepare()
    assert data.spec.num_classes == 3 and data.items("test").cond.tolist() == [k % 3 for k in range(50)]


def test_arrays_that_are_not_read_are_named(tmp_path, capsys):
    y = np.arange(50) % 3
    for given, unread in (({"x": NHWC, "y": y}, None), ({"x": NHWC, "y": y, "x2": y, "Y": y}, "Y, x2"),
                          ({"x_train": NHWC, "x_test": NHWC, "y": y}, "y"), ({"x": NHWC, "data": y, "y": y}, "data"),
                          ({"x_train": NHWC, "x_valid": NHWC, "x_val": NHWC, "x_test": NHWC}, "x_valid")):
        np.savez(tmp_path / "a.npz", **given)
        Arrays(file=str(tmp_path / "a.npz")).prepare()
        out = capsys.readouterr().out
        assert out == "" if unread is None else out.startswith(f"{tmp_path}/a.npz: {unread} not read; labels are")


def test_a_class_of_which_no_item_is_trained_on_is_mentioned(tmp_path, monkeypatch):
    y = np.array(["ant", "bee"])[np.arange(50) % 2]
    np.savez(tmp_path / "a.npz", x_train=NHWC, x_test=NHWC, y_train=y, y_test=np.where(np.arange(50) == 7, "cow", y))
    for most in (2**20, 0):
        monkeypatch.setattr(arrays, "_MEMORY", most)
        data = Arrays(file=str(tmp_path / "a.npz"), batch_size=4).prepare()
        assert data.notes() == ["a: no training item has class cow (1 of 3)"] and data.problems() == []


def test_bytes_and_texts_that_name_the_same_class_are_one(tmp_path):
    y = np.array(["a", "\xe9"])[np.arange(50) % 2]
    np.savez(tmp_path / "a.npz", x_train=NHWC, x_test=NHWC, y_train=np.char.encode(y, "utf-8"), y_test=y)
    data = Arrays(file=str(tmp_path / "a.npz")).prepare()
    assert data.spec.class_names == ("a", "\xe9") and data.items("test").cond.tolist() == [k % 2 for k in range(50)]


def test_faulty_labels_are_those_of_their_own_file(tmp_path, refuses):
    np.save(tmp_path / "x.npy", NHWC)
    np.savez(tmp_path / "empty.npz")
    for name, write, says in (("none.npy", None, "data.labels={} does not exist"), ("empty.npz", None, "={} is empty"),
                              ("a.npy", b"", "data.labels={} cannot be read"),
                              ("a.csv", b"a\nx\n", "data.labels={}, line 2, column 1"),
                              ("whole.csv", b"a\n" + b"1\n" * 50, "{}: labels of type float64; expected"),
                              ("few.npy", np.arange(49), "{}: labels of shape")):
        file = tmp_path / name
        if isinstance(write, bytes):
            file.write_bytes(write)
        elif write is not None:
            np.save(file, write)
        refuses(InputError, says.format(file), Arrays(file=str(tmp_path / "x.npy"), labels=str(file)).prepare)


@pytest.mark.parametrize("title", ["body height", "PM 2.5", "Q 1 2024"])
def test_the_name_of_a_single_column_may_hold_blanks(tmp_path, title):
    (tmp_path / "t.csv").write_text("\n".join([title, *map(str, range(20))]))
    assert Arrays(file=str(tmp_path / "t.csv")).prepare().spec.columns == (title,)


@pytest.mark.parametrize(("low", "said"), [(0.0, ""), (-1.0, "values from -1 to 1, of which pictures show 0 to 1")])
def test_images_outside_the_range_of_pictures_are_told_of(tmp_path, capsys, low, said):
    np.save(tmp_path / "x.npy", np.linspace(low, 1, 20 * 16, dtype=np.float32).reshape(20, 1, 4, 4))
    Arrays(file=str(tmp_path / "x.npy"), layout="nchw").prepare()
    out = capsys.readouterr().out
    assert said in out and bool(out) == bool(said)


def test_whether_numbers_of_columns_are_an_item_is_always_said(tmp_path, capsys):
    """pandas writes 0,1,... above columns without names, and 0 above one, which is as likely an item."""
    item = "the whole numbers in line 1 are an item; if they are a heading"
    for first, value, items, said in (
        ("0,1", "5", 20, "line 1 only numbers the columns, as pandas does without names,"), ("a,b", "5", 20, None),
        ("0,1.0", "5", 21, None), ("1,2", "5", 21, None), ("0", "5", 21, item), ("0", "0.5", 21, item),
        ("10,20", "0.5", 21, item), ("1,2.5", "0.5", 21, None),
    ):
        row = ",".join([value] * (1 + first.count(",")))
        (tmp_path / "t.csv").write_text("\n".join([first, *[row] * 20]))
        data = Arrays(file=str(tmp_path / "t.csv")).prepare()
        assert sum(len(data.split(split)) for split in SPLITS) == items
        out = capsys.readouterr().out
        assert out == "" if said is None else said in out and out.count("\n") == 1


@pytest.mark.parametrize("options", [{"levels": 1}, {"test_fraction": -0.1}, {"val_fraction": 1.0}, {"layout": "hwc"}])
def test_bad_options(options):
    with pytest.raises(InputError, match=f"data.{next(iter(options))}"):
        Arrays(file="a.npy", **options)


def test_a_value_far_beyond_all_others_and_a_batch_of_more_than_all_are_mentioned(tmp_path):
    x = np.random.default_rng(1).standard_cauchy((300, 2))  # a heavy tail is none
    np.save(tmp_path / "plain.npy", x)
    assert Arrays(file=str(tmp_path / "plain.npy"), batch_size=8).prepare().warnings() == []
    x[:, 1] = np.where(np.arange(300) % 100 == 7, 1e18, x[:, 1])
    np.save(tmp_path / "far.npy", x)
    outlier, *rest = reversed(Arrays(file=str(tmp_path / "far.npy"), batch_size=400).prepare().warnings())
    assert "column 2 of training item" in outlier and "1e+18" in outlier
    assert any("data.batch_size=400 is more than the" in line for line in rest)


def test_an_outlier_has_the_name_of_its_column(tmp_path):
    rows = [f"{k},{1e9 if k == 7 else k % 50}" for k in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(["age,height", *rows]))
    assert any("column 2 (height) of" in line for line in Arrays(file=str(tmp_path / "t.csv")).prepare().warnings())


def test_tabs_separate_the_names_of_a_tsv_that_have_commas(tmp_path):
    (tmp_path / "t.tsv").write_text("Height, cm\tWeight, kg\n170\t60.5\n180\t80.25\n")
    assert columns_of(tmp_path / "t.tsv") == ("Height, cm", "Weight, kg")
    assert read_arrays(tmp_path / "t.tsv", "data.file")["arr_0"].tolist() == [[170, 60.5], [180, 80.25]]


@pytest.mark.parametrize("container", ["npz", "compressed"])
def test_a_flipped_bit_anywhere_in_the_items_is_found(container, tmp_path, refuses):
    file = save(tmp_path, container, NHWC)
    with open(file, "rb") as opened:
        whole = opened.read()
    for place in np.linspace(300, len(whole) - 300, 12).astype(int):
        altered = bytearray(whole)
        altered[place] ^= 1
        with open(file, "wb") as opened:
            opened.write(altered)
        refuses(InputError, "cannot be read: ", Arrays(file=file).prepare)


def test_an_array_may_not_reach_beyond_its_own_record(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, x=NHWC, y=np.zeros(50, np.int64))
    content = file.read_bytes()
    assert content.count(b"(50, 6, 7, 3)") == 1
    file.write_bytes(content.replace(b"(50, 6, 7, 3)", b"(51, 6, 7, 3)"))
    with pytest.raises(InputError, match="not the size that its header declares"):
        Arrays(file=str(file)).prepare()


@pytest.mark.parametrize("heading, delimiter, names", [
    ("a,b,c", ",", ("a", "b", "c")),
    ("# a,b,c", ",", ("a", "b", "c")),
    ('"name, of a",b,"c"', ",", ("name, of a", "b", "c")),
    ('"weight, kg";b;"c"', ";", ("weight, kg", "b", "c")),
    ("weight, kg;b;c", ";", ("weight, kg", "b", "c")),
    ("Temp (C; F),b,c", ",", ("Temp (C; F)", "b", "c")),
    ("a;x,b;y,c;z", ",", ("a;x", "b;y", "c;z")),
    ('height 5",weight 6",c', ",", ('height 5"', 'weight 6"', "c")),
    ('# "a, b";b;c', ";", ("a, b", "b", "c")),
    ("\ta\tb", "\t", ("", "a", "b")),
    ("a  b c", " ", ("a", "b", "c")),
    ("a|b|c", "|", ("a", "b", "c")),
    ("0,1,2", ",", ("0", "1", "2")),
    (",0,1", ",", ("", "0", "1")),
    (",?,value", ",", ("", "?", "value")),
    ("# 2019 2020 2021", " ", ("2019", "2020", "2021")),
])  # fmt: skip
def test_headings(tmp_path, capsys, heading, delimiter, names):
    file = tmp_path / "t.csv"
    rows = np.random.default_rng(0).normal(size=(30, 3))
    file.write_text("\n".join([heading, *(delimiter.join(map(str, row)) for row in rows)]))
    module = Arrays(file=str(file)).prepare()
    assert module.spec.columns == names
    same_items(module, rows.astype(np.float32))
    assert ("column 1 has no name" in capsys.readouterr().out) == (names[0] == "")
