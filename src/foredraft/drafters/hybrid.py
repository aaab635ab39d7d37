"""Look-ups where the text repeats itself, another drafter elsewhere (hybrid of SuffixDecoding, arXiv:2411.04975).

A look-up costs next to nothing and is nearly always right after a long match; a trained head drafts everywhere, but
costs a forward of its own. So a step copies what followed the longest earlier match of a row's last tokens if that
promises more than the other drafter's drafts have brought lately. Otherwise the other drafter drafts, or nothing where
its drafts do not pay: copies go on while the policy pauses it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, zip_longest
from math import exp, log
from operator import mul
from typing import NamedTuple, final

from foredraft.core.draft import Draft, Law
from foredraft.core.drafter import ByRow, Drafter, Plan, View
from foredraft.core.errors import DrafterError
from foredraft.core.options import DrafterOptions, check_bounds, option
from foredraft.drafters.common.copying import LONGEST_MATCH, ODDS, CopyingDrafter, widest_copy
from foredraft.drafters.context import BuildContext

SHORTEST_MATCH = 2
"""Tokens of a match that is looked up: after a single one a copy is rarely right."""
_TRIED = 64  # most earlier places that are compared
_FIXED, _FIXED_GPU = 4, 200  # nodes that take as long as what a forward takes in any case
_SETUP, _DRAFT = 1.2, 1  # nodes that take as long as what any draft costs a step, and as a draft of the inner drafter
_RETURN = 1.5  # and as the inner drafter's first draft after a copy takes more, since it reads what was copied
_RATE, _KNOWN = 0.1, 1.0  # step of ``RowText.accepted``, and the information behind a row's first odds


@dataclass(frozen=True, slots=True)
class Options(DrafterOptions):
    """Size of copies; the other drafter has its options in its own spec."""

    prompt_lookup_num_tokens: int = option(15, "most tokens copied from one match.")

    def __post_init__(self) -> None:
        check_bounds(self, least={"prompt_lookup_num_tokens": 1})


class Match(NamedTuple):
    """An earlier place where the last ``length`` tokens occurred; ``end``: the index behind it."""

    length: int
    end: int


class RowText:
    """A row's tokens on the host, and what its latest steps say about copies and drafts.

    An index has the places of each two tokens. Of a copy after a match of m tokens prompt lookup's odds say how likely
    its tokens are right; one number for the row, ``_shift``, corrects them. ``accepted``: decayed mean of the other
    drafter's tokens that a step accepted, 0 for steps in which it drafted nothing.

    Args:
        tokens: the prompt and the output so far.
        written: how many of them are the output's.
    """

    def __init__(self, tokens: Sequence[int], written: int) -> None:
        self._tokens: list[int] = []
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # the indices behind them
        self._written = written
        self._shift, self._known = 0.0, _KNOWN  # and its information
        self.accepted = 0.0
        self.chances: Sequence[float] = ()  # of the tokens of the latest copy, each if those before it are right
        self.drafted = False  # the other drafter has drafted since
        self._add(tokens)

    def read(self, output: Sequence[int]) -> None:
        """Read what a step has added to the output, and learn from it."""
        emitted, self._written = output[self._written :], len(output)
        if not emitted:
            return
        self._add(emitted)
        accepted = len(emitted) - 1
        if self.chances:
            tested = self.chances[: accepted + 1]
            self._known += sum([chance * (1 - chance) for chance in tested])
            self._shift += sum([(index < accepted) - chance for index, chance in enumerate(tested)]) / self._known
        else:
            self.accepted += _RATE * (accepted * self.drafted - self.accepted)
        self.chances, self.drafted = (), False

    def match(self) -> Match | None:
        """The longest match of the last tokens, of equal ones the latest."""
        tokens, best = self._tokens, None
        if len(tokens) < SHORTEST_MATCH:
            return None
        for end in self._places.get((tokens[-2], tokens[-1]), ())[: -_TRIED - 1 : -1]:
            length, most = SHORTEST_MATCH, min(LONGEST_MATCH, end)
            while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
                length += 1
            if best is None or length > best.length:
                best = Match(length, end)
            if length == LONGEST_MATCH:
                break
        return best

    def after(self, match: Match, count: int) -> list[int]:
        """The tokens after a match; those of a match that overlaps the end repeat."""
        return list(islice(cycle(self._tokens[match.end : match.end + count]), count))

    def chances_after(self, match: Match, count: int, hot: bool) -> list[float]:
        """How likely so many tokens after a match are right, each if those before it are. ``hot``: see ``ODDS``."""
        base, slope = ODDS[hot]
        lengths = [min(match.length + index, LONGEST_MATCH) for index in range(count)]
        return [1 / (1 + exp(-(base + self._shift + slope * log(length)))) for length in lengths]

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if len(self._tokens) >= SHORTEST_MATCH:
                self._places[self._tokens[-2], self._tokens[-1]].append(len(self._tokens))
            self._tokens.append(token)


@final
class Hybrid(CopyingDrafter):
    """Copies from each row's own text, beside the drafts of another drafter.

    A copy has the length with the most expected tokens per time. Its tokens count with the probability that they and
    those before them are right, and each node of the forward takes ``B / (F + B)`` of a plain step for B rows, where F
    is ``_FIXED``. It must bring more than the inner drafter's drafts lately did.

    Args:
        law: of the inner drafter's drawn drafts, where its options do not determine it.
    """

    def __init__(self, options: Options, inner: Drafter, law: Law | None = None) -> None:
        self._texts = ByRow[RowText]()
        super().__init__(inner, self._texts)
        self.needs = replace(inner.needs, law=inner.needs.law or law, ahead=False)
        self._options = options

    def propose(self, view: View, plan: Plan) -> Draft:
        for row, length in zip(view.rows, plan.lengths, strict=True):
            if row in self._texts:
                self._texts[row].drafted = length > 0
        return super().propose(view, plan)

    def _chains(self, view: View, limits: Sequence[int]) -> list[Sequence[int]]:
        texts = [self._read(view, index) for index in range(len(view.rows))]
        matches = [
            text.match() if limit and not params.prediction else None
            for text, limit, params in zip(texts, limits, view.params, strict=True)
        ]
        chains: list[Sequence[int]] = [()] * len(texts)
        if not any(matches):
            return chains
        most = min(self._options.prompt_lookup_num_tokens, widest_copy(view) - 1)
        fixed = _FIXED if view.lengths.device.type == "cpu" else _FIXED_GPU
        price, hot = len(view.rows) / (fixed + len(view.rows)), view.warp.hottest > 0.5
        for index, (text, match, limit) in enumerate(zip(texts, matches, limits, strict=True)):
            if match is not None:
                chances = text.chances_after(match, min(limit, most), hot)
                drafts = (1 + text.accepted) / (1 + price * (text.accepted + 1 + _SETUP + _DRAFT))
                back = price * _RETURN * min(text.accepted, 1.0)
                if _best([chances], price, 1 + back)[1] > max(drafts, 1.0):
                    text.chances, chains[index] = chances, text.after(match, len(chances))
        width, _ = _best([text.chances for text in texts], price)
        for text in texts:
            text.chances = text.chances[:width]
        return [chain[:width] for chain in chains]

    def _read(self, view: View, index: int) -> RowText:
        """A row's text, with what the latest step has added."""
        row, output = view.rows[index], view.outputs[index]
        if row not in self._texts:
            tokens = view.history[index, : view.host_lengths[index]].tolist()
            self._texts[row] = RowText(tokens, len(output))
        text = self._texts[row]
        text.read(output)
        text.chances = ()
        return text


def _best(copies: Sequence[Sequence[float]], price: float, plain: float = 1.0) -> tuple[int, float]:
    """The length of the longest copy with the most expected tokens per row and time, and how many these are.

    Args:
        copies: of each row, the probability of each token if those before it are right.
        price: what a node more for all rows takes, in plain steps.
        plain: what the step takes in any case.
    """
    sums = accumulate(map(sum, zip_longest(*[accumulate(each, mul) for each in copies], fillvalue=0.0)), initial=0.0)
    rates = [
        (1 + tokens / len(copies)) / (plain + price * (length + _SETUP)) if length else 1.0
        for length, tokens in enumerate(sums)
    ]
    width = max(range(len(rates)), key=rates.__getitem__)
    return width, rates[width]


def build(options: Options, context: BuildContext) -> Hybrid:
    """hybrid:[SPEC]"""
    specs = context.paths_like("hybrid:[eagle3:PATH]")
    if len(specs) != 1:
        raise DrafterError(
            f"hybrid takes one inner drafter beside its look-ups, not {len(specs)}: write hybrid:[SPEC]."
        )
    built = context.drafter(specs[0])
    return Hybrid(options, built.drafter, None if built.law is Law.FIXED else built.law)
