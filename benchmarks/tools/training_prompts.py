"""Prompts of many kinds for training drafts, as chats that wait for their answer, from ../shared/data/corpus.

    python -m benchmarks.tools.training_prompts build/prompts.jsonl
    foredraft answers build/answers -m MODEL --weights int4 --own-prompts 6500 --data build/prompts.jsonl

Questions and dialogues of the corpus; summaries, explanations and rewritings of its prose; completions, explanations,
tests and edits of its code. The same command writes the same prompts. They are for training only: not all texts of the
corpus may be shipped.
"""

import argparse
import ast
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

CHATS = {"gsm8k_train": 1600, "mbpp_train": 374, "open_trivia_qa": 800, "self_dialogue": 500, "sgd_dialogues": 500}
"""Files of chats, and how many of each."""
PROSE = ("openstax", "d2l_en", "english_novels", "python_peps", "python_reference_topics", "ms_cpp_docs")
CODE = ("the_algorithms_python", "python_packages", "scipy", "networkx", "cpython_stdlib", "torchtune")
ABOUT_PROSE = (
    "Summarize the following text:\n\n{}",
    "Write a summary of this text in three sentences.\n\n{}",
    "{}\n\nWhat are the main points of this text?",
    "Rewrite this text in simpler words:\n\n{}",
    "{}\n\nWrite five questions that this text answers, each with its answer.",
    "Correct the grammar and spelling of this text, and change nothing else:\n\n{}",
    "Answer from the text below, and quote the sentence that you used: what is it about?\n\n{}",
)
ABOUT_CODE = (
    "Complete the code I provided. {}",
    "Explain what this Python function does:\n\n```python\n{}\n```",
    "Write unit tests for this function:\n\n```python\n{}\n```",
    "Add type hints and a docstring to this function. Return the whole function.\n\n```python\n{}\n```",
    "Rename the function to `compute` and its first argument to `value`. Return the whole code.\n\n```python\n{}\n```",
    "Is there a bug in this code? Show the corrected code.\n\n```python\n{}\n```",
)
TURN = re.compile(r"<\|(user|assistant)\|>\n(.*?)<\|end\|>", re.DOTALL)
Messages = list[dict[str, str]]


def texts(corpus: Path, name: str) -> list[str]:
    """The texts of a file, each once."""
    with lzma.open(corpus / f"{name}.jsonl.xz", "rt", encoding="utf-8") as lines:
        return list(dict.fromkeys(json.loads(line)["text"] for line in lines))


def chat(text: str, source: random.Random) -> Messages:
    """The turns of a text up to one of its user's first three."""
    turns = [{"role": role, "content": content} for role, content in TURN.findall(text)]
    ends = [number for number, turn in enumerate(turns) if turn["role"] == "user"][:3]
    return turns[: source.choice(ends) + 1] if ends else []


def passages(text: str, source: random.Random) -> Iterator[str]:
    """Paragraphs in a row with 60 to 350 words, not all that there are."""
    part: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        part.append(paragraph.strip())
        words = sum(len(each.split()) for each in part)
        if words >= 60:
            if words <= 350 and source.random() < 0.2:
                yield "\n\n".join(part)
            part = []


def functions(text: str, source: random.Random) -> Iterator[str]:
    """Functions of 5 to 40 lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and 5 <= node.end_lineno - node.lineno < 40:
            if node.col_offset == 0 and source.random() < 0.3:
                yield "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])


def asked(
    corpus: Path,
    names: tuple[str, ...],
    parts: Callable[[str, random.Random], Iterator[str]],
    requests: tuple[str, ...],
    count: int,
) -> Iterator[Messages]:
    """Requests about parts of texts, the same number from each file."""
    for name in names:
        source = random.Random(name)
        found = texts(corpus, name)
        source.shuffle(found)
        for part in islice((part for text in found for part in parts(text, source)), count // len(names)):
            request = source.choice(requests)
            whole = "Complete" not in request
            lines = part.splitlines()
            yield [{"role": "user", "content": request.format(part if whole else "\n".join(lines[: len(lines) // 2]))}]


def prompts(corpus: Path) -> Iterator[Messages]:
    """All prompts."""
    for name, count in CHATS.items():
        source = random.Random(name)
        found = texts(corpus, name)
        source.shuffle(found)
        yield from islice(filter(None, (chat(text, source) for text in found)), count)
    yield from asked(corpus, PROSE, passages, ABOUT_PROSE, 1500)
    yield from asked(corpus, CODE, functions, ABOUT_CODE, 1500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--corpus", type=Path, default=Path(__file__).resolve().parents[3] / "shared/data/corpus")
    args = parser.parse_args()
    if not args.corpus.is_dir():
        raise SystemExit(f"There is no corpus in {args.corpus}: give --corpus FOLDER.")
    found = [json.dumps({"messages": each}) for each in prompts(args.corpus)]
    args.out.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    print(f"{len(found)} prompts in {args.out}.")


if __name__ == "__main__":
    main()
