"""Capacity: how many requests fit on a device, and how many devices a load needs."""

from dataclasses import dataclass, replace
from math import ceil

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.model.kv.cache import bucket
from foredraft.model.loading.sizes import ModelSizes, model_sizes
from foredraft.model.memory import format_bytes
from foredraft.model.prefill import CATCH_UP

HEADROOM = 0.1
"""Share of a device's memory that is left to activations, kernels and fragments."""
_LAW_COPIES = 10
"""Tensors of the size of a step's logits in float32 that sampling with top-p holds at once: logits, law, sorted values
with their indices, masks."""
_HEAD_VOCABULARY = 32_000
"""Vocabulary of published EAGLE-3 heads; that of the target if it is smaller."""
_HEADS = ("eagle1", "eagle2", "eagle3")
_WITHOUT_WEIGHTS = ("none", "prompt_lookup", "max_gram")


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for: requests at once, and tokens of each (prompt and output).

    ``draft_nodes``: the most nodes that a drafter proposes in a step.
    """

    concurrency: int
    context: int
    draft_nodes: int = 60

    def __post_init__(self) -> None:
        check_bounds(self, least={"concurrency": 1, "context": 1, "draft_nodes": 0})


@dataclass(frozen=True, slots=True)
class DrafterSizes:
    """Bytes of a drafter's weights, and of what it caches for one token."""

    weights: int = 0
    kv_token: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """A deployment: ``replicas`` of ``tensor_parallel`` devices each.

    ``weights``, ``row``, ``workspace``: bytes on one device: all weights; one row with its share of the workspace
    excluded; a row's logits and law in a step. ``rows``: requests that a replica can run at once. ``step_seconds``: the
    least time of a step with these rows, bytes read over bandwidth; None without a bandwidth.
    """

    tensor_parallel: int
    weights: int
    row: int
    workspace: int
    rows: int
    replicas: int
    step_seconds: float | None = None

    @property
    def devices(self) -> int:
        return self.replicas * self.tensor_parallel


def drafter_sizes(spec: str, target: ModelSizes, dtype: str = "auto") -> DrafterSizes:
    """Sizes of a drafter: a method without weights, an EAGLE head for this target, or ``draft_model:CONFIG``.

    A head is one decoder layer of the target, a projection of three hidden states and an output layer for 32,000
    tokens, as published EAGLE-3 heads are.

    Raises:
        OptionError: another method.
        ModelError: the draft model's config cannot be read.
    """
    name, _, path = spec.partition(":")
    if name == "draft_model" and path:
        draft = model_sizes(path, dtype)
        return DrafterSizes(draft.weights, draft.kv_token)
    if name in _HEADS:
        matrices = target.hidden * (3 * target.hidden + min(_HEAD_VOCABULARY, target.vocabulary))
        return DrafterSizes(target.layer + matrices * target.bytes_per_value, target.kv_token // target.layers)
    if name in _WITHOUT_WEIGHTS:
        return DrafterSizes()
    known = ", ".join((*_WITHOUT_WEIGHTS, *_HEADS, "draft_model:CONFIG"))
    raise OptionError(f"The size of the drafter {spec!r} is unknown. Known: {known}.")


def capacity(
    target: ModelSizes,
    drafter: DrafterSizes,
    load: Load,
    memory: int,
    *,
    tensor_parallel: int = 1,
    bandwidth: float | None = None,
) -> Capacity:
    """The deployment for a load, with replicas of ``tensor_parallel`` devices.

    The target is shared out over the devices of a replica; drafters and logits are not. All rows of a replica have the
    length of the longest, as in the engine.

    Args:
        memory: bytes of one device; ``HEADROOM`` of it stays free.
        bandwidth: bytes that a device reads a second.

    Raises:
        OptionError: the context is longer than the model's, the heads cannot be shared out, or not even one row fits.
    """
    if target.context is not None and load.context > target.context:
        raise OptionError(f"The model's context has {target.context} tokens, fewer than {load.context}.")
    if tensor_parallel < 1 or target.kv_heads % tensor_parallel:
        raise OptionError(f"{target.kv_heads} key-value heads cannot be shared out to {tensor_parallel} devices.")
    slots = bucket(load.context + load.draft_nodes + CATCH_UP)
    weights = ceil(target.weights / tensor_parallel) + drafter.weights
    row = slots * (target.kv_token // tensor_parallel + drafter.kv_token)
    workspace = (1 + load.draft_nodes) * target.vocabulary * 4 * _LAW_COPIES
    free = int(memory * (1 - HEADROOM)) - weights
    rows = min(free // (row + workspace), load.concurrency)
    if rows < 1:
        raise OptionError(
            f"Not even one request fits: weights take {format_bytes(weights)} of a device, a row of {slots} tokens "
            f"{format_bytes(row + workspace)}, and {format_bytes(int(memory * (1 - HEADROOM)))} can be used."
        )
    plan = Capacity(tensor_parallel, weights, row, workspace, rows, ceil(load.concurrency / rows))
    if bandwidth is None:
        return plan
    cached = load.context * target.kv_token // tensor_parallel
    return replace(plan, step_seconds=(ceil(target.weights / tensor_parallel) + rows * cached) / bandwidth)


def deployments(
    target: ModelSizes, drafter: DrafterSizes, load: Load, memory: int, *, bandwidth: float | None = None
) -> list[Capacity]:
    """The deployments with 1, 2, 4 or 8 devices a replica that hold at least one row, the one with the fewest devices
    first.

    Raises:
        OptionError: none holds one; the message is that of the largest replica.
    """
    found, error = [], None
    for size in (1, 2, 4, 8):
        if target.kv_heads % size:
            break
        try:
            found.append(capacity(target, drafter, load, memory, tensor_parallel=size, bandwidth=bandwidth))
        except OptionError as unfit:
            error = unfit
    if not found and error is not None:
        raise error
    return sorted(found, key=lambda plan: (plan.devices, plan.tensor_parallel))
