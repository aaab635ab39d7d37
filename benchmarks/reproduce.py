"""Makes the figures and tables of README and site again: all of them, or some by name.

    scripts/reproduce --list                                     # what there is, and how long it takes
    scripts/reproduce real engines                               # two of them, then the pages
    scripts/reproduce real --model MODEL --prompts mine.jsonl    # the same tables for your model and prompts

A part is one benchmark or several. Its old results are moved to build/reproduce/before, its new ones are written to
benchmarks/results, and then all pages are filled in again. A finished command is not run again (--again does), and
most benchmarks continue where they were interrupted. With --model or --prompts nothing in the repository is changed:
results, tables and picture go to build/reproduce/own.*. Stop other programs: most numbers are times.
"""

import argparse
import hashlib
import itertools
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STATE = ROOT / "build" / "reproduce"
OWN_RESULTS = STATE / "own.jsonl"
TASKS = ("humaneval", "gsm8k", "mt_bench")
ALL_TASKS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "sum", "qa")
Command = list[str]


class Inputs(NamedTuple):
    """Folders and files that do not ship with the repository, and what a reader chose."""

    models: Path
    prompts: Path
    corpus: Path
    heads: Path
    smollm2: str
    head: Path
    openvino: Path
    own_model: str | None
    own_prompts: Sequence[str]

    @property
    def own(self) -> bool:
        """Whether a reader's model or prompts take the place of ours."""
        return bool(self.own_model or self.own_prompts)


class Part(NamedTuple):
    """What a part makes, hours on two quiet cores, its results files, what it needs, and its commands."""

    what: str
    hours: float
    results: tuple[str, ...]
    needs: Callable[[Inputs], Sequence[Path]]
    commands: Callable[[Inputs], Sequence[Command]]


def script(name: str, *words: str | Path | int) -> Command:
    return [sys.executable, f"benchmarks/{name}.py", *map(str, words)]


def foredraft(*words: str | Path) -> Command:
    return [sys.executable, "-m", "foredraft", *map(str, words)]


def questions(inputs: Inputs, tasks: Sequence[str] = TASKS) -> list[str]:
    return [str(inputs.prompts / "eagle" / task / "question.jsonl") for task in tasks]


def repeated(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def policy(inputs: Inputs) -> list[Command]:
    """Every method at every fixed size and under the policy, for both targets."""
    files = ["--threads", "1", "--prompts", *questions(inputs)]
    heads, small, own = inputs.heads, "sample-draft", inputs.heads / "target-65m"
    named = [f"draft_model:{inputs.models / 'draft-6m'}", "prompt_lookup", f"eagle3:{own / 'eagle3' / 'head'}"]
    named += [f"eagle1:{own / 'eagle' / 'head'}", f"medusa:{own / 'medusa' / 'head'}"]
    others = ["eagle2", f"hydra:{heads / 'hydra' / 'head'}", f"hydra++=hydra:{heads / 'hydra++' / 'head'}"]
    others += ["blockwise:sample-medusa", "max_gram", "lookahead", f"cape:{small}", f"opt_tree:{small}"]
    others += [f"sequoia:{small}", f"specinfer:{small}", f"pruned=draft_model:{heads / 'pruned' / 'draft'}"]
    others += [f"universal:{inputs.models / 'draft-6m'}", f"online=online:[draft_model:{small}]"]
    others += [
        f"relay=relay:[draft_model:{small},num_assistant_tokens=3]+max_gram",
        f"cascade=cascade:{small}+max_gram",
    ]
    others += ["early_exit=early_exit,assistant_early_exit=6", f"layer_skip=layer_skip:{heads / 'skips.json'}"]
    others += ["partial", f"triforce:{small}", f"bandit=bandit:prompt_lookup+[draft_model:{small}]"]
    target = ["--target", inputs.models / "target-65m", "--tokens", "1500"]
    return [
        script("policy", *files, "--tokens", "1500"),
        script("policy", *files, *target, *repeated("-d", named)),
        script("policy", *files, "--tokens", "500", *repeated("-d", others)),
    ]


def real(inputs: Inputs) -> list[Command]:
    """A real model at fixed sizes and under the policy; with --model or --prompts, the reader's."""
    words = ["--model", inputs.own_model or inputs.smollm2, "--count", "3"]
    words += ["--prompts", *(inputs.own_prompts or [inputs.prompts])]
    words += [] if inputs.own_model else ["--eagle3", inputs.head]
    if inputs.own:
        words += ["--out", OWN_RESULTS]
    return [
        script("real_model", *words, "--work", STATE / ("own_work.jsonl" if inputs.own else "real_model_work.jsonl"))
    ]


def hybrid(inputs: Inputs) -> list[Command]:
    """Look-ups beside a head, on chats and on edits."""
    edits, results = STATE / "edits.jsonl", Path("benchmarks/results")
    words = ["--model", inputs.smollm2, "--eagle3", inputs.head, "--prompts", *questions(inputs, ALL_TASKS), edits]
    int8 = ["--weights", "int8", "--count", "4", "--only", "hybrid", "eagle3-chain", "eagle3 auto", "prompt_lookup"]
    int4 = ["--only", "hybrid", "eagle3-chain 2", "eagle3 auto", "prompt_lookup auto", "look-ups+head"]
    return [
        script("edits", edits),
        script("real_model", *words, *int4, "--out", results / "hybrid.jsonl", "--work", STATE / "hybrid_work.jsonl"),
        script(
            "real_model", *words, *int8, "--out", results / "hybrid_int8.jsonl", "--work", STATE / "hybrid_int8.jsonl"
        ),
    ]


def calibration(inputs: Inputs) -> list[Command]:
    words = ["--prompts", *questions(inputs)]
    real = ["--target", inputs.smollm2, "--weights", "int4", "--drafters", f"eagle3:{inputs.head}", "prompt_lookup"]
    return [script("calibration", *words), script("calibration", *words, *real)]


def acceptance(inputs: Inputs) -> list[Command]:
    """A real model's acceptance; of the heads for it, those that are there."""
    words = ["--model", inputs.smollm2, "--eagle3", inputs.head, "--prompts", inputs.prompts]
    for name, folder in (("eagle1", "eagle1"), ("medusa", "medusa"), ("hydra", "hydra++"), ("blockwise", "blockwise")):
        if (head := inputs.heads / "smollm2" / folder / "head").exists():
            words += [f"--{name}", head]
    return [script("acceptance", *words, "--weights", "int4")]


def universal(inputs: Inputs) -> list[Command]:
    """Pairs of tokenizers, one of them with a draft that learns the target's answers."""
    answers, trained = STATE / "answers", STATE / "universal"
    size = ["--tokens", "1500000", "--length", "512", "--batch", "8", "--lr", "5e-4"]
    learn = ["-m", inputs.smollm2, "--draft", inputs.models / "sample-16m", "--recipe", "loss=text", "--data", answers]
    words = ["--smollm2", inputs.smollm2, "--smollm2-draft", inputs.heads / "smollm2" / "draft"]
    words += ["--trained", trained / "draft", "--models", inputs.models]
    return [
        answers_of(inputs),
        foredraft("train", "draft", *learn, *size, "--out", trained),
        script("pairs", *words, "--prompts", *questions(inputs)),
    ]


def chains(inputs: Inputs) -> list[Command]:
    words = ["--target", inputs.smollm2, "--draft", inputs.heads / "smollm2" / "draft"]
    words += ["--prompts", inputs.prompts / "eagle"]
    small = ["--target", inputs.models / "target-65m", "--draft", inputs.models / "draft-6m", "--weights", ""]
    small += ["--prompts", inputs.prompts / "eagle", "--out", "benchmarks/results/chains_float32.jsonl"]
    return [
        script("chains", "sweep", *words),
        script("chains", "sweep", *small),
        script("chains", "laws", *words),
        script("chains", "plot"),
    ]


def layer_search(inputs: Inputs) -> list[Command]:
    words = ["--target", inputs.models / "sample-16m", "--prompts", *questions(inputs, ("mt_bench", "gsm8k"))]
    return [script("layer_search", *words, "--answers", "2", "--tokens", "20", "--trials", "100", "--seeds", "3")]


def lookahead(inputs: Inputs) -> list[Command]:
    """Windows and n-grams of several sizes, W as large as G; the prompt's n-grams; the policy."""
    fixed = "num_assistant_tokens_schedule=constant"
    arms = [
        "none",
        "lookahead auto=lookahead",
        f"lookahead W5 N4 with the prompt's=lookahead,prompt_ngrams=yes,{fixed}",
    ]
    for n, w in itertools.product((3, 4, 5), (5, 10, 15)):
        arms.append(f"lookahead W{w} N{n}=lookahead,window_size={w},ngram_size={n},guess_set_size={w},{fixed}")
    words = ["bench", "-m", inputs.smollm2, "--weights", "int4", "--chat", "--count", "8", "--max-new-tokens", "64"]
    words += [*repeated("-d", arms), *repeated("--prompts", questions(inputs, ("humaneval", "mt_bench", "sum")))]
    return [foredraft(*words, "--no-texts", "--out", "benchmarks/results/lookahead.jsonl")]


def sequoia(inputs: Inputs) -> list[Command]:
    """Acceptance by the size of the tree, beside other shapes of as many nodes."""
    fixed, draft = "num_assistant_tokens_schedule=constant", "sample-draft"
    arms = ["none"]
    for nodes in (4, 8, 16, 32, 63):
        arms.append(f"Sequoia {nodes}=sequoia:{draft},nodes={nodes},depth=10,{fixed}")
        arms.append(f"OPT-Tree {nodes}=opt_tree:{draft},nodes={nodes},depth=10,{fixed}")
        if nodes < 32:
            length = f"num_assistant_tokens={nodes},assistant_confidence_threshold=0"
            arms.append(f"1 chain {nodes}=draft_model:{draft},{length},{fixed}")
        if nodes > 4:
            chains = max(nodes // 4, 2)
            shape = "x".join(map(str, (chains, 1, 1, 1)))
            arms.append(f"{chains} chains {4 * chains}=draft_model:{draft},branching={shape},{fixed}")
    words = ["bench", "-m", "sample", *repeated("-d", arms), *repeated("--prompts", questions(inputs, TASKS[:1]))]
    words += ["--temperature", "0", "--temperature", "1", "--count", "8", "--max-new-tokens", "96"]
    return [foredraft(*words, "--no-texts", "--out", "benchmarks/results/sequoia.jsonl")]


def tune(inputs: Inputs) -> list[Command]:
    methods = ["prompt_lookup", "draft_model", "eagle1", "eagle2", "eagle3", "medusa"]
    words = ["tune", "--chat", "--count", "3", "--verify", "10", *repeated("--batch-size", ["1", "4", "8"])]
    words += [*repeated("--prompts", questions(inputs, TASKS[:2])), *repeated("-d", methods)]
    return [foredraft(*words, "--out", "benchmarks/results/tuned.json")]


def drafts(inputs: Inputs) -> list[Command]:
    """Several drafts for one tree, deep and wide drafts, cascades: with training."""
    names = ("gsm8k_train", "self_dialogue", "the_algorithms_python")
    words, files = ["--folder", STATE / "drafts"], ["--prompts", *questions(inputs)]
    learned = ["--share", "0.5", "--store", "4", "--data", *(inputs.corpus / f"{name}.jsonl.xz" for name in names)]
    several, pruned = ("boosted", "alone/2", "alone/3"), ("shape/wide", "shape/middle", "shape/deep")
    return [
        script("drafts", "train", *words, "--only", *several, "--tokens", "500000", *learned),
        script("drafts", "train", *words, "--only", *pruned, "--tokens", "200000", "--samples", "8", *learned),
        script("drafts", "hits", *words, *files, "--rounds", "3"),
        script("drafts", "trees", *words, *files),
        script("drafts", "shapes", *words, *files, "--texts", "2", "--rounds", "4"),
        script("drafts", "cascades", *words, *files, "--texts", "2", "--rounds", "4"),
    ]


def heads(inputs: Inputs) -> list[Command]:
    own = inputs.heads
    words = ["--hydra", own / "hydra" / "head", "--hydra-plus", own / "hydra++" / "head"]
    words += ["--equal", own / "eagle3" / "head", "--prompts", inputs.prompts]
    return [script("heads", *words), script("heads_summary")]


def answers_of(inputs: Inputs) -> Command:
    """The real model's own answers, which its heads learn from."""
    excluded = repeated("--exclude", questions(inputs))
    model = ["-m", inputs.smollm2, "--weights", "int4", "--own-prompts", "14000"]
    return foredraft("answers", STATE / "answers", *model, *excluded)


def ablation(inputs: Inputs) -> list[Command]:
    answers, files = STATE / "answers", questions(inputs, ("mt_bench", "gsm8k"))
    return [
        answers_of(inputs),
        script("ablation", "--model", inputs.smollm2, "--data", answers, "--prompts", *files),
        script("heads_summary"),
    ]


def glide(inputs: Inputs) -> list[Command]:
    """Heads of the bundled model, each on as many tokens of the same texts; and a head of the real one, on the answers
    that the smallest heads of ``ablation`` learned from."""
    texts = [inputs.corpus / f"{name}.jsonl.xz" for name in ("gsm8k_train", "mbpp_train", "the_algorithms_python")]
    results, size = ROOT / "benchmarks" / "results", ["--questions", "size", "--seeds", "0", "--work", STATE / "glide"]
    bundled = ["--sizes", "0.3", "--warm", "--batch", "4", "--new-tokens", "0", "--methods", "eagle", "glide"]
    bundled += ["--out", results / "glide.jsonl"]
    real = ["--sizes", "0.25", "--count", "16", "--store", "2", "--methods", "glide"]
    real += ["--out", results / "glide_smollm2.jsonl"]
    head = STATE / "glide" / "size-glide-0.25M-seed0" / "head"
    arms = {f"glide chain of {n}": f"glide:{head},nodes={n},depth={n},top_k=1" for n in (2, 4)}
    arms |= {"glide tree of 8": f"glide:{head},nodes=8,depth=4,top_k=4"}
    arms |= {"cape 4 tokens": f"cape:{head},num_assistant_tokens=4"}
    asked, chats = (questions(inputs, names) for names in (("humaneval", "gsm8k"), ("mt_bench", "gsm8k")))
    return [
        script("ablation", "--model", "sample", "--texts", *texts, "--prompts", *asked, *size, *bundled),
        answers_of(inputs),
        script("ablation", "--model", inputs.smollm2, "--data", STATE / "answers", "--prompts", *chats, *size, *real),
        speeds("glide", inputs.smollm2, inputs, arms, "--dtype", "float32", count=1),
    ]


def speeds(part: str, model: str | Path, inputs: Inputs, arms: dict[str, str], *words: str, count: int) -> Command:
    """Methods at fixed sizes beside plain decoding, ``count`` prompts of each task."""
    named = [f"{name}={spec},num_assistant_tokens_schedule=constant" for name, spec in arms.items()]
    files = [*repeated("-d", ["none", *named]), *repeated("--prompts", questions(inputs, ALL_TASKS))]
    limits = ["--chat", "--count", str(count), "--max-new-tokens", "64", "--no-texts"]
    return foredraft("bench", "-m", model, *words, *files, *limits, "--out", f"benchmarks/results/{part}_speed.jsonl")


def early_exit(inputs: Inputs) -> list[Command]:
    """LayerSkip's training of the real model, a search for layers to skip, and what both accept."""
    answers, parts, model = STATE / "answers", STATE / "answers-split", inputs.smollm2
    open_end = "assistant_confidence_threshold=0"
    files, run, skips = [answers / "T0.jsonl", answers / "T1.jsonl"], STATE / "exit", STATE / "skips.json"
    held = [parts / f"held_{file.name}" for file in files]
    train = ["--data", parts / "train.jsonl", "--out", run, "--tokens", "400000", "--batch", "4"]
    some = ["--count", "1", "--chat", "--max-new-tokens", "32", *repeated("--prompts", questions(inputs, ALL_TASKS))]
    words = ["--model", model, "--trained", run / "model", "--skips", skips]
    words += ["--prompts", *questions(inputs, ALL_TASKS)]
    words += ["--answers", *held, "--answer-count", "100", "--count", "8", "--weights", "int8"]
    words += ["--exits", "8", "15", "23", "--chains", "2", "4", "6", "--temperatures", "0"]
    first = f"early_exit,{open_end}"
    early = {
        f"early_exit {n} tokens by {e} layers": f"{first},assistant_early_exit={e},num_assistant_tokens={n}"
        for e, n in ((8, 2), (15, 2), (15, 4), (23, 2))
    }
    skipping = {f"layer_skip {n} tokens": f"layer_skip:{skips},{open_end},num_assistant_tokens={n}" for n in (2, 4)}
    return [
        answers_of(inputs),
        script("lossy", "--answers", *files, "--split", parts),
        foredraft("skip", "-m", model, "--weights", "int8", *some, "--out", skips),
        foredraft("train", "early_exit", "-m", model, *train, "--recipe", "share=0.25"),
        script("early_exit", *words),
        speeds("early_exit", run / "model", inputs, early, "--weights", "int4", count=2),
        speeds("layer_skip", model, inputs, skipping, "--weights", "int4", count=2),
    ]


def lossy(inputs: Inputs) -> list[Command]:
    """Heads of the real model and Medusa-2's target, and what lossy rules do with them."""
    answers, parts, model = STATE / "answers", STATE / "answers-split", ["-m", inputs.smollm2]
    files = [answers / "T0.jsonl", answers / "T1.jsonl"]
    held = [parts / f"held_{file.name}" for file in files]
    data, medusa = ["--data", parts / "train.jsonl", "--tokens", "3000000"], STATE / "medusa" / "head"
    joint = ["--start", medusa, "--recipe", "alone=0", "--recipe", "own=kl", "--batch", "16", "--lr", "0.0005"]
    heads = ["--model", inputs.smollm2, "--medusa", medusa, "--blockwise", STATE / "blockwise" / "head"]
    heads += ["--weights", "int8", "--prompts", *questions(inputs, ("gsm8k", "mt_bench"))]
    new = ["--medusa2", STATE / "medusa2" / "head", "--answers", *held]
    return [
        answers_of(inputs),
        script("lossy", "--answers", *files, "--split", parts),
        *(foredraft("train", name, *model, *data, "--out", STATE / name) for name in ("medusa", "blockwise")),
        foredraft("train", "medusa2", *model, *data, *joint, "--out", STATE / "medusa2"),
        script("lossy", *heads, *new, "--rows", "8"),
        script("lossy", *heads, "--speed", "--temperatures", "1", "--count", "12", "--new-tokens", "48"),
    ]


def engines(inputs: Inputs, *more: str) -> list[Command]:
    """Files of three types, and all engines on them; with ``more``, on other shapes alone."""
    llama = script("peers/llama_cpp")
    words = ["--prompt-files", inputs.prompts / "eagle", "--openvino", inputs.openvino, "--model", inputs.smollm2]
    if more:
        return [llama, script("engines", *words, *more)]
    files = {kind: STATE / f"SmolLM2-135M-Instruct.{kind}.gguf" for kind in ("Q4_0", "Q4_1", "Q8_0")}
    written = [
        script("write_gguf", inputs.smollm2, path, "--type", kind, "--split", "smollm") for kind, path in files.items()
    ]
    few = ["--few", "transformers *", "* float32 *", "*-ACCURACY *", "--threads", "1", "2"]
    # the head alone beside int4, where it is not the default
    heads = ["--drafters", "auto", "eagle3", "--skip", "foredraft [!i]* eagle3*", "foredraft int8 eagle3*"]
    return [llama, *written, script("engines", *words, "--gguf", *files.values(), *few, *heads, "--choose", "2")]


def coder(inputs: Inputs) -> list[Command]:
    """A model of the size and in the format that people run, with a draft model of its family."""
    words = ["--model", "coder", "--assistant", "coder-draft", "--drafters", "auto", "draft_model:coder-draft"]
    words += ["--openvino", inputs.openvino, "--openvino-types", "Q4_K_M", "--skip", "transformers float32 *"]
    words += ["--tasks", "humaneval", "mt_bench", "gsm8k", "sum", "--prompts", "8", "--choose", "2", "--scored", "0"]
    words += [
        "--prompt-files",
        inputs.prompts / "eagle",
        "--few",
        "transformers *",
        "openvino *",
        "--threads",
        "1",
        "2",
    ]
    return [
        ["scripts/models", "coder", "coder-draft"],
        script("peers/llama_cpp"),
        script("engines", *words, "--out", "benchmarks/results/engines_coder.jsonl"),
    ]


def nothing(_: Inputs) -> Sequence[Path]:
    return ()


def made(*commands: Command) -> Callable[[Inputs], Sequence[Command]]:
    return lambda _: commands


PARTS = {
    "engines": Part(
        "CPU engines on one model: README, native.md, results.md",
        0.5,
        ("engines.jsonl",),
        lambda i: (Path(i.smollm2), i.prompts, i.openvino),
        engines,
    ),
    "coder": Part(
        "CPU engines on a model of 1.5 billion parameters: README, native.md, results.md",
        3.0,
        ("engines_coder.jsonl",),
        lambda i: (i.prompts,),
        coder,
    ),
    "shapes": Part(
        "CPU engines on larger shapes: native.md",
        0.3,
        ("engines_shapes.jsonl",),
        lambda i: (Path(i.smollm2), i.prompts, i.openvino),
        lambda i: engines(i, "--shape", "1b", "3b", "--only", "* plain @*", "--threads", "1", "2"),
    ),
    "real": Part(
        "a real model, every size and the policy: results.md",
        0.5,
        ("real_model.jsonl", "real_model_repeats.json"),
        lambda i: (*map(Path, i.own_prompts or [i.prompts]), *([] if i.own_model else [i.head])),
        real,
    ),
    "hybrid": Part(
        "look-ups beside a head on a real model: README, results.md, methods/hybrid.md",
        0.3,
        ("hybrid.jsonl", "hybrid_repeats.json", "hybrid_int8.jsonl", "hybrid_int8_repeats.json"),
        lambda i: (i.prompts, i.head),
        hybrid,
    ),
    "acceptance": Part(
        "acceptance of every method at equal sizes on a real model: results.md",
        10.0,
        ("acceptance.jsonl",),
        lambda i: (i.prompts, i.head),
        acceptance,
    ),
    "policy": Part(
        "every method at its best size and under the policy: README, results.md, methods",
        8.0,
        ("policy.jsonl",),
        lambda i: (i.models, i.prompts, i.heads),
        policy,
    ),
    "batches": Part(
        "speed-up by batch size on a real model: results.md",
        0.2,
        ("batches.jsonl",),
        lambda i: (i.prompts, Path(i.head)),
        lambda i: [script("batches", "--model", i.smollm2, "--eagle3", i.head, "--prompts", i.prompts)],
    ),
    "calibration": Part(
        "what the policy expects and what is accepted: results.md",
        0.5,
        ("calibration.jsonl",),
        lambda i: (i.prompts, Path(i.head)),
        calibration,
    ),
    "universal": Part(
        "pairs of tokenizers, with training: methods/universal.md",
        3.0,
        ("universal.jsonl",),
        lambda i: (i.models, i.prompts, Path(i.smollm2), i.heads / "smollm2" / "draft"),
        universal,
    ),
    "chains": Part(
        "drafts of every length against the theory, truncated laws: theory.md",
        0.5,
        ("chains.jsonl", "chains_float32.jsonl"),
        lambda i: (i.prompts, i.models, Path(i.smollm2), i.heads / "smollm2" / "draft"),
        chains,
    ),
    "layer_search": Part(
        "searches for layers to skip: methods/layer_skip.md",
        0.3,
        ("layer_search.jsonl",),
        lambda i: (i.models, i.prompts),
        layer_search,
    ),
    "lookahead": Part(
        "lookahead by the size of its window: methods/lookahead.md",
        0.2,
        ("lookahead.jsonl",),
        lambda i: (Path(i.smollm2), i.prompts),
        lookahead,
    ),
    "sequoia": Part(
        "acceptance by the size of a tree: methods/sequoia.md", 0.2, ("sequoia.jsonl",), lambda i: (i.prompts,), sequoia
    ),
    "tune": Part("what tune predicted: results.md", 0.3, ("tuned.json",), lambda i: (i.prompts,), tune),
    "transformers": Part(
        "against transformers at equal length: results.md",
        0.3,
        ("speed.jsonl",),
        lambda i: (i.models, i.prompts),
        lambda i: [script("speed", "--models", i.models, "--prompts", i.prompts / "eagle")],
    ),
    "heads": Part(
        "trained heads of the bundled model, with figures: heads.md",
        1.0,
        ("heads.jsonl",),
        lambda i: (i.prompts, i.heads),
        heads,
    ),
    "ablation": Part(
        "EAGLE's findings on a real model, with training (minutes on a GPU): heads.md",
        60.0,
        ("ablation.jsonl",),
        lambda i: (Path(i.smollm2), i.prompts),
        ablation,
    ),
    "glide": Part(
        "GLIDE after as much training as EAGLE's heads: methods/glide.md",
        15.0,
        ("glide.jsonl", "glide_smollm2.jsonl", "glide_speed.jsonl"),
        lambda i: (Path(i.smollm2), i.corpus, i.prompts),
        glide,
    ),
    "early_exit": Part(
        "LayerSkip's training of a real model, and layers to skip: methods/early_exit.md, methods/layer_skip.md",
        2.0,
        ("early_exit.jsonl", "early_exit_speed.jsonl", "layer_skip_speed.jsonl"),
        lambda i: (Path(i.smollm2), i.prompts),
        early_exit,
    ),
    "lossy": Part(
        "lossy rules and Medusa-2, with training (minutes on a GPU): methods",
        12.0,
        ("lossy.jsonl", "lossy_speed.jsonl"),
        lambda i: (Path(i.smollm2), i.prompts),
        lossy,
    ),
    "online": Part(
        "online distillation while topics change: methods/online.md",
        1.0,
        ("online.jsonl",),
        lambda i: (i.corpus,),
        lambda i: [script("online", i.corpus), script("online", "--plot")],
    ),
    "drafts": Part(
        "merged trees, deep and wide drafts, cascades: methods/specinfer.md, pruned_drafts.md, cascade.md",
        2.0,
        ("drafts.jsonl",),
        lambda i: (i.corpus, i.prompts),
        drafts,
    ),
    "triforce": Part(
        "long contexts: methods/triforce.md",
        0.5,
        ("triforce.jsonl",),
        lambda i: (i.models, i.corpus),
        lambda i: [script("triforce", "--models", i.models, "--corpus", i.corpus)],
    ),
    "retrieval": Part(
        "what parts of a long context accept on a real model: methods/triforce.md",
        3.0,
        ("retrieval.jsonl",),
        lambda i: (Path(i.smollm2), i.corpus),
        lambda i: [
            script("retrieval", "--model", i.smollm2, "--corpus", i.corpus, "--threads", "2"),
            script("retrieval", "--plot"),
        ],
    ),
    "stopping": Part(
        "when chains end, against an oracle: schedules.md",
        0.2,
        ("stopping.jsonl",),
        lambda i: (i.prompts,),
        lambda i: [script("stopping", "--prompts", *questions(i))],
    ),
    "shared_noise": Part(
        "shared noise beside ratio rules: methods/shared_noise.md",
        3.0,
        ("shared_noise.jsonl",),
        lambda i: (i.prompts,),
        lambda i: [script("shared_noise", "--prompts", *questions(i))],
    ),
    "identity": Part(
        "texts that equal plain decoding's: methods/shared_noise.md",
        6.0,
        ("identity.jsonl",),
        nothing,
        made(script("identity", "--out", "benchmarks/results/identity.jsonl")),
    ),
    "one_node": Part(
        "acceptance at one node: methods/shared_noise.md", 0.2, ("one_node.jsonl",), nothing, made(script("one_node"))
    ),
    "depth": Part(
        "latency of drafts by depth: methods/pruned_drafts.md", 0.1, ("depth.jsonl",), nothing, made(script("depth"))
    ),
    "step": Part("where a step's time goes: performance.md", 0.2, ("step.jsonl",), nothing, made(script("step"))),
    "prediction": Part(
        "predicted outputs: serving.md", 0.1, ("prediction.jsonl",), nothing, made(script("prediction"))
    ),
    "serving": Part(
        "the server under load: serving.md",
        0.2,
        ("serving.jsonl",),
        lambda i: (i.prompts,),
        lambda i: [script("serving", "--prompts", *questions(i))],
    ),
    "pictures": Part(
        "the terminal of README, and the tour of architecture.md",
        0.1,
        (),
        nothing,
        made(script("pictures"), script("tour")),
    ),
}
OWN = ("real",)
"""Parts that take a reader's model and prompts."""


def mark(name: str, command: Command) -> Path:
    """The file that says that a command of a part is finished."""
    return STATE / "finished" / f"{name}-{hashlib.sha256(shlex.join(command).encode()).hexdigest()[:12]}"


def absent(part: Part, inputs: Inputs) -> list[str]:
    return [str(path) for path in part.needs(inputs) if not path.exists()]


def listed(inputs: Inputs) -> str:
    """A line for each part."""
    lines = []
    for name, part in PARTS.items():
        done = all(mark(name, command).exists() for command in part.commands(inputs))
        state = "finished" if done else f"needs {', '.join(missing)}" if (missing := absent(part, inputs)) else ""
        lines.append(f"{name:13} {part.hours:5.1f} h  {part.what}{f'  [{state}]' if state else ''}")
    total = sum(part.hours for part in PARTS.values())
    return "\n".join([*lines, f"{'all':13} {total:5.1f} h"])


def run(name: str, inputs: Inputs, dry: bool) -> bool:
    """Run the commands of a part that are not finished; whether all are."""
    part = PARTS[name]
    commands = [command for command in part.commands(inputs) if not mark(name, command).exists()]
    started = STATE / "finished" / f"{name}-started"
    if commands and not dry and not started.exists():
        set_aside(part, inputs)
        started.parent.mkdir(parents=True, exist_ok=True)
        started.touch()
    for command in commands:
        print(f"{name}: {shlex.join(command)}", flush=True)
        if dry:
            continue
        began = time.monotonic()
        status = subprocess.run(command, cwd=ROOT).returncode
        if status:
            print(f"{name}: exit status {status}. The same command continues.", file=sys.stderr)
            return False
        mark(name, command).write_text(f"{(time.monotonic() - began) / 3600:.2f} h\n", encoding="utf-8")
    return True


def set_aside(part: Part, inputs: Inputs) -> None:
    """Move old results away: benchmarks that can continue would take them for their own."""
    if inputs.own:
        return
    before = STATE / "before"
    before.mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "benchmarks" / "results" / name for name in part.results):
        if path.exists():
            path.replace(before / path.name)


def filled_in(inputs: Inputs) -> None:
    """Draw the pictures of the results, and write all tables into the pages; of a reader's own run, print them."""
    if inputs.own:
        import real_model
        import result_figures

        if OWN_RESULTS.exists():
            picture = OWN_RESULTS.with_suffix(".svg")
            picture.write_text(result_figures.drawn(result_figures.real(OWN_RESULTS)), encoding="utf-8")
            print(f"{real_model.methods(OWN_RESULTS)}\n\nWrote {OWN_RESULTS.relative_to(ROOT)} and its picture, .svg.")
        return
    subprocess.run(script("result_figures"), cwd=ROOT, check=True)
    subprocess.run(script("summary", "--write"), cwd=ROOT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts; default: all")
    parser.add_argument("--list", action="store_true", help="name the parts, their hours, and what is missing")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--again", action="store_true", help="run finished commands again")
    parser.add_argument("--model", help="yours, in place of SmolLM2-135M: a folder, a hub name or a GGUF file")
    parser.add_argument("--prompts", nargs="+", default=[], help="yours: prompt files, in place of EAGLE's")
    parser.add_argument("--models", type=Path, default=Path("../shared/models"), help="folder of target-65m, draft-6m")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of prompts/ and corpus/")
    parser.add_argument("--heads", type=Path, default=Path("build/heads"), help="heads that scripts/sample-heads makes")
    parser.add_argument(
        "--smollm2", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="or a folder; engines need one"
    )
    parser.add_argument(
        "--head", type=Path, default=Path("src/foredraft/models/smollm2-eagle3"), help="of the real model"
    )
    parser.add_argument(
        "--openvino", type=Path, default=Path("build/peers/openvino/bin/python"), help="a Python with it"
    )
    args = parser.parse_args()
    inputs = Inputs(
        args.models, args.data / "prompts", args.data / "corpus", args.heads, args.smollm2, args.head,
        args.openvino, args.model, args.prompts,
    )  # fmt: skip
    if args.list:
        print(listed(inputs))
        return
    names = args.names or ([*OWN] if inputs.own else list(PARTS))
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"There is no part {', '.join(unknown)}. Known: {', '.join(PARTS)}.")
    if inputs.own and (other := [name for name in names if name not in OWN]):
        parser.error(f"--model and --prompts are for {', '.join(OWN)}, not for {', '.join(other)}.")
    raise SystemExit(0 if make(names, inputs, again=args.again, dry=args.dry_run) else 1)


def make(names: Sequence[str], inputs: Inputs, *, again: bool, dry: bool) -> bool:
    """Run parts in order, each as far as it comes; whether all could be finished."""
    hours = sum(PARTS[name].hours for name in names)
    print(f"{len(names)} part{'s' * (len(names) > 1)}, about {hours:.1f} hours.", flush=True)
    good = True
    for name in names:
        if missing := absent(PARTS[name], inputs):
            print(f"{name}: skipped, since there is no {', '.join(missing)}; --help has the options.", file=sys.stderr)
            good = False
            continue
        if again:
            for path in (STATE / "finished").glob(f"{name}-*"):
                path.unlink()
        good = run(name, inputs, dry) and good
        if not dry:
            filled_in(inputs)
    return good


if __name__ == "__main__":
    main()
