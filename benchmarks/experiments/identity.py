"""Seeded texts of every method against plain decoding's, token for token.

A cell is a method, a policy, a temperature and the most rows of a batch. Policies are the default one, which stops
drafting where it does not pay, and one that always drafts. The texts of a cell share an engine, and pools and online
training share what they learn; more requests wait than there are rows, so rows come and go. One JSON line a cell: how
many texts and tokens were compared and how many drafted tokens accepted, and for each text that differs its seed, where
it parts, the margin between the two tokens, and whether that is a near-tie of float32 (see ``foredraft check``).

Hydra and GLIDE have no bundled head and draft with untrained ones.
"""

import itertools
import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import foredraft
from benchmarks.kit.experiment import RESULTS, Cell, Experiment, Line, option
from benchmarks.kit.seeded_texts import SeededTexts
from foredraft.bench.check import differences, draft_always
from foredraft.bench.measure.summary import grouped
from foredraft.bench.prompts import standard_prompts
from foredraft.drafters import METHODS
from foredraft.engine.generator import Generator
from foredraft.files.provenance import short_commit
from foredraft.heads.formats.save import default_format, save_head
from foredraft.model.hf.causal_lm import CausalLM
from foredraft.train.heads.init import new_glide, new_hydra

DRAFT, COPIES = "[draft_model:sample-draft,num_assistant_tokens=3]", "[max_gram,num_assistant_tokens=3]"
SPECS = {
    "draft_model": "draft_model",
    "cape": "cape:sample-draft",
    "bandit": f"bandit:[eagle3:sample-eagle3]+[prompt_lookup]+{DRAFT}",
    "hybrid": "hybrid:eagle3",
    "specinfer": "specinfer:sample-draft+sample-draft",
    "sequoia": "sequoia",
    "opt_tree": "opt_tree",
    "universal": "universal:sample-draft",
    "eagle1": "eagle1",
    "eagle2": "eagle2",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "hydra": "hydra:{hydra}",
    "blockwise": "blockwise:sample-medusa",
    "glide": "glide:{glide}",
    "early_exit": "early_exit,assistant_early_exit=5",
    "layer_skip": "layer_skip,skip_attention=3x5,skip_mlp=4",
    "online": f"online:{DRAFT},interval=4",
    "prompt_lookup": "prompt_lookup,continuations=3",
    "lookahead": "lookahead,pool=shared",
    "max_gram": "max_gram,bigrams=yes",
    "relay": f"relay:{DRAFT}+{COPIES}",
    "cascade": f"cascade:sample-draft+{COPIES}",
    "partial": "partial,budget=48,chunk=4,room=8",
    "triforce": "triforce,gamma=4,budget=48,room=8",
}
"""Every method of the table but plain decoding."""
TEMPERATURES, ROWS, POLICIES = (0.3, 0.7, 1.0, 1.3), (8, 3, 1), ("auto", "constant")
TEXTS = (29, 16, 12)
"""Of a cell, by its rows: fewer where each takes more time."""
_MOST = 40
"""Texts of a group, from which a cell takes the first."""
FILE = RESULTS / "identity.jsonl"
GROUPS = 8
"""So many times the texts of a cell are drawn by plain decoding for each temperature; methods take them in turn."""


def compared(generator: Generator, texts: SeededTexts, heat: float, group: int, count: int) -> dict[str, Any]:
    """Compare the first texts of a group."""
    plain, begun = texts.plain(heat, group, count), time.perf_counter()
    found = texts.run(generator, heat, group, count)
    seconds = time.perf_counter() - begun
    parted = differences(generator, found, plain)
    return {
        "texts": len(found),
        "tokens": sum(len(each.tokens) for each in found),
        "accepted": sum(each.stats.accepted for each in found),
        "seconds": round(seconds, 2),
        "differences": [
            {"seed": found[each.output].seed, "place": each.place, "margin": each.gap, "tied": each.tied}
            for each in parted
        ],
    }


def cells(args: Namespace) -> list[Cell]:
    """The cells of a method with the same rows and policy follow each other."""
    assert set(SPECS) == set(METHODS) - {"none"}, "SPECS must have every method of the table."
    every = itertools.product(ROWS, POLICIES, args.methods, TEMPERATURES)
    return [dict(zip(("rows", "policy", "method", "temperature"), each, strict=True)) for each in every]


def measure(args: Namespace, cells: Sequence[Cell]) -> Iterator[Line]:
    plain = foredraft.load("sample", "none", dtype="float32", device="cpu")
    prompts = [each.prompt for each in standard_prompts() + standard_prompts(chat=True)]
    made, counts = SeededTexts(plain, prompts, args.new_tokens, _MOST), dict(zip(ROWS, args.texts, strict=True))
    arms = list(itertools.product(ROWS, POLICIES, args.methods))
    with tempfile.TemporaryDirectory() as folder:
        heads = untrained(plain, Path(folder))
        for arm, own in grouped(cells, lambda cell: (cell["rows"], cell["policy"], cell["method"])).items():
            rows, policy, method = arm
            with foredraft.load(plain, SPECS[method].format(**heads), max_batch_size=rows) as generator:
                if policy == "constant":
                    draft_always(generator)
                for cell in own:
                    group = arms.index(arm) % GROUPS
                    yield {
                        "kind": "cell",
                        **cell,
                        **compared(generator, made, cell["temperature"], group, counts[rows]),
                    }


def untrained(plain: Generator, folder: Path) -> dict[str, Path]:
    """The folders of heads with initial weights, for methods that have no bundled head."""
    target = plain.engine.target
    assert isinstance(target, CausalLM)
    nets = {
        "hydra": new_hydra(target, heads=3, layers=1, own_heads=False, prefix=False),
        "glide": new_glide(target, warm=False),
    }
    for name, net in nets.items():
        save_head(
            net, folder / name, to=default_format(net), target_name="sample", target_config=target.config.to_dict()
        )
    return {name: folder / name for name in nets}


def lines_of(path: Path) -> list[Line]:
    """The finished cells."""
    return [line for line in map(json.loads, path.read_text("utf-8").splitlines()) if "method" in line]


def summary(path: Path) -> str:
    """All cells in a sentence."""
    lines = lines_of(path)
    parted = [each for line in lines for each in line["differences"]]
    tied = sum(each["tied"] for each in parted)
    texts, tokens, accepted = (sum(line[name] for line in lines) for name in ("texts", "tokens", "accepted"))
    return (
        f"{texts} texts of {tokens} tokens, {accepted} of them drafted: {len(parted)} texts differ, "
        f"{tied} of them at near-ties."
    )


def sentence() -> str:
    """The committed run in words: what it compared, how old its parts are, and what it has not."""
    found: dict[str, list[str]] = {}  # methods by date and commit of their first cells
    origin, seen = "", set[str]()
    for line in map(json.loads, FILE.read_text("utf-8").splitlines()):
        if line.get("kind") == "provenance":
            origin = f"{line['date']}, commit {short_commit(line['commit'])}"
        elif line["method"] not in seen:
            seen.add(line["method"])
            found.setdefault(origin, []).append(line["method"])
    lines = lines_of(FILE)
    texts, tokens, accepted = (sum(line[name] for line in lines) for name in ("texts", "tokens", "accepted"))
    parted = sum(len(line["differences"]) for line in lines)
    most = max(found.values(), key=len)
    parts = [
        f"{origin}: {f'{len(names)} methods' if names is most else ' and '.join(f'`{name}`' for name in names)}"
        for origin, names in found.items()
    ]
    missing = [f"`{name}`" for name in METHODS if name not in {*seen, "none"}]
    lacks = f" {' and '.join(missing)} came later and are not in it." if missing else ""
    run, cells = len(lines), len(ROWS) * len(seen) * len(POLICIES) * len(TEMPERATURES)
    return (
        f"{len(seen)} methods at temperatures 0.3, 0.7, 1 and 1.3, under the default policy and one that always "
        f"drafts, in batches of 8, 3 and 1 rows that come and go: {parted or 'none'} of {texts:,} seeded texts "
        f"({tokens:,} tokens, {accepted:,} of them drafted and accepted) differ{'' if parted > 1 else 's'} from plain "
        f"decoding's. **Most of this run is old** ({'; '.join(parts)}): since then the policy and many drafters were "
        f"changed.{lacks} `python -m benchmarks identity` goes on (float32, bundled model; {run} of {cells} cells were "
        "run), and [identity.jsonl](../../benchmarks/results/identity.jsonl) has all of them."
    )


EXPERIMENT = Experiment(
    name="identity",
    question="texts that equal plain decoding's: methods/shared_noise.md",
    options={
        "texts": option(TEXTS, "of a cell, for 8 rows, 3 and 1; at most 40", nargs=3),
        "new_tokens": option(96),
        "methods": option(list(SPECS), choices=list(SPECS)),
    },
    cells=cells,
    measure=measure,
    shown=summary,
    tables={"docs/methods/shared_noise.md": {"measured": sentence}},
    rank=6,
    hours=6.0,
)
