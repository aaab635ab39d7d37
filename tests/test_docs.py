"""The pages agree with the code: figures come from files, links lead somewhere, examples run."""

import html
import importlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import reproduce
from benchmarks.experiments import chains, gpu, identity, policy, retrieval
from benchmarks.kit import catalog, claims
from benchmarks.kit.experiment import FIGURES
from benchmarks.pages import summary, terminal, tour
from foredraft.cli import build
from foredraft.drafters import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])


MODULES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("benchmarks/**/*.py")) if path.parent.name != "peers"]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_benchmark_can_be_imported(path: Path):
    importlib.import_module(".".join(path.with_suffix("").parts))


def test_figures_and_tables_are_made_from_files_not_by_hand():
    for path, text in summary.pages().items():
        assert path.read_text("utf-8") == text, f"{path.name} is stale: python -m benchmarks.pages.summary --write"


def test_markers_may_stand_within_a_line():
    filled = summary.filled
    page = "A <!-- gain -->?<!-- /gain --> b.\n\n<!-- table -->\n| old |\n<!-- /table -->\n"
    assert filled(page, {"gain": "1.62", "table": "| new |"}) == page.replace("?", "1.62").replace("old", "new")
    with pytest.raises(SystemExit, match="no markers for other"):
        filled(page, {"other": "1"})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_marker_within_a_paragraph_begins_a_line(page: Path):
    """Markdown takes a comment at the beginning of a line for a block: it ends the list or paragraph."""
    assert not re.findall(r"^ *<!-- [^\n]*? -->[^\n]*<!-- /", page.read_text("utf-8"), re.MULTILINE)


def test_runs_of_one_text_are_one_test_of_the_law():
    laws = gpu._laws
    run = {"kind": "law", "method": "eagle3", "greedy_passed": True, "sampled_passed": True, "p_value": 0.613}
    assert "in 3 of 3 runs" in laws([run] * 3) and "1 chi-square test of the law (p = 0.61, passed)" in laws([run] * 3)
    failed = {**run, "greedy_passed": False, "sampled_passed": False, "p_value": 0.001}
    assert "in 1 of 2 runs" in laws([run, failed]) and "2 chi-square tests" in laws([run, failed])
    assert "p = 0.00, failed" in laws([run, failed])


def test_the_best_length_of_chains_has_a_column():
    text = chains.sweep_table(chains.LARGER)
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    for row in rows:
        if row[-1].isdigit() and row[-1] != "0" and row[0].endswith("speed-up"):
            gains = [float(cell.split(" ")[0]) for cell in row[1:-1]]
            assert gains[head.index(row[-1]) - 1] == max(gains)


def test_identity_compares_every_method():
    assert set(identity.SPECS) == set(METHODS) - {"none"}


def test_tables_of_methods_say_how_old_they_are():
    assert "**Older than [shared noise](shared_noise.md)" in policy.of_page("relay")
    assert "commit 5051b62f6, 2026-11-23" in policy.of_page("bandit")
    assert "with shared noise: eagle3 on sample, T=1" in policy.of_page("eagle3")


CLAIMS = {name: claim for each in catalog.every().values() for name, claim in each.claims.items()}


def shown(figure: str) -> str:
    return html.unescape((FIGURES / f"{figure}.svg").read_text("utf-8"))


@pytest.mark.parametrize("name", ["engines", "real", "policy", "transformers", "tune"])
def test_the_pictures_of_the_results_show_the_runs_that_they_claim(name: str):
    stale = f"stale: python -m benchmarks.pages.summary --draw results_{name}"
    assert claims.description(CLAIMS[name]()) in shown(f"results_{name}"), stale
    assert CLAIMS.keys() == {path.stem.removeprefix("results_") for path in FIGURES.glob("results_*.svg")}


def test_the_picture_of_retrieval_shows_its_runs():
    assert f"<desc>{retrieval.facts()}</desc>" in shown("triforce"), "stale: ... pages.summary --draw triforce"


def test_results_have_no_table_that_is_not_folded_but_that_of_the_default():
    text = (ROOT / "docs" / "results.md").read_text("utf-8")
    shown = re.sub(r"<details.*?</details>|<!-- default -->.*?<!-- /default -->", "", text, flags=re.DOTALL)
    assert shown.count("![") == 8 and "| --- |" not in shown
    assert text.count("<details markdown") == text.count("</details>") == 7


def commands(text: str) -> list[list[str]]:
    """The words of every ``foredraft`` command in the blocks of a page, with its variables filled in."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.partition("    #")[0].split("; "):
                words = shlex.split(re.sub(r"\$[A-Z]\w*|\$\{\w+\}", "sample", part), comments=True)
                if words and words[0] == "foredraft" and not {"<", ">", "|", "..."} & set(words[1:2]):
                    end = min((words.index(sign) for sign in ("<", ">", "|", "&") if sign in words), default=len(words))
                    found.append(words[1:end])
    return found


RAY = ("replicas", "scale", "actors")
"""Commands of the package in extras/scale, which is not installed here; its own tests run them."""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_the_pages_have_options_that_exist(page: Path):
    for name, *arguments in commands(page.read_text("utf-8")):
        if name.startswith("-"):
            continue
        if name in RAY:
            assert "foredraft-scale" in page.read_text("utf-8")
            continue
        command = build(name)
        context = command.context_class(command, info_name=name)
        command.make_parser(context).parse_args(args=arguments)  # raises NoSuchOption


def test_the_guides_have_commands():
    for name in ("speed-up", "low-acceptance", "gguf", "export"):
        assert len(commands((ROOT / "docs" / "guides" / f"{name}.md").read_text("utf-8"))) >= 3


def test_reproduce_covers_every_results_file():
    made = {name for each in reproduce.every().values() for name in each.files}
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    elsewhere = {"ci.jsonl", "support.jsonl", "engines_heads.jsonl"}  # scripts/bench, tools, docs/guides/export.md
    on_a_gpu = {"gpu.jsonl", "smollm2_heads.jsonl"}  # python -m benchmarks gpu; the commands that the file names
    on_a_xeon = {"batches_xeon.jsonl", "engines_xeon.jsonl", "hybrid_xeon.jsonl", "hybrid_xeon_repeats.json"}
    assert kept - made == elsewhere | on_a_gpu | on_a_xeon
    assert made <= kept


def test_the_terminal_shows_the_command_that_made_it():
    command, svg = shlex.join(["foredraft", *terminal.COMMAND]), shown("terminal")
    assert f"<desc>A real run of: {command}\n" in svg, "stale: python -m benchmarks.pages.summary --draw terminal"
    assert all(line in svg.replace("\xa0", " ") for line in command.splitlines())


def test_a_picture_of_a_terminal_has_what_is_left_on_it():
    assert terminal.last_lines("$\nfirst\n\r\x1b[2K\x1b[1A\x1b[2K\x1b[1msecond\x1b[0m\n\x1b[?25h\n") == [
        "$",
        "\x1b[1msecond\x1b[0m",
    ]


def test_the_tour_is_the_way_of_a_request():
    assert tour.missed(tour.traced()) == [], "change STOPS of benchmarks/pages/tour.py"
    assert len({stop.file for stop in tour.STOPS}) == len(tour.STOPS) <= 15
    assert (FIGURES / "tour.svg").read_text("utf-8") == tour.figure(), "stale: ... pages.summary --draw tour"


def test_the_readme_is_short():
    assert (ROOT / "README.md").read_text("utf-8").count("\n") < 150


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_page(name: str):
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8")
    assert text.startswith(f"# {name}: ")
    form = ["Paper", "Spec", "Options", "Law", "When"]
    assert [each for each in re.findall(r"^- (\w+): ", text, re.MULTILINE) if each in form] == form
    assert "<!-- contract\n" in text and f"<!-- measured {name} -->\n" in text
    paper = METHODS[name].paper
    assert all(each in text for each in re.findall(r"\d{4}\.\d{5}", paper))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


def test_every_room_has_a_line_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    source = ROOT / "src" / "foredraft"
    rooms = [path.parent.relative_to(source).as_posix() for path in source.rglob("__init__.py")]
    assert [room for room in rooms if room != "." and f"`{room}/`" not in text] == []


def test_the_terms_of_the_glossary_are_used():
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"^\*\*([^*]+)\.\*\*", glossary.read_text("utf-8"), re.MULTILINE)
    texts = [
        *(ROOT / "src").rglob("*.py"),
        *(page for page in PAGES if page != glossary and page.parent.name != "log"),
    ]
    used = "\n".join(path.read_text("utf-8") for path in texts).lower().replace("_", " ")
    assert len(terms) > 30 and [term for term in terms if term.lower() not in used] == []


def test_the_first_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]):
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    answers = names["answers"]
    assert isinstance(answers, list) and len(answers) == 2
    assert len(capsys.readouterr().out) > 100


def test_the_examples_of_the_python_page_run(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    examples = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "basicConfig" not in each]
    assert len(examples) == 11
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "python.md", "exec"), names)
    answers, drafts = names["answers"], names["drafts"]
    assert isinstance(answers, list) and isinstance(drafts, list) and (len(answers), len(drafts)) == (2, 3)
    assert capsys.readouterr().out == ""


RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())
HEX = r"[0-9a-f]{7,40}(?:\+\w+)?"
COMMITS = re.compile(rf"(?<!before )(?<![Ff]rom )(?<!since )\b[Cc]ommits?\s+((?:`?{HEX}`?(?:,\s+|\s+and\s+)?)+)")
"""Commits that ran something, in a page or a picture; not those that are history."""


def runs_commits() -> dict[str, set[str]]:
    """The commits in the results, and what each says behind its digits: "" or "+changes"."""
    found: dict[str, set[str]] = {}
    for path in RESULTS:
        for digits, changes in re.findall(r'"commit": "([0-9a-f]{7,40})(\+\w*)?"', path.read_text("utf-8")):
            found.setdefault(digits[:7], set()).add(changes)
    return found


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "docs" / "figures").glob("*.svg"))], ids=lambda page: page.name
)
def test_commits_are_those_of_the_results_with_their_changes(page: Path):
    known = runs_commits()
    for listed in COMMITS.findall(page.read_text("utf-8")):
        for digits, changes in re.findall(r"([0-9a-f]{7,40})(\+\w+)?", listed):
            assert changes in known.get(digits[:7], {changes}), f"{digits}{changes} ran as {known[digits[:7]]}"


def test_commits_can_be_wrong():
    known = runs_commits()
    assert {"+changes"} in known.values() and {""} in known.values()
    (listed,) = COMMITS.findall("at commits 0123456+changes, `89abcdef` and 01234567, not before commit abcdef0")
    assert re.findall(HEX, listed) == ["0123456+changes", "89abcdef", "01234567"]


BLOCK = re.compile(r"<!-- (?!/)(\w[\w .-]*) -->.*?<!-- /(?:\1|\w+) -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,/:-])(\d+\.\d\d)(?!\.?\d|\w)")
ELSEWHERE = {
    "README.md": "2.11 3.10 5.17",
    "docs/check.md": "0.99",
    "docs/guides/export.md": "0.33",
    "docs/guides/low-acceptance.md": "1.00",
    "docs/methods/cape.md": "1.19 1.21",
    "docs/methods/eagle1.md": "0.12 0.15",
    "docs/methods/eagle2.md": "0.01 0.02 0.03 0.05 0.06 0.07 0.14 0.15 0.16 0.17 0.23",
    "docs/methods/glide.md": "0.66 0.68 0.76",
    "docs/methods/layer_skip.md": "0.84 0.95 2.38 2.43 2.49",
    "docs/methods/medusa.md": "0.04",
    "docs/methods/sequoia.md": "0.10 0.12 0.14",
    "docs/methods/shared_noise.md": "1.63 1.95",
    "docs/methods/universal.md": "5.23",
    "docs/performance.md": "0.75",
    "docs/report.md": "1.05",
    "docs/serving.md": "3.11",
    "docs/support.md": "2.11 3.10 3.13 5.17",
    "docs/training-at-scale.md": "3.35",
    "src/foredraft/models/smollm2-eagle3/README.md": "1.70 1.82 2.19",
}
"""Numbers with two decimals in the prose of a page whose tables have them not: of papers, other pages and versions."""


ACROSS = (
    "EAGLE-3's claim about data",
    "[CaPE](cape.md)'s siblings",
    "a dynamic tree of 24 nodes",
    "measured is 0.83",
    "EAGLE-3 with 8",
)
"""Begins of sentences whose numbers are of more than one table."""


def wrong_numbers(text: str, listed: set[str]) -> list[str]:
    """Sentences with a number of two decimals that no table of the page has, or with several that no one table has."""
    lines = re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines()
    tables = [
        set(NUMBER.findall("\n".join(rows)))
        for is_table, rows in itertools.groupby(lines, lambda line: line[:1] == "|")
        if is_table
    ]
    blocks = [set(NUMBER.findall(block.group())) for block in BLOCK.finditer(text)]
    prose = [line for line in BLOCK.sub("", "\n".join(lines)).splitlines() if line[:1] != "|"]
    found, every = [], set[str]().union(*tables, *blocks)
    for sentence in re.split(r"(?<=[.:;])\s+|\n\n|\n- ", "\n".join(prose)):
        said = set(NUMBER.findall(sentence)) - listed
        one = sentence.lstrip("-* ").startswith(ACROSS) or len(said) < 2 or any(said <= table for table in tables)
        if not said <= every or not one:
            found.append(sentence)
    return found


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md" and page.parent.name != "log"],
    ids=lambda page: page.name,
)
def test_numbers_in_prose_are_those_of_the_tables(page: Path):
    """A table is made again, and the sentence about it is not: its numbers are no longer there."""
    listed = set(ELSEWHERE.get(str(page.relative_to(ROOT)), "").split())
    text = page.read_text("utf-8")
    assert not wrong_numbers(text, listed), "no table of the page has these numbers"
    assert listed <= set(NUMBER.findall(text)), "listed above, and no longer said"


def test_numbers_can_be_wrong():
    page = "Of 1.25 and 3.50 tokens. In all 2.00.\n\n| a | 1.25 |\n| b | 3.50 |\n\n| c | 2.00 |\n\ntorch 2.13.0\n"
    assert not wrong_numbers(page, set())
    assert wrong_numbers(page.replace("3.50 tokens", "2.00 tokens"), set()) == ["Of 1.25 and 2.00 tokens."]
    assert wrong_numbers(page.replace("| 2.00", "| 2.01"), set()) == ["In all 2.00."]
    assert not wrong_numbers(page.replace("| 2.00", "| 2.01"), {"2.00"})
