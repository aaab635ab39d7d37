"""Tokenizers from GGUF files: the same ids and texts as the tokenizers that the files were written from."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gguf_files
import tiny
from foredraft.model.gguf.config import end_ids
from foredraft.model.gguf.file import GgufError, GgufFile
from foredraft.model.gguf.pre_tokenizers import SPLITS
from foredraft.model.gguf.tokenizer import UnknownTokenizer, tokenizer_of
from foredraft.model.loading.bundled import resolve
from foredraft.model.loading.describe import inspect_gguf
from foredraft.model.loading.load import load_model
from foredraft.model.loading.tokenizers import as_tokenizer
from foredraft.model.text.tokenizer import Tokenizer

Write = Callable[..., GgufFile]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with a tokenizer and a tiny model, and open it."""

    def written(tokenizer: Any, split: str = "smollm", **metadata: Any) -> GgufFile:
        path = tmp_path / "model.gguf"
        model = tiny.build("llama", num_hidden_layers=1, vocab_size=len(tokenizer))
        entries = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
        gguf_files.writer().write(path, model, tokenizer, split=split, metadata=entries)
        return GgufFile(path)

    return written


def check_equal(found: PreTrainedTokenizerFast, expected: PreTrainedTokenizerFast) -> None:
    """Ids of the corpus, alone and together, with and without special tokens; the way back; vocabulary and template."""
    for text in [*gguf_files.CORPUS, "".join(gguf_files.CORPUS), "\n".join(gguf_files.CORPUS)]:
        for special in (False, True):
            ids = expected(text, add_special_tokens=special)["input_ids"]
            assert found(text, add_special_tokens=special)["input_ids"] == ids, text
            for skip in (False, True):
                assert found.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
    assert found.get_vocab() == expected.get_vocab()
    assert found.special_tokens_map == expected.special_tokens_map
    assert found.chat_template == expected.chat_template
    added = [(index, str(token), token.special) for index, token in sorted(expected.added_tokens_decoder.items())]
    assert [(index, str(token), token.special) for index, token in sorted(found.added_tokens_decoder.items())] == added


@pytest.mark.parametrize("name", ["sample", "sample-draft"])
def test_the_bundled_models_tokenizers(name: str, write: Write):
    original = AutoTokenizer.from_pretrained(resolve(name))
    found = tokenizer_of(write(original))
    check_equal(found, original)
    chat = [{"role": "user", "content": "Add 12 and 30."}]
    assert Tokenizer(found).encode_chat(chat) == Tokenizer(original).encode_chat(chat)
    assert Tokenizer(found).fingerprint() == Tokenizer(original).fingerprint()


def split_by(*expressions: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


CL100K = (  # as Llama 3's tokenizer.json has it
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINALS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False), None, False),
    "llama-bpe": (split_by(CL100K), None, True),
    "dbrx": (split_by(CL100K), None, False),
    "qwen2": (split_by(CL100K.replace("{1,3}", "")), normalizers.NFC(), False),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_tokenizers(name: str, write: Write):
    splitting, normalizer, whole_words = ORIGINALS[name]
    original = gguf_files.byte_level(splitting)
    backend = original.backend_tokenizer
    merges = [tuple(each) for each in gguf_files.state_of(original)["model"]["merges"]]
    if whole_words:
        del merges[::3]  # words that are tokens, though no merges lead to them
    backend.model = models.BPE(original.get_vocab(), merges, ignore_merges=whole_words)
    if normalizer is not None:
        backend.normalizer = normalizer
    check_equal(tokenizer_of(write(original, name, ggml__add_bos_token=False)), original)


@pytest.mark.parametrize(
    "name, text, parts",
    [
        ("gpt-2", "It's 2024!  OK\n", ["It", "'s", "Ġ2024", "!", "Ġ", "ĠOK", "Ċ"]),
        ("smollm", "It's 2024!", ["It", "'s", "Ġ", "2", "0", "2", "4", "!"]),
        ("llama-bpe", "IT'S 2024!\n\n x", ["IT", "'S", "Ġ", "202", "4", "!ĊĊ", "Ġx"]),
        ("qwen2", "IT'S 2024!", ["IT", "'S", "Ġ", "2", "0", "2", "4", "!"]),
        ("gpt-4o", "HTTPServer's it'LL 1234", ["HTTPServer's", "Ġit'LL", "Ġ", "123", "4"]),
        ("tekken", "HTTPServer's 12/\n", ["HTTPServer", "'s", "Ġ", "1", "2", "/Ċ"]),
        ("deepseek-coder", "a\nb c1,2", ["a", "Ċ", "b", "Ġc", "1", ",", "2"]),
        ("deepseek-llm", "a\nb c1,2 ", ["a", "Ċ", "b", "Ġc", "1", ",", "2", "Ġ"]),
    ],
)
def test_splits(name: str, text: str, parts: list[str]):
    assert [part for part, _ in SPLITS[name].pre_tokenizer().pre_tokenize_str(text)] == parts


def test_every_split_can_be_built():
    for name, split in SPLITS.items():
        parts = [part for text in gguf_files.CORPUS for part, _ in split.pre_tokenizer().pre_tokenize_str(text)]
        expected = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        whole = [part for text in gguf_files.CORPUS for part, _ in expected.pre_tokenize_str(text)]
        assert "".join(parts) == "".join(whole), name


def sentence_piece(*, prefix: bool) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's (with a space put before texts) or Gemma's, trained on the corpus."""
    replace = normalizers.Replace(" ", "▁")
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, limit_alphabet=150, show_progress=False)
    words = [word for text in gguf_files.CORPUS for word in text.replace("<", " ").split(" ")]
    backend.train_from_iterator([f" {word}" for word in words] + ["   ", "    "], trainer)
    trained = json.loads(backend.to_str())["model"]
    vocabulary = sorted(trained["vocab"], key=trained["vocab"].get)
    vocabulary[len(special) :] = reversed(vocabulary[len(special) :])  # ids are in another order than merges
    ids = {token: index for index, token in enumerate(vocabulary)}
    merges = [tuple(each) for each in trained["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    if not prefix:
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special[:3]])
    backend.add_tokens([AddedToken("<own>", normalized=False)])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_tokenizers(prefix: bool, write: Write):
    """Their merges are not in the file: they follow from the scores."""
    original = sentence_piece(prefix=prefix)
    check_equal(tokenizer_of(write(original, "llama", ggml__add_space_prefix=prefix)), original)


def test_first_and_last_tokens(write: Write):
    original = gguf_files.byte_level()
    found = tokenizer_of(write(original, "llama-bpe", ggml__bos_token_id=2, ggml__add_bos_token=None))
    assert found("ab")["input_ids"][0] == 2 and found.bos_token == "<|user|>", "the split's default"
    found = tokenizer_of(write(original, ggml__bos_token_id=2, ggml__add_bos_token=True, ggml__add_eos_token=True))
    alone = found("ab", add_special_tokens=False)["input_ids"]
    assert found("ab")["input_ids"] == [2, *alone, 1]
    assert found("ab", "ab")["input_ids"] == [2, *alone, 1, 2, *alone, 1]
    assert tokenizer_of(write(original, ggml__bos_token_id=2))("ab")["input_ids"] == alone


def test_tokens_that_end_an_answer(write: Write):
    original = gguf_files.byte_level()
    assert end_ids(write(original, ggml__eos_token_id=2)) == [2, 1], "<|end|> by its name"
    assert end_ids(write(original, ggml__eos_token_id=None, ggml__eot_token_id=3)) == [3, 1]
    file = write(original, ggml__eos_token_id=99999)
    assert end_ids(file) == [1] and tokenizer_of(file).eos_token is None
    assert load_model(file.path).eos_token_ids == (1,)


def ending(name: str, kind: int, write: Write, *more: str) -> GgufFile:
    """A file with a token of this name and type, and perhaps further ones, whose own end is another."""
    original = gguf_files.byte_level()
    names = [f"<extra {number}>" for number in range(6 - len(more))]
    original.add_tokens([AddedToken(each, normalized=False) for each in [name, *more, *names]])
    file = write(original, ggml__eos_token_id=2)
    kinds = file.metadata["tokenizer.ggml.token_type"].copy()
    kinds[401] = kind
    file.metadata["tokenizer.ggml.token_type"] = kinds
    return file


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user-defined"])
@pytest.mark.parametrize(
    "name",
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>", "_<EOT>",
     "[EOT]", "<end_of_utterance>", "<|return|>", "<|call|>", "<|eot|>", "<|end_of_turn|>",
     "<\uff5cend\u2581of\u2581sentence\uff5c>"],
)  # fmt: skip
def test_ends_of_a_turn_have_any_type(name: str, kind: int, write: Write):
    file = ending(name, kind, write)
    assert end_ids(file) == [2, 1, 401]
    found = tokenizer_of(file)
    assert found(f"Hi{name}")["input_ids"][-1] == 401 and found.decode([401], skip_special_tokens=True) == ""


def test_words_that_are_ends_only_as_control_tokens(write: Write):
    assert [401 in end_ids(ending("</s>", kind, write)) for kind in (1, 3, 4)] == [False, True, False]
    harmony = ending("<|return|>", 3, write, "<|call|>")
    assert end_ids(harmony) == [2, 401, 402], "<|end|>, token 1, ends a message there"


def test_sentence_piece_has_its_own_end(write: Write):
    file = write(sentence_piece(prefix=True), "llama", ggml__eos_token_id=None, ggml__bos_token_id=None)
    assert end_ids(file) == [2] and tokenizer_of(file).eos_token == "</s>"
    assert load_model(file.path).eos_token_ids == (2,)


@pytest.mark.parametrize("name", ["default", "tool_use"])
def test_a_template_under_a_name_alone(name: str, write: Write):
    metadata = {"chat_template": None, "chat_templates": [name], f"chat_template.{name}": gguf_files.CHAT}
    file = write(gguf_files.byte_level(), **metadata)
    assert tokenizer_of(file).chat_template == gguf_files.CHAT
    assert inspect_gguf(file).chat_template


def test_the_first_of_several_templates_is_the_default(write: Write):
    named = {"chat_template.tool_use": "{{ 1 }}", "chat_template.rag": "{{ 2 }}"}
    file = write(gguf_files.byte_level(), chat_template=None, chat_templates=["tool_use", "rag"], **named)
    assert tokenizer_of(file).chat_template == {"default": "{{ 1 }}", "tool_use": "{{ 1 }}", "rag": "{{ 2 }}"}


def test_chat_templates(write: Write):
    original = gguf_files.byte_level()
    found = tokenizer_of(write(original, chat_templates=["rag"], **{"chat_template.rag": "{{ 1 }}"}))
    assert found.chat_template == {"default": gguf_files.CHAT, "rag": "{{ 1 }}"}
    assert tokenizer_of(write(original, chat_template=None)).chat_template is None


def test_tokens_that_fill_up_the_vocabulary_are_no_tokens(write: Write):
    original = gguf_files.byte_level()
    file = write(original)
    file.metadata["tokenizer.ggml.tokens"].append(f"[PAD{len(original)}]")
    kinds = file.metadata["tokenizer.ggml.token_type"].tolist()
    file.metadata["tokenizer.ggml.token_type"] = np.array([*kinds, 5])
    assert tokenizer_of(file).get_vocab() == original.get_vocab()


def test_a_tokenizer_alone(write: Write):
    original = gguf_files.byte_level()
    found = as_tokenizer(write(original).path)
    assert found is not None and found.encode("Hi 12") == Tokenizer(original).encode("Hi 12")


@pytest.mark.parametrize(
    "metadata, match",
    [
        ({"ggml__pre": "gpt-99"}, "names the unknown split 'gpt-99' of its tokenizer, without which"),
        ({"ggml__model": "bert"}, "has a tokenizer of the kind 'bert'; byte-level BPE"),
        ({"ggml__model": None}, "has no tokenizer; byte-level BPE"),
    ],
)
def test_an_unknown_tokenizer_leaves_token_ids(metadata: dict[str, Any], match: str, write: Write, caplog: Any):
    file = write(gguf_files.byte_level(), **metadata)
    with pytest.raises(UnknownTokenizer, match=match):
        tokenizer_of(file)
    with caplog.at_level(logging.WARNING, "foredraft"):
        assert load_model(file.path).tokenizer is None
    assert "Prompts must be token ids, or pass the original tokenizer." in caplog.text


@pytest.mark.parametrize(
    "name, pre",
    [
        *((split, None) for split in SPLITS if split != "deepseek-r1-qwen"),  # qwen2 but for what is normalised
        ("smollm", ""),
        ("smollm", "default"),
    ],
)
def test_a_split_that_is_not_named_is_found_by_its_tokens(name: str, pre: str | None, write: Write, caplog: Any):
    original = gguf_files.byte_level(SPLITS[name].pre_tokenizer(), size=800)
    named = tokenizer_of(write(original, name))
    with caplog.at_level(logging.WARNING, "foredraft"):
        found = tokenizer_of(file := write(original, name, ggml__pre=pre))
    assert "does not name the split of its tokenizer" in caplog.text
    for text in ["".join(gguf_files.CORPUS), *gguf_files.CORPUS]:
        ids = [each.encode(text, add_special_tokens=False) for each in (found, named)]
        assert ids[0] == ids[1]
    assert "(not named by the file)" in inspect_gguf(file).tokenizer


def test_letters_alone_show_no_split(write: Write):
    file = write(gguf_files.byte_level(size=260), ggml__pre=None)
    with pytest.raises(UnknownTokenizer, match="does not name the split of its tokenizer, and none fits"):
        tokenizer_of(file)


@pytest.mark.parametrize(
    "key, value, match",
    [
        ("tokens", ["a", "a"], "has tokens twice"),
        ("tokens", [], "has no tokens"),
        ("merges", ["a zzz"], "is damaged: "),
        ("merges", ["a b", " a"], "the merge 1 is no pair"),
        ("merges", None, "has no merges"),
        ("token_type", [1, 2], "its token_type is no array of 401 numbers"),
        ("scores", "none", "its scores is no array of 401 numbers"),
    ],
)
def test_a_damaged_tokenizer_gets_a_sentence(key: str, value: Any, match: str, write: Write):
    file = write(gguf_files.byte_level())
    file.metadata[f"tokenizer.ggml.{key}"] = np.array(value) if key == "token_type" else value
    with pytest.raises(GgufError, match=match) as caught:
        tokenizer_of(file)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, UnknownTokenizer)
