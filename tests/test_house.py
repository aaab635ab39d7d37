"""House rules that no tool checks: optional packages, the package's face, sizes, silence below the cli."""

import ast
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import foredraft
from processes import environment

ROOT = Path(foredraft.__path__[0])
FILES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(module.name for module in pkgutil.walk_packages(foredraft.__path__, "foredraft."))
# packages that are extras of ours, tools, or optional for transformers; none may be needed to import a module
OPTIONAL = (
    *("accelerate", "datasets", "matplotlib", "pandas", "scipy", "sklearn", "sentencepiece"),
    *("fastapi", "uvicorn", "starlette", "pydantic", "prometheus_client", "xgrammar", "ray"),
    *("triton", "pytest", "hypothesis", "beartype", "ruff", "pyright", "importlinter", "grimp"),
)
IMPORT_ALL = """
import importlib, sys
names, absent = sys.argv[1].split(","), sys.argv[2].split(",")
sys.modules.update(dict.fromkeys(absent))  # None: as if it were not installed
for name in names:
    importlib.import_module(name)
"""


def import_without(absent: tuple[str, ...], names: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(names), ",".join(absent)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_module_imports_with_the_core_dependencies_alone():
    own_extra = ("__main__", "model.attention.tree_attention")
    served = ("foredraft.serve.options", "foredraft.serve")
    needed = [name for name in MODULES if name in served or not name.startswith("foredraft.serve.")]
    names = ["foredraft", *[name for name in needed if not name.endswith(own_extra)]]
    assert len(names) > 20, "the walk has not found the package"
    done = import_without(OPTIONAL, names)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_block_blocks():
    done = import_without(OPTIONAL, ["hypothesis"])
    assert "ModuleNotFoundError" in done.stderr


def test_the_face_is_sorted_complete_and_importable():
    assert list(foredraft.__all__) == sorted(set(foredraft.__all__))
    for name in foredraft.__all__:
        assert getattr(foredraft, name) is not None
    public = {name for name, value in vars(foredraft).items() if not isinstance(value, ModuleType)}
    assert {name for name in public if not name.startswith("_")} <= set(foredraft.__all__)


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, bool]]:
    """All functions of a file, and whether each is a method."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield child, isinstance(node, ast.ClassDef)


def broken_rules(source: str, *, may_print: bool) -> list[str]:
    """Sentences about a file whose functions do too much or take too much, or that talks."""
    tree, found = ast.parse(source), []
    for function, is_method in functions(tree):
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > 60:
            found.append(f"{function.name} has {lines} lines, at most 60")
        if any(ast.unparse(d).startswith("triton.jit") for d in function.decorator_list):
            continue  # a kernel takes every pointer, stride and size by position
        static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
        count = len(function.args.posonlyargs) + len(function.args.args) - (is_method and not static)
        if count > 6:
            found.append(f"{function.name} takes {count} positional parameters, at most 6")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            if not may_print:
                found.append(f"line {node.lineno} prints")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_sizes_and_silence(path: Path):
    assert broken_rules(path.read_text("utf-8"), may_print=path.is_relative_to(ROOT / "cli")) == []


def test_the_rules_see_what_breaks_them():
    wide = "class A:\n    def f(self, a, b, c, d, e, f, g): print(a)\n"
    assert len(broken_rules(wide, may_print=False)) == 2
    assert len(broken_rules(wide, may_print=True)) == 1
    assert broken_rules("class A:\n    def f(self, a, b, c, d, e, f): ...\n", may_print=False) == []
    assert len(broken_rules("def f(a, b, c, d, e, f, /, g, *, h): ...\n", may_print=False)) == 1
    assert len(broken_rules("def f():\n" + 60 * "    x = 1\n", may_print=False)) == 1
    assert broken_rules("def f():\n" + 59 * "    x = 1\n", may_print=False) == []


def test_no_package_carries_a_trace_of_one_machine():
    """No absolute path of somebody's disk in what is shipped or run."""
    repository = ROOT.parents[1]
    if not (repository / "pyproject.toml").exists():
        pytest.skip("not in a checkout")
    house = [path for folder in ("scripts", ".ci") for path in (repository / folder).glob("*") if path.is_file()]
    house += [repository / name for name in ("Makefile", "constraints.txt", "pyproject.toml")]
    for path in [*FILES, *house, *ROOT.glob("models/*.md")]:
        text = path.read_text("utf-8")
        for trace in ("/wor" + "k/", "/ro" + "ot/", "/hom" + "e/", "/op" + "t/"):
            assert trace not in text, f"{path} names {trace}"


@pytest.mark.parametrize(
    "path", sorted((ROOT.parents[1] / "benchmarks" / "results").glob("*.json*")), ids=lambda p: p.name
)
def test_results_name_no_folder_of_the_machine_that_made_them(path: Path):
    absolute = re.compile(r"""(?:^|[":=,+\[ ])/[A-Za-z0-9._-]+/[^" ]*""")
    found = {match[0] for line in path.read_text().splitlines() for match in absolute.finditer(without_texts(line))}
    assert not found


def without_texts(line: str) -> str:
    """A line of results without the outputs of models, which may hold any path."""
    if not (line.startswith("{") and line.endswith("}")):
        return line
    return json.dumps({k: value for k, value in json.loads(line).items() if k not in ("outputs", "output", "text")})
