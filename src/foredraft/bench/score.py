"""Is an answer right? Judged by what the ask itself holds, so that two arms can be shown to be as good as each other.

Three rules, and an ask that none of them fits is not scored:

- **programs** (HumanEval: Chen et al. 2021, arXiv:2107.03374, github.com/openai/human-eval): the prompt with its
  completion, then the file's tests. A bare completion ends at the paper's stop sequences (section 2.1); of chat answers
  the fenced block counts, as in github.com/openai/simple-evals. Executed in ``sandbox``, and only where asked for.
- **numbers** (GSM8K: Cobbe et al. 2021, arXiv:2110.14168, github.com/openai/grade-school-math): a reference that ends
  in "#### 18", or is a number. Of the text the number after the first "####" counts (that repository's
  ``extract_answer``), else the one after the last "answer is" (Wei et al. 2022, arXiv:2201.11903) or "answer: 18",
  else the last one of all ("flexible-extract" of github.com/EleutherAI/lm-evaluation-harness, whose stop at
  "Question:" holds for all three).
- **short answers**: exact match of the first line with any of the references after SQuAD's normalisation (Rajpurkar et
  al. 2016, arXiv:1606.05250; ``normalize_answer`` of its evaluation script). Short means one line of at most five
  words, the bound of NQ-open (Lee et al. 2019, arXiv:1906.00300): a longer reference is an example, not the answer.
"""

import re
import string
from collections.abc import Callable
from decimal import Decimal
from functools import partial

from foredraft.bench.prompts import Ask
from foredraft.bench.sandbox import try_program
from foredraft.core.errors import OptionError

Scorer = Callable[[str], bool]
STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")
"""Where a bare completion ends: the five of the paper, and the fence that chat models shut it with."""
SHORT = 5
_NUMBER = re.compile(
    r"(?:(?<![\w)$.])[-\u2212])?(?:\$\s?[-\u2212]?)?"  # a sign, unless it is a hyphen or takes away; before $ or after
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))(?:\.[0-9]+)?"
)
_ANSWER = re.compile(r"answer\s*(?:is\b|:(?=[^\w\n]*[0-9]))", re.IGNORECASE)
_FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def score(ask: Ask, text: str, *, execute: bool = False) -> bool | None:
    """Whether ``text`` answers the ask rightly; None where nobody can say, or only by executing it.

    Args:
        text: the continuation of ``ask.prompt``, or the assistant's turn.
        execute: run programs that a model wrote, in ``sandbox``; read there what this guards against.

    Raises:
        OptionError: it had to be executed and cannot be on this machine.
    """
    scorer = scorer_of(ask, execute=execute)
    return None if scorer is None else scorer(text)


def scorer_of(ask: Ask, *, execute: bool = False) -> Scorer | None:
    """What tells right answers to this ask from wrong ones, or None.

    Of an ask with several turns the references are one for each turn, and none is scored.
    """
    if ask.program is not None:
        return partial(_passes, ask) if execute else None
    if len(ask.turns) > 1 and not (isinstance(ask.prompt, list) and len(ask.prompt) > 1):
        return None
    numbers = {number for each in ask.references if (number := _gold(each)) is not None}
    phrases = {normalised(each) for each in ask.references if _gold(each) is None and _is_short(each)} - {""}
    if not numbers and not phrases:
        return None
    return lambda text: said_number(text) in numbers or normalised(_first_line(text)) in phrases


def said_number(text: str) -> Decimal | None:
    """The number that a text gives as its answer."""
    head = text.partition("Question:")[0]
    text = head if head.strip() else text
    marked = text.find("####")
    if marked >= 0 and (found := _numbers(text[marked:])):
        return found[0]
    for marker in reversed(list(_ANSWER.finditer(text))):
        if found := _numbers(text[marker.end() :]):
            return found[0]
    found = _numbers(text)
    return found[-1] if found else None


def _numbers(text: str) -> list[Decimal]:
    return [_number(found.group()) for found in _NUMBER.finditer(text)]


def _number(text: str) -> Decimal:
    return Decimal(re.sub(r"[$,\s]", "", text).replace("\u2212", "-"))


def _gold(reference: str) -> Decimal | None:
    """The number that a reference stands for: after its last "####", or all of it."""
    said = reference.rpartition("####")[2].strip().removesuffix("%").removesuffix(".")
    return _number(said) if _NUMBER.fullmatch(said) else None


def normalised(text: str) -> str:
    """SQuAD's: lower case, no punctuation, no articles, single spaces."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _is_short(reference: str) -> bool:
    return "\n" not in reference and "####" not in reference and len(reference.split()) <= SHORT


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _passes(ask: Ask, text: str) -> bool:
    assert ask.program is not None
    trial = try_program(programs_of(ask, text), ask.program.test, ask.program.entry_point)
    if trial.reason == "refused":
        raise OptionError(f"Programs cannot be executed here: {trial.detail}. Leave execution off.")
    return trial.passed


def programs_of(ask: Ask, text: str) -> list[str]:
    """What a text may mean as a program, the likeliest first; the first that is Python counts, right or wrong.

    An indented text goes on with the prompt. Another one is an answer: a fenced block of it, the one that defines the
    function if there are several, stands behind what the prompt has before its own definition (imports, helpers).
    """
    prompt = ask.prompt if isinstance(ask.prompt, str) else ask.turns[0]
    name = re.escape(ask.program.entry_point) if ask.program else r"\w+"
    own = re.compile(rf"^(?:async )?def {name}\b", re.MULTILINE)
    start = own.search(prompt)
    prelude = prompt[: start.start()] if start else ""
    ended = _until_stop(text)
    bare = [prompt + ended, f"{prompt}\n{ended}"]
    blocks = sorted(_FENCED.findall(text), key=lambda block: own.search(block) is None)
    answers = []
    for block in blocks[:1]:
        answers += [f"{prelude}\n{block}", block] if own.search(block) else [prompt + block, f"{prompt}\n{block}"]
    if not blocks and own.search(text):
        answers += [f"{prelude}\n{whole}" for whole in _whole(text, own)]
    first = next((line for line in text.split("\n") if line.strip()), "")
    goes_on = first[:1].isspace() or not answers
    return [*bare, *answers] if goes_on else [*answers, *bare]


def _until_stop(text: str) -> str:
    return text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]


def _whole(text: str, own: re.Pattern[str]) -> list[str]:
    """A function that stands in a text without a fence: from the first line of code on; then only itself."""
    code = re.search(r"^(?:from |import |def |class |@)", text, re.MULTILINE)
    found = own.search(text)
    assert code is not None and found is not None
    following = re.search(r"\n(?=[^\s)])", text[found.end() :])
    alone = text[found.start() : found.end() + following.start()] if following else text[found.start() :]
    return [text[code.start() :], alone]
