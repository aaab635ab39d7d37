"""What is known of a head before and after it is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foredraft.heads.nets.eagle import Eagle3Config, EagleConfig
from foredraft.heads.nets.hydra import HydraConfig
from foredraft.heads.nets.medusa import BlockwiseConfig, MedusaConfig

NetConfig = EagleConfig | Eagle3Config | MedusaConfig | HydraConfig | BlockwiseConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNeeds:
    """What a head asks of its target; None where its files do not say.

    ``layers`` is the least number of decoder layers; ``name`` is what the files call the target.
    """

    hidden_size: int
    vocab_size: int | None = None
    layers: int | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInfo:
    """A head as its files describe it.

    method: "eagle" (EAGLE-1 and EAGLE-2), "eagle3", "medusa", "hydra" or "blockwise".
    format: who writes such files, such as "SafeAILab EAGLE-3".
    config: of the net. Without a target, ``taps`` of EAGLE-3 is () where the files leave them to the target's depth,
        and what only the target knows is 0 (the vocabulary) or a guess that a note owns up to (Hydra++'s heads).
    parameters: the head's own, without what it borrows from the target; tied ones count once.
    dtype: of the weights in the file.
    notes: sentences for a person.
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
    """A head that is ready to draft: on its target's device, in its target's dtype, in evaluation mode."""

    net: nn.Module
    info: HeadInfo


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the caller knows better than the files."""

    rope_theta: float | None = None
    taps: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How the tensors of a file become a net.

    names: for each parameter of the net its name in the file; several where one module is stored several times.
    given: parameters of the net that do not come from the file.
    ignored: tensors of the file that are known not to matter.
    open_taps: the taps are right in number only, since the target's depth decides and is not known.
    vocabulary: target ids that the draft can say, rising; None for all.
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
