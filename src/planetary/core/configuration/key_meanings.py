"""The meaning of each key: the comment beside or above it in the struct, for the reference page and the flags' help."""

from __future__ import annotations

import ast
import functools
import inspect
import re

import msgspec


@functools.cache
def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment of each field of a struct and of the bases, in one line."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        text = inspect.getsource(base)
        lines = text.splitlines()
        for node in ast.parse(text).body[0].body:  # type: ignore[attr-defined]
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            beside = re.search(r"\s# (.*)$", lines[(node.end_lineno or 0) - 1])
            above: list[str] = []
            for line in reversed(lines[: node.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                above.insert(0, line.strip().lstrip("# "))
            inside = [re.search(r"\s# (.*)$", line) for line in lines[node.lineno - 1 : (node.end_lineno or 0) - 1]]
            comment = [match[1] for match in (*inside, beside) if match is not None]
            found[node.target.id] = " ".join([*above, *comment])
    return found
