"""One-token latency of drafts of equal size and different depth: writes benchmarks/results/depth.jsonl.

A draft's latency grows with its layers and hardly with its width (arXiv:2402.01528, section 4). Weights are random: the
time of a forward does not depend on them. For each depth, the width is the multiple of 64 whose layers come nearest to
``--parameters`` million parameters; embedding and output layer, which differ with the width, are not counted. Models
take turns, round by round, so that machine drift affects all alike.

    python benchmarks/depth.py --parameters 40 --depths 1 2 4 8 16

Then latency by depth at the width --fixed-width, and by width at the depth --fixed-depth.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from origin import provenance
from transformers import LlamaConfig, LlamaForCausalLM

from foredraft.core.tree import TokenTree
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.prefill import prefill

RESULTS = Path(__file__).resolve().parent / "results" / "depth.jsonl"
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=40.0, help="of the layers, in millions")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--fixed-width", type=int, default=512)
    parser.add_argument("--fixed-depth", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512, 768, 1024])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--cached", type=int, default=256, help="tokens in the cache")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--forwards", type=int, default=10, help="forwards per round")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    shapes = {
        "equal": [(depth, width_for(depth, 1e6 * args.parameters)) for depth in args.depths],
        "by depth": [(depth, args.fixed_width) for depth in args.depths],
        "by width": [(args.fixed_depth, width) for width in args.widths],
    }
    distinct = dict.fromkeys(shape for series in shapes.values() for shape in series)
    built = {(n, width): Draft(build(n, width, args.vocabulary), args.cached) for n, width in distinct}
    drafts = list(built.values())
    for draft in drafts:
        draft.run(3)
        draft.milliseconds.clear()
    for _ in range(args.rounds):
        for draft in drafts:
            draft.run(args.forwards)
    given = f"--parameters {args.parameters:g} --depths {' '.join(map(str, args.depths))} --cached {args.cached}"
    origin = provenance(f"python benchmarks/depth.py {given}", vocabulary=args.vocabulary, rounds=args.rounds)
    lines = [origin, *(built[shape].line(series) for series, some in shapes.items() for shape in some)]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for line in lines[1:]:
        print(f"{line['series']:8} {line['layers']:3} layers x {line['width']:5}: {line['milliseconds']:8.3f} ms")


if __name__ == "__main__":
    main()
