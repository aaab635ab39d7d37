"""A drafter that learns: it does learn, what it learns from is what happened, and nothing of it shows in the texts."""

import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from online_cases import KINDS, NEW, SMALL, draft, generator, inner, same, serve, stream, target, weights

import foredraft
import laws
import tiny
from foredraft.core.drafter import Plan
from foredraft.core.errors import LawError, OptionError
from foredraft.core.sampling.params import SamplingParams
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.online.method import BackgroundTask, Online, Options
from foredraft.drafters.online.samples import LawSample, ReplayBuffer, SampleBatch
from foredraft.drafters.online.trainer import MIN_SAMPLES, compare_to_best
from foredraft.engine.policy import Constant
from foredraft.model.hf.causal_lm import CausalLM
from reference import reference

# It learns.


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_acceptance_rises_and_stays_up(name: str):
    sampled = name in ("draft_model", "eagle1")  # these draw from q, the others pick
    g, online = generator(name)
    options = {"max_new_tokens": 24, "temperature": float(sampled)}
    lengths = serve(g, range(0, 48, 8), **options)
    frozen = tiny.generator(g.engine.target, inner(name, g.engine.target), g.engine.policy)
    rest = serve(frozen, range(32, 48, 8), **options)
    assert [report.outcome for report in online.reports] == ["learned"] * 6
    overlaps = [report.acceptance for report in online.reports]
    assert min(overlaps[2:]) > overlaps[0] + 0.02, "every later version is better than none"
    assert sum(lengths[4:]) / 2 > 1.05 * sum(rest) / 2


@pytest.mark.parametrize("options", [{"loss": "reverse_kl"}, {"loss": "jsd"}])
def test_every_loss_teaches(options: dict[str, Any]):
    g, online = generator("draft_model", **options)
    serve(g, range(0, 32, 8), temperature=1.0)
    assert online.reports[-1].acceptance > online.reports[0].acceptance + 0.03


def test_the_same_stream_teaches_the_same():
    runs = [generator("draft_model", passes=2) for _ in range(2)]
    for g, _ in runs:
        serve(g, range(0, 16, 8), temperature=1.0)
    (_, one), (_, other) = runs
    assert same(weights(one), weights(other)) and one.reports == other.reports


# What it learns from.


def samples(name: str, **options: Any) -> tuple[list[LawSample], Online, list[list[int]]]:
    """Those of a ragged batch of which rows come and go, the drafter, and the whole texts."""
    served = target()
    online = Online(Options(**{"interval": 1000, "top_laws": 16, **options}), inner(name, served))
    served.tap(online.needs.hidden_layers)
    g = tiny.generator(served, online, Constant(4), max_rows=3)
    prompts = [[3], [1, 2, 3, 4], *tiny.prompts((9, 21), vocab=32), [5, 6]]
    results = g.generate(prompts, max_new_tokens=NEW, temperature=1.0, seed=3)
    texts = [prompt + result.tokens for prompt, result in zip(prompts, results, strict=True)]
    return online._recorded.buffer.take(), online, texts


@pytest.mark.parametrize("context", [512, 16])
@pytest.mark.parametrize("name", KINDS)
def test_the_laws_and_states_are_those_that_the_target_has_there(name: str, context: int):
    found, online, texts = samples(name, context=context)
    model, places = target(), []
    for sample in found:
        tokens = sample.tokens.tolist()
        owners = [(t, i) for t in texts for i in range(len(t)) if t[i : i + len(tokens)] == tokens]
        assert len(owners) == 1 and len(tokens) <= context + 4
        text, begin = owners[0]
        places += [(texts.index(text), begin + place) for place in sample.places.tolist()]
        logits = model.stock_logits(torch.tensor([text]))[0]
        wanted = logits[begin + sample.places].softmax(-1)
        torch.testing.assert_close(sample.p[:, :-1].float(), wanted.topk(16).values, atol=2e-3, rtol=2e-2)
        torch.testing.assert_close(sample.p[:, :-1].float(), wanted.gather(1, sample.ids.long()), atol=2e-3, rtol=2e-2)
        read = model.read(torch.tensor([text]), online.needs.hidden_layers)
        assert set(sample.hidden) == set(read)
        for tap, states in sample.hidden.items():
            assert states.shape[0] == len(tokens) - 1, "the last token has not been read"
            torch.testing.assert_close(
                states.float(), read[tap][0, begin : begin + len(tokens) - 1], atol=5e-2, rtol=2e-2
            )
    every = [
        (number, place) for number, text in enumerate(texts) for place in range(len(text) - NEW - 1, len(text) - 1)
    ]
    assert sorted(places) == every, "every new token has one law, and nothing else has"


def test_bad_cases_are_the_places_of_rejected_tokens():
    """Greedy chains: those where the draft's first choice is not the text's token, if the draft came that far."""
    served = target()
    g, online = generator("draft_model", served, interval=1000, rejected=True)
    prompts = [[3], [1, 2, 3, 4], *tiny.prompts((9, 21), vocab=32)]
    results = g.generate(prompts, max_new_tokens=40, temperature=0.0)
    found = {tuple(sample.tokens.tolist()): sample for sample in online._recorded.buffer.take()}
    model, seen = draft(), 0
    for prompt, result in zip(prompts, results, strict=True):
        text = prompt + result.tokens
        said = model.stock_logits(torch.tensor([text]))[0].argmax(-1).tolist()
        wanted, root = [], len(prompt) - 1
        while root < len(text) - 6:
            right = next((k for k in range(4) if said[root + k] != text[root + k + 1]), 4)
            wanted += [root + right] if right < 4 else []
            root += right + 1
        sample = next(each for tokens, each in found.items() if tokens == tuple(text))
        kept = [place for place in sample.places.tolist() if place < len(text) - 6]
        wanted = [place for place in wanted if place < len(text) - 6]
        assert kept == wanted, "but for the last drafts, which are shorter"
        seen += len(wanted)
        assert sample.ids.shape[0] == sample.p.shape[0] == sample.places.shape[0]
    assert seen > 10


@pytest.mark.parametrize("name", KINDS)
def test_the_copy_says_what_the_drafter_drafts(name: str):
    """At the beginning: the first level's law is the law of a draft's first token, at every place."""
    found, online, _ = samples(name)
    batch = SampleBatch.of(found, torch.device("cpu"))
    with torch.no_grad():
        first = next(online._adapter.predict(batch))
    said = dict(zip(first.laws.tolist(), first.log_q.exp(), strict=True))
    served, checked = target(), 0
    drafter = inner(name, served)
    for law in list(said)[:: max(1, len(said) // 12)]:
        text = found[int(batch.rows[law])].tokens[: int(batch.places[law]) + 1]
        taps = drafter.needs.hidden_layers
        hidden = served.read(text[None, :-1], taps) if taps else {}
        drafter.admit(0, text[:-1], drafter.fuse(hidden))
        view = tiny.view([text.tolist()], SamplingParams(temperature=1.0), SMALL["vocab_size"], [1], draws=True)
        draft = drafter.propose(view, Plan((1,)))
        drafter.release(0)
        assert draft.q is not None
        torch.testing.assert_close(said[law][:-1], draft.q[0, 1, batch.ids[law]], atol=2e-2, rtol=5e-2)
        checked += 1
    assert checked > 4


def test_further_levels_are_about_the_tokens_further_ahead():
    """A draft model's copy that is the target itself is right everywhere; so is an off-by-one error nowhere hidden."""
    served = target()
    online = Online(Options(interval=1000, top_laws=16), DraftModel(DraftOptions(4), target(), served.vocab_size))
    g = tiny.generator(served, online, Constant(4))
    g.generate(stream(6), max_new_tokens=NEW, temperature=1.0, seed=0)
    found = online._recorded.buffer.take()
    assert online._trainer._acceptance(found) == pytest.approx([1.0] * 6, abs=5e-3)


def test_what_waits_is_bounded():
    def sample(laws: int) -> LawSample:
        zeros = torch.zeros(laws, 4)
        tokens = torch.zeros(laws + 2, dtype=torch.long)
        return LawSample(tokens, {}, tokens[:laws], zeros.int(), zeros.half())

    buffer = ReplayBuffer(3 * sample(10).nbytes)
    for count in (30, 10, 11, 10, 9):
        buffer.add(sample(count))
    assert len(buffer) == 3 and buffer.nbytes <= 3 * sample(10).nbytes
    assert [each.places.shape[0] for each in buffer.take()] == [11, 10, 9] and len(buffer) == buffer.nbytes == 0
    buffer.add(sample(60))
    assert len(buffer) == buffer.nbytes == 0


def test_a_service_that_never_gets_to_learn_keeps_no_more_than_it_may():
    g, online = generator("eagle3", interval=10**6)
    online._recorded.buffer = ReplayBuffer(limit := 40_000)
    for begin in range(0, 32, 8):
        serve(g, range(begin, begin + 8, 8))
        assert online._recorded.buffer.nbytes <= limit
    assert online._recorded.buffer.nbytes > limit / 2 and not online._recorded._rows and not online.reports


# What it may not do.


@pytest.mark.parametrize("background", [True, False])
def test_weights_change_between_two_steps_and_on_the_loops_thread(background: bool):
    served, events = target(), []
    drafter = DraftModel(DraftOptions(num_assistant_tokens=4), draft(), served.vocab_size)
    g, online = generator(drafter, served, interval=2, background=background, passes=1)

    def note(owner: Any, name: str) -> None:
        """From now on calls of this method are events, with their thread."""
        method = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            events.append((name, threading.current_thread().name))
            return method(*arguments)

        setattr(owner, name, noted)

    for owner, name in ((drafter, "propose"), (drafter, "commit"), (online._adapter, "publish")):
        note(owner, name)
    prompts = stream(60)
    expected = [reference(served, prompt, SamplingParams(max_new_tokens=NEW)) for prompt in prompts[:12]]
    for begin in range(0, 60, 12):
        results = g.generate(prompts[begin : begin + 12], max_new_tokens=NEW)
        if not begin:
            assert [r.tokens for r in results] == expected
    online.wait()
    assert {thread for _, thread in events} == {"MainThread"}
    names = [name for name, _ in events]
    assert names.count("publish") >= 2
    pairs = list(pairwise(names))
    assert all(following == "commit" for name, following in pairs if name == "propose")
    assert ("publish", "propose") in pairs


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_texts_of_picked_drafts_do_not_depend_on_what_was_learned(name: str):
    learning, online = generator(name, interval=3)
    still, _ = generator(name, interval=10**6)
    for temperature in (0.0, 1.0):
        texts = [
            [r.tokens for r in g.generate(stream(12), max_new_tokens=NEW, temperature=temperature, seed=9)]
            for g in (learning, still)
        ]
        assert texts[0] == texts[1]
    assert online.needs.learns and online.version > 3


@pytest.mark.slow
def test_texts_follow_the_law_while_the_draft_learns():
    """Chi-square of 40,000 texts from a chain, whose draft ranks the tokens in reverse at first and is changed between
    steps, in the middle of batches."""
    served, _ = laws.pair()
    own = laws.model()
    own.lm_head.weight.data.neg_()
    drafter = DraftModel(DraftOptions(num_assistant_tokens=2), CausalLM(own), served.vocab_size)
    options = Options(interval=2000, background=False, lr=3e-3, batch=512, context=16, top_laws=8)
    online = Online(options, drafter)
    g = tiny.generator(served, online, Constant(2), max_rows=laws.ROWS)
    found = laws.sample(g, "temperature", 40_000, seed=77)
    assert 0 < found.accepted < found.drafted
    overlaps = [report.acceptance for report in online.reports]
    assert online.version > 8 and overlaps[-1] > overlaps[0] + 0.2, "or nothing has changed"
    assert laws.p_value(found.counts, laws.law("temperature")) > 1e-3


def test_a_thread_of_its_own_leaves_the_number_of_threads_alone():
    before = torch.get_num_threads()
    work: BackgroundTask[int] = BackgroundTask(3)
    work.begin(torch.get_num_threads)
    work.wait()
    assert work.take() == 3 and work.idle and work.take() is None
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == before == later[0]


def test_an_error_while_learning_ends_learning_and_no_text():
    g, online = generator("draft_model", passes=1)

    def broken(samples: Any) -> Any:
        raise RuntimeError("out of memory")

    online._trainer.learn = broken  # type: ignore[method-assign]
    with pytest.warns(RuntimeWarning, match="The drafter has stopped learning: out of memory"):
        first = g.generate(stream(8), max_new_tokens=NEW)
    again = g.generate(stream(8), max_new_tokens=NEW)
    assert [r.tokens for r in first] == [r.tokens for r in again] and online.version == 0


# A version that is worse does not last.


def test_a_judgement_needs_passages_and_more_than_noise():
    assert compare_to_best([-0.5] * (MIN_SAMPLES - 1)) == "unsure"
    assert compare_to_best([-0.5 - 0.01 * i for i in range(8)]) == "worse"
    assert compare_to_best([0.0] * 8) == compare_to_best([0.01, -0.001] * 4) == "as good"
    assert compare_to_best([0.1, -0.12] * 8) == "unsure"
    source = torch.Generator().manual_seed(0)
    noise = torch.randn(4000, 8, generator=source)
    assert sum(compare_to_best(row) == "worse" for row in noise.tolist()) < 0.015 * 4000


def test_a_bad_version_is_taken_back():
    g, online = generator("draft_model", passes=2)
    before = serve(g, range(0, 24, 8), temperature=1.0)
    good, version = weights(online), online.version
    with torch.no_grad():
        for weight in online._adapter.shadow.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    online._adapter.publish()
    (bad,) = serve(g, range(24, 32, 8), temperature=1.0)
    assert bad < min(before)
    assert online.reports[-1].outcome == "returned" and online.version == version + 1
    assert online.reports[-1].acceptance < online.reports[-1].best - 0.1
    best = weights(online)
    assert not same(best, good), "the best version that has been judged is one interval older than the last one"
    assert serve(g, range(32, 40, 8), temperature=1.0)[0] > bad and online.reports[-1].outcome == "learned"


@pytest.mark.parametrize("lr", [1e3, 1e20])
def test_steps_that_lead_nowhere_do_no_lasting_harm(lr: float):
    g, online = generator("draft_model", lr=lr, passes=2)
    serve(g, range(0, 40, 8), temperature=1.0)
    outcomes = {report.outcome for report in online.reports}
    assert outcomes <= {"learned", "returned", "refused"} and outcomes & {"returned", "refused"}
    assert all(weight.isfinite().all() for weight in online._adapter.shadow.parameters())
    fresh = dict(draft().plain_copy().named_parameters())
    assert same(online._trainer._best, fresh), "nothing was ever as good as the draft that came"


# What cannot be.


WRONG: list[dict[str, Any]] = [
    *[{name: 0} for name in ("interval", "passes", "batch", "top_laws", "megabytes", "threads")],
    *[{"lr": 0.0}, {"context": 8}, {"loss": "kl"}],
]


@pytest.mark.parametrize("options", WRONG)
def test_options_out_of_range(options: dict[str, Any]):
    with pytest.raises(OptionError, match=next(iter(options))):
        Options(**options)


def test_a_verifier_is_held_against_the_drafter_inside():
    with pytest.raises(LawError, match="would not be lossless for a 'without_replacement' draft"):
        foredraft.load("sample", "online:eagle3", verifier="block")
    g = foredraft.load("sample", "online:[draft_model:sample-draft,num_assistant_tokens=3],lr=1e-5", verifier="block")
    assert g.engine.drafter.needs.max_nodes == 3
    g.close()
