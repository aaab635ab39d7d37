"""docs/extending.md, run as it is written: the drafter, its registration, each command."""

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import foredraft
import tiny
from foredraft.bench.contract import CONTRACT
from foredraft.cli import main
from foredraft.cli.methods import described
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Needs, Plan, View
from foredraft.core.errors import DrafterError
from foredraft.core.tree import TokenTree
from foredraft.drafters import METHODS, Methods
from processes import environment

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8")
CODE, TOML, SHELL = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("python", "toml", "sh"))
COMMANDS = SHELL[0].strip().splitlines()


def install(folder: Path, name: str, point: str, **files: str) -> None:
    """What pip leaves of a package with one entry point: its files, and its metadata."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[foredraft.drafters]\n{point}\n")
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert "bigram" not in METHODS, "the entry points of this machine are read before a test adds some"
    (point,) = re.findall(r'^(bigram) = "(bigram:METHOD)"$', TOML[0], re.MULTILINE)
    points = f"{' = '.join(point)}\nrecycling = recycling:METHOD"
    assert 'recycling = "recycling:METHOD"' in TOML[0]
    install(folder, "foredraft_bigram", points, bigram=CODE[0], recycling=CODE[1], test_drafters=CODE[2])
    return folder


def run(site: Path, command: str, folder: Path) -> str:
    program, *words = shlex.split(command)
    assert program == "foredraft"
    done = subprocess.run(
        [sys.executable, "-m", "foredraft", *words],
        env=environment(site),
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_short():
    assert len([line for line in CODE[0].splitlines() if line.strip()]) <= 32


def test_the_drafter_drafts_and_is_lossless(site: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(site))
    import bigram  # type: ignore[import-not-found]

    prompt = "one two three four one two three four one two"
    with foredraft.load("sample", bigram.Bigram(bigram.Options())) as g, foredraft.load("sample", "none") as plain:
        ours, theirs = (each.generate(prompt, max_new_tokens=24) for each in (g, plain))
    assert ours.tokens == theirs.tokens
    assert len(ours.stats.accepted_by_depth) >= 3, "an off-by-one would accept less"


def test_its_options_are_explained(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(METHODS, "_entry_points", Methods()._entry_points)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(shlex.split(COMMANDS[0])[1:]) == 0
    shown = capsys.readouterr().out
    assert "Copies bigrams of the row." in shown
    assert re.search(r"length\s+default: 4\s+most tokens of a draft\.", shown)
    assert "num_assistant_tokens_schedule" in shown


def test_the_tree_is_learned_from_the_logits(site: Path, monkeypatch: pytest.MonkeyPatch):
    """Against the same by hand: the candidates after each token that the target has seen, in a full tree."""
    monkeypatch.syspath_prepend(str(site))
    import recycling  # type: ignore[import-not-found]

    prompt = "one two three one two three one two three one two"
    with foredraft.load("sample", "none") as plain:
        vocab_size = plain.engine.target.vocab_size
        expected = plain.generate(prompt, max_new_tokens=30).tokens
    with foredraft.load("sample", recycling.Recycling(recycling.Options(), vocab_size)) as g:
        drafter, learned, trees = g.engine.drafter, {}, []
        propose, commit = drafter.propose, drafter.commit

        def checked(view: View, plan: Plan) -> Draft:
            draft = propose(view, plan)
            tokens, parents = draft.tree.tokens[0].tolist(), draft.tree.parents[0].tolist()
            for node, parent in enumerate(parents):
                rank = [each for each, above in enumerate(parents) if above == parent].index(node)
                assert parent < 0 or tokens[node] == learned.get(tokens[parent], [0, 0, 0])[rank]
            trees.append(len(tokens))
            return draft

        def noted(view: View, draft: Draft, verdict: Any, out: Any) -> None:
            commit(view, draft, verdict, out)
            for node, token in enumerate(draft.tree.tokens[0].tolist()):
                if draft.tree.valid[0, node]:
                    learned[token] = out.logits[0, node].topk(3).indices.tolist()

        monkeypatch.setattr(drafter, "propose", checked)
        monkeypatch.setattr(drafter, "commit", noted)
        result = g.generate(prompt, max_new_tokens=30)
    assert result.tokens == expected and max(trees) == 13
    assert result.stats.acceptance_length > 1.3


@pytest.mark.slow
def test_its_tests_pass(site: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_drafters.py"]
    done = subprocess.run(command, env=environment(site), cwd=site, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and "10 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command.split()[1])
def test_each_command_of_the_page(site: Path, tmp_path: Path, command: str):
    shown = run(site, command, tmp_path)
    assert {"generate": "", "check": "Verdict: lossless."}.get(command.split()[1], "bigram") in shown and shown.strip()


def test_a_broken_package_is_one_sentence_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    install(tmp_path, "broken", "broken = broken:METHOD\nodd = odd:METHOD\nnone = odd:METHOD", odd="METHOD = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    methods = Methods()
    with pytest.raises(DrafterError, match=r"The drafter broken \(broken:METHOD\) cannot be imported: .*No module"):
        methods["broken"]
    with pytest.raises(DrafterError, match=r"The drafter odd \(odd:METHOD\) must be a foredraft.Method"):
        methods["odd"]
    assert {"broken", "odd"} <= set(methods) and set(methods.usable()) == set(METHODS.usable())
    assert methods["none"] is METHODS["none"], "a package cannot replace one of foredraft's own"
    assert len(methods) == len(list(methods)) and "broken" in methods
    monkeypatch.setattr("foredraft.cli.methods.METHODS", methods)
    with pytest.raises(DrafterError, match="The drafter broken .* cannot be imported"):
        described("broken")
    assert [each["name"] for each in described()] == list(methods.usable())


class Throwing(Drafter):
    """Raises in the method ``place``."""

    needs = Needs(max_nodes=2, hidden_layers=(0,))

    def __init__(self, place: str) -> None:
        self.place = place

    def _throw(self, place: str) -> None:
        if self.place == place:
            raise ZeroDivisionError("a fault\nof two lines")

    def admit(self, row: int, prompt: Any, hidden: Any) -> None:
        self._throw("admit")

    def read_ahead(self, row: int, prompt: Any, hidden: Any, kv_size: Any) -> None:
        self._throw("read_ahead")

    def fuse(self, hidden: Any) -> Any:
        self._throw("fuse")
        return hidden

    def propose(self, view: View, plan: Plan) -> Draft:
        self._throw("propose")
        ones = torch.ones(len(view.rows), 2, dtype=torch.long)
        return Draft(TokenTree.chain(torch.cat([view.roots[:, None], ones], 1)), Law.FIXED)

    def commit(self, view: View, draft: Draft, verdict: Any, out: Any) -> None:
        self._throw("commit")

    def release(self, row: int) -> None:
        self._throw("release")


@pytest.mark.parametrize("place", ["admit", "read_ahead", "fuse", "propose", "commit", "release"])
def test_a_method_that_throws_is_one_sentence_and_leaves_nothing_behind(place: str, caplog: pytest.LogCaptureFixture):
    prompts, drafter = tiny.prompts((6, 40)), Throwing(place)  # the second is read while the first runs
    with foredraft.load(tiny.build(), None) as g:
        plain = [result.tokens for result in g.generate(prompts, max_new_tokens=8)]
    with foredraft.load(tiny.build(), drafter, max_prefill_tokens=8) as g:
        if place == "release":  # the request has ended: the error goes to the log
            assert [result.tokens for result in g.generate(prompts, max_new_tokens=8)] == plain
            error = next(record.exc_info[1] for record in caplog.records if record.exc_info)
        else:
            with pytest.raises(DrafterError) as caught:
                g.generate(prompts, max_new_tokens=8)
            error = caught.value
        assert f"Throwing.{place} failed with ZeroDivisionError: a fault; see its package." in str(error)
        assert "\n" not in str(error) and isinstance(error, DrafterError)
        assert g.engine.running == g.engine.waiting == 0
        drafter.place = ""
        assert [result.tokens for result in g.generate(prompts, max_new_tokens=8)] == plain


def test_a_build_that_throws_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = CODE[0] + "\n\ndef build(options, context):\n    return 1 // 0\n\n\nBigram.build = build\n"
    install(tmp_path, "throwing", "throwing = throwing:METHOD", throwing=text.replace("bigram:", "throwing:"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(METHODS, "_entry_points", Methods()._entry_points)
    with pytest.raises(DrafterError, match="build of throwing failed with ZeroDivisionError"):
        foredraft.load("sample", "throwing")


class Broken(Drafter):
    """Drafts chains of tokens 7, 8, 9; breaks one rule."""

    def __init__(self, rule: str = "") -> None:
        self.needs = Needs(max_nodes=3)
        self.rule, self.began, self.calls = rule, 0, 0

    def admit(self, row: int, prompt: Any, hidden: Any) -> None:
        self.began += 1

    def propose(self, view: View, plan: Plan) -> Draft:
        self.calls += 1
        count = 5 if self.rule == "nodes" else min(3, plan.length + (self.rule == "plan"))
        first = 7 + (self.began > 4 and self.rule == "no_trace") + (self.calls if self.rule == "calls" else 0)
        drafted = torch.arange(first, first + count).expand(len(view.rows), -1) % 300
        roots = view.roots + (self.rule == "root")
        lengths = torch.tensor(
            [1 + (length if self.rule not in ("nodes", "plan") else count) for length in plan.lengths]
        )
        tree = TokenTree.chain(torch.cat([roots[:, None], drafted], 1), lengths.clamp(max=1 + count))
        return Draft(tree, Law.FIXED)


RULES = {
    "no_trace": ("no_trace", "Drafts depend on rows that have ended"),
    "plan": ("as_planned", "was drafted where"),
    "nodes": ("as_planned", "needs.max_nodes is 3"),
    "calls": ("as_planned", "two drafts for one view"),
    "root": ("as_planned", "Node 0"),
}


@pytest.mark.parametrize("broken", RULES)
def test_the_contract_sees_what_breaks_it(broken: str):
    rule, sentence = RULES[broken]
    with (
        foredraft.load("sample", Broken(broken)) as g,
        pytest.raises(AssertionError, match=sentence),
    ):
        CONTRACT[rule](g)


def test_a_lossy_rule_changes_the_text():
    with foredraft.load("sample", "eagle3", verifier="typical,epsilon=0.01") as g:
        with pytest.raises(AssertionError, match="not plain decoding's"):
            CONTRACT["same_text"](g)


@pytest.mark.parametrize("honest", [True, False])
def test_the_contract_sees_a_law_that_is_not_that_of_the_draws(honest: bool, monkeypatch: pytest.MonkeyPatch):
    with foredraft.load("sample", "eagle3,nodes=4,depth=2", verifier="recursive") as g:
        drafter, propose = g.engine.drafter, g.engine.drafter.propose

        def flattened(view: View, plan: Plan) -> Draft:
            draft = propose(view, plan)
            return draft if draft.q is None else replace(draft, q=0.05 * draft.q + 0.95 / draft.q.shape[-1])

        if honest:
            return CONTRACT["same_law"](g)
        monkeypatch.setattr(drafter, "propose", flattened)
        with pytest.raises(AssertionError, match="do not follow the target's law"):
            CONTRACT["same_law"](g)


@pytest.mark.slow
@pytest.mark.parametrize("rule", CONTRACT)
def test_the_contract_holds(rule: str):
    for drafter in (Broken(), "eagle3", "hybrid:[eagle3]"):
        with foredraft.load("sample", drafter) as g:
            CONTRACT[rule](g)
