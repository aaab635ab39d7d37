"""A tiny target in float64, an engine that runs a drafter on it, and a record of what the drafter's net was asked."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from slow_nets import DraftRunner, Faults, Path, slow_of
from torch import Tensor

import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Drafter, Plan, View
from foredraft.engine.policy import Constant
from foredraft.heads.nets.blocks import BlockConfig, Rotary
from foredraft.model.hf.causal_lm import CausalLM

VOCAB, LAYERS = 16, 4
CLOSE, FAR = 1e-5, 1e-3
"""Logits that are the same, and logits that a fault has moved."""


@functools.cache
def target() -> CausalLM:
    """Few tokens, so that drafts of a head that knows nothing are sometimes accepted in part."""
    return CausalLM(tiny.build("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS, seed=1).double(), fast=False)


def prompts() -> list[list[int]]:
    """One with nothing to go on from, short ones, and one that has to be caught up with; the last one waits."""
    return tiny.prompts((1, 6, 23, 4), VOCAB)


@functools.cache
def truth(text: Path) -> dict[int, list[Tensor]]:
    """The target's states of a text by its own forward: what enters layer i, what enters the final norm, what leaves.

    No cache, no tree and no tap of ours.
    """
    model, states = target().model, {}
    inner: Any = model.model
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: states.__setitem__(i, args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for i, module in enumerate([*inner.layers, inner.norm])
    ]
    try:
        with torch.no_grad():
            states[-1] = inner(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return {tap: list(state[0].unbind(0)) for tap, state in states.items()}


def reader(net: Any, text: Sequence[int], **faults: Any) -> DraftRunner:
    """The slow head of a net over a text."""
    return DraftRunner(slow_of(net, target().model, Faults(**faults)), text, truth(tuple(text)))


@dataclass
class Call:
    """One call of ``net.logits``."""

    args: tuple[Any, ...]
    out: Tensor


@dataclass
class Proposal:
    """One call of ``propose``: the rows' texts as they were committed then, and what came of them."""

    rows: tuple[int, ...]
    texts: list[Path]
    plan: Plan
    draft: Draft
    calls: list[Call] = field(default_factory=list)

    def paths(self, b: int) -> list[Path]:
        """The drafted paths of a row, by node."""
        return list(tiny.paths(self.draft.tree, b).values())[1:]


def doubled(net: Any) -> Any:
    """A head in float64, its rotary frequencies too: they are made in float32, which is all the difference there is."""
    net = net.double()
    for module in net.modules():
        if isinstance(module, Rotary):
            block = getattr(net.config, "block", None) or net.config.prefix
            module.frequencies = frequencies(block)
    return net


def frequencies(block: BlockConfig) -> Tensor:
    half, slower = block.head_dim // 2, (block.rope_scaling or {}).get("factor", 1.0)
    return torch.tensor([block.rope_theta ** (-i / half) / slower for i in range(half)], dtype=torch.float64)


def listen(drafter: Drafter, net: Any) -> list[Proposal]:
    """From now on, what the drafter proposes and what its net said for it."""
    proposals: list[Proposal] = []
    calls: list[Call] = []
    logits, propose = net.logits, drafter.propose

    def spy(*args: Any) -> Tensor:
        out = logits(*args)
        calls.append(Call(tuple(a.clone() if isinstance(a, Tensor) else a for a in args), out.clone()))
        return out

    def record(view: View, plan: Plan) -> Draft:
        calls.clear()
        texts = [tuple(line[:length].tolist()) for line, length in zip(view.history, view.host_lengths, strict=True)]
        draft = propose(view, plan)
        proposals.append(Proposal(view.rows, texts, plan, draft, list(calls)))
        return proposals[-1].draft

    net.logits, drafter.propose = spy, record
    target().tap(drafter.needs.hidden_layers)
    return proposals


def watch(drafter: Drafter, net: Any, rule: str | None = None, **params: Any) -> list[Proposal]:
    """Generate from ``prompts``, three at a time, and tell what the drafter did in every step.

    Some draft was accepted in part, and another one of the same row came after it.
    """
    proposals = listen(drafter, net)
    generator = tiny.generator(target(), drafter, Constant(drafter.needs.longest), max_rows=3, rule=rule)
    generator.generate(prompts(), **{"max_new_tokens": 8, **params})
    assert partly_accepted(proposals) > 0
    return proposals


def every_row(proposals: Sequence[Proposal], check: Callable[[Proposal, int], None]) -> None:
    """Every row of every step; those with nothing to go on from must draft nothing."""
    texts = {text for proposal in proposals for text in proposal.texts}
    assert texts >= {tuple(prompt) for prompt in prompts()}
    assert {row for proposal in proposals for row in proposal.rows} == {0, 1, 2}, "the fourth has a row of another's"
    for proposal in proposals:
        for b, text in enumerate(proposal.texts):
            if len(text) == 1:
                assert proposal.paths(b) == []
            else:
                check(proposal, b)


def first_step(drafter: Drafter, texts: Sequence[Sequence[int]]) -> View:
    """Greedy rows, as the engine would show them to the drafter in its first step."""
    taps = drafter.needs.hidden_layers
    for row, text in enumerate(texts):
        hidden = {tap: states[:, :-1] for tap, states in target().read(torch.tensor([list(text)]), taps).items()}
        drafter.admit(row, torch.tensor(list(text[:-1])), drafter.fuse(hidden))
    return tiny.view(texts, vocab=VOCAB)


def partly_accepted(proposals: Sequence[Proposal]) -> int:
    """How many drafts were accepted in part, and were followed by another one of the same row."""
    count = 0
    for now, then in pairwise(proposals):
        after: Mapping[int, Path] = dict(zip(then.rows, then.texts, strict=True))
        for b, (row, text) in enumerate(zip(now.rows, now.texts, strict=True)):
            more = after.get(row, ())
            if more[: len(text)] == text and len(more) > len(text):
                count += 0 < len(more) - len(text) - 1 < max(map(len, now.paths(b)), default=0)
    return count


def gap(found: Tensor, wanted: Sequence[Tensor]) -> float:
    """How far two sets of vectors are apart: the largest distance of a wanted one to the nearest that was found."""
    assert len(found) == len(wanted)
    return max(float((found - one).abs().amax(-1).min()) for one in wanted)
