"""Runs of the engine that many tests share: a target, its plain outputs, and drafters that note what they are given."""

import functools
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest

import random_heads as heads
import tiny
from foredraft.core.draft import Draft
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.target_parts import FINAL
from foredraft.drafters.prompt_lookup import Options as LookupOptions, PromptLookup
from foredraft.engine.generator import Generator
from foredraft.engine.policy import Constant
from foredraft.engine.request import Sequence
from foredraft.model.hf.causal_lm import CausalLM
from reference import reference

NEW = 16


@functools.cache
def model(name: str = "llama", **changes: Any) -> CausalLM:
    """A tiny target, for tests that leave it as it is."""
    return CausalLM(tiny.build(name, **changes))


@functools.cache
def tapped() -> CausalLM:
    """A target with room for long prompts, which hands out what the heads of ``small_drafter`` read."""
    target = CausalLM(tiny.build("llama", max_position_embeddings=4096))
    target.tap((0, 1, 2, FINAL))
    return target


def small(kind: str, **options: Any) -> Generator:
    """A generator with one of the ``small_drafter``s."""
    drafter = heads.small_drafter(kind, tapped())
    return tiny.generator(tapped(), drafter, cache=getattr(drafter, "full", None), **options)


def drafting(kind: str, target: CausalLM | None = None, draft: CausalLM | None = None, **options: Any) -> Generator:
    """A generator that drafts as ``kind`` says: "none", or chains or trees ("... tree") of one of these origins.

    "lookup": of the text. "self": of the target. "other": of ``draft``, by default of one that knows nothing of it.
    """
    target, tree = target or model(), kind.endswith(" tree")
    if kind == "none":
        return tiny.generator(target, **options)
    if kind.startswith("lookup"):
        lookup = PromptLookup(LookupOptions(prompt_lookup_num_tokens=4, continuations=3 if tree else 1))
        return tiny.generator(target, lookup, Constant(4), **options)
    draft = draft or (target if kind.startswith("self") else tiny.stranger())
    return tiny.generator(target, *tiny.draft_model(draft, target, 3, (2, 2, 1) if tree else None), **options)


def with_tree(**options: Any) -> Generator:
    """A generator of its own with a tree of a draft model that knows nothing of the target."""
    target, draft = CausalLM(tiny.build("llama")), CausalLM(tiny.build("llama", seed=8))
    return tiny.generator(target, *tiny.draft_model(draft, target, 3, (2, 2, 1)), **options)


@functools.cache
def _remembered(prompt: tuple[int, ...], target: CausalLM, eos: tuple[int, ...], options: tuple) -> list[int]:
    return reference(target, prompt, SamplingParams(**dict(options)), eos)


def plain(prompt: Seq[int], target: CausalLM | None = None, eos: tuple[int, ...] = (), **options: Any) -> list[int]:
    """The output of the slow reference: ``NEW`` tokens by default, of the tiny Llama by default."""
    options = {"max_new_tokens": NEW, **options}
    return list(_remembered(tuple(prompt), target or tiny.oracle(), eos, tuple(options.items())))


def run_each(g: Generator, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Sequence]:
    """One request a prompt with parameters of its own; all run together to their ends."""
    sequences = [g.submit([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    g.engine.run(sequences)
    return sequences


def watched(hook: Callable[[View], object], vocab: int = tiny.VOCAB) -> tiny.ScriptedDrafter:
    """A drafter that calls ``hook`` in the middle of each step, and drafts at random."""

    def propose(view: View, plan: Plan) -> Draft:
        hook(view)
        return tiny.Liar([], vocab=vocab)(view, plan)

    return tiny.ScriptedDrafter(propose, max_nodes=7)


@contextmanager
def forwards(target: CausalLM) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each forward within."""
    sizes: list[tuple[int, int]] = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield sizes
    hook.remove()


def noted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[tuple[Any, ...]]:
    """The positional arguments of each call of this method from now on, the object first."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def note(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return method(*args, **options)

    monkeypatch.setattr(owner, name, note)
    return calls


@contextmanager
def interrupted(target: CausalLM) -> Iterator[None]:
    """Ctrl-C comes in the first forward within, and is what comes out."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = target.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        yield
    hook.remove()
