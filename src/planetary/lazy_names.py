"""Public names of a package that are imported when they are used (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: its globals, with `__name__` and `__all__`; a name that was used once is kept there.
        homes: the module with a name, by name.
    """

    def find(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            public = ", ".join(package["__all__"])
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}; public are {public}")
        import importlib

        package[name] = value = getattr(importlib.import_module(home), name)
        return value

    return find
