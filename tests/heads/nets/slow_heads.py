"""Medusa, blockwise and Hydra heads the slow way, one vector at a time in float64; calls no net."""

from collections.abc import Sequence
from typing import Any

import torch
from slow_nets import Faults, Layer, Row, Weights, silu
from torch import Tensor


def medusa(w: Weights, config: Any, h: Tensor, head: int) -> Tensor:
    """Medusa (arXiv:2401.10774): x + SiLU(W x + b), the same block again and again, then a projection."""
    for _ in range(config.num_layers):
        h = h + silu(w.linear(f"blocks.{head}.linear", h))
    return w.linear(f"heads.{head}", h) if w.has(f"heads.{head}.weight") else w.target_head(h)


def blockwise(w: Weights, config: Any, h: Tensor, head: int) -> Tensor:
    """Stern et al., section 4: a hidden layer and a residual, then the target's output layer."""
    return w.target_head(h + w.linear(f"outer.{head}", w.linear(f"inner.{head}", h).clamp(min=0)))


def hydra(w: Weights, config: Any, h: Tensor, tokens: Sequence[int]) -> Tensor:
    """Hydra (arXiv:2402.05109): head i reads h_t (or the prefix layer) and the embeddings of t + 1 to t + 1 + i."""
    head = len(tokens) - 1
    x = torch.cat([h, *(w.embedding[token] for token in tokens)])
    x = w.linear(f"mlps.{head}.res_connection", x) + silu(w.linear(f"mlps.{head}.linear", x))
    for _ in range(config.num_layers - 1):
        x = x + silu(w.linear(f"mlps.{head}.block", x))
    return w.linear(f"heads.{head}", x) if w.has(f"heads.{head}.weight") else w.target_head(x)


def hydra_prefix(w: Weights, config: Any, states: Sequence[Tensor]) -> Tensor:
    """Hydra++: a whole Llama layer over the target's last states, then a norm; the last row's."""
    block = config.prefix
    layer, rows = Layer(w, block, "prefix.layer", Faults()), []
    for position, state in enumerate(states):
        row = Row(position)
        row.state = w.norm("prefix.norm", layer(state, row, rows), block.rms_norm_eps)
        rows.append(row)
    return rows[-1].state
