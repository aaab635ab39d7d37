"""Worker: transformers' own ``generate``. Options: model, dtype, threads; lookup, tokens; draft, a model.

A model is a folder or a GGUF file, whose weights transformers turns into floats.
"""

import time
from pathlib import Path

import numpy as np
import torch
import transformers
from protocol import Output, Worker, serve


class Arrivals:
    """A streamer that notes when tokens arrive, and how many; ``generate`` passes the prompt first."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.calls.append((time.perf_counter(), tokens.numel()))

    def end(self) -> None:
        pass


def load(options: dict) -> Worker:
    torch.set_num_threads(options["threads"])
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, options["dtype"])
    model = _model(options["model"], dtype)
    mode = {"prompt_lookup_num_tokens": options["lookup"]} if "lookup" in options else {}
    if "draft" in options:
        mode = {"assistant_model": _model(options["draft"], dtype)}

    def generate(ids: list[int], tokens: int) -> Output:
        inputs, streamer = torch.tensor([ids]), Arrivals()
        started = time.perf_counter()
        mask, lengths = torch.ones_like(inputs), {"min_new_tokens": tokens, "max_new_tokens": tokens}
        out = model.generate(
            inputs, attention_mask=mask, streamer=streamer, do_sample=False, pad_token_id=0, **lengths, **mode
        )
        at, count = streamer.calls[1]
        accepted = sum(several - 1 for _, several in streamer.calls[1:])  # a forward's own token is not drafted
        return Output(out[0, len(ids) :].tolist(), at - started, count, accepted if mode else None)

    @torch.inference_mode()
    def logits(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids])).logits[0].float().numpy()

    return Worker(generate, logits)


def _model(name: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    path = Path(name)
    place = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if place else name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **place).eval()
    model.generation_config.eos_token_id = None
    return model


serve(load)
