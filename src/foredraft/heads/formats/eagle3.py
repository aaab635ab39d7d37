"""Reads EAGLE-3 files: SafeAILab's, SpecForge's (for SGLang) and speculators' (for vLLM).

The three formats have the same tensors, and differ in prefixes, flags and how they number the target's layers (heads.md
1.2 to 1.4).
"""

from dataclasses import dataclass, replace

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


def matches(checkpoint: Checkpoint) -> bool:
    """Whether there is a ``midlayer``, a separate norm for the hidden state, or an EAGLE-3 config."""
    names = checkpoint.weights.shapes
    named = any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in names)
    return named or format_of(checkpoint.config) != SAFEAILAB


def format_of(config: dict) -> str:
    """The format of a config."""
    if "speculators_model_type" in config:
        return SPECULATORS
    listed = config.get("architectures")
    named = isinstance(listed, list) and "LlamaForCausalLMEagle3" in listed
    return SPECFORGE if named or {"eagle_config", "fc_norm", "norm_output"} & config.keys() else SAFEAILAB


def read(checkpoint: Checkpoint, target: TargetModel | None, overrides: Overrides) -> Reading:
    """``target`` is needed for the default taps, and to check whether a stored embedding is the target's.

    Raises:
        DrafterError: the config, the taps or the vocabulary maps are invalid.
    """
    kind, notes = format_of(checkpoint.config), []
    file = _File(checkpoint, kind, checkpoint.fields())
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
    vocabulary = read_vocabulary(checkpoint, config.draft_vocab_size, config.vocab_size, notes)
    names = _names(file, config)
    if any(alias.startswith("additional_layers.") for aliases in names.values() for alias in aliases):
        notes.append("SGLang omits the residual between additional layers; foredraft runs them as ordinary layers.")
    stored = {TABLE, *MAPS, "verifier_norm.weight", "verifier_lm_head.weight"}
    verifier = file.fields.part("speculators_config").part("verifier")
    return Reading(
        method="eagle3",
        format=kind,
        config=replace(config, taps=taps),
        names=names,
        given={HEAD: tied} if tied is not None and own is False else {},
        ignored=frozenset(stored - {name for aliases in names.values() for name in aliases}),
        vocabulary=vocabulary,
        open_taps=target is None and not listed,
        target=TargetNeeds(
            hidden_size=config.target_hidden_size,
            vocab_size=config.vocab_size,
            layers=max(taps) if listed else None,
            name=verifier.optional_text("name_or_path"),
        ),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _File:
    checkpoint: Checkpoint
    kind: str
    fields: Fields

    @property
    def layer(self) -> Fields:
        """The part of the config that describes the decoder block."""
        return self.fields.part("transformer_layer_config") if self.kind == SPECULATORS else self.fields

    @property
    def prefix(self) -> str:
        middle = any(name.startswith("midlayer.") for name in self.checkpoint.weights.shapes)
        return "midlayer." if middle else "layers.0."

    def has(self, name: str) -> bool:
        return name in self.checkpoint.weights


def _config(file: _File, own: bool, overrides: Overrides, notes: list[str]) -> Eagle3Config:
    """The net's config; its taps are placeholders of the right number."""
    fields, shapes = file.fields, file.checkpoint.weights.shapes
    speculators = file.kind == SPECULATORS
    block = _block(file, overrides, notes)
    width = fields.integer("target_hidden_size", block.hidden_size)
    fused = shapes["fc.weight"][-1] if "fc.weight" in shapes else 3 * width
    if fused % width:
        raise DrafterError(
            f"The tensor fc.weight of the head {fields.name!r} has {fused} inputs, which is no multiple of the "
            f"target's width {width}."
        )
    if fields.flag("norm_before_fc", False) and _either(fields, "fc_norm", False):
        raise DrafterError(f"The head {fields.name!r} has both norm_before_fc and fc_norm; only one is allowed.")
    vocab, small = file.layer.integer("vocab_size"), _draft_vocab(file)
    return Eagle3Config(
        block=block,
        vocab_size=vocab,
        draft_vocab_size=vocab if small is None else small,
        target_hidden_size=width,
        taps=tuple(range(fused // width)),
        num_layers=file.layer.count("num_hidden_layers", 1),
        fc_bias=file.kind == SPECFORGE and fields.flag("bias", False),
        norm_before_residual=_norm_before_residual(file, notes),
        norm_before_fc=fields.flag("norm_before_fc", False),
        fc_norm=_either(fields, "fc_norm", False),
        norm_carried=speculators and fields.flag("norm_output", False),
        norm_logits=speculators or _either(fields, "norm_output", True),
        own_embedding=own,
        own_head=HEAD in shapes or (small is not None and not fields.flag("tie_word_embeddings", False)),
    )


def _block(file: _File, overrides: Overrides, notes: list[str]) -> BlockConfig:
    layer, shapes = file.layer, file.checkpoint.weights.shapes
    bias = layer.flag("attention_bias", False) or layer.flag("qkv_bias", False)
    qwen = file.kind == SPECULATORS and layer.text("model_type", "llama").startswith("qwen3")
    block = read_block(
        layer,
        layers=layer.count("num_hidden_layers", 1),
        notes=notes,
        attention_bias=bias,
        output_bias=bias and f"{file.prefix}self_attn.o_proj.bias" in shapes,
        qk_norm=qwen or f"{file.prefix}self_attn.q_norm.weight" in shapes,
    )
    if overrides.rope_theta is not None:
        return override_theta(block, overrides.rope_theta, notes)
    if file.kind == SPECFORGE and block.rope_theta != 10000.0:
        notes.append("If it was trained before SpecForge PR 270 (October 2025), it may need rope_theta=10000.")
    return block


def _norm_before_residual(file: _File, notes: list[str]) -> bool:
    if file.kind == SPECULATORS and "norm_before_residual" not in file.fields:
        notes.append("norm_before_residual is absent: true, as in vLLM.")
    return file.fields.flag("norm_before_residual", file.kind == SPECULATORS)


def _either(fields: Fields, key: str, default: bool) -> bool:
    """A flag at the top level or inside ``eagle_config``."""
    return (fields if key in fields else fields.part("eagle_config")).flag(key, default)


def _draft_vocab(file: _File) -> int | None:
    """Rows of the head's output layer; None if it uses the target's."""
    shapes, fields = file.checkpoint.weights.shapes, file.fields
    if "draft_vocab_size" in fields:
        return fields.integer("draft_vocab_size")
    return shapes[HEAD][0] if HEAD in shapes else None


def _owns_embedding(file: _File, target: TargetModel | None, notes: list[str]) -> bool:
    """Whether the head uses its own embedding instead of the target's."""
    width = file.layer.integer("hidden_size")
    other = file.fields.integer("target_hidden_size", width) != width
    if not file.has(TABLE):
        if not other:
            notes.append("It uses the target's embedding.")
        return other
    file.checkpoint.check_shape(TABLE, (file.layer.integer("vocab_size"), width))
    if other or target is None:
        return other or (file.kind == SPECULATORS and file.fields.flag("embed_requires_grad", False))
    if same_embedding(file.checkpoint.weights.read(TABLE), target):
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
        return file.checkpoint.weights.read(TABLE)
    if target is None or target.config.tie_word_embeddings:
        return None
    return target.embedding().detach()


def _names(file: _File, config: Eagle3Config) -> dict[str, tuple[str, ...]]:
    """Tensor names in the file, by parameter of the net."""
    names: dict[str, tuple[str, ...]] = {}
    for name in parameter_names(config):
        head, _, rest = name.partition(".")
        if head == "midlayer":
            stored = file.prefix + rest
        elif head == "layers":
            number, _, rest = rest.partition(".")
            stored = _later_layer(file, int(number), rest)
        else:
            stored = name
        names[name] = (stored,)
    tied = not file.has(HEAD) and file.fields.flag("tie_word_embeddings", False)
    if tied and config.own_embedding and config.own_head:
        names[HEAD] = (TABLE,)
    return names


def _later_layer(file: _File, number: int, rest: str) -> str:
    """Name of a tensor of a layer after the first; SGLang numbers these separately and names their norm differently."""
    if not file.has(f"additional_layers.{number}.self_attn.q_proj.weight"):
        return f"layers.{number + 1}.{rest}"
    norm = f"additional_layers.{number}.hidden_norm.weight"
    return norm if rest == "input_layernorm.weight" and file.has(norm) else f"additional_layers.{number}.{rest}"
