"""Learning what to keep: hard-concrete masks under Lagrange terms (Sheared-LLaMA, arXiv:2310.06694)."""

import copy
from typing import Any, final

from torch import Tensor, nn

from foredraft.heads.nets.pruning_masks import Lagrange, Masks, PruningMasks, Sizes
from foredraft.heads.nets.target_parts import FINAL
from foredraft.model.head_parts import parts_of
from foredraft.model.pruning import Masking, sizes_of
from foredraft.model.taps import body
from foredraft.train.drafts.distil import Teacher
from foredraft.train.recipe import Lesson, Recipe

_PACE = 100.0  # multipliers learn so much faster than gates: what they push against is a loss of any size


@final
class Masked(nn.Module):
    """Gates around a model, which learns with them or stays as it is.

    Args:
        model: it may be the target's own.
        tuned: the weights learn too, those of a copy.
    """

    def __init__(self, model: Any, wanted: Sizes, tuned: bool) -> None:
        super().__init__()
        self.gates = PruningMasks(sizes_of(model))
        self.lagrange = Lagrange(sizes_of(model), wanted)
        self.wanted = wanted
        if tuned:
            self.model = copy.deepcopy(model).requires_grad_(True)
        self._whole = (self.model if tuned else model.requires_grad_(False),)  # in a tuple, so that it is no submodule

    @property
    def whole(self) -> Any:
        """The model before anything is cut."""
        return self._whole[0]

    def states(self, tokens: Tensor, masks: Masks) -> Tensor:
        """What the output layer reads [B, T, H] under these masks."""
        model = self.whole
        model.eval()
        masking = Masking(model, masks)
        try:
            return body(model)(input_ids=tokens, use_cache=False)[0]
        finally:
            masking.undo()


@final
class MaskRecipe(Recipe[Masked]):
    """Distillation through masks that are drawn at each step; the wanted size comes due along a straight line.

    Args:
        rise: the share of the steps after which all of it is due.
        tune: the weights' learning rate as a share of the gates'.
    """

    def __init__(self, net: Masked, teacher: Teacher, rise: float, tune: float) -> None:
        super().__init__()
        self.taps = (FINAL,)
        self.net = net
        self.paces = {"lagrange": _PACE, "model": tune}
        self._teacher = teacher
        self._rise = rise
        self._head = parts_of(net.whole).head

    def forward(self, lesson: Lesson) -> dict[str, Tensor]:
        gates = self.net.gates
        masks = gates.sample(lesson.chance()) if self.training else self._final(lesson.tokens)
        said = self._teacher(lesson, self.net.states(lesson.tokens, masks), self._head)
        shares = gates.shares()
        price = self.net.lagrange.penalty(shares, min(1.0, lesson.done / self._rise))
        opened = {f"open_{name}": share.detach().mean() for name, share in shares._asdict().items()}
        return {**said, "loss": said["loss"] + price, "distil": said["loss"].detach(), **opened}

    def _final(self, tokens: Tensor) -> Masks:
        """The masks as they would be cut."""
        masks = self.net.gates.kept(self.net.wanted).masks(sizes_of(self.net.whole))
        return Masks(*(mask.to(tokens.device) for mask in masks))
