"""Worker: OpenVINO GenAI on a GGUF file. Options: model, threads, accuracy, lookup.

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
    if options["lookup"]:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(options["model"], "CPU", **properties)
    config = pipeline.get_generation_config()
    config.do_sample, config.ignore_eos = False, True
    if options["lookup"]:
        config.num_assistant_tokens, config.max_ngram_size = 5, 3  # the values of its samples

    def generate(ids: list[int], tokens: int) -> Output:
        config.max_new_tokens = tokens
        row = np.array([ids])
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(row), openvino.Tensor(np.ones_like(row)))
        found = pipeline.generate(inputs, config)
        return Output(list(found.tokens[0]), found.perf_metrics.get_ttft().mean / 1000)

    return Worker(generate)


serve(load)
