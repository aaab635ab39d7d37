"""Tables of ``benchmarks/drafts.py`` for the pages of specinfer, pruned drafts and cascades."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from origin import origin_line
from reading import markdown_table, quotient, read, with_interval

from foredraft.files.provenance import short_commit

RESULTS = Path(__file__).resolve().parent / "results" / "drafts.jsonl"
CHOICES = 6
SAMPLES = 1000
"""Of the bootstrap."""
MODELS = {"alone": "distilled each by itself", "boosted": "boosted"}
GROUPS = (("alone", 1), *itertools.product(MODELS, (2, 3)))
"""Families and numbers of drafts; one draft is the first of both families."""
RULES = {None: "shared noise", "recursive": "multi-step sampling"}


def runs(kinds: dict[str, list[dict]], part: str) -> list[dict]:
    """The provenance of a part's runs."""
    return [each for each in kinds["provenance"] if f"drafts.py {part} " in each["command"] + " "]


def _lessons(kinds: dict[str, list[dict]], part: str) -> str:
    """What the drafts of a part were distilled on."""
    pruned = part in ("shapes", "cascades")
    every = {name: own for run in runs(kinds, part) for name, own in run.get("lessons", {}).items()}
    found = {name: own for name, own in every.items() if name.startswith("shape/") == pruned}
    tokens = sorted({own["tokens"] for own in found.values()})
    shares = [f"{own['learns']:.0%}" for _, own in sorted(found.items()) if own.get("learns", 1) < 1]
    rest = f", of which {' and '.join(shares)} count for the boosted ones after the first" if shares else ""
    return f"{' to '.join(f'{count:,}' for count in tokens)} tokens{rest}"


def _origin(kinds: dict[str, list[dict]], part: str) -> str:
    """Where a part was made: the machine and commits of its runs."""
    if not (found := runs(kinds, part)):
        return ""
    commits = list(dict.fromkeys(short_commit(each["commit"]) for each in found))
    several = {"commits": f"commits {', '.join(commits)}"} if len(commits) > 1 else {}
    return f"{origin_line({**found[0], **several})}. Made by `python benchmarks/drafts.py {part}`."


def _heat(temperature: float) -> str:
    return f"T={temperature:g}" if temperature else "greedy"


def _drafts(family: str, count: int) -> str:
    return f"{count} drafts, {MODELS[family]}" if count > 1 else "1 draft"


def _length(texts: Sequence[Sequence[float]]) -> float:
    """Tokens per forward of the target."""
    return sum(text[0] for text in texts) / sum(text[1] for text in texts)


def _speed(texts: Sequence[Sequence[float]]) -> float:
    """Tokens per second after the prompt."""
    return sum(text[0] for text in texts) / sum(text[3] for text in texts)


def _with_interval(texts: Sequence[Sequence[float]]) -> str:
    return with_interval(texts, _length, SAMPLES)


def _texts(cells: Iterable[dict], keys: Sequence[str]) -> dict[tuple, list]:
    """The texts of all rounds by these keys, in the order of rounds."""
    found: dict[tuple, list] = {}
    for cell in sorted(cells, key=lambda cell: cell["round"]):
        found.setdefault(tuple(cell[key] for key in keys), []).extend(cell["texts"])
    return found


def _settings(cells: Sequence[dict]) -> list[tuple[str, str]]:
    """Pairs of target and start, in order."""
    return list(dict.fromkeys((cell["target"], cell["start"]) for cell in cells))


def specinfer() -> str:
    """Hit rates of the first K choices, and acceptance of merged trees."""
    if not RESULTS.exists():
        return ""
    kinds = read(RESULTS)
    parts: list[str] = []
    for setting in _settings(kinds.get("hits", [])):
        cells = [cell for cell in kinds["hits"] if (cell["target"], cell["start"]) == setting]
        parts += [*_hit_rates(cells, "of {}, drafts from {}".format(*setting)), ""]
    for setting in _settings(kinds.get("trees", [])):
        cells = [cell for cell in kinds["trees"] if (cell["target"], cell["start"]) == setting]
        parts += [*_merged(cells, "{}, drafts from {}".format(*setting)), "", *_gains(cells), ""]
    notes = (
        "K choices come from the drafts in turn: with two drafts and K = 4, two of each. Chosen: the share of "
        "the target's tokens among them. Sampled: the probability that multi-step sampling accepts one of K tokens "
        "drawn at T=1. Nodes are those before merging; of the expansions measured, the best one is shown. "
        f"The drafts were distilled on {_lessons(kinds, 'hits')}."
    )
    return "\n".join([*parts, notes, *filter(None, (_origin(kinds, part) for part in ("hits", "trees")))])


class Curve(NamedTuple):
    """Hit rates of K = 1 to 6 choices, ``chosen`` as the likeliest or ``sampled``, of so many drafts of a family."""

    temperature: float
    kind: str
    family: str
    count: int
    rates: list[float]

    @property
    def drafts(self) -> str:
        return _drafts(self.family, self.count)


def curves(cells: Sequence[dict]) -> Iterator[Curve]:
    """All hit rates of these cells. One draft is the first of both families."""
    for temperature in sorted({cell["temperature"] for cell in cells}):
        own = [cell for cell in cells if cell["temperature"] == temperature]
        texts = [text for cell in own for text in cell["ranks"]]
        tokens = sum(cell["tokens"] for cell in own)
        for family, count in GROUPS:
            drafts = ["boosted/1", *(f"{family}/{number}" for number in range(2, count + 1))]
            shares = [_share(texts, drafts, k) / tokens for k in range(1, CHOICES + 1)]
            yield Curve(temperature, "chosen", family, count, shares)
            if temperature:
                sums = zip(*(cell["accepted"][f"{family} {count}"] for cell in own), strict=True)
                yield Curve(temperature, "sampled", family, count, [sum(each) / tokens for each in sums])


def _hit_rates(cells: Sequence[dict], title: str) -> list[str]:
    rows = [
        [f"{_heat(each.temperature)}, {each.kind}: {each.drafts}", *(f"{rate:.3f}" for rate in each.rates)]
        for each in curves(cells)
    ]
    return markdown_table([f"hit rate on tokens {title}", *(f"K = {k}" for k in range(1, CHOICES + 1))], rows)


def _share(texts: Sequence[dict[str, str]], drafts: Sequence[str], choices: int) -> int:
    """Tokens that are among the choices, which the drafts give in turn."""
    of_each = [choices // len(drafts) + (number < choices % len(drafts)) for number in range(len(drafts))]
    return sum(
        any(int(rank) < most for rank, most in zip(ranks, of_each, strict=True))
        for text in texts
        for ranks in zip(*(text[draft] for draft in drafts), strict=True)
    )


def _merged(cells: Sequence[dict], title: str) -> list[str]:
    found = _texts(cells, ("nodes", "temperature", "rule", "family", "models", "expansion"))
    columns = list(dict.fromkeys((key[1], key[2]) for key in found))
    rows = []
    for nodes, (family, count) in itertools.product(sorted({key[0] for key in found}), GROUPS):
        shown = []
        for heat, rule in columns:
            some = {key[5]: texts for key, texts in found.items() if key[:5] == (nodes, heat, rule, family, count)}
            best = max(some, key=lambda expansion: _length(some[expansion]), default=None)
            shown.append(f"{_with_interval(some[best])}, {best}" if best else "")
        if any(shown):
            rows.append([f"{nodes} nodes: {_drafts(family, count)}", *shown])
    names = [_heat(heat) + (f", {RULES[rule]}" if heat else "") for heat, rule in columns]
    return markdown_table([f"acceptance length, {title}", *names], rows)


def _gains(cells: Sequence[dict]) -> list[str]:
    """Acceptance lengths by each other on the same prompts, each with its best expansion: of several drafts by one's,
    and of boosted ones by those that are distilled each by itself."""
    keys = ("temperature", "rule", "nodes", "models", "family", "expansion")
    found: dict[tuple, dict[str, dict[tuple, Sequence[float]]]] = {}
    for cell in cells:
        *where, expansion = (cell[key] for key in keys)
        texts = found.setdefault(tuple(where), {}).setdefault(expansion, {})
        texts |= {(cell["round"], number): text for number, text in enumerate(cell["texts"])}
    best = {where: max(some.values(), key=lambda texts: _length([*texts.values()])) for where, some in found.items()}
    columns = list(dict.fromkeys(where[:2] for where in best))
    rows = []
    for nodes, count in itertools.product(sorted({where[2] for where in best}), (2, 3)):
        alone, boosted, one = (count, "alone"), (count, "boosted"), (1, "alone")
        for (first, second), title in (
            ((alone, one), f"{_drafts('alone', count)} / 1 draft"),
            ((boosted, alone), f"{count} drafts, boosted / each by itself"),
        ):
            pairs = [[best.get((*column, nodes, *each), {}) for each in (first, second)] for column in columns]
            shown = [_ratio(*pair) if pair[0] and pair[0].keys() == pair[1].keys() else "" for pair in pairs]
            if any(shown):
                rows.append([f"{nodes} nodes: {title}", *shown])
    names = [_heat(heat) + (f", {RULES[rule]}" if heat else "") for heat, rule in columns]
    return markdown_table(["ratio of acceptance lengths, same prompts", *names], rows) if rows else []


def _ratio(first: dict[tuple, Sequence[float]], second: dict[tuple, Sequence[float]]) -> str:
    """The first's acceptance length by the second's, with its interval over prompts."""
    return with_interval([(first[key], second[key]) for key in second], quotient(_length), SAMPLES)


class Shape(NamedTuple):
    """A pruned draft with so many drafted tokens: the line of its latency, its texts, and tokens per second by the
    formula of Yan et al., acceptance length / (time of the target's forward + drafted tokens x time of one)."""

    temperature: float
    name: str
    length: int
    latency: dict
    texts: list
    formula: float

    @property
    def measured(self) -> float:
        return _speed(self.texts)


def shaped(cells: Sequence[dict]) -> list[Shape]:
    """The pruned drafts of a target, by temperature and drafted tokens."""
    latency = {(line["latency"], line["forward_nodes"]): line for line in cells if "latency" in line}
    texts = _texts([cell for cell in cells if "texts" in cell], ("temperature", "shape", "length"))
    found = []
    for (heat, name, length), own in sorted(texts.items(), key=lambda item: (item[0][0], item[0][2])):
        if length and (name, 1) in latency:
            line, whole = latency[name, 1], latency["target", 1 + length]["milliseconds"]
            formula = 1e3 * _length(own) / (whole + length * line["milliseconds"])
            found.append(Shape(heat, name, length, line, own, formula))
    return found


def shapes() -> list[str]:
    """Deep and wide drafts: size, latency, quality, acceptance, and throughput by formula, as measured, and by plain
    decoding's of the same texts; lines that begin with an empty one."""
    if not RESULTS.exists() or not (cells := (kinds := read(RESULTS)).get("shapes", [])):
        return []
    parts = []
    for target in dict.fromkeys(cell["target"] for cell in cells):
        own = [cell for cell in cells if cell["target"] == target]
        texts = _texts([cell for cell in own if "texts" in cell], ("temperature", "shape", "length"))
        rows = [
            [
                f"{_heat(each.temperature)}, {each.length}: {each.name}, "
                f"{each.latency['layers']} x {each.latency['hidden']}",
                f"{each.latency['parameters'] / 1e6:.1f}",
                f"{each.latency['validation']['agreement']:.3f}",
                f"{each.latency['milliseconds']:.2f}",
                _with_interval(each.texts),
                f"{each.formula:.0f}",
                f"{each.measured:.0f}",
                with_interval(
                    list(zip(each.texts, texts[each.temperature, "plain", 0], strict=True)), quotient(_speed), SAMPLES
                ),
            ]
            for each in shaped(own)
        ]
        head = ["drafted tokens, shape", "parameters, millions", "agreement", "ms per token"]
        head += ["acceptance length", "tokens/s by formula", "tokens/s measured", "by plain decoding's"]
        plain = [text for (_, shape, _), some in texts.items() if shape == "plain" for text in some]
        parts += ["", *markdown_table(head, rows), ""]
        parts += [
            f"Drafts pruned from {target} and distilled on {_lessons(kinds, 'shapes')}. By formula: acceptance "
            "length / (time of the target's forward + drafted tokens x ms per token), from latencies measured apart; "
            "it does not hold at T=1, where a chain's drafted tokens are partly siblings, which take no forward. "
            f"Plain decoding: {_speed(plain):.0f} tokens/s. {_origin(kinds, 'shapes')}"
        ]
    return parts


def cascades() -> str:
    """Acceptance and forwards of every model for a hundred tokens, and the speed-up if time is parameters."""
    if not RESULTS.exists():
        return ""
    kinds = read(RESULTS)
    parts: list[str] = []
    for target in dict.fromkeys(cell["target"] for cell in kinds.get("cascades", [])):
        cells = [cell for cell in kinds["cascades"] if cell["target"] == target]
        texts = _texts(cells, ("temperature", "arm"))
        calls: dict[tuple, dict[int, int]] = {}
        for cell in cells:
            own = calls.setdefault((cell["temperature"], cell["arm"]), {})
            for size, count in cell["calls"].items():
                own[int(size)] = own.get(int(size), 0) + count
        sizes = sorted({size for own in calls.values() for size, count in own.items() if count}, reverse=True)
        rows = []
        plain = _texts((cell for cell in cells if cell["arm"] == "plain"), ("temperature", "round"))
        for (heat, arm), some in sorted(texts.items(), key=lambda item: item[0][0]):
            own, tokens = calls[heat, arm], sum(text[0] for text in some)
            cost = sum(text[1] for text in some) + sum(own.get(size, 0) * size / sizes[0] for size in sizes[1:])
            numbers = [f"{100 * own.get(size, 0) / tokens:.0f}" for size in sizes[1:]]
            rounds = [cell["round"] for cell in cells if (cell["temperature"], cell["arm"]) == (heat, arm)]
            speed = _speed(some) / _speed([text for each in rounds for text in plain[heat, each]])
            found = [_with_interval(some), *numbers, f"{tokens / cost:.2f}", f"{speed:.2f}", str(len(some))]
            rows.append([f"{_heat(heat)}: {arm}", *found])
        heads = [f"forwards of {size / 1e6:.1f}M per 100 tokens" for size in sizes[1:]]
        head = ["drafter", "acceptance length", *heads, "speed-up by parameters", "measured", "texts"]
        parts += [*markdown_table(head, rows), ""]
        parts += [
            f"Target: {target}, {sizes[0] / 1e6:.1f}M parameters. Speed-up by parameters: a forward costs its model's "
            "parameters, and Max-Gram nothing, as in the paper; so it does not depend on the machine. "
            "Measured: against plain decoding of the same texts. "
            "The middle model is the wide one of [pruned drafts](pruned_drafts.md), distilled on "
            f"{_lessons(kinds, 'cascades')}.",
            "",
        ]
    return "\n".join([*parts, _origin(kinds, "cascades")])
