"""Training-time test (EAGLE-3, section 3.2): the draft is unrolled over its own states while it learns.

At step k row j reads the token t_{j+k+1} and its own state of step k - 1, and sees, as it will when it drafts, the
first k rows of other drafts never: of step 0 all rows up to j, of each later step its own row only. So there is no
mask of L x kL: a later step adds one score a row to those of step 0, and it may look at a sample of rows.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


class Unrolled:
    """Attention for the steps of one unrolling: ``first`` for step 0, ``later`` for the steps after it.

    Args:
        rows: [B, M] the rows that later steps go on with.
        window: a row sees so many positions, itself included; None for all.
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
        """Causal attention over all rows; keys and values are kept for the later steps."""
        self._base[layer], self._own[layer] = (key, value), []
        key, value = _repeated(key, query), _repeated(value, query)
        if self._window is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        place = torch.arange(query.shape[2], device=query.device)
        mask = self._sees(place[:, None], place, 0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

    def later(
        self,
        layer: int,
        query: Float[Tensor, "B h M E"],
        key: Float[Tensor, "B g M E"],
        value: Float[Tensor, "B g M E"],
    ) -> Float[Tensor, "B M h E"]:
        """The sampled rows at the next step: what step 0 left up to each row, and each row's own later keys."""
        self._own[layer].append((key, value))
        step = len(self._own[layer])
        keys, values = (_repeated(each, query) for each in self._base[layer])
        scale = query.shape[-1] ** -0.5
        scores = (query * scale) @ keys.transpose(2, 3)
        place = torch.arange(keys.shape[2], device=query.device)
        scores = scores.masked_fill(~self._sees(self._rows[:, None, :, None], place, step), -torch.inf)
        own = [(_repeated(k, query), _repeated(v, query)) for k, v in self._own[layer]]
        added = torch.stack([(query * scale * k).sum(-1) for k, _ in own], dim=-1)
        if self._window is not None:
            ages = step - torch.arange(1, step + 1, device=query.device)
            added = added.masked_fill(ages >= self._window, -torch.inf)
        weights = torch.cat([scores, added], dim=-1).float().softmax(-1).to(values.dtype)
        mixed = weights[..., : keys.shape[2]] @ values
        for i, (_, v) in enumerate(own):
            mixed = mixed + weights[..., keys.shape[2] + i, None] * v
        return mixed.transpose(1, 2)

    def _sees(self, rows: Tensor, place: Tensor, step: int) -> Tensor:
        """Which keys of step 0 a row sees at a step; its position is row + step."""
        seen = place <= rows
        return seen if self._window is None else seen & (rows + step - place < self._window)


def _repeated(grouped: Tensor, query: Tensor) -> Tensor:
    """Keys or values of G groups as one for each query head."""
    return grouped.repeat_interleave(query.shape[1] // grouped.shape[1], dim=1).to(query.dtype)


def sample_rows(rows: int, batch: int, share: float, chance: torch.Generator) -> Int[Tensor, "B M"]:
    """A share of the rows of each text, different ones for each, in order."""
    count = max(1, round(rows * share))
    order = torch.rand(batch, rows, generator=chance, device=chance.device).argsort(-1)
    return order[:, :count].sort(-1).values


def take(x: Tensor, rows: Int[Tensor, "B M"]) -> Tensor:
    """Rows of [B, T, ...] by index: [B, M, ...]."""
    index = rows.view(*rows.shape, *[1] * (x.ndim - 2)).expand(*rows.shape, *x.shape[2:])
    return x.gather(1, index)
