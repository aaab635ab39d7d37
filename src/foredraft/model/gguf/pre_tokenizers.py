"""How text is split before byte-level BPE, by the name that llama.cpp gives a split (``tokenizer.ggml.pre``).

A file has the name alone. Each split here is the original tokenizer's, which llama.cpp approximates in places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _CL100K.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = [rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"]
_REST = [r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
_TEKKEN = "|".join([*_WORDS, r"\p{N}", *_REST])
_O200K = "|".join([*(f"{word}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for word in _WORDS), r"\p{N}{1,3}", *_REST])
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


@dataclass(frozen=True, slots=True)
class Split:
    """Steps that split text, one within the parts of another.

    ``steps``: regular expressions whose matches are parts, or "digits" for each digit alone, and "gpt2" for GPT-2's
    own expression, after which text is bytes as characters. ``nfc``: text is normalised first. ``whole_words``: a part
    that is a token is that token, whatever the merges say. ``bos``: texts begin with a token for that unless the file
    says otherwise.
    """

    steps: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalisation that comes first."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The splits, and bytes as characters."""
        steps = [_step(step) for step in self.steps]
        if "gpt2" not in self.steps:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


def _step(step: str) -> pre_tokenizers.PreTokenizer:
    if step == "digits":
        return pre_tokenizers.Digits(individual_digits=True)
    if step == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Split(Regex(step), behavior="isolated")


_DIGITS = Split(("digits", "gpt2"))
_LLAMA3 = Split((_CL100K,), whole_words=True, bos=True)
_GPT4 = Split((_CL100K,))

SPLITS = {
    "gpt-2": Split(("gpt2",)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "minerva-7b": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "qwen2": Split((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Split((_QWEN2,)),
    "tekken": Split((_TEKKEN,), whole_words=True, bos=True),
    "gpt-4o": Split((_O200K,)),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits")),
    "deepseek-llm": Split((r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_MARKS, r"\s+$", _CJK, "digits")),
}
"""By the name in a file; a name that is missing here has a split that is not known to be right."""


_MOST_TOKENS = 8000
_SLACK = 1000
"""A split may cut one token more in so many: some come from other texts than those that were split."""
_NUMBERS = "In 1987 and 2024, 12345 of 678.\r\n"


def fitting_split(tokens: Sequence[str]) -> str | None:
    """The name of the split with which a byte-level vocabulary was made, from its tokens; None without any.

    A split cuts no token of its own vocabulary, but many of others: of those that cut the fewest tokens, it is the one
    that makes the most parts. Right for the vocabularies of SmolLM2, GPT-4, GPT-4o, Llama 3 and Qwen 3.
    """
    texts = [text for text in map(_text, tokens) if len(text) > 1]
    texts = texts[:: max(1, len(texts) // _MOST_TOKENS)]
    if not texts:
        return None
    cut, parts = dict[str, int](), dict[str, int]()
    names = {split.steps: name for name, split in reversed(SPLITS.items())}  # the first of equals
    for name in names.values():
        split = SPLITS[name].pre_tokenizer()
        cut[name] = sum(len(split.pre_tokenize_str(text)) > 1 for text in texts)
        parts[name] = len(split.pre_tokenize_str("".join(texts) + _NUMBERS * 100))
    fewest = min(cut.values()) + len(texts) // _SLACK
    return max((name for name in names.values() if cut[name] <= fewest), key=lambda name: parts[name])


def _text(token: str) -> str:
    """The text of a token in the alphabet of bytes; empty if it is no whole characters."""
    try:
        return bytes(_BYTES[character] for character in token).decode()
    except (KeyError, UnicodeDecodeError):
        return ""


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
