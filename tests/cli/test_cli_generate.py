import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import NAN_AFTER, PROMPT, Run

import foredraft
from foredraft import LoadOptions
from foredraft.engine.engine import Engine

SHORT = ("--max-new-tokens", "12", "--raw")


@pytest.fixture
def expected(plain: foredraft.Generator) -> Callable[..., foredraft.Result]:
    """What the library says; computed without the command line."""
    return lambda prompt=PROMPT, **options: plain.generate(prompt, max_new_tokens=12, **options)


def test_text_goes_to_stdout_and_one_line_of_statistics_to_stderr(run: Run, model: Path, expected):
    ended = run("generate", "-m", model, PROMPT, *SHORT)
    assert (ended.status, ended.out) == (0, expected().text + "\n")
    assert ended.err.count("\n") == 1
    assert "12 tokens in" in ended.err and "tokens/s" in ended.err and "finish: length" in ended.err


def test_quiet_leaves_nothing_on_stderr(run: Run, model: Path):
    assert run("generate", "-m", model, "-q", PROMPT, *SHORT).err == ""


def test_json_has_the_fields_of_a_result(run: Run, model: Path, expected):
    ended = run("generate", "-m", model, "-d", f"draft_model:{model}", "--json", PROMPT, *SHORT)
    found, result = json.loads(ended.out), expected()
    assert (ended.status, ended.err) == (0, "")
    assert list(found) == [
        *("model", "drafter", "chat", "method", "lossless", "prompt_tokens"),
        *("text", "tokens", "finish_reason", "seed", "stats"),
    ]
    assert (found["text"], found["tokens"]) == (result.text, result.tokens)
    assert (found["model"], found["drafter"]) == (str(model), f"draft_model:{model}")
    assert (found["method"], found["lossless"], found["finish_reason"]) == ("draft_model", True, "length")
    assert found["prompt_tokens"] == found["stats"]["prompt_tokens"] == result.stats.prompt_tokens
    assert found["stats"]["tokens"] == 12 and found["stats"]["method"] == "draft_model"
    assert set(found["stats"]) == set(result.stats.as_dict())


def test_json_tells_pieces_and_logprobs_when_asked(run: Run, model: Path):
    options = ("-d", f"draft_model:{model},num_assistant_tokens_schedule=constant", "--json", "--show-drafts")
    ended = run("generate", "-m", model, *options, "--logprobs", "2", PROMPT, *SHORT)
    found = json.loads(ended.out)
    pieces = found["pieces"]
    assert "".join(piece["text"] for piece in pieces) == found["text"]
    assert [token for piece in pieces for token in piece["tokens"]] == found["tokens"]
    drafted = sum(len(piece["tokens"]) for piece in pieces if piece["drafted"])
    assert drafted == found["stats"]["accepted"] > 0
    assert [each["token"] for each in found["logprobs"]] == found["tokens"]
    for each in found["logprobs"]:
        assert set(each) == {"token", "text", "logprob", "top"} and each["logprob"] <= 0
        assert len(each["top"]) == 2 and each["top"][0] == {k: each[k] for k in ("token", "text", "logprob")}


def test_several_texts_are_a_list(run: Run, model: Path):
    options = ("-m", model, "--temperature", "1", "--num-return-sequences", "3", "--seed", "4", *SHORT)
    found = json.loads(run("generate", *options, "--json", PROMPT).out)
    assert len({tuple(each["tokens"]) for each in found}) == 3
    shown = run("generate", *options, PROMPT)
    assert shown.out == "".join(
        f"--- {number} of 3 ---\n{each['text']}\n" for number, each in enumerate(found, start=1)
    )
    assert f"{sum(len(each['tokens']) for each in found)} tokens in" in shown.err


def test_beams_print_the_best_outputs(run: Run, model: Path, plain: foredraft.Generator):
    wanted = plain.beam_search(PROMPT, num_beams=3, num_return_sequences=2, max_new_tokens=12, length_penalty=0.5)
    options = ("--num-beams", "3", "--num-return-sequences", "2", "--length-penalty", "0.5", *SHORT)
    found = json.loads(run("generate", "-m", model, PROMPT, "--json", *options).out)
    assert [(each["tokens"], each["text"], each["score"]) for each in found] == [
        (each.tokens, each.text, each.score) for each in wanted
    ]
    assert run("generate", "-m", model, PROMPT, "--num-beams", "3", *SHORT).out == (
        plain.beam_search(PROMPT, num_beams=3, max_new_tokens=12)[0].text + "\n"
    )
    listed = run("generate", "-m", model, PROMPT, *options).out
    assert all(
        f"--- {i + 1} of 2, score {each.score:.4f} ---\n{each.text}\n" in listed for i, each in enumerate(wanted)
    )


def test_one_beam_is_greedy(run: Run, model: Path, expected):
    assert run("generate", "-m", model, PROMPT, "--num-beams", "1", *SHORT).out == expected().text + "\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--num-beams", "0"), "num_beams must be a whole number, 1 or more, not 0."),
        (("--num-beams", "2", "--temperature", "1"), "Beam search has no temperature"),
        (("--num-beams", "2", "--early-stopping", "soon"), 'early_stopping must be True, False or "never"'),
        (("--num-beams", "2", "--show-drafts"), "--show-drafts does not go with --num-beams"),
        (("--num-beams", "2", "--record", "steps.jsonl"), "record_steps"),
        (("--length-penalty", "2"), "--length-penalty needs --num-beams above 1."),
    ],
    ids=str,
)
def test_what_a_beam_search_has_not(run: Run, model: Path, given: tuple[str, ...], said: str):
    ended = run("generate", "-m", model, PROMPT, *given, *SHORT)
    assert ended.status == 2 and said in ended.err.replace("\n", " ")


def test_sampling_options_reach_the_engine(run: Run, model: Path, expected):
    options = ("--temperature", "0.9", "--top-k", "40", "--seed", "5", "--repetition-penalty", "1.3")
    result = expected(temperature=0.9, top_k=40, seed=5, repetition_penalty=1.3, bad_words_ids=((9, 3), (7,)))
    ended = run("generate", "-m", model, *options, "--bad-words-ids", "9,3", "--bad-words-ids", "7", PROMPT, *SHORT)
    assert ended.out == result.text + "\n" != expected().text + "\n"


def test_end_tokens_and_stop_strings(run: Run, model: Path, expected):
    tokens = expected().tokens
    found = json.loads(
        run(
            "generate", "-m", model, "--json", "--eos-token-id", "3", "--eos-token-id", str(tokens[4]), PROMPT, "--raw"
        ).out
    )
    assert (found["tokens"], found["finish_reason"]) == (tokens[:5], "stop")
    stop = expected().text[8:11]
    found = json.loads(run("generate", "-m", model, "--json", "--stop-strings", stop, PROMPT, *SHORT).out)
    assert found["finish_reason"] == "stop" and stop not in found["text"]


def test_no_speculation_drafts_nothing(run: Run, model: Path, expected):
    options = ("-m", model, "-d", f"draft_model:{model}", "--no-speculation", "--json", *SHORT)
    found = json.loads(run("generate", *options, PROMPT).out)
    assert found["tokens"] == expected().tokens and found["stats"]["drafted"] == 0


def test_exact_and_verifier_are_passed_on(run: Run, model: Path, expected):
    options = ("-m", model, "-d", f"draft_model:{model}", "--exact", "--verifier", "token", "--dtype", "float32")
    assert run("generate", *options, PROMPT, *SHORT).out == expected().text + "\n"


def test_a_lossy_rule_takes_options_and_is_marked(run: Run, model: Path):
    options = ("-m", model, "-d", f"draft_model:{model}", "--json", *SHORT)
    for verifier in ("typical,epsilon=0.2,delta=0.3", "approximate,top_k=2"):
        found = json.loads(run("generate", *options, "--verifier", verifier, PROMPT).out)
        assert found["stats"]["lossless"] is False
    refused = run("generate", *options, "--verifier", "typical,epsilon=3", PROMPT)
    assert refused.status == 2 and "epsilon must be 1 or less" in refused.err


@pytest.mark.parametrize("way", ["argument", "pipe", "dash", "file", "dash file"])
def test_where_a_prompt_comes_from(run: Run, model: Path, tmp_path: Path, expected, way: str):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    prompt = {
        "argument": (PROMPT,),
        "pipe": (),
        "dash": ("-",),
        "file": ("--prompt-file", str(file)),
        "dash file": ("--prompt-file", "-"),
    }[way]
    piped = "not this\n" if way in ("argument", "file") else PROMPT + "\n"
    assert run("generate", "-m", model, *prompt, *SHORT, stdin=piped).out == expected().text + "\n"


def test_chat_puts_the_prompt_into_the_template(run: Run, model: Path, expected):
    result = expected([{"role": "user", "content": PROMPT}])
    assert result.text != expected().text
    told = "answered as a chat, --raw continues the text"
    for words, said in (((), 1), (("--chat",), 0)):
        ended = run("generate", "-m", model, *words, PROMPT, "--max-new-tokens", "12")
        assert (ended.out, ended.err.count(told)) == (result.text + "\n", said)
    assert told not in run("generate", "-m", model, PROMPT, *SHORT).err
    found = [
        json.loads(run("generate", "-m", model, PROMPT, "-n", "12", "--json", *more).out) for more in ((), ("--raw",))
    ]
    assert [(each["chat"], each["text"]) for each in found] == [(True, result.text), (False, expected().text)]


def test_a_model_without_a_template_continues_the_text(run: Run, model: Path, tmp_path: Path, expected):
    shutil.copytree(model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    ended = run("generate", "-m", tmp_path / "base", PROMPT, "--max-new-tokens", "12")
    assert ended.out == expected().text + "\n" and "chat" not in ended.err


def test_options_as_users_of_llama_cpp_type_them(run: Run, model: Path, tmp_path: Path, expected):
    threads = torch.get_num_threads()
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    hot = expected(temperature=0.9, seed=5, stop_strings=(expected(temperature=0.9, seed=5).text[20:24],))
    assert hot.finish_reason == "stop"
    more = (
        "--temp",
        "0.9",
        "--seed",
        "5",
        "--stop",
        expected(temperature=0.9, seed=5).text[20:24],
        "-n",
        "12",
        "--raw",
    )
    try:
        for prompt in (("-p", PROMPT), ("-f", str(file))):
            ended = run("generate", "-m", model, "-t", "1", "-c", "2000", *prompt, *more)
            assert ended.out == hot.text + "\n", ended.err
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
        os.environ.pop("OMP_NUM_THREADS", None)
    assert "Two prompts" in run("generate", "-m", model, "-p", PROMPT, PROMPT).refusal
    assert "threads must be a whole number" in run("generate", "-m", model, "-t", "0", PROMPT).refusal
    cut = run("generate", "-m", model, "-c", "20", "-n", "100", PROMPT, "--json", "--raw")
    found = json.loads(cut.out)
    assert found["prompt_tokens"] + len(found["tokens"]) == 20 and found["finish_reason"] == "length"
    assert "context is 4096 tokens" in run("generate", "-m", model, "-c", "5000", PROMPT).refusal


def test_drafts_have_no_escapes_where_there_is_no_terminal(run: Run, model: Path, expected):
    ended = run("generate", "-m", model, "-d", f"draft_model:{model}", "--show-drafts", PROMPT, *SHORT)
    assert ended.out == expected().text + "\n" and "\x1b" not in ended.err


def test_drafts_are_coloured_on_a_terminal(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    spec = f"draft_model:{model},num_assistant_tokens_schedule=constant,num_assistant_tokens=2"
    ended = run("generate", "-m", model, "-d", spec, "--show-drafts", "--max-new-tokens", "9", "--raw", PROMPT)
    assert ended.status == 0 and ended.out.count("\x1b[1;32m") >= 3
    assert "accepted drafts" in ended.out and "9 tokens in" in ended.err


def interrupt_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Ctrl-C in the middle of a step."""
    step, count = Engine.contained_step, 0

    def counted(self: Engine, *given: Any) -> None:
        nonlocal count
        count += 1
        if count == steps:
            signal.raise_signal(signal.SIGINT)
        step(self, *given)

    monkeypatch.setattr(Engine, "contained_step", counted)


@pytest.mark.parametrize("form", ["text", "json", "several"])
def test_ctrl_c_prints_what_was_generated(run: Run, model: Path, monkeypatch, expected, form: str):
    interrupt_after(monkeypatch, 5)
    options = {"text": (), "json": ("--json",), "several": ("--num-return-sequences", "2")}[form]
    ended = run("generate", "-m", model, "-d", "none", *options, "--raw", PROMPT)
    assert ended.status == 130
    tokens = expected().tokens[:5]
    if form == "json":
        found = json.loads(ended.out)
        assert (found["tokens"], found["finish_reason"]) == (tokens, "cancelled")
    elif form == "several":
        parts = ended.out.split("--- 2 of 2 ---\n")
        assert len(parts) == 2 and all(len(part) > 10 for part in parts)
    else:
        assert expected().text.startswith(ended.out.rstrip("\n")) and len(ended.out) > 5
    assert ended.sentence == f"Interrupted after {10 if form == 'several' else 5} tokens."
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("drafter", ["none", "draft_model"])
def test_what_came_before_nan_is_printed(run: Run, model: Path, broken_model: Path, expected, drafter: str):
    spec = drafter if drafter == "none" else f"draft_model:{model},num_assistant_tokens=2"
    ended = run("generate", "-m", broken_model, "-d", spec, PROMPT, *SHORT)
    assert ended.status == 2
    assert "NaN or +inf logits" in ended.sentence
    printed = ended.out.rstrip("\n")
    assert printed and expected().text.startswith(printed)
    found = json.loads(run("generate", "-m", broken_model, "-d", spec, "--json", PROMPT, *SHORT).out)
    assert found["tokens"] == expected().tokens[: len(found["tokens"])]
    assert len(found["tokens"]) in range(1, NAN_AFTER + 1)
    assert (found["finish_reason"], found["text"]) == ("cancelled", printed) and "NaN or +inf logits" in found["error"]


def test_options_of_the_target_and_of_the_draft_are_apart(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[LoadOptions] = []
    build = foredraft.compose.load.build_generators  # type: ignore[attr-defined]

    def build_plainly(target: str, drafters: list[str], options: LoadOptions) -> list[foredraft.Generator]:
        given.append(options)
        return build(target, drafters, LoadOptions())

    monkeypatch.setattr("foredraft.compose.load.build_generators", build_plainly)
    more = ("--model-option", "revision=v2", "--model-option", "trust_remote_code=true")
    more += ("--draft-option", 'quantization_config={"quant_method": "gptq", "bits": 4}')
    ended = run("generate", "-m", model, "-d", f"draft_model:{model}", *more, PROMPT, *SHORT)
    assert ended.status == 0, ended.err
    assert given[0].model_options == {"revision": "v2", "trust_remote_code": True}
    assert given[0].draft_options == {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    ended = run("generate", "-m", model, "--model-option", "revision", PROMPT, *SHORT)
    assert ended.status == 2 and "'revision' is not of the form option=value" in ended.err


def test_structure_comes_from_files_and_flags(run: Run, tmp_path: Path):
    schema, ebnf = tmp_path / "schema.json", tmp_path / "rules.gbnf"
    schema.write_text('{"enum": ["left", "right"]}')
    ebnf.write_text('root ::= "up" | "down"')
    said = [
        run("generate", "-q", PROMPT, *SHORT, *flags).out.strip()
        for flags in (
            ("--json-schema", str(schema)),
            ("--ebnf", str(ebnf)),
            ("--regex", "[0-9]{3}"),
            ("--choice", "a,b", "--choice", "c"),
        )
    ]
    assert said[0] in ('"left"', '"right"')
    assert said[1] in ("up", "down")
    assert said[2].isdigit() and len(said[2]) == 3
    assert said[3] in ("a,b", "c")
    assert "Give one of" in run("generate", PROMPT, "--regex", "a", "--choice", "b").refusal
    assert "Cannot read the grammar file" in run("generate", PROMPT, "--ebnf", str(tmp_path / "none")).refusal
    assert "parenthesis is not closed" in run("generate", PROMPT, "--regex", "(").refusal


def test_the_models_generation_config_is_the_default(run: Run, model: Path, tmp_path: Path, plain: foredraft.Generator):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "repetition_penalty": 1.5, "do_sample": True}))
    given: dict[str, Any] = {"max_new_tokens": 12, "seed": 4}
    sampled = plain.generate(PROMPT, temperature=1.0, repetition_penalty=1.5, **given)
    ended = run("generate", "-m", folder, PROMPT, "--seed", "4", *SHORT)
    assert ended.out == sampled.text + "\n"
    assert "by the model's generation config: repetition_penalty 1.5, temperature 1.0 (--generation-config" in ended.err
    ended = run("generate", "-m", folder, PROMPT, "--temperature", "0", "--repetition-penalty", "1", *SHORT)
    assert ended.out == plain.generate(PROMPT, max_new_tokens=12).text + "\n" and "generation config" not in ended.err
    ended = run("generate", "-m", folder, PROMPT, "--generation-config", "none", *SHORT)
    assert ended.out == plain.generate(PROMPT, max_new_tokens=12).text + "\n"
