"""Heads the slow way: one row, one head, one vector at a time, in float64. Written from heads.md; calls no net.

Weights are looked up by the names under which a net holds them. ``Faults`` plants what implementations get wrong.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foredraft.drafters.trees.candidates import SHARPEST

Path = tuple[int, ...]
States = Mapping[int, Sequence[Tensor]]
"""The target's states of one text: by tap (decoder layers passed, -1 after the final norm), then by token."""


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def softmax(scores: Sequence[float]) -> list[float]:
    most = max(scores)
    powers = [math.exp(score - most) for score in scores]
    return [power / sum(powers) for power in powers]


def log_softmax(logits: Tensor) -> list[float]:
    values = logits.tolist()
    most = max(values)
    total = math.log(sum(math.exp(value - most) for value in values)) + most
    return [value - total for value in values]


def turned(x: Tensor, position: float, base: float) -> Tensor:
    """Rotary: the pair (i, i + half) by position * base ** (-i / half), as Llama pairs them."""
    values, half = x.tolist(), len(x) // 2
    out = list(values)
    for i in range(half):
        angle = position * base ** (-i / half)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = values[i] * cos - values[i + half] * sin
        out[i + half] = values[i + half] * cos + values[i] * sin
    return torch.tensor(out, dtype=torch.float64)


class Weights:
    """A module's own tensors in float64, and what it borrows from the target."""

    def __init__(self, net: Any, model: Any) -> None:
        self._own = {name: tensor.double() for name, tensor in net.state_dict().items()}
        theirs = model.state_dict()
        self.embedding = self._own.get("embed_tokens.weight", theirs["model.embed_tokens.weight"].double())
        self._head = theirs["lm_head.weight"].double()

    def has(self, name: str) -> bool:
        return name in self._own

    def __getitem__(self, name: str) -> Tensor:
        return self._own[name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = self._own[f"{name}.weight"] @ x
        return out + self._own[f"{name}.bias"] if self.has(f"{name}.bias") else out

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return rms(x, self._own[f"{name}.weight"], eps)

    def target_head(self, x: Tensor) -> Tensor:
        return self._head @ x


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What may be wrong on purpose, and what may change and must not matter (``shift`` of every position)."""

    shift: int = 0
    tree_shift: int = 0
    base: float = 1.0
    tokens_not_shifted: bool = False
    taps_reversed: bool = False
    other_residual: bool = False
    other_carried: bool = False
    sees_siblings: bool = False


@dataclass
class Row:
    """One row of a draft: its position, its keys and values by layer and head, its last state."""

    position: int
    keys: list[list[Tensor]] = field(default_factory=list)
    values: list[list[Tensor]] = field(default_factory=list)
    state: Tensor = field(default_factory=lambda: torch.zeros(0))


class Layer:
    """A decoder layer: attention and feed-forward, for one row after those before it."""

    def __init__(self, weights: Weights, block: Any, name: str, faults: Faults) -> None:
        self._w, self._block, self._name, self._faults = weights, block, name, faults

    def attention(self, x: Tensor, row: Row, before: Sequence[Row]) -> Tensor:
        block, layer, name = self._block, len(row.keys), f"{self._name}.self_attn"
        size, groups = block.head_dim, block.num_key_value_heads
        queries = self._heads(name, "q", x, block.num_attention_heads, row.position)
        row.keys.append(self._heads(name, "k", x, groups, row.position))
        value = self._w.linear(f"{name}.v_proj", x)
        row.values.append([value[g * size : (g + 1) * size] for g in range(groups)])
        reach = block.sliding_window or 1 << 30
        seen = [other for other in (*before, row) if row.position - other.position < reach]
        mixed = []
        for head, query in enumerate(queries):
            group = head // (block.num_attention_heads // groups)
            shares = softmax([float(query @ other.keys[layer][group]) / math.sqrt(size) for other in seen])
            mixed.append(sum(share * other.values[layer][group] for share, other in zip(shares, seen, strict=True)))
        return self._w.linear(f"{name}.o_proj", torch.cat(mixed))

    def _heads(self, name: str, which: str, x: Tensor, count: int, position: int) -> list[Tensor]:
        block = self._block
        size, base = block.head_dim, block.rope_theta * self._faults.base
        slower = (block.rope_scaling or {}).get("factor", 1.0)  # linear scaling is the one that is tried here
        both = self._w.linear(f"{name}.{which}_proj", x)
        heads = [both[h * size : (h + 1) * size] for h in range(count)]
        if block.qk_norm:
            heads = [self._w.norm(f"{name}.{which}_norm", head, block.rms_norm_eps) for head in heads]
        return [turned(head, position / slower, base) for head in heads]

    def feed(self, x: Tensor) -> Tensor:
        w, name = self._w, f"{self._name}.mlp"
        normed = w.norm(f"{self._name}.post_attention_layernorm", x, self._block.rms_norm_eps)
        inner = silu(w.linear(f"{name}.gate_proj", normed)) * w.linear(f"{name}.up_proj", normed)
        return x + w.linear(f"{name}.down_proj", inner)

    def __call__(self, x: Tensor, row: Row, before: Sequence[Row], *, normed: bool = True) -> Tensor:
        name = f"{self._name}.input_layernorm"
        read = self._w.norm(name, x, self._block.rms_norm_eps) if normed else x
        return self.feed(x + self.attention(read, row, before))


class SlowEagle:
    """EAGLE-1, 2 (arXiv:2401.15077): fc(embedding, feature), a layer without input norm, the target's head."""

    def __init__(self, net: Any, model: Any, faults: Faults) -> None:
        self.w, self.config, self.faults, self.rows = Weights(net, model), net.config, faults, {}
        self.block, self.offsets = net.config.block, None
        self.layers = [Layer(self.w, self.block, f"layers.{i}", faults) for i in range(net.config.num_layers)]

    def feature(self, states: States, j: int) -> Tensor:
        return states[-1][j]

    def run(self, token: int, feature: Tensor, row: Row, before: Sequence[Row]) -> Tensor:
        x = self.w.linear("fc", torch.cat([self.w.embedding[token], feature]))
        for i, layer in enumerate(self.layers):
            x = layer(x, row, before, normed=i > 0)
        return x

    def logits(self, state: Tensor) -> Tensor:
        return self.w.target_head(state)

    def carry(self, state: Tensor) -> Tensor:
        return state


class SlowEagle3:
    """EAGLE-3 (arXiv:2503.01840): fused taps, two norms side by side, a head of its own behind a final norm."""

    def __init__(self, net: Any, model: Any, faults: Faults) -> None:
        self.w, self.config, self.faults, self.rows = Weights(net, model), net.config, faults, {}
        self.block, self.eps = net.config.block, net.config.block.rms_norm_eps
        ids = None if net.vocabulary is None else net.vocabulary.tolist()
        self.offsets = None if ids is None else [target - draft for draft, target in enumerate(ids)]  # d2t
        self.mid = Layer(self.w, self.block, "midlayer", faults)
        self.layers = [Layer(self.w, self.block, f"layers.{i}", faults) for i in range(net.config.num_layers - 1)]

    def feature(self, states: States, j: int) -> Tensor:
        taps = [states[tap][j] for tap in self.config.taps]
        if self.faults.taps_reversed:
            taps.reverse()
        if self.config.fc_norm:
            taps = [self.w.norm(f"fc_norm.{i}", tap, self.eps) for i, tap in enumerate(taps)]
        fused = torch.cat(taps)
        if self.config.norm_before_fc:
            fused = self.w.norm("input_norm", fused, self.eps)
        return self.w.linear("fc", fused)

    def run(self, token: int, feature: Tensor, row: Row, before: Sequence[Row]) -> Tensor:
        w, h = self.w, feature
        normed = w.norm("midlayer.hidden_norm", h, self.eps)
        residual = normed if self.config.norm_before_residual != self.faults.other_residual else h
        both = torch.cat([w.norm("midlayer.input_layernorm", w.embedding[token], self.eps), normed])
        x = self.mid.feed(residual + self.mid.attention(both, row, before))
        for layer in self.layers:
            x = layer(x, row, before)
        return x

    def logits(self, state: Tensor) -> Tensor:
        x = self.w.norm("norm", state, self.eps)
        return self.w.linear("lm_head", x) if self.w.has("lm_head.weight") else self.w.target_head(x)

    def carry(self, state: Tensor) -> Tensor:
        after = self.config.norm_carried != self.faults.other_carried
        return self.w.norm("norm", state, self.eps) if after else state


@functools.cache
def slow_of(net: Any, model: Any, faults: Faults) -> SlowEagle | SlowEagle3:
    """The slow head of a net, which keeps the committed rows that it has read, by the text up to their token."""
    return (SlowEagle3 if hasattr(net, "midlayer") else SlowEagle)(net, model, faults)


class DraftRunner:
    """An EAGLE head over one committed text: row j reads (f_j, t_{j+1}) at position j; drafts go on from the last."""

    def __init__(self, head: SlowEagle | SlowEagle3, text: Sequence[int], states: States) -> None:
        self.head, self._rows, self._known = head, [], {}
        for j in range(len(text) - 1):
            known = tuple(text[: j + 2])
            if known not in head.rows:
                token = text[j] if head.faults.tokens_not_shifted else text[j + 1]
                head.rows[known] = self._read(token, head.feature(states, j), j, self._rows)
            self._rows.append(head.rows[known])

    def _read(self, token: int, feature: Tensor, position: int, before: Sequence[Row]) -> Row:
        row = Row(position + self.head.faults.shift)
        row.state = self.head.run(token, feature, row, before)
        return row

    def at(self, path: Path) -> list[Row]:
        """The rows of a drafted path, the root's last committed one first: each reads what its parent carries."""
        if not path:
            return self._rows[-1:]
        if path not in self._known:
            above = self.at(path[:-1])
            before = [*self._rows[:-1], *above]
            if self.head.faults.sees_siblings:
                before += [rows[-1] for other, rows in self._known.items() if other[:-1] == path[:-1]]
            position = len(self._rows) - 1 + len(path) + self.head.faults.tree_shift
            row = self._read(path[-1], self.head.carry(above[-1].state), position, before)
            self._known[path] = [*above, row]
        return self._known[path]

    def logits(self, path: Path) -> Tensor:
        return self.head.logits(self.at(path)[-1].state)

    def logits_of_kept(self, new: Path, states: States) -> Tensor:
        """After these new tokens, all but the last drafted: if rows of the tree stayed, and only the last was read."""
        before = [*self._rows[:-1], *self.at(new[:-1])]
        row = self._read(new[-1], self.head.feature(states, len(before)), len(before), before)
        return self.head.logits(row.state)

    def target_id(self, draft_id: int) -> int:
        return draft_id if self.head.offsets is None else draft_id + self.head.offsets[draft_id]


def best(logits: Tensor, count: int) -> list[int]:
    """The likeliest ids, best first; the lower id where two are equal."""
    values = logits.tolist()
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


@dataclass
class Grown:
    """A tree by context: the paths that each level goes on from, all candidates with their scores, and the best."""

    frontiers: list[list[Path]]
    candidates: dict[Path, float]
    tree: set[Path]


def grow(reader: DraftRunner, depth: int, top_k: int, nodes: int, *, value: bool = True, rerank: bool = True) -> Grown:
    """EAGLE-2's tree (arXiv:2406.16858): expand the k best of each level, keep the best of all.

    Args:
        value: the best of a level have the best paths, not the best tokens.
        rerank: the tree is of all nodes, not of the best of each level.
    """
    frontiers, found, level = [], [], [((), 0.0)]
    for _ in range(depth):
        frontiers.append([path for path, _ in level])
        children = []
        for path, score in level:
            logs = log_softmax(reader.logits(path) / SHARPEST)
            ids = best(torch.tensor(logs, dtype=torch.float64), top_k)
            children += [((*path, reader.target_id(i)), score + logs[i], logs[i]) for i in ids]
        level = [child[:2] for child in sorted(children, key=lambda child: -child[1 if value else 2])[:top_k]]
        found += [child[:2] for child in children] if rerank else level
    order = sorted(range(len(found)), key=lambda i: (-found[i][1], len(found[i][0]), i))
    return Grown(frontiers, dict(found), {found[i][0] for i in order[:nodes]})


def fill(logits: Callable[[Path], Tensor], paths: Sequence[Path]) -> dict[Path, Path]:
    """A static tree: which tokens stand on each path of ranks, rank r being the r-th best after the path above."""
    tokens: dict[Path, Path] = {(): ()}
    for ranks in sorted(paths, key=len):
        above = tokens[ranks[:-1]]
        tokens[ranks] = (*above, best(logits(above), ranks[-1] + 1)[ranks[-1]])
    return tokens
