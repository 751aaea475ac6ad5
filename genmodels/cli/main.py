"""`genmodels <command>`: the command line and its exit codes.

Exit codes: 0 success; 1 failure (also findings of `genmodels doctor`); 2 usage error; 130 interrupted; 141 the reader
of the output is gone (`| head`), without a message, as usual. Every expected failure is one line on stderr; others
keep their traceback.
"""

from __future__ import annotations

import os
import re
import select
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path

from genmodels.cli import CONFIGURED, FLAGS, OF_CHECKPOINTS, PLAIN, VALUED
from genmodels.core.errors import InputError, Interrupted, explain, hint, printable
from genmodels.core.files import literal


def main(argv: list[str] | None = None) -> int:
    """Run the command in `argv` (without the program's name) and return the exit code."""
    try:
        code = _command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where an error can still be handled, not at the interpreter's end
        return code
    except BrokenPipeError:
        if not unread():
            raise  # a pipe to another process
        return 141


def unread() -> bool:
    """Whether the reader of stdout or stderr is gone; further output is then discarded.

    Example:
        >>> unread()
        False
    """
    if not hasattr(select, "poll"):
        return False
    streams = select.poll()
    for number in (1, 2):
        streams.register(number, 0)  # POLLERR and POLLHUP are reported without being asked for
    closed = [number for number, event in streams.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


def _command(argv: list[str]) -> int:
    command = argv[0] if argv else "--help"
    if command in ("--help", "-h", "help", "--version"):
        from genmodels.cli.completion import overview, version

        print(version() if command == "--version" else overview())
        return 0
    if command not in (*CONFIGURED, *PLAIN):
        known = (*CONFIGURED, *PLAIN)
        return _fail("", f"unknown command {command!r}:{hint(command, known, '')} (there are {', '.join(known)})", 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Guards may run slower")  # torch on Python 3.13.0, once for each compilation
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch, in its forward derivatives
        # Lightning, about metrics that are already computed from the items of all processes.
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")
        warnings.showwarning = lambda message, *_: print(f"genmodels {command}: {' '.join(str(message).split())}",
                                                         file=sys.stderr, flush=True)
        return guarded(command, lambda: _dispatch(command, argv[1:]))


def guarded(command: str, work: Callable[[], int]) -> int:
    """The exit code of `work`, with every expected failure printed as one line."""
    from genmodels.training.processes import stoppable

    try:
        with stoppable(), _several(command):
            return work() or 0
    except SystemExit as error:  # in a process of which another one has reported the failure
        return int(error.code or 0)
    except KeyboardInterrupt:
        return _fail(command, "interrupted", 130)
    except (Exception, Interrupted) as error:
        known = explain(command, error)
        if known is None:
            raise
        return _fail(command, *known)


def _several(command: str) -> AbstractContextManager:
    """The processes that torchrun started for a command; those of a training are Lightning's."""
    if command in ("sample", "evaluate") and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        from genmodels.core.processes import ranks

        return ranks()
    return nullcontext()


def _fail(command: str, message: str, code: int) -> int:
    number = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
    if code == 2 and number and command not in ("sample", "evaluate"):
        return code  # a usage error in every process of torchrun or srun: one on each machine reports it
    if code == 130 and "GENMODELS_LAUNCHED" in os.environ:  # by `core.processes.launch`
        return code  # because another process failed or the command was stopped, which is reported
    print(printable(f"genmodels{' ' if command else ''}{command}: {message}"), file=sys.stderr)
    return code


def _dispatch(command: str, words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        from genmodels.cli.completion import command_help

        print(command_help(command))
        return 0
    if command in PLAIN:
        return import_module(f"genmodels.cli.{command}").main(words)
    options, overrides = split(words)
    if command == "transcribe":
        overrides = with_files(overrides)
    from genmodels.cli.compose import composer

    with composer(command, options.get("config_dir")) as hydra:
        if "multirun" in options:
            if "cfg" in options or "keys" in options:
                raise InputError("--cfg and --keys are of one run: leave -m out, and give one value for every key")
            from genmodels.cli.sweep import sweep

            return sweep(hydra, overrides)
        if "keys" in options:  # which can be listed before there is a checkpoint
            needed = ["ckpt"] * (command in OF_CHECKPOINTS) + {"push": ["licence"], "corpus": ["out"]}.get(command, [])
            overrides += [f"{key}=..." for key in needed if not any(word.startswith(f"{key}=") for word in overrides)]
        config = hydra.compose([with_quoted_text(word) for word in overrides])
        if "cfg" in options or "keys" in options:
            from genmodels.cli.completion import all_keys, as_yaml

            print(all_keys(hydra, overrides, config) if "keys" in options else as_yaml(config), end="")
            return 0
    import_module(f"genmodels.cli.{command}").run(**config)
    return 0


_MARKED = re.compile(r"\[(slow|pause)[]=]")


def with_quoted_text(word: str) -> str:
    """A word `text=...` with its value quoted, unless it is quoted already or a list.

    Example:
        >>> print(*map(with_quoted_text, ("text=Don't stop, please!", "text=[one,two]", "text=[slow]one[/slow]")))
        text='Don\\'t stop, please!' text=[one,two] text='[slow]one[/slow]'
    """
    key, equals, value = word.partition("=")
    of_text = key == "text" and value and value[0] not in "'\"" and value != "null" and (
        value[0] != "[" or _MARKED.match(value))  # a list of texts, unless it is a mark such as [slow]
    return f"{key}{equals}{literal(value)}" if of_text else word


def with_files(words: list[str]) -> list[str]:
    """The words of the command line with the files among them, which have no key, as one setting.

    Example:
        >>> print(*with_files(["ckpt=best.ckpt", "a.wav", "it's.wav"]))
        ckpt=best.ckpt files=['a.wav','it\\'s.wav']
    """
    names = [word for word in words if "=" not in word or Path(word).is_file()]
    if not names:
        return words
    if any(word.startswith("files=") for word in words):
        raise InputError(f"{names[0]} is named beside files=: name all files in one of the two ways")
    return [*(word for word in words if word not in names), f"files=[{','.join(map(literal, names))}]"]


def split(words: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The options (words with a dash) and the overrides (the rest).

    Example:
        >>> split(["-m", "seed=0,1", "--cfg", "job"])
        ({'multirun': '', 'cfg': 'job'}, ['seed=0,1'])
    """
    options: dict[str, str] = {}
    overrides: list[str] = []
    words = list(words)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word in FLAGS:
            options[FLAGS[word]] = ""
        elif name in VALUED:
            if not equals and not words:
                raise InputError(f"{name} needs a value: {name} {'job' if VALUED[name] == 'cfg' else 'folder'}")
            options[VALUED[name]] = value if equals else words.pop(0)
        elif word.startswith("-"):
            known = [*FLAGS, *VALUED, "--help"]
            raise InputError(f"unknown option {word!r}{hint(word, known)} (there are {', '.join(known)}; everything "
                             "else is key=value, as in trainer.max_steps=100)")
        else:
            overrides.append(word)
    if options.get("cfg", "job") != "job":
        raise InputError(f"--cfg {options['cfg']}: only --cfg job, the configuration of the run, can be shown")
    if "resolve" in options and "cfg" not in options:  # as in Hydra; here --cfg job alone resolves them too
        raise InputError("--resolve is for --cfg job, to show the values of interpolations: add --cfg job")
    return options, overrides
