"""Acceptance at one node by the number of children, for shared noise, recursive rejection and picked tokens.

The contexts are those of the bundled target's own sampled outputs; the draft is the bundled draft model. Every rule is
the library's own, run on the same laws.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.pictures import grounded
from foredraft.bench.prompts import standard_prompts
from foredraft.bench.report import plots
from foredraft.core.draft import Draft, Law, Target
from foredraft.core.rng import HashedRng, Noise, RandomStream, draw_distinct, exponentials
from foredraft.core.tree import TokenTree
from foredraft.core.verify import verify
from foredraft.drafters.trees.static import without_earlier

CHILDREN = (1, 2, 3, 4, 6, 8)
DRAWS = 16
"""Random numbers for each context."""
LawOf = Float[Tensor, "B V"]
Rule = Callable[[LawOf, LawOf, int, Noise], Float[Tensor, "B"]]


def accepted(p: LawOf, draft: Draft, noise: Noise, rule: str | None) -> Float[Tensor, "B"]:
    """1 where a child is accepted."""
    laws = p[:, None].expand(-1, draft.tree.tokens.shape[1], -1)
    verdict = verify(Target(laws.argmax(-1), laws), draft, HashedRng(noise), rule)
    return verdict.accepted().float()


def family(children: Int[Tensor, "B K"]) -> TokenTree:
    """A root with these children."""
    rows, count = children.shape
    parents = torch.tensor([-1, *[0] * count]).expand(rows, -1)
    tokens = torch.cat([torch.zeros_like(children[:, :1]), children], 1)
    return TokenTree(tokens, parents.contiguous(), 1).counted()


def shared(p: LawOf, q: LawOf, count: int, noise: Noise) -> Float[Tensor, "B"]:
    """Children ranked with the noise of the target's draw; accepted if equal."""
    children = (q / noise.times(0, q.shape[-1])).topk(count, -1).indices
    return accepted(p, Draft(family(children), Law.FIXED), noise, None)


def picked(p: LawOf, q: LawOf, count: int, noise: Noise) -> Float[Tensor, "B"]:
    """The likeliest children; accepted if equal."""
    return accepted(p, Draft(family(q.topk(count, -1).indices), Law.FIXED), noise, None)


def recursive(p: LawOf, q: LawOf, count: int, noise: Noise) -> Float[Tensor, "B"]:
    """Children drawn without replacement; recursive rejection."""
    bits = noise.bits(RandomStream.DRAFT, torch.zeros_like(noise.positions))
    children, chances = draw_distinct(q, exponentials(bits, q.shape[-1]), count)
    earlier = (torch.arange(count - 1) < torch.arange(count)[:, None]).float()
    laws = without_earlier(
        q[:, None].repeat(1, count, 1),
        children[:, None, : count - 1].expand(-1, count, -1),
        chances[:, None, : count - 1] * earlier,
    )
    drafted = torch.cat([torch.zeros_like(laws[:, :1]), laws], 1)
    return accepted(p, Draft(family(children), Law.WITHOUT_REPLACEMENT, drafted), noise, "recursive")


RULES: dict[str, Rule] = {"shared noise": shared, "recursive rejection": recursive, "picked": picked}


@torch.inference_mode()
def laws(temperature: float, new_tokens: int) -> tuple[LawOf, LawOf]:
    """Of target and draft after each token of the target's own outputs."""
    target, draft = foredraft.load("sample", "none"), foredraft.load("sample-draft", "none")
    found: list[tuple[Tensor, Tensor]] = []
    for seed, prompt in enumerate(standard_prompts()):
        given = target.encode(prompt.prompt)
        output = target.generate(
            prompt.prompt, max_new_tokens=new_tokens, temperature=temperature, seed=seed, eos_token_id=()
        ).tokens
        ids = torch.tensor([[*given, *output]])
        both = (each.engine.target.model(ids).logits[0, len(given) - 1 : -1] for each in (target, draft))
        found.append(tuple((logits.float() / temperature).softmax(-1) for logits in both))
    return torch.cat([p for p, _ in found]), torch.cat([q for _, q in found])


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """The share of contexts and draws in which a child is accepted, by rule and number of children."""
    temperature = 1.0
    p, q = laws(temperature, args.new_tokens)
    rates: dict[str, dict[int, float]] = {name: {} for name in RULES}
    for name, rule in RULES.items():
        for count in CHILDREN:
            noises = [Noise(torch.full((len(p),), seed), torch.arange(len(p))) for seed in range(DRAWS)]
            rates[name][count] = float(torch.stack([rule(p, q, count, noise) for noise in noises]).mean())
    variation = float(0.5 * (p - q).abs().sum(-1).mean())
    facts = {"kind": "rates", "temperature": temperature, "contexts": len(p), "draws": DRAWS}
    yield {**facts, "total_variation": variation, "rates": rates}


@plots.styled()
def picture() -> str:
    """The chart as SVG."""
    origin, found = map(json.loads, (RESULTS / "one_node.jsonl").read_text(encoding="utf-8").splitlines())
    figure, axes = plots.canvas(4.6, 3.0)
    for number, (name, rates) in enumerate(found["rates"].items()):
        axes.plot(list(map(int, rates)), list(rates.values()), marker="o", color=plots.color(number), label=name)
    axes.set_xlabel("children of the node")
    axes.set_ylabel("a child is accepted")
    axes.set_xticks(CHILDREN)
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    axes.set_title("Acceptance at one node, temperature 1")
    figure.supxlabel(f"Bundled target and draft model.\n{origin_line(origin)}", x=0.01, ha="left", fontsize=6)
    return grounded(plots.themed_svg(figure, "Acceptance at one node by the number of children"))


EXPERIMENT = Experiment(
    name="one_node",
    question="acceptance at one node: methods/shared_noise.md",
    options={"new_tokens": option(96)},
    measure=measure,
    figures={"one_node": picture},
    hours=0.2,
)
