"""GGUF files for tests: a tokenizer with a few merges, and damaged copies of a file."""

import importlib
import random
import struct
import sys
from collections.abc import Iterator
from json import loads
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)

CORPUS = [
    "The quick brown fox's 1st jump: 12,345.678 metres; it wasn't far!",
    "def add(a, b):\n\treturn a + b  # sum\r\n\r\n\n   if x!=y:   pass   \n",
    "Größe, façade, naïve, cafe\u0301, ĳ, ﬁne, İstanbul, \u017f, Ǆ, À la carte",
    "Быстрая бурая лиса; Ελληνικά κείμενα; Հայերեն; ქართული ენა",
    "العربية ١٢٣٤٥، שלום עולם, ܫܠܡܐ, ދިވެހި",
    "हिन्दी में १२३ पाठ, বাংলা লেখা, தமிழ் உரை, తెలుగు, ಕನ್ನಡ, മലയാളം, ગુજરાતી, ਪੰਜਾਬੀ, සිංහල",
    "ภาษาไทย ๑๒๓, ລາວ, မြန်မာ, ខ្មែរ, བོད་སྐད, አማርኛ, ᏣᎳᎩ, ᠮᠣᠩᠭᠣᠯ",
    "中文字符\uff0c标点。日本語のテキスト、カタカナ、ﾊﾝｶｸ。한국어 텍스트 조합: \u1112\u1161\u11ab",
    "🙂👩‍👩‍👧‍👦🇩🇪 ½ ¾ Ⅷ ² ₃ ① √2 ≠ ∞ \U0001d518\U0001d52b \U0001f9d1\U0001f3fd\u200d\U0001f680",
    "a  b   c\u00a0d\u2003e\u3000f\u200bg\u0085h\ufeffi \t \n \n\n  x",
    "''quoted'' 'S 'LL we'LL they'd I'M ``` ---- ==== $100 50% #tag @me a_b_c snake_case CamelCaseHTTPServer",
    "<|user|>Hi there<|end|> <|bot|> <own> <|end", " leading", "trailing ", " ", "\n", "7", "1234567 12 3",
]  # fmt: skip
"""Texts of all scripts, with what tokenizers trip over: digits, marks, spaces, emoji, quotes and special tokens."""


def writer() -> Any:
    """``benchmarks/write_gguf.py``."""
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module("write_gguf")


def state_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A tokenizer as its JSON file has it."""
    state: dict[str, Any] = loads(tokenizer.backend_tokenizer.to_str())
    return state


def byte_level(split: Any = None, size: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE of so many tokens, trained on the corpus, by default with the split of SmolLM."""
    backend = tokenizers.Tokenizer(models.BPE())
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = split or pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    backend.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|bot|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_tokens([AddedToken("<own>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def mutations(whole: bytes, header: int, count: int, seed: int = 0) -> Iterator[bytes]:
    """Damaged copies of a file: numbers overwritten with extremes, bytes changed, cut out, put in, or the end missing.

    Args:
        header: bytes of the header, in which most damage is done.
    """
    source = random.Random(seed)
    extremes = [
        0,
        1,
        2,
        7,
        9,
        31,
        127,
        255,
        1 << 15,
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) - 1,
        1 << 40,
        1 << 62,
        (1 << 64) - 1,
    ]
    for _ in range(count):
        place = source.randrange(header if source.random() < 0.95 else len(whole))
        match source.randrange(6):
            case 0 | 1:
                code = source.choice("BHIQ")
                number = struct.pack(f"<{code}", source.choice(extremes) & ((1 << 8 * struct.calcsize(code)) - 1))
                yield whole[:place] + number + whole[place + len(number) :]
            case 2:
                yield whole[:place] + source.randbytes(source.choice([1, 1, 4, 8])) + whole[place + 1 :]
            case 3:
                yield whole[:place]
            case 4:
                yield whole[:place] + whole[place + source.choice([1, 4, 8, 64]) :]
            case _:
                begin = source.randrange(header)
                yield whole[:place] + whole[begin : begin + source.choice([4, 8, 64])] + whole[place:]
