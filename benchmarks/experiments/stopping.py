"""When a chain of drafted tokens should end: fixed lengths, thresholds, classifiers, the policy, and an oracle.

Dynamic lookahead (Mamou et al., arXiv:2405.04304) asks a classifier after each drafted token whether to go on. Here it
is the policy's own logistic model of acceptance, learned online, with a threshold for the token or for its whole path
(as in SpecDec++, arXiv:2405.19715) in place of prices. The oracle drafts exactly the tokens that will be accepted.

    python -m benchmarks stopping --prompts ../shared/data/prompts/eagle/*/question.jsonl
    python -m benchmarks stopping --target MODEL --draft DRAFT --chat --prompts ...

Texts do not depend on drafts, and what a draft says from a place of a text on does not depend on where the last draft
ended. So each text is recorded once, with the longest chain from every place (into ``--work``), and all schedules are
replayed on it, one prompt after another, with what they have learned. Acceptance equals that of decoding.

Times are a model, so results do not depend on the machine: a forward of the target takes 1, whatever its width, and a
draft level takes c. The policy gets these as its times, once for each c; the pair's own c is measured first. Chains
have no siblings. A schedule at a temperature is a JSON line; a recording is not made again.
"""

import json
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

import foredraft
from benchmarks.kit.experiment import PROMPTS, RESULTS, Cell, Experiment, Line, measured, option
from benchmarks.kit.origin import origin_line
from benchmarks.kit.reading import interval_of_sums, markdown_table, read
from foredraft.bench.prompts import read_prompts
from foredraft.core.draft import Draft
from foredraft.core.drafter import Drafter, Needs, Plan, View
from foredraft.core.rng import Noise
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.sampling.warp import Warp
from foredraft.core.tree import TokenTree
from foredraft.core.worth import DraftNodes, Worth
from foredraft.drafters.common.wrapper import DrafterWrapper
from foredraft.engine.fitting import round_up
from foredraft.engine.generator import Generator
from foredraft.engine.policy import NEUTRAL, Calibrated, Constant, Heuristic, Policy, Throughput
from foredraft.engine.policy.estimates import AcceptanceModel
from foredraft.engine.step import RowStep, StepResult
from foredraft.engine.tail import StepEnd

FILE = RESULTS / "stopping.jsonl"
ORACLE, AUTO = "oracle", "auto"
LONGEST = 16
"""Tokens of the longest chain of every schedule."""
CONSTANT = (1, 2, 3, 4, 6, 8, 12, 16)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
STOPS = (0.3, 0.5, 0.7)
PATHS = (0.1, 0.2, 0.4, 0.6)
RATIOS = (0.05, 0.1, 0.2, 0.4)
SAMPLES = 2000
"""Of the bootstrap."""


# ---- schedules


class Recording(NamedTuple):
    """What the draft says from each place of a text on, if it is right before that. ``right``: how many of its tokens
    are the text's. ``scores``: by place, the draft's log-probabilities of the paths to each of its tokens."""

    task: str
    right: list[int]
    scores: list[list[float]]


@final
class Known(Policy):
    """The oracle: drafts the tokens that will be accepted."""

    def __init__(self) -> None:
        self.right: list[int] = []

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan((self.right[len(view.outputs[0])],))


@final
class Classifier(Policy):
    """Ends a chain by a model of acceptance: the throughput policy's, which learns from the same tokens.

    Args:
        threshold: a chain ends after its first token that is accepted with a lower probability.
        path: the probability is that of the whole path, not of the token after an accepted path.
    """

    def __init__(self, threshold: float, *, path: bool) -> None:
        self._threshold, self._path = threshold, path
        self._model, self._recent = AcceptanceModel(), 0.5

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return Plan((min(LONGEST, *limits),), worth=Worth(self._model.weights, NEUTRAL, (self._recent,), {}))

    def end(self, worth: Worth, nodes: DraftNodes) -> int:
        """The length of this chain."""
        values = worth.values(0, nodes)
        for node, (above, value) in enumerate(pairwise(values), start=1):
            if (value if self._path else value / above) < self._threshold:
                return node
        return len(values) - 1

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        (result,) = step.rows
        if not result.drafted or plan.worth is None:
            return
        for node in range(1, min(result.accepted + 1, result.drafted) + 1):
            features = plan.worth.features(0, result.nodes, node, node)
            self._model.learn(features, accepted=node <= result.accepted)
        recent = Throughput.RECENT
        self._recent = recent * self._recent + (1 - recent) * bool(result.accepted)

    def release(self, row: int) -> None:
        self._recent = 0.5


class Arm(NamedTuple):
    """A schedule by its name, and the c with which it runs: of ``auto`` alone, else 0."""

    name: str
    ratio: float = 0.0


def policies(needs: Needs, *, any_width: bool) -> dict[str, Callable[[], Policy]]:
    """What makes each schedule, for chains of up to ``LONGEST`` tokens."""
    made: dict[str, Callable[[], Policy]] = {ORACLE: Known}
    made |= {f"constant {length}": partial(Constant, length) for length in CONSTANT}
    made |= {f"constant {LONGEST}, threshold {least:g}": partial(Constant, LONGEST, least) for least in THRESHOLDS}
    made["heuristic"] = partial(Heuristic, LONGEST, longest=LONGEST)
    made["heuristic, threshold 0.4"] = partial(Heuristic, LONGEST, 0.4, LONGEST)
    made["calibrated"] = partial(Calibrated, LONGEST, 0.4)
    made |= {f"classifier, token {least:g}": partial(Classifier, least, path=False) for least in STOPS}
    made |= {f"classifier, path {least:g}": partial(Classifier, least, path=True) for least in PATHS}
    return made | {AUTO: partial(Throughput, needs, any_width=any_width)}


# ---- recordings


@final
class Recorder(DrafterWrapper):
    """Drafts for itself: keeps the inner drafter's chain of each place of the output, and gives the step none."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.chains: list[tuple[list[int], list[float]]] = []

    def propose(self, view: View, plan: Plan) -> Draft:
        draft = super().propose(view, replace(plan, chain=True))
        assert draft.scores is not None
        self.chains.append((draft.tree.tokens[0, 1:].tolist(), draft.scores[0, 1:].tolist()))
        return Draft(TokenTree.root(view.roots), draft.law)


class Pair:
    """A target and its draft model."""

    def __init__(self, target: str, draft: str, new_tokens: int) -> None:
        self._plain = foredraft.load(target, "none", device="cpu")
        self._owner = foredraft.load(self._plain, f"draft_model:{draft},num_assistant_tokens={LONGEST}")
        self._recorder = Recorder(self._owner.engine.drafter)
        self._generator = foredraft.load(self._plain, self._recorder, policy=Constant(LONGEST))
        self._new_tokens = new_tokens
        self.any_width, self.needs = self._plain.engine.target.any_width, self._recorder.needs

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._generator, self._owner, self._plain):
            each.close()

    def decode(self, generator: Generator, prompt: Any, seed: int, temperature: float) -> list[int]:
        limits: dict[str, Any] = {"max_new_tokens": self._new_tokens, "eos_token_id": (), "top_p": None}
        return generator.generate(prompt, temperature=temperature, seed=seed, **limits).tokens

    def record(self, task: str, prompt: Any, seed: int, temperature: float) -> Recording:
        """Of one prompt."""
        self._recorder.chains = []
        text = self.decode(self._generator, prompt, seed, temperature)
        right, scores = [], []
        for place, (chain, own) in enumerate([*self._recorder.chains, ([], [])]):  # the last token needs no draft
            hits = [drafted == token for drafted, token in zip(chain, text[place:], strict=False)]
            right.append((*hits, False).index(False))
            scores.append(own)
        assert len(right) == len(text)
        return Recording(task, right, scores)

    def ratio(self, prompts: Sequence[Any]) -> dict[str, float]:
        """Milliseconds of a draft level and of a step without a draft, in turns: of the fastest steps, since others
        may have waited for the processor."""
        timed = Timed()
        self._owner.engine.policy = timed
        for prompt in prompts:
            self.decode(self._owner, prompt, 0, 0.0)
        level, plain = (1e3 * float(np.quantile(each, 0.05)) for each in (timed.levels, timed.plain))
        return {"draft_ms": round(level, 3), "target_ms": round(plain, 3), "ratio": round(level / plain, 2)}


@final
class Timed(Policy):
    """Every other step drafts. ``levels``, ``plain``: seconds of a draft level, and of steps without a draft."""

    def __init__(self) -> None:
        self.levels: list[float] = []
        self.plain: list[float] = []

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        drafts = len(self.levels) < len(self.plain)
        return Plan((min(8, *limits) if drafts else 0,), chain=True)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        if step.levels:
            self.levels.append(step.draft_seconds / step.levels)
        else:
            self.plain.append(step.verify_seconds + step.host_seconds)


# ---- replays


def view_of(temperature: float, output: list[int]) -> View:
    """A row with this output, which may grow."""
    device = torch.device("cpu")
    params = [SamplingParams(temperature=temperature)]
    warp = Warp.of(params, vocab_size=1, eos_token_ids=[()], prompt_lengths=[1], device=device)
    one = torch.ones(1, dtype=torch.long)
    return View((0,), one[None], one, (1,), warp, Noise(one, one), outputs=(output,))


def drafted(policy: Policy, plan: Plan, scores: Sequence[float]) -> int:
    """How many tokens of a chain with these scores this plan drafts; see ``build_chain``."""
    length = min(plan.length, len(scores))
    if isinstance(policy, Classifier) and plan.worth is not None and length:
        return policy.end(plan.worth, chain(scores[:length]))
    for count, (above, score) in enumerate(pairwise([0.0, *scores[:length]]), start=1):
        if math.exp(score - above) < plan.confidence or math.exp(score) < sum(plan.level_price):
            return count
    return length


def chain(scores: Sequence[float]) -> DraftNodes:
    return DraftNodes([*range(-1, len(scores))], [0.0, *scores])


def replay(
    policy: Policy, recording: Recording, temperature: float, ratio: float, *, any_width: bool
) -> dict[str, Any]:
    """What a policy drafts for a text. It sees the times that the cost model says."""
    output: list[int] = []
    view, total = view_of(temperature, output), len(recording.right)
    counts = {"tokens": total, "forwards": 0, "drafted": 0, "accepted": 0}
    if isinstance(policy, Known):
        policy.right = recording.right
    while (place := len(output)) < total:
        plan = policy.plan(view, [total - place - 1])
        levels = drafted(policy, plan, recording.scores[place])
        nodes = chain(recording.scores[place][:levels])
        if plan.worth is not None and plan.worth.prices:
            nodes = chain(recording.scores[place][: len(plan.worth.keep([nodes])[0]) - 1])
        size = len(nodes.parents)
        accepted = min(recording.right[place], size - 1)
        row = RowStep([0] * (accepted + 1), size - 1, size - 1, accepted, True, range(1, accepted + 1), nodes)
        output.extend(row.emitted)
        width = size if any_width else round_up(size)
        tree = TokenTree.chain(torch.zeros(1, width, dtype=torch.long))
        policy.observe(
            view, plan, StepResult([row], StepEnd.known([row], 1), None, ratio * levels, 1.0, levels, tree=tree)
        )
        counts["forwards"] += 1
        counts["drafted"] += levels
        counts["accepted"] += accepted
    policy.release(0)
    return {"task": recording.task, **counts}


# ---- tables


class Counts(NamedTuple):
    """The texts of a schedule, as [texts, (tokens, forwards, drafted)]."""

    arm: Arm
    counts: np.ndarray

    @classmethod
    def of(cls, line: dict[str, Any]) -> "Counts":
        columns = ("tokens", "forwards", "drafted")
        counts = np.array([[text[name] for name in columns] for text in line["texts"]], dtype=np.float64)
        return cls(Arm(line["schedule"], line["c"]), counts)

    def speed(self, ratio: float) -> float:
        return float(speed(self.counts.sum(0), ratio))


def speed(sums: np.ndarray, ratio: float) -> np.ndarray:
    """Tokens per unit of time, of [3] or [3, samples] tokens, forwards and drafted tokens: 1 is plain decoding."""
    return sums[0] / (sums[1] + ratio * sums[2])


def kind(name: str) -> str:
    """What a schedule is, without its number."""
    if "threshold" in name and name.startswith("constant"):
        return "a threshold"
    return {"constant": "a constant length", "classifier": "the classifier"}.get(name.split()[0].strip(","), name)


class Group(NamedTuple):
    """The schedules of a pair at a temperature."""

    temperature: float
    cells: Sequence[Counts]

    def at(self, ratio: float) -> dict[str, Counts]:
        """The schedules' cells for this c."""
        return {each.arm.name: each for each in self.cells if each.arm.name != AUTO or each.arm.ratio == ratio}

    def best(self, ratio: float) -> Counts:
        """The fastest schedule but for the oracle."""
        found = [cell for name, cell in self.at(ratio).items() if name != ORACLE]
        return max(found, key=lambda cell: cell.speed(ratio))

    def shares(self, ratio: float) -> dict[str, float]:
        """Of the oracle's speed, by kind: its fastest schedule."""
        cells, found = self.at(ratio), dict[str, float]()
        for name, cell in cells.items():
            share = cell.speed(ratio) / cells[ORACLE].speed(ratio)
            found[kind(name)] = max(found.get(kind(name), 0.0), share)
        return found

    def lead(self, ratio: float) -> tuple[float, float]:
        """The interval of the policy's speed over that of the best schedule beside it."""
        cells = self.at(ratio)
        own = cells.pop(AUTO)
        other = max((each for name, each in cells.items() if name != ORACLE), key=lambda each: each.speed(ratio))
        both = np.concatenate([own.counts, other.counts], axis=1).tolist()
        return interval_of_sums(both, lambda sums: speed(sums[:3], ratio) / speed(sums[3:], ratio), SAMPLES)


def between(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def rows(group: Group, ratios: Sequence[float]) -> list[list[str]]:
    """A line for each schedule; the fastest of each column is bold."""
    best, found = {ratio: group.best(ratio) for ratio in ratios}, []
    for name in dict.fromkeys(each.arm.name for each in group.cells):
        own = [group.at(ratio)[name] for ratio in ratios]
        sums = [cell.counts.sum(0) for cell in own]
        shown = [f"{cell.speed(ratio):.2f}" for cell, ratio in zip(own, ratios, strict=True)]
        shown = [
            f"**{text}**" if cell is best[ratio] else text for text, cell, ratio in zip(shown, own, ratios, strict=True)
        ]
        both = [between([each[0] / each[1] for each in sums]), between([each[2] / each[0] for each in sums])]
        found.append([f"`{name}`" if name in (AUTO, "calibrated", "heuristic") else name, *both, *shown])
    return found


def findings(groups: Sequence[Group], ratios: Sequence[float]) -> str:
    """What the table says of the policy against the oracle and the others."""
    shares = [(group.temperature, ratio, group.shares(ratio)) for group in groups for ratio in ratios]
    names = [AUTO, "the classifier", "a threshold", "a constant length", "calibrated", "heuristic"]
    parts = []
    for name in names:
        shown = f"`{name}`" if name in (AUTO, "calibrated", "heuristic") else f"{name}"
        parts.append(f"{shown} {between([own[name] for _, _, own in shares])}")
    behind, apart = list[tuple[float, str]](), 0
    for group, ratio in product(groups, ratios):
        best, own = group.best(ratio), group.at(ratio)[AUTO]
        if best.arm.name != AUTO:
            lost = 100 * (1 - own.speed(ratio) / best.speed(ratio))
            behind.append((lost, f"T = {group.temperature:g}, c = {ratio:g} ({best.arm.name})"))
            apart += group.lead(ratio)[1] < 1
    total = len(groups) * len(ratios)
    text = f"Of the oracle's speed, with each kind's best number in hindsight: {', '.join(parts)}. "
    text += f"`auto`, which has no such number, is the fastest in {total - len(behind)} of {total} columns"
    if behind:
        text += f" and {min(behind)[0]:.0f} to {max(behind)[0]:.0f} % behind the fastest in the others, most at "
        text += f"{max(behind)[1]}; the 95 % interval over prompts excludes equality in {apart} of these {len(behind)}"
    return f"{text}."


def table(path: Path = FILE) -> str:
    """All pairs, for docs/schedules.md; empty without results."""
    if not path.exists():
        return ""
    lines, parts = read(path), []
    origins = lines["provenance"]
    for origin in {(each["target"], each["draft"]): each for each in origins}.values():
        parts += [*_pair(lines, origin), ""]
    made = "`python -m benchmarks stopping`, with the options in [stopping.jsonl](../benchmarks/results/stopping.jsonl)"
    return "\n".join([*parts, f"{origin_line(origins[0], among=origins)}. Made by {made}."])


def _pair(lines: dict[str, list[dict]], origin: dict[str, Any]) -> list[str]:
    """The findings, tables and facts of a pair."""
    key = (origin["target"], origin["draft"])
    own = [each for each in lines["cell"] if (each["target"], each["draft"]) == key]
    timed = next(each for each in lines["ratio"] if (each["target"], each["draft"]) == key)
    ratios = sorted({each["c"] for each in own if each["schedule"] == AUTO})
    heats = sorted({each["temperature"] for each in own})
    groups = [Group(heat, [Counts.of(each) for each in own if each["temperature"] == heat]) for heat in heats]
    head = ["schedule", "tokens a forward", "drafted a token", *(f"c = {ratio:g}" for ratio in ratios)]
    found = [findings(groups, ratios), ""]
    for group in groups:
        found += [*markdown_table([f"T = {group.temperature:g}: {head[0]}", *head[1:]], rows(group, ratios)), ""]
    count = len(own[0]["texts"])
    tasks = ", ".join(dict.fromkeys(text["task"] for text in own[0]["texts"]))
    found.append(
        f"Tokens per unit of time, where a target forward takes 1 and a draft level c; 1 is plain decoding. Bold: the "
        f"fastest but for the oracle. Chains of {key[1]} for {key[0]}, at most {LONGEST} tokens; {count} prompts of "
        f"{tasks}, {origin['new_tokens']} tokens each, with what was learned kept from prompt to prompt. `auto` has a "
        f"run for each c, with these times in place of measured ones. The pair's own c is {timed['ratio']:g} "
        f"({timed['draft_ms']:g} of {timed['target_ms']:g} ms)."
    )
    return found


# ---- command line


def recordings(
    pair: Pair, prompts: Sequence[tuple[str, Any]], temperature: float, work: Path, key: dict[str, Any]
) -> list[Recording]:
    """Of all prompts; those in the file ``work`` are not made again."""
    made = read(work).get("recording", []) if work.exists() else []
    made = [line for line in made if line["key"] == {**key, "temperature": temperature}]
    found = {line["prompt"]: Recording(*line["recording"]) for line in made}
    with work.open("a", encoding="utf-8") as out:
        for seed, (task, prompt) in enumerate(prompts):
            if seed not in found:
                found[seed] = pair.record(task, prompt, seed, temperature)
                line = {"kind": "recording", "key": {**key, "temperature": temperature}, "prompt": seed}
                out.write(json.dumps({**line, "recording": found[seed]}) + "\n")
                out.flush()
                print(f"T={temperature:g}, recorded {seed + 1} of {len(prompts)}", flush=True)
    return [found[seed] for seed in range(len(prompts))]


def asked(args: Namespace) -> list[tuple[str, Any]]:
    """Task and prompt."""
    if not args.prompts:
        raise SystemExit("Give files of prompts: --prompts.")
    return [
        (path.parent.name, own.prompt) for path in args.prompts for own in read_prompts(path, args.chat)[: args.count]
    ]


def names(args: Namespace) -> dict[str, str]:
    return {"target": Path(args.target).name, "draft": Path(args.draft).name}


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    """The pair's own c, if it is not known, and the schedules that are missing."""
    args.work.parent.mkdir(parents=True, exist_ok=True)
    prompts, own = asked(args), names(args)
    made = read(args.out) if args.out.exists() else {}
    key = {**own, "new_tokens": args.new_tokens, "tasks": [task for task, _ in prompts]}
    done = [each for each in made.get("cell", []) if own.items() <= each.items()]
    finished = {(each["temperature"], Arm(each["schedule"], each["c"])) for each in done}
    timed = [each for each in made.get("ratio", []) if own.items() <= each.items()]
    with Pair(args.target, args.draft, args.new_tokens) as pair:
        if not timed:
            timed = [{"kind": "ratio", **own, **pair.ratio([prompt for _, prompt in prompts[:4]])}]
            yield timed[0]
        makers = policies(pair.needs, any_width=pair.any_width)
        arms = [Arm(name) for name in makers if name != AUTO]
        arms += [Arm(AUTO, ratio) for ratio in sorted({*RATIOS, timed[0]["ratio"]})]
        for heat in (cell["temperature"] for cell in cells):
            left = [arm for arm in arms if (heat, arm) not in finished]
            found = recordings(pair, prompts, heat, args.work, key) if left else []
            for arm in left:
                policy = makers[arm.name]()
                texts = [replay(policy, each, heat, arm.ratio, any_width=pair.any_width) for each in found]
                yield {"kind": "cell", **own, "temperature": heat, "schedule": arm.name, "c": arm.ratio, "texts": texts}


EXPERIMENT = Experiment(
    name="stopping",
    question="when chains end, against an oracle: schedules.md",
    options={
        "target": option("sample"),
        "draft": option("sample-draft", "draft model of the target"),
        "prompts": PROMPTS,
        "chat": option(False, "prompts are user turns"),
        "count": option(6, "prompts of each file"),
        "new_tokens": option(64),
        "temperatures": option([0.0, 1.0]),
        "work": option(Path("build/stopping_work.jsonl"), "recordings"),
    },
    cells=lambda args: [{"kind": "cells", "temperature": heat} for heat in args.temperatures],
    measure=measure,
    facts=lambda args: {**names(args), "new_tokens": args.new_tokens},
    shown=table,
    tables={"docs/schedules.md": {"stopping": table}},
    hours=0.2,
    needs=lambda inputs: (inputs.prompts,),
    commands=lambda inputs: [measured("stopping", "--prompts", *inputs.questions())],
)
