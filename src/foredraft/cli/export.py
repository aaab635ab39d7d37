"""``foredraft export``."""

from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli import completion_names as names
from foredraft.cli.console import busy, errors, starting
from foredraft.core.errors import OptionError

_MODEL = "The target: folder or hub name; default: the one that the head's files name."
_TO = "vllm (or speculators), sglang, eagle, medusa, hydra or foredraft."
_ROPE = "RoPE base; overrides a wrong value in the head's config."
_NORM_OUTPUT = (
    "Whether drafted positions read an EAGLE-3 head's normed state; overrides its config: no for EAGLE-3 heads that "
    "SpecForge wrote before 15 September 2026 with norm_output true."
)
_EMBED = "Include the target's embedding; default: for EAGLE-1 only."


EXAMPLES = (
    "foredraft export run/head --to vllm --out vllm-head",
    "foredraft export HEAD --to sglang -m PATH --out sglang-head",
)


def command(
    path: Annotated[str, typer.Argument(help="The draft head: folder or hub name.", show_default=False)],
    *,
    to: Annotated[str, typer.Option(help=_TO, metavar="FORMAT", autocompletion=names.formats, show_default=False)],
    model: Annotated[str | None, typer.Option("--model", "-m", help=_MODEL, metavar="TEXT", show_default=False)] = None,
    out: Annotated[str, typer.Option(help="Folder to write.", metavar="FOLDER", show_default=False)],
    rope_theta: Annotated[float | None, typer.Option(help=_ROPE, metavar="FLOAT", show_default=False)] = None,
    norm_output: Annotated[bool | None, typer.Option(help=_NORM_OUTPUT, metavar="", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.", metavar="TEXT")] = "bfloat16",
    embed: Annotated[bool | None, typer.Option(help=_EMBED, metavar="", show_default=False)] = None,
) -> None:
    """Convert a draft head for vLLM, SGLang or its original code."""
    with starting():
        import torch

        from foredraft.files.outputs import output_folder
        from foredraft.files.provenance import two_parts
        from foredraft.heads.formats import FORMATS, load_head, save_head

    kind = getattr(torch, dtype, None)
    if kind not in (torch.bfloat16, torch.float16, torch.float32):
        raise OptionError(f"Unknown dtype {dtype!r}. Known: bfloat16, float16, float32.")
    if to not in FORMATS:
        raise OptionError(f"Unknown format {to!r}. Known: {', '.join(FORMATS)}.")
    if Path(out).expanduser().resolve() == Path(path).expanduser().resolve():
        raise OptionError("--out is the folder of the head itself; choose another folder.")
    origin = {"exported_from": two_parts(path)}
    with output_folder(out, "export", origin):
        model = model or _target_of(path)
        with busy(f"Loading {model}"):
            from foredraft.model.hf.causal_lm import CausalLM
            from foredraft.model.loading.bundled import resolve
            from foredraft.model.loading.load import load_model

            # in the export's dtype, so that weights are rounded at most once
            loaded = load_model(model, dtype=dtype, device="cpu")
            target = CausalLM(loaded.model, fast=False, verify=False)
        try:
            head = load_head(resolve(path), target, rope_theta=rope_theta, norm_output=norm_output)
            save_head(
                head.net,
                out,
                to=to,
                target_name=model,
                target_config=loaded.model.config.to_dict(),
                dtype=kind,
                provenance={**origin, "format": head.info.format, "notes": list(head.info.notes)},
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
