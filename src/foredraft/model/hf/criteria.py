"""transformers' stopping criteria, and what a ``generate`` call has prepared."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import stopping_criteria as stock

from foredraft.model.hf.processors import Prepared
from foredraft.model.text.tokenizer import Tokenizer

_OF_THE_ENGINE = (stock.MaxLengthCriteria, stock.EosTokenCriteria)
_OF_A_ROW = (stock.MaxTimeCriteria, stock.StopStringCriteria)


def prepared(
    config: GenerationConfig,
    input_ids: Int[Tensor, "R T"],
    mask: Tensor | None,
    criteria: Iterable[Any],
    vocab_size: int,
) -> Prepared:
    """The call with this configuration and these inputs.

    Args:
        mask: 0 at tokens that the model does not see; None if it sees all of them.
    """
    starts: tuple[int, ...] | None = (0,) * len(input_ids)
    if mask is not None:
        seen = mask != 0
        starts = tuple(seen.int().argmax(1).tolist()) if bool((seen.int().diff(dim=1) >= 0).all()) else None
    ends = frozenset(token for each in criteria if _is(each, stock.EosTokenCriteria) for token in _ids(each))
    return Prepared(input_ids.shape[1], vocab_size, starts, ends, bool(config.do_sample))


def new_tokens(criteria: Iterable[Any], width: int) -> int:
    """The most new tokens after ``width`` tokens."""
    return max(1, min(each.max_length for each in criteria if _is(each, stock.MaxLengthCriteria)) - width)


def are_of_rows(criteria: Sequence[Any], rows: int) -> bool:
    """Whether the criteria can be asked for each row alone, after any step: those of transformers, where rows that have
    ended are padded. Without end-of-sequence ids, transformers continues them until all rows have ended."""
    others = [each for each in criteria if not any(_is(each, kind) for kind in _OF_THE_ENGINE)]
    ends = any(_is(each, stock.EosTokenCriteria) for each in criteria)
    return not others or ((rows == 1 or ends) and all(any(_is(each, kind) for kind in _OF_A_ROW) for each in others))


def stop_string_criterion(strings: Sequence[str], tokenizer: Tokenizer) -> Any:
    """transformers' criterion for stop strings."""
    return stock.StopStringCriteria(tokenizer=tokenizer.inner, stop_strings=list(strings))


def _is(criterion: Any, kind: type) -> bool:
    return criterion.__class__ is kind  # a derived class may do anything


def _ids(criterion: Any) -> list[int]:
    return criterion.eos_token_id.tolist()
