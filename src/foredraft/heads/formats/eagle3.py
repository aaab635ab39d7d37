"""Reads EAGLE-3 files: SafeAILab's, SpecForge's and NVIDIA's (for SGLang), AngelSlim's, and speculators' (for vLLM).

All have the same tensors. They differ in the names of these, in flags, in whether a flag is at the top of the config
or in its ``eagle_config``, and in how they number the target's layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.core.errors import DrafterError
from foredraft.heads.formats.assemble import parameter_names, same_embedding
from foredraft.heads.formats.block import override_theta, read_block
from foredraft.heads.formats.files import Checkpoint, Fields
from foredraft.heads.formats.info import Overrides, Reading, TargetNeeds
from foredraft.heads.formats.layers import chosen_taps
from foredraft.heads.formats.vocabulary import read_vocabulary
from foredraft.heads.nets.blocks import BlockConfig
from foredraft.heads.nets.eagle import Eagle3Config
from foredraft.model.base import TargetModel

SAFEAILAB, SPECFORGE, SPECULATORS = "SafeAILab EAGLE-3", "SpecForge/SGLang EAGLE-3", "vLLM speculators EAGLE-3"
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
MAPS = ("d2t", "t2d")


_FLAGS = ("eagle_config", "fc_norm", "use_aux_norm", "norm_output", "norm_before_fc", "norm_before_residual")
_SINCE = "15 September 2026"
"""The date of SpecForge's pull request 879. Before, its ``norm_output`` told whether the output layer reads the normed
state, which all others take for granted."""
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""SGLang's older names."""


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there is a ``midlayer``, a separate norm for the hidden state, or an EAGLE-3 config."""
    names = [name.removeprefix("model.") for name in checkpoint.weights.shapes]
    named = any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in names)
    return named or format_of(checkpoint.config) != SAFEAILAB


def format_of(config: dict) -> str:
    """The format of a config."""
    if "speculators_model_type" in config:
        return SPECULATORS
    listed = config.get("architectures")
    named = isinstance(listed, list) and "LlamaForCausalLMEagle3" in listed
    return SPECFORGE if named or set(_FLAGS) & config.keys() else SAFEAILAB


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """``target`` is needed for the default taps, to check whether a stored embedding is the target's, and for a target
    whose vocabulary has other added or padded tokens than the head's.

    Raises:
        DrafterError: the config, the taps or the vocabulary maps are invalid.
    """
    kind, notes = format_of(checkpoint.config), []
    file = _File(checkpoint, kind, checkpoint.fields(), _stored_names(checkpoint))
    model = file.fields.text("speculators_model_type", "eagle3")
    if model != "eagle3":
        raise DrafterError(
            f"The head {checkpoint.name!r} is of the speculators type {model!r}; only eagle3 is supported."
        )
    own = _owns_embedding(file, target, notes)
    config = _config(file, own, overrides, notes)
    tied = _tied_head(file, config, own, target)
    if tied is not None:
        config = replace(config, own_head=True)
    taps, listed = chosen_taps(checkpoint, kind, overrides, len(config.taps), target, notes)
    fitted = _fitted(file, config, None if own and file.has(TABLE) else tied, target, notes)
    names = _names(file, config)
    if any(alias.startswith("additional_layers.") for aliases in names.values() for alias in aliases):
        notes.append("SGLang omitted the residual between additional layers; foredraft runs them as ordinary layers.")
    read_here = {name for parameter in fitted.given for name in names[parameter] if name in checkpoint.weights}
    used = {name for parameter, aliases in names.items() if parameter not in fitted.given for name in aliases}
    ignored = {*file.names(TABLE), *MAPS, "verifier_norm.weight", "verifier_lm_head.weight", *read_here} - used
    verifier = file.fields.part("speculators_config").part("verifier")
    return Reading(
        method="eagle3",
        format=kind,
        config=replace(fitted.config, taps=taps),
        names=names,
        given=fitted.given,
        ignored=frozenset(ignored),
        vocabulary=fitted.vocabulary,
        open_taps=target is None and not listed,
        target=TargetNeeds(
            hidden_size=config.target_hidden_size,
            vocab_size=config.vocab_size,
            layers=listed,
            name=verifier.optional_text("name_or_path"),
            resizable=True,
        ),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _File:
    """``stored``: names in the file by the names of the net; several if the file holds a tensor several times."""

    checkpoint: Checkpoint
    kind: str
    fields: Fields
    stored: Mapping[str, tuple[str, ...]]

    @property
    def layer(self) -> Fields:
        """The part of the config that describes the decoder block."""
        return self.fields.part("transformer_layer_config") if self.kind == SPECULATORS else self.fields

    def names(self, name: str) -> tuple[str, ...]:
        return self.stored.get(name, (name,))

    def has(self, name: str) -> bool:
        return name in self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.weights.shapes[self.names(name)[0]]

    def read(self, name: str) -> Tensor:
        return self.checkpoint.weights.read(self.names(name)[0])

    def flag(self, key: str, default: bool) -> bool:
        """A flag in ``eagle_config`` or at the top, as vLLM looks for it."""
        nested = self.fields.part("eagle_config")
        return (nested if key in nested else self.fields).flag(key, default)


def _stored_names(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """``_File.stored``."""
    found: dict[str, tuple[str, ...]] = {}
    shapes = checkpoint.weights.shapes
    for stored in shapes:
        name = own_name(stored)
        if name.startswith("layers.") and ".hidden_norm." in name:  # SGLang's name of a later layer's only norm
            other = name.replace(".hidden_norm.", ".input_layernorm.")
            name = name if any(own_name(each) == other for each in shapes) else other
        found[name] = (*found.get(name, ()), stored)
    return found


def own_name(stored: str) -> str:
    """The net's name of a tensor: its first layer is ``midlayer``, the second ``layers.0``."""
    head, _, rest = stored.removeprefix("model.").partition(".")
    number, _, part = rest.partition(".")
    if head == "additional_layers" and number.isdigit():
        return f"layers.{number}.{part}"
    if head == "layers" and number.isdigit():
        return f"layers.{int(number) - 1}.{part}" if int(number) else f"midlayer.{part}"
    return ".".join(filter(None, (_AUX_NORMS.get(head, head), rest)))


def _config(file: _File, own: bool, overrides: Overrides, notes: list[str]) -> Eagle3Config:
    """The net's config; its taps are placeholders of the right number."""
    fields = file.fields
    block = _block(file, overrides, notes)
    width = fields.integer("target_hidden_size", block.hidden_size)
    fused = file.shape("fc.weight")[-1] if file.has("fc.weight") else 3 * width
    if fused % width:
        raise DrafterError(
            f"The tensor fc.weight of the head {fields.name!r} has {fused} inputs, which is no multiple of the "
            f"target's width {width}."
        )
    before_fc, each = file.flag("norm_before_fc", False), file.flag("fc_norm", file.flag("use_aux_norm", False))
    if before_fc and each:
        raise DrafterError(f"The head {fields.name!r} has both norm_before_fc and fc_norm; only one is allowed.")
    vocab, small = file.layer.integer("vocab_size"), _draft_vocab(file)
    reduced = small is not None and small != vocab
    return Eagle3Config(
        block=block,
        vocab_size=vocab,
        draft_vocab_size=vocab if small is None else small,
        target_hidden_size=width,
        taps=tuple(range(fused // width)),
        num_layers=file.layer.count("num_hidden_layers", 1),
        fc_bias=file.kind == SPECFORGE and fields.flag("bias", False),
        norm_before_residual=_norm_before_residual(file, notes),
        norm_before_fc=before_fc,
        fc_norm=each,
        norm_carried=_norm_carried(file, overrides, notes),
        own_embedding=own,
        own_head=file.has(HEAD) or (reduced and not fields.flag("tie_word_embeddings", False)),
    )


def _block(file: _File, overrides: Overrides, notes: list[str]) -> BlockConfig:
    layer = file.layer
    bias = layer.flag("attention_bias", False) or layer.flag("qkv_bias", False)
    qwen = file.kind == SPECULATORS and layer.text("model_type", "llama").startswith("qwen3")
    block = read_block(
        layer,
        layers=layer.count("num_hidden_layers", 1),
        notes=notes,
        attention_bias=bias,
        output_bias=bias and file.has("midlayer.self_attn.o_proj.bias"),
        qk_norm=qwen or file.has("midlayer.self_attn.q_norm.weight"),
    )
    if overrides.rope_theta is not None:
        return override_theta(block, overrides.rope_theta, notes)
    if file.kind == SPECFORGE and block.rope_theta != 10000.0:
        notes.append("If it was trained before SpecForge PR 270 (October 2025), it may need rope_theta=10000.")
    return block


def _norm_before_residual(file: _File, notes: list[str]) -> bool:
    key = "norm_before_residual"
    if file.kind == SPECULATORS and key not in file.fields and key not in file.fields.part("eagle_config"):
        notes.append("norm_before_residual is absent: true, as in vLLM.")
    return file.flag(key, file.kind == SPECULATORS)


def _norm_carried(file: _File, overrides: Overrides, notes: list[str]) -> bool:
    """Whether the next draft step reads the state after the final norm: EAGLE-3.1."""
    found = file.flag("norm_output", False)
    if overrides.norm_output is not None:
        notes.append(
            f"norm_output is set to {str(overrides.norm_output).lower()}; its files have {str(found).lower()}."
        )
        return overrides.norm_output
    if found and file.kind == SPECFORGE:
        notes.append(
            f"norm_output is true, which means EAGLE-3.1. If SpecForge wrote it before {_SINCE}, it is an EAGLE-3 "
            "head: set norm_output=no."
        )
    return found


def _draft_vocab(file: _File) -> int | None:
    """Rows of the head's output layer; None if it uses the target's."""
    if "draft_vocab_size" in file.fields:
        return file.fields.integer("draft_vocab_size")
    return file.shape(HEAD)[0] if file.has(HEAD) else None


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A head's config, draft vocabulary and tensors for a target whose vocabulary may have another size."""

    config: Eagle3Config
    vocabulary: Tensor | None
    given: Mapping[str, Tensor] = field(default_factory=dict)


def _fitted(
    file: _File, config: Eagle3Config, tied: Tensor | None, target: TargetModel | None, notes: list[str]
) -> _Fitted:
    """The head for this target: tokens that only one of them has, added ones or padding, are never drafted.

    Args:
        tied: the output layer's weights, if they are the target's embedding.

    Raises:
        DrafterError: the draft vocabulary has tokens that the target lacks.
    """
    name, known = file.checkpoint.name, config.vocab_size
    vocabulary = read_vocabulary(file.checkpoint, config.draft_vocab_size, known, notes)
    given = {} if tied is None else {HEAD: tied}
    if target is None or known in (target.vocab_size, target.config.vocab_size):
        return _Fitted(config, vocabulary, given)
    size = target.vocab_size
    if vocabulary is not None and int(vocabulary[-1]) >= size:
        raise DrafterError(
            f"The head {name!r} drafts tokens up to id {int(vocabulary[-1])}; this target has {size}, so the head is "
            "for another model."
        )
    draft = config.draft_vocab_size if vocabulary is not None else size
    if vocabulary is None and config.own_head:
        draft = min(known, size)
        vocabulary = torch.arange(draft) if draft < size else None
        output = HEAD if file.has(HEAD) else TABLE
        given[HEAD] = (file.read(output) if tied is None else tied)[:draft]
    if config.own_embedding and file.has(TABLE):
        given[TABLE] = F.pad(file.read(TABLE)[:size], (0, 0, 0, max(size - known, 0)))
    notes.append(f"Its vocabulary has {known} tokens and the target's {size}: only tokens of both are drafted.")
    return _Fitted(replace(config, vocab_size=size, draft_vocab_size=draft), vocabulary, given)


def _owns_embedding(file: _File, target: TargetModel | None, notes: list[str]) -> bool:
    """Whether the head uses its own embedding instead of the target's."""
    width = file.layer.integer("hidden_size")
    other = file.fields.integer("target_hidden_size", width) != width
    if not file.has(TABLE):
        if not other:
            notes.append("It uses the target's embedding.")
        return other
    file.checkpoint.check_shape(file.names(TABLE)[0], (file.layer.integer("vocab_size"), width))
    if other or target is None:
        return other or (file.kind == SPECULATORS and file.fields.flag("embed_requires_grad", False))
    if same_embedding(file.read(TABLE), target):
        notes.append("Its embedding equals the target's embedding, which is used.")
        return False
    if file.kind == SPECULATORS:
        notes.append("It has its own embedding.")
        return True
    raise DrafterError(
        f"The embedding in the head {file.checkpoint.name!r} is not this target's, so the head is for another model."
    )


def _tied_head(file: _File, config: Eagle3Config, own: bool, target: TargetModel | None) -> Tensor | None:
    """The output layer's weights if they are tied to the embedding and the target's output layer is not usable."""
    if file.has(HEAD) or not file.fields.flag("tie_word_embeddings", False):
        return None
    if config.draft_vocab_size != config.vocab_size:
        raise DrafterError(f"The head {file.checkpoint.name!r} ties its output layer to an embedding of another size.")
    if own and file.has(TABLE):
        return file.read(TABLE)
    if target is None or target.config.tie_word_embeddings:
        return None
    return target.embedding().detach()


def _names(file: _File, config: Eagle3Config) -> dict[str, tuple[str, ...]]:
    """Tensor names in the file, by parameter of the net."""
    names = {name: file.names(name) for name in parameter_names(config)}
    tied = not file.has(HEAD) and file.fields.flag("tie_word_embeddings", False)
    if tied and config.own_embedding and config.own_head:
        names[HEAD] = file.names(TABLE)
    return names
