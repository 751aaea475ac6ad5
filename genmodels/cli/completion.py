"""`genmodels completion`: bash completes commands, choices of groups, names of settings and their values."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from genmodels.cli.main import CONFIGURED, PLAIN
from genmodels.cli.schema import Choice, Scalar, kinds, show
from genmodels.core.errors import InputError

#: Bash asks with the line up to the cursor, and takes what follows an equals sign for a word of its own.
_SCRIPT = """\
_genmodels() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n'
    COMPREPLY=($(genmodels completion "line=$line" 2>/dev/null))
    local word=${line##* }
    if [[ $word == *=* && $COMP_WORDBREAKS == *=* ]]; then
        COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
    fi
}
complete -o default -o nospace -F _genmodels genmodels python python3
"""


def main(words: list[str]) -> int:
    """`genmodels completion bash`, and what its script asks, `line=<text>`.

    Raises:
        InputError: for anything else.
    """
    if len(words) == 1 and words[0].startswith("line="):
        print(*candidates(words[0].removeprefix("line=")), sep="\n")
        return 0
    if len(words) != 1:
        raise InputError("name the shell: genmodels completion bash")
    return run(shell=words[0])


def run(*, shell: Literal["bash"]) -> int:
    """Print a script that makes the shell complete commands, settings and their values.

    Arguments:
        shell: bash; `eval "$(genmodels completion bash)"` in ~/.bashrc turns it on.
    """
    if shell != "bash":
        raise InputError(f"the shell must be bash, got {shell!r}")
    print(_SCRIPT, end="")
    return 0


def candidates(line: str) -> list[str]:
    """The words that the last word of a command line may become; none where the shell should offer files.

    Example:
        >>> candidates("genmodels tra"), candidates("python train.py model=ddpm data=fash")
        (['train ', 'transcribe '], ['data=fashion_mnist '])
        >>> candidates("genmodels train model=nsf data=toy model.optimizer.l")
        ['model.optimizer.lr=']
    """
    try:
        words = shlex.split(line)
    except ValueError:  # an open quotation mark
        return []
    last = "" if line[-1:].isspace() or not words else words.pop()
    program = [Path(word).name for word in words]
    if program[:1] == ["genmodels"]:
        if len(program) == 1:
            return [f"{name} " for name in (*CONFIGURED, *PLAIN) if name.startswith(last)]
        command, given = program[1], words[2:]
    else:
        command, given = "".join(program[1:2]).removesuffix(".py"), words[2:]
    if command not in CONFIGURED or "=" not in last and "/" in last:
        return []
    offered = _options() if last.startswith("-") else _settings(command, given, last)
    return sorted(word for word in offered if word.startswith(last))


def _options() -> list[str]:
    from genmodels.cli.main import FLAGS, VALUED

    return [f"{option} " for option in (*FLAGS, *VALUED, "--help")]


def _settings(command: str, given: list[str], last: str) -> list[str]:
    """Groups and keys, or the values of a key that has an equals sign."""
    from genmodels.cli.compose import composer
    from genmodels.cli.usage import selectable

    key, equals, _ = last.partition("=")
    groups, fitting = selectable(command), [word for word in given if not word.startswith("-")]
    if equals and key in groups:
        return [f"{key}={option} " for option in groups[key]]
    with composer(command) as hydra:
        try:
            config = hydra.plain(fitting)
        except InputError:  # a word before is wrong
            config = hydra.plain([])
        keys = {path: key for path, _, key in hydra.schema([], config).walk(config)}
    if not equals:
        inner = {path.rpartition(".")[0] for path in keys}
        return [f"{name}=" for name in dict.fromkeys([*groups, *(path for path in keys if path not in inner)])]
    found = kinds(keys[key].annotation, keys[key].module) if key in keys else ()
    values = [value for kind in found if isinstance(kind, Choice) for value in kind.values]
    values += [value for kind in found if kind == Scalar("bool") for value in (True, False)]
    return [f"{key}={show(value)} " for value in values]
