"""Worker: OpenVINO GenAI on a GGUF file. Options: model, threads, accuracy; lookup, or draft, a model, with length.

Its latency pipeline caches prompts by their beginnings, so no prompt may be measured twice. It returns no logits.
"""

import numpy as np
import openvino
import openvino_genai
from protocol import Output, Worker, serve


def load(options: dict) -> Worker:
    properties: dict[str, object] = {"INFERENCE_NUM_THREADS": options["threads"]}
    if options["accuracy"]:
        properties["EXECUTION_MODE_HINT"] = "ACCURACY"
    drafts = "lookup" in options or "draft" in options
    if "lookup" in options:
        properties["prompt_lookup"] = True
    if "draft" in options:
        properties["draft_model"] = openvino_genai.draft_model(options["draft"], "CPU", **properties)
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **properties)
    config = pipeline.get_generation_config()
    config.do_sample, config.ignore_eos = False, True
    if "lookup" in options:
        config.num_assistant_tokens, config.max_ngram_size = 5, 3  # the values of its samples
    if "draft" in options:
        config.num_assistant_tokens = options["length"]

    def generate(ids: list[int], tokens: int) -> Output:
        config.max_new_tokens = tokens
        row = np.array([ids])
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(row), openvino.Tensor(np.ones_like(row)))
        found = pipeline.generate(inputs, config)
        output = list(found.tokens[0])
        times = found.perf_metrics.raw_metrics.m_new_token_times  # one of each forward
        accepted = len(output) - len(times) if drafts else None
        return Output(output, found.perf_metrics.get_ttft().mean / 1000, accepted=accepted)

    return Worker(generate)


serve(load)
