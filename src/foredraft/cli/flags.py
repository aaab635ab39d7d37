"""Command-line options from dataclass fields: a new field becomes a new flag."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from foredraft.core.errors import OptionError

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", bool: ""}


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """A dataclass whose fields become options of a command.

    A flag that is on by default becomes ``--no-...``. The fields in ``first`` come first; the ``others`` follow, unless
    it is false. Left out are fields whose type has no command-line form (mappings, functions), those with
    ``flag=False`` in their metadata, and those in ``without``. ``defaults`` replace the fields'. ``names`` overrides
    option names, which default to the field's name with dashes; ``complete`` gives functions that complete values.
    ``help``, ``names`` and ``complete`` may also be in a field's metadata (see ``core.options.option``). ``given``: a
    command receives a mapping of what was given, not the dataclass.
    """

    kind: type
    panel: str
    help: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    others: bool = True
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    complete: Mapping[str, Callable[[str], list[str]]] = field(default_factory=dict)
    given: bool = False

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter per field, as typer reads them from a signature."""
        found = []
        for each in self._chosen():
            form = _form(each.type)
            if form is None:
                continue
            own = self.defaults.get(each.name, each.default)
            default = (False if own is True else own) if form.simple and not self.given else None
            info = typer.Option(
                *self._names(each),
                help=self._help(each),
                metavar=form.metavar,
                show_default=default not in (None, "", 0) and not isinstance(default, bool),
                autocompletion=self.complete.get(each.name, each.metadata.get("complete")),
                rich_help_panel=self.panel,
            )
            kind = Annotated[form.annotation | None if self.given else form.annotation, info]
            found.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
        return found

    def make(self, given: Mapping[str, Any]) -> Any:
        """Build the dataclass from parsed values, or the mapping; missing ones keep the field's default."""
        values = {}
        for each in fields(self.kind):
            value = given.get(each.name)
            form = _form(each.type)
            if form is None or value is None or (not form.simple and not value):
                continue
            if form.simple:
                values[each.name] = not value if each.default is True else value
            else:
                values[each.name] = _numbers(each.name, value) if form.nested else tuple(value)
        return values if self.given else self.kind(**values)

    def _chosen(self) -> list[Field[Any]]:
        """The fields that may become options, in their order."""
        known = {each.name: each for each in fields(self.kind)}
        names = dict.fromkeys((*self.first, *(known if self.others else ())))
        chosen = [known[name] for name in names if name not in self.without]
        return [each for each in chosen if each.metadata.get("flag", True)]

    def _help(self, each: Field[Any]) -> str | None:
        meaning = each.metadata.get("meaning", "")
        return self.help.get(each.name) or each.metadata.get("help") or meaning[:1].upper() + meaning[1:] or None

    def _names(self, each: Field[Any]) -> tuple[str, ...]:
        own = self.names.get(each.name, each.metadata.get("names"))
        return tuple(own or (f"--{'no-' if each.default is True else ''}{each.name.replace('_', '-')}",))


@dataclass(frozen=True, slots=True)
class _Form:
    """Command-line form of a field's type; ``simple`` if the option is not repeatable."""

    item: type
    annotation: Any
    simple: bool = True
    nested: bool = False
    metavar: str | None = None


def _form(hint: Any) -> _Form | None:
    """None if the type has no command-line form."""
    optional = NoneType in get_args(hint)
    if optional:
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if hint in _METAVARS:
        return _Form(hint, hint | None if optional else hint, metavar=_METAVARS[hint])
    if get_origin(hint) is not tuple or get_args(hint)[1:] != (...,):
        return None
    item = get_args(hint)[0]
    if item in _METAVARS:
        return _Form(item, list[item] | None, simple=False, metavar=_METAVARS[item])  # type: ignore[valid-type]
    if item == tuple[int, ...]:
        return _Form(item, list[str] | None, simple=False, nested=True, metavar="IDS")
    return None


def _numbers(name: str, given: list[str]) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(int(part) for part in text.split(",")) for text in given)
    except ValueError:
        raise OptionError(f"--{name.replace('_', '-')} takes token ids separated by commas, such as 12,7.") from None


def flags(**groups: FlagGroup) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add each group's options to a command; its parameter of that name receives the dataclass."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [each for name, each in signature.parameters.items() if name not in groups]
        parameters_of = {name: group.parameters() for name, group in groups.items()}

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            for name, group in groups.items():
                part = {each.name: given.pop(each.name) for each in parameters_of[name]}
                given[name] = group.make(part)
            return command(**given)

        everything = [*own, *(each for parameters in parameters_of.values() for each in parameters)]
        run.__signature__ = signature.replace(parameters=everything)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in everything}
        return run

    return decorate
