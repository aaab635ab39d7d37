"""Two tokenizers: one text in the tokens of both."""

import itertools
from collections.abc import Sequence

import torch

from foredraft.model.byte_vocab import Spelling, complete
from foredraft.model.tokenizer import Tokenizer

_BYTES = 4
"""A character has no more bytes, and a token may be one of them."""


class VocabMapping:
    """From the target's tokens to a draft's and back. Texts are the same on both sides; tokens need not be.

    Special tokens are no text: they are never drafted. In a text that the draft reads, one that it has too, by the
    same name, stands for itself, and any other is left out.

    ``shared[t]`` [V] is the draft's token that says the same as the target's token t, -1 where there is none; of
    several that say the same, one counts. ``silent`` [v]: whether a token of the draft says nothing, as special ones.

    Args:
        target, draft: their tokenizers.
        target_size, draft_size: V and v, the tokens of their logits.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        self.target, self.draft = Spelling(target, target_size), Spelling(draft, draft_size)
        by_name = {name: index for index, name in self.draft.names.items() if index < draft_size}
        self._special = {index: by_name.get(name) for index, name in self.target.names.items()}
        self.shared = torch.full((target_size,), -1)
        for said, index in self.target.index.items():
            self.shared[index] = self.draft.index.get(said, -1)
        self.silent = torch.tensor([not said for said in self.draft.pieces[:draft_size]])

    def to_draft(self, tokens: Sequence[int], first: bool = True) -> list[int]:
        """A text in the draft's tokens.

        Args:
            tokens: of the target.
            first: a text begins with them; otherwise they stand within one.
        """
        special, opening = self._special, self.draft.opening if first else []
        if special.keys().isdisjoint(tokens):
            return [*opening, *self._run(tokens, first)]
        told, run = list(opening), []
        for token in tokens:
            if token not in special:
                run.append(token)
                continue
            told += self._run(run, first and told == opening)
            run = []
            known = special[token]
            if known is not None and not (first and told == opening == [known]):  # a text begins once
                told.append(known)
        return told + self._run(run, first and told == opening)

    def _run(self, tokens: Sequence[int], first: bool) -> list[int]:
        """Tokens of the target without special ones, in the draft's."""
        said = self.target.say(tokens)
        if first and self.target.adds_space:
            said = said.removeprefix(b" ")
        return self.draft.spell(said, first)

    def to_target(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What was drafted in the target's tokens, up to its last whole character.

        Args:
            before: the last tokens of the target's text; they are written again with the draft, since a tokenizer
                looks at what stands before a word.
            drafted: tokens of the draft.
        """
        last = max((i for i, token in enumerate(before) if token in self._special), default=-1)
        known = self.target.say(before[last + 1 :])
        whole = complete(known + self.draft.say(drafted))
        said = whole[len(known) :]
        if not said:
            return []
        tokens, place = self.target.spell(whole), 0
        for number, token in enumerate(tokens):
            if place >= len(known):
                if place == len(known) and self.target.say(tokens[:number]) == known:
                    return self._sayable(tokens[number:])
                break
            place += len(self.target.pieces[token])
        # the target has ended a token where it would not have, had it known what follows
        return self._sayable(self.target.spell(said))

    def _sayable(self, tokens: list[int]) -> list[int]:
        """Tokens of the target up to the first that stands for no text, such as the one for unknown words."""
        return list(itertools.takewhile(self.target.pieces.__getitem__, tokens))

    def parted(self, tokens: Sequence[int], place: int) -> bool:
        """Whether a word, a run of spaces or one of signs ends before this place of a text of the target.

        There tokenizers part a text: what follows has no say in how that before it is written.
        """
        if tokens[place - 1] in self._special or tokens[place] in self._special:
            return True
        before, after = tokens[max(place - _BYTES, 0) : place], tokens[place : place + _BYTES]
        left, right = (self.target.say(side).decode("utf-8", "surrogateescape") for side in (before, after))
        kinds = _kind(left[-1:]), _kind(right[:1])
        return "" not in kinds and kinds[0] != kinds[1]


def _kind(character: str) -> str:
    """What runs a character belongs to; none for a byte of one."""
    if not character or "\udc80" <= character <= "\udcff":
        return ""
    return "space" if character.isspace() else "word" if character.isalnum() else "signs"
