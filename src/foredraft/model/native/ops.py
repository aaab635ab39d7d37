"""Operations of models on the kernels."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.sampling.warp import Warp
from foredraft.model.native import library as c
from foredraft.model.native.decoder import Decoder
from foredraft.model.native.head_layers import NativeHeadLayers, is_packed
from foredraft.model.native.runner import MOST_GUESSES, KernelRuntime
from foredraft.model.ops import HeadLayers, HeadNet, Ops


@final
class NativeOps(Ops):
    """Beside a model on the kernels.

    Args:
        decoder: the model.
    """

    walks = True

    def __init__(self, runtime: KernelRuntime, decoder: Decoder) -> None:
        self.runtime = runtime
        self.decoder = decoder

    def rank(
        self,
        logits: Float[Tensor, "B F v"],
        count: int,
        warp: Warp,
        times: Float[Tensor, "B v"] | None,
        sharpest: float,
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        if count > MOST_GUESSES or warp.truncation.cuts:
            return super().rank(logits, count, warp, times, sharpest)
        logits = logits.float()
        rows, nodes, width = logits.shape
        if logits.stride(2) != 1 or logits.stride(0) != nodes * logits.stride(1):
            logits = logits.contiguous()
        count, temperatures = min(count, width), warp.temperatures(rows, sharpest)
        raced = None if warp.greedy_rows is None else ~warp.greedy_rows[:, 0, 0]
        tokens = torch.empty(rows, nodes, count, dtype=torch.long)
        shares = torch.empty(rows, nodes, count)
        times = None if times is None else times.contiguous()
        given = c.Ranking(
            rows=rows,
            nodes=nodes,
            count=width,
            wanted=count,
            logits=logits.data_ptr(),
            stride=logits.stride(1),
            temperatures=temperatures.data_ptr(),
            times=c.pointer(times),
            raced=c.pointer(raced),
            tokens=tokens.data_ptr(),
            shares=shares.data_ptr(),
        )
        with self.runtime.lock:
            c.check(self.runtime.library.rank(self.runtime.handle, given))
        return tokens, shares

    def times(self, bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
        out = torch.empty(*bits.shape, count)
        self.runtime.library.exponentials(c.pointer(bits.contiguous()), bits.numel(), count, c.pointer(out))
        return out

    def choose(self, scores: Float[Tensor, "B N V"], row: int, node: int, temperature: float, bits: int) -> int:
        of_row, of_node, _ = scores.stride()
        first = scores.data_ptr() + 4 * (row * of_row + node * of_node)
        return self.runtime.library.choose(first, scores.shape[2], temperature, bits)

    def head_layers(self, head: HeadNet) -> HeadLayers:
        return NativeHeadLayers(head, self.runtime, self.decoder) if is_packed(head) else super().head_layers(head)
