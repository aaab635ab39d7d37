"""What tune chose, as a file that load takes and in the words of servers."""

from collections.abc import Sequence
from pathlib import Path

import pytest

import foredraft
import tiny
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.prompt_lookup import Options as LookupOptions
from foredraft.engine.generator import Generator, Result
from foredraft.engine.policy import OffFrom, policy_for
from foredraft.engine.step import StepResult
from foredraft.engine.tail import StepEnd
from foredraft.heads.formats.tuned import Tuned, read_tuned, write_tuned

CONSTANT = "num_assistant_tokens_schedule=constant"
HEAD = f"eagle3:sample-eagle3,nodes=5,depth=3,{CONSTANT}"
DRAFT = f"draft_model:sample-draft,num_assistant_tokens=3,{CONSTANT}"
TEXTS = ["def add(a, b):", "- red\n- green\n- blue\n-", "Once upon a time"]


def test_a_choice_comes_back_as_it_was_written(tmp_path: Path):
    path = tmp_path / "tuned.json"
    learned = {"sizes": [0, 1]}
    for tuned in (Tuned("sample", HEAD, 8, {"temperature": 0.0}), Tuned("m", "none", 0, {}, learned)):
        write_tuned(path, tuned)
        assert read_tuned(path) == read_tuned(str(path)) == tuned
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is nested too deep; run foredraft tune again"),
        (b"", "is not JSON: Expecting value: line 1 column 1 (char 0); run foredraft tune again"),
        (b"{}", "model, drafter, off_from missing or invalid"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not a JSON object; run foredraft tune again"),
        (b'"eagle3"', "is not a JSON object; run foredraft tune again"),
        (b'{"model": "m", "drafter": null, "off_from": 0}', "drafter missing or invalid"),
        (b'{"model": "m", "drafter": "none"}', "off_from missing or invalid"),
        (b'{"model": "m", "drafter": "none", "off_from": 0, "learned": 3}', "learned missing or invalid"),
        (b'{"model": "m", "drafter": "none", "off_from": "8"}', "off_from missing or invalid"),
        (b'{"model": "m", "drafter": "none", "off_from": true}', "off_from missing or invalid"),
        (b'{"model": "m", "drafter": "none", "off_from": -1}', "off_from missing or invalid"),
    ],
)
def test_something_else_is_one_sentence_that_names_the_file(content: bytes, sentence: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(DrafterError) as error:
        foredraft.load("sample", str(path), device="cpu")
    assert str(path) in str(error.value) and sentence in str(error.value) and "\n" not in str(error.value)


def test_what_a_policy_learned_is_its_beginning(tmp_path: Path):
    path = tmp_path / "tuned.json"
    with foredraft.load("sample", "prompt_lookup", device="cpu") as g:
        g.batch(TEXTS, max_new_tokens=24)
        learned = g.engine.policy.state()
    assert any(pace["forward"] for pace in learned["paces"].values())
    write_tuned(path, Tuned("sample", "prompt_lookup", 8, {}, learned))
    with foredraft.load("sample", str(path), device="cpu") as g:
        assert g.engine.policy.state() == learned
    for broken in ({**learned, "paces": 3}, {"weights": {"0": [1.0]}}, {"paces": {"1/0": {}}}):
        write_tuned(path, Tuned("sample", "prompt_lookup", 0, {}, broken))
        with pytest.raises(DrafterError, match="no valid state of a policy; run foredraft tune again"):
            foredraft.load("sample", str(path), device="cpu")
    write_tuned(path, Tuned("sample", "prompt_lookup", 0, {}, {"sizes": [0, 1], "seconds": {}, "accepted": {}}))
    with foredraft.load("sample", str(path), device="cpu") as g:
        assert g.engine.policy.state()["paces"] == {}, "of an earlier version: it begins anew"


def test_files_that_are_not_there_or_cannot_be(tmp_path: Path):
    with pytest.raises(DrafterError, match=r"Cannot read the tuned drafter .*absent\.json"):
        foredraft.load("sample", str(tmp_path / "absent.json"), device="cpu")
    (tmp_path / "gone").touch()
    with pytest.raises(OptionError, match=r"Cannot write .*gone"):
        write_tuned(tmp_path / "gone" / "tuned.json", Tuned("m", "none"))
    with pytest.raises(OptionError, match=r"must end in \.json"):
        write_tuned(tmp_path / "tuned.txt", Tuned("m", "none"))


def test_a_drafter_that_is_not_known_is_a_sentence(tmp_path: Path):
    path = tmp_path / "tuned.json"
    write_tuned(path, Tuned("m", "eagle9:H"))
    with pytest.raises(OptionError, match="Unknown drafter 'eagle9'"):
        foredraft.load("sample", str(path), device="cpu")


@pytest.fixture(scope="module")
def plain() -> Generator:
    return foredraft.load("sample", "none", device="cpu")


def opened(plain: Generator, folder: Path, drafter: str, off_from: int = 0, name: str = "tuned.json") -> Generator:
    write_tuned(folder / name, Tuned("sample", drafter, off_from))
    return foredraft.load(plain.engine.target, str(folder / name), tokenizer=plain.tokenizer)


def drafted(results: Sequence[Result]) -> list[bool]:
    return [result.stats.drafted > 0 for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [HEAD, DRAFT, "prompt_lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafting_stops_at_the_batch_and_no_text_changes(
    plain: Generator, tmp_path: Path, drafter: str, temperature: float
):
    params = SamplingParams(max_new_tokens=14, temperature=temperature, eos_token_id=(), seed=3)
    always = foredraft.load(plain.engine.target, drafter, tokenizer=plain.tokenizer)
    some = opened(plain, tmp_path, drafter, off_from=3)
    for generator in (always, some):
        assert any(drafted(generator.batch(TEXTS[:1], params))) and any(drafted(generator.batch(TEXTS[:2], params)))
    truth, found = always.batch(TEXTS, params), some.batch(TEXTS, params)
    assert [each.tokens for each in found] == [each.tokens for each in truth]
    assert any(drafted(truth)) and drafted(found) == [False] * 3
    assert [each.tokens for each in found] == [each.tokens for each in plain.batch(TEXTS, params)]
    some.close()
    always.close()


def test_load_drafts_what_the_file_says(plain: Generator, tmp_path: Path):
    params = SamplingParams(max_new_tokens=24, eos_token_id=())
    generator = opened(plain, tmp_path, HEAD)
    direct = foredraft.load(plain.engine.target, HEAD, tokenizer=plain.tokenizer)
    ours, theirs = (each.batch(TEXTS, params) for each in (generator, direct))
    assert generator.kind.method == "eagle3" and generator.engine.drafter.needs.max_nodes == 5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.tokens == other.tokens and mine.stats.drafted_by_depth == other.stats.drafted_by_depth
    assert max(len(each.stats.drafted_by_depth) for each in ours) == 3
    for each in (generator, direct):
        each.close()


def test_a_file_that_says_none_is_plain_decoding(plain: Generator, tmp_path: Path):
    generator = opened(plain, tmp_path, "none", off_from=4)
    result = generator.batch(TEXTS[:1], SamplingParams(max_new_tokens=5))[0]
    assert generator.kind.method == "none" and result.stats.drafted == 0 and result.stats.target_forwards == 5


def test_a_bundled_head_needs_no_path_in_the_file(tmp_path: Path):
    write_tuned(tmp_path / "t.json", Tuned("sample", "eagle3,nodes=5,depth=3"))
    generator = foredraft.load("sample", str(tmp_path / "t.json"), device="cpu")
    assert generator.kind.method == "eagle3" and generator.engine.drafter.needs.max_nodes == 5
    generator.close()


def three_each(view: View, limits: Sequence[int]) -> Plan:
    return Plan(tuple(min(3, limit) for limit in limits))


def view(*temperatures: float) -> View:
    return tiny.view([[0] * 4] * len(temperatures), [SamplingParams(temperature=each) for each in temperatures])


@pytest.mark.parametrize(
    "temperatures", [(0.0,), (0.9,), (0.0, 0.0), (0.0, 0.9), (0.9, 0.9), (0.0, 0.0, 0.0), (0.9, 0.0, 0.0)]
)
def test_below_so_many_rows_plans_are_the_other_policies(temperatures: tuple[float, ...]):
    off = len(temperatures) >= 2
    plan = OffFrom(tiny.ScriptedPolicy(three_each), 2).plan(view(*temperatures), [9, 2, 9][: len(temperatures)])
    assert plan.lengths == tuple((0 if off else length) for length in (3, 2, 3)[: len(temperatures)])


def test_the_other_policy_hears_everything():
    inner = tiny.ScriptedPolicy(three_each)
    below = OffFrom(inner, 1)
    seen = view(0.0)
    done = StepResult([], StepEnd.known([], 1), None, 0.0, 0.0)
    below.observe(seen, below.plan(seen, [9]), done)
    below.release(0)
    assert inner.observed == [(Plan((0,)), done)] and inner.released == [0]


@pytest.mark.parametrize("schedule", ["auto", "constant", "heuristic"])
def test_every_schedule_can_be_switched_off(schedule: str):
    options = LookupOptions(num_assistant_tokens_schedule=schedule)
    for off_from, kind in ((0, False), (2, True)):
        assert isinstance(policy_for(options, Needs(max_nodes=10), off_from=off_from), OffFrom) == kind
    policy = policy_for(options, Needs(max_nodes=10), off_from=2)
    assert policy.plan(view(0.9, 0.9), [9, 9]).length == 0
