from dataclasses import dataclass, fields

import pytest
import typer

from foredraft.cli.choices import CHAT_SAMPLING, SAMPLING
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError
from foredraft.core.sampling.params import SamplingParams

NOT_ON_A_COMMAND_LINE = {"grammar", "logit_bias", "logits_processor", "record_steps"}


@dataclass(frozen=True)
class Things:
    size: int = 3
    share: float | None = None
    names: tuple[str, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()
    loud: bool = False
    polite: bool = True
    hook: object = None


def parsed(*arguments: str) -> Things:
    found: list[Things] = []
    app = typer.Typer()

    @app.command()
    @flags(things=FlagGroup(Things, "Things", names={"size": ("--size", "-s")}, without=("hook",)))
    def command(*, things: Things) -> None:
        found.append(things)

    app(list(arguments), standalone_mode=False)
    return found[0]


def test_fields_become_options():
    assert parsed() == Things()
    assert parsed("-s", "5", "--share", "0.5", "--loud", "--no-polite") == Things(5, 0.5, loud=True, polite=False)
    assert parsed("--names", "a", "--names", "b,c").names == ("a", "b,c")
    assert parsed("--words", "1,2", "--words", "3").words == ((1, 2), (3,))
    with pytest.raises(OptionError, match="--words"):
        parsed("--words", "1 2")


def test_every_sampling_parameter_has_an_option_and_a_help_text():
    known = {field.name for field in fields(SamplingParams)} - NOT_ON_A_COMMAND_LINE
    assert {each.name for each in SAMPLING.parameters()} == known
    assert set(SAMPLING.help) == known
    assert {each.name for each in CHAT_SAMPLING.parameters()} == known - {"logprobs", "prediction"}


def test_what_is_not_given_is_left_to_the_model():
    assert SAMPLING.make({}) == {}
    given = {each.name: each.default for each in SAMPLING.parameters()}
    assert SAMPLING.make(given) == {}
    chosen = {
        "temperature": 0.0,
        "speculate": True,
        "stop_strings": ["a"],
        "bad_words_ids": ["1,2"],
    }  # --no-speculation
    made = SAMPLING.make({**given, **chosen})
    assert made == {"temperature": 0.0, "speculate": False, "stop_strings": ("a",), "bad_words_ids": ((1, 2),)}
