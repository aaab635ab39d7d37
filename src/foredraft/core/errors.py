"""Everything that foredraft raises on purpose.

ForedraftError
├── UsageError (also a ValueError): something was asked that cannot be done; the command line exits with 2
│   ├── OptionError     an unknown option, or one with a value out of its range
│   ├── PromptError     an empty prompt, or one that does not fit the model's context
│   ├── ModelError      a model that is absent, incomplete, or of a kind that cannot be verified
│   ├── DrafterError    a drafter that does not fit its target
│   ├── DataError       training text or a prompt file that cannot be read
│   └── LawError        a verifier that would not be lossless for this draft's law
└── NumericsError       the model returned logits that are not numbers
"""


class ForedraftError(Exception):
    """Base of all errors that foredraft raises on purpose; its text is one sentence for a person."""


class UsageError(ForedraftError, ValueError):
    """What was asked cannot be done; the sentence says why and, where there is one, names the way out."""


class OptionError(UsageError):
    """An option is unknown or out of its range; the sentence lists the known ones or the range."""


class PromptError(UsageError):
    """The prompt is empty, malformed or too long for the model's context."""


class ModelError(UsageError):
    """The model is absent, incomplete or of a kind whose drafts could not be verified or rolled back."""


class DrafterError(UsageError):
    """The drafter does not fit the target, for example for want of a common tokenizer."""


class DataError(UsageError):
    """Training text, or a file of prompts, cannot be read; the sentence names file, line and field."""


class LawError(UsageError):
    """A verification rule was asked to verify drafts of a law for which it is not lossless."""


def kind_of(value: object) -> str:
    """The class of a value with its article, for sentences: an int, a str."""
    name = value.__class__.__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


class NumericsError(ForedraftError):
    """The model returned NaN or +inf logits, so there is no law to sample from."""
