"""Errors of one line, and progress on a terminal and in a file."""

import errno
import io
import math
import os

import numpy as np
import pytest
import torch

from genmodels.core.errors import (
    InputError,
    OptionError,
    at_least,
    check_number,
    explain,
    none_or_at_least,
    one_of,
    positive,
    progress_bar,
)


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def test_progress_in_a_file_is_plain_lines(monkeypatch):
    """A pipe gets one line for each half minute, here of a clock, and none before; a terminal a bar that moves."""
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    for stream, plain in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        for _ in progress_bar(range(8), desc="items", miniters=1):
            clock[0] += 10.0
        lines = stream.getvalue().splitlines()
        assert ("\r" in stream.getvalue()) != plain
        if plain:
            shown = [line.partition(" [")[0] for line in lines]
            assert shown == ["items:  38% 3/8", "items:  75% 6/8", "items: 100% 8/8"]


def test_the_last_line_in_a_file_stands_once(monkeypatch):
    """A bar that ends in the state of its last line does not repeat it."""
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())
    with progress_bar(total=2, desc="items") as bar:
        assert bar.miniters == 1 and not bar.dynamic_miniters  # else tqdm's monitor prints lines of its own
        for name in ("a", "b"):
            clock[0] += 40.0
            bar.set_postfix_str(name, refresh=False)
            bar.update()
            clock[0] += 1.0
    lines = [line.partition(" [")[0] for line in stream.getvalue().splitlines()]
    assert lines == ["items:  50% 1/2", "items: 100% 2/2"]


def test_an_error_of_two_lines_is_caught(refuses):
    """The check that the tests of all modules use."""

    def fail(message):
        raise InputError(message)

    assert refuses(ValueError, "b, c", fail, "a: b, c") == "a: b, c"
    with pytest.raises(AssertionError):
        refuses(InputError, "b, c", fail, "a: b, c\nd")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG])
def test_a_place_that_cannot_be_used_is_one_line(number):
    said, code = explain("train", OSError(number, os.strerror(number), "locked/x"))
    assert said == f"locked/x: {os.strerror(number).lower()}" and code == 1
    assert explain("train", OSError(errno.EIO, "input", "locked/x")) is None


def test_positive_numbers():
    for value in (0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5)):
        assert positive("std", value) == 0.5
    for value in (0, -1.0, math.inf, math.nan, True, None, "1", torch.tensor(0.0), np.ones(2)):
        with pytest.raises(InputError, match="std must be a positive finite number, got "):
            positive("std", value)


def test_numbers_of_numpy_are_numbers():
    check_number("temperature", np.float32(0.5), 0)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        check_number("temperature", np.float32("nan"), 0)


@pytest.mark.parametrize("size", [None, 0, 1.5, True])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(OptionError, match="depth must be "):
        at_least(1, depth=size)
    none_or_at_least(1, depth=None, width=2)


def test_a_choice_may_be_anything():
    with pytest.raises(OptionError, match="solver must be one of a, got"):
        one_of("solver", ["a"], {"a": 1})
