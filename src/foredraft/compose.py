"""The only place where names become objects: a target, a drafter, a controller, put together."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from foredraft.core.draft import Law
from foredraft.core.drafter import Drafter
from foredraft.core.errors import DrafterError, OptionError
from foredraft.core.options import read_options, read_pairs
from foredraft.core.params import check_known
from foredraft.core.verify import RULES, check_legal
from foredraft.drafters import METHODS, find
from foredraft.engine.control import Auto, Constant, Controller, CostAware, Heuristic
from foredraft.engine.control_tree import CostAwareTree
from foredraft.engine.costs import measure_costs
from foredraft.engine.engine import Engine
from foredraft.engine.generate import Generator, Kind
from foredraft.formats import load_head
from foredraft.model.causal import CausalLM
from foredraft.model.linear import PackedWeights, draft_dtype
from foredraft.model.load import Loaded, as_loaded, load_model, resolve
from foredraft.model.tokenizer import Tokenizer
from foredraft.nets.blocks import fuse

BUNDLED_DRAFTS = {
    "sample": {
        "draft_model": "sample-draft",
        "eagle1": "sample-eagle",
        "eagle2": "sample-eagle",
        "eagle3": "sample-eagle3",
        "medusa": "sample-medusa",
    }
}
"""What ships for the bundled targets, by method."""
SCHEDULES = ("auto", "constant", "cost", "heuristic")


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter by name: ``name``, ``name:PATH`` or ``name:PATH,option=value,...``."""

    name: str
    path: str | None
    options: Any

    @classmethod
    def parse(cls, text: str) -> "Spec":
        """Read a spec.

        Raises:
            OptionError: an unknown method or option, or a value of the wrong type; the sentence lists the known ones.
        """
        head, *pairs = text.split(",")
        name, _, path = head.partition(":")
        check_known("drafter", {name: None}, list(METHODS))
        options = find(name)[1]
        given = read_pairs(pairs)
        return cls(name, path or None, read_options(options, name, given))


def load(
    target: Any = "sample",
    drafter: str | Drafter | None = "auto",
    *,
    tokenizer: Any = None,
    dtype: str | None = None,
    device: str | None = None,
    verifier: str | None = None,
    controller: Controller | None = None,
    max_batch_size: int = 32,
    exact: bool = False,
    fast: bool = True,
    model_options: Mapping[str, Any] | None = None,
) -> Generator:
    """Put a target and a drafter together.

    Args:
        target: a folder, a hub name, "sample" for the bundled model, a loaded transformers model, or the
            ``generator.engine.target`` of another generator, to share it.
        drafter: "none" or None for plain decoding, a spec such as "prompt_lookup" or
            "draft_model:PATH,num_assistant_tokens=5", a ``Drafter``, or "auto": the bundled EAGLE-3 head for
            the bundled model, prompt lookup for any other.
        tokenizer: for a loaded model; otherwise its own is used.
        dtype: such as "bfloat16"; by default float32 on a CPU, elsewhere what the weights have.
        device: such as "cuda"; by default a GPU if there is one.
        verifier: the verification rule; by default the best one for each draft's law.
        controller: decides how much to draft; by default what the drafter's options say.
        max_batch_size: so many texts are generated at once; others wait.
        exact: run every forward with the same number of nodes, so that speculation cannot flip near-ties.
        fast: on a CPU, pack the weights of linear layers.
        model_options: passed on to ``from_pretrained`` for target and draft (quantization_config, revision, ...).

    Raises:
        UsageError: something that cannot be; the sentence says why and what can.
    """
    if max_batch_size < 1:
        raise OptionError("max_batch_size must be 1 or more.")
    spec = _spec(target, drafter)
    lossless = _check_verifier(verifier, spec)
    loaded = _load(target, tokenizer, dtype, device, model_options)
    models = [target if isinstance(target, CausalLM) else CausalLM(loaded.model, fast=fast)]
    try:
        proposer = _build(spec, loaded, models, fast, model_options) if isinstance(spec, Spec) else spec
        if proposer.needs.hidden_layers:
            models[0].tap(proposer.needs.hidden_layers)
        engine = Engine(
            models[0],
            proposer,
            controller or _controller(spec, models[0], proposer, lossless),
            rule=verifier,
            max_rows=max_batch_size,
            exact_nodes=1 + proposer.needs.max_nodes if exact else 0,
        )
    except BaseException:  # a model that is the caller's must not keep what was installed on it
        _close(models, target)
        raise
    name = spec.name if isinstance(spec, Spec) else spec.__class__.__name__
    kind = Kind(name, lossless)
    own = [each for each in models if each is not target]  # a shared one is closed by whoever made it
    return Generator(engine, loaded.tokenizer, loaded.eos_token_ids, kind, own)


def _close(models: list[CausalLM], shared: Any) -> None:
    for model in models:
        if model is not shared:
            model.close()


def _check_verifier(verifier: str | None, spec: Spec | Drafter) -> bool:
    """Refuse an unknown rule, and one that is not for what the drafter draws; say whether it keeps the target's law."""
    if verifier is None:
        return True
    check_known("verifier", {verifier: None}, list(RULES))
    if isinstance(spec, Spec):
        check_legal(verifier, spec.options.law)
    return RULES[verifier].lossless


def _spec(target: Any, drafter: str | Drafter | None) -> Spec | Drafter:
    if isinstance(drafter, Drafter):
        return drafter
    if drafter == "auto":
        drafter = "eagle3" if isinstance(target, str) and target in BUNDLED_DRAFTS else "prompt_lookup"
    spec = Spec.parse(drafter or "none")
    bundled = BUNDLED_DRAFTS.get(target, {}) if isinstance(target, str) else {}
    if spec.path is None and spec.name in bundled:
        return Spec(spec.name, bundled[spec.name], spec.options)
    return spec


def _load(
    target: Any, tokenizer: Any, dtype: str | None, device: str | None, options: Mapping[str, Any] | None
) -> Loaded:
    if isinstance(target, str):
        loaded = load_model(target, dtype=dtype, device=device, options=options)
        return loaded if tokenizer is None else as_loaded(loaded.model, tokenizer)
    return as_loaded(target.model if isinstance(target, CausalLM) else target, tokenizer)


def _build(
    spec: Spec,
    loaded: Loaded,
    models: list[CausalLM],
    fast: bool,
    options: Mapping[str, Any] | None,
) -> Drafter:
    """The drafter of a spec. A model that it needs is loaded, checked against the target's tokenizer, and listed."""
    target = models[0]
    drafter = find(spec.name)[0]
    if spec.name == "none":
        return drafter()
    if spec.name == "prompt_lookup":
        return drafter(spec.options)  # type: ignore[call-arg]
    kinds = METHODS[spec.name].heads
    if spec.path is None:
        raise DrafterError(
            f"{spec.name} needs {METHODS[spec.name].needs}: write {spec.name}:PATH with a folder or hub name."
        )
    if kinds:
        return drafter(spec.options, _head(spec, kinds, target, fast))  # type: ignore[call-arg]
    dtype = str(target.dtype).removeprefix("torch.")
    draft = load_model(spec.path, dtype=dtype, device=str(target.device), options=options)
    check_same_tokenizer(loaded.tokenizer, draft.tokenizer, spec.path)
    model = CausalLM(draft.model, fast=fast)
    models.append(model)
    return drafter(spec.options, model, target.vocab_size)  # type: ignore[call-arg]


def _head(spec: Spec, kinds: tuple[str, ...], target: CausalLM, fast: bool) -> Any:
    """The net of a trained head, of one of these kinds."""
    assert spec.path is not None
    head = load_head(
        resolve(spec.path),
        target,
        rope_theta=getattr(spec.options, "rope_theta", None),
        taps=getattr(spec.options, "taps", None),
    )
    if head.info.method not in kinds:
        right = ", ".join(name for name, method in METHODS.items() if head.info.method in method.heads)
        raise DrafterError(f"{spec.path!r} holds {head.info.format} weights: it drafts as {right}, not as {spec.name}.")
    fuse(head.net)
    if fast and target.device.type == "cpu":
        picked = spec.options.law is Law.FIXED  # else q must not depend on how many rows share a product
        PackedWeights(head.net, draft_dtype() if picked else torch.float32)
    return head.net


def check_same_tokenizer(target: Tokenizer | None, draft: Tokenizer | None, name: str) -> None:
    """Raise a ``DrafterError`` unless the two give the same ids the same meaning; padded sizes may differ."""
    if target is None or draft is None:
        return
    difference = target.first_difference(draft)
    if difference is not None:
        raise DrafterError(
            f"The draft {name!r} has another tokenizer than the target ({difference}); take a draft of the target's "
            "own family, or a drafter that needs no model, such as prompt_lookup."
        )


def _controller(spec: Spec | Drafter, target: CausalLM, drafter: Drafter, lossless: bool) -> Controller:
    """What decides how much to draft: as the method's options say; for a ``Drafter`` object, all that it can."""
    longest = drafter.needs.longest
    if isinstance(spec, Drafter):
        if spec.needs.max_nodes < 1:
            raise DrafterError(
                f"{spec.__class__.__name__}.needs.max_nodes is 0, so it would never be asked for a draft."
            )
        return Constant(longest)
    options = spec.options
    if spec.name == "none":
        return Constant(0)
    schedule = options.num_assistant_tokens_schedule
    check_known("num_assistant_tokens_schedule", {schedule: None}, SCHEDULES)
    confidence = getattr(options, "assistant_confidence_threshold", 0.0)
    constant = Constant(longest, confidence)
    if schedule == "constant":
        return constant
    if schedule == "heuristic":
        return Heuristic(longest, confidence)
    cost_aware: Controller
    if drafter.needs.scored:
        cost_aware = CostAwareTree(longest, drafter.needs.max_nodes, measure_costs(target, longest=64))
    else:
        cost_aware = CostAware(longest, measure_costs(target), confidence)
    if schedule == "cost":
        return cost_aware
    picked = options.law is Law.FIXED and lossless  # else a text may depend on what was drafted
    return Auto(constant, cost_aware, picked)


def describe_options(name: str) -> dict[str, Any]:
    """Options of a method with their defaults."""
    return {field.name: None if field.default is MISSING else field.default for field in fields(find(name)[1])}
