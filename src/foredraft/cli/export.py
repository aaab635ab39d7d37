"""``foredraft export``."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy, errors
from foredraft.core.errors import OptionError

_MODEL = "The target: folder or hub name; default: the one that the head's files name."
_TO = "speculators (vLLM), sglang, eagle, medusa, hydra or foredraft."
_ROPE = "RoPE base; overrides a wrong value in the head's config."
_EMBED = "Include the target's embedding; default: for EAGLE-1 only."


EXAMPLES = (
    "foredraft export run/head --to speculators --out vllm-head",
    "foredraft export HEAD --to sglang -m PATH --out sglang-head",
)


def command(
    path: Annotated[str, typer.Argument(help="The draft head: folder or hub name.", show_default=False)],
    *,
    to: Annotated[str, typer.Option(help=_TO, metavar="FORMAT", autocompletion=names.formats, show_default=False)],
    model: Annotated[str | None, typer.Option("--model", "-m", help=_MODEL, metavar="TEXT", show_default=False)] = None,
    out: Annotated[str, typer.Option(help="Folder to write.", metavar="FOLDER", show_default=False)],
    rope_theta: Annotated[float | None, typer.Option(help=_ROPE, metavar="FLOAT", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.", metavar="TEXT")] = "bfloat16",
    embed: Annotated[bool | None, typer.Option(help=_EMBED, metavar="", show_default=False)] = None,
) -> None:
    """Convert a draft head for vLLM, SGLang or its original code."""
    import torch

    from foredraft.files.provenance import shortened
    from foredraft.files.write import check_writable_folder
    from foredraft.heads.formats import FORMATS, load_head, save_head

    kind = getattr(torch, dtype, None)
    if kind not in (torch.bfloat16, torch.float16, torch.float32):
        raise OptionError(f"Unknown dtype {dtype!r}. Known: bfloat16, float16, float32.")
    if to not in FORMATS:
        raise OptionError(f"Unknown format {to!r}. Known: {', '.join(FORMATS)}.")
    if Path(out).expanduser().resolve() == Path(path).expanduser().resolve():
        raise OptionError("--out is the folder of the head itself; choose another folder.")
    check_writable_folder(out)
    model = model or _target_of(path)
    with busy(f"Loading {model}"):
        from foredraft.model.hf.causal_lm import CausalLM
        from foredraft.model.loading.bundled import resolve
        from foredraft.model.loading.load import load_model

        # in the export's dtype, so that weights are rounded at most once
        loaded = load_model(model, dtype=dtype, device="cpu")
        target = CausalLM(loaded.model, fast=False, verify=False)
    try:
        head = load_head(resolve(path), target, rope_theta=rope_theta)
        provenance = {"exported_from": shortened(path), "format": head.info.format, "notes": list(head.info.notes)}
        save_head(
            head.net,
            out,
            to=to,
            target_name=model,
            target_config=loaded.model.config.to_dict(),
            dtype=kind,
            provenance=provenance,
            embed=embed,
        )
    finally:
        target.close()
    errors().print(f"Wrote {head.info.format} as {to} to {out}.", style="dim", markup=False, soft_wrap=True)


def _target_of(path: str) -> str:
    """The target of a head: as its training has recorded it, or as its config names it.

    Raises:
        OptionError: its files do not name it, or it is not where they say.
    """
    from foredraft.heads.formats import inspect_head, recorded_target
    from foredraft.model.loading.bundled import resolve

    head = resolve(path)
    found = recorded_target(head) or inspect_head(head).target.name
    if found is None:
        raise OptionError("The head's files do not name its target: give --model.")
    if found.startswith((".", "/", "~")) and not Path(found).expanduser().is_dir():
        raise OptionError(f"The head's files name the target {found!r}, which is not there: give --model.")
    return found
