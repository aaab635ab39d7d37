"""All experiments, by their names: every ``Experiment`` of a module of benchmarks/experiments."""

import functools
import importlib
import pkgutil
from types import ModuleType

from benchmarks import experiments
from benchmarks.kit.experiment import Experiment


def of_module(name: str) -> dict[str, tuple[ModuleType, Experiment]]:
    module = importlib.import_module(f"benchmarks.experiments.{name}")
    return {each.name: (module, each) for each in vars(module).values() if isinstance(each, Experiment)}


@functools.cache
def every() -> dict[str, Experiment]:
    """All experiments, in the order of their modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(experiments.__path__))
    return {name: found for module in names for name, (_, found) in of_module(module).items()}


def find(name: str) -> tuple[ModuleType, Experiment]:
    """An experiment and its module: that of its name, or one that has it among others."""
    names = sorted((each.name for each in pkgutil.iter_modules(experiments.__path__)), key=lambda each: each != name)
    for module in names:
        if name in (found := of_module(module)):
            return found[name]
    raise SystemExit(f"There is no experiment {name}. Known: {', '.join(every())}.")


def table() -> str:
    return "\n".join(f"{name:14} {each.question}" for name, each in every().items())
