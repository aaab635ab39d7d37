"""Tiny random models whose texts are far from trivial, and drafters that propose whatever a test wants.

Weights are drawn with a standard deviation of ``spread / sqrt(inputs)``, so that each layer matters and greedy
texts wander; ``spread`` is chosen for gaps between the two best logits that no rounding of float32 can close.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, final

import tokenizers
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import Drafter, Needs, Plan, View
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.tree import PAD, TokenTree
from foredraft.drafters.draft_model import DraftModel, Options as DraftOptions
from foredraft.drafters.none import NoDrafter
from foredraft.drafters.predicted import PredictedOutputs
from foredraft.engine.engine import Engine
from foredraft.engine.generator import DrafterInfo, Generator
from foredraft.engine.policy import Constant, Policy
from foredraft.engine.step import StepResult
from foredraft.model.hf.causal_lm import CausalLM

VOCAB = 96
GREEDY = SamplingParams()
WINDOW = 8
MIXED = ["sliding_attention", "full_attention"]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {"n_embd": 32, "n_head": 4}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "query_pre_attn_scalar": 8,
    },
    "phi3": {},
    "gpt2": GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
"""The architectures for which the issue wants greedy identity, by ``model_type``."""

MORE: dict[str, dict[str, Any]] = {
    "llama4_text": {
        "attention_chunk_size": WINDOW,
        "num_local_experts": 2,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "layer_types": MIXED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        **LATENT,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
    },
    "cohere2": {"sliding_window": WINDOW, "layer_types": MIXED, "logit_scale": 1.0},
    "granite": {},
    "starcoder2": {"sliding_window": WINDOW},
    "phi": {},
    "gptj": {**GPT2, "rotary_dim": 4},
    "jetmoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "smollm3": {},
    "falcon": {"alibi": False},
    "diffllama": {},
}
"""Others that work: chunked layers, sinks, values wider than keys, attention that is the model's own."""

_SEEDS = {
    "llama": 3,
    "qwen2": 1,
    "qwen3": 4,
    "mistral": 1,
    "gemma2": 9,
    "gemma3_text": 0,
    "phi3": 10,
    "gpt2": 9,
    "gpt_neox": 2,
    "opt": 3,
    "olmo2": 1,
    "mixtral": 4,
    "qwen3_moe": 8,
    "llama4_text": 1,
    "gpt_oss": 0,
    "deepseek_v3": 2,
    "cohere2": 11,
    "granite": 7,
    "starcoder2": 0,
    "phi": 1,
    "gptj": 0,
    "jetmoe": 3,
    "smollm3": 0,
    "falcon": 1,
    "diffllama": 4,
}
"""With these the greedy texts of ``prompts()`` have no near-ties; found by trying 0, 1, 2, ..."""

_ABSENT = {"falcon": ("head_dim",), "deepseek_v3": ("head_dim",)}  # fields of BASE that a config does not have


def config(name: str, **changes: Any) -> Any:
    """The config of a tiny model of this ``model_type``."""
    fields = {**BASE, **MODELS.get(name, {}), **MORE.get(name, {}), **changes}
    if "layer_types" in fields.keys() - changes.keys():
        fields["layer_types"] = list(islice(cycle(fields["layer_types"]), fields["num_hidden_layers"]))
    return AutoConfig.for_model(name, **{k: v for k, v in fields.items() if k not in _ABSENT.get(name, ())})


def build(name: str = "llama", *, seed: int | None = None, spread: float = 1.5, **changes: Any) -> PreTrainedModel:
    """A tiny model in float32 with random weights; ``changes`` go to its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS[name] if seed is None else seed)
        model = AutoModelForCausalLM.from_config(config(name, **changes)).float().eval()
        model.generation_config.eos_token_id = None
        shake(model, spread)
    return model


def save(place: Path, eos: str | None = None, *, seed: int | None = None, **changes: Any) -> Path:
    """Write a tiny Llama and its tokenizer to a folder, for what loads models by path."""
    build("llama", seed=seed, **changes).save_pretrained(place)
    tokenizer(eos=eos).save_pretrained(place)
    return place


def four(name: str = "llama") -> PreTrainedModel:
    """The same with four layers; kinds of layers are repeated."""
    return build(name, num_hidden_layers=4)


def poisoned() -> CausalLM:
    """The tiny Llama, but token 77 turns everything that sees it to NaN."""
    model = build("llama")
    model.get_input_embeddings().weight.data[77] = float("nan")
    return CausalLM(model)


@functools.cache
def oracle() -> CausalLM:
    """The tiny Llama without packed weights: quick where each forward has another number of tokens."""
    return CausalLM(build("llama"), fast=False)


@functools.cache
def stranger() -> CausalLM:
    """A draft that knows nothing of any target."""
    return CausalLM(build("gpt2", seed=5, num_hidden_layers=1))


@torch.no_grad()
def shake(model: PreTrainedModel, spread: float) -> None:
    """Draw all weights anew: matrices by their number of inputs, vectors a little around what they were."""
    done: set[int] = set()
    for parameter in model.parameters():
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        if parameter.ndim >= 2:
            parameter.normal_(0.0, spread / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


@torch.no_grad()
def nudge(model: torch.nn.Module, amount: float, seed: int = 0) -> None:
    """Add a little noise to all weights, so that the model is often right about what it was."""
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * amount)


def prompts(lengths: Sequence[int] = (1, 5, 17, 40), vocab: int = VOCAB, seed: int = 7) -> list[list[int]]:
    """Random prompts of these lengths."""
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(length)] for length in lengths]


def generator(
    target: CausalLM,
    drafter: Drafter | None = None,
    policy: Policy | None = None,
    *,
    eos: Sequence[int] = (),
    tokenizer: Any = None,
    **options: Any,
) -> Generator:
    """A ``Generator`` around models that are there already; drafts as much as it may unless told otherwise."""
    drafter = drafter or NoDrafter()
    policy = policy or Constant(drafter.needs.longest)
    engine = Engine(target, drafter, policy, wrap=PredictedOutputs, tokenizer=tokenizer, **options)
    return Generator(engine, tokenizer, eos, DrafterInfo("tiny", True))


def warp(params: Sequence[SamplingParams], vocab: int = VOCAB, prompt_lengths: Sequence[int] | None = None) -> Warp:
    """Of rows without end-of-sequence ids on the CPU; prompts have one token unless told otherwise."""
    return Warp.of(
        params,
        vocab_size=vocab,
        eos_token_ids=[()] * len(params),
        prompt_lengths=prompt_lengths or [1] * len(params),
        device="cpu",
    )


def view(
    texts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    vocab: int = VOCAB,
    seeds: Sequence[int] | None = None,
    *,
    draws: bool = False,
) -> View:
    """Rows whose committed tokens are ``texts``, as the engine shows them to a drafter in their first step.

    What stands behind a row's end is its own beginning again, so that a drafter that looks there is found out.
    """
    lengths = [len(text) for text in texts]
    width = max(lengths) + 3
    history = torch.tensor([[text[i % len(text)] for i in range(width)] for text in texts])
    rows = [params] * len(texts) if isinstance(params, SamplingParams) else params
    on_device = torch.tensor(lengths)
    noise = Noise(torch.tensor(seeds or [0] * len(texts)), on_device)
    return View(tuple(range(len(texts))), history, on_device, tuple(lengths), warp(rows, vocab, lengths), noise, draws)


def admit(drafter: Drafter, texts: Sequence[Sequence[int]]) -> None:
    """Start a row for each text with a drafter that reads no hidden layers."""
    for row, text in enumerate(texts):
        drafter.admit(row, torch.tensor(text[:-1], dtype=torch.long), {})


def paths(tree: TokenTree, row: int) -> dict[int, tuple[int, ...]]:
    """The drafted tokens from the root to each valid node of a row, by node; the root's path is empty."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, tree.tokens.shape[1]):
        if tree.valid[row, node]:
            found[node] = (*found[int(tree.parents[row, node])], int(tree.tokens[row, node]))
    return found


def pending(generator: Generator) -> int:
    """How many requests run or wait."""
    engine = generator.engine
    engine.process_queue()
    return len(engine._running()) + engine.waiting


def draft_model(
    draft: CausalLM,
    target: CausalLM,
    tokens: int = 4,
    branching: tuple[int, ...] | None = None,
) -> tuple[DraftModel, Constant]:
    """A draft model with the policy that always takes its full length: chains without siblings, or trees."""
    options = DraftOptions(num_assistant_tokens=tokens, branching=branching)
    drafter = DraftModel(options, draft, target.vocab_size)
    return drafter, Constant(drafter.needs.longest, confidence=1e-9 if branching is None else 0.0)


Propose = Callable[[View, Plan], Draft]


@final
class ScriptedDrafter(Drafter):
    """Proposes what a function says, and keeps a record of what it was told."""

    def __init__(self, propose: Propose, max_nodes: int = 8, hidden_layers: tuple[int, ...] = ()) -> None:
        self._propose = propose
        self.needs = Needs(hidden_layers=hidden_layers, max_nodes=max_nodes)
        self.rows: set[int] = set()
        self.admitted: list[tuple[int, list[int], dict[int, Tensor]]] = []
        self.committed: list[tuple[View, Draft, Any, Any]] = []

    def admit(self, row: int, prompt: Tensor, hidden: Mapping[int, Tensor]) -> None:
        assert row not in self.rows, f"row {row} was admitted twice"
        self.rows.add(row)
        self.admitted.append((row, prompt.tolist(), dict(hidden)))

    def propose(self, view: View, plan: Plan) -> Draft:
        assert set(view.rows) <= self.rows
        return self._propose(view, plan)

    def commit(self, view: View, draft: Draft, verdict: Any, out: Any) -> None:
        self.committed.append((view, draft, verdict, out))

    def release(self, row: int) -> None:
        self.rows.remove(row)


@final
class ScriptedPolicy(Policy):
    """Plans what a function says, and keeps a record of what it was told."""

    def __init__(self, plan: Callable[[View, Sequence[int]], Plan]) -> None:
        self._plan = plan
        self.observed: list[tuple[Plan, StepResult]] = []
        self.released: list[int] = []

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return self._plan(view, limits)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        self.observed.append((plan, step))

    def release(self, row: int) -> None:
        self.released.append(row)


class Liar:
    """Random trees of random shapes: right tokens, wrong ones, twins and padding anywhere.

    Args:
        truths: whole texts, prompt and continuation, of which the right tokens are known.
        honesty: the share of nodes that hold the right token, where there is one.
    """

    def __init__(
        self, truths: Sequence[Sequence[int]], nodes: int = 7, honesty: float = 0.6, vocab: int = VOCAB, seed: int = 0
    ) -> None:
        self._truths = [list(truth) for truth in truths]
        self._nodes = nodes
        self._honesty = honesty
        self._vocab = vocab
        self._random = random.Random(seed)

    def __call__(self, view: View, plan: Plan) -> Draft:
        size = 1 + self._nodes
        tokens = torch.zeros(len(view.rows), size, dtype=torch.long)
        parents = torch.full_like(tokens, PAD)
        for b in range(len(view.rows)):
            text = view.history[b, : view.host_lengths[b]].tolist()
            self._grow(text, plan.lengths[b], tokens[b], parents[b])
        return Draft(TokenTree(tokens, parents, depth=self._nodes), Law.FIXED)

    def _grow(self, text: list[int], longest: int, tokens: Tensor, parents: Tensor) -> None:
        truth = next((truth for truth in self._truths if truth[: len(text)] == text), text)
        tokens[0], parents[0] = text[-1], -1
        depth = {0: 0}
        for node in range(1, tokens.shape[0]):
            tokens[node] = self._random.randrange(self._vocab)  # padding is random as well
            parent = self._random.choice([*depth, max(depth)])
            if self._random.random() < 0.15 or depth[parent] >= longest:
                continue
            place = len(text) + depth[parent]
            if self._random.random() < self._honesty and place < len(truth):
                tokens[node] = truth[place]
            parents[node] = parent
            depth[node] = depth[parent] + 1


def liar(truths: Sequence[Sequence[int]], nodes: int = 7, **options: Any) -> ScriptedDrafter:
    return ScriptedDrafter(Liar(truths, nodes, **options), max_nodes=nodes)


def tokenizer(vocab: int = VOCAB, eos: str | None = None) -> PreTrainedTokenizerFast:
    """One printable character a token, from the space on: id 0 is " ", id 33 is "A"."""
    characters = {chr(32 + index): index for index in range(vocab)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(characters, unk_token=" "))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
