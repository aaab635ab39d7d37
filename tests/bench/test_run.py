"""The benchmark's own work: order, rotation, batches, turns, seeds, what is kept."""

from pathlib import Path

import pytest
from bench_cases import SETTINGS, Fake, asks, fakes, talk

from foredraft.bench.measure.arms import LoopArm
from foredraft.bench.measure.records import digest, read_runs
from foredraft.bench.measure.run import Bench, Settings, make_groups
from foredraft.core.sampling.params import SamplingParams


def test_every_prompt_is_put_to_every_arm_before_the_next_in_an_order_that_rotates(plain: LoopArm, path: Path):
    a, b, log = fakes()
    Bench([plain, a, b], SETTINGS, path).run(make_groups(asks("p", "q", "r", "s"), [0.0], [1]))
    order = [(run.prompts[0], run.arm) for run in read_runs(path).runs]
    names = [["none", "a", "b"], ["a", "b", "none"], ["b", "none", "a"], ["none", "a", "b"]]
    assert order == [(str(number), name) for number, some in enumerate(names) for name in some]
    assert [arm.name for arm in log] == ["a", "b", *"ab", *"ab", *"ba", *"ab"], "one round of warm-up comes first"


@pytest.mark.parametrize(("temperatures", "batches"), [([0.0, 1.0], [1]), ([0.0], [1, 2, 3]), ([0.0, 1.0], [1, 2])])
def test_the_order_rotates_in_each_cell_of_a_table(
    plain: LoopArm, path: Path, temperatures: list[float], batches: list[int]
):
    """However many temperatures and batch sizes there are: no arm always comes first at one of them."""
    Bench([plain, Fake("a")], SETTINGS, path).run(make_groups(asks(*"pqrstu"), temperatures, batches))
    first: dict[tuple[float, int], list[str]] = {}
    seen = set()
    for run in read_runs(path).runs:
        if run.unit not in seen:
            first.setdefault((run.temperature, run.batch), []).append(run.arm)
        seen.add(run.unit)
    assert len(first) == len(temperatures) * len(batches)
    assert all(names == (["none", "a"] * 6)[: len(names)] for names in first.values())


def test_batches_hold_as_many_as_there_are_and_arms_for_one_prompt_are_left_out(plain: LoopArm, path: Path):
    single = Fake("single", most=1)
    groups = make_groups([*asks(*"pqr"), *asks("x", task="u")], [0.0], [1, 2, 8])
    bench = Bench([plain, single], SETTINGS, path)
    bench.run(groups)
    runs = read_runs(path).runs
    found = [(run.task, run.batch, run.prompts) for run in runs if run.arm == "none"]
    ones = [("t", 1, (name,)) for name in "012"]
    assert found == [*ones, ("t", 2, ("0", "1")), ("t", 2, ("2",)), ("t", 8, ("0", "1", "2"))] + [
        ("u", size, ("0",)) for size in (1, 2, 8)
    ]
    assert {run.batch for run in runs if run.arm == "single"} == {1}
    before = path.read_bytes()
    Bench([plain, single], SETTINGS, path).run(groups)
    assert path.read_bytes() == before, "nothing is missing"


def test_all_arms_read_the_same_conversation_that_of_the_first(plain: LoopArm, path: Path):
    a, b, _ = fakes()
    b.token = 50
    ask = talk("0", "Hi", "And", "So")
    Bench([a, plain, b], SETTINGS, path).run(make_groups([ask], [0.0], [1]))
    host = plain.generator
    first = "H" * len(host.encode(ask.prompt))
    second = "H" * len(host.encode(ask.after([first])))
    wanted = [host.encode(prompt) for prompt in (ask.prompt, ask.after([first]), ask.after([first, second]))]
    for arm in (a, b):
        assert [prompts for prompts, _ in arm.calls[1:]] == [[prompt] for prompt in wanted]
    runs = read_runs(path).runs
    assert [(run.turn, run.arm) for run in runs] == [(turn, name) for turn in range(3) for name in ("a", "none", "b")]
    assert [run.outputs[0].prompt_tokens for run in runs if run.arm == "none"] == [len(prompt) for prompt in wanted]


def test_where_the_first_arm_fails_the_next_one_answers(plain: LoopArm, path: Path):
    a, b, _ = fakes()
    a.fails = lambda prompts: ValueError("no") if len(a.calls) == 2 else None
    ask = talk("0", "Hi", "And")
    Bench([a, b, plain], SETTINGS, path).run(make_groups([ask], [0.0], [1]))
    host = plain.generator
    assert a.calls[2][0] == [host.encode(ask.after(["H" * len(host.encode(ask.prompt))]))]
    assert [run.arm for run in read_runs(path).runs if not run.error] == ["b", "none", "a", "b", "none"]


def test_where_nobody_answers_there_is_no_second_turn(plain: LoopArm, path: Path):
    bad, good = talk("0", "Hi \ud800", "And"), talk("1", "Hi", "And")
    Bench([plain, Fake("a")], SETTINGS, path).run(make_groups([bad, good], [0.0], [1]))
    runs = read_runs(path).runs
    assert [(run.prompts[0], run.turn, bool(run.error)) for run in runs if run.arm == "a"] == [
        ("0", 0, True),
        ("1", 0, False),
        ("1", 1, False),
    ]
    assert all("not valid Unicode" in run.error for run in runs if run.error)


def test_a_batch_of_talks_goes_on_with_those_that_have_another_turn(plain: LoopArm, path: Path):
    fake = Fake("a")
    Bench([plain, fake], SETTINGS, path).run(make_groups([talk("0", "p"), talk("1", "q", "r")], [0.0], [2]))
    found = [(run.turn, run.prompts) for run in read_runs(path).runs if run.arm == "a"]
    assert found == [(0, ("0", "1")), (1, ("1",))] and [len(prompts) for prompts, _ in fake.calls[1:]] == [2, 1]
    said = [run.outputs[0].text for run in read_runs(path).runs if run.arm == "none"]
    assert len(said) == 2, "plain decoding is the first arm, so it has answered"


def test_seeds_are_the_same_for_all_arms_and_for_the_same_command_and_differ_between_groups(
    plain: LoopArm, tmp_path: Path
):
    def asked(settings: Settings, name: str) -> list[list[tuple[int, float]]]:
        a, b, _ = fakes()
        Bench([plain, a, b], settings, tmp_path / name).run(make_groups(asks("p", "q"), [0.0, 1.0], [1], repeats=2))
        return [[(params.seed, params.temperature) for _, params in arm.calls[2:]] for arm in (a, b)]

    one, two = asked(SETTINGS, "1")
    assert one == two and len(one) == len({seed for seed, _ in one}) == 8
    assert {temperature for _, temperature in one} == {0.0, 1.0}
    assert asked(SETTINGS, "2") == [one, two]
    other = Settings("tiny", max_new_tokens=4, seed=1000)
    assert asked(other, "3") == [[(seed + 1000, temperature) for seed, temperature in one]] * 2
    texts = [[run.outputs[0].digest for run in read_runs(tmp_path / name).runs if run.arm == "none"] for name in "12"]
    assert texts[0] == texts[1] and len(set(texts[0])) > 4


def test_settings_reach_every_arm(plain: LoopArm, path: Path):
    settings = Settings("tiny", 5, min_new_tokens=2, top_k=7, top_p=0.5, repetition_penalty=1.5)
    fake = Fake("a")
    Bench([plain, fake], settings, path).run(make_groups(asks("p"), [0.5], [1]))
    params = fake.calls[1][1]
    assert params == SamplingParams(
        max_new_tokens=5, min_new_tokens=2, top_k=7, top_p=0.5, repetition_penalty=1.5, temperature=0.5, seed=0
    )


def test_without_texts_there_are_still_digests(plain: LoopArm, path: Path):
    Bench([plain], SETTINGS, path).run(make_groups([talk("0", "Hi", "And")], [0.0], [1]))
    apart = path.parent / "bare.jsonl"
    Bench([plain], SETTINGS, apart, keep_texts=False).run(make_groups([talk("0", "Hi", "And")], [0.0], [1]))
    full, bare = ([run.outputs[0] for run in read_runs(each).runs] for each in (path, apart))
    assert [each.digest for each in bare] == [each.digest for each in full] == [digest(each.output) for each in full]
    assert [(each.output, each.text, each.tokens) for each in bare] == [((), "", 4)] * 2
    assert all(len(each.output) == 4 and each.text for each in full)


def test_whoever_waits_is_told(plain: LoopArm, path: Path):
    told: list[tuple[int, int, str]] = []
    groups = make_groups([*asks("p"), *asks("q", task="u")], [0.0], [1])
    Bench([plain], SETTINGS, path).run(groups, lambda *said: told.append(said))
    assert told == [(0, 2, "t"), (1, 2, "u"), (2, 2, "")]
    assert [run.category for run in read_runs(path).runs] == ["text", "text"]
