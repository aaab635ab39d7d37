"""Prefill of admitted requests: the target reads their prompts, and the drafter what it needs of them."""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from foredraft.core.drafter import Drafter, Room
from foredraft.engine.request import Sequence
from foredraft.model.base import TargetModel
from foredraft.model.cache import SlotCache
from foredraft.model.prefill import prefill_ragged


class PromptReader:
    """Reads prompts except for their last tokens, the first roots."""

    def __init__(self, target: TargetModel, cache: SlotCache, drafter: Drafter) -> None:
        self._target = target
        self._cache = cache
        self._drafter = drafter

    @torch.inference_mode()
    def read(self, admitted: Mapping[int, Sequence], room: Room, begin: Callable[[int], None]) -> None:
        """Read the prompts of new rows; one that several of them share is read once.

        Args:
            room: what the cache will need until the requests in flight end.
            begin: called with each row just before the drafter admits it.
        """
        started = time.perf_counter()
        rows, sequences = list(admitted), list(admitted.values())
        first: dict[tuple[int, ...], int] = {}
        owners = [first.setdefault(sequence.prompt, index) for index, sequence in enumerate(sequences)]
        unique = sorted(set(owners))
        lines = {owner: line for line, owner in enumerate(unique)}
        prompts = [torch.tensor(sequences[i].prompt[:-1], dtype=torch.long) for i in unique]
        counts = [len(prompt) for prompt in prompts]
        tokens = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self._target.device)
        cache = self._cache
        cache.reserve(max(rows) + 1, max(counts) + 1, room)
        parts = {line: [self._drafter.fuse(self._tapped(self._target.empty_hidden(1)))] for line in range(len(unique))}

        def receive(line: int, states: Mapping[int, Tensor]) -> None:
            parts[line].append(self._drafter.fuse(self._tapped(states)))

        prefill_ragged(self._target, cache, [rows[index] for index in unique], tokens, counts, receive)
        copies = [index for index, owner in enumerate(owners) if owner != index]
        if copies:
            cache.fork([rows[owners[i]] for i in copies], [rows[i] for i in copies], max(counts))
        seconds = time.perf_counter() - started
        for row, owner, sequence in zip(rows, owners, sequences, strict=True):
            line = lines[owner]
            hidden = {key: torch.cat([part[key] for part in parts[line]], 1) for key in parts[line][0]}
            begin(row)
            self._drafter.admit(row, tokens[line, : counts[line]], hidden)
            sequence.counters.prefill_seconds = seconds

    def _tapped(self, hidden: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The states of the layers that the drafter reads; others may be tapped for other users of the target."""
        return {tap: hidden[tap] for tap in self._drafter.needs.hidden_layers}
