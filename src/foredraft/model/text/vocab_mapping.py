"""Mapping between the vocabularies of target and draft."""

import itertools
from collections.abc import Sequence

import torch

from foredraft.model.text.byte_vocab import ByteVocab, complete
from foredraft.model.text.tokenizer import Tokenizer

_BYTES = 4
"""Most bytes per character, and so most tokens per character."""


class VocabMapping:
    """Converts the target's tokens to a draft's and back, through their bytes.

    Special tokens have no bytes and are never drafted. In the draft's input, a special token that both have by the
    same name is kept; others are dropped.

    ``shared[t]`` [V]: the draft's token with the same bytes as the target's token t, -1 if there is none; of several
    one is used. ``silent`` [v]: whether a draft token has no bytes, such as special tokens.

    Args:
        target, draft: their tokenizers.
        target_size, draft_size: V and v, the widths of their logits.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        self.target, self.draft = ByteVocab(target, target_size), ByteVocab(draft, draft_size)
        by_name = {name: index for index, name in self.draft.names.items() if index < draft_size}
        self._special = {index: by_name.get(name) for index, name in self.target.names.items()}
        self.shared = torch.full((target_size,), -1)
        for piece, index in self.target.index.items():
            self.shared[index] = self.draft.index.get(piece, -1)
        self.silent = torch.tensor([not piece for piece in self.draft.pieces[:draft_size]])

    def to_draft(self, tokens: Sequence[int], first: bool = True) -> list[int]:
        """Convert target tokens to draft tokens.

        Args:
            tokens: of the target.
            first: they start a prompt; otherwise they continue one.
        """
        special, opening = self._special, self.draft.opening if first else []
        if special.keys().isdisjoint(tokens):
            return [*opening, *self._run(tokens, first)]
        converted, run = list(opening), []
        for token in tokens:
            if token not in special:
                run.append(token)
                continue
            converted += self._run(run, first and converted == opening)
            run = []
            known = special[token]
            if known is not None and not (first and converted == opening == [known]):  # do not repeat the opening
                converted.append(known)
        return converted + self._run(run, first and converted == opening)

    def _run(self, tokens: Sequence[int], first: bool) -> list[int]:
        """Convert target tokens without special tokens to draft tokens."""
        raw = self.target.decode(tokens)
        if first and self.target.adds_space:
            raw = raw.removeprefix(b" ")
        return self.draft.encode(raw, first)

    def to_target(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Convert drafted tokens to target tokens, up to the last whole character.

        Args:
            before: the last committed target tokens; they are encoded again with the draft, since tokenization depends
                on the preceding characters.
            drafted: draft tokens.
        """
        last = max((i for i, token in enumerate(before) if token in self._special), default=-1)
        known = self.target.decode(before[last + 1 :])
        whole = complete(known + self.draft.decode(drafted))
        new = whole[len(known) :]
        if not new:
            return []
        tokens, place = self.target.encode(whole), 0
        for number, token in enumerate(tokens):
            if place >= len(known):
                if place == len(known) and self.target.decode(tokens[:number]) == known:
                    return self._with_bytes(tokens[number:])
                break
            place += len(self.target.pieces[token])
        # encoded together, a token spans the boundary, so encode the new bytes alone
        return self._with_bytes(self.target.encode(new))

    def _with_bytes(self, tokens: list[int]) -> list[int]:
        """Target tokens up to the first without bytes, such as the unknown token."""
        return list(itertools.takewhile(self.target.pieces.__getitem__, tokens))

    def is_boundary(self, tokens: Sequence[int], place: int) -> bool:
        """Whether a word, a run of spaces or a run of punctuation ends before index ``place`` of target tokens.

        Tokenizers split at these boundaries, so the tokens before them do not depend on what follows.
        """
        if tokens[place - 1] in self._special or tokens[place] in self._special:
            return True
        before, after = tokens[max(place - _BYTES, 0) : place], tokens[place : place + _BYTES]
        left, right = (self.target.decode(side).decode("utf-8", "surrogateescape") for side in (before, after))
        kinds = _kind(left[-1:]), _kind(right[:1])
        return "" not in kinds and kinds[0] != kinds[1]


def _kind(character: str) -> str:
    """The character's class; empty for a byte of an incomplete character."""
    if not character or "\udc80" <= character <= "\udcff":
        return ""
    return "space" if character.isspace() else "word" if character.isalnum() else "signs"
