"""What mkdocs makes from the code while it builds the site: pages of commands, of the interface, and of linked files.

Every command has a page of its options. ``reference/python.md`` has the public names of the package. Files outside
docs/ that a page links to become pages too, so that the site has no dead links.
"""

import inspect
import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

import foredraft  # noqa: E402
from foredraft.cli import COMMANDS, GROUPS, build  # noqa: E402
from foredraft.core.options import describe_options  # noqa: E402

LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml", ".sh": "sh", ".jsonl": "json", ".json": "json"}
LONGEST = 100_000
"""Characters of a linked file; of a longer one, such as a results file, the page has the beginning."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of methods and commands in the navigation."""
    methods = sorted(path.name for path in (ROOT / "docs" / "methods").glob("*.md") if path.name != "README.md")
    commands = [f"reference/cli/{name}.md" for name in ("index", *COMMANDS)]
    _fill(config.nav, {"Methods": [f"methods/{name}" for name in methods], "Commands": commands})
    return config


def _fill(nav: list[Any] | Any, pages: dict[str, list[str]]) -> None:
    for item in nav if isinstance(nav, list) else ():
        for title, inside in item.items() if isinstance(item, dict) else ():
            if title in pages:
                item[title] = pages[title]
            _fill(inside, pages)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name in COMMANDS:
        files.append(File.generated(config, f"reference/cli/{name}.md", content=command_page(name)))
    files.append(File.generated(config, "reference/cli/index.md", content=commands_page()))
    files.append(File.generated(config, "reference/python.md", content=interface_page()))
    files.append(
        File.generated(config, "javascripts/costs.js", content=f"window.foredraftCosts = {json.dumps(costs())};")
    )
    pending = [ROOT / "docs" / file.src_uri for file in files.documentation_pages() if file.abs_src_path]
    seen = set()
    while pending:
        page = pending.pop()
        for target in outside(page):
            if target not in seen:
                seen.add(target)
                files.append(File.generated(config, place(target), content=file_page(target)))
                if target.suffix == ".md":
                    pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links to files outside docs/ at their pages; a file's own links are relative to where it is."""
    origin = origin_of(page.file)
    if origin is None:
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = (origin.parent / match[1]).resolve()
        if "://" in match[1] or not target.exists():
            return match[0]
        return f"]({posixpath.relpath(place(target), posixpath.dirname(page.file.src_uri))}{match[2] or ''})"

    return LINK.sub(moved, markdown)


def origin_of(file: File) -> Path | None:
    """The file of the repository that a page shows; None if it was made here."""
    if file.abs_src_path:
        return Path(file.abs_src_path)
    if file.src_uri.startswith("files/") and file.src_uri.endswith(".md"):
        found = ROOT / file.src_uri.removeprefix("files/")
        return found if found.is_file() else None
    return None


def costs() -> list[dict[str, Any]]:
    """Measured seconds of forwards by rows, for the figure of the theory page."""
    results, found = ROOT / "benchmarks" / "results", []
    for name, file in (("65M parameters, float32", "speed"), ("SmolLM2-135M, 4 bits, native engine", "real_model")):
        path = results / f"{file}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        measured = [each for each in map(json.loads, lines) if each["kind"] == "cost"]
        if measured:
            first = measured[0]
            found.append({"name": name, "rows": first.get("rows") or first["nodes"], "seconds": first["seconds"]})
    return found


def outside(page: Path) -> Iterator[Path]:
    """Files of the repository, outside docs/, that a page links to."""
    for match in LINK.finditer(page.read_text(encoding="utf-8")):
        target = (page.parent / match[1]).resolve()
        if "://" not in match[1] and target.exists() and ROOT in target.parents and ROOT / "docs" not in target.parents:
            yield target


def place(target: Path) -> str:
    """Where the site has a file of the repository."""
    if ROOT / "docs" in target.parents:
        return target.relative_to(ROOT / "docs").as_posix()
    path = f"files/{target.relative_to(ROOT).as_posix()}"
    return path if target.suffix in (".md", ".svg", ".png") else f"{path}.md"


def file_page(target: Path) -> str:
    """A page with a file's text; of a folder, with those of its files."""
    if target.is_dir():
        return "\n".join(file_page(file) for file in sorted(target.iterdir()) if file.is_file())
    text = target.read_text(encoding="utf-8", errors="replace")
    if target.suffix in (".md", ".svg"):
        return text
    cut = "" if len(text) <= LONGEST else "\n\nThe beginning of a longer file."
    language = LANGUAGES.get(target.suffix, "text")
    name = target.relative_to(ROOT).as_posix()
    return f'# {name}\n\n````{language} linenums="1"\n{text[:LONGEST]}\n````{cut}\n'


def commands_page() -> str:
    """All commands by group."""
    parts = ["# Commands", ""]
    for group, names in GROUPS.items():
        parts += [f"## {group}", "", "| command | |", "| --- | --- |"]
        parts += [f"| [`foredraft {name}`]({name}.md) | {summary} |" for name, summary in names.items()] + [""]
    return "\n".join(parts)


def command_page(name: str) -> str:
    """A command's help as a page: what it does, its arguments and options by panel, and examples."""
    command = build(name)
    usage = command.get_usage(command.context_class(command, info_name=f"foredraft {name}"))
    parts = [f"# foredraft {name}", "", inspect.cleandoc(command.help or ""), "", "```text", usage, "```", ""]
    panels: dict[str, list[str]] = {}
    for option in command.params:
        argument = option.param_type_name == "argument"
        shown = option.metavar or option.name.upper() if argument else ", ".join([*option.opts, *option.secondary_opts])
        kind = "" if argument or not option.metavar else f" {option.metavar}"
        about = " ".join((option.help or "").replace("|", "\\|").replace("[", "\\[").split())
        panel = option.rich_help_panel or ("Arguments" if argument else "Options")
        panels.setdefault(panel, []).append(f"| `{shown}{kind}` | {about} |")
    for panel, lines in panels.items():
        parts += [f"## {panel}", "", "| | meaning |", "| --- | --- |", *lines, ""]
    if command.epilog:
        parts += [inspect.cleandoc(command.epilog).replace("Examples:", "## Examples"), ""]
    return "\n".join(parts)


def interface_page() -> str:
    """The public names, from their docstrings."""
    parts = ["# Python interface", "", "Everything that `import foredraft` offers; the rest is internal.", ""]
    for name in sorted(foredraft.__all__, key=lambda each: (each[0].isupper(), each)):
        found = getattr(foredraft, name)
        parts += [f"::: {found.__module__}.{found.__qualname__}", ""]
        if found is foredraft.LoadOptions:
            parts += ["| option | default | |", "| --- | --- | --- |"]
            rows = [
                (each.name, each.default, each.meaning.replace("|", chr(92) + "|")) for each in describe_options(found)
            ]
            parts += [f"| `{option}` | `{default}` | {meaning} |" for option, default, meaning in rows] + [""]
    return "\n".join(parts)
