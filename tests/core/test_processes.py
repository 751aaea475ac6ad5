"""Several processes as torchrun starts them: one that is lost or fails ends the others, with one line."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

import pytest
import torch

from genmodels.cli.main import guarded
from genmodels.core.errors import InputError, RunError
from genmodels.core.processes import Ranks, launch
from tests.two_processes import by_forks, fork


def _fail(how: str) -> None:
    """What each of two processes does: the second fails while the first waits for it."""
    def work() -> None:
        ranks = Ranks()
        ranks.members.append(how)
        if ranks.rank:
            ranks.serve()
        else:
            ranks.run(_second_fails, how)

    code = guarded("evaluate", work)
    if code:
        sys.exit(code)


def _second_fails(how: str) -> None:
    if torch.distributed.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise InputError("the second does not like it")


@pytest.fixture
def patient():
    """Processes that wait for each other forever are stopped."""
    faulthandler.dump_traceback_later(200, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@fork
@pytest.mark.parametrize("how", ["spawn", *["fork"] * 5])
def test_a_process_that_is_lost_ends_the_others(how, capfd, patient, monkeypatch):
    """The other one, which loses its connection, ends at nearly the same moment: the launcher blames the right one."""
    if how == "fork":
        by_forks(monkeypatch)
    with pytest.raises(RunError, match="process 1 was killed by SIGKILL; what was finished is kept"):
        launch(_fail, 2, "killed")
    assert capfd.readouterr().err == ""  # the command says the line of the error, and nobody else


@fork
def test_a_process_that_fails_ends_the_others(capfd, patient, monkeypatch):
    by_forks(monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        launch(_fail, 2, "refused")
    assert capfd.readouterr().err.splitlines() == ["genmodels evaluate: the second does not like it"]
