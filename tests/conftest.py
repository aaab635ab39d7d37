import gc
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

with warnings.catch_warnings():  # what packages say while they are imported is not ours to fix
    warnings.simplefilter("ignore")
    import transformers

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tensors are small here: a second thread costs more than it does


def pytest_collection_finish() -> None:
    """The search for garbage leaves out modules and tests: they stay, and going through them takes most of its time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warnings that other programs, such as other tests, keep the cores busy."""
    if hasattr(os, "getloadavg"):
        monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture(autouse=True)
def fixed_seed() -> Iterator[None]:
    """What a test draws does not depend on the tests before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports scripts of ``benchmarks/`` by name, which import each other in the same way."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module
