"""Words that lead back to a configuration: choices, changes, additions, deletions, text of any kind."""

import shlex
from pathlib import Path

import pytest

from genmodels.cli.compose import composer
from genmodels.cli.words import how_to_resume, words_of


def composed(words: list[str]) -> dict:
    with composer("train") as hydra:
        return hydra.compose(words)


@pytest.mark.parametrize("words", [
    ["model=glow", "data=mnist", "data.root='/a b/it\\'s'", "seed=2"],
    ["model=energy", "data=toy", "~model.net.activation", "model.network=deep_kernel"],
    ["model=realnvp", "data=digits", "model.layout=['checkerboard*1',squeeze,'channel*2']", "model.hidden=[8,9]"],
    ["model=ddpm", "data=spoken_digits", "data.root=fsdd", "model.cond_drop=0"],
    ["experiment=ddpm_mnist", "seed=1"],
])
def test_words_lead_back_to_their_configuration(words):
    config = composed(words)
    found = words_of(config)
    again = composed(found)
    assert all(again.get(part) == config.get(part) for part in ("model", "data", "trainer", "seed"))
    assert len(found) <= len(words) and found[0] == words[0]


def test_a_class_of_ones_own_has_no_words():
    config = composed(["model=ddpm"])
    config["model"] = {"_target_": "mine.Model"}
    assert words_of(config) is None
    assert how_to_resume(config, Path("runs/a/last.ckpt")) == "its own are in runs/a/config.yaml"


def test_an_option_that_is_null_stays_so():
    config = composed(["model=realnvp", "data=digits", "model.hidden=null"])
    assert words_of(config) == ["model=realnvp", "data=digits", "model.hidden=null"]


def test_what_to_type_is_ready_for_a_shell():
    config = composed(["model=maf", "data=arrays", "data.file='a b.csv'"])
    told = how_to_resume(config, Path("runs/a/last.ckpt"))
    words = shlex.split(told.removeprefix("go on by genmodels train"))
    assert words == ["model=maf", "data=arrays", "data.file='a b.csv'", "resume=runs/a/last.ckpt"]
