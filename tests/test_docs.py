"""The pages agree with the code: figures come from files, links lead somewhere, examples run."""

import html
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from foredraft.cli import build
from foredraft.drafters import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")])


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")  # scripts import each other by name
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_benchmark_can_be_imported(name: str):
    benchmark(name)


def test_figures_and_tables_are_made_from_files_not_by_hand():
    for path, text in benchmark("summary").pages().items():
        assert path.read_text("utf-8") == text, f"{path.name} is stale: python benchmarks/summary.py --write"


@pytest.mark.parametrize("name", ["engines", "real", "policy", "transformers", "tune"])
def test_the_pictures_of_the_results_show_the_runs_that_they_claim(name: str):
    figures = benchmark("result_figures")
    claim, svg = figures.CLAIMS[name](), html.unescape(figures.path_of(name).read_text("utf-8"))
    assert figures.description(claim) in svg, f"stale: python benchmarks/result_figures.py {name}"
    assert set(figures.CLAIMS) == {path.stem.removeprefix("results_") for path in figures.FIGURES.glob("results_*.svg")}


def test_the_picture_of_retrieval_shows_its_runs():
    tables = benchmark("retrieval_tables")
    svg = html.unescape(tables.FIGURE.read_text("utf-8"))
    assert f"<desc>{tables.facts()}</desc>" in svg, "stale: python benchmarks/retrieval.py --plot"


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_the_pages_have_options_that_exist(page: Path):
    for name, *arguments in commands(page.read_text("utf-8")):
        if name.startswith("-"):
            continue
        command = build(name)
        context = command.context_class(command, info_name=name)
        command.make_parser(context).parse_args(args=arguments)  # raises NoSuchOption


def test_the_guides_have_commands():
    for name in ("speed-up", "low-acceptance", "gguf", "export"):
        assert len(commands((ROOT / "docs" / "guides" / f"{name}.md").read_text("utf-8"))) >= 3


def test_reproduce_covers_every_results_file():
    reproduce = benchmark("reproduce")
    made = {name for part in reproduce.PARTS.values() for name in part.results}
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    elsewhere = {"ci.jsonl", "support.jsonl"}  # scripts/bench, benchmarks/support.py
    on_a_gpu = {"gpu.jsonl", "smollm2_heads.jsonl"}  # benchmarks/gpu.py; the commands that the file names
    on_a_xeon = {"batches_xeon.jsonl", "engines_xeon.jsonl", "hybrid_xeon.jsonl", "hybrid_xeon_repeats.json"}
    assert kept - made == elsewhere | on_a_gpu | on_a_xeon
    assert made <= kept


def test_the_terminal_shows_the_command_that_made_it():
    command = shlex.join(["foredraft", *benchmark("pictures").COMMAND])
    svg = html.unescape((ROOT / "docs" / "figures" / "terminal.svg").read_text("utf-8"))
    assert f"<desc>A real run of: {command}\n" in svg, "stale: python benchmarks/pictures.py terminal"
    assert all(line in svg.replace("\xa0", " ") for line in command.splitlines())


def test_a_picture_of_a_terminal_has_what_is_left_on_it():
    last_lines = benchmark("pictures").last_lines
    assert last_lines("$\nfirst\n\r\x1b[2K\x1b[1A\x1b[2K\x1b[1msecond\x1b[0m\n\x1b[?25h\n") == [
        "$",
        "\x1b[1msecond\x1b[0m",
    ]


def test_the_tour_is_the_way_of_a_request():
    tour = benchmark("tour")
    assert tour.missed(tour.traced()) == [], "change STOPS of benchmarks/tour.py"
    assert len({stop.file for stop in tour.STOPS}) == len(tour.STOPS) <= 15
    assert tour.FIGURE.read_text("utf-8") == tour.figure(), "stale: python benchmarks/tour.py"


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
        *(page for page in PAGES if page not in (glossary, ROOT / "docs" / "log.md")),
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
