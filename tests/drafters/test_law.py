"""The law of whole outputs: 200,000 of them for each drafter and setting follow the target's exact law.

Chi-square over all texts of three tokens, five tokens in the vocabulary, and a draft that ranks them in reverse. Seeds
are fixed, so a test that has passed passes again with as many outputs. The runs are shared out among processes.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest

import laws

LEAST = 1e-3
"""Outputs with a p-value below are counted again: one of some ninety runs may well have one by chance."""
AGAIN = 5
"""So many times as many outputs, of other seeds, when counted again. A fault shows in them; chance does not return."""
MOST = int(os.environ.get("LAW_OUTPUTS", "200000"))
"""Outputs of a drafter and setting, at most; CI takes fewer."""
MANY, SOME, LESS, FEW = min(200_000, MOST), min(40_000, MOST), min(20_000, MOST), 600


class Job(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def seed(*what: str | None) -> int:
    """One seed for each run, the same every time."""
    return 1000 + 7919 * sum(i * ord(c) for i, c in enumerate("/".join(map(str, what)), start=1)) % 100_000


def together(drafter: str, setting: str, count: int, rule: str | None = None) -> Job:
    return Job(laws.run, (drafter, setting, count, rule, seed(drafter, setting, rule)))


def alone(drafter: str, setting: str, count: int) -> Job:
    return Job(laws.run_alone, (drafter, setting, count, seed(drafter, setting, None)))


def faulty(fault: str) -> Job:
    return Job(laws.run_faulty, (fault, 40_000, seed(fault)))


TABLE = [
    *[(drafter, setting, MANY) for drafter in ("chain", "lookup") for setting in laws.SETTINGS],
    *[("tree", setting, MANY) for setting in ("temperature", "cutoffs", "history")],
    *[("none", setting, MANY) for setting in laws.SETTINGS],
    *[(drafter, "temperature", SOME) for drafter in ("unsure chain", "lookup tree")],
    *[("tree", setting, SOME) for setting in ("top_k", "top_p")],
    ("eagle1", "temperature", MANY),
    *[("eagle1", setting, SOME) for setting in ("top_k", "cutoffs", "history")],
    *[(name, "temperature", SOME) for name in laws.HEADS if name != "eagle1"],
    *[(name, "history", SOME) for name in ("eagle3", "hydra", "glide")],
    *[(name, setting, LESS) for name in ("specinfer", "specinfer apart") for setting in ("temperature", "history")],
    *[("sequoia", setting, LESS) for setting in ("temperature", "cutoffs", "history")],
    ("opt_tree", "temperature", LESS),
    *[(name, "temperature", LESS) for name in laws.LOOKAHEADS],
    ("lookahead bigrams", "history", LESS),
    *[("layer_skip", setting, LESS) for setting in ("temperature", "history")],
    *[(name, "temperature", LESS) for name in laws.NESTED],
    ("cascade", "history", MANY),
    ("relay", "history", LESS),
    *[(name, "temperature", LESS) for name in laws.PARTIAL],
    *[("triforce", setting, LESS) for setting in ("top_p", "history")],
    *[("tli", setting, LESS) for setting in ("temperature", "top_k", "history")],
    ("slem", "temperature", LESS),
    ("slrs", "temperature", LESS),
]
"""Drafters and sampling settings. Drafts are drawn, where they can be; by default a text is plain decoding's."""
RULES = [
    *[("chain", rule) for rule in ("token", "recursive", "traversal", "target_sampling")],
    *[(drafter, "token") for drafter in ("cascade", "relay")],
    *[("tree", rule) for rule in ("recursive", "target_sampling")],
    ("specinfer apart", "traversal"),
]
"""Other legal rules."""
ALONE = ("chain", "tree", "lookup")
FAULTS = (*laws.FAULTS, laws.SHARED)


def jobs() -> list[Job]:
    return [
        *[together(*entry, laws.ratio_rule(entry[0])) for entry in TABLE],
        *[together(drafter, setting, 100) for drafter, setting, _ in TABLE],
        *[alone(drafter, setting, 30) for drafter, setting, _ in TABLE],
        *[together(drafter, "temperature", SOME, rule) for drafter, rule in RULES],
        *[alone(drafter, "temperature", FEW) for drafter in ALONE],
        *[faulty(fault) for fault in (*FAULTS, "none")],
    ]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Iterator[Callable[[Job], Any]]:
    """What a job gives; all jobs are begun at once, but only if more than one test wants one."""
    workers = min(4, os.cpu_count() or 1)
    futures: dict[Job, Future] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        wanted = [item for item in request.session.items if item.path == request.path]
        for job in jobs() if len(wanted) > 10 else ():
            futures[job] = pool.submit(job.function, *job.arguments)

        def result(job: Job) -> Any:
            if job not in futures:
                futures[job] = pool.submit(job.function, *job.arguments)
            return futures[job].result()

        yield result
        pool.shutdown(cancel_futures=True)


def follow_the_law(
    results: Callable[[Job], Any], drafter: str, setting: str, count: int, rule: str | None = None
) -> bool:
    """Whether these outputs follow the target's law, or else more of them do."""
    if laws.p_value(results(together(drafter, setting, count, rule)).counts, laws.law(setting)) > LEAST:
        return True
    again = (drafter, setting, AGAIN * count, rule, seed(drafter, setting, rule, "again"))
    return laws.p_value(results(Job(laws.run, again)).counts, laws.law(setting)) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "setting", "count"), TABLE)
def test_texts_follow_the_targets_law(drafter: str, setting: str, count: int, results: Callable[[Job], Any]):
    rule = laws.ratio_rule(drafter)
    found = results(together(drafter, setting, count, rule))
    assert int(found.counts.sum()) == count
    if drafter != "none":
        assert 0 < found.accepted < found.drafted, "this shows nothing unless drafts are both accepted and rejected"
    assert follow_the_law(results, drafter, setting, count, rule)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "setting", "count"), TABLE)
def test_a_text_alone_is_the_text_in_the_batch(drafter: str, setting: str, count: int, results: Callable[[Job], Any]):
    texts = results(alone(drafter, setting, 30))
    assert texts == results(together(drafter, setting, 100)).first[:30]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ALONE)
def test_texts_alone_follow_the_law(drafter: str, results: Callable[[Job], Any]):
    texts = results(alone(drafter, "temperature", FEW))
    assert laws.p_value(laws.tally(texts), laws.law("temperature")) > LEAST


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), RULES)
def test_every_legal_rule(drafter: str, rule: str, results: Callable[[Job], Any]):
    assert results(together(drafter, "temperature", SOME, rule)).accepted > 0
    assert follow_the_law(results, drafter, "temperature", SOME, rule)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_test_sees_a_planted_fault(fault: str, results: Callable[[Job], Any]):
    found = results(faulty(fault))
    assert found.accepted > 0
    assert laws.p_value(found.counts, laws.law("temperature")) < 1e-9


@pytest.mark.slow
def test_the_same_drafter_without_a_fault(results: Callable[[Job], Any]):
    found = results(faulty("none"))
    assert 0 < found.accepted < found.drafted
    assert laws.p_value(found.counts, laws.law("temperature")) > LEAST
