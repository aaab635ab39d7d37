"""All exceptions that foredraft raises deliberately.

ForedraftError
├── UsageError (also a ValueError): the request cannot be carried out; the command line exits with 2
│   ├── OptionError     an unknown option, or a value out of range
│   ├── PromptError     an empty prompt, or one that does not fit the model's context
│   ├── ModelError      a model that is missing, incomplete, or of an unsupported kind
│   ├── DrafterError    a drafter that does not fit its target
│   ├── DataError       training data or a prompt file that cannot be read
│   └── LawError        a verification rule that would not be lossless for this draft's law
└── NumericsError       the model returned NaN or infinite logits
"""

import reprlib


class ForedraftError(Exception):
    """Base of all errors that foredraft raises deliberately; the message is one readable sentence."""


class UsageError(ForedraftError, ValueError):
    """The request cannot be carried out; the message says why and, where possible, what to do instead."""


class OptionError(UsageError):
    """An option is unknown or out of range; the message lists the known options or the range."""


class PromptError(UsageError):
    """The prompt is empty, malformed or too long for the model's context."""


class ModelError(UsageError):
    """The model is missing, incomplete, or cannot verify or roll back drafts."""


class DrafterError(UsageError):
    """The drafter does not fit the target, for example because their tokenizers differ."""


class DataError(UsageError):
    """Training data or a prompt file cannot be read; the message names file, line and field."""


class LawError(UsageError):
    """The verification rule is not lossless for the draft's law."""


class NumericsError(ForedraftError):
    """The model returned NaN or +inf logits, so there is no distribution to sample from."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """A value in an error message: its ``repr``, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return kind_of(value)


def kind_of(value: object) -> str:
    """The value's class name with its article, for error messages: "an int", "a str"."""
    name = value.__class__.__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, with the second one if it ends in a colon.

    The class name if there is none, or only a key.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines or isinstance(error, KeyError):
        return " ".join([error.__class__.__name__, *lines])
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
