"""Options of replicas, and the sections of the file that ``foredraft scale`` reads; importable without ray."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from foredraft.core.errors import OptionError, kind_of
from foredraft.core.options import check_bounds
from foredraft.core.sampling.params import check_known


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """How many replicas run, and where.

    replicas: how many, if their number is fixed.
    autoscaling: Ray Serve's ``AutoscalingConfig`` instead, such as ``{"min_replicas": 1, "max_replicas": 4}``.
    actor: ``ray_actor_options`` of each replica, such as ``{"num_cpus": 8, "num_gpus": 1}``.
    affinity: send requests to replicas that have the beginning of their prompt in the KV cache.
    load_bound: a replica with more than this many times the mean load gets no request for its cache alone.
    max_surge_percent: replicas that an update may start, in percent, before it stops old ones.
    gateways: processes that pass requests on.
    address: of a Ray cluster; none: Ray is started on this machine.

    Raises:
        OptionError: a value is out of range.
    """

    replicas: int = 1
    autoscaling: Mapping[str, Any] = field(default_factory=dict)
    actor: Mapping[str, Any] = field(default_factory=dict)
    affinity: bool = True
    load_bound: float = 1.25
    max_surge_percent: int = 0
    gateways: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self, least={"replicas": 1, "gateways": 1, "load_bound": 1.0, "max_surge_percent": 0})
        if self.autoscaling and self.replicas != 1:
            raise OptionError("Give replicas or autoscaling, not both.")


def deployment(given: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Build each dataclass in ``kinds`` from its section; what is missing has its default.

    Raises:
        OptionError: there is an unknown section or key, or a value of the wrong type.
    """
    check_known("section", given, list(kinds))
    return {name: _section(name, kind, given.get(name) or {}) for name, kind in kinds.items()}


def _section(name: str, kind: type, given: Any) -> Any:
    hints = get_type_hints(kind)
    known = [each.name for each in fields(kind) if each.metadata.get("flag", True)]
    check_known(f"option of {name}", _mapping(name, given), known)
    return kind(**{key: _value(f"{name}.{key}", value, hints[key]) for key, value in given.items()})


def _value(name: str, value: Any, hint: Any) -> Any:
    if NoneType in get_args(hint):
        if value is None:
            return None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        values = value if isinstance(value, list) else [value]
        return tuple(_value(name, each, get_args(hint)[0]) for each in values)
    if get_origin(hint) is not None:
        return _mapping(name, value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise OptionError(f"{name} must be {_NAMES[hint]}, not {value!r}.")
    return value


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise OptionError(f"{name} must be a mapping, not {kind_of(value)}.")
    return value


_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
