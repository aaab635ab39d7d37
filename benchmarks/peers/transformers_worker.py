"""Worker: transformers' own ``generate``. Options: model, dtype, threads; lookup, tokens; draft, a folder."""

import time

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
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    mode = {"prompt_lookup_num_tokens": options["lookup"]} if "lookup" in options else {}
    if "draft" in options:
        draft = transformers.AutoModelForCausalLM.from_pretrained(options["draft"], dtype=dtype).eval()
        draft.generation_config.eos_token_id = None
        mode = {"assistant_model": draft}

    def generate(ids: list[int], tokens: int) -> Output:
        inputs, streamer = torch.tensor([ids]), Arrivals()
        started = time.perf_counter()
        mask, lengths = torch.ones_like(inputs), {"min_new_tokens": tokens, "max_new_tokens": tokens}
        out = model.generate(
            inputs, attention_mask=mask, streamer=streamer, do_sample=False, pad_token_id=0, **lengths, **mode
        )
        at, count = streamer.calls[1]
        return Output(out[0, len(ids) :].tolist(), at - started, count)

    @torch.inference_mode()
    def logits(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids])).logits[0].float().numpy()

    return Worker(generate, logits)


serve(load)
