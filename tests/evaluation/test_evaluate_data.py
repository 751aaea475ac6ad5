"""The items that are evaluated: those of training, other ones, and those of other data sets."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from genmodels.core.errors import InputError
from genmodels.data.arrays import Arrays
from genmodels.data.speech import Speech
from genmodels.data.toy import Toy
from genmodels.data.vision import Digits
from genmodels.evaluation.checkpoint import (
    _require_same_division,
    fits,
    require_same_items,
)
from genmodels.evaluation.likelihood import LikelihoodStage
from genmodels.models.build import build
from genmodels.models.normalizing_flows import NSF
from genmodels.speech.audio import write_wav
from tests.evaluation.command import evaluate, report
from tests.gaussian_models import GaussianFlow, save

pytestmark = pytest.mark.usefixtures("short_pilot")


def test_items_that_a_model_was_trained_on_are_not_held_out(gaussians, tmp_path):
    for word in ("data.seed=5", "data.test_fraction=0.3"):
        _, err = evaluate(f"ckpt={gaussians}/flow", word, cwd=tmp_path, code=2)
        assert f"{word} divides gauss anew and would hold out items that the model was trained on" in err
    words = ["data.test_fraction=0.2", "stages=[cost]", f"out={tmp_path}/a.json"]
    evaluate(f"ckpt={gaussians}/flow", *words, cwd=tmp_path)


@pytest.mark.parametrize("rows, order, asked, said", [
    (60, "abc", {}, None), (60, "abc", {"batch_size": 5}, None), (61, "abc", {}, "has changed since training"),
    (61, "abc", {"file": "t.csv"}, None), (60, "abd", {"file": "t.csv"}, "columns are a, b, d.* built for a, b, c"),
    (-60, "abc", {}, "has changed since training"),
])  # fmt: skip
def test_a_table_that_changed_since_training_is_refused(tmp_path, rows, order, asked, said):
    file, x = tmp_path / "t.csv", np.random.default_rng(0).normal(size=(61, 3))

    def data(rows, order):
        chosen = x[:rows] if rows > 0 else x[:-rows][::-1]  # of the same items in another order other ones are held out
        np.savetxt(file, chosen, delimiter=",", header=",".join(order), comments="")
        return Arrays(file=str(file)).prepare()

    trained, found = SimpleNamespace(spec=data(60, "abc").spec, num_classes=None), data(rows, order)
    expected = contextlib.nullcontext() if said is None else pytest.raises(InputError, match=said)
    with expected:
        require_same_items(trained, found, asked)


def test_one_changed_value_of_a_long_table_is_noticed_and_an_earlier_fingerprint_accepted(tmp_path):
    file, x = tmp_path / "t.npy", np.random.default_rng(0).normal(size=(5000, 2)).astype(np.float32)
    np.save(file, x)
    trained = SimpleNamespace(spec=Arrays(file=str(file)).prepare().spec, num_classes=None)
    for changes in (1, 2502, 4998):
        changed = x.copy()
        changed[changes, 1] += 1e-3
        np.save(file, changed)
        with pytest.raises(InputError, match="has changed since training"):
            require_same_items(trained, Arrays(file=str(file)).prepare(), {})
    former = replace(trained.spec, fingerprint=trained.spec.fingerprint.partition(", all of them")[0])
    np.save(file, x)
    require_same_items(SimpleNamespace(spec=former, num_classes=None), Arrays(file=str(file)).prepare(), {})


def clips(folder: Path, lengths: list[int]) -> Path:
    """A manifest of clips of so many samples, by two speakers."""
    lines = []
    for number, length in enumerate(lengths):
        write_wav(folder / f"{number}.wav", 0.1 * torch.randn(length, generator=torch.Generator().manual_seed(number)),
                  16_000)
        lines.append(f"{number}.wav|Say {chr(97 + number % 26)}.|{'anna' if number % 2 else 'ben'}")
    (folder / "list.txt").write_text("\n".join(lines))
    return folder / "list.txt"


def test_options_that_leave_items_out_divide_the_rest_anew_and_are_refused(tmp_path):
    root = clips(tmp_path, [8000 + 1000 * number for number in range(30)])
    trained = Speech(root=str(root), layout="manifest").prepare()
    model = SimpleNamespace(spec=trained.spec, num_classes=None)
    require_same_items(model, Speech(root=str(root), layout="manifest", batch_size=3).prepare(), {"batch_size": 3})
    with pytest.warns(UserWarning, match="left out"):
        fewer = Speech(root=str(root), layout="manifest", max_seconds=1.5, skip_bad=True).prepare()
    items = [{item.name for item in data.split("train").items} for data in (trained, fewer)]
    assert {item.name for name in ("val", "test") for item in fewer.split(name).items} & items[0]  # which is why
    with pytest.raises(InputError, match="has changed since training .*data.max_seconds=1.5"):
        require_same_items(model, fewer, {"max_seconds": 1.5, "skip_bad": True})
    former = replace(trained.spec, fingerprint=trained.spec.fingerprint.partition(", clips")[0])  # of former versions
    require_same_items(SimpleNamespace(spec=former, num_classes=None), trained, {})


@pytest.mark.parametrize("change, said", [
    ({}, None), ({"symbols": "ipa"}, "in other symbols"), ({"blanks": False}, "other symbols"),
    ({"speakers": ["ben", "anna"]}, "speakers is"),
])  # fmt: skip
def test_texts_in_other_symbols_and_of_other_speakers_do_not_fit(tmp_path, change, said):
    root = clips(tmp_path, [8000] * 12)
    trained = Speech(root=str(root), layout="manifest", blanks=True).prepare().spec
    found = replace(trained)
    if "symbols" in change:
        found = replace(trained, text=trained.text | {"symbols": ["a"]})
    elif "blanks" in change:
        found = Speech(root=str(root), layout="manifest", blanks=False).prepare().spec
    elif "speakers" in change:
        found = replace(trained, speakers=("ben", "anna", "zoe"))
    with contextlib.nullcontext() if said is None else pytest.raises(InputError, match=said):
        fits(SimpleNamespace(spec=trained, num_classes=None), found)


class Mirrored(Arrays):
    """A data set that hands its options on, as CIFAR-10 does."""

    def __init__(self, **shared):
        super().__init__(**shared)


@pytest.mark.parametrize("asked, refused", [
    ({"seed": 5}, True), ({"seed": 0}, False), ({"root": "elsewhere"}, False), ({"seed": 5, "file": "b.npz"}, False),
])  # fmt: skip
def test_every_data_set_is_divided_as_in_training(gaussians, asked, refused):
    data = Mirrored(file=str(gaussians / "gauss.npz")).prepare()
    expected = pytest.raises(InputError, match="divides gauss anew") if refused else contextlib.nullcontext()
    with expected:
        _require_same_division(data, {"seed": 0}, asked)
    _require_same_division(Toy(n_train=9, n_val=9, n_test=9).prepare(), {"seed": 0}, {"seed": 5})  # draws other points


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(gaussians, tmp_path, monkeypatch):
    from genmodels.models import checkpoint

    shutil.copytree(gaussians / "flow", tmp_path / "run")
    load = checkpoint.load_model

    def replaced(path, **options):
        found = load(path, **options)
        shutil.copy(gaussians / "diffusion" / "best.ckpt", path)
        return found

    monkeypatch.setattr(checkpoint, "load_model", replaced)
    _, err = evaluate(f"ckpt={tmp_path}/run", "stages=[likelihood]", cwd=tmp_path, code=1)
    assert "was replaced while it was read: evaluate again" in err


def test_samples_are_not_compared_with_training_items(gaussians, tmp_path):
    words = [f"ckpt={gaussians}/flow", "split=train", "stages=[fidelity]", f"out={tmp_path}/a.json"]
    out, _ = evaluate(*words, cwd=tmp_path)
    assert "compared with held-out items: split=test or split=val" in out
    assert "skipped" in report(tmp_path / "a.json")["fidelity"]


def test_other_data_that_are_missing_are_said_before_the_likelihoods(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(LikelihoodStage, "run", lambda stage: pytest.fail("the likelihoods were computed first"))
    _, err = evaluate(f"ckpt={digits}", "ood=arrays", "ood_data.file=nowhere.npz", "device=cpu", cwd=tmp_path, code=2)
    assert err.count("\n") == 1 and "nowhere.npz does not exist" in err


def test_other_data_against_a_single_item(digits, tmp_path):
    out, _ = evaluate(f"ckpt={digits}", "ood=noise", "limit=1", "stages=[likelihood]", f"out={tmp_path}/r.json",
                      cwd=tmp_path)
    found = report(tmp_path / "r.json")["ood"][0]
    assert found["auroc"] is not None and list(found["scores"]) == ["less_complexity"]
    assert found["said"].endswith("no typicality, which needs two items") and "nan" not in out


def labelled(folder, x, y, **options):
    """An untrained flow of a labelled table, conditioned on its classes, in a folder with its data."""
    np.savez(folder / "table.npz", x=x.astype(np.float32), y=y)
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(folder / "table.npz")}
    prepared = build(data).prepare()
    model = NSF(prepared.spec, layers=1, hidden=8, class_conditional=True, ema_decay=0, **options)
    model.initialize(next(iter(prepared.loader("train", 64))))
    save(model, folder / "best.ckpt", data)
    return prepared


def test_classes_of_other_frequencies(tmp_path):
    """Samples have the classes of the items that they are compared with; a density of each class has no map."""
    y = np.arange(800) % 10 == 0
    prepared = labelled(tmp_path, np.random.default_rng(0).normal(size=(800, 2)) + 8 * y[:, None], y.astype(int))
    test = prepared.items("test")
    evaluate(f"ckpt={tmp_path}/best.ckpt", "stages=[likelihood,fidelity,checks]", f"samples={len(test)}", "force=true",
             f"out={tmp_path}/r.json", cwd=tmp_path)
    found, arrays = report(tmp_path / "r.json"), np.load(tmp_path / "r.npz")
    classes = arrays["samples_cond"].tolist()
    assert sorted(classes) == sorted(test.cond.tolist()) and classes[:2] == [0, 1]
    assert not found["density"] and not [check for check in found["checks"] if "integrates" in check["name"]]


def test_other_data_in_order_are_not_read_from_their_beginning(digits, tmp_path):
    """Of a test split whose first half is black a sample of the same size is evaluated."""
    x = np.zeros((200, 1, 8, 8), np.uint8)
    x[100:] = Digits().prepare().items("train").x[:100].numpy()
    arrays = {f"{name}_{split}": values for split in ("train", "val", "test")
              for name, values in (("x", x), ("y", np.arange(200) % 10))}
    np.savez(tmp_path / "other.npz", **arrays)
    out, _ = evaluate(f"ckpt={digits}", "ood=arrays", f"ood_data.file={tmp_path}/other.npz", "ood_data.levels=17",
                      "limit=40", "stages=[likelihood]", f"out={tmp_path}/r.json", cwd=tmp_path)
    found = report(tmp_path / "r.json")["ood"][0]
    assert "40 of 200 items, chosen at random" in found["said"]
    black = (np.load(tmp_path / "r.npz")["ood_0_nats"] > -150).sum()
    assert 10 < black < 30
    whole = evaluate(f"ckpt={digits}", "ood=arrays", f"ood_data.file={tmp_path}/other.npz", "ood_data.levels=17",
                     "stages=[likelihood]", f"out={tmp_path}/r.json", cwd=tmp_path)[0]
    assert "all 200 items of its test split" in whole


def test_values_that_are_no_values_of_the_data_are_named(gaussians, tmp_path):
    x = np.random.default_rng(1).normal(size=(1000, 3)).astype("float32")
    x[:, 0] = 1e30  # finite, and of no finite density
    np.savez(tmp_path / "far.npz", x=x)
    words = [f"ckpt={gaussians}/flow", f"data.file={tmp_path}/far.npz", "stages=[likelihood]",
             f"out={tmp_path}/of_far.json"]
    _, err = evaluate(*words, cwd=tmp_path, code=1)
    assert "200 of 200 likelihoods are not finite (first items: 0, 1, 2)" in err
    line = report(tmp_path / "of_far.json")["likelihood"][0]
    assert line["nll"] is None and line["reason"] == "not finite"


def test_a_label_is_missing_or_not_needed(digits, tmp_path):
    x = np.random.default_rng(1).integers(0, 17, (60, 8, 8), dtype="uint8")
    np.savez(tmp_path / "plain.npz", x=x)
    words = [f"ckpt={digits}", "data._target_=genmodels.data.arrays.Arrays", f"data.file={tmp_path}/plain.npz",
             "data.levels=17"]
    _, err = evaluate(*words, cwd=tmp_path, code=2)
    assert "they have no labels, the model is conditioned on 10 classes" in err


@pytest.mark.parametrize(("classes", "first", "ordered"), [(10, 2, True), (10, 2, False), (2, 1, True)])
def test_first_items_of_few_classes_are_no_sample_of_the_split(tmp_path, classes, first, ordered):
    labels = np.repeat(np.arange(classes), 300 // classes)
    labels = labels if ordered else np.random.default_rng(0).permutation(labels)
    x = labels[:, None] + np.random.default_rng(1).normal(size=(300, 2))
    np.savez(tmp_path / "x.npz", **{f"{split}_{key}": value.astype("float32" if key == "x" else "int64")
                                    for split in ("train", "val", "test")
                                    for key, value in (("x", x), ("labels", labels))})
    data = {"_target_": "genmodels.data.arrays.Arrays", "file": str(tmp_path / "x.npz")}
    save(GaussianFlow(build(data).prepare().spec, mean=[4.5, 4.5], covariance=[[9.0, 8.0], [8.0, 9.0]]),
         tmp_path / "best.ckpt", data)
    for limit, warned in ((60, ordered), (300, False), (3, ordered and classes > 2)):
        out, err = evaluate(f"ckpt={tmp_path}/best.ckpt", "stages=[likelihood]", f"limit={limit}",
                            f"out={tmp_path}/r.json", cwd=tmp_path)
        assert ("only the first" in out + err) == warned
        said = f"60 of them have {first} class{'es' * (first > 1)}, 60 from the whole split {classes}; their values"
        assert limit != 60 or (said in out + err) == warned
