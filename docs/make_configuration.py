"""Write docs/configuration.md from the schema: `python docs/make_configuration.py`. A test keeps it current.

Type, range and default come from the types; the meaning is the comment beside or above a key.
"""

from __future__ import annotations

import ast
import inspect as source_of
import re
from pathlib import Path

import msgspec
from msgspec import inspect

from planetary.core.configuration.ranges import describe
from planetary.core.configuration.strict import FIELDS, LISTS, SECTIONS

TABLE = "| key | takes | default | meaning |\n|---|---|---|---|\n"
PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

Written by `docs/make_configuration.py` from the schema (`core/configuration/schema.py`); do not edit.

A configuration is a TOML file with these sections; every key has a default. `--set section.key=value` overrides a key
on the command line, `overrides={"section.key": value}` in Python. A relative path in a file is relative to the file's
folder.
"""


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment of each field of a struct and of its bases, in one line."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not issubclass(base, msgspec.Struct) or base is msgspec.Struct:
            continue
        text = source_of.getsource(base)
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


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for section, struct in SECTIONS.items():
        doc = (struct.__doc__ or "").partition(": ")[2].strip().rstrip(".")
        parts.append(f"## `[{section}]`\n\n{doc[:1].upper()}{doc[1:]}.\n\n{TABLE}")
        said = meanings(struct)
        own = [name for name in struct.__annotations__ if name in FIELDS[section]]
        for name in [*own, *(key for key in FIELDS[section] if key not in own)]:
            field = FIELDS[section][name]
            meaning = said[name].replace("|", "\\|")
            parts[-1] += f"| `{name}` | {describe(field.type)} | {_default(field)} | {meaning} |\n"
    for name, kinds in LISTS.items():
        parts.append(
            f"## `[[{name}]]`\n\nEach table has a `kind` and the keys of it. On the command line: "
            f"`--set '{name}=[{{kind = \"…\", …}}]'`.\n"
        )
        for kind, struct in kinds.items():
            doc = (struct.__doc__ or "").partition(": ")[2].strip().rstrip(".")
            parts.append(f'### `kind = "{kind}"`\n\n{doc[:1].upper()}{doc[1:]}.\n\n{TABLE}')
            said = meanings(struct)
            info = inspect.type_info(struct)
            for field in info.fields:  # type: ignore[attr-defined]
                parts[-1] += f"| `{field.name}` | {describe(field.type)} | {_default(field)} | {said[field.name]} |\n"
    return "\n".join(parts)


def _default(field: inspect.Field) -> str:
    if field.default is msgspec.NODEFAULT:
        return "`{}`"
    if isinstance(field.default, str):
        return f'`"{field.default}"`'
    if isinstance(field.default, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in field.default) + "]`"
    return f"`{str(field.default).lower()}`" if isinstance(field.default, bool) else f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
