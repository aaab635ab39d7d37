"""benchmarks/retrieval.py: its replays accept what decoding accepts, its oracle is one, and it continues its files."""

import importlib
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tiny
from foredraft.drafters.partial import Partial
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.bundled import resolve

LENGTHS = (80, 61, 90)


@pytest.fixture
def tool(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("retrieval")


def written(tool: ModuleType, target: CausalLM):
    """Texts of three rows, of which two share their prompt's beginning."""
    texts = tiny.prompts(LENGTHS, seed=3)
    pair = [texts[0], texts[0][:50] + texts[1][:25]]
    tasks = [tool.Task(texts[0][:50], pair, [30, 21], [[], []]), tool.Task(texts[2], [texts[2]], [26], [[]])]
    return tool.write(target, tasks), [*pair, texts[2]]


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama", num_hidden_layers=3, spread=0.3))


def test_texts_are_the_targets_greedy_ones(tool: ModuleType, target: CausalLM):
    texts, prompts = written(tool, target)
    plain = tiny.generator(target)
    for row, prompt in enumerate(prompts):
        text = texts.history[row, texts.begins[row] : texts.ends[row]].tolist()
        assert text == plain.generate(prompt, max_new_tokens=len(text)).tokens
        whole = torch.tensor([prompt + text])
        laws = target.stock_logits(whole)[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert texts.loss[row] == pytest.approx(-float(laws.gather(1, whole[0, len(prompt) :, None]).mean()), abs=1e-3)


@pytest.mark.parametrize("cache", ["window", "retrieval", "h2o"])
@pytest.mark.parametrize("more", [{}, {"whole_layers": 1}, {"room": 6}, {"score": "best"}])
def test_a_replay_accepts_what_decoding_accepts(tool: ModuleType, target: CausalLM, cache: str, more: dict):
    """Row by row, as far as selection and its renewal go; among them rows that end earlier."""
    arm = tool.Arm(cache, 16, 4, **more)
    texts, prompts = written(tool, target)
    counts = tool.replay(texts, arm, 4)
    full = target.new_cache()
    generator = tiny.generator(target, Partial(arm.options(4), target, full, target.vocab_size), cache=full)
    for count, prompt in zip(counts, prompts, strict=True):
        stats = generator.generate(prompt, max_new_tokens=count[0]).stats
        assert count == [count[0], stats.target_forwards, stats.drafted, stats.accepted]
    assert any(0 < accepted < asked for _, _, asked, accepted in counts)


def test_an_oracle_with_everything_accepts_everything_and_leaves_the_texts_alone(tool: ModuleType, target: CausalLM):
    texts, _ = written(tool, target)
    before = [buffer.clone() for buffer in texts.cache.stored(1)]
    first = texts.history.shape[1]
    assert [count[3] - count[2] for count in tool.replay(texts, tool.Arm("oracle", first), 4)] == [0, 0, 0]
    few = tool.replay(texts, tool.Arm("oracle", 4), 4)
    assert any(count[3] < count[2] for count in few)
    for buffer, old in zip(texts.cache.stored(1), before, strict=True):
        for row, end in enumerate(texts.ends):
            assert torch.equal(buffer[row, :, : end - 1], old[row, :, : end - 1])
    losses = [tool.loss_of(texts, tool.Arm("oracle", budget)) for budget in (first, 4)]
    assert losses[0] == pytest.approx(texts.loss, abs=1e-3)
    assert losses[1] != pytest.approx(texts.loss, abs=1e-2)


def test_an_oracle_holds_at_least_what_a_window_holds(tool: ModuleType, target: CausalLM):
    texts, _ = written(tool, target)
    found = tool.reconstruction(texts, [16, 32])
    for budget in (16, 32):
        oracle, window = found[f"oracle {budget}"], found[f"window {budget}"]
        for layer in range(3):
            assert window["held"][layer] < oracle["held"][layer] < 1
            assert 0 < window["error"][layer]
    assert found["retrieval 32"]["held"] > found["retrieval 16"]["held"]


def test_a_finished_arm_is_not_run_again_and_tables_read_the_file(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    novel = " ".join(f"word {number} of a long story," for number in range(600))
    code = "\n".join(f"\ndef f{n}(x):\n    return " + " + ".join(f"x * {n + i}" for i in range(60)) for n in range(1))
    for name, texts in (("english_novels", [novel]), ("the_algorithms_python", [code] * 8)):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    monkeypatch.setattr(tool, "BUDGETS", (64,))
    monkeypatch.setattr(tool, "ARMS", tuple(tool.Arm(name, 64) for name in ("window", "retrieval", "h2o", "oracle")))
    out = tmp_path / "runs.jsonl"
    command = ["retrieval.py", "--model", resolve("sample"), "--corpus", str(tmp_path), "--count", "1"]
    command += ["--contexts", "1000", "--gamma", "3", "--out", str(out)]
    for part in ("1/2", "2/2", "1/1"):
        monkeypatch.setattr(sys, "argv", [*command, "--part", part])
        tool.main()
    lines = [line for line in map(json.loads, out.read_text("utf-8").splitlines()) if line["kind"] != "provenance"]
    assert len(lines) == 3 * 6 == len({(line["kind"], line["task"], str(line.get("arm"))) for line in lines})
    planted = next(line for line in lines if line["kind"] == "text" and line["task"] == "planted")
    assert len(planted["tokens"]) == 8 and max(planted["repeated"]) > 5
    tables = importlib.import_module("retrieval_tables")
    monkeypatch.setattr(tables, "BUDGETS", (64,))
    text = tables.table(out)
    run = next(line for line in lines if line.get("arm", [None])[0] == "window" and line["task"] == "copy")
    assert f"| copy, 1,000 | window | {tables.length(run['counts']):.2f} (" in text
    tables.plot(out, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text("utf-8")
