"""Two tokenizers: one text in the tokens of both."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from foredraft.model.spelling import Spelling, complete
from foredraft.model.tokenizer import Tokenizer


class Bridge:
    """From the target's tokens to a draft's and back. Texts are the same on both sides; tokens need not be.

    Special tokens are no text: they are never drafted. In a text that the draft reads, one that it has too, by the
    same name, stands for itself, and any other is left out.

    ``shared[t]`` is the draft's token that says the same as the target's token t, -1 where there is none; of several
    that say the same, one counts. ``silent``: tokens of the draft that say nothing.

    Args:
        target, draft: their tokenizers.
        target_size, draft_size: V and v, the tokens of their logits.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_size: int, draft_size: int) -> None:
        self._target, self._draft = Spelling(target, target_size), Spelling(draft, draft_size)
        by_name = {name: index for index, name in self._draft.names.items() if index < draft_size}
        self._special = {index: by_name.get(name) for index, name in self._target.names.items()}
        self.shared: Int[Tensor, V] = torch.full((target_size,), -1)
        for said, index in self._target.index.items():
            self.shared[index] = self._draft.index.get(said, -1)
        self.silent: Bool[Tensor, v] = torch.tensor([not said for said in self._draft.pieces[:draft_size]])

    def to_draft(self, tokens: Sequence[int], first: bool = True) -> list[int]:
        """A text in the draft's tokens.

        Args:
            tokens: of the target.
            first: a text begins with them; otherwise they stand within one.
        """
        special = self._special
        if not first and special.keys().isdisjoint(tokens):
            return self._draft.spell(self._target.bytes(tokens))
        told = list(self._draft.opening) if first else []
        run: list[int] = []
        for token in tokens:
            if token not in special:
                run.append(token)
                continue
            told += self._run(run, first and not told[len(self._draft.opening) :])
            run = []
            known = special[token]
            if known is not None and told != [known]:  # a text begins once
                told.append(known)
        return told + self._run(run, first and not told[len(self._draft.opening) :])

    def _run(self, tokens: Sequence[int], first: bool) -> list[int]:
        """Tokens of the target without special ones, in the draft's."""
        said = self._target.bytes(tokens)
        if first and self._target.adds_space:
            said = said.removeprefix(b" ")
        return self._draft.spell(said, first)

    def to_target(self, before: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """What was drafted in the target's tokens, up to its last whole character.

        Args:
            before: the last tokens of the target's text; they are written again with the draft, since a tokenizer
                looks at what stands before a word.
            drafted: tokens of the draft.
        """
        last = max((i for i, token in enumerate(before) if token in self._special), default=-1)
        known = self._target.bytes(before[last + 1 :])
        whole = complete(known + self._draft.bytes(drafted))
        said = whole[len(known) :]
        if not said:
            return []
        tokens, place = self._target.spell(whole), 0
        for number, token in enumerate(tokens):
            if place >= len(known):
                if place == len(known) and self._target.bytes(tokens[:number]) == known:
                    return tokens[number:]
                break
            place += len(self._target.pieces[token])
        return self._target.spell(said)  # the target has ended a token where it would not have if it had known more

    def opens_word(self, token: int) -> bool:
        """Whether a token of the target begins with a space or a line: tokenizers part a text there."""
        return self._target.pieces[token][:1].isspace()

    def to_target_logits(self, logits: Float[Tensor, "B N v"]) -> Float[Tensor, "B N V"]:
        """The draft's logits of the shared tokens, in the target's vocabulary; no other token is ever said."""
        shared = self.shared
        least = torch.finfo(logits.dtype).min
        return logits.index_select(-1, shared.clamp(min=0)).masked_fill(shared < 0, least)
