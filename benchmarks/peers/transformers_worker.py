"""Worker: transformers' own ``generate``. Options: model, dtype, threads."""

import time

import numpy as np
import torch
import transformers
from protocol import Output, Worker, serve


class FirstToken:
    """A streamer that notes when the first token arrives; ``generate`` passes the prompt first."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        pass


def load(options: dict) -> Worker:
    torch.set_num_threads(options["threads"])
    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, options["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def generate(ids: list[int], tokens: int) -> Output:
        inputs, streamer = torch.tensor([ids]), FirstToken()
        started = time.perf_counter()
        mask = torch.ones_like(inputs)
        out = model.generate(
            inputs, attention_mask=mask, streamer=streamer, max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return Output(out[0, len(ids) :].tolist(), streamer.calls[1] - started)

    @torch.inference_mode()
    def logits(ids: list[int]) -> np.ndarray:
        return model(torch.tensor([ids])).logits[0].float().numpy()

    return Worker(generate, logits)


serve(load)
