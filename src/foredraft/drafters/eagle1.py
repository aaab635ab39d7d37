"""EAGLE-1 (Li et al., arXiv:2401.15077): a head that goes on from the target's features, and a static tree."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Needs, Plan, View
from foredraft.core.noise import Stream
from foredraft.core.tree import PAD, TokenTree
from foredraft.core.warp import Paths
from foredraft.drafters.grow import draw_siblings, likeliest, proper
from foredraft.drafters.head import HeadDrafter
from foredraft.drafters.memory import Growth, Memory, eagle_memory
from foredraft.drafters.supplies import Supplies
from foredraft.drafters.teachable import Teachable
from foredraft.drafters.templates import Template
from foredraft.drafters.trainees import EagleTrainee
from foredraft.nets.eagle import EagleNet


@dataclass(frozen=True, slots=True)
class Options:
    """The shape of the tree.

    tree: its name (eagle: the published one of 25 nodes; medusa: of 63), or children by level, such as 4x2x1.
    num_assistant_tokens_schedule: constant; heuristic, transformers' up and down of the depth; cost, what the measured
        costs make best; or auto, cost where texts cannot depend on it and constant elsewhere.
    rope_theta: the base of the head's rotary positions, where its config is wrong about it.
    taps: the target's hidden layers that the head reads, such as 2x16x29, where its files are wrong or silent.
    """

    tree: str = "eagle"
    num_assistant_tokens_schedule: str = "auto"
    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None

    @property
    def law(self) -> Law:
        """The law of drafts for sampled rows."""
        return Law.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        Template.of(self.tree)


@final
class Eagle1(HeadDrafter[Memory], Teachable):
    """Fills a fixed tree level by level: with the likeliest tokens where rows are greedy, else with siblings drawn
    without replacement from the head's law, warped as the target's is."""

    def __init__(self, options: Options, net: EagleNet) -> None:
        self._net = net
        self._template = template = Template.of(options.tree)
        device = next(net.parameters()).device
        self._levels = tuple(_Level.of(template, level, device) for level in range(1, template.depth + 1))
        self._vocab_size = net.target.vocab_size
        super().__init__(eagle_memory(net), Needs(net.taps, template.nodes, template.depth))

    def trainee(self) -> EagleTrainee:
        return EagleTrainee(self._net)

    @torch.inference_mode()
    def propose(self, view: View, plan: Plan) -> Draft:
        depth = min(plan.length, self._template.depth)
        tree = TokenTree.root(view.roots)
        if not depth:
            return Draft(tree, Law.FIXED)
        extended = self._memory.extend(view, 1 + self._template.nodes)
        states = extended.states
        allowed = torch.tensor(plan.lengths, device=view.lengths.device) * extended.known
        inner = tree  # the nodes that have children: what the head goes on from
        growth = self._memory.growth(view, 1 + self._template.nodes)
        laws = [states.new_zeros(len(view.rows), 1, self._vocab_size, dtype=torch.float32)]
        for level in range(1, depth + 1):
            begin = inner.tokens.shape[1] - states.shape[1]
            logits = self._widened(self._net.logits(states))
            columns = self._levels[level - 1]
            tokens, exist = self._children(view, logits, Paths(view.history, view.lengths, inner, begin), columns, laws)
            above = columns.parents.expand(tokens.shape)
            exist = exist & (allowed >= level)[:, None] & tree.valid.gather(1, above)
            tree = TokenTree(
                torch.cat([tree.tokens, tokens], 1),
                torch.cat([tree.parents, torch.where(exist, above, PAD)], 1),
                depth=level,
            )
            if level < depth:
                inner, states = self._go_on(growth, tree, inner, states, columns)
        if view.warp.greedy:
            return Draft(tree, Law.FIXED)
        return Draft(tree, Law.WITHOUT_REPLACEMENT, torch.cat(laws, 1))

    def _children(
        self, view: View, logits: Float[Tensor, "B F V"], paths: Paths, columns: "_Level", laws: list[Tensor]
    ) -> tuple[Int[Tensor, "B K"], Tensor]:
        """Tokens of the nodes of a level, and which of them exist; what each was drawn from goes to ``laws``."""
        own = columns.flat
        if view.warp.greedy:
            tokens, exist = likeliest(view.warp.scores(logits, paths), columns.width)
        else:
            index = columns.nodes.expand(len(view.rows), -1, -1)
            drawn = draw_siblings(proper(view.warp.law(logits, paths)), view.noise.uniform(Stream.DRAFT, index))
            tokens, exist = drawn.tokens, drawn.exist
            laws.append(drawn.laws.flatten(1, 2)[:, own])
        return tokens.flatten(1)[:, own], exist.flatten(1)[:, own]

    def _go_on(
        self, growth: Growth, tree: TokenTree, inner: TokenTree, states: Float[Tensor, "B F H"], columns: "_Level"
    ) -> tuple[TokenTree, Float[Tensor, "B G H"]]:
        """The head's states at the nodes of a level that have children."""
        nodes, places = columns.inner, columns.inner_parents
        begin = inner.tokens.shape[1]
        first = begin - states.shape[1]
        parents = (first + places).expand(tree.tokens.shape[0], -1)
        inner = TokenTree(
            torch.cat([inner.tokens, tree.tokens[:, nodes]], 1),
            torch.cat([inner.parents, parents], 1),
            depth=tree.depth,
        )
        return inner, growth.grow(inner.tokens[:, begin:], parents, self._net.carry(states)[:, places])

    def _widened(self, logits: Float[Tensor, "B F v"]) -> Float[Tensor, "B F V"]:
        """Logits over the target's vocabulary, and numbers whatever the head computed."""
        least = torch.finfo(logits.dtype).min
        logits = logits.nan_to_num(nan=least, posinf=0.0, neginf=least)
        if self._net.vocabulary is None:
            return torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=least)
        wide = logits.new_full((*logits.shape[:-1], self._vocab_size), least)
        return wide.index_copy(-1, self._net.vocabulary, logits)


@dataclass(frozen=True, slots=True)
class _Level:
    """The nodes of a level, and as many columns for each of their F parents as the one with the most children has.

    ``nodes``: the number of each in the tree, column by column; a column that no child stands in has a number all the
    same, beyond the tree. ``flat``: where the children that there are stand in that table. ``parents``: of each node.
    ``inner``: the nodes that have children, and the places of their parents among the inner nodes of the level above.
    """

    nodes: Int[Tensor, "F W"]
    flat: Int[Tensor, "K"]
    width: int
    parents: Int[Tensor, "K"]
    inner: Int[Tensor, "G"]
    inner_parents: Int[Tensor, "G"]

    @classmethod
    def of(cls, template: Template, level: int, device: torch.device) -> "_Level":
        """Those of the nodes at ``level``."""
        above, places = template.above(level), template.places(level)
        children: dict[int, list[int]] = {parent: [] for parent in template.inner(level - 1)}
        for node, parent in zip(template.level(level), above, strict=True):
            children[parent].append(node)
        width = max(map(len, children.values()))
        spare = 1 + template.nodes
        nodes = [own + [spare] * (width - len(own)) for own in children.values()]
        flat = [place * width + rank for place, own in enumerate(children.values()) for rank in range(len(own))]
        inner_parents = [places[own] for own in template.inner_places(level)]

        def fixed(numbers: object) -> Tensor:
            return torch.tensor(numbers, dtype=torch.long, device=device)

        return cls(fixed(nodes), fixed(flat), width, fixed(above), fixed(template.inner(level)), fixed(inner_parents))


def build(options: Options, supplies: Supplies) -> Eagle1:
    """eagle1:HEAD"""
    return Eagle1(options, supplies.head(options))
