import gc
import importlib
import logging
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
def nothing_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No model was compared before: what another test has remembered is not known to this one."""
    monkeypatch.setattr("foredraft.model.native.probe_cache.folder", lambda: tmp_path / "compared")


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


@pytest.fixture(autouse=True)
def logs_of_its_own() -> Iterator[None]:
    """A test that starts a server in its process leaves no handler to the tests after it."""
    loggers = [logging.getLogger(name) for name in ("foredraft", "uvicorn", "asyncio")]
    before = [(list(each.handlers), each.level, each.propagate) for each in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports scripts of ``benchmarks/`` by name, which import each other in the same way."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    return importlib.import_module
