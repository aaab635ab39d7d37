"""Generated tables and pictures from results files, in README.md and pages of docs.

python -m benchmarks.pages.summary --write      # all tables, between the markers of the pages
python -m benchmarks.pages.summary --draw       # pictures: all, or those named
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.kit import catalog, claims
from benchmarks.kit.experiment import FIGURES, ROOT
from benchmarks.kit.reading import markdown_table
from benchmarks.pages import terminal, tour
from benchmarks.tools import support
from foredraft.drafters import METHODS


def methods() -> str:
    """The table of methods of docs/methods/README.md."""
    head, lines = ["drafter", "what it does", "children", "lossless", "needs"], []
    for name, method in METHODS.items():
        laws = ", ".join(law.value for law in method.laws) or "-"
        page, sound = f"[`{name}`]({name}.md)", "yes" if method.lossless else "no"
        lines.append([page, method.what, laws, sound, method.needs])
    return "\n".join(markdown_table(head, lines, words=range(len(head))))


def filled(text: str, blocks: dict[str, str]) -> str:
    """Insert each block between its markers, ``<!-- name -->`` and ``<!-- /name -->``, also within a line; of
    ``measured NAME`` the second one is ``<!-- /measured -->``."""
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- {name} -->")
        lines = "\n" if rest.startswith("\n") else ""
        closing = name.split()[0] if name.startswith("measured ") else name
        _, end, after = rest.partition(f"<!-- /{closing} -->")
        if not begin or not end:
            raise SystemExit(f"The page has no markers for {name}.")
        text = f"{before}{begin}{lines}{block}{lines if block else ''}{end}{after}"
    return text


def blocks() -> dict[str, dict[str, str]]:
    """By page, the texts of its markers: of all experiments in the order of their rank, joined where they have one
    marker; ``measured`` of a method's page has the page's name."""
    parts: dict[str, dict[str, list[str]]] = {
        "docs/methods/README.md": {"methods": [methods()]},
        "docs/support.md": {"support": [support.table()]},
    }
    for each in sorted(catalog.every().values(), key=lambda each: each.rank):
        tables = {page: dict(own) for page, own in each.tables.items()}
        if each.claims:
            pictures = {f"picture {name}": partial(_claimed, name, claim) for name, claim in each.claims.items()}
            tables["docs/results.md"] = tables.get("docs/results.md", {}) | pictures
        for page, own in tables.items():
            for name, table in own.items():
                marker = f"measured {Path(page).stem}" if name == "measured" and "/methods/" in page else name
                parts.setdefault(page, {}).setdefault(marker, []).append(table())
    found = {}
    for page, some in parts.items():
        joined = {name: "\n\n".join(filter(None, own)) for name, own in some.items()}
        found[page] = {name: text for name, text in joined.items() if text or name.startswith("measured ")}
    return found


def _claimed(name: str, claim: Callable[[], claims.Claim]) -> str:
    return claims.block(name, claim())


def pages() -> dict[Path, str]:
    """The up-to-date text of every page with generated tables."""
    return {ROOT / page: filled((ROOT / page).read_text("utf-8"), some) for page, some in blocks().items()}


def figures() -> dict[str, Callable[[], str]]:
    """What makes each picture of docs/figures, as SVG."""
    found: dict[str, Callable[[], str]] = {"terminal": terminal.terminal, "tour": tour.checked}
    for each in catalog.every().values():
        found |= each.figures
        found |= {f"results_{name}": partial(_drawn, claim) for name, claim in each.claims.items()}
    return found


def _drawn(claim: Callable[[], claims.Claim]) -> str:
    return claims.drawn(claim())


def draw(names: list[str]) -> None:
    every = figures()
    if unknown := set(names) - set(every):
        raise SystemExit(f"There is no picture {', '.join(sorted(unknown))}. Known: {', '.join(every)}.")
    for name in names:
        (FIGURES / f"{name}.svg").write_text(every[name]().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    parser.add_argument("--draw", nargs="*", metavar="NAME", help="draw these pictures")
    args = parser.parse_args()
    if args.draw is not None:
        draw(args.draw or list(figures()))
    if args.write:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
