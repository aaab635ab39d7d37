"""Operations beside a model's forward: the definitions, in torch.

A model has those that suit it (``TargetModel.ops``). Others override what they do faster, and hand the rest to
``super()``.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from foredraft.core.best import best_of
from foredraft.core.rng import exponentials, first
from foredraft.core.sampling.warp import Warp


class Ops:
    """Guesses ranked, tokens chosen, and the times of races.

    All but ``choose`` have static shapes and read nothing back, so they can be recorded. ``walks``: scores are in
    memory of the host, and ``choose`` is fast. Steps then follow their drafts on the host, and choose a token only
    where a draft reaches it, without its law.
    """

    walks = False

    def rank(
        self,
        logits: Float[Tensor, "B F v"],
        count: int,
        warp: Warp,
        times: Float[Tensor, "B v"] | None,
        sharpest: float,
    ) -> tuple[Int[Tensor, "B F K"], Float[Tensor, "B F K"]]:
        """The ``count`` best guesses for the token after each of F nodes, best first, in the draft's own ids, and the
        log of their shares among all guesses; -inf for tokens that the draft's warp cuts.

        The target will take the token with the least time / p. So in sampled rows the guesses are ranked by time / q,
        and a guess's share is that of its q / time. In greedy rows they are ranked by q.

        Args:
            logits: after penalties and bans, where there are any.
            times: of the tokens at the position after these nodes; see ``Noise.times``. None if all rows are greedy.
            sharpest: the temperature of greedy rows.
        """
        least = torch.finfo(torch.float32).min / 64  # so that a path's sum cannot overflow
        logits = logits.float().nan_to_num(nan=least, posinf=0.0, neginf=least)
        if times is None:
            scores = logits / sharpest
        else:
            scores = warp.truncation(logits) - times.log()[:, None]
            if warp.greedy_rows is not None:
                scores = torch.where(warp.greedy_rows, logits / sharpest, scores)
        best = best_of(scores, min(count, scores.shape[-1]))
        return best.indices, scores.log_softmax(-1).gather(-1, best.indices)

    def times(self, bits: Int[Tensor, "*k"], count: int) -> Float[Tensor, "*k n"]:
        """The times of ``count`` tokens in the race of each entry of ``bits``; see ``rng.exponentials``. Overrides may
        differ in the last places."""
        return exponentials(bits, count)

    def choose(self, scores: Float[Tensor, "B N V"], row: int, node: int, temperature: float, bits: int) -> int:
        """The best token at a node or, at a temperature above 0, the first arrival of the race of these bits (see
        ``rng.target_bits``). -1 if a score is NaN or the highest is not finite."""
        own = scores[row, node]
        if not own.max().isfinite():
            return -1
        if not temperature:
            return int(own.argmax())
        return int(first((own / temperature).softmax(-1), self.times(torch.tensor(bits), len(own))))


TORCH = Ops()
