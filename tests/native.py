"""Tiny models on the native engine."""

import functools
from typing import Any

import pytest
from transformers import PreTrainedModel

from foredraft.model.native.build import compiler
from foredraft.model.native.decoder import pack_decoder, source_of
from foredraft.model.native.model import NativeLM
from foredraft.model.native.outline import Outline
from foredraft.model.native.weights import PRECISIONS
from tiny import build

needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C compiler")


def on_native(model: PreTrainedModel, weights: str, kv_cache_dtype: str = "float16") -> NativeLM:
    """A model on the engine; weights may be float32, too."""
    outline = Outline.of(model)
    decoder = pack_decoder(outline, source_of(model), PRECISIONS[weights])
    return NativeLM(decoder, outline, kv_cache_dtype=kv_cache_dtype)


@functools.cache
def native(name: str = "llama", weights: str = "int4", kv_cache_dtype: str = "float16", **changes: Any) -> NativeLM:
    """A tiny model on the engine; see ``tiny.build``."""
    return on_native(build(name, **changes), weights, kv_cache_dtype)
