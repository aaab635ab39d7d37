"""A drafter as server options: vLLM's ``speculative_config`` and SGLang's flags.

vLLM drafts chains only; SGLang's trees are those of EAGLE-2. Heads must first be converted with ``foredraft export``.
The versions whose names these are: docs/measure.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from foredraft.compose.load import Spec
from foredraft.drafters.common.eagle import DynamicOptions
from foredraft.drafters.common.templates import Template
from foredraft.drafters.draft_model import Options as DraftModelOptions
from foredraft.drafters.prompt_lookup import Options as PromptLookupOptions


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """``vllm``: a ``speculative_config``; ``sglang``: flags. None if the server lacks the method; see ``note``."""

    vllm: dict[str, Any] | None
    sglang: str | None
    note: str = ""


def server_config(spec: str, chain: str | None = None) -> ServerConfig:
    """Server options for a drafter.

    Args:
        spec: a drafter with a constant size.
        chain: the best chain of the same method, for a server without trees.

    Raises:
        OptionError: unknown drafter.
    """
    ours, chain_only = Spec.parse(spec), Spec.parse(chain or spec)
    path = ours.path or "PATH"
    if ours.name in ("eagle1", "eagle2", "eagle3"):
        method = "eagle3" if ours.name == "eagle3" else "eagle"
        vllm = {"method": method, "model": path, "num_speculative_tokens": _tree(chain_only.options).depth}
        nodes, depth, top_k = _tree(ours.options)
        flags = _sglang(method.upper(), path, steps=depth, top_k=top_k, tokens=nodes + 1)
        length = "the best chain" if chain is not None else "a chain of the tree's depth"
        tree = "" if top_k == 1 else f"vLLM drafts chains only, so its config has {length}; "
        return ServerConfig(
            vllm,
            flags,
            f"{tree}export the head first: foredraft export {path} --to speculators (for vLLM), or --to sglang.",
        )
    if ours.name == "draft_model":
        options = ours.options
        assert isinstance(options, DraftModelOptions)
        branching = options.branching
        length = len(branching) if branching else options.num_assistant_tokens
        note = "With a draft model both servers draft chains, not trees." if branching else ""
        vllm = {"method": "draft_model", "model": path, "num_speculative_tokens": length}
        return ServerConfig(vllm, _sglang("STANDALONE", path, steps=length, top_k=1, tokens=length + 1), note)
    if ours.name == "prompt_lookup":
        options = ours.options
        assert isinstance(options, PromptLookupOptions)
        length = options.prompt_lookup_num_tokens
        vllm = {
            "method": "ngram",
            "num_speculative_tokens": length,
            "prompt_lookup_max": options.max_matching_ngram_size,
            "prompt_lookup_min": options.min_matching_ngram_size,
        }
        flags = f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {length + 1}"
        return ServerConfig(vllm, flags)
    return ServerConfig(None, None, f"Neither vLLM nor SGLang runs {ours.name}.")


class _Tree(NamedTuple):
    nodes: int
    depth: int
    top_k: int


def _tree(options: Any) -> _Tree:
    """The tree of an EAGLE method's options."""
    if isinstance(options, DynamicOptions):
        depth, width = min(options.depth, options.nodes), options.top_k
        return _Tree(min(options.nodes, width + (depth - 1) * width**2), depth, width)
    template = Template.of(options.tree)
    return _Tree(template.nodes, template.depth, 1 + max(path[-1] for path in template.paths))


def _sglang(algorithm: str, path: str, *, steps: int, top_k: int, tokens: int) -> str:
    return (
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {path} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk {top_k} --speculative-num-draft-tokens {tokens}"
    )
