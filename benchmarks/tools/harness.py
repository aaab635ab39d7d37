"""lm-evaluation-harness against the server: both of its OpenAI models, on generated tasks, without network.

The right answer is the model's own greedy continuation; the wrong ones are its continuations of other prompts. So every
score is 1 if prompts, tokens and log-probabilities arrive as the harness expects.

    pip install 'lm_eval[api]'
    python -m benchmarks.tools.harness
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

import foredraft
from benchmarks.experiments.serving import server
from foredraft.bench.prompts import STANDARD

TOKENS = 12
MODEL = Path(foredraft.__path__[0]) / "models" / "sample-16m"
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{prompt}}}}"
target_delimiter: ""
metadata: {{version: 1}}
"""
CHOICE = """
task: continuation_choice
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: right
metric_list: [{metric: acc}]
"""
WRITTEN = """
task: NAME
output_type: generate_until
doc_to_target: "{{NAME}}"
generation_kwargs: {until: ["<never>"], max_gen_toks: TOKENS, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def samples(url: str) -> list[dict]:
    """Prompts with their greedy continuations as text and as an answer of a chat."""
    limits = {"max_tokens": TOKENS, "temperature": 0}
    texts, answers = [], []
    for prompt in STANDARD:
        text = httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **limits}, timeout=60).json()
        chat = {"messages": [{"role": "user", "content": prompt}], **limits}
        answer = httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).json()
        texts.append(text["choices"][0]["text"])
        answers.append(answer["choices"][0]["message"]["content"])
    return [
        {"prompt": prompt, "choices": texts, "right": i, "continuation": texts[i], "answer": answers[i]}
        for i, prompt in enumerate(STANDARD)
    ]


def evaluate(model: str, url: str, folder: Path, tasks: str, *options: str) -> None:
    """Run the harness, which prints a table; every score must be 1."""
    arguments = f"model=m,base_url={url},tokenizer_backend=huggingface,tokenizer={MODEL},max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--model_args", arguments, "--tasks", tasks]
    command += ["--include_path", str(folder), "--output_path", str(folder / model), *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    print(f"{model}\n\n{done.stdout[done.stdout.index('|') :].strip()}\n")
    (found,) = (folder / model).rglob("results_*.json")
    scores = json.loads(found.read_text(encoding="utf-8"))["results"]
    for task in tasks.split(","):
        values = [value for name, value in scores[task].items() if name.split(",")[0] in ("acc", "exact_match")]
        if values != [1.0]:
            raise SystemExit(f"{model}, {task}: {scores[task]}")


def main() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise SystemExit("The harness is missing: pip install 'lm_eval[api]'")
    with server("sample", "eagle3") as url, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps(sample) + "\n" for sample in samples(url)), encoding="utf-8")
        kinds = {"choice": CHOICE}
        for kind in ("continuation", "answer"):
            kinds[kind] = WRITTEN.replace("NAME", kind).replace("TOKENS", str(TOKENS))
        for kind, own in kinds.items():
            (folder / f"{kind}.yaml").write_text(TASK.format(data=data) + own, encoding="utf-8")
        evaluate("local-completions", f"{url}/v1/completions", folder, "continuation_choice,continuation")
        evaluate("local-chat-completions", f"{url}/v1/chat/completions", folder, "answer", "--apply_chat_template")


if __name__ == "__main__":
    main()
