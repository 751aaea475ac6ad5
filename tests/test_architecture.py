"""The architecture of docs/architecture.md: imports go one way, and plain subpackages stay plain."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "genmodels"

#: What each subpackage may import from the package, besides itself.
MAY_IMPORT = {
    "core": "",
    "nn": "core",
    "flows": "core nn",
    "diffusion": "core nn",
    "energy": "core nn",
    "speech": "core nn flows diffusion energy",
    "data": "core nn flows diffusion energy speech",
    "plots": "core nn flows diffusion energy speech data",
    "models": "core nn flows diffusion energy speech data plots",
    "training": "core nn flows diffusion energy speech data plots models",
    "verification": "core nn flows diffusion energy speech data plots models",
    "evaluation": "core nn flows diffusion energy speech data plots models training verification",
    "report": "core nn flows diffusion energy speech data plots models training verification evaluation",
    "cli": "core nn flows diffusion energy speech data plots models training verification evaluation report",
}
#: Subpackages of plain torch: they never import these.
PLAIN = ("core", "nn", "flows", "diffusion", "energy", "speech")
FRAMEWORKS = ("pytorch_lightning", "lightning", "lightning_fabric", "hydra", "omegaconf", "wandb")


@functools.cache
def statements(text: str) -> list[tuple[int, str, str]]:
    """The imports of a file, inside functions too: how many levels up, the module, a name of it (or none)."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, node.module, alias.name) for alias in node.names]
    return found


def imports(package: Path) -> dict[str, set[str]]:
    """What each module under `package` imports; modules of it by their own name."""
    files = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found = {}
    for name, file in files.items():
        found[name] = set()
        for level, module, member in statements(file.read_text(encoding="utf-8")):
            assert level == 0, f"{name}: imports are absolute"
            whole = f"{module}.{member}"
            found[name].add(whole if whole in files else module)
        found[name].discard(name)
    return found


def forbidden_imports(package: Path) -> list[str]:
    """`module -> module` for each import that MAY_IMPORT or PLAIN does not allow."""
    found = []
    for name, others in imports(package).items():
        own = name.split(".")[1] if "." in name else None
        if own not in MAY_IMPORT:
            continue
        allowed = {own, *MAY_IMPORT[own].split()}
        for other in others:
            first, _, rest = other.partition(".")
            upward = first == package.name and rest and rest.split(".")[0] not in allowed
            framework = own in PLAIN and first in FRAMEWORKS
            if upward or framework:
                found.append(f"{name} -> {other}")
    return sorted(found)


def cycles(package: Path) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others (Tarjan 1972)."""
    every = imports(package)
    graph = {name: sorted(others & every.keys()) for name, others in every.items()}
    index, low, stack, found = {}, {}, [], []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name):]
            del stack[stack.index(name):]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def test_every_subpackage_has_its_place():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)
    order = list(MAY_IMPORT)
    assert all(order.index(other) < order.index(name) for name in order for other in MAY_IMPORT[name].split())


def test_imports_go_one_way():
    assert forbidden_imports(PACKAGE) == []


def test_no_two_files_need_each_other():
    assert cycles(PACKAGE) == []


#: Forbidden imports added to files, and what is found of them.
FORBIDDEN = [
    ("nn/blocks.py", "from genmodels.models.base import Loss", "genmodels.nn.blocks -> genmodels.models.base"),
    ("flows/flow.py", "from genmodels.diffusion import Denoiser", "genmodels.flows.flow -> genmodels.diffusion"),
    ("evaluation/evaluate.py", "def f():\n    from genmodels.cli.main import main",
     "genmodels.evaluation.evaluate -> genmodels.cli.main"),
    ("speech/text.py", "import pytorch_lightning as pl", "genmodels.speech.text -> pytorch_lightning"),
    ("core/files.py", "def f():\n    import hydra", "genmodels.core.files -> hydra"),
]  # fmt: skip


def test_a_cycle_of_files_and_forbidden_imports_are_found(tmp_path):
    copy = shutil.copytree(PACKAGE, tmp_path / "genmodels", ignore=shutil.ignore_patterns("__pycache__", "ljspeech"))

    def add(file: str, lines: str) -> None:
        place = copy / file
        place.write_text(f"{place.read_text(encoding='utf-8')}\n\n{lines}\n", encoding="utf-8")

    add("nn/blocks.py", "def f():\n    from genmodels.nn.unet import UNet")
    (group,) = cycles(copy)
    assert {"genmodels.nn.blocks", "genmodels.nn.unet"} <= set(group)
    for file, line, _ in FORBIDDEN:
        add(file, line)
    assert forbidden_imports(copy) == sorted(found for _, _, found in FORBIDDEN)


def test_plain_subpackages_work_without_the_frameworks():
    names = ", ".join(f"genmodels.{name}" for name in PLAIN)
    code = f"import sys; sys.modules.update(dict.fromkeys({FRAMEWORKS!r})); import {names}; print('fine')"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, genmodels, genmodels.cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert not set(done.stdout.split()) & {"torch", "numpy", "hydra", "omegaconf", "yaml", "pytorch_lightning"}


def test_modules_are_neither_fragments_nor_heaps():
    """At most 200 modules, none over 450 lines, half of them at least 150 lines long."""
    lines = sorted(len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE.rglob("*.py"))
    assert len(lines) <= 200 and lines[-1] <= 450 and lines[len(lines) // 2] >= 150


#: Test files under tests/<subpackage>/ that mirror no module, and why.
WITHOUT_A_MODULE = {
    "diffusion/test_continuous.py": "the bound in continuous time, as a likelihood (bound.py) and as an objective",
    "diffusion/test_parity.py": "skipped as a whole without diffusers",
}


def unmirrored(tests: Path, package: Path) -> set[str]:
    """Files tests/<folder>/test_<name>.py or test_<name>_<part>.py without a <package>/<folder>/<name>.py."""
    files = {file.relative_to(tests) for file in tests.rglob("*/test_*.py")}
    modules = {folder: {file.stem for file in (package / folder).glob("*.py")} for folder in {f.parent for f in files}}
    return {str(file) for file in files
            if not any(f"{file.stem}_".startswith(f"test_{module}_") for module in modules[file.parent])}


def test_tests_mirror_the_package():
    """tests/test_*.py run whole commands; every other test file is that of the module of its name, or a part of it."""
    assert unmirrored(REPOSITORY / "tests", PACKAGE) == set(WITHOUT_A_MODULE)


def test_a_test_file_without_a_module_is_found(tmp_path):
    for name in ("test_run.py", "nn/test_unet.py", "nn/test_unet_odd.py", "nn/attention/test_core.py",
                 "nn/attention/test_unet.py"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert unmirrored(tmp_path, PACKAGE) == {"nn/attention/test_unet.py"}
