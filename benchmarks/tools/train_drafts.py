"""Trains the models of ``python -m benchmarks drafts`` in --folder, all on as many tokens.

Three boosted drafts, of which the first learns all tokens as drafts alone do; two more that are distilled each by
itself; and one pruned draft of each shape. --only trains some of them, so that several processes share the work.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.experiments.drafts import SHAPES, named
from foredraft.model.loading.load import load_model
from foredraft.train.drafts.prune import PrunedShape
from foredraft.train.drafts.run import DRAFTS, run_drafts
from foredraft.train.options import LoopOptions
from foredraft.train.run_context import Data


def trainings(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arguments of ``run_drafts`` by name of the training."""
    if args.start == "new":
        starts = [new_draft(args, number) for number in (1, 2, 3)]
    else:
        starts = [args.start or args.draft] * 3
    found: dict[str, dict[str, Any]] = {"boosted": {"method": "boost", "drafts": tuple(starts), "seed": 1}}
    for number, start in enumerate(starts[1:], start=2):
        found[f"alone/{number}"] = {"method": "draft", "drafts": (start,), "seed": number}
    for name, shape in SHAPES[named(args)].items():
        found[f"shape/{name}"] = {"method": "prune", "shape": PrunedShape.parse(shape), "seed": 1}
    return found


def new_draft(args: argparse.Namespace, number: int) -> str:
    """A folder with a model of the draft's shape and random weights."""
    folder = args.folder / "new" / str(number)
    if not (folder / "config.json").exists():
        source = load_model(args.draft, dtype="float32", device="cpu")
        torch.manual_seed(number)
        AutoModelForCausalLM.from_config(source.model.config).save_pretrained(folder)
        assert source.tokenizer is not None
        source.tokenizer.inner.save_pretrained(folder)
    return str(folder)


def train(args: argparse.Namespace) -> None:
    """Train what is not finished. The data's tokens are read once, and the target's states of those with one seed."""
    data = Data(sources=tuple(args.data), cache=str(args.folder / "cache"), store=args.store)
    for name, given in trainings(args).items():
        if args.only and name not in args.only:
            continue
        options = {"tokens": args.tokens, "batch": args.batch, "lr": args.lr, "seed": given.pop("seed")}
        loop = LoopOptions(**options, validate=10**9, report=50, length=args.length)
        started, method = time.perf_counter(), given.pop("method")
        recipe = {"share": args.share} | ({"samples": args.samples} if method == "prune" else {})
        run_drafts(
            method,
            args.target,
            args.folder / name,
            data,
            **given,
            recipe_options=DRAFTS[method].options(**recipe),
            loop=loop,
            device="cpu" if args.device == "cpu" else None,
            report=lambda line, name=name: print(name, json.dumps(line), flush=True),
        )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/drafts"), help="of the trained models")
    parser.add_argument("--target", default="sample", help="sample, or a folder named target-65m")
    parser.add_argument("--draft", default="sample-draft", help="the target's draft model, which training starts from")
    parser.add_argument("--start", help="what training starts from: another draft model, or new: random weights")
    parser.add_argument("--data", nargs="+", default=[], help="texts, as of foredraft train --data")
    parser.add_argument("--only", nargs="+", help="alone/1, boosted, shape/wide and so on")
    parser.add_argument("--tokens", type=int, default=200_000, help="of every model")
    parser.add_argument("--batch", type=int, default=8, help="samples a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--share", type=float, default=1.0, help="of the positions that a step uses")
    parser.add_argument("--samples", type=int, default=32, help="of the importance of parts that are pruned")
    parser.add_argument("--store", type=float, default=0.0, help="gigabytes of the target's states on disk")
    parser.add_argument("--device", default="cpu")
    torch.set_num_threads(1)
    train(parser.parse_args())
