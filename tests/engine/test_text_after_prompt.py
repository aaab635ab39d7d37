"""The text of an output is what it adds to the prompt's: the two joined are the text of all tokens."""

import functools
import random
from typing import Any

import pytest

import tiny
from dialects import NAMES, TEXTS, dialect, size
from foredraft.core.sampling.grammar import Grammar
from foredraft.engine.detokenizer import IncrementalText, text_after
from foredraft.engine.generator import Generator
from foredraft.model.hf.causal_lm import CausalLM

SPACED = ("sentencepiece", "words", "wordpiece")
"""Their texts lose a space at the beginning."""


@functools.cache
def generator(name: str) -> Generator:
    return tiny.generator(CausalLM(tiny.build("llama", vocab_size=size(name))), tokenizer=dialect(name))


def ids(name: str, text: str) -> list[int]:
    return list(dialect(name).inner(text)["input_ids"])


def whole_words(name: str) -> dict[int, float]:
    """A bias to tokens that begin with a space and a letter."""
    vocab, tokens = dialect(name).token_bytes, range(size(name))
    return {token: 50.0 for token in tokens if vocab[token][:1] == b" " and vocab[token][1:].decode("utf-8").isalpha()}


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize("speculate", [False, True])
def test_an_output_begins_with_its_space(name: str, speculate: bool):
    g, tokenizer, prompt = generator(name), dialect(name), ids(name, "The quick brown")
    options: Any = {"max_new_tokens": 9, "temperature": 1.0, "seed": 3, "logit_bias": whole_words(name)}
    result = g.generate(prompt, speculate=speculate, **options)
    assert result.text.startswith(" ") and not tokenizer.decode(result.tokens).startswith(" ")
    assert tokenizer.decode(prompt) + result.text == tokenizer.decode([*prompt, *result.tokens])
    assert "".join(piece.text for piece in g.stream(prompt, **options)) == result.text
    assert [each.text for each in g.batch([prompt], **options)] == [result.text]
    first = result.text[: result.text.index(" ", 1)]
    stopped = g.generate(prompt, stop_strings=[first], **options)
    assert (stopped.text, stopped.stop_string, stopped.finish_reason) == ("", first, "stop")
    assert (result.stop_string, len(stopped.tokens)) == (None, 1)


@pytest.mark.parametrize("name", SPACED)
def test_beams_begin_with_their_space(name: str):
    g, prompt = generator(name), ids(name, "The quick brown")
    for found in g.beam_search(prompt, num_beams=3, num_return_sequences=3, max_new_tokens=5):
        whole = dialect(name).decode([*prompt, *found.tokens])  # type: ignore[union-attr]
        assert dialect(name).decode(prompt) + found.text == whole  # type: ignore[union-attr]


def test_an_output_cut_short_keeps_its_space():
    g, prompt = generator("sentencepiece"), ids("sentencepiece", "The quick")
    (sequence,) = g.submit([prompt], tiny.GREEDY)
    g.engine.run([sequence])
    sequence.cut(4)
    assert "The quick" + sequence.text == dialect("sentencepiece").decode([*prompt, *sequence.tokens])


@pytest.mark.parametrize("name", SPACED)
def test_a_grammar_gives_a_text_of_its_own(name: str):
    options: Any = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
    grammar = Grammar.choice([" fox", " lazy dog"])
    text = generator(name).generate(ids(name, "The quick brown"), grammar=grammar, **options).text
    assert text in (" fox", " lazy dog")


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_of_any_text_adds_up(name: str):
    """Special tokens alone before the cut, runs of spaces, characters of several tokens, long prompts."""
    tokenizer, draw = dialect(name), random.Random(0)
    for text in (text for text in TEXTS if name != "no unknown"):
        tokens = ids(name, text)
        for _ in range(12):
            cut = draw.randint(0, len(tokens))
            before, after = tokens[:cut], tokens[cut:]
            known = tokenizer.decode(before)
            if known.endswith("\ufffd"):
                continue
            stream = IncrementalText(tokenizer.decode, before)
            said = "".join([stream.push([token]) for token in after]) + stream.finish()
            assert known + said == tokenizer.decode(tokens)
            assert text_after(tokenizer.decode, before, after) == said


@pytest.mark.parametrize("specials", [1, 3, 4, 9, 40])
def test_special_tokens_before_an_output_do_not_hide_the_text_before_them(specials: int):
    tokenizer = dialect("sentencepiece")
    begin, (word, *_) = tokenizer.inner.bos_token_id, ids("sentencepiece", "fox")[1:]
    said = tokenizer.bytes_of(word).decode()
    assert said.startswith(" ")
    assert text_after(tokenizer.decode, [*ids("sentencepiece", "The"), *[begin] * specials], [word]) == said
    assert text_after(tokenizer.decode, [begin] * specials, [word]) == said[1:]


@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_a_character_that_the_prompt_begins_belongs_to_the_output(name: str):
    tokenizer = dialect(name)
    index = {tokenizer.bytes_of(token): token for token in range(size(name))}
    parts = [index[bytes([byte])] for byte in "🚀".encode()]
    prompt = ids(name, "The")
    assert text_after(tokenizer.decode, [*prompt, *parts[:2]], parts[2:]) == "🚀"
    assert text_after(tokenizer.decode, [*prompt, *parts[:2]], []) == ""
    assert text_after(tokenizer.decode, [*prompt, *parts[:2]], [index[b"a"]]) == "a"
    runs = [*parts * 9]  # a window that begins within a character must not break the others
    for cut in range(4, len(runs) + 1, 4):
        assert text_after(tokenizer.decode, [*prompt, *runs[:cut]], runs[cut:]) == "🚀" * (9 - cut // 4)
