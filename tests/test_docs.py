"""Every code block of the README and the documentation runs: Python as it stands, commands as far as composing."""

from __future__ import annotations

import configparser
import importlib.util
import os
import pkgutil
import re
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from genmodels.cli import CONFIGURED, OF_CHECKPOINTS
from genmodels.cli.compose import composer, in_quotes
from genmodels.cli.main import split, with_files, with_quoted_text
from genmodels.cli.schema import Schema
from genmodels.core.errors import InputError
from genmodels.core.files import CONFIG_DIR, groups
from genmodels.models.build import NETWORKS

REPOSITORY = Path(__file__).resolve().parents[1]
GROUPS = groups()
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])
#: Python that a test of its own runs, together with the commands around it.
RUN_ELSEWHERE = {"docs/extending.md": "test_own_classes.py"}
#: Pages whose commands really run, with -m slow, in the order of the page.
TUTORIALS = ["docs/digits.md", "docs/own_bijection.md", "docs/tutorial.md"]
#: What else is typed, and why it is neither composed nor run here.
NOT_RUN = {
    "eval": "completion has tests of its own (tests/cli/test_completion.py)",
    "export": "sets a variable of the shell",
    "unset": "sets a variable of the shell",
    "source": "enters a virtual environment",
    "python -m venv": "makes a virtual environment: .ci/run",
    "python -m build": "makes the wheel: tests/test_packaging.py",
    "twine": "checks the wheel: the workflow",
    "pre-commit": "installs a hook",
    "pytest": "is running",
    "ruff": "runs in .ci/run",
    "mypy": "runs in tests/test_api.py",
    "jupyter": "shows the notebooks: tests/test_notebooks.py runs them",
}
_COMMANDS = ("python ", "genmodels ", "pip ", "torchrun ", "srun ", "import ", "from ")
_SCRIPT = re.compile(r"(?:^|.*\s)(?:\S*/)?(train|sample|evaluate)\.py\b")


class Block(NamedTuple):
    """A block of a page: its language (`indented` for one without fence), first line and text."""

    language: str
    line: int
    text: str


def blocks(text: str) -> list[Block]:
    """The blocks of a page; indentation inside of lists is no block."""
    found, open_, previous = [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        if open_ is None and (fence := re.match(r"```(\w*)$", line)):
            open_ = Block(fence[1], number + 1, "")
        elif open_ and open_.language != "indented":
            if line == "```":
                found.append(open_)
                open_ = None
            else:
                open_ = open_._replace(text=f"{open_.text}{line}\n")
        elif open_ is None and line.startswith("    ") and not previous:
            open_ = Block("indented", number, f"{line[4:]}\n")
        elif open_:
            if line.startswith("    "):
                open_ = open_._replace(text=f"{open_.text}{line[4:]}\n")
            else:
                found.append(open_)
                open_ = None
        previous = line
    return found if open_ is None else [*found, open_]


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def every(language: str) -> list[tuple[str, Block]]:
    return [(name(page), block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))
            if block.language == language]


def commands(text: str, variables: dict[str, str]) -> list[list[str]]:
    """The words of every command of a shell block; assignments go to `variables`, placeholders become `x`."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"<[^<>]*>", "x", line)
        if assigned := re.fullmatch(r"([A-Z]+)=(.*)", line):
            variables[assigned[1]] = shlex.split(assigned[2])[0]
            continue
        lexer = shlex.shlex(string.Template(line).safe_substitute(variables), posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if word in ("&&", ";"):
                found += [words] if words else []
                words = []
            else:
                words.append(word)
    return found


def reason(words: list[str]) -> str | None:
    """Why a command is not composed, None if it is to be."""
    if {"trust=[mine]", "trust=[small]"} & {*words}:
        return "its classes are those of the page: run by tests/test_own_classes.py and, with -m slow, as a tutorial"
    return next((why for start, why in NOT_RUN.items() if words[: len(start.split())] == start.split()), None)


class Checker:
    """Composes commands, one Hydra for each kind of command."""

    def __init__(self):
        self.waiting: dict[str, list[tuple[str, list[str]]]] = {command: [] for command in CONFIGURED}
        setup = configparser.ConfigParser()
        setup.read(REPOSITORY / "setup.cfg", encoding="utf-8")
        self.extras = set(setup["options.extras_require"])

    def add(self, where: str, words: list[str]) -> None:
        """One command: checked at once, or kept for `compose`."""
        script = _SCRIPT.match(" ".join(words))
        if words[0] == "pip":
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(words)):
                assert set(extra.split(",")) <= self.extras, f"{where}: unknown extra in {words}"
            return
        if words[0] == "genmodels" or (script and words[0] in ("python", "torchrun", "srun")):
            if script:
                position = next(k for k, word in enumerate(words) if _SCRIPT.match(word))
                command, rest = script[1], words[position + 1 :]
            else:
                command, rest = words[1], words[2:]
            if command in CONFIGURED:
                self.waiting[command].append((where, rest))
            elif command == "doctor":
                self.waiting["train"].append((where, rest))
            else:
                assert command in ("info", "completion") or command.startswith("-"), f"{where}: {words}"
            return
        assert words[0] == "python" and words[1].startswith("benchmarks/"), f"{where}: nothing covers {words}"
        source = (REPOSITORY / words[1]).read_text(encoding="utf-8")
        options = {word for word in words[2:] if word.startswith("--")}
        assert all(f'"{option}"' in source for option in options), f"{where}: {words}"

    def check(self, whole: bool) -> list[str]:
        """What is wrong with the commands that were kept; `whole` composes each as a run does, which takes long."""
        wrong, optuna = [], importlib.util.find_spec("optuna") is not None
        plugins = importlib.util.find_spec("hydra_plugins") is not None
        for command, kept in self.waiting.items():
            with composer(command) as hydra:
                for where, words in kept:
                    options, overrides = split([word for word in words if word != "..."])
                    overrides = with_files(overrides) if command == "transcribe" else overrides
                    given = [in_quotes(with_quoted_text(word)) for word in overrides
                             if plugins or not word.startswith("hydra/launcher")]
                    if not optuna and any("sweeper=optuna" in word for word in given):
                        given = [word for word in given if not word.startswith("hydra") and "interval" not in word]
                    if command in OF_CHECKPOINTS and not any(word.startswith("ckpt=") for word in given):
                        given.append("ckpt=x")
                    try:
                        if "multirun" in options and whole:
                            hydra.points(given)
                        elif "multirun" in options:
                            for point in points(given):
                                fits_signatures(command, point)
                        elif whole or any(word.startswith("experiment=") for word in given):
                            hydra.compose(given)
                        else:
                            fits_signatures(command, given)
                    except InputError as error:
                        wrong.append(f"{where}: {' '.join(words)}: {error}")
        return wrong


def points(words: list[str]) -> list[list[str]]:
    """The words of a sweep with the first and with the last value of each setting."""
    parsed = OverridesParser.create().parse_overrides([word for word in words if not word.startswith("hydra")])
    swept = {o.key_or_group: list(o.sweep_string_iterator()) for o in parsed
             if o.is_sweep_override() and not o.is_interval_sweep()}
    fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
    return [[*fixed, *(f"{key}={values[end]}" for key, values in swept.items())] for end in (0, -1)]


def fits_signatures(command: str, words: list[str]) -> None:
    """Check the settings of a command against the signatures of the chosen classes, without presets."""
    chosen = {"model": "ddpm", "data": "digits"} if command == "train" else {}
    config: dict = {}
    settings = []
    for override in OverridesParser.create().parse_overrides(words):
        key, value = override.key_or_group, override.value()
        if key in GROUPS and isinstance(value, str):
            if value not in GROUPS[key]:
                raise InputError(f"there is no {key}={value}")
            chosen[key] = value
        elif not override.is_delete():
            settings.append((key, {"_target_": NETWORKS[value]} if key == "model.net" else value))
    for group in ("model", "data"):
        if group in chosen:
            file = CONFIG_DIR / group / f"{chosen[group]}.yaml"
            config[group] = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key, value in settings:
        *parts, last = key.split(".")
        place = config
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    Schema(f"genmodels.cli.{command}.run", trust=config.get("trust") or []).check(config)


def problems(pages: list[tuple[str, Block]], whole: bool = False) -> list[str]:
    checker, variables = Checker(), {}
    for page, block in pages:
        for words in commands(block.text, variables.setdefault(page, {})):
            if reason(words) is None:
                checker.add(f"{page}:{block.line}", words)
    return checker.check(whole)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_command_is_valid(whole):
    found = every("sh")
    assert len(found) > 40 and problems(found, whole) == []


@pytest.mark.parametrize("line, message", [
    ("python train.py model=dppm", "dppm"),
    ("genmodels sample ckpt=<run> stepz=3", "stepz"),
    ("torchrun --nproc-per-node=2 evaluate.py ckpt=a drawz=3", "drawz"),
    ('X="model=glow data=toys"\npython train.py $X', "toys"),
])
def test_a_wrong_command_is_found(line, message):
    (found,) = problems([("page", Block("sh", 1, line))])
    assert message in found


@pytest.mark.parametrize("line", ["pip install -e '.[sppech]'", "python benchmarks/shards.py --nonsense", "make all"])
def test_what_nothing_covers_is_found(line):
    with pytest.raises(AssertionError):
        problems([("page", Block("sh", 1, line))])


def test_every_block_has_a_language_that_says_how_it_is_tested():
    """`sh` and `python` run, `yaml` is read, `text` is output; what is indented is an equation or output."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            where = f"{name(page)}:{block.line}"
            assert block.language in ("sh", "python", "yaml", "text", "indented"), f"{where}: {block.language!r}"
            if block.language in ("text", "indented"):
                assert not any(line.startswith(_COMMANDS) for line in block.text.splitlines()), where
            if block.language == "yaml":
                yaml.safe_load(block.text)


@pytest.mark.parametrize("page", sorted({page for page, _ in every("python")} - set(RUN_ELSEWHERE)))
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, short_pilot):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    for where, block in every("python"):
        if where == page:
            exec(compile("\n" * (block.line - 1) + block.text, str(REPOSITORY / page), "exec"), scope)


_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors of the headings of a page, as on GitHub and on the site."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ("CHANGELOG.md", "migration.md")], ids=name)
def test_what_a_page_names_exists(page):
    """Modules and classes by their dotted names, and files of the tests; the pages left out name what has moved."""
    text = page.read_text(encoding="utf-8")
    for dotted in sorted(set(re.findall(r"\bgenmodels(?:\.[A-Za-z_]\w*)+", text))):
        assert pkgutil.resolve_name(dotted) is not None
    files = {file.name for file in (REPOSITORY / "tests").rglob("*.py")}
    assert set(re.findall(r"\btest_\w+\.py", text)) <= files
    for file in re.findall(r"\b(?:tests|benchmarks|genmodels)/[\w/]+\.py", text):
        assert (REPOSITORY / file).exists(), file


def test_links_lead_somewhere_and_every_page_is_in_the_navigation():
    for page in PAGES:
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            place, _, anchor = link.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert place.startswith("https://") or target.exists(), f"{name(page)}: {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name(page)}: {link}"
    site = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r": ([\w/]+\.md)$", site, re.MULTILINE)) - {"reference/commands.md"}
    assert listed == {str(page.relative_to(REPOSITORY / "docs")) for page in PAGES
                      if page.is_relative_to(REPOSITORY / "docs")}
    assert yaml.safe_load(site)["docs_dir"] == "docs"


def table_faults(text: str) -> list[str]:
    """Lines that a page would not show as rows of their table: cut off from it, prose after it, of other columns."""
    without_code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    faults = []
    for paragraph in re.split(r"\n\s*\n", without_code):
        lines = [line for line in paragraph.splitlines() if not line.startswith("<!--")]
        rows = [line.startswith("|") for line in lines]
        if not any(rows):
            continue
        cells = [len(re.sub(r"`[^`]*`", "", line.replace("\\|", "")).split("|")) for line in lines]
        faults += [line for line, row, count in zip(lines, rows, cells, strict=True) if not row or count != cells[0]]
        if len(lines) < 2 or set(lines[1]) - set("|-: "):
            faults.append(lines[0])
    return faults


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_whole(page):
    assert not table_faults(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("tail", ["\n| c | d |\n", "and prose\n", "| c |\n", "| c | d | e |\n"])
def test_a_broken_table_is_found(tail):
    whole = "| a | b |\n|---|---|\n| `x|y` | 2 \\| 3 |\n"
    assert not table_faults(whole)
    assert table_faults(whole + tail)


@pytest.mark.parametrize("page, tables", [("results.md", "## How to read the numbers"), ("races.md", "## Glow")])
def test_a_summary_repeats_the_tables_below(page, tables):
    """Every bound stands in a row below, together with the Fréchet distance beside it."""
    summary, below = (REPOSITORY / "docs" / page).read_text(encoding="utf-8").split(tables, 1)
    rows = [line for line in below.splitlines() if line.startswith("|")]
    pairs = re.findall(r"<= ([\d.]+\(\d+\))(?: \| ([\d.]+\(\d+\)))?", summary)
    assert len(pairs) >= 8
    assert not [pair for pair in pairs if not any(all(f" {value}" in row for value in pair if value) for row in rows)]


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_as_it_stands(page, tmp_path):
    python = [block.text for where, block in every("python") if where == page]
    if python:
        (tmp_path / "mine.py").write_text("\n".join(python))
    scripts = {f"{word}.py": str(REPOSITORY / f"{word}.py") for word in ("train", "sample", "evaluate")}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", str(REPOSITORY)])}
    for where, block in every("sh"):
        for words in commands(block.text, {}) if where == page else []:
            if any(words[: len(start.split())] == start.split() for start in NOT_RUN):
                continue
            words = [sys.executable, *(["-m"] if words[0] == "genmodels" else []), *words[words[0] == "python" :]]
            done = subprocess.run([scripts.get(word, word) for word in words], cwd=tmp_path, env=environment,
                                  capture_output=True, text=True)
            assert done.returncode == 0, f"{page}: {words}: {done.stderr}"
