"""GLIDE's recipe: the target's law at each token, of which the draft sees the target's keys up to a block's start."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from foredraft.core.errors import OptionError
from foredraft.core.options import check_bounds
from foredraft.heads.nets.glide import Glide
from foredraft.heads.nets.ttt_attention import sample_rows, take
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.partial.skipping import LastLayerOnly
from foredraft.train.losses import agree, chain_metrics, loss_of, weighted_mean
from foredraft.train.recipe import Recipe, TrainBatch, recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of GLIDE training (arXiv:2402.02082).

    block: tokens of a block of the attention mask: the longest draft for which the head is trained.
    loss: the loss on laws; see ``losses``.
    share: fraction of the positions in each step; an unbiased estimate that saves time.
    recompute: recompute logits in the backward pass instead of storing them.
    """

    block: int = 6
    loss: str = "ce"
    share: float = 0.25
    recompute: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, least={"block": 1}, above={"share": 0}, most={"share": 1})

    def check_length(self, length: int, heads: int) -> None:
        """Refuse samples that are shorter than a block."""
        if length < self.block:
            raise OptionError(f"Samples of {length} tokens are too short for blocks of {self.block}: raise --length.")


@final
class GlideRecipe(Recipe[Glide]):
    """Each sample is cut into blocks from a random offset on. As in drafting, where the first token of a block is the
    root, a token sees the target's keys of the tokens before its block, and the draft's own of all up to itself.

    Args:
        target: the frozen target; its last layer runs again, on the states before it.
    """

    def __init__(self, net: Glide, options: Options, target: CausalLM) -> None:
        super().__init__()
        self.net = net
        self.taps = (net.config.layer,)
        self._options = options
        self._loss = loss_of(options.loss)
        self._last = LastLayerOnly(target)

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        options = self._options
        size, length = batch.tokens.shape
        rng, device = batch.rng(), batch.tokens.device
        offsets = torch.randint(options.block, (size, 1), generator=rng, device=device)
        rows = sample_rows(length, size, options.share, rng)
        ages = (rows + offsets) % options.block  # tokens since the start of the block
        ends = (rows - ages).clamp(min=0)
        last = self._last(batch.tokens, batch.hidden[self.taps[0]])
        place = torch.arange(length, device=device)
        causal, verified = place <= rows[..., None], place < ends[..., None]

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return masked(take(query.transpose(1, 2), rows).transpose(1, 2), key, value, causal)

        def attend_target(query: Tensor) -> Tensor:
            return masked(query, last.keys, last.values, verified)

        states = self.net(batch.tokens, place.expand(size, -1), attend, attend_target, rows)
        labels, weights = take(last.final, rows), take(batch.weights, rows)
        loss, *rates = recompute(options.recompute, self._loss_and_hits, states, labels, weights, ages)
        return {"loss": loss, **chain_metrics(rates)}

    def _loss_and_hits(
        self, states: Tensor, labels: Tensor, weights: Tensor, ages: Int[Tensor, "B M"]
    ) -> tuple[Tensor, ...]:
        """The loss, and the share of tokens of each age whose argmax is the target's."""
        with torch.no_grad():
            p = self.net.target.head(labels).float().softmax(-1)
        logits = self.net.logits(states).float()
        loss = weighted_mean(self._loss(p, logits.log_softmax(-1)), weights)
        hits = agree(logits, p).float()
        return loss, *(weighted_mean(hits, weights * (ages == age)).detach() for age in range(self._options.block))


def masked(query: Tensor, key: Tensor, value: Tensor, seen: Bool[Tensor, "B M T"]) -> Tensor:
    """Attention of M queries [B, heads, M, E] to the keys that they see: [B, M, heads, E]; zeros where there are none.

    Key and value are [B, groups, T, E].
    """
    some = seen.any(-1, keepdim=True)
    key, value = key.to(query.dtype), value.to(query.dtype)
    mask = (seen | ~some)[:, None]
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return output.transpose(1, 2) * some[..., None]
