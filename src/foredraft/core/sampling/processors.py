"""A user's logits processors: called on the paths of a draft tree, and kept from harming other requests."""

from collections import defaultdict
from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.errors import OptionError, kind_of
from foredraft.core.sampling.history import Paths, TreePaths
from foredraft.core.sampling.params import Processor


class RequestProcessors:
    """The processors of one request as one. The first error in them is kept and ends the request: they are not called
    again, and scores stay as they are.

    Attributes:
        error: the one that was kept.
    """

    def __init__(self, processors: Sequence[Processor]) -> None:
        self._processors = tuple(processors)
        self.error: Exception | None = None

    def __call__(self, ids: Int[Tensor, "M L"], scores: Float[Tensor, "M V"]) -> Float[Tensor, "M V"]:
        """The processed scores."""
        if self.error is None:
            try:
                return _processed(self._processors, ids, scores)
            except Exception as error:
                self.error = error
        return scores


def run_processors(
    scores: Float[Tensor, "B M V"], paths: Paths, processors: Sequence[tuple[Processor, ...]]
) -> Float[Tensor, "B M V"]:
    """Call each row's processors, once per depth: nodes of one depth have paths of equal length.

    Processors see several continuations of one request, so they must depend on their arguments only. This is the only
    stage that reads from the device and cannot be captured in a graph.
    """
    node_paths = TreePaths.of(paths, scores.shape[1])
    tokens = node_paths.tokens()
    sizes = node_paths.sizes.tolist()
    valid = paths.tree.valid[:, paths.start : paths.start + scores.shape[1]].tolist()
    scores = scores.clone()
    for row, chain in enumerate(processors):
        groups: dict[int, list[int]] = defaultdict(list)
        for node, size in enumerate(sizes[row] if chain else []):
            if valid[row][node]:
                groups[size].append(node)
        for size, nodes in groups.items():
            scores[row, nodes] = _processed(chain, tokens[row, nodes, :size], scores[row, nodes]).to(scores.dtype)
    return scores


def _processed(
    chain: Sequence[Processor], ids: Int[Tensor, "M L"], scores: Float[Tensor, "M V"]
) -> Float[Tensor, "M V"]:
    """The scores after one processor and the next."""
    for processor in chain:
        given = scores
        scores = processor(ids, given)
        check_scores(processor, scores, given)
    return scores


def check_scores(processor: Processor, found: object, scores: Float[Tensor, "M V"]) -> None:
    """Raise an ``OptionError`` unless a processor has returned scores like those that it was given."""
    if isinstance(found, Tensor) and found.shape == scores.shape and not found.is_complex():
        return
    given = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
    name = getattr(processor, "__name__", processor.__class__.__name__)
    raise OptionError(
        f"The logits processor {name} returned {'nothing' if found is None else given}; it must return scores of the "
        f"shape that it was given, here {tuple(scores.shape)}."
    )
