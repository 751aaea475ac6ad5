"""The pages of the site that are generated: commands, modules, and the files at the top of the repository.

mkdocs calls the `on_...` functions. What is generated is not in the repository: the reference is made from the
signatures and docstrings, which are read, not imported.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import griffe
from mkdocs.structure.files import File

REPOSITORY = Path(__file__).resolve().parents[1]
#: Subpackages with a page, in the order of docs/architecture.md; commands have a page of their own.
PARTS = ("core", "nn", "nn.attention", "flows", "diffusion", "energy", "speech", "data", "plots", "models", "training",
         "verification", "evaluation", "report")
TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


class Examples(griffe.Extension):
    """`Example:` of our docstrings is griffe's section `Examples:`, which knows doctests."""

    def on_object(self, *, obj: griffe.Object, **options) -> None:
        """Rename the heading of an example."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)


def modules(part: str) -> list[str]:
    """The public modules of a subpackage: its own file only where that has names of its own."""
    folder = REPOSITORY / "genmodels" / part.replace(".", "/")
    return [f"genmodels.{part}.{file.stem}" for file in sorted(folder.glob("*.py")) if not file.stem.startswith("_")]


def commands() -> str:
    """What `genmodels <command> --help` prints, for every command."""
    sys.path.insert(0, str(REPOSITORY))
    from genmodels.cli import CONFIGURED, PLAIN
    from genmodels.cli.completion import command_help

    names = (*CONFIGURED, *PLAIN)
    sections = [f"## genmodels {name}\n\n```text\n{command_help(name)}\n```" for name in names]
    keys = "`genmodels <command> --keys` lists every setting, where the help of the command offers it."
    return "\n\n".join(["# Commands", keys, *sections])


def on_config(config):
    """Add the generated pages to the navigation."""
    reference = next(part["Reference"] for part in config.nav if "Reference" in part)
    reference.append({"genmodels": "reference/genmodels.md"})
    reference += [{f"genmodels.{part}": f"reference/{part}.md"} for part in PARTS]
    config.nav.append({"Project": [{"Contributing": "contributing.md"}, {"Changelog": "changelog.md"}]})
    return config


def on_files(files, config):
    """Add the generated pages."""
    pages = {"reference/commands.md": commands(), "reference/genmodels.md": "# genmodels\n\n::: genmodels.api"}
    for part in PARTS:
        found = [f"::: {name}" for name in modules(part)]
        pages[f"reference/{part}.md"] = "\n\n".join([f"# genmodels.{part}", *found])
    for source, page in TOP.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        pages[page] = text.replace("](docs/", "](")
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links from docs/ to files at the top: to their page, or, where they have none, their name alone."""
    depth = page.file.src_uri.count("/")

    def resolved(match: re.Match) -> str:
        text, target = match.groups()
        place, _, anchor = target.partition("#")
        name = place.removeprefix("../" * (depth + 1))
        if name in TOP and (place != name or page.file.src_uri in TOP.values()):
            return f"[{text}]({'../' * depth}{TOP[name]}{'#' * bool(anchor)}{anchor})"
        outside = place.startswith("../" * (depth + 1)) or place.startswith((".github", ".ci"))
        return text if outside else match[0]

    return _LINK.sub(resolved, markdown)
