"""Tables of ``benchmarks/drafts.py`` for the pages of specinfer, pruned drafts and cascades."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from origin import origin_line
from reading import interval, markdown_table, read

RESULTS = Path(__file__).resolve().parent / "results" / "drafts.jsonl"
CHOICES = 6
SAMPLES = 1000
"""Of the bootstrap."""
MODELS = {"alone": "distilled each by itself", "boosted": "boosted"}
RULES = {None: "shared noise", "recursive": "multi-step sampling"}


def _origin(kinds: dict[str, list[dict]], part: str) -> str:
    """Where a part was made: the machine and commits of its runs."""
    runs = [each for each in kinds["provenance"] if f"drafts.py {part} " in each["command"] + " "]
    if not runs:
        return ""
    commits = list(dict.fromkeys(each["commit"][:9] for each in runs))
    several = {"commits": f"commits {', '.join(commits)}"} if len(commits) > 1 else {}
    return f"{origin_line({**runs[0], **several})}. Made by `python benchmarks/drafts.py {part}`."


def _heat(temperature: float) -> str:
    return f"T={temperature:g}" if temperature else "greedy"


def _length(texts: Sequence[Sequence[float]]) -> float:
    """Tokens per forward of the target."""
    return sum(text[0] for text in texts) / sum(text[1] for text in texts)


def _with_interval(texts: Sequence[Sequence[float]]) -> str:
    low, high = interval(texts, _length, SAMPLES)
    return f"{_length(texts):.2f} ({low:.2f} to {high:.2f})"


def _texts(cells: Iterable[dict], keys: Sequence[str]) -> dict[tuple, list]:
    """The texts of all rounds by these keys."""
    found: dict[tuple, list] = {}
    for cell in cells:
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
        parts += [*_merged(cells, "{}, drafts from {}".format(*setting)), ""]
    notes = (
        "K choices come from the drafts in turn: with two drafts and K = 4, two of each. Chosen: the share of "
        "the target's tokens among them. Sampled: the probability that multi-step sampling accepts one of K tokens "
        "drawn at T=1. Nodes are those before merging; of the expansions measured, the best one is shown."
    )
    return "\n".join([*parts, notes, _origin(kinds, "hits"), _origin(kinds, "trees")])


def _hit_rates(cells: Sequence[dict], title: str) -> list[str]:
    rows = []
    for temperature in sorted({cell["temperature"] for cell in cells}):
        own = [cell for cell in cells if cell["temperature"] == temperature]
        texts = [text for cell in own for text in cell["ranks"]]
        tokens = sum(cell["tokens"] for cell in own)
        for family, count in itertools.product(MODELS, (1, 2, 3)):
            if (count == 1 and family != "alone") or f"{family}/1" not in texts[0]:
                continue
            name = f"{count} draft{'s' if count > 1 else ''}{f', {MODELS[family]}' if count > 1 else ''}"
            drafts = [f"{family}/{number}" for number in range(1, count + 1)]
            shares = [_share(texts, drafts, k) / tokens for k in range(1, CHOICES + 1)]
            rows.append([f"{_heat(temperature)}, chosen: {name}", *(f"{share:.3f}" for share in shares)])
            if temperature:
                sums = [
                    sum(each) for each in zip(*(cell["accepted"][f"{family} {count}"] for cell in own), strict=True)
                ]
                rows.append([f"{_heat(temperature)}, sampled: {name}", *(f"{each / tokens:.3f}" for each in sums)])
    head = [f"hit rate on tokens {title}", *(f"K = {k}" for k in range(1, CHOICES + 1))]
    return markdown_table(head, rows)


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
    for nodes, (family, count) in itertools.product(
        sorted({key[0] for key in found}), sorted({(key[3], key[4]) for key in found}, key=lambda key: (key[1], key[0]))
    ):
        shown = []
        for heat, rule in columns:
            some = {key[5]: texts for key, texts in found.items() if key[:5] == (nodes, heat, rule, family, count)}
            best = max(some, key=lambda expansion: _length(some[expansion]), default=None)
            shown.append(f"{_with_interval(some[best])}, {best}" if best else "")
        name = f"{count} draft{'s' if count > 1 else ''}{f', {MODELS[family]}' if count > 1 else ''}"
        rows.append([f"{nodes} nodes: {name}", *shown])
    names = [_heat(heat) + (f", {RULES[rule]}" if heat else "") for heat, rule in columns]
    return markdown_table([f"acceptance length, {title}", *names], rows)


def shapes() -> list[str]:
    """Deep and wide drafts: size, latency, quality, acceptance, and throughput by formula and as measured; lines that
    begin with an empty one."""
    if not RESULTS.exists() or not (cells := (kinds := read(RESULTS)).get("shapes", [])):
        return []
    parts = []
    for target in dict.fromkeys(cell["target"] for cell in cells):
        own = [cell for cell in cells if cell["target"] == target]
        latency = {(line["latency"], line["forward_nodes"]): line for line in own if "latency" in line}
        texts = _texts([cell for cell in own if "texts" in cell], ("temperature", "shape", "length"))
        rows = []
        for (heat, shape, length), some in sorted(texts.items(), key=lambda item: (item[0][0], item[0][2])):
            if not length or (shape, 1) not in latency:
                continue
            line, milliseconds = latency[shape, 1], latency["target", 1 + length]["milliseconds"]
            formula = 1e3 * _length(some) / (milliseconds + length * line["milliseconds"])
            measured = sum(text[0] for text in some) / sum(text[3] for text in some)
            quality = line["validation"]
            rows.append(
                [
                    f"{_heat(heat)}, {length}: {shape}, {line['layers']} x {line['hidden']}",
                    f"{line['parameters'] / 1e6:.1f}",
                    f"{quality['agreement']:.3f}",
                    f"{line['milliseconds']:.2f}",
                    _with_interval(some),
                    f"{formula:.0f}",
                    f"{measured:.0f}",
                ]
            )
        head = ["drafted tokens, shape", "parameters, millions", "agreement", "ms per token"]
        head += ["acceptance length", "tokens/s by formula", "tokens/s measured"]
        plain = [text for (_, shape, _), some in texts.items() if shape == "plain" for text in some]
        speed = sum(text[0] for text in plain) / sum(text[3] for text in plain)
        parts += ["", *markdown_table(head, rows), ""]
        parts += [
            f"Drafts pruned from {target} and distilled on as many tokens. By formula: acceptance length / (time of "
            f"the target's forward + drafted tokens x ms per token), from latencies measured apart. Plain decoding: "
            f"{speed:.0f} tokens/s. {_origin(kinds, 'shapes')}"
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
        for (heat, arm), some in sorted(texts.items(), key=lambda item: item[0][0]):
            own, tokens = calls[heat, arm], sum(text[0] for text in some)
            cost = sum(text[1] for text in some) + sum(own.get(size, 0) * size / sizes[0] for size in sizes[1:])
            numbers = [f"{100 * own.get(size, 0) / tokens:.0f}" for size in sizes[1:]]
            rows.append([f"{_heat(heat)}: {arm}", _with_interval(some), *numbers, f"{tokens / cost:.2f}"])
        heads = [f"forwards of {size / 1e6:.1f}M per 100 tokens" for size in sizes[1:]]
        parts += [*markdown_table(["drafter", "acceptance length", *heads, "speed-up by parameters"], rows), ""]
        parts += [
            f"Target: {target}, {sizes[0] / 1e6:.1f}M parameters. Speed-up by parameters: a forward costs its model's "
            "parameters, and Max-Gram nothing, as in the paper; so it does not depend on the machine.",
            "",
        ]
    return "\n".join([*parts, _origin(kinds, "cascades")])
