"""Several drafters on one target: loaded once, the same texts as apart, and nothing left behind."""

from pathlib import Path

import pytest

import foredraft
import tiny
from foredraft.compose.load import load_many
from foredraft.core.errors import DrafterError, ModelError, OptionError, UsageError
from foredraft.model.hf.causal_lm import CausalLM

SPECS = ["none", "prompt_lookup", "eagle3", "draft_model,num_assistant_tokens_schedule=constant"]
PROMPT = "def fibonacci(n):\n    return fibonacci("


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny.build("llama", seed=5).save_pretrained(tmp_path / "draft")
    return str(tmp_path / "draft")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[CausalLM]:
    """The models that were closed."""
    found: list[CausalLM] = []
    before = CausalLM.close

    def close(self: CausalLM) -> None:
        found.append(self)
        before(self)

    monkeypatch.setattr(CausalLM, "close", close)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generators_on_one_target_say_what_each_says_alone(temperature: float):
    options = {"max_new_tokens": 8, "temperature": temperature, "seed": 3}
    wanted = []
    for spec in SPECS:
        alone = foredraft.load("sample", spec, device="cpu")
        wanted.append((alone.kind, alone.generate(PROMPT, **options).tokens))
        alone.close()
    together = load_many("sample", SPECS, device="cpu")
    assert len({id(each.engine.target) for each in together}) == 1
    for _ in range(2):  # one after another, so that each could disturb the next
        assert [(each.kind, each.generate(PROMPT, **options).tokens) for each in together] == wanted
    assert together[2].generate(PROMPT, max_new_tokens=8).stats.accepted > 0
    together[0].close()


def test_the_last_generator_closes_the_target_and_each_its_draft(folder: str, closed: list[CausalLM]):
    model = tiny.build("llama")
    attention, head = model.config._attn_implementation, model.lm_head
    draft = f"draft_model:{folder}"
    first, second, third = load_many(model, [draft, "prompt_lookup", draft])
    target = first.engine.target
    assert second.engine.target is third.engine.target is target
    second.close()
    assert closed == []
    first.close()
    assert len(closed) == 1 and target not in closed
    assert len(third.generate([1, 2, 3], max_new_tokens=4).tokens) == 4
    third.close()
    assert len(closed) == 3 and target in closed
    assert model.config._attn_implementation == attention and model.lm_head is head


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("draft_model:./nothing", ModelError),
        ("draft_model", DrafterError),
        ("eagle3:./nothing", UsageError),
        ("prompt_lookup,num_assistant_tokens_schedule=never", OptionError),
    ],
)
def test_where_the_third_cannot_be_the_callers_model_is_left_as_it_was(
    folder: str, closed: list[CausalLM], spec: str, error: type[Exception]
):
    model = tiny.build("llama").train()
    attention, head = model.config._attn_implementation, model.lm_head
    state = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with pytest.raises(error):
        load_many(model, ["none", f"draft_model:{folder}", spec])
    assert model.config._attn_implementation == attention and model.lm_head is head and model.training
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(bool((value == state[name]).all()) for name, value in model.state_dict().items())
    assert len(set(closed)) == 2, "the target's and the draft's"


def test_a_spec_that_is_wrong_in_itself_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foredraft.compose.load.load_model", lambda *args, **given: pytest.fail("loaded"))
    for specs in (["none", "eagle7"], ["none", "prompt_lookup,colour=red"], []):
        with pytest.raises(OptionError):
            load_many("sample", specs)
    with pytest.raises(OptionError):
        load_many("sample", ["none"], max_batch_size=0)


def test_a_target_of_another_generator_is_shared_and_stays_open(closed: list[CausalLM]):
    owner = foredraft.load(tiny.build("llama"), "none")
    wanted = owner.generate([1, 2, 3], max_new_tokens=6).tokens
    for each in load_many(owner.engine.target, ["none", "prompt_lookup"]):
        assert each.engine.target is owner.engine.target
        assert each.generate([1, 2, 3], max_new_tokens=6).tokens == wanted
        each.close()
    with pytest.raises(ModelError):
        load_many(owner.engine.target, ["none", "draft_model:./nothing"])
    assert closed == [] and owner.generate([1, 2, 3], max_new_tokens=6).tokens == wanted
    owner.close()
