"""Numbers of threads of operators, and of kernels that have their own."""

from typing import Any

import pytest
import torch

import tiny
from foredraft.core.sampling.params import SamplingParams
from foredraft.model.threads import kernel_threads, operators_in_one_thread, threads_of
from native import native, needs_compiler


def test_operators_run_in_one_thread_while_kernels_keep_theirs():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), operators_in_one_thread():
            assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
            with operators_in_one_thread():
                assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
            with threads_of(2):
                assert (torch.get_num_threads(), kernel_threads()) == (2, 2)
            assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
            raise KeyError
        assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_a_step_on_the_native_engine_is_one_thread_of_torch_and_all_of_the_kernels(monkeypatch: pytest.MonkeyPatch):
    before, seen = torch.get_num_threads(), []
    model: Any = native("llama", "int8")
    compute = model.compute

    def watched(*arguments: Any) -> Any:
        seen.append((torch.get_num_threads(), kernel_threads()))
        return compute(*arguments)

    monkeypatch.setattr(model, "compute", watched)
    torch.set_num_threads(2)
    try:
        tiny.generator(model).generate([1, 2, 3], SamplingParams(max_new_tokens=3))
        assert set(seen) == {(1, 2)} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
