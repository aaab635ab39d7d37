"""What every drafter owes, for the tests of a package that has one; see docs/extending.md.

``CONTRACT`` has the rules by name: functions of a generator that raise an ``AssertionError`` if its drafter breaks one.
"""

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from foredraft.bench.check import check_identity, check_sampled
from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Plan, View
from foredraft.core.errors import DrafterError
from foredraft.core.sampling.params import SamplingParams
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant, Policy
from foredraft.engine.request import Sequence as Request
from foredraft.engine.step import StepResult

_SAMPLED = SamplingParams(max_new_tokens=16, temperature=0.9, top_k=12, repetition_penalty=1.2, seed=21)
_KINDS = (SamplingParams(max_new_tokens=16, seed=21), _SAMPLED)


def same_text(generator: Generator) -> None:
    """Greedy and sampled outputs are plain decoding's, of one row and of rows of several lengths in a batch.

    Under a rule that needs drawn drafts, sampled ones only have the same law; see ``same_law``.
    """
    for params in _KINDS[:1] if generator.engine.draws else _KINDS:
        for together in (1, 0):
            with _policy(generator, Constant(generator.engine.drafter.needs.longest)):
                found = check_identity(generator, _prompts(generator), params, together=together)
            alone = "alone" if together else "in a batch"
            assert found.passed, f"The outputs of rows {alone} are not plain decoding's: {found.differences[0]}."


def same_law(generator: Generator) -> None:
    """Sampled tokens follow the target's law, so drawn drafts come from the q that they claim."""
    params = replace(_SAMPLED, max_new_tokens=3, top_k=6)
    with _policy(generator, Constant(generator.engine.drafter.needs.longest)):
        found = check_sampled(generator, _prompts(generator)[1:3], params, 3000)
    assert found.passed, f"Sampled tokens do not follow the target's law: p = {found.p_value:.2g}."


def no_trace(generator: Generator) -> None:
    """Outputs, and unless it learns from requests drafts, do not depend on the rows before or beside, also after some
    were cancelled."""
    learns = generator.engine.drafter.needs.learns
    for params in _KINDS:
        forth, back = _run(generator, params, 1), _run(generator, params, -1)
        stopped = generator.submit(_prompts(generator), params)
        generator.engine.step()
        generator.engine.cancel(stopped)
        again = _run(generator, params, 1)
        assert [each.tokens for each in forth] == [each.tokens for each in back] == [each.tokens for each in again], (
            "The outputs depend on the rows that ran before."
        )
        first, last = ([(each.stats.drafted, each.stats.accepted) for each in runs] for runs in (forth, again))
        assert learns or first == last, f"Drafts depend on rows that have ended: drafted and accepted {first}, {last}."


def as_planned(generator: Generator) -> None:
    """Drafts keep to the plan and to ``needs``, and the same view gets the same draft."""
    drafter, drafted = generator.engine.drafter, 0
    propose, broken = drafter.propose, list[AssertionError]()

    def checked(view: View, plan: Plan) -> Draft:
        nonlocal drafted
        draft, again = propose(view, plan), propose(view, plan)
        drafted += int(draft.tree.valid.sum()) - len(view.rows)
        try:
            _check_draft(generator, view, plan, draft)
            assert _same(draft, again), (
                "propose gave two drafts for one view; it may be called again when a row's rules fail."
            )
        except AssertionError as error:  # which would end the request alone
            broken.append(error)
        return again

    drafter.propose = checked  # type: ignore[method-assign]
    try:
        with _policy(generator, _Varied(drafter.needs.longest)), contextlib.suppress(DrafterError):
            for params in _KINDS:
                _run(generator, params, 1)
    finally:
        del drafter.propose
    for error in broken:
        raise error
    assert drafted or not drafter.needs.max_nodes, "Nothing was drafted."


CONTRACT: Mapping[str, Callable[[Generator], None]] = {
    each.__name__: each for each in (same_text, same_law, no_trace, as_planned)
}
"""The rules by name."""


def _same(one: Draft, other: Draft) -> bool:
    return torch.equal(one.tree.tokens, other.tree.tokens) and torch.equal(one.tree.parents, other.tree.parents)


def _check_draft(generator: Generator, view: View, plan: Plan, draft: Draft) -> None:
    tree, needs = draft.tree, generator.engine.drafter.needs
    assert torch.equal(tree.tokens[:, 0], view.roots), "Node 0 of a draft is the row's last committed token."
    assert (draft.q is None) == (draft.law is Law.FIXED), "A draft has its q, unless its law is FIXED."
    for row, most in enumerate(plan.lengths):
        depths, parents = {0: 0}, tree.parents[row].tolist()
        for node, parent in enumerate(parents[1:], start=1):
            if parent >= 0:
                assert parent in depths, f"Node {node} stands before its parent {parent}."
                depths[node] = depths[parent] + 1
        deepest, drafted = max(depths.values()), len(depths) - 1
        assert drafted <= needs.max_nodes, f"{drafted} nodes were drafted; needs.max_nodes is {needs.max_nodes}."
        assert deepest <= most, f"A path of {deepest} tokens was drafted where {most} were planned."
        assert deepest <= tree.depth, f"The draft's depth is {tree.depth}, and a node lies at {deepest}."


class _Varied(Policy):
    """Plans of all lengths, other ones for each row and step."""

    def __init__(self, longest: int) -> None:
        self._longest, self._steps = longest, 0

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        self._steps += 1
        wanted = ((self._steps + 2 * row) % (self._longest + 1) for row in range(len(limits)))
        return Plan(tuple(map(min, wanted, limits)))

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        pass


@contextlib.contextmanager
def _policy(generator: Generator, policy: Policy) -> Iterator[None]:
    """Run with another policy, so that drafts do not depend on clocks."""
    own = generator.engine.policy
    generator.engine.policy = policy
    try:
        yield
    finally:
        generator.engine.policy = own


def _run(generator: Generator, params: SamplingParams, order: int) -> list[Request]:
    """One request for each prompt, together, started in this order (1 or -1)."""
    policy = generator.engine.policy
    fixed = policy if isinstance(policy, _Varied) else Constant(generator.engine.drafter.needs.longest)
    prompts: list[Any] = _prompts(generator)
    with _policy(generator, fixed):
        asked = [(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(prompts)][::order]
        found = [generator.submit([prompt], own)[0] for prompt, own in asked]
        generator.engine.run(found)
    for each in found:
        if each.error is not None:
            raise each.error
    return found[::order]


def _prompts(generator: Generator) -> list[list[int]]:
    """Token ids: one, a few, and a text that repeats itself, so that there is something to look up."""
    source, size = random.Random(0), generator.engine.target.vocab_size
    few = [[source.randrange(size) for _ in range(count)] for count in (1, 5, 17, 9)]
    return [*few[:3], few[3] * 4]
