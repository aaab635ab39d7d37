"""Properties that are computed once. ``functools.cached_property`` holds a lock, which ``torch.compile`` refuses."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


def cached(method: Callable[[Any], T]) -> T:
    """A property whose value is kept in the object's ``_cache``, a dict."""
    name = method.__name__

    def read(self: Any) -> T:
        if name not in self._cache:
            self._cache[name] = method(self)
        return self._cache[name]

    return cast(T, property(read, doc=method.__doc__))
