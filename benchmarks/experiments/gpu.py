"""All measurements that need a GPU, in less than ten minutes: each run is appended to the results.

Needs no download. The models have the shapes of Llama-3.1-8B, Llama-3.2-1B and a published EAGLE-3 head, with random
weights and forced acceptance (see forced.py). Parts run in order, each within its share of the time. One that fails or
runs out of time is recorded with its error, and the next one begins.

    python -m benchmarks gpu --out results.jsonl
    python -m benchmarks gpu --out results.jsonl --device cpu --tiny       # to test it
    python -m benchmarks gpu --out results.jsonl --graphs                  # captured against eager
    python -m benchmarks gpu --out results.jsonl --options '{}' --options '{"exact": true}'
"""

import functools
import gc
import itertools
import json
import signal
import statistics
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
import transformers
from transformers import LlamaConfig

import foredraft
from benchmarks.kit import forced
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.reading import markdown_table
from foredraft.bench.check import check_identity, check_sampled, draft_always
from foredraft.core.drafter import Plan, View
from foredraft.core.sampling.params import SamplingParams
from foredraft.core.tree import TokenTree
from foredraft.drafters import BUNDLED_DRAFTS
from foredraft.drafters.eagle3 import Eagle3Drafter, Options
from foredraft.engine.cost_model import measure_bandwidth, measure_costs
from foredraft.engine.policy import Constant, Policy
from foredraft.engine.step import StepResult
from foredraft.files.provenance import short_commit
from foredraft.model.attention.slot_attention import attention_weights, masked_attention, runs_kernel
from foredraft.model.hf.baseline import HFBaseline
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.model.kv.masks import Layout, address

Record = dict[str, Any]

FILE = RESULTS / "gpu.jsonl"
_NAMES = {"none": "plain", "eagle3 tree": "EAGLE-3, tree of 60", "eagle3 chain": "EAGLE-3, chain of 5"}
_NAMES |= {"draft_model": "draft model of 1B, chain of 5"}


def runs(path: Path = FILE) -> list[tuple[Record, list[Record]]]:
    """Each run's provenance and records."""
    found: list[tuple[Record, list[Record]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "provenance":
            found.append((record, []))
        else:
            found[-1][1].append(record)
    return found


def table() -> str:
    """All tables of the page."""
    found = runs()
    every = [record for _, records in found for record in records]
    parts = [_steps(found), _baselines(every), _kernel(every), _laws(every), _made(found)]
    return "\n\n".join(parts)


def _steps(found: Sequence[tuple[Record, list[Record]]]) -> str:
    """Milliseconds of a step, eager and captured, and tokens a second over those of plain decoding."""
    arms: dict[tuple[Any, ...], dict[str, Record]] = {}
    for origin, records in found:
        gpu = "H200" if "H200" in origin["device"] else "H100"
        for arm in records:
            if arm["kind"] == "arm" and arm["ahead"]:
                key = arm["batch"], arm["cached"], arm["temperature"], arm["method"]
                arms.setdefault(key, {})[f"{gpu} {'captured' if arm['options'] else 'eager'}"] = arm
    head = ["method", "rows", "cached tokens", "T", "tokens a step", "H100 eager: ms a step", "over plain"]
    head += [f"{gpu}: {what}" for gpu in ("H100", "H200") for what in ("ms a step", "tokens/s", "over plain")]
    lines = []
    for (batch, cached, heat, method), each in arms.items():
        plain = arms.get((batch, cached, heat, "none"), {})
        cells = []
        for run in ("H100 eager", "H100 captured", "H200 captured"):
            own, base = each.get(run), plain.get(run)
            rate = own["tokens_per_second"] if own else 0.0
            ratio = ""
            if own and base:
                median = own["acceptance_length"] / own["step_ms"] * base["step_ms"] / base["acceptance_length"]
                ratio = f"{rate / base['tokens_per_second']:.2f} / {median:.2f}"
            cells += [f"{own['step_ms']:.1f}" if own else "", f"{rate:,.0f}" if own else "", ratio]
        del cells[1]  # eager tokens a second
        length = next(iter(each.values()))["acceptance_length"]
        lines.append([_NAMES[method], str(batch), f"{cached:,}", f"{heat:g}", f"{length:.2f}", *cells])
    return (
        "\n".join(markdown_table(head, lines)) + "\n\nH100 and H200 without a word more: steps captured in CUDA graphs."
    )


def _baselines(records: Sequence[Record]) -> str:
    found = {each["method"]: each for each in records if each["kind"] == "baseline" and each["batch"] == 1}
    said = ", ".join(f"{name} {each['ms_per_token']:.1f}" for name, each in found.items())
    return f"transformers, one row, 1,024 cached tokens, H100, ms a token: {said}."


def _kernel(records: Sequence[Record]) -> str:
    """The kernel beside masked attention and the time to read keys and values once."""
    head = ["rows", "cached tokens", "nodes", "kernel, ms", "masked attention, ms", "floor, ms", "error (masked)"]
    lines = []
    for each in records:
        if each["kind"] == "kernel" and each["runs"] and each["window"] is None:
            errors = f"{each['error']:.1e} ({each['masked_error']:.1e})"
            times = [f"{each[key]:.3f}" for key in ("ms", "masked_ms", "floor_ms")]
            lines.append([str(each["batch"]), f"{each['cached']:,}", str(each["nodes"]), *times, errors])
    return "\n".join(markdown_table(head, lines))


def kernel_in_short() -> str:
    """The kernel's time over masked attention's, as ranges over contexts and draft sizes."""
    every = [record for _, records in runs() for record in records]
    shares: dict[bool, list[float]] = {}
    for each in every:
        if each["kind"] == "kernel" and each["runs"] and each["window"] is None:
            shares.setdefault(each["batch"] == 1, []).append(each["ms"] / each["masked_ms"])
    one, several = (f"{min(shares[alone]):.2f} to {max(shares[alone]):.2f}" for alone in (True, False))
    return f"{one} of masked attention's time for one row, {several} for 8 and 32 rows"


def _laws(records: Sequence[Record]) -> str:
    """Greedy identity of each method, and the chi-square test: one for all whose texts gave the same p-value."""
    laws = [each for each in records if each["kind"] == "law"]
    methods = ", ".join(f"`{name}`" for name in dict.fromkeys(each["method"] for each in laws))
    equal = sum(each["greedy_passed"] for each in laws)
    tests = {f"{each['p_value']:.2f}": each["sampled_passed"] for each in laws}
    drawn = ", ".join(f"p = {value}, {'passed' if passed else 'failed'}" for value, passed in tests.items())
    return (
        f"On the bundled model in float32, eager and captured ({methods}): greedy texts equal to plain decoding's in "
        f"{equal} of {len(laws)} runs. Sampled texts are a function of the seed, so the {len(laws)} runs are "
        f"{len(tests)} chi-square test{'s' if len(tests) > 1 else ''} of the law ({drawn})."
    )


def _made(found: Sequence[tuple[Record, list[Record]]]) -> str:
    each = "; ".join(
        f"{origin['device']}: {', '.join(origin['parts'])} at commit {short_commit(origin['commit'])}, {origin['date']}"
        for origin, _ in found
    )
    torch = found[0][0]["torch"]
    return f"torch {torch}. {each}. Every record is in `benchmarks/results/gpu.jsonl`."


# ---- measurement

_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
LLAMA_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LLAMA_8B |= {"max_position_embeddings": 131072, "rope_parameters": _ROPE, **_NO_ENDS}
LLAMA_1B = LLAMA_8B | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
SMALL |= _NO_ENDS
SMALLER = SMALL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}

DRAFT = "draft_model,num_assistant_tokens={},assistant_confidence_threshold=0"
WARM_UP = 6
"""Steps at the start of a run that are not counted: prefill, the drafter's prefill, and new shapes."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of models and measurements: full on a GPU, tiny to test the script."""

    target: dict[str, Any]
    draft: dict[str, Any]
    tokens: int  # of the text, and the head's vocabulary
    cells: tuple[tuple[int, int], ...]  # (batch, cached tokens), the most important ones first
    new_tokens: int
    nodes: int  # of a tree
    cost_nodes: int  # of the largest forward that is timed
    lawful: tuple[str, ...]  # methods of the law check
    sampled: int  # tokens of the law check
    bandwidth: int  # MiB that are read to measure the bandwidth


FULL = Sizes(
    LLAMA_8B,
    LLAMA_1B,
    32_000,
    ((1, 1024), (8, 1024), (32, 1024), (1, 7168), (64, 1024), (4, 1024), (16, 1024), (8, 7168), (2, 1024)),
    96,
    60,
    64,
    ("eagle3", "draft_model", "prompt_lookup", "sequoia", "eagle1", "medusa", "opt_tree", "triforce", "lookahead"),
    4000,
    4096,
)
TINY = Sizes(SMALL, SMALLER, 256, ((1, 64), (2, 160)), 40, 15, 8, ("eagle3",), 200, 64)


class Bench:
    """The models and the measured bandwidth; each is made when a part first needs it."""

    def __init__(self, args: Namespace) -> None:
        self.device = torch.device(args.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.sizes = TINY if args.tiny else FULL
        self.options: list[dict[str, Any]] = [json.loads(text) for text in args.options]
        self.methods: list[str] = args.methods

    @cached_property
    def text(self) -> forced.Text:
        return forced.Text.of(self.sizes.tokens, self.device)

    @cached_property
    def target(self) -> CausalLM:
        return forced.model(LlamaConfig(**self.sizes.target), self.text, self.dtype, draft=False)

    @cached_property
    def draft(self) -> CausalLM:
        return forced.model(LlamaConfig(**self.sizes.draft), self.text, self.dtype, draft=True)

    @cached_property
    def head(self) -> Any:
        return forced.eagle3(self.target, self.text)

    @cached_property
    def bandwidth(self) -> float:
        return measure_bandwidth(self.device, self.sizes.bandwidth)

    def floor(self, batch: int, cached: int) -> float:
        """Seconds to read the target's weights and the rows' keys and values once."""
        return (self.target.weight_bytes + batch * cached * self.target.token_bytes) / self.bandwidth

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object], repeats: int = 10) -> float:
        """Median time of a call; on a GPU without launches, from a captured graph of several calls."""
        replay: Callable[[], object] = call
        call()
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(repeats):
                    call()
            replay = graph.replay
        times = []
        for _ in range(5):
            self.synchronize()
            started = time.perf_counter()
            replay()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times) / (repeats if self.device.type == "cuda" else 1)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def machine(bench: Bench) -> Iterator[dict[str, Any]]:
    """The device, its bandwidth, and the bytes that a step reads."""
    facts: dict[str, Any] = {"kind": "machine", "bandwidth": bench.bandwidth, "dtype": str(bench.dtype)}
    if bench.device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "memory": torch.cuda.mem_get_info()[1]}
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    facts |= {"weight_bytes": bench.target.weight_bytes, "token_bytes": bench.target.token_bytes}
    yield facts | {"draft_weight_bytes": bench.draft.weight_bytes, "first": forced.FIRST, "second": forced.SECOND}


def kernel(bench: Bench) -> Iterator[dict[str, Any]]:
    """The Triton kernel against attention in float64, and its time in a graph beside that of masked attention."""
    if not runs_kernel(bench.device):
        yield {"kind": "kernel", "runs": False}
        return
    from foredraft.model.attention.tree_attention import tree_attention  # needs Triton

    shape = LlamaConfig(**bench.sizes.target)
    for batch, cached in bench.sizes.cells[:5]:
        for nodes, window in ((1, None), (8, None), (bench.sizes.nodes + 1, None), (bench.sizes.nodes + 1, 32)):
            torch.manual_seed(nodes)
            parents = (torch.rand(batch, nodes) * torch.arange(nodes)).long()
            parents[:, 0] = -1
            tree = TokenTree(torch.zeros_like(parents).to(bench.device), parents.to(bench.device), depth=nodes)
            bases, layout = torch.full((batch,), cached, device=bench.device), Layout({"all": window}, by_type=False)
            step = address(tree, bases, range(batch), cached + nodes, layout, max_position=1 << 30)
            query, keys, values = (
                torch.randn(batch, heads, length, shape.head_dim, device=bench.device).to(bench.dtype)
                for heads, length in (
                    (shape.num_attention_heads, nodes),
                    (shape.num_key_value_heads, step.kv_extent),
                    (shape.num_key_value_heads, step.kv_extent),
                )
            )
            table = step.tables(torch.arange(batch, device=bench.device))["all"]
            mask, scale = step.masks(bench.dtype)["all"], shape.head_dim**-0.5
            ours = functools.partial(tree_attention, query, keys, values, table, scaling=scale)
            other = functools.partial(masked_attention, query, keys, values, mask)
            wide = step.masks(torch.float64)["all"]
            weights = attention_weights(query.double(), keys.double(), wide, scale)
            correct = (weights @ values.double()[:, :, None]).flatten(1, 2).transpose(1, 2)
            del weights
            yield {
                "kind": "kernel",
                "runs": True,
                "batch": batch,
                "cached": cached,
                "nodes": nodes,
                "window": window,
                "error": float((ours() - correct).norm() / correct.norm()),
                "masked_error": float((other() - correct).norm() / correct.norm()),
                "ms": bench.milliseconds(ours),
                "masked_ms": bench.milliseconds(other),
                "floor_ms": 1e3 * (keys.nbytes + values.nbytes) / bench.bandwidth,
            }
            bench.free()


def forwards(bench: Bench) -> Iterator[dict[str, Any]]:
    """Milliseconds of one forward by nodes, eager, and over the floor."""
    for batch, cached in bench.sizes.cells:
        if batch * cached > 32 * 1024:
            continue
        costs = measure_costs(bench.target, cached, budget=4.0, longest=bench.sizes.cost_nodes, batch=batch)
        floor = bench.floor(batch, cached)
        yield {
            "kind": "forward",
            "batch": batch,
            "cached": cached,
            "nodes": [rows // batch for rows in costs.rows],
            "ms": [1e3 * seconds for seconds in costs.seconds],
            "over_floor": [seconds / floor for seconds in costs.seconds],
        }
        bench.free()


@final
class Timed(Policy):
    """Always drafts the full length, and records the time of each step and of its parts."""

    def __init__(self, length: int, ahead: bool = True) -> None:
        self.ahead = ahead
        self._inner = Constant(length)
        self._last = time.perf_counter()
        self.steps: list[tuple[float, float, float, int]] = []  # whole, draft, verify, tokens

    def plan(self, view: View, limits: Sequence[int]) -> Plan:
        return self._inner.plan(view, limits)

    def observe(self, view: View, plan: Plan, step: StepResult) -> None:
        now, tokens = time.perf_counter(), sum(len(row.emitted) for row in step.rows)
        self.steps.append((now - self._last, step.draft_seconds, step.verify_seconds, tokens))
        self._last = now


def arms(bench: Bench) -> Iterator[dict[str, Any]]:
    """Decoding by method, batch, cached tokens and temperature, for each set of ``load``'s options."""
    chain = Options(nodes=5, depth=5, top_k=1)
    tree = Options(nodes=bench.sizes.nodes, depth=7, top_k=10)
    methods: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "eagle3 tree": lambda: Eagle3Drafter(tree, bench.head),
        "eagle3 chain": lambda: Eagle3Drafter(chain, bench.head),
        "draft_model": lambda: (DRAFT.format(5), bench.draft.model),
    }
    for index, (batch, cached) in enumerate(bench.sizes.cells):
        for temperature in (0.0, 1.0) if index == 0 else (0.0,):
            for name in bench.methods or methods:
                drafter = methods[name]
                both = index == 0 and not temperature and name != "none"
                for options, ahead in itertools.product(bench.options, (True, False) if both else (True,)):
                    arm = {"method": name, "batch": batch, "cached": cached, "options": options}
                    arm |= {"ahead": ahead, "temperature": temperature}
                    try:
                        yield {"kind": "arm", **arm, **_decode(bench, drafter(), arm, temperature)}
                    except TimeoutError:
                        raise
                    except Exception as error:  # memory, most of all: the next arm may fit
                        yield {"kind": "error", **arm, "error": f"{error.__class__.__name__}: {error}"}
                    bench.free()


def _decode(bench: Bench, drafter: Any, arm: dict[str, Any], temperature: float) -> dict[str, Any]:
    policy = Timed(0 if drafter is None else 64, arm["ahead"])
    batch, cached, options = arm["batch"], arm["cached"], arm["options"]
    with foredraft.load(bench.target, drafter, policy=policy, max_batch_size=batch, **options) as g:
        decode = functools.partial(
            g.generate,
            bench.text.prompts(batch, cached),
            max_new_tokens=bench.sizes.new_tokens,
            temperature=temperature,
            eos_token_id=(),
            seed=0,
        )
        if options:  # captures and compiles each shape when it is first met
            decode()
        policy.steps.clear()
        results = decode()
    steps = policy.steps[WARM_UP:] if len(policy.steps) > 2 * WARM_UP else policy.steps[len(policy.steps) // 2 :]
    whole, draft, verify = (1e3 * statistics.median(values) for values in list(zip(*steps, strict=True))[:3])
    floor = 1e3 * bench.floor(batch, cached)
    return {
        "steps": len(steps),
        "step_ms": whole,
        "draft_ms": draft,
        "verify_ms": verify,
        "floor_ms": floor,
        "over_floor": whole / floor,
        "acceptance_length": statistics.mean(result.stats.acceptance_length for result in results),
        "tokens_per_second": sum(step[3] for step in steps) / sum(step[0] for step in steps),
    }


def baselines(bench: Bench) -> Iterator[dict[str, Any]]:
    """transformers' own ``generate`` and assisted generation. The static cache is last: it is compiled first."""
    plain, assistant = HFBaseline(bench.target.model, ()), HFBaseline(bench.draft.model, ())
    bench.draft.model.generation_config.num_assistant_tokens = 5
    bench.draft.model.generation_config.num_assistant_tokens_schedule = "constant"
    bench.draft.model.generation_config.assistant_confidence_threshold = 0.0
    params = SamplingParams(max_new_tokens=bench.sizes.new_tokens)
    for batch, cached in bench.sizes.cells[:5]:
        for name, other in {"generate": None, "assisted": assistant}.items():
            if other is not None and batch > 1:
                continue
            call = plain.generate(bench.text.prompts(batch, cached), params, assistant=other)
            yield _baseline(bench, name, batch, cached, call.seconds - call.first_seconds, sum(call.blocks[1:]))
            bench.free()
    for batch, cached in bench.sizes.cells[:1]:
        seconds, count = _static(bench, batch, cached)
        yield _baseline(bench, "generate, static cache, compiled", batch, cached, seconds, count)


def _static(bench: Bench, batch: int, cached: int) -> tuple[float, int]:
    """Seconds and tokens between a short and a long call; the first call compiles."""
    ids = torch.tensor(bench.text.prompts(batch, cached), device=bench.device)
    short, long = 8, 8 + bench.sizes.new_tokens
    total = cached + long + 8
    times = []
    for count in (short, short, long):
        bench.synchronize()
        started = time.perf_counter()
        bench.target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            max_cache_len=total,
        )
        bench.synchronize()
        times.append(time.perf_counter() - started)
    return times[2] - times[1], long - short


def _baseline(bench: Bench, name: str, batch: int, cached: int, seconds: float, tokens: int) -> dict[str, Any]:
    """``tokens`` are those of one row."""
    found = {"kind": "baseline", "method": name, "batch": batch, "cached": cached, "tokens": tokens}
    each = seconds / tokens
    return found | {
        "ms_per_token": 1e3 * each,
        "tokens_per_second": batch / each,
        "over_floor": each / bench.floor(batch, cached),
    }


def profile(bench: Bench) -> Iterator[dict[str, Any]]:
    """The kernels of a few steps by time; none may be cuDNN's attention, which makes a new plan for each shape."""
    drafter = Eagle3Drafter(Options(nodes=bench.sizes.nodes, depth=7, top_k=10), bench.head)
    batch, cached = bench.sizes.cells[0]
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with foredraft.load(bench.target, drafter, policy=Timed(64), **bench.options[-1]) as g:
        prompts = bench.text.prompts(batch, cached)
        g.generate(prompts, max_new_tokens=24, eos_token_id=())
        with torch.profiler.profile(activities=activities) as recorded:
            g.generate(prompts, max_new_tokens=24, eos_token_id=())
    on_device = bench.device.type == "cuda"
    events = [e for e in recorded.key_averages() if not on_device or e.device_type == torch.autograd.DeviceType.CUDA]
    times = {event.key: event.self_device_time_total if on_device else event.self_cpu_time_total for event in events}
    largest = sorted(times, key=times.__getitem__, reverse=True)[:15]
    yield {
        "kind": "profile",
        "options": bench.options[-1],
        "cudnn": sorted(name for name in times if "cudnn" in name.lower()),
        "microseconds": {name[:120]: times[name] for name in largest},
    }


def laws(bench: Bench) -> Iterator[dict[str, Any]]:
    """Greedy identity and a chi-square test on the bundled model, in float32 on the device, by ``load``'s options."""
    prompts = ["def add(a, b):\n    return", "Once upon a time there was", "2 + 2 ="]
    greedy = SamplingParams(max_new_tokens=bench.sizes.new_tokens // 2, eos_token_id=())
    # a narrow law, so that a few thousand tokens are enough
    sampled = SamplingParams(max_new_tokens=2, temperature=1.0, top_k=8, seed=1, eos_token_id=())
    plain = foredraft.load("sample", "none", device=str(bench.device), dtype="float32")
    with plain:
        for drafter, options in itertools.product(bench.sizes.lawful, bench.options):
            path = BUNDLED_DRAFTS["sample"].get(drafter)
            with foredraft.load(plain, f"{drafter}:{path}" if path else drafter, **options) as g:
                draft_always(g)
                same = check_identity(g, prompts, greedy)
                law = check_sampled(g, prompts[:1], sampled, bench.sizes.sampled)
                yield {
                    "kind": "law",
                    "method": drafter,
                    "options": options,
                    "greedy_passed": same.passed,
                    "differences": [asdict(each) for each in same.differences],
                    "p_value": law.p_value,
                    "sampled_passed": law.passed,
                    "contexts": law.contexts,
                }


PARTS: dict[str, tuple[Callable[[Bench], Iterator[dict[str, Any]]], float]] = {
    "machine": (machine, 0.1),
    "kernel": (kernel, 0.05),
    "laws": (laws, 0.15),
    "forwards": (forwards, 0.1),
    "arms": (arms, 0.4),
    "profile": (profile, 0.05),
    "baselines": (baselines, 0.2),
}
"""Each part and its share of the time; unused time goes to the later parts."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise a ``TimeoutError`` in this thread after this many seconds."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"out of time after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(bench: Bench, names: Sequence[str], seconds: float) -> Iterator[Line]:
    """The records of the parts, as soon as each exists."""
    begun = time.perf_counter()
    for index, name in enumerate(names):
        part, share = PARTS[name]
        left = seconds - (time.perf_counter() - begun)
        rest = sum(PARTS[other][1] for other in names[index:])
        started = time.perf_counter()
        try:
            with limit(left * share / rest):
                for record in part(bench):
                    yield record | {"part": name, "at": time.perf_counter() - begun}
                    print(_line(record), flush=True)
        except Exception as error:  # the next part does not depend on this one
            trace = traceback.format_exc().splitlines()[-12:]
            yield {"kind": "error", "part": name, "error": f"{error.__class__.__name__}: {error}", "trace": trace}
        bench.free()
        print(f"-- {name}: {time.perf_counter() - started:.0f} s", flush=True)


def _line(record: dict[str, Any]) -> str:
    """A record as a line of text."""
    where = " ".join(
        f"{key}={record[key]}" for key in ("batch", "cached", "temperature", "ahead", "options") if key in record
    )
    match record["kind"]:
        case "arm":
            return (
                f"{record['method']:13} {where}: {record['step_ms']:.2f} ms a step ({record['draft_ms']:.2f} draft), "
                f"{record['over_floor']:.2f} of the floor, {record['acceptance_length']:.2f} tokens a step, "
                f"{record['tokens_per_second']:.0f} tokens/s"
            )
        case "baseline":
            return (
                f"{record['method']:13} {where}: {record['ms_per_token']:.2f} ms a token, "
                f"{record['over_floor']:.2f} of the floor, {record['tokens_per_second']:.0f} tokens/s"
            )
        case "forward":
            pairs = zip(record["nodes"], record["ms"], record["over_floor"], strict=True)
            return f"forward {where}: " + ", ".join(f"{n}: {ms:.2f} ms ({x:.2f})" for n, ms, x in pairs)
        case "kernel" if record["runs"]:
            return (
                f"kernel nodes={record['nodes']} window={record['window']} {where}: error {record['error']:.1e} "
                f"(masked {record['masked_error']:.1e}), {record['ms']:.3f} ms (masked {record['masked_ms']:.3f}, "
                f"floor {record['floor_ms']:.3f})"
            )
        case "law":
            verdict = "equal" if record["greedy_passed"] else f"DIFFERS {record['differences']}"
            return f"{record['method']:13} {where}: greedy {verdict}, p = {record['p_value']:.3g}"
        case _:
            return json.dumps(record)[:1500]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    args.options = args.options or (["{}", '{"cuda_graphs": true}'] if args.graphs else ["{}"])
    transformers.logging.set_verbosity_error()
    bench = Bench(args)
    facts = {"device": torch.cuda.get_device_name()} if bench.device.type == "cuda" else {}
    yield {"kind": "provenance", "parts": args.parts, "options": bench.options, **facts}
    yield from run(bench, args.parts, args.limit)


EXPERIMENT = Experiment(
    name="gpu",
    question="forced acceptance on a GPU: performance.md, models.md",
    options={
        "device": option("cuda"),
        "methods": option([], "of the arms, such as none; by default all"),
        "tiny": option(False, "tiny models and few tokens"),
        "parts": option(list(PARTS), choices=list(PARTS)),
        "limit": option(540.0, "seconds of all parts together"),
        "graphs": option(False, "every arm eagerly and as captured CUDA graphs"),
        "options": option(None, "more arms: keywords of foredraft.load as JSON; repeatable", action="append"),
    },
    cells=lambda args: [{"kind": "all parts"}],
    measure=measure,
    threads=None,
    tables={"docs/performance.md": {"gpu": table}, "docs/models.md": {"kernel": kernel_in_short}},
    results=("gpu.jsonl",),
)
