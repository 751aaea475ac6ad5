"""`genmodels shards`, and training on what it writes."""

from __future__ import annotations

import pytest

from genmodels.cli.main import main


def test_a_data_set_becomes_shards(tmp_path, capsys):
    out = tmp_path / "shards"
    words = ["shards", "data=toy", "data.n_train=40", "data.n_val=5", "data.n_test=5", f"out={out}", "items=15"]
    for more in ([], ["data.batch_size=3"]):  # the second time everything is there
        assert main([*words, *more]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"5 shards in {out}: 40 train, 5 val, 5 test") and f"data.root={out}" in said
    assert main([*words, "data.seed=3"]) == 2
    assert "holds shards of other data (source differ)" in capsys.readouterr().err
    assert main(["doctor", "data=shards", f"data.root={out}", "model=nsf"]) == 0
    assert "40 train, 5 val, 5 test" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["data=toy"], "out is missing"),
    (["out=x"], "data"),
    (["data=toy", "out=s3://bucket/x"], "out=s3://bucket/x: shards are written to a folder of this machine"),
    (["data=toy", "out='st*r'"], "data.root could not name this folder, because of *"),
    (["data=toy", "out=x.tar"], "give it another ending than .tar"),
    (["data=toy", "out=x", "items=0"], "items must be at least 1"),
    (["data=toy", "out=x", "item=3"], "did you mean 'items'"),
])  # fmt: skip
def test_usage_errors_are_one_line(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["shards", *words]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1, message


def test_the_folder_of_an_unknown_user_is_one_of_that_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shards", "data=toy", "data.n_train=9", "data.n_val=5", "data.n_test=5", "out='~nobody-here/x'"]) == 0
    assert "3 shards in ~nobody-here/x: 9 train" in capsys.readouterr().out
    assert len(list((tmp_path / "~nobody-here" / "x").glob("*.tar"))) == 3


def test_out_that_is_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["shards", "data=toy", f"out={tmp_path}/file"]) == 2
    assert "cannot be written: " in capsys.readouterr().err
