"""The table of head recipes: how to create, train and validate each kind of head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foredraft.compose.spec import find
from foredraft.core.drafter import Drafter
from foredraft.heads.glide_model import GlideLM
from foredraft.heads.nets.eagle import Eagle, Eagle3
from foredraft.heads.nets.glide import Glide
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.base import TargetModel
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.cache import SlotCache
from foredraft.train.heads import eagle, eagle3, glide, init as start, medusa2, medusa_hydra as heads
from foredraft.train.options import HeadShape
from foredraft.train.recipe import Recipe

Make = Callable[[TargetModel, HeadShape, Tensor | None], nn.Module]


@dataclass(frozen=True, slots=True)
class RecipeKind:
    """One entry of the table.

    make: creates a net for a target; the tensor has the ids of a reduced vocabulary.
    net: the class of the net.
    recipe, options: the classes of the recipe and its options.
    method, chain: the drafter for validation, and its options for a chain.
    reduces: the net may have a smaller vocabulary than the target.
    reads_keys: the net reads the target's keys and values.
    join: if the target is trained too, combines head and target into the recipe's net.
    """

    make: Make
    net: type[nn.Module]
    recipe: Callable[..., Recipe[Any]]
    options: type
    method: str
    chain: dict[str, Any]
    reduces: bool = False
    reads_keys: bool = False
    join: Callable[[Any, TargetModel], nn.Module] | None = None

    def trained(self, net: nn.Module, target: CausalLM, options: Any) -> Recipe[Any]:
        """The recipe of this net."""
        if self.reads_keys:
            return self.recipe(net, options, target)
        return self.recipe(net if self.join is None else self.join(net, target), options)

    def drafter(self, net: Any, target: CausalLM, cache: SlotCache) -> Drafter:
        """A drafter of chains with this net.

        Args:
            cache: the target's.
        """
        drafter, options = find(self.method)
        given = (GlideLM(net, target, cache), target.vocab_size) if self.reads_keys else (net,)
        return drafter(options(**self.chain), *given)  # type: ignore[call-arg]


def _new_medusa(target: TargetModel, shape: HeadShape, ids: Tensor | None) -> Medusa:
    return start.new_medusa(target, shape.heads, shape.layers, shape.own_heads)


def _hydra(prefix: bool) -> RecipeKind:
    def make(target: TargetModel, shape: HeadShape, ids: Tensor | None) -> Hydra:
        return start.new_hydra(target, shape.heads, shape.layers, shape.own_heads, prefix)

    return RecipeKind(make, Hydra, heads.AheadRecipe, heads.Options, "hydra", {"tree": "x".join("1" * 16)})


_CHAIN_OF_5 = {"nodes": 5, "depth": 5, "top_k": 1}

RECIPES: dict[str, RecipeKind] = {
    "eagle": RecipeKind(
        lambda target, shape, ids: start.new_eagle(target, warm=not shape.cold),
        Eagle,
        eagle.EagleRecipe,
        eagle.Options,
        "eagle2",
        _CHAIN_OF_5,
    ),
    "eagle3": RecipeKind(
        lambda target, shape, ids: start.new_eagle3(target, ids, shape.taps or None, warm=not shape.cold),
        Eagle3,
        eagle3.Eagle3Recipe,
        eagle3.Options,
        "eagle3",
        _CHAIN_OF_5,
        reduces=True,
    ),
    "medusa": RecipeKind(_new_medusa, Medusa, heads.AheadRecipe, heads.Options, "blockwise", {}),
    "medusa2": RecipeKind(
        _new_medusa, Medusa, medusa2.Medusa2Recipe, medusa2.Options, "blockwise", {}, join=medusa2.Joint
    ),
    "hydra": _hydra(prefix=False),
    "hydra++": _hydra(prefix=True),
    "blockwise": RecipeKind(
        lambda target, shape, ids: start.new_blockwise(target, shape.heads),
        Blockwise,
        heads.AheadRecipe,
        heads.Options,
        "blockwise",
        {},
    ),
    "glide": RecipeKind(
        lambda target, shape, ids: start.new_glide(target, warm=not shape.cold),
        Glide,
        glide.GlideRecipe,
        glide.Options,
        "glide",
        _CHAIN_OF_5,
        reads_keys=True,
    ),
}
