"""The texts of --help and --keys, and `genmodels completion`: bash completes commands, choices, settings, values."""

from __future__ import annotations

import ast
import shlex
import textwrap
from pathlib import Path
from typing import Literal

from genmodels.cli import CONFIGURED, FLAGS, PLAIN, VALUED
from genmodels.cli.schema import Choice, Node, Scalar, kinds_of, show
from genmodels.cli.signatures import Key, find, target
from genmodels.core.errors import InputError
from genmodels.core.files import CONFIG_DIR, found_at, groups

OPTIONS = """\
  --keys             list all settings with type, value and meaning, and exit
  --cfg job          print the configuration and exit
  -m, --multirun     run every combination of values given as a,b,c (a sweep)
  -cd, --config-dir  further folder with model/, data/, experiment/, ... files
  -h, --help         show this help and exit"""
SCRIPTS = ("train", "sample", "evaluate")  # those with a file of that name at the top of the repository
EXAMPLES = {
    "train": ["model=ddpm", "model=ddpm data=mnist trainer.max_steps=5000 seed=1", "-m model=ddpm seed=0,1",
              "model=ddpm trainer=smoke", "model=ddpm resume=last"],
    "sample": ["ckpt=runs/ddpm-digits/<time>/best.ckpt n=64 sampler=ddim steps=50 seed=0"],
    "transcribe": ["ckpt=runs/recognizer-speech/<time>/best.ckpt a.wav b.wav"],
    "evaluate": ["ckpt=runs/ddpm-digits/<time>/best.ckpt", "'ckpt=[runs/a/best.ckpt,runs/b/best.ckpt]'"],
    "verify": ["model=glow data=digits", "ckpt=runs/glow-digits/<time>/best.ckpt",
               "what=mypackage.layers:MyLayer shape=[3,8,8] options.channels=3 trust=[mypackage]",
               "what=attention", "what=attention object=mypackage.layers:factory capabilities=[relative,cache,causal] "
               "trust=[mypackage]"],
    "demo": ["ckpt=runs/ddpm-digits/<time>", "'ckpt=[runs/a,runs/b]' port=8080"],
    "export": ["ckpt=runs/ddpm-digits/<time> out=model.safetensors", "ckpt=model.safetensors out=network.onnx"],
    "push": ["ckpt=runs/ddpm-digits/<time> to=user/name licence=mit", "ckpt=model.safetensors out=card licence=mit"],
    "shards": ["data=image_folder data.root=photos data.size=64 out=shards"],
    "corpus": ["out=corpus", "out=corpus text=book.txt voice=slt"],
    "info": ["runs/ddpm-digits/<time>/last.ckpt", "runs/*/*/best.ckpt --full", "runs/ddpm-digits/<time> --open"],
    "completion": ["bash"],
    "doctor": ["", "data=image_folder data.root=photos --fix-list bad.txt"],
}


def version() -> str:
    """The program's name and version."""
    from genmodels import __version__

    return f"genmodels {__version__}"


def overview() -> str:
    """One line for every command."""
    lines = [f"  {name:<10} {_summary(name)}" for name in (*CONFIGURED, *PLAIN)]
    return "\n".join(["usage: genmodels <command> [key=value ...]", "", *lines, "",
                      "Run 'genmodels <command> --help' for details."])


def _summary(command: str) -> str:
    return target(f"genmodels.cli.{command}.run").summary.split(". ")[0].rstrip(".")


def command_help(command: str) -> str:
    """The help of a command: summary, groups, settings, options, examples."""
    script = f"python {command}.py" if command in SCRIPTS else f"genmodels {command}"
    also = f"  (installed: genmodels {command})" if command in SCRIPTS else ""
    parts = [_summary(command) + ".", f"usage: {script} [key=value ...]{also}"]
    chosen = _defaults(command)
    if chosen:
        available = selectable(command)
        lines = {}
        for group, default in chosen.items():
            named = (f"{name}{' (default)' * (name == default)}" for name in available[group])
            lines[group] = ", ".join(named)
        if "preset" in available:
            presets = ", ".join(available["preset"])
            lines["preset"] = f"<model>_<data> (default where there is one; ~preset for none): {presets}"
        parts.append("groups (group=option):\n" + "\n".join(
            textwrap.fill(text, 118, initial_indent=f"  {group:<11} ", subsequent_indent=" " * 14,
                          break_long_words=False, break_on_hyphens=False) for group, text in lines.items()))
    keys = target(f"genmodels.cli.{command}.run").keys.values()
    own = [entry for key in keys if key.name not in chosen for entry in _entries(key)]
    if own:
        parts.append("settings:\n" + "\n".join(own))
    if find(f"genmodels.cli.{command}.main") is None:
        parts.append(f"options:\n{OPTIONS}")
    parts.append("examples:\n" + "\n".join(f"  {script} {example}".rstrip() for example in EXAMPLES[command]))
    return "\n\n".join(parts)


def _defaults(command: str) -> dict[str, str | None]:
    """The config groups of a command's defaults list, with their default options."""
    import yaml

    file = CONFIG_DIR / f"{command}.yaml"
    entries = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults", []) if file.is_file() else []
    pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
    return {group: option for group, option in pairs if not group.startswith(("optional ", "override "))}


def selectable(command: str) -> dict[str, list[str]]:
    """The config groups of a command with their options.

    Example:
        >>> selectable("train")["trainer"], selectable("sample")
        (['default', 'gpu', 'smoke'], {})
    """
    chosen, available = _defaults(command), groups()
    return {name: available.get(name, []) for name in (*chosen, *(["preset"] if "model" in chosen else []))}


def _entries(key: Key) -> list[str]:
    """The lines for a top-level key; for a key that configures a class, those of the class's options."""
    nodes = [kind for kind in kinds_of(key) if isinstance(kind, Node)]
    inner = {f"{key.name}.{k.name}": k for node in nodes for k in target(node.dotted).keys.values()} or {key.name: key}
    return [_entry(_assigned(path, k.default), k.meaning) for path, k in inner.items()]


def _assigned(name: str, default: str | None) -> str:
    if default is None:
        return f"{name}=..."
    try:
        value = ast.literal_eval(default)
    except ValueError:
        return f"{name}={default}"
    return f"{name}={show(list(value) if isinstance(value, tuple) else value)}"


def _entry(head: str, meaning: str, width: int = 30) -> str:
    lines = textwrap.wrap(meaning, 110 - width) or [""]
    first = f"  {head:<{width - 2}} {lines[0]}".rstrip()
    return "\n".join([first, *(" " * (width + 1) + line for line in lines[1:])])


def as_yaml(config: dict) -> str:
    """A configuration as YAML."""
    import yaml

    return yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True)


def all_keys(composer, overrides: list[str], config: dict) -> str:
    """All settings of the chosen classes, grouped by class; * marks those set by YAML or the command line."""
    schema = composer.schema(composer.parse(overrides), config)
    lines, heading = [], None
    for path, taker, key in schema.walk(config):
        parent, _, name = path.rpartition(".")
        if (parent, taker.name) != heading:
            heading = (parent, taker.name)
            lines += ["", f"{parent or 'top'}: {taker.name} ({taker.file})" if taker.name != "run" else "top level"]
        found = found_at(config, path)
        text = _assigned(path, key.default) if found is None else f"* {path}={show(found[0])}"
        if found is None or not isinstance(found[0], dict):
            lines.append(_entry(text, f"{_type_text(key)}  {key.meaning}".strip(), 42))
    return "\n".join(lines[1:]) + "\n"


def _type_text(key: Key) -> str:
    """The annotation as written; the values themselves if it is an alias of a list of them."""
    found = kinds_of(key)
    named = key.type_text.isidentifier() and len(found) == 1 and isinstance(found[0], Choice)
    return str(found[0]) if named else key.type_text


#: Bash passes the line up to the cursor, and treats what follows an equals sign as a separate word.
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
    if command not in (*CONFIGURED, "doctor") or "=" not in last and "/" in last:
        return []
    options = (["--fix-list"] if command == "doctor" else [*FLAGS, *VALUED]) + ["--help"]
    command = "train" if command == "doctor" else command  # of which it takes the settings
    offered = [f"{option} " for option in options] if last.startswith("-") else _settings(command, given, last)
    return sorted(word for word in offered if word.startswith(last))


def _settings(command: str, given: list[str], last: str) -> list[str]:
    """Groups and keys, or the values of a key that has an equals sign."""
    from genmodels.cli.compose import composer

    key, equals, _ = last.partition("=")
    groups = selectable(command)
    # Without options and their values, such as the file of --fix-list.
    fitting = [word for word in given if word[:1] == "~" or word[:1] != "-" and "=" in word]
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
    found = kinds_of(keys[key]) if key in keys else ()
    values = [value for kind in found if isinstance(kind, Choice) for value in kind.values]
    values += [value for kind in found if kind == Scalar("bool") for value in (True, False)]
    return [f"{key}={show(value)} " for value in values]
