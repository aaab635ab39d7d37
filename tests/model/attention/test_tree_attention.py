"""The Triton kernel without a GPU: correct in Triton's interpreter, and accepted by its compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SIZES = {"WORDS": 0, "CAPPED": False, "BLOCK_M": 16, "BLOCK_S": 64, "BLOCK_E": 128, "BLOCK_F": 128}
FEATURES = {"WORDS": 2, "CAPPED": True}
TYPES = {"query_ptr": "*bf16", "keys_ptr": "*bf16", "values_ptr": "*bf16", "table_ptr": "*i64", "output_ptr": "*bf16"}
FLOATS = {"partial_ptr": "*fp32", "sums_ptr": "*fp32", "sinks_ptr": "*bf16", "scaling": "fp32", "softcap": "fp32"}


def test_in_tritons_interpreter():
    """In a process of its own, since Triton reads the variable when it is imported, and others import it too."""
    script = Path(__file__).parents[2] / "interpreted_kernels.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(script)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("_attend_split", SIZES),
        ("_attend_split", SIZES | FEATURES),
        ("_combine", {"SINKS": True, "BLOCK_P": 16, "BLOCK_F": 128}),
        ("_combine", {"SINKS": False, "BLOCK_P": 1, "BLOCK_F": 128}),
    ],
)
def test_compiles_for_a_gpu(name: str, sizes: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    """The interpreter accepts more than the compiler does, which needs no GPU: types that change in a loop, say."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from foredraft.model.attention import tree_attention

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns
    kernel = getattr(tree_attention, name)
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(sizes, "constexpr")
    types |= {name: kind for name, kind in (TYPES | FLOATS).items() if name in types}
    compiled = compile(ASTSource(kernel, types, sizes), target=GPUTarget("cuda", 80, 32))
    assert len(compiled.asm["cubin"])
