"""Descriptions of heads: from their files, and after loading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.heads.nets.eagle import Eagle3Config, EagleConfig
from foredraft.heads.nets.glide import GlideConfig
from foredraft.heads.nets.hydra import HydraConfig
from foredraft.heads.nets.medusa import BlockwiseConfig, MedusaConfig

NetConfig = EagleConfig | Eagle3Config | MedusaConfig | HydraConfig | BlockwiseConfig | GlideConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNeeds:
    """A head's requirements on its target; None if its files do not state them.

    ``layers``: the least number of decoder layers. ``name``: the target's name in the files. ``resizable``: the head
    also fits a target with some more or fewer tokens: added ones, or rows that pad the vocabulary.
    """

    hidden_size: int
    vocab_size: int | None = None
    layers: int | None = None
    name: str | None = None
    resizable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """A head as its files describe it.

    method: "eagle" (EAGLE-1 and EAGLE-2), "eagle3", "medusa", "hydra", "blockwise" or "glide".
    format: the file format, such as "SafeAILab EAGLE-3".
    config: of the net. Without a target, EAGLE-3's ``taps`` is () if the files leave them to the target's depth; an
        unknown vocabulary size is 0; Hydra++'s attention heads may be a guess, which a note says.
    parameters: number of the head's own parameters; tied ones count once.
    dtype: of the weights in the file.
    notes: sentences for the user.
    """

    method: str
    format: str
    config: NetConfig
    parameters: int
    dtype: torch.dtype
    target: TargetNeeds
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """A loaded head, on its target's device, in its target's dtype, in evaluation mode."""

    net: nn.Module
    info: HeadInfo


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What a written head needs besides its net. ``target``: the target's config; ``name``: its name; ``dtype``: of the
    weights in the file; ``embed``: also store the target's embedding."""

    target: Mapping[str, Any]
    name: str
    dtype: torch.dtype
    embed: bool

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


Contents = tuple[dict[str, Any], dict[str, Tensor]]
"""The entries of config.json, and tensors."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values from the caller that replace those in the files."""

    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None
    norm_output: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to build a net from a file.

    names: for each parameter of the net its name in the file; several if one module is stored several times.
    given: parameters of the net that do not come from the file.
    ignored: known tensors of the file that are not needed.
    open_taps: only the number of taps is known, since they depend on the target's depth.
    vocabulary: the draft vocabulary as target ids, ascending; None for all.
    """

    method: str
    format: str
    config: NetConfig
    names: Mapping[str, tuple[str, ...]]
    target: TargetNeeds
    given: Mapping[str, Tensor] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    vocabulary: Tensor | None = None
    open_taps: bool = False
    notes: tuple[str, ...] = ()
