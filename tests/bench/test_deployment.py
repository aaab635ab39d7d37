"""Which engine is chosen: one case for each rule, with measurements that are given."""

import json
import shlex

import pytest

from foredraft.bench.tune.deployment import CLOSE, SUPPORT, Deployment, batch_sizes, decide, page
from foredraft.bench.tune.predict import Prediction
from foredraft.bench.tune.tune import BatchPoint, Configuration, Tuning
from foredraft.core.errors import OptionError

CONSTANT = "num_assistant_tokens_schedule=constant"
TREE, CHAIN = f"eagle3:my/head,nodes=23,depth=5,{CONSTANT}", f"eagle3:my/head,nodes=4,depth=4,top_k=1,{CONSTANT}"
LOOKUP, MEDUSA = f"prompt_lookup,prompt_lookup_num_tokens=5,{CONSTANT}", f"medusa:my/medusa,nodes=15,{CONSTANT}"
BRANCHES = f"draft_model:small,branching=2x2,{CONSTANT}"
POINTS = (BatchPoint(1, 2.0), BatchPoint(8, 1.3), BatchPoint(64, 0.8))


def found(measured: dict[str, float], off_from: int | None = 64, points: tuple[BatchPoint, ...] = POINTS) -> Tuning:
    trials = tuple(
        Configuration(spec.partition(",")[0], spec, Prediction(2.5, 1.0, speed), speed, 2.5)
        for spec, speed in measured.items()
    )
    best = max(trials, key=lambda trial: trial.measured or 0.0)
    pays = (best.measured or 0.0) > 1.02
    return Tuning(trials, best if pays else None, points if pays else (), off_from if pays else None, (), ())


def wanted(device: str = "cuda", batches: tuple[int, ...] = (1, 8, 64)) -> Deployment:
    return Deployment("my/model", device, batches, "tuned.json", "--model my/model")


CASES = {
    "nothing pays": ({TREE: 1.0}, wanted(), "vllm", "vllm serve my/model --max-num-seqs 64", "Without drafts"),
    "nothing pays on a CPU": ({TREE: 1.0}, wanted("cpu"), "foredraft", "--drafter none", "no GPU"),
    "a CPU": (
        {TREE: 2.0},
        wanted("cpu"),
        "foredraft",
        "foredraft serve --model my/model --drafter tuned.json",
        "On cpu",
    ),
    "one row": ({TREE: 2.0}, wanted(batches=(1,)), "foredraft", "--drafter tuned.json", "One request at a time"),
    "a method of ours": ({MEDUSA: 2.0, LOOKUP: 1.5}, wanted(), "foredraft", "--drafter tuned.json", "runs medusa"),
    "a schedule of ours": (
        {"eagle3:my/head": 2.2, TREE: 2.0},
        wanted(),
        "foredraft",
        "tuned.json",
        "best that they run",
    ),
    "a tree": ({TREE: 2.0, CHAIN: 1.5}, wanted(), "sglang", "--speculative-num-steps 5", "vLLM runs no trees"),
    "a tree of ours": ({BRANCHES: 2.0, LOOKUP: 1.5}, wanted(), "foredraft", "tuned.json", "only this engine"),
    "a chain": ({CHAIN: 2.0, TREE: 1.5}, wanted(), "vllm", "--max-num-seqs 64", "as fast as a tree"),
    "a chain that is close": ({TREE: 1.53, CHAIN: 1.5}, wanted(), "vllm", "--speculative-config", "as fast as a tree"),
    "a method of ours that is close": ({MEDUSA: 1.53, CHAIN: 1.5}, wanted(), "vllm", "vllm serve", "as fast"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_rule_chooses(case: str):
    measured, where, engine, command, reason = CASES[case]
    decision = decide(found(measured), where)
    assert decision.engine == engine
    assert command in decision.commands[-1] and reason in " ".join(decision.reasons)


def test_vllm_gets_the_exported_chain_and_a_schedule():
    export, serve = decide(found({CHAIN: 2.0}), wanted()).commands
    assert export == "foredraft export my/head --to speculators --model my/model --out speculators-head"
    words = shlex.split(serve)
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {
        "method": "eagle3",
        "model": "speculators-head",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 63, 4], [64, 64, 0]],
    }
    assert "per_batch_size" not in decide(found({CHAIN: 2.0}, off_from=None), wanted()).commands[-1]
    assert len(decide(found({LOOKUP: 2.0}), wanted()).commands) == 1, "prompt lookup needs no export"


def test_sglang_gets_the_exported_tree_and_as_many_rows_as_pay():
    export, serve = decide(found({TREE: 2.0, CHAIN: 1.5}), wanted()).commands
    assert "--to sglang" in export and "--speculative-draft-model-path sglang-head" in serve
    assert serve.endswith("--max-running-requests 63")
    free = decide(found({TREE: 2.0, CHAIN: 1.5}, off_from=None), wanted()).commands[-1]
    assert free.endswith("--max-running-requests 64")


def test_a_drafter_that_pays_at_none_of_the_batch_sizes_is_not_deployed():
    points = (BatchPoint(32, 0.9), BatchPoint(64, 0.8))
    assert (
        decide(found({TREE: 2.0}, 32, points), wanted(batches=(32, 64)))
        .commands[-1]
        .startswith("vllm serve my/model --max")
    )


def test_the_page_says_which_and_why():
    text = page(found({TREE: 2.0, CHAIN: 1.5}), wanted(), "Measured today.")
    assert text.startswith("# Deployment of my/model\n\nUse **SGLang**:\n\n```sh\nforedraft export my/head --to sglang")
    assert "| 8 | 1.30x | pays |" in text and "| 64 | 0.80x | does not pay |" in text
    assert "Drafts stop paying at batch size 64." in text and text.endswith("Measured today.\n")
    assert all(row[0] in text and row[-1] in text for row in SUPPORT.rows), "every line has its source"
    assert "By batch size" not in page(found({TREE: 1.0}), wanted(), "")


def test_ranges_and_lists():
    assert batch_sizes("1..64") == (1, 2, 4, 8, 16, 32, 64) and batch_sizes("3..20") == (3, 4, 8, 16, 20)
    assert batch_sizes("8,1,24") == (1, 8, 24) and batch_sizes("4") == (4,) and batch_sizes("2..2") == (2,)
    for wrong in ("", "0..4", "8..2", "a", "1..", "1,,2", "-1"):
        with pytest.raises(OptionError, match="write a range, as in 1..64"):
            batch_sizes(wrong)
    assert CLOSE > 1
