"""Operator tapes on a CPU: a segment is recorded once for each key, and then the tape runs, not the code.

It has the rules of CUDA graphs, so what is wrong there is found here:

- numbers of the recorded step are constants of the tape, so one that should have changed gives a wrong text
- recording runs a segment several times, so what runs twice and may not shows in the text
- reading values, results whose shape depends on values, and tensors made of host data cannot be recorded
- results stay at one address, and are lost when their segment runs again: here they are overwritten
"""

from collections.abc import Callable, Sequence
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.model.recording.recorder import Flat, Recorder
from leaves import mapped, tensors, waits


class Produced:
    """An output of a recorded operator, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class Tape(TorchDispatchMode):
    """Records operators as they run."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, int]]]] = []  # places and numbers of the new tensors
        self._numbers: dict[int, int] = {}
        self._tensors: list[Tensor] = []  # kept, so that no id is used again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.name().removeprefix("aten::").partition(".")[0]
        if waits(name, args) or (name == "lift_fresh" and args[0].ndim):  # the last is ``torch.tensor(list)``
            raise RuntimeError(f"{name} cannot be recorded")
        inputs = mapped(self._as_input, (args, kwargs))
        result = function(*args, **kwargs)
        made = []
        for place, each in enumerate(tensors(result)):
            if id(each) not in self._numbers and not _among(each, args):
                self._numbers[id(each)] = len(self._tensors)
                made.append((place, len(self._tensors)))
                self._tensors.append(each)
        self._calls.append((function, *inputs, made))
        return result

    def _as_input(self, value: Any) -> Any:
        number = self._numbers.get(id(value)) if isinstance(value, Tensor) else None
        return value if number is None else Produced(number)

    def replayable(self, results: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """A function that runs the tape and returns what it makes of these results."""
        wanted = [self._as_input(each) for each in results]

        def run() -> list[Tensor]:
            values: dict[int, Tensor] = {}

            def resolve(each: Any) -> Any:
                return values[each.number] if isinstance(each, Produced) else each

            for function, args, kwargs, made in self._calls:
                args, kwargs = mapped(resolve, (args, kwargs))
                outputs = list(tensors(function(*args, **kwargs)))
                values.update((number, outputs[place]) for place, number in made)
            return [resolve(each) for each in wanted]

        return run


def _among(tensor: Tensor, args: Any) -> bool:
    """Whether an operator returned one of its inputs, as those in place do."""
    return any(each is tensor for each in tensors(args))


@final
class Traced(Recorder):
    """Replays tapes; ``keys``: the segment of each tape, ``plays``: of each replay, with those of owners."""

    def __init__(self, parent: "Traced | None" = None) -> None:
        super().__init__()
        self.keys: list[str] = [] if parent is None else parent.keys
        self.plays: list[str] = [] if parent is None else parent.plays
        if parent is not None:
            self._logged = parent._logged
        self._last: dict[str, Sequence[Tensor]] = {}

    @property
    def replays(self) -> int:
        return len(self.plays)

    @property
    def fallbacks(self) -> set[tuple[str, str]]:
        """Segments that ran eagerly, with the reason."""
        return self._logged

    def _another(self) -> "Traced":
        return Traced(self)

    def _record(
        self, segment: str, function: Flat, inputs: Sequence[Tensor]
    ) -> tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]:
        tape = Tape()
        with tape, patch("foredraft.core.best._readable", lambda scores: False):  # as on a GPU
            first = function(*inputs)
        run = tape.replayable(first)
        results = [each.clone() for each in run()]
        self.keys.append(segment)

        def play() -> Sequence[Tensor]:
            for each in self._last.get(segment, ()):
                each.fill_(-1e9 if each.is_floating_point() else -(10**9) if each.dtype != torch.bool else False)
            self._last[segment] = results
            self.plays.append(segment)
            for each, new in zip(results, run(), strict=True):
                each.copy_(new)
            return results

        return play, results
