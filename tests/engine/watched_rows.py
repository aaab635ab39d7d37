"""What a controller is shown of rows."""

import torch

from foredraft.core.drafter import View
from foredraft.core.noise import Noise
from foredraft.core.params import SamplingParams
from foredraft.core.warp import Warp


def view(*rows: int, temperature: float = 0.0) -> View:
    """These rows, each with a text of four tokens."""
    lengths = torch.full((len(rows),), 4)
    warp = Warp.of(
        [SamplingParams(temperature=temperature)] * len(rows),
        vocab_size=8,
        eos_token_ids=[()] * len(rows),
        prompt_lengths=[4] * len(rows),
        device="cpu",
    )
    history = torch.zeros(len(rows), 4, dtype=torch.long)
    return View(rows, history, lengths, (4,) * len(rows), warp, Noise(lengths, lengths))
