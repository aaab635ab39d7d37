"""Which engine to deploy on, from what tune has measured and from what each engine supports."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.bench.report.tables import Table, grid
from foredraft.bench.tune.engines import server_config
from foredraft.bench.tune.tune import PAYS, Configuration, Tuning
from foredraft.compose.load import Spec
from foredraft.core.errors import OptionError

CLOSE = 1.05
"""Speed-ups of a smaller ratio are taken as equal: tune's measurements repeat within a few percent."""

NAMES = {"foredraft": "foredraft", "vllm": "vLLM", "sglang": "SGLang"}

SUPPORT = Table(
    ("", "foredraft", "vLLM 0.33", "SGLang 0.5.23", "source"),
    (
        ("EAGLE-3 heads", "chains and trees", "chains", "chains and trees", "vllm#42121; --speculative-eagle-topk"),
        ("EAGLE-1 and EAGLE-2 heads", "chains and trees", "chains", "chains and trees", "methods eagle; EAGLE"),
        ("draft model", "chains and trees", "chains", "chains", "methods draft_model; STANDALONE"),
        ("prompt lookup", "chains", "chains", "trees", "methods ngram; NGRAM"),
        ("Medusa, Hydra, blockwise heads", "yes", "no", "no", "vllm#47997"),
        ("self-speculation, lookahead, cascades, beam search", "yes", "no", "no", "lists of methods of both"),
        ("temperature above 0 on a GPU", "lossless", "lossless", "penalties approximate", "sglang#10617"),
        ("temperature above 0 on a CPU", "lossless", "partial", "greedy only", "SGLang's verification on CPUs"),
        ("min_p with drafts", "yes", "refused", "ignored by EAGLE", "vLLM's request checks; sglang#10617"),
        ("logit_bias with drafts", "yes", "refused", "yes", "vLLM's request checks"),
        ("drafts on or off by request", "yes", "no", "no", "vllm#55412; sglang#30263"),
        (
            "draft length by batch size",
            "measured",
            "fixed schedule",
            "chains of EAGLE",
            "speculative_config; --speculative-adaptive",
        ),
        ("paged cache, many rows on GPUs", "no", "yes", "yes", "documentation of both"),
    ),
    words=5,
)
"""Read from the sources of the versions in the head, in November 2026."""


@dataclass(frozen=True, slots=True)
class Decision:
    """``engine``: a key of ``NAMES``; ``commands``: to start it; ``reasons``: sentences."""

    engine: str
    commands: tuple[str, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to be deployed: model, device type, batch sizes, and the file that tune has written.

    ``arguments``: model and weights, as options of ``foredraft serve``.
    """

    model: str
    device: str
    batches: tuple[int, ...]
    tuned: str
    arguments: str


def batch_sizes(text: str) -> tuple[int, ...]:
    """The batch sizes of a list (1,8,24) or of a range by powers of two (1..64), rising.

    Raises:
        OptionError: neither of them, or a size below 1.
    """
    first, dots, last = text.partition("..")
    try:
        if dots:
            low, high = int(first), int(last)
            sizes = {low, high, *(2**power for power in range(high.bit_length()) if low < 2**power < high)}
        else:
            sizes = {int(part) for part in text.split(",")}
            low, high = min(sizes), max(sizes)
    except ValueError:
        low, high, sizes = 0, 0, set()
    if not 1 <= low <= high:
        raise OptionError(f"Invalid --target-batch {text!r}: write a range, as in 1..64, or a list, as in 1,8,24.")
    return tuple(sorted(sizes))


def decide(found: Tuning, wanted: Deployment) -> Decision:
    """Choose the engine by the measured speed-ups and the table of what engines support."""
    paying = [point.batch for point in found.batches if point.speed_up >= PAYS]
    if found.chosen is None or not paying:
        return _plain(found, wanted)
    if wanted.device != "cuda":
        return _ours(
            wanted,
            f"On {wanted.device}, SGLang verifies greedily only and vLLM supports a part of its options; the speed-ups "
            "were measured with this engine on this machine.",
        )
    if max(wanted.batches) == 1:
        return _ours(wanted, "One request at a time needs no server for many rows, and this engine was measured.")
    portable = _portable(found.trials)
    best = found.chosen.measured or 0.0
    if portable is None or best > CLOSE * (portable.measured or 0.0):
        method = Spec.parse(found.chosen.spec).name
        other = "" if portable is None else f" The best that they run is at {portable.measured:.2f}."
        return _ours(wanted, f"Neither vLLM nor SGLang runs {method}, which is at {best:.2f}.{other}")
    chain = _best([trial for trial in found.trials if trial.measured and _chain(trial)])
    if chain is None or best > CLOSE * (chain.measured or 0.0):
        if Spec.parse(portable.spec).name not in ("eagle1", "eagle2", "eagle3"):
            return _ours(wanted, "A tree of this method is faster than its chains, and only this engine runs it.")
        gain = f", against {chain.measured:.2f} of the best chain" if chain is not None else ""
        return _sglang(
            found, wanted, portable, f"The tree is at {portable.measured:.2f}{gain}, and vLLM runs no trees."
        )
    return _vllm(found, wanted, chain)


def _plain(found: Tuning, wanted: Deployment) -> Decision:
    reasons = ["No drafter pays here: decode plainly."]
    if wanted.device == "cuda" and max(wanted.batches) > 1:
        command = f"vllm serve {shlex.quote(wanted.model)} --max-num-seqs {max(wanted.batches)}"
        return Decision("vllm", (command,), (*reasons, "Without drafts, a paged cache for many rows is what counts."))
    command = f"foredraft serve {wanted.arguments} --drafter none"
    return Decision("foredraft", (command,), (*reasons, "Few rows or no GPU: no other engine is needed."))


def _ours(wanted: Deployment, reason: str) -> Decision:
    command = f"foredraft serve {wanted.arguments} --drafter {shlex.quote(wanted.tuned)}"
    return Decision("foredraft", (command,), (reason,))


def _sglang(found: Tuning, wanted: Deployment, trial: Configuration, reason: str) -> Decision:
    export, spec = _exported(trial.spec, wanted.model, "sglang")
    flags = server_config(spec).sglang
    serve = f"python -m sglang.launch_server --model-path {shlex.quote(wanted.model)} {flags}"
    reasons = [reason]
    if found.off_from:
        reasons.append(
            f"From batch size {found.off_from} drafts do not pay, and SGLang cannot switch trees off: limit the rows."
        )
    rows = max(wanted.batches) if not found.off_from else max(1, found.off_from - 1)
    return Decision("sglang", (*export, f"{serve} --max-running-requests {rows}"), tuple(reasons))


def _vllm(found: Tuning, wanted: Deployment, trial: Configuration) -> Decision:
    export, spec = _exported(trial.spec, wanted.model, "speculators")
    config = dict(server_config(spec).vllm or {})
    reasons = ["A chain is as fast as a tree here, and vLLM runs chains for many rows with a paged cache."]
    if found.off_from and found.off_from > 1:
        tokens = config["num_speculative_tokens"]
        off = [[1, found.off_from - 1, tokens], [found.off_from, max(wanted.batches), 0]]
        config["num_speculative_tokens_per_batch_size"] = off
        reasons.append(f"From batch size {found.off_from} drafts do not pay: the schedule switches them off.")
    serve = f"vllm serve {shlex.quote(wanted.model)} --speculative-config {shlex.quote(json.dumps(config))}"
    return Decision("vllm", (*export, f"{serve} --max-num-seqs {max(wanted.batches)}"), tuple(reasons))


def _exported(spec: str, model: str, to: str) -> tuple[tuple[str, ...], str]:
    """The command that converts the drafter for a server, if it must be, and the drafter's spec with its new path."""
    given = Spec.parse(spec)
    if not given.name.startswith("eagle") or not given.path:
        return (), spec
    out = f"{to}-head"
    export = f"foredraft export {shlex.quote(given.path)} --to {to} --model {shlex.quote(model)} --out {out}"
    return (export,), spec.replace(f":{given.path}", f":{out}", 1)


def _best(trials: Sequence[Configuration]) -> Configuration | None:
    return max(trials, key=lambda trial: trial.measured or 0.0, default=None)


def _portable(trials: Sequence[Configuration]) -> Configuration | None:
    """The fastest configuration that was run and that a server has, too. Schedules of our own are not."""
    run = [trial for trial in trials if trial.measured and "schedule=constant" in trial.spec]
    configs = [(trial, server_config(trial.spec)) for trial in run]
    return _best([trial for trial, config in configs if config.vllm is not None or config.sglang is not None])


def _chain(trial: Configuration) -> bool:
    """Whether vLLM runs this configuration as it was measured."""
    spec = Spec.parse(trial.spec)
    if "schedule=constant" not in trial.spec or server_config(trial.spec).vllm is None:
        return False
    if spec.name.startswith("eagle"):
        return getattr(spec.options, "top_k", 0) == 1
    return not getattr(spec.options, "branching", None)


def page(found: Tuning, wanted: Deployment, origin: str) -> str:
    """The decision as a Markdown page.

    Args:
        origin: where the numbers are from, see ``tables.provenance``.
    """
    decision = decide(found, wanted)
    run = sorted((trial for trial in found.trials if trial.measured), key=lambda trial: -(trial.measured or 0.0))
    tried = Table(
        ("drafter", "tokens/forward", "speed-up"),
        tuple((trial.spec, f"{trial.acceptance_length:.2f}", f"{trial.measured:.2f}x") for trial in run),
    )
    points = Table(
        ("batch size", "speed-up", ""),
        tuple((str(b), f"{s:.2f}x", "pays" if s >= PAYS else "does not pay") for b, s in found.batches),
    )
    pays = "Drafts pay at every size that was measured."
    stops = f"Drafts stop paying at batch size {found.off_from}." if found.off_from else pays
    lines = [f"# Deployment of {wanted.model}", "", f"Use **{NAMES[decision.engine]}**:", "", "```sh"]
    lines += [*decision.commands, "```", "", "## Why", "", *(f"- {reason}" for reason in decision.reasons)]
    if found.batches:
        assert found.chosen is not None
        against = f"`{found.chosen.spec}` against plain decoding, both in this engine. {stops}"
        lines += ["", "## By batch size", "", against, "", *grid(points)]
    lines += ["", "## Drafters that were run", "", "One request at a time, against plain decoding.", ""]
    lines += [*grid(tried), ""]
    lines += [f"- Not tried: {sentence}" for sentence in found.skipped]
    lines += ["", "## What engines support", "", "Need a line that the chosen engine lacks? Use another.", ""]
    lines += [*grid(SUPPORT), "", "## Limits of this page", ""]
    lines += [
        "The speed-ups were measured in foredraft on this machine. Other engines have other costs, so measure theirs: "
        "`vllm bench serve` and `python -m sglang.bench_serving` report tokens per second and acceptance.",
        "",
        origin,
    ]
    return "\n".join(lines) + "\n"
