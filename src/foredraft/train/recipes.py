"""The table of recipes: how each kind of head is made, taught, tried out, and described."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foredraft.core.drafter import Drafter
from foredraft.core.errors import OptionError
from foredraft.drafters import find
from foredraft.model.causal import CausalLM
from foredraft.nets.eagle import Eagle, Eagle3
from foredraft.nets.hydra import Hydra
from foredraft.nets.medusa import Blockwise, Medusa
from foredraft.train import eagle, eagle3, heads, medusa2, start
from foredraft.train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """What a new head looks like.

    vocabulary: size of an EAGLE-3 head's own vocabulary, the tokens that the text has most; 0 for the target's own.
    taps: the target's hidden layers that an EAGLE-3 head reads; by default 2, N/2 and N - 3.
    heads, layers: of Medusa, Hydra and blockwise decoding; layers are those of each head.
    own_heads: give each Medusa or Hydra head an output layer of its own instead of the target's.
    cold: do not start from the target's own weights.
    start: a trained head to go on from, whose shape then holds; a folder or a hub name.
    """

    vocabulary: int = 32_000
    taps: tuple[int, ...] = ()
    heads: int = 4
    layers: int = 1
    own_heads: bool = False
    cold: bool = False
    start: str | None = None

    def __post_init__(self) -> None:
        if self.heads < 1 or self.layers < 1 or self.vocabulary < 0:
            raise OptionError("heads and layers must be 1 or more, and vocabulary 0 or more.")
        if list(self.taps) != sorted(set(self.taps)):
            raise OptionError("taps must be different layers, from low to high.")


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
