"""One-token latency of drafts of equal size and different depth: writes benchmarks/results/depth.jsonl.

A draft's latency grows with its layers and hardly with its width (arXiv:2402.01528, section 4). Weights are random: the
time of a forward does not depend on them. For each depth, the width is the multiple of 64 whose layers come nearest to
``--parameters`` million parameters; embedding and output layer, which differ with the width, are not counted. Models
take turns, round by round, so that machine drift affects all alike.

    python -m benchmarks depth --parameters 40 --depths 1 2 4 8 16

Then latency by depth at the width --fixed-width, and by width at the depth --fixed-depth.
"""

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import markdown_table, read
from foredraft.core.tree import TokenTree
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.prefill import prefill

HEAD = 64
"""Width of a head; there are as many key-value heads as query heads."""


def of_layers(width: int, layers: int) -> int:
    """Parameters of attention with square projections, and of gated feed-forward layers of three times the width."""
    return layers * (4 * width * width + 3 * width * 3 * width)


def width_for(layers: int, parameters: float) -> int:
    return min(range(HEAD, 16_384, HEAD), key=lambda width: abs(of_layers(width, layers) - parameters))


def build(layers: int, width: int, vocabulary: int) -> CausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return CausalLM(LlamaForCausalLM(config).eval(), verify=False)


class Draft:
    """A model with ``cached`` tokens in its cache that repeats the same forward of a chain of ``nodes`` tokens."""

    def __init__(self, model: CausalLM, cached: int, nodes: int = 1) -> None:
        self.model = model
        self._cache = model.new_cache()
        prompt = torch.arange(cached, device=model.device) % model.vocab_size
        self._cache.reserve([0], cached + nodes)
        prefill(model, self._cache, (0,), prompt[None], (0,))
        tree = TokenTree.chain(torch.ones(1, nodes, dtype=torch.long, device=model.device))
        self._step = model.address(tree, torch.tensor([cached], device=model.device), (0,), cached + nodes)
        self.total = sum(weight.numel() for weight in model.model.parameters())
        self.milliseconds: list[float] = []

    def run(self, times: int) -> None:
        """Time this many forwards."""
        for _ in range(times):
            started = time.perf_counter()
            self.model.forward(self._step, self._cache)
            self.milliseconds.append(1e3 * (time.perf_counter() - started))

    def line(self, series: str) -> dict:
        found, config = sorted(self.milliseconds), self.model.config
        return {
            "kind": "run",
            "series": series,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "parameters_of_layers": of_layers(config.hidden_size, config.num_hidden_layers),
            "parameters": self.total,
            "forwards": len(found),
            "milliseconds": round(found[len(found) // 2], 4),
            "quartiles": [round(found[len(found) // 4], 4), round(found[3 * len(found) // 4], 4)],
        }


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    shapes = {
        "equal": [(depth, width_for(depth, 1e6 * args.parameters)) for depth in args.depths],
        "by depth": [(depth, args.fixed_width) for depth in args.depths],
        "by width": [(args.fixed_depth, width) for width in args.widths],
    }
    distinct = dict.fromkeys(shape for series in shapes.values() for shape in series)
    built = {(n, width): Draft(build(n, width, args.vocabulary), args.cached) for n, width in distinct}
    for draft in built.values():
        draft.run(3)
        draft.milliseconds.clear()
    for _ in range(args.rounds):
        for draft in built.values():
            draft.run(args.forwards)
    yield from (built[shape].line(series) for series, some in shapes.items() for shape in some)


def table() -> str:
    """Time per drafted token by the draft model's depth and width."""
    kinds = read(RESULTS / "depth.jsonl")
    origin, parts = kinds["provenance"][0], list[str]()
    for title, series in (("equal parameters", "equal"), ("one width", "by depth"), ("one depth", "by width")):
        runs = [run for run in kinds["run"] if run.get("series", "equal") == series]
        lines = [
            [
                f"{run['layers']} x {run['width']}",
                f"{run['parameters_of_layers'] / 1e6:.1f}",
                f"{run['milliseconds']:.2f} ({run['quartiles'][0]:.2f} to {run['quartiles'][1]:.2f})",
                f"{run['milliseconds'] / runs[0]['milliseconds']:.2f}",
            ]
            for run in runs
        ]
        head = [f"{title}: layers x width", "parameters in layers, millions", "ms per token", "relative to the first"]
        parts += [*markdown_table(head, lines), ""] if lines else []
    return "\n".join([*parts, f"Made by `{origin['command']}`: {origin_line(origin)}."])


EXPERIMENT = Experiment(
    name="depth",
    question="latency of drafts by depth: methods/pruned_drafts.md",
    options={
        "parameters": option(40.0, "of the layers, in millions"),
        "depths": option([1, 2, 4, 8, 16]),
        "fixed_width": option(512),
        "fixed_depth": option(4),
        "widths": option([256, 512, 768, 1024]),
        "vocabulary": option(8192),
        "cached": option(256, "tokens in the cache"),
        "rounds": option(20),
        "forwards": option(10, "forwards per round"),
    },
    measure=measure,
    facts=lambda args: {"vocabulary": args.vocabulary, "rounds": args.rounds},
    threads=None,
    tables={"docs/methods/pruned_drafts.md": {"measured": table}},
    rank=4,
    hours=0.1,
)
