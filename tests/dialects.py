"""Tiny tokenizers of many kinds, made on the spot, and texts that are hard for them."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer as Raw,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from foredraft.model.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It isn't 1234567 years old; it's 12.",
    "def add(a, b):\n    # sum of two\n    return a + b\n\n\nprint(add(1, 22))\n",
    "Über größere Straßen führt die Brücke. ÉCOLE Noël naïve façade ﬁne ½ Ⅳ",
    "今日は良い天気です。中文文本没有空格所以很难切分。한국어 문장입니다.",
    "Привет, мир! Как дела? 👩‍👩‍👧 emoji 🚀🚀 and ЁЖ",
    "  leading   spaces\t\ttabs \n\n \r\n trailing   ",
    "مرحبا بالعالم हिन्दी पाठ ไทย ไม่มีเว้นวรรค",
    "<|end|> looks special, <s> as well, and <0x41> too; ▁low lines_ __init__ Ġ",
    "aaaa aaaa aaaa aaaa aaaa aaaa aaaa 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
    "x" * 60 + " " * 40 + "y",
]
"""Made for these tests."""

SPECIAL = ["<|end|>", "<|user|>"]
"""The special tokens of those that are called bytes and lower; digits has the first, and one of its own."""


def _byte_level(
    size: int, digits: bool = False, normalizer: normalizers.Normalizer | None = None, own: str = ""
) -> Raw:
    """GPT-2's kind, trained on the texts."""
    raw = Raw(models.BPE())
    if normalizer is not None:
        raw.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]) if digits else level
    )
    raw.decoder = decoders.ByteLevel()
    special = [SPECIAL[0], "<|think|>"] if digits else SPECIAL
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS, trainer)
    return raw


def _sentencepiece(size: int) -> Raw:
    """Llama-2's kind: low lines for spaces, one put in front; bytes for what it has not; a text begins with <s>."""
    learner = Raw(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split(Regex("▁"), "merged_with_next")
    learner.train_from_iterator(TEXTS[:3], trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    described = json.loads(learner.to_str())["model"]
    begin = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(described["vocab"], key=described["vocab"].__getitem__)
    vocabulary = {token: index for index, token in enumerate([*begin, *learned])}
    merges = [tuple(merge) for merge in described["merges"]]
    raw = Raw(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    raw.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return raw


def _words() -> Raw:
    words = sorted({word for text in TEXTS for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(text)})
    raw = Raw(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return raw


def _no_unknown() -> Raw:
    """It raises an error at whatever is neither a nor b."""
    raw = Raw(models.WordLevel({"a": 0, "b": 1}))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return raw


def _wordpiece() -> Raw:
    raw = Raw(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    raw.train_from_iterator(TEXTS, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return raw


_LOWER = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
_MAKERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": lambda: _fast(_byte_level(700)),
    "digits": lambda: _fast(_byte_level(420, digits=True)),
    "lower": lambda: _fast(_byte_level(500, normalizer=_LOWER)),
    "sentencepiece": lambda: _fast(_sentencepiece(480), bos_token="<s>", eos_token="</s>", unk_token="<unk>"),
    "words": lambda: _fast(_words(), unk_token="[UNK]"),
    "wordpiece": lambda: _fast(_wordpiece(), unk_token="[UNK]"),
    "no unknown": lambda: _fast(_no_unknown()),
    "slow": ByT5Tokenizer,
}
EXACT = ("bytes", "digits", "sentencepiece")
"""Those that can write every text, byte for byte."""
NAMES = tuple(_MAKERS)


def _fast(raw: Raw, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


@functools.cache
def dialect(name: str) -> Tokenizer:
    """One of ``NAMES``."""
    return Tokenizer(_MAKERS[name]())


def size(name: str) -> int:
    """Tokens of a vocabulary."""
    return max(dialect(name).inner.get_vocab().values()) + 1


MODELS = Path(__file__).resolve().parents[2] / "shared" / "models"
"""Really trained models beside the checkout, where there are any."""


def trained(name: str) -> Tokenizer:
    """The tokenizer of one of them; without it the test is left out."""
    if not (MODELS / name / "tokenizer.json").exists():
        pytest.skip(f"there is no {name} beside the checkout")
    return Tokenizer(AutoTokenizer.from_pretrained(MODELS / name))


def toy(tokens: Sequence[str]) -> Tokenizer:
    """A vocabulary of single characters, and of pairs of them, which are joined wherever they meet."""
    pairs = [(token[0], token[1]) for token in tokens if len(token) == 2]
    raw = Raw(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs))
    raw.decoder = decoders.Fuse()
    return Tokenizer(_fast(raw))


@functools.cache
def strangers(size: int) -> tuple[Tokenizer, Tokenizer]:
    """Two toy vocabularies of so many tokens: most are in both, none with the same id, some in one only."""
    letters = [chr(ord("a") + i) for i in range(size - 1)]
    target = [*letters, "ab"]
    draft = [*reversed(letters[:-1]), "ab", "bc"]
    return toy(target), toy(draft)
