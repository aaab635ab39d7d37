"""What tune chooses, on tiny models and a machine whose clock is ours: forwards take what a test says."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from foredraft.bench.tune import tune
from foredraft.bench.tune.predict import StepPrediction
from foredraft.bench.tune.tune import PAYS, BatchPoint, Configuration, TuneConfig, Tuner, Tuning
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.stats import DecodeStats
from foredraft.engine import cost_model as costs, engine, step
from foredraft.engine.generator import Generator, Result
from foredraft.model.hf.causal_lm import CausalLM

PROMPTS = tiny.prompts((5, 17))
LENGTH = 28
GREEDY = SamplingParams(max_new_tokens=LENGTH)
ALONE = "another"
SURE = "assistant_confidence_threshold=0.0"
CONSTANT = "num_assistant_tokens_schedule=constant"


class Machine:
    """Time passes only in forwards: ``target`` seconds by rows, and ``draft`` seconds for any forward of a draft."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slow: CausalLM | None = None
        self.target: Callable[[int], float] = lambda rows: 1.0
        self.draft = 0.05

    def perf_counter(self) -> float:
        return self.now

    def forward(self, model: CausalLM, rows: int) -> None:
        self.now += self.target(rows) if model is self.slow else self.draft


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama"))


@pytest.fixture
def machine(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made, compute = Machine(), CausalLM.compute
    made.slow = target

    def timed(self: CausalLM, each: Any, *args: Any, **options: Any) -> Any:
        made.forward(self, each.tokens.numel())
        return compute(self, each, *args, **options)

    monkeypatch.setattr(CausalLM, "compute", timed)
    for module in (costs, engine, step):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def saved(folder: Path, seed: int | None = None) -> str:
    tiny.build("llama", seed=seed).save_pretrained(folder)
    return f"draft_model:{folder},{SURE}"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that always knows what the target says."""
    return saved(tmp_path_factory.mktemp("twin"))


@pytest.fixture(scope="module")
def fool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft that never does."""
    return saved(tmp_path_factory.mktemp("fool"), seed=77)


def stepped(rows: int) -> float:
    """Up to four rows are free: a draft of three is the best."""
    return 1.0 if rows <= 4 else float(rows)


def tuned(target: CausalLM, *names: str, batches: Sequence[int] = (1,), verify: int = 3, **options: Any) -> Tuning:
    params = SamplingParams(**{"max_new_tokens": LENGTH, **options})
    plain = tiny.generator(target, max_rows=max(batches))
    return Tuner(plain, names, ALONE).run(TuneConfig(PROMPTS, params, verify, batches))


def sized(twin: str, tokens: int) -> str:
    return f"{twin},num_assistant_tokens={tokens},{CONSTANT}"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_best_size_is_chosen_and_was_predicted(machine: Machine, target: CausalLM, twin: str, temperature: float):
    machine.target = stepped
    found = tuned(target, twin, temperature=temperature)
    assert found.chosen is not None and found.chosen.spec == sized(twin, 3)
    assert found.chosen.measured == pytest.approx(4 / 1.15, rel=0.05)
    assert found.chosen.acceptance_length == pytest.approx(4, rel=0.06)
    assert found.off_from is None and found.skipped == ()
    predictions = [trial.predicted.speed_up for trial in found.trials[:-1]]
    assert predictions == sorted(predictions, reverse=True) and found.trials[-1].spec == twin, (
        "its own schedule is last"
    )
    ran = [trial for trial in found.trials[:-1] if trial.measured is not None]
    assert len(ran) == 3 and all(abs(trial.error or 0.0) < 0.1 for trial in ran), "texts end within a step"
    assert abs(found.chosen.error or 0.0) < 0.02


@pytest.mark.slow
def test_every_size_is_predicted_as_it_runs(machine: Machine, target: CausalLM, twin: str):
    machine.target, machine.draft = (lambda rows: 1.0 + 0.1 * (rows - 1)), 0.3
    found = tuned(target, twin, verify=8, max_new_tokens=66)
    ran = [trial for trial in found.trials if trial.measured is not None and trial.spec != twin]
    assert len(ran) == 8 and all(abs(trial.error or 0.0) < 0.06 for trial in ran)
    assert found.chosen is not None and found.chosen.measured == max(trial.measured or 0.0 for trial in found.trials)


def test_where_every_row_costs_as_much_nothing_is_chosen(machine: Machine, target: CausalLM, twin: str):
    machine.target = float
    found = tuned(target, twin, batches=(1, 2))
    assert found.chosen is None and found.batches == () and found.off_from is None
    assert all((trial.measured or 0.0) < PAYS for trial in found.trials)


def test_it_says_from_which_batch_drafting_stops_paying(machine: Machine, target: CausalLM, twin: str):
    """Eight rows are free: one text has room for a draft, eight have none."""
    machine.target, machine.draft = (lambda rows: max(1.0, rows / 8)), 0.2
    found = tuned(target, sized(twin, 6), batches=(8, 1, 2, 4, 16))
    assert found.chosen is not None and found.chosen.spec == sized(twin, 6)
    expected = [(b, 7 / (b + 1.2) / (1 if b <= 8 else 8 / b)) for b in (1, 2, 4, 8, 16)]
    assert [point.batch for point in found.batches] == [1, 2, 4, 8, 16]
    for point, (_, speed_up) in zip(found.batches, expected, strict=True):
        assert point.speed_up == pytest.approx(speed_up, rel=0.15)
    assert found.off_from == 8
    assert [table.rows[0] for table in found.costs] == [1, 8, 2, 4, 16]


def test_one_batch_size_that_does_not_pay_is_the_one_to_stop_at(machine: Machine, target: CausalLM, twin: str):
    machine.target, machine.draft = (lambda rows: max(1.0, rows / 8)), 0.2
    found = tuned(target, sized(twin, 6), batches=(8,))
    assert found.chosen is not None and [point.batch for point in found.batches] == [8] and found.off_from == 8


def test_a_choice_that_pays_for_one_text_is_not_switched_off_for_one(
    machine: Machine, target: CausalLM, twin: str, monkeypatch: pytest.MonkeyPatch
):
    machine.target = stepped
    noisy = [BatchPoint(1, 0.9), BatchPoint(2, 1.5), BatchPoint(4, 1.0)]
    monkeypatch.setattr(Tuner, "_batches", lambda *args: (noisy, {}))
    assert tuned(target, sized(twin, 3), batches=(1, 2, 4)).off_from == 4


@pytest.mark.slow
def test_two_drafts_of_one_method_are_told_apart(machine: Machine, target: CausalLM, twin: str, fool: str):
    machine.target = stepped
    found = tuned(target, fool, twin, verify=2)
    assert found.chosen is not None and found.chosen.spec == sized(twin, 3) and found.chosen.family == twin
    ran = {trial.family: trial for trial in found.trials if trial.measured is not None and trial.spec != twin}
    assert set(ran) == {fool, twin}, "the best of each is run"
    assert (ran[fool].measured or 0.0) < 1.1 and ran[fool].acceptance_length < 1.3 < ran[twin].acceptance_length


def test_one_draft_twice_is_one_draft(target: CausalLM, twin: str, fool: str):
    plain = tiny.generator(target)
    once, twice = (Tuner(plain, names, ALONE)._families for names in ([twin, fool], [twin, fool, twin]))
    assert once == twice and [family.name for family in once] == [twin, fool]


def test_what_cannot_be_loaded_is_skipped_with_its_sentence(
    machine: Machine, target: CausalLM, twin: str, tmp_path: Path
):
    machine.target = stepped
    found = tuned(target, f"draft_model:{tmp_path / 'absent'}", "hydra", sized(twin, 3), verify=1)
    assert found.chosen is not None and found.chosen.family == sized(twin, 3)
    absent, hydra = found.skipped
    assert absent.startswith(f"draft_model:{tmp_path / 'absent'}: ") and "absent" in absent.partition(": ")[2]
    assert hydra == "hydra: hydra needs Hydra heads: write hydra:PATH with a folder or hub name."


def test_where_none_can_be_had_it_is_an_error(machine: Machine, target: CausalLM):
    with pytest.raises(OptionError, match="No drafter could be loaded: hydra: hydra needs Hydra heads"):
        tuned(target, "hydra", "medusa")


def test_texts_that_leave_no_room_for_drafts_are_an_error(machine: Machine, target: CausalLM, twin: str):
    with pytest.raises(OptionError, match="no step drafted anything; raise --max-new-tokens"):
        tuned(target, twin, max_new_tokens=1)


@pytest.mark.parametrize("max_new_tokens", [2, 3])
def test_texts_with_little_room_are_enough(machine: Machine, target: CausalLM, twin: str, max_new_tokens: int):
    machine.target = stepped
    found = tuned(target, twin, max_new_tokens=max_new_tokens)
    assert found.chosen is not None and found.chosen.measured == pytest.approx(max_new_tokens, rel=0.3)


def test_there_must_be_prompts_and_drafters(target: CausalLM):
    plain = tiny.generator(target)
    with pytest.raises(OptionError, match="No prompts to tune on"):
        Tuner(plain, ["prompt_lookup"], ALONE).run(TuneConfig([], GREEDY))
    with pytest.raises(OptionError, match="at least one drafter"):
        Tuner(plain, [], ALONE)
    with pytest.raises(OptionError, match="Unknown option of prompt_lookup 'nodes'"):
        Tuner(plain, ["prompt_lookup,nodes=3"], ALONE)


def test_a_model_whose_context_is_shorter_than_the_longest_forward(machine: Machine):
    """Positions are learned, so there are none beyond it."""
    short = CausalLM(tiny.build("gpt2", max_position_embeddings=40))
    machine.slow = short
    question = TuneConfig([[1, 2, 3, 1, 2, 3, 1, 2, 3]], SamplingParams(max_new_tokens=64), 1, (1, 2))
    found = Tuner(tiny.generator(short, max_rows=2), ["prompt_lookup"], ALONE).run(question)
    assert found.chosen is not None and found.chosen.acceptance_length > 1


def test_what_is_being_measured_is_told(machine: Machine, target: CausalLM, twin: str):
    told: list[str] = []
    machine.target = stepped
    plain = tiny.generator(target, max_rows=2)
    Tuner(plain, [twin], ALONE, told.append).run(TuneConfig(PROMPTS[:1], GREEDY, 2, (1, 2)))
    assert told == [
        "costs of forwards",
        sized(twin, 10),
        "running 3 of 8 configurations",
        "batches of 1",
        "batches of 2",
    ]


def trial(family: str, extra: str, speed_up: float) -> Configuration:
    return Configuration(family, f"{family},{extra}", StepPrediction(2.0, 1.0, speed_up), None, 2.0)


def verified(target: CausalLM, trials: list[Configuration], verify: int) -> tuple[list[str], list[Configuration]]:
    """The specs that are run, in order, and what comes of them if run i turns out to be i times as fast."""
    ran: list[str] = []

    def measured(self: Tuner, specs: Sequence[str], *args: Any) -> list[tuple[float, float]]:
        ran.extend(specs)
        return [(float(i), 10.0 + i) for i in range(1, len(specs) + 1)]

    plain: Generator = tiny.generator(target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuner, "_measured", measured)
        found = Tuner(plain, ["prompt_lookup"], ALONE)._verified(trials, PROMPTS, TuneConfig(PROMPTS, GREEDY, verify))
    return ran, found


BEST = [
    trial("eagle3:A", "nodes=9", 3.0),
    trial("eagle3:A", "nodes=7", 2.9),
    trial("eagle3:B", "nodes=9", 2.8),
    trial("eagle3:A", "nodes=4,top_k=1", 2.7),
    trial("prompt_lookup", "prompt_lookup_num_tokens=3", 2.6),
    trial("prompt_lookup", "prompt_lookup_num_tokens=4", 2.6),
    trial("eagle3:B", "nodes=5", 2.5),
]


@pytest.mark.parametrize("verify", [1, 2, 4, 6])
def test_the_best_of_each_is_run_first_and_then_the_next_best(target: CausalLM, verify: int):
    """Heads are told apart by their paths, trees from chains; the two lookups do the same, so one is enough."""
    order = [BEST[i].spec for i in (0, 2, 3, 4, 1, 6)]
    assert verified(target, BEST, verify)[0] == [*order[:verify], "eagle3:A"]


def test_what_was_measured_goes_to_the_trial_that_was_run(target: CausalLM):
    ran, found = verified(target, BEST, 4)
    assert [each.spec for each in found] == [*(each.spec for each in BEST), "eagle3:A"]
    for each in found:
        turn = ran.index(each.spec) + 1 if each.spec in ran else None
        assert each.measured == turn and each.acceptance_length == (2.0 if turn is None else 10.0 + turn)
    assert found[0].error == 3.0 / 1.0 - 1.0 and found[1].error is None


def test_a_drafter_with_one_size_has_its_own_schedule_run_too(target: CausalLM):
    ran, found = verified(target, [trial("blockwise:H", CONSTANT, 2.0)], 3)
    assert ran == [f"blockwise:H,{CONSTANT}", "blockwise:H"] and found[-1].measured == 2.0


def test_of_two_tries_the_faster_one_counts_without_the_prompt(target: CausalLM, monkeypatch: pytest.MonkeyPatch):
    """Warming up counts for nothing, and a slow moment of the machine in one try for none of the two."""

    def scripted(seconds: Sequence[float], forwards: int) -> Any:
        tries = iter(seconds)

        def batch(prompts: Any, params: SamplingParams) -> list[Result]:
            stats = DecodeStats(seconds=next(tries) + 5.0, prefill_seconds=5.0, target_forwards=forwards)
            return [Result("", [1] * 6, "length", stats, [], 0)]

        return SimpleNamespace(batch=batch, tokenizer=None, close=lambda: None)

    tuner = Tuner(tiny.generator(target), ["prompt_lookup"], ALONE)
    monkeypatch.setattr(tuner, "_plain", scripted([100.0, 6.0, 8.0, 60.0, 6.0], 6))
    monkeypatch.setattr(tune, "load", lambda *args, **options: scripted([0.1, 3.0, 50.0, 2.0, 1.0], 2))
    assert tuner._measured(["a"], PROMPTS, GREEDY) == [(4.0, 3.0)]
