"""Our loop and transformers' generate behind one face: the same tokens, and one way to count them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import pytest

import tiny
from foredraft.bench.measure.arms import ArmSpec, BenchArm, LoopArm, StockArm, make_arms
from foredraft.bench.measure.records import Run
from foredraft.compose.options import LoadOptions
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Background, Plan, View
from foredraft.core.errors import ForedraftError, OptionError, PromptError
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.model.hf.baseline import HFBaseline
from foredraft.model.hf.causal_lm import CausalLM

ALL = ("none", "prompt_lookup", "eagle3", "transformers", "transformers_assisted", "transformers_lookup")
ASSISTED = ArmSpec("transformers_assisted", "transformers_assisted:sample-draft")
COUNTED = "- red\n- green\n- blue\n- red\n- green\n-"


@pytest.fixture(scope="module")
def sample() -> Iterator[dict[str, BenchArm]]:
    specs = [ASSISTED if name == ASSISTED.name else ArmSpec(name, name) for name in ALL]
    made = make_arms(specs, "sample", LoadOptions(device="cpu", max_batch_size=2))
    assert [arm.name for arm in made] == list(ALL)
    yield {arm.name: arm for arm in made}
    for arm in made:
        if isinstance(arm, LoopArm):
            arm.generator.close()


def stock(eos: tuple[int, ...] = (), **changes: Any) -> dict[str, StockArm]:
    """transformers' three arms on a tiny model; its assistant is the same but for small changes of its weights."""
    model = HFBaseline(tiny.build(**changes), eos)
    draft = tiny.build(**changes)
    for weight in draft.parameters():
        weight.data += 0.03 * weight.data.roll(1)
    return {
        "transformers": StockArm("transformers", model, 4, None, 0),
        "assisted": StockArm("assisted", model, 4, HFBaseline(draft, eos), 0),
        "lookup": StockArm("lookup", model, 4, None, 10),
    }


def loop(eos: tuple[int, ...] = (), **changes: Any) -> LoopArm:
    return LoopArm("none", tiny.generator(CausalLM(tiny.build(**changes)), eos=eos), 4)


@final
class Busy(Background):
    """Drafts nothing and counts how often it was waited for."""

    waits = 0

    def propose(self, view: View, plan: Plan) -> Draft:
        return Draft(TokenTree.root(view.roots), Law.FIXED)

    def wait(self) -> None:
        self.waits += 1


def test_an_arm_waits_for_background_work():
    """It would slow the next arm."""
    arm = LoopArm("busy", tiny.generator(CausalLM(tiny.build()), drafter := Busy()), 4)
    call = arm.run([[1, 2, 3]], greedy(4))
    assert drafter.waits == 1 and call.stats.seconds > 0


def greedy(count: int = 12, **given: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, **given)


def lengths(arm: BenchArm, prompt: list[int], params: SamplingParams) -> list[int]:
    """Tokens by forward, from what the arm counts; everything that it counts must fit."""
    call = arm.run([prompt], params)
    stats = call.stats
    made = Run("a", "t", ("0",), forwards=stats.target_forwards, accepted_by_depth=stats.accepted_by_depth).lengths
    assert len(made) == stats.target_forwards
    assert sum(made) == stats.tokens == len(call.tokens[0])
    assert 0 < stats.prefill_seconds < stats.seconds
    return made


def test_all_greedy_arms_say_the_same_of_the_bundled_model(sample: dict[str, BenchArm]):
    host = sample["none"]
    assert isinstance(host, LoopArm)
    for text in ("def fibonacci(n):", COUNTED):
        prompt = host.generator.encode(text)
        calls = {name: arm.run([prompt], greedy(10)) for name, arm in sample.items()}
        assert {tuple(call.tokens[0]) for call in calls.values()} == {tuple(calls["none"].tokens[0])}
        assert {call.stats.tokens for call in calls.values()} == {10}
        assert {calls[name].decoded for name in ("none", "prompt_lookup", "eagle3")} == {10}
        assert calls["transformers"].decoded == 9, "its first token comes out of prefill"
        assert all(call.stats.target_forwards <= 10 for call in calls.values())
    assert calls["eagle3"].stats.accepted > 0 and calls["transformers_assisted"].stats.target_forwards < 10


def test_arms_of_one_prompt_at_a_time_say_so(sample: dict[str, BenchArm]):
    assert {name: arm.max_batch for name, arm in sample.items()} == {
        **dict.fromkeys(ALL, 2),
        "transformers_assisted": 1,
        "transformers_lookup": 1,
    }
    assert all(arm.lossless for arm in sample.values())


@pytest.mark.parametrize("name", ["transformers", "assisted", "lookup"])
def test_rounds_of_transformers_add_up(name: str):
    """Of a text that repeats itself, so that a lookup finds something."""
    prompt, mild = tiny.prompts((6,))[0], {"spread": 0.6, "seed": 0}
    arm = stock(**mild)[name]
    found = lengths(arm, prompt, greedy(20))
    assert sum(found) == 20 and (max(found) > 1) == (name != "transformers")
    assert arm.run([prompt], greedy(20)).tokens == loop(**mild).run([prompt], greedy(20)).tokens


def test_the_first_round_of_assisted_generation_is_not_decoding():
    arm, prompt = stock()["assisted"], tiny.prompts((6,))[0]
    call = arm._model.generate([prompt], greedy(20), assistant=arm._assistant)  # type: ignore[attr-defined]
    assert sum(call.blocks) == 20 and len(call.blocks) < 20
    assert arm.run([prompt], greedy(20)).decoded == 20 - call.blocks[0]
    assert 0 < call.first_seconds < call.seconds


@pytest.mark.parametrize("params", [greedy(16), greedy(16, repetition_penalty=1.7), greedy(3)], ids=str)
def test_greedy_texts_are_the_same_in_both_worlds(params: SamplingParams):
    ours, theirs = loop(), stock()
    for prompt in tiny.prompts((1, 5, 17)):
        wanted = ours.run([prompt], params).tokens
        assert {name: arm.run([prompt], params).tokens for name, arm in theirs.items()} == dict.fromkeys(theirs, wanted)


@pytest.mark.parametrize("least", [0, 9])
def test_an_end_of_text_counts_and_ends_it_for_all(least: int):
    prompt = tiny.prompts((9,))[0]
    text = loop().run([prompt], greedy(12)).tokens[0]
    end = next(place for place in range(4, 12) if text[place] not in text[:place])
    eos, params = (95, text[end]), greedy(12, min_new_tokens=least)
    wanted = loop(eos).run([prompt], params)
    assert least or (wanted.tokens == [text[: end + 1]] and wanted.stats.tokens == end + 1)
    assert len(wanted.tokens[0]) >= least
    for arm in stock(eos).values():
        call = arm.run([prompt], params)
        assert call.tokens == wanted.tokens and call.stats.tokens == wanted.stats.tokens
        assert sum(lengths(arm, prompt, params)) == wanted.stats.tokens


def test_batches_of_ragged_prompts_say_what_each_says_alone():
    prompts = tiny.prompts((3, 17, 9))
    alone = [loop().run([prompt], greedy(12)).tokens[0] for prompt in prompts]
    eos = (alone[1][5],)
    cut = [text[: text.index(eos[0]) + 1] if eos[0] in text else text for text in alone]
    assert len({len(text) for text in cut}) > 1
    for arm in (loop(eos), stock(eos)["transformers"]):
        call = arm.run(prompts, greedy(12))
        assert call.tokens == cut
        assert call.stats.tokens == call.stats.target_forwards == sum(map(len, cut))
        assert call.decoded == call.stats.tokens - (3 if isinstance(arm, StockArm) else 0)


def test_texts_end_with_the_context_in_both_worlds():
    prompt = tiny.prompts((58,))[0]
    sizes = {"max_position_embeddings": 64}
    wanted = loop(**sizes).run([prompt], greedy(20, min_new_tokens=15)).tokens
    assert len(wanted[0]) == 6
    for arm in stock(**sizes).values():
        assert arm.run([prompt], greedy(20, min_new_tokens=15)).tokens == wanted
    for arm in (loop(**sizes), *stock(**sizes).values()):
        with pytest.raises(PromptError, match=r"The prompt has 64 tokens"):
            arm.run([prompt + prompt[:6]], greedy(1))


@pytest.mark.parametrize("name", ["transformers", "assisted", "lookup"])
def test_transformers_texts_come_back_with_their_seed(name: str):
    arm, prompt = stock()[name], tiny.prompts((5,))[0]

    def said(seed: int, **given: Any) -> tuple[int, ...]:
        return tuple(arm.run([prompt], greedy(12, temperature=1.0, seed=seed, **given)).tokens[0])

    assert said(1) == said(1) and len({said(seed) for seed in range(4)}) == 4
    wanted = tuple(arm.run([prompt], greedy(12)).tokens[0])
    assert said(1) != wanted and said(1, top_k=1) == said(2, top_p=1e-6) == wanted


def test_what_is_not_handed_on_to_transformers_is_refused():
    for given in ({"min_p": 0.1}, {"stop_strings": ("a",)}, {"no_repeat_ngram_size": 2}, {"eos_token_id": (1,)}):
        with pytest.raises(OptionError, match=f"{next(iter(given))} is not supported for transformers' generate"):
            stock()["transformers"].run([[1, 2]], greedy(2, **given))


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("none", "none", "none"),
        ("eagle3:some/head", "eagle3", "eagle3:some/head"),
        ("draft_model:PATH,branching=2x2", "draft_model,branching=2x2", "draft_model:PATH,branching=2x2"),
        ("prompt_lookup,max_ngram=3", "prompt_lookup,max_ngram=3", "prompt_lookup,max_ngram=3"),
        ("tree=draft_model:PATH,branching=2x2", "tree", "draft_model:PATH,branching=2x2"),
        ("hf=transformers_assisted:PATH", "hf", "transformers_assisted:PATH"),
    ],
)
def test_arms_are_written_as_drafters_with_or_without_a_name(text: str, name: str, spec: str):
    assert ArmSpec.parse(text) == ArmSpec(name, spec)
    assert ArmSpec.parse(text).stock == ("transformers" in spec)


@pytest.mark.parametrize("text", ["=none", "name="])
def test_half_a_name_is_refused(text: str):
    with pytest.raises(OptionError, match="write SPEC or NAME=SPEC"):
        ArmSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("EAGLE-3, wide=eagle3:HEAD,nodes=60", "Unknown drafter 'EAGLE-3'"),
        ("eagle3, wide=eagle3:HEAD,nodes=60", "Unknown option of eagle3 'wide'"),
        ("theirs: plain=transformers", "Unknown drafter 'theirs'"),
    ],
)
def test_a_name_with_a_comma_or_colon_is_refused(text: str, sentence: str):
    with pytest.raises(OptionError) as error:
        ArmSpec.parse(text)
    name = text.partition("=")[0]
    assert str(error.value).startswith(sentence)
    assert str(error.value).endswith(f" If {name!r} is the arm's name: names have no comma and no colon.")


@pytest.mark.parametrize("text", ["eagle1:HEAD,tree=medusa", "relay:[eagle1,tree=medusa]+max_gram", "eagle3,dept=2"])
def test_options_are_no_names(text: str):
    assert ArmSpec.parse(text).spec == text


@pytest.mark.parametrize(
    ("specs", "sentence"),
    [
        ([], "Nothing to compare: name at least one drafter."),
        (["none", "none"], "Two arms are named 'none': name one yourself, as in second=none."),
        (
            ["eagle1:A,tree=medusa", "eagle1:B,tree=medusa"],
            "Two arms are named 'eagle1,tree=medusa': name one yourself, as in second=eagle1:B,tree=medusa.",
        ),
        (["none", "transformers_lookup:here"], "transformers_lookup takes no path."),
        (["none", "transformers:here"], "transformers takes no path."),
        (["eagle7"], "Unknown drafter 'eagle7'"),
        (["none", "draft_model:./nowhere"], "There is no model folder './nowhere'."),
        (["transformers_assisted:./nowhere"], "There is no model folder './nowhere'."),
    ],
)
def test_arms_that_cannot_be_are_refused(specs: list[str], sentence: str):
    with pytest.raises(ForedraftError) as error:
        make_arms([ArmSpec.parse(text) for text in specs], "sample", LoadOptions(device="cpu", max_batch_size=1))
    assert sentence in str(error.value)


def test_transformers_does_not_run_in_parts():
    with pytest.raises(OptionError, match="transformers_lookup runs in one process"):
        specs = [ArmSpec.parse("none"), ArmSpec.parse("transformers_lookup")]
        make_arms(specs, "sample", LoadOptions(device="cpu", tensor_parallel=2))


def test_assisted_generation_needs_a_draft(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("model")
    tiny.build().save_pretrained(folder)
    with pytest.raises(
        OptionError, match=r"transformers_assisted needs a draft model: use transformers_assisted:PATH\."
    ):
        make_arms([ArmSpec.parse("transformers_assisted")], str(folder), LoadOptions(device="cpu"))


def test_an_assistant_with_another_tokenizer_is_universal_assisted_generation():
    folder = Path(__file__).resolve().parents[3] / "shared" / "models" / "draft-6m"
    if not folder.is_dir():
        pytest.skip("needs a model with another tokenizer than the bundled one's: ../shared/models/draft-6m")
    specs = [ArmSpec.parse("none"), ArmSpec.parse(f"transformers_assisted:{folder}")]
    plain, universal = make_arms(specs, "sample", LoadOptions(device="cpu", max_batch_size=1))
    assert isinstance(plain, LoopArm)
    prompt = plain.generator.encode("def add(a, b):")
    calls = [arm.run([prompt], greedy(12)) for arm in (plain, universal)]
    plain.generator.close()
    assert calls[0].tokens == calls[1].tokens
    assert calls[1].stats.target_forwards <= 12
