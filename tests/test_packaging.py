"""What is installed: every package, every configuration file, no dependency too many or too few."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools
import yaml

from genmodels import __version__
from genmodels.core.errors import REQUIRED

REPOSITORY = Path(__file__).resolve().parents[1]

SETUP = configparser.ConfigParser()
SETUP.read(REPOSITORY / "setup.cfg", encoding="utf-8")
#: Distributions whose import name differs.
IMPORT_NAMES = {"scikit-learn": "sklearn", "pillow": "PIL", "pyyaml": "yaml", "hydra-core": "hydra",
                "ipython": "IPython"}


def listed(section: str, option: str) -> list[str]:
    return SETUP[section][option].split("\n")[1:]


def import_names(requirements: list[str]) -> set[str]:
    names = [re.split(r"[<>=!~ \[;]", requirement)[0] for requirement in requirements]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names}


def imports_of_package() -> set[str]:
    found: set[str] = set()
    for file in (REPOSITORY / "genmodels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"genmodels"}


def test_every_package_is_listed():
    found = setuptools.find_packages(str(REPOSITORY), include=["genmodels", "genmodels.*"])
    assert sorted(listed("options", "packages")) == sorted([*found, "genmodels.configs"])


def test_dependencies_are_those_that_are_imported():
    extras = [extra for extra in SETUP["options.extras_require"] if extra != "test"]
    optional = import_names([r for extra in extras for r in listed("options.extras_require", extra)])
    required = import_names(listed("options", "install_requires"))
    assert imports_of_package() - optional == required == set(REQUIRED)


def test_the_wheel_works_from_any_directory(tmp_path):
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("genmodels", "configs"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=ignore)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, tree / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    unpacked = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(unpacked)
    assert Path(wheel.filename).stat().st_size < 3e6 and not list(unpacked.rglob("*.wav"))
    sources = {str(f.relative_to(REPOSITORY)) for f in (REPOSITORY / "configs").rglob("*.yaml")}
    assert {str(f.relative_to(unpacked / "genmodels")) for f in (unpacked / "genmodels").rglob("*.yaml")} == sources
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = ("import sys, genmodels; assert genmodels.__file__.startswith(sys.argv[1]), genmodels.__file__;"
            "from genmodels.report.compare import TEMPLATES; assert TEMPLATES.get_template('page.html');"
            "from genmodels.cli.main import main; sys.exit(main(['train', '--cfg', 'job', 'data=toy', 'logger=csv']))")
    run = subprocess.run([sys.executable, "-c", code, str(unpacked)], cwd=elsewhere, capture_output=True, text=True,
                         env={"PYTHONPATH": str(unpacked), "PATH": "/usr/bin:/bin"})
    assert run.returncode == 0 and "genmodels.data.toy.Toy" in run.stdout, run.stderr


@pytest.mark.parametrize("name", ["genmodels = genmodels.cli.main:main"])
def test_the_entry_point(name):
    assert listed("options.entry_points", "console_scripts") == [name]


def described(text: str) -> set[str]:
    """The extras of a table whose rows begin with the name of an extra."""
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_every_extra_is_explained():
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    assert described(page) == set(SETUP["options.extras_require"])


def test_files_for_other_services_are_valid():
    """Citation metadata, workflow, issue forms, hooks: as far as their formats can be checked offline."""
    def read(name: str):
        return yaml.safe_load((REPOSITORY / name).read_text(encoding="utf-8"))

    citation = read("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["version"] == __version__
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])
    for form in ("bug", "proposal"):
        body = read(f".github/ISSUE_TEMPLATE/{form}.yml")["body"]
        assert len({part["id"] for part in body}) == len(body)
        assert all(part["attributes"].get("label") for part in body)
    jobs = read(".github/workflows/ci.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    versions = [c.split(" :: ")[-1] for c in listed("metadata", "classifiers") if ".1" in c.split(" :: ")[-1]]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == versions
    (hook,) = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert hook["additional_dependencies"][0] in listed("options.extras_require", "test")


def test_the_changelog_knows_this_version():
    heads = re.findall(r"^## (.*)$", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert heads[0] == "Unreleased" and heads[1].startswith(f"{__version__} - ")
