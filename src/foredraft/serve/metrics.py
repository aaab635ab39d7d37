"""Prometheus metrics. Counts of speculation have vLLM's names too, which benchmark tools look for."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from foredraft.core.stats import DecodeStats
from foredraft.engine.generator import Generator
from foredraft.engine.request import Sequence

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """What ``/metrics`` shows of one server."""

    def __init__(self, generator: Generator) -> None:
        self.registry = registry = CollectorRegistry()
        self._finished = Counter("foredraft_outputs", "Ended outputs.", ["finish_reason"], registry=registry)
        self._errors = Counter("foredraft_errors", "Error objects sent, by code.", ["code"], registry=registry)
        self._prompt = Counter("foredraft_prompt_tokens", "Prompt tokens of ended outputs.", registry=registry)
        self._tokens = Counter("foredraft_generation_tokens", "Emitted tokens.", registry=registry)
        self._first = _histogram("time_to_first_token_seconds", "From the request to its first tokens.", registry)
        self._between = _histogram("inter_token_latency_seconds", "Time per token of a stream's chunk.", registry)
        self._each = _histogram("time_per_output_token_seconds", "Mean time per token after the first step.", registry)
        self._whole = _histogram("e2e_request_latency_seconds", "From the request to the end of its output.", registry)
        self._queue = _histogram("request_queue_time_seconds", "From the request to its admission.", registry)
        self._speculation = _Speculation(generator.kind.method)
        registry.register(self._speculation)
        registry.register(_Load(generator))

    def ended(self, sequence: Sequence, started: float, now: float) -> None:
        """Count an output that was submitted at ``started``; times are those of ``time.perf_counter``."""
        counters, stats = sequence.counters, sequence.stats
        reason = "error" if sequence.error is not None else sequence.finish_reason or "cancelled"  # at the next step
        self._finished.labels(reason).inc()
        self._prompt.inc(stats.prompt_tokens)
        self._tokens.inc(stats.tokens)
        self._whole.observe(now - started)
        if counters.admitted_at:
            self._queue.observe(counters.admitted_at - started)
        if counters.first_at:
            self._first.observe(counters.first_at - started)
            if stats.tokens > 1:
                self._each.observe((now - counters.first_at) / (stats.tokens - 1))
        self._speculation.total += stats

    def chunk(self, seconds: float, tokens: int) -> None:
        """Count a chunk of a stream, ``seconds`` after the one before."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)

    def error(self, code: int) -> None:
        self._errors.labels(str(code)).inc()

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)


def merged(pages: Mapping[str, str]) -> str:
    """The pages of several servers as one: each sample gets a label ``replica``, its server's name."""
    families: dict[str, list[str]] = {}  # the lines of each, in the order of the first page
    for name, page in pages.items():
        family: list[str] = []
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], [line])
            elif line.startswith("#"):
                family[1:1] = [line] if len(family) == 1 else []
            elif line:
                metric, brace, labels = line.partition("{")
                own = f'replica="{name}"'
                if brace:
                    family.append(f"{metric}{{{own},{labels}")
                else:
                    metric, _, value = line.partition(" ")
                    family.append(f"{metric}{{{own}}} {value}")
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(f"foredraft_{name}", text, registry=registry, buckets=_SECONDS)


class _Speculation(Collector):
    """Counts of drafting and acceptance over all ended outputs."""

    def __init__(self, drafter: str) -> None:
        self.total = DecodeStats()
        self._drafter = drafter

    def collect(self) -> Iterable[Any]:
        """The families of this moment, under our names and under vLLM's."""
        total = self.total
        drafts = total.drafted_by_depth[0] if total.drafted_by_depth else 0
        values = {
            "drafts": ("Steps with a draft.", drafts),
            "draft_tokens": ("Drafted tokens.", total.drafted),
            "accepted_tokens": ("Accepted drafted tokens.", total.accepted),
        }
        for name, (text, value) in values.items():
            own = CounterMetricFamily(f"foredraft_spec_{name}", text, labels=["drafter"])
            own.add_metric([self._drafter], value)
            yield own
            yield CounterMetricFamily(f"vllm:spec_decode_num_{name}", text, value=value)
        text = "Accepted drafted tokens by position in the draft."
        own = CounterMetricFamily("foredraft_spec_accepted_tokens_per_position", text, labels=["drafter", "position"])
        alias = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos", text, labels=["position"])
        for position, count in enumerate(total.accepted_by_depth):
            own.add_metric([self._drafter, str(position)], count)
            alias.add_metric([str(position)], count)
        yield own
        yield alias
        steps = CounterMetricFamily("foredraft_target_forwards", "Target forwards after prefill, a row each.")
        steps.add_metric([], total.target_forwards)
        yield steps


class _Load(Collector):
    """What the engine does at the moment, what its prefix cache has saved, and how often memory was too small."""

    def __init__(self, generator: Generator) -> None:
        self._engine = generator.engine

    def collect(self) -> Iterable[Any]:
        """The families of this moment; those of the prefix cache under vLLM's names too."""
        engine = self._engine
        counts = {
            "queries": ("Prompt tokens looked up in the prefix cache.", engine.prefixes.queried),
            "hits": ("Prompt tokens taken from the prefix cache.", engine.prefixes.hits),
        }
        for name, (text, value) in counts.items():
            yield CounterMetricFamily(f"foredraft_prefix_cache_{name}", text, value=value)
            yield CounterMetricFamily(f"vllm:prefix_cache_{name}", text, value=value)
        text = "Outputs that had to wait again for memory, and were read again."
        for name in ("foredraft_preemptions", "vllm:num_preemptions"):
            yield CounterMetricFamily(name, text, value=engine.preemptions)
        yield GaugeMetricFamily("foredraft_requests_running", "Outputs in the batch.", value=engine.running)
        yield GaugeMetricFamily("foredraft_requests_waiting", "Outputs that wait for a row.", value=engine.waiting)
        yield GaugeMetricFamily("foredraft_kv_cache_usage_ratio", "Share of the KV cache.", value=engine.cache_use)
