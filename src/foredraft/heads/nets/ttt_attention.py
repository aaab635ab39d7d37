"""Training-time test (EAGLE-3, section 3.2): the draft is unrolled over its own states during training.

At step k row j reads the token t_{j+k+1} and its own state of step k - 1. As in drafting, it attends to the rows up to
j of step 0, and of each later step to its own row only. So no L x kL mask is needed: each later step adds one score per
row to those of step 0, and may use a sample of the rows.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Unrolled:
    """Attention of one unrolled draft: ``first`` for step 0, ``later`` for the steps after it.

    Args:
        rows: [B, M] the rows used in later steps.
        window: how many positions a row attends to, itself included; None for all.
    """

    def __init__(self, rows: Int[Tensor, "B M"], window: int | None = None) -> None:
        self._rows = rows
        self._window = window
        self._base: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def first(
        self,
        layer: int,
        query: Float[Tensor, "B h N E"],
        key: Float[Tensor, "B g N E"],
        value: Float[Tensor, "B g N E"],
    ) -> Float[Tensor, "B N h E"]:
        """Causal attention over all rows; keeps keys and values for the later steps."""
        self._base[layer], self._own[layer] = (key, value), []
        key, value = _repeated(key, query), _repeated(value, query)
        if self._window is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        place = torch.arange(query.shape[2], device=query.device)
        mask = self._visible(place[:, None], place, 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    def later(
        self,
        layer: int,
        query: Float[Tensor, "B h M E"],
        key: Float[Tensor, "B g M E"],
        value: Float[Tensor, "B g M E"],
    ) -> Float[Tensor, "B M h E"]:
        """The sampled rows at the next step: attend to step 0 up to the row, and to the row's own later keys."""
        self._own[layer].append((key, value))
        step = len(self._own[layer])
        keys, values = (_repeated(each, query) for each in self._base[layer])
        scale = query.shape[-1] ** -0.5
        scores = (query * scale) @ keys.transpose(2, 3)
        place = torch.arange(keys.shape[2], device=query.device)
        scores = scores.masked_fill(~self._visible(self._rows[:, None, :, None], place, step), -torch.inf)
        own = [(_repeated(k, query), _repeated(v, query)) for k, v in self._own[layer]]
        added = torch.stack([(query * scale * k).sum(-1) for k, _ in own], dim=-1)
        if self._window is not None:
            ages = step - torch.arange(1, step + 1, device=query.device)
            added = added.masked_fill(ages >= self._window, -torch.inf)
        weights = torch.cat([scores, added], dim=-1).float().softmax(-1).to(values.dtype)
        output = weights[..., : keys.shape[2]] @ values
        for i, (_, v) in enumerate(own):
            output = output + weights[..., keys.shape[2] + i, None] * v
        return output.transpose(1, 2)

    def _visible(self, rows: Tensor, place: Tensor, step: int) -> Tensor:
        """Mask of the step-0 keys that a row attends to at a step; the row's position is row + step."""
        visible = place <= rows
        return visible if self._window is None else visible & (rows + step - place < self._window)


def _repeated(grouped: Tensor, query: Tensor) -> Tensor:
    """Keys or values of G groups, repeated for each query head."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], dim=1).to(query.dtype)


def sample_rows(rows: int, batch: int, share: float, generator: torch.Generator) -> Int[Tensor, "B M"]:
    """A random fraction of the row indices for each sample of the batch, sorted."""
    count = max(1, round(rows * share))
    order = torch.rand(batch, rows, generator=generator, device=generator.device).argsort(-1)
    return order[:, :count].sort(-1).values


def take(x: Tensor, rows: Int[Tensor, "B M"]) -> Tensor:
    """Select rows of [B, T, ...] by index: [B, M, ...]."""
    index = rows.view(*rows.shape, *[1] * (x.ndim - 2)).expand(*rows.shape, *x.shape[2:])
    return x.gather(1, index)
