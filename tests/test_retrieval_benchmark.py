"""benchmarks/experiments/retrieval.py: its replays accept what decoding accepts, and its oracle is one."""

import json
import lzma
from pathlib import Path

import pytest
import torch

import tiny
from benchmarks.experiments import retrieval
from foredraft.drafters.partial import Partial
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.loading.bundled import resolve

LENGTHS = (80, 61, 90)


def written(target: CausalLM):
    """Texts of three rows, of which two share their prompt's beginning."""
    texts = tiny.prompts(LENGTHS, seed=3)
    pair = [texts[0], texts[0][:50] + texts[1][:25]]
    tasks = [retrieval.Task(texts[0][:50], pair, [30, 21], [[], []]), retrieval.Task(texts[2], [texts[2]], [26], [[]])]
    return retrieval.write(target, tasks), [*pair, texts[2]]


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny.build("llama", num_hidden_layers=3, spread=0.3))


def test_texts_are_the_targets_greedy_ones(target: CausalLM):
    texts, prompts = written(target)
    plain = tiny.generator(target)
    for row, prompt in enumerate(prompts):
        text = texts.history[row, texts.begins[row] : texts.ends[row]].tolist()
        assert text == plain.generate(prompt, max_new_tokens=len(text)).tokens
        whole = torch.tensor([prompt + text])
        laws = target.stock_logits(whole)[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert texts.loss[row] == pytest.approx(-float(laws.gather(1, whole[0, len(prompt) :, None]).mean()), abs=1e-3)


@pytest.mark.parametrize("cache", ["window", "retrieval", "h2o"])
@pytest.mark.parametrize("more", [{}, {"whole_layers": 1}, {"room": 6}, {"score": "best"}])
def test_a_replay_accepts_what_decoding_accepts(target: CausalLM, cache: str, more: dict):
    """Row by row, as far as selection and its renewal go; among them rows that end earlier."""
    arm = retrieval.Arm(cache, 16, 4, **more)
    texts, prompts = written(target)
    counts = retrieval.replay(texts, arm, 4)
    full = target.new_cache()
    generator = tiny.generator(target, Partial(arm.options(4), target, full, target.vocab_size), cache=full)
    for count, prompt in zip(counts, prompts, strict=True):
        stats = generator.generate(prompt, max_new_tokens=count[0]).stats
        assert count == [count[0], stats.target_forwards, stats.drafted, stats.accepted]
    assert any(0 < accepted < asked for _, _, asked, accepted in counts)


def test_an_oracle_with_everything_accepts_everything_and_leaves_the_texts_alone(target: CausalLM):
    texts, _ = written(target)
    before = [buffer.clone() for buffer in texts.cache.stored(1)]
    first = texts.history.shape[1]
    assert [count[3] - count[2] for count in retrieval.replay(texts, retrieval.Arm("oracle", first), 4)] == [0, 0, 0]
    few = retrieval.replay(texts, retrieval.Arm("oracle", 4), 4)
    assert any(count[3] < count[2] for count in few)
    for buffer, old in zip(texts.cache.stored(1), before, strict=True):
        for row, end in enumerate(texts.ends):
            assert torch.equal(buffer[row, :, : end - 1], old[row, :, : end - 1])
    losses = [retrieval.loss_of(texts, retrieval.Arm("oracle", budget)) for budget in (first, 4)]
    assert losses[0] == pytest.approx(texts.loss, abs=1e-3)
    assert losses[1] != pytest.approx(texts.loss, abs=1e-2)


def test_an_oracle_holds_at_least_what_a_window_holds(target: CausalLM):
    texts, _ = written(target)
    found = retrieval.reconstruction(texts, [16, 32])
    for budget in (16, 32):
        oracle, window = found[f"oracle {budget}"], found[f"window {budget}"]
        for layer in range(3):
            assert window["held"][layer] < oracle["held"][layer] < 1
            assert 0 < window["error"][layer]
    assert found["retrieval 32"]["held"] > found["retrieval 16"]["held"]


def test_a_finished_arm_is_not_run_again_and_tables_read_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    novel = " ".join(f"word {number} of a long story," for number in range(600))
    code = "\n".join(f"\ndef f{n}(x):\n    return " + " + ".join(f"x * {n + i}" for i in range(60)) for n in range(1))
    for name, texts in (("english_novels", [novel]), ("the_algorithms_python", [code] * 8)):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    monkeypatch.setattr(retrieval, "BUDGETS", (64,))
    monkeypatch.setattr(
        retrieval, "ARMS", tuple(retrieval.Arm(name, 64) for name in ("window", "retrieval", "h2o", "oracle"))
    )
    out = tmp_path / "runs.jsonl"
    command = ["--model", resolve("sample"), "--corpus", str(tmp_path), "--count", "1"]
    command += ["--contexts", "1000", "--gamma", "3", "--out", str(out)]
    for part in ("1/2", "2/2", "1/1"):
        retrieval.EXPERIMENT.run([*command, "--part", part])
    lines = [line for line in map(json.loads, out.read_text("utf-8").splitlines()) if line["kind"] != "provenance"]
    assert len(lines) == 3 * 6 == len({(line["kind"], line["task"], str(line.get("arm"))) for line in lines})
    planted = next(line for line in lines if line["kind"] == "text" and line["task"] == "planted")
    assert len(planted["tokens"]) == 8 and max(planted["repeated"]) > 5
    text = retrieval.table(out)
    run = next(line for line in lines if line.get("arm", [None])[0] == "window" and line["task"] == "copy")
    assert f"| copy, 1,000 | window | {retrieval.length(run['counts']):.2f} (" in text
    assert "<svg" in retrieval.picture(out)
