"""The number of threads of steps where other programs use the cores, by planted readings of them."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine import shared_cores
from foredraft.engine.shared_cores import CpuUsage, SharedCores, read_usage
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.threads import kernel_threads


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


class Machine:
    """A clock, and cores of which each second others and this process use so many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.now, self.busy, self.own, self.cores = 100.0, 7.0, 3.0, cores
        monkeypatch.setattr(shared_cores, "read_usage", lambda: CpuUsage(self.now, self.busy, self.own, self.cores))
        monkeypatch.setattr(shared_cores.time, "monotonic", lambda: self.now)

    def run(self, seconds: float, others: float, own: float = 1.0) -> None:
        self.now += seconds
        self.busy += seconds * (others + own)
        self.own += seconds * own


def inside(cores: SharedCores) -> int:
    """The threads of operators and kernels in a step; outside, the former number is back."""
    before = torch.get_num_threads()
    with cores.step():
        count = torch.get_num_threads()
        assert kernel_threads() == count
    assert torch.get_num_threads() == before
    return count


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("others", "cores", "threads"),
    [
        (0.0, 4, 4),
        (0.3, 4, 4),
        (0.5, 4, 3),
        (1.0, 4, 3),
        (2.0, 4, 2),
        (9.0, 4, 1),
        (4.0, 8, 4),
        (6.0, 8, 2),
        (1.0, 1, 1),
    ],
)
def test_a_core_that_others_use_gets_no_thread(
    others: float, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
):
    machine, shared = Machine(monkeypatch, cores), SharedCores(watch=True)
    inside(shared)
    machine.run(0.3, others)
    assert inside(shared) == threads


@pytest.mark.usefixtures("four_threads")
def test_a_thread_goes_at_once_and_comes_back_after_a_second_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    machine, shared = Machine(monkeypatch, 4), SharedCores(watch=True)
    assert inside(shared) == 4
    machine.run(0.2, others=2.0)
    assert inside(shared) == 4, "too early for a look"
    machine.run(0.1, others=2.0)
    assert inside(shared) == 2
    for expected in (2, 2, 2, 4):
        machine.run(0.3, others=0.1)
        assert inside(shared) == expected
    machine.run(0.3, others=1.0)
    assert inside(shared) == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "use 2.0 of 4 cores, so steps run in 2 instead of 4 threads" in warnings[0]
    assert caplog.records[-1].getMessage() == "Steps run in 3 threads."


@pytest.mark.usefixtures("four_threads")
def test_what_others_did_while_no_step_ran_does_not_count(monkeypatch: pytest.MonkeyPatch):
    machine, shared = Machine(monkeypatch, 4), SharedCores(watch=True)
    inside(shared)
    machine.run(60, others=4.0, own=0.0)
    assert inside(shared) == 4
    machine.run(0.3, others=0.0)
    assert inside(shared) == 4


@pytest.mark.usefixtures("four_threads")
def test_what_others_did_in_a_slow_step_counts_also_if_another_engine_ran_since(monkeypatch: pytest.MonkeyPatch):
    """A thread too many makes steps of seconds: then it has to go all the same."""
    for between in (0.0, 4.0):
        machine, shared = Machine(monkeypatch, 4), SharedCores(watch=True)
        with shared.step():
            machine.run(3.0, others=2.0)
        machine.run(between, others=2.0)
        assert inside(shared) == 2


@pytest.mark.usefixtures("four_threads")
def test_a_generator_on_a_cpu_steps_in_the_threads_that_find_a_core(monkeypatch: pytest.MonkeyPatch):
    machine, seen = Machine(monkeypatch, 4), []
    model = CausalLM(tiny.build())
    generator, compute = tiny.generator(model), model.compute

    def watched(*arguments: Any, **options: Any) -> Any:
        seen.append(torch.get_num_threads())
        machine.run(0.3, others=1.5)
        return compute(*arguments, **options)

    monkeypatch.setattr(model, "compute", watched)
    generator.generate([1, 2, 3], SamplingParams(max_new_tokens=4, eos_token_id=()))
    assert (seen[0], seen[-1]) == (4, 2) and torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_without_a_watch_or_with_set_threads_the_number_is_torchs(monkeypatch: pytest.MonkeyPatch):
    assert inside(SharedCores(watch=False)) == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert read_usage() is None
    assert inside(SharedCores(watch=True)) == 4


STAT = """cpu  999 0 0 0 0 0 0 0 0 0
cpu0 100 20 30 5000 600 7 8 35 90 0
cpu1 900 0 100 1 1 0 0 0 0 0
cpu10 5 5 5 5 5 5 5 5 5 5
intr 12345 0 0
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc/stat")
def test_the_use_of_this_processs_cores_is_read_from_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    first, second = read_usage(), read_usage()
    assert first is not None and second is not None and second.clock >= first.clock and second.own >= first.own > 0
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(shared_cores, "_STAT", tmp_path / "stat")
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    usage = read_usage()
    assert usage is not None and (usage.busy, usage.cores) == (2.0, 1)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    usage = read_usage()
    assert usage is not None and (usage.busy, usage.cores) == (12.0, 2)
    monkeypatch.setattr(shared_cores, "_STAT", tmp_path / "none")
    assert read_usage() is None
