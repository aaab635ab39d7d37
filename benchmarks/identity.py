"""Seeded texts of every method against plain decoding's, token for token.

    python benchmarks/identity.py --out identity.jsonl              # 10,488 texts of 96 tokens; --help: fewer

A cell is a method, a policy, a temperature and the most rows of a batch. Policies are the default one, which stops
drafting where it does not pay, and one that always drafts. The texts of a cell share an engine, and pools and online
training share what they learn; more requests wait than there are rows, so rows come and go. One JSON line a cell: how
many texts and tokens were compared and how many drafted tokens accepted, and for each text that differs its seed, where
it parts, the margin between the two tokens, and whether that is a near-tie of float32 (see ``foredraft check``). A
finished cell is not run again, so an interrupted run goes on where it was.

Hydra and GLIDE have no bundled head and draft with untrained ones.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from origin import provenance
from seeded_texts import SeededTexts

import foredraft
from foredraft.bench.check import differences, draft_always
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
RESULTS = Path(__file__).resolve().parent / "results" / "identity.jsonl"
Key = tuple[int, str, str, float]
"""Rows, policy, method, temperature."""
GROUPS = 8
"""So many times the texts of a cell are drawn by plain decoding for each temperature; methods take them in turn."""


def cell(generator: Generator, texts: SeededTexts, temperature: float, group: int, count: int) -> dict[str, Any]:
    """Compare the first texts of a group."""
    plain, begun = texts.plain(temperature, group, count), time.perf_counter()
    found = texts.run(generator, temperature, group, count)
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


def cells(done: set[Key], methods: list[str], texts: list[int], new_tokens: int) -> Iterator[dict[str, Any]]:
    """The cells that are not done."""
    plain = foredraft.load("sample", "none", dtype="float32", device="cpu")
    prompts = [each.prompt for each in standard_prompts() + standard_prompts(chat=True)]
    made, counts = SeededTexts(plain, prompts, new_tokens, _MOST), dict(zip(ROWS, texts, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        heads = untrained(plain, Path(folder))
        for number, (rows, policy, method) in enumerate(itertools.product(ROWS, POLICIES, methods)):
            left = [heat for heat in TEMPERATURES if (rows, policy, method, heat) not in done]
            if not left:
                continue
            generator = foredraft.load(plain, SPECS[method].format(**heads), max_batch_size=rows)
            if policy == "constant":
                draft_always(generator)
            for temperature in left:
                found = cell(generator, made, temperature, number % GROUPS, counts[rows])
                yield {"rows": rows, "policy": policy, "method": method, "temperature": temperature, **found}
            generator.close()


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


def summary(lines: list[dict[str, Any]]) -> str:
    """All cells in a sentence."""
    parted = [each for line in lines for each in line["differences"]]
    tied = sum(each["tied"] for each in parted)
    texts, tokens, accepted = (sum(line[name] for line in lines) for name in ("texts", "tokens", "accepted"))
    return (
        f"{texts} texts of {tokens} tokens, {accepted} of them drafted: {len(parted)} texts differ, "
        f"{tied} of them at near-ties."
    )


def sentence() -> str:
    """The committed run in words: what it compared, how old it is, and which methods it has not."""
    lines = read(RESULTS)
    every = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    origins = [line for line in every if line.get("kind") == "provenance"]
    texts, tokens, accepted = (sum(line[name] for line in lines) for name in ("texts", "tokens", "accepted"))
    parted = sum(len(line["differences"]) for line in lines)
    methods = {line["method"] for line in lines}
    missing = [f"`{name}`" for name in METHODS if name not in {*methods, "none"}]
    single, cells = sum(line["rows"] == 1 for line in lines), len(methods) * len(POLICIES) * len(TEMPERATURES)
    commits = ", ".join(dict.fromkeys(short_commit(each["commit"]) for each in origins))
    return (
        f"{len(methods)} methods at temperatures 0.3, 0.7, 1 and 1.3, under the default policy and one that always "
        f"drafts, in batches of 8, 3 and 1 rows that come and go: {parted or 'none'} of {texts:,} seeded texts "
        f"({tokens:,} tokens, {accepted:,} of them drafted and accepted) differ{'' if parted > 1 else 's'} from plain "
        f"decoding's. **This run is old**: {origins[-1]['date']}, commits {commits}. Since then the policy and many "
        f"drafters were changed, and {' and '.join(missing)} came later and are not in it. `benchmarks/identity.py` "
        f"compares them (float32, bundled model; of the cells of a single row {single} of {cells} were run), and "
        "[identity.jsonl](../../benchmarks/results/identity.jsonl) has all cells."
    )


def read(path: Path) -> list[dict[str, Any]]:
    """The finished cells."""
    if not path.exists():
        return []
    return [line for line in map(json.loads, path.read_text("utf-8").splitlines()) if "method" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, nargs=3, default=TEXTS, help="of a cell, for 8 rows, 3 and 1; at most 40")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", default=list(SPECS), choices=list(SPECS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    assert set(SPECS) == set(METHODS) - {"none"}, "SPECS must have every method of the table."
    found = read(args.out)
    done = {(line["rows"], line["policy"], line["method"], line["temperature"]) for line in found}
    with args.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(provenance(f"python benchmarks/identity.py {' '.join(sys.argv[1:])}")) + "\n")
        for line in cells(done, args.methods, args.texts, args.new_tokens):
            file.write(json.dumps(line) + "\n")
            file.flush()
            found.append(line)
            print(json.dumps(line), flush=True)
    print(summary(found))


if __name__ == "__main__":
    main()
