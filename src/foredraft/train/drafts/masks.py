"""Learned pruning: hard-concrete masks with Lagrange multipliers (Sheared-LLaMA, arXiv:2310.06694)."""

import copy
from typing import Any, final

from torch import Tensor, nn

from foredraft.heads.nets.pruning_masks import Lagrange, Masks, PruningMasks, Sizes
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.hf.head_parts import parts_of
from foredraft.model.hf.pruning import Masking, sizes_of
from foredraft.model.hf.taps import body
from foredraft.train.drafts.distil import Teacher
from foredraft.train.recipe import Recipe, TrainBatch

_PACE = 100.0  # learning rate factor of the multipliers, which must match a loss of any scale


@final
class Masked(nn.Module):
    """Pruning masks for a model, frozen or trained with them.

    Args:
        model: may be the target's own.
        tuned: train the weights too, in a copy.
    """

    def __init__(self, model: Any, wanted: Sizes, tuned: bool) -> None:
        super().__init__()
        self.gates = PruningMasks(sizes_of(model))
        self.lagrange = Lagrange(sizes_of(model), wanted)
        self.wanted = wanted
        if tuned:
            self.model = copy.deepcopy(model).requires_grad_(True)
        self._whole = (self.model if tuned else model.requires_grad_(False),)  # a tuple, so that it is not a submodule

    @property
    def whole(self) -> Any:
        """The unpruned model."""
        return self._whole[0]

    def states(self, tokens: Tensor, masks: Masks) -> Tensor:
        """Input of the output layer [B, T, H] under these masks."""
        model = self.whole
        model.eval()
        with Masking(model, masks):
            return body(model)(input_ids=tokens, use_cache=False)[0]


@final
class MaskRecipe(Recipe[Masked]):
    """Distillation through masks drawn at each step, with a linear schedule to the target size.

    Args:
        rise: fraction of the steps after which the full reduction is required.
        tune: the weights' learning rate as a fraction of the masks'.
    """

    def __init__(self, net: Masked, teacher: Teacher, rise: float, tune: float) -> None:
        super().__init__()
        self.taps = (FINAL,)
        self.net = net
        self.paces = {"lagrange": _PACE, "model": tune}
        self._teacher = teacher
        self._rise = rise
        self._head = parts_of(net.whole).head

    def forward(self, batch: TrainBatch) -> dict[str, Tensor]:
        gates = self.net.gates
        masks = gates.sample(batch.rng()) if self.training else self._final(batch.tokens)
        metrics = self._teacher(batch, self.net.states(batch.tokens, masks), self._head)
        shares = gates.shares()
        price = self.net.lagrange.penalty(shares, min(1.0, batch.done / self._rise))
        opened = {f"open_{name}": share.detach().mean() for name, share in shares._asdict().items()}
        return {**metrics, "loss": metrics["loss"] + price, "distil": metrics["loss"].detach(), **opened}

    def _final(self, tokens: Tensor) -> Masks:
        """The binary masks of the final cut."""
        masks = self.net.gates.kept(self.net.wanted).masks(sizes_of(self.net.whole))
        return Masks(*(mask.to(tokens.device) for mask in masks))
