"""The table of recipes: how each kind of head is made, taught, tried out, and described."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foredraft.compose.spec import find
from foredraft.core.drafter import Drafter
from foredraft.heads.nets.eagle import Eagle, Eagle3
from foredraft.heads.nets.hydra import Hydra
from foredraft.heads.nets.medusa import Blockwise, Medusa
from foredraft.model.hf import CausalLM
from foredraft.train.heads import eagle, eagle3, init as start, medusa2, medusa_hydra as heads
from foredraft.train.options import HeadShape as HeadShape
from foredraft.train.recipe import Recipe

Make = Callable[[CausalLM, HeadShape, Tensor | None], nn.Module]


@dataclass(frozen=True, slots=True)
class RecipeKind:
    """One line of the table.

    make: a new net for a target; the tensor holds the ids of a reduced vocabulary.
    net: the class of these nets.
    recipe, options: the class of the recipe and of its options.
    method, chain: the drafter that tries it out, and the options that make it draft a chain.
    reduces: whether the net may have a smaller vocabulary than the target.
    join: where the target learns too, head and target as the one net of the recipe.
    """

    make: Make
    net: type[nn.Module]
    recipe: Callable[[Any, Any], Recipe[Any]]
    options: type
    method: str
    chain: dict[str, Any]
    reduces: bool = False
    join: Callable[[Any, CausalLM], nn.Module] | None = None

    def drafter(self, net: nn.Module, options: dict[str, Any] | None = None) -> Drafter:
        """A drafter that runs this very net, as a chain unless told otherwise."""
        drafter, kind = find(self.method)
        return drafter(kind(**(self.chain if options is None else options)), net)  # type: ignore[call-arg]


def _new_medusa(target: CausalLM, shape: HeadShape, ids: Tensor | None) -> Medusa:
    return start.new_medusa(target, shape.heads, shape.layers, shape.own_heads)


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
    "medusa": RecipeKind(
        _new_medusa,
        Medusa,
        heads.MedusaRecipe,
        heads.Options,
        "blockwise",
        {},
    ),
    "medusa2": RecipeKind(
        _new_medusa,
        Medusa,
        medusa2.Medusa2Recipe,
        medusa2.Options,
        "blockwise",
        {},
        join=medusa2.Joint,
    ),
    "hydra": RecipeKind(
        lambda target, shape, ids: start.new_hydra(target, shape.heads, shape.layers, shape.own_heads, prefix=False),
        Hydra,
        heads.HydraRecipe,
        heads.Options,
        "hydra",
        {"tree": "x".join("1" * 16)},
    ),
    "hydra++": RecipeKind(
        lambda target, shape, ids: start.new_hydra(target, shape.heads, shape.layers, shape.own_heads, prefix=True),
        Hydra,
        heads.HydraRecipe,
        heads.Options,
        "hydra",
        {"tree": "x".join("1" * 16)},
    ),
    "blockwise": RecipeKind(
        lambda target, shape, ids: start.new_blockwise(target, shape.heads),
        Blockwise,
        heads.MedusaRecipe,
        heads.Options,
        "blockwise",
        {},
    ),
}
