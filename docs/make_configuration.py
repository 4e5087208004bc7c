"""Write docs/configuration.md from the schema: `python docs/make_configuration.py`. A test keeps it current.

Type, range and default come from the types; the meaning is the comment beside or above a key.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import inspect

from planetary.core.configuration.key_meanings import meanings
from planetary.core.configuration.keys import FIELDS, LISTS, SECTIONS
from planetary.core.configuration.ranges import describe
from planetary.run.config_help import written_doc
from planetary.run.kinds import all_kinds
from planetary.site.config import Api, ControllerOptions, Federation, SiteConfig, SitePolicy, WorkerFabric

TABLE = "| key | takes | default | meaning |\n|---|---|---|---|\n"
TABLE_OF_KINDS = "| key | takes | default | kinds of run | meaning |\n|---|---|---|---|---|\n"
PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

Written by `docs/make_configuration.py` from the schema (`core/configuration/schema.py`, and `config.py` of each kind
of run); do not edit.

A configuration is a TOML file with these sections; every key has a default. `--set section.key=value` overrides a key
on the command line, `overrides={"section.key": value}` in Python. A relative path in a file is relative to the file's
folder.

Every key is honoured or refused: a key with another value than its default is an error with the reason in a run of a
kind that does not honour it. `--set SECTION={}` leaves out a whole section of a file.
"""


SITE = """## The file of a gateway with controllers

`planetary gateway --gateway-config gateway.toml`, or PCP's `gateway.json`; [site.md](site.md) explains it.
"""

SITE_PARTS: dict[str, type[msgspec.Struct]] = {
    "At the top": SiteConfig,
    "`[controllers.training]`, `[controllers.rl]`, `[controllers.inference]`": ControllerOptions,
    "`[api]`": Api,
    "`[worker_fabric]`": WorkerFabric,
    "`[federation]`": Federation,
    "`[[federation.sites]]`": SitePolicy,
}


def page() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for section, struct in SECTIONS.items():
        doc = written_doc(struct).partition(": ")[2].strip().rstrip(".")
        parts.append(f"## `[{section}]`\n\n{doc[:1].upper()}{doc[1:]}.\n\n{TABLE_OF_KINDS}")
        said = meanings(struct)
        own = [name for name in struct.__annotations__ if name in FIELDS[section]]
        for name in [*own, *(key for key in FIELDS[section] if key not in own)]:
            field = FIELDS[section][name]
            meaning = said[name].replace("|", "\\|")
            row = (f"`{name}`", describe(field.type), _default(field), honoured_by(f"{section}.{name}"), meaning)
            parts[-1] += f"| {' | '.join(row)} |\n"
    for name, registry in LISTS.items():
        parts.append(
            f"## `[[{name}]]`\n\nEach table has a `kind` and the keys of it. On the command line: "
            f"`--set '{name}=[{{kind = \"…\", …}}]'`.\n"
        )
        for kind, struct in ((kind, sink.options) for kind, sink in registry.built_in.items()):
            doc = written_doc(struct).partition(": ")[2].strip().rstrip(".")
            parts.append(f'### `kind = "{kind}"`\n\n{doc[:1].upper()}{doc[1:]}.\n\n{TABLE}')
            said = meanings(struct)
            info = inspect.type_info(struct)
            for field in info.fields:  # type: ignore[attr-defined]
                parts[-1] += f"| `{field.name}` | {describe(field.type)} | {_default(field)} | {said[field.name]} |\n"
    parts.append(SITE)
    for place, struct in SITE_PARTS.items():
        doc = written_doc(struct).partition(": ")[2].strip().rstrip(".")
        parts.append(f"### {place}\n\n{doc[:1].upper()}{doc[1:]}.\n\n{TABLE}")
        said = meanings(struct)
        for field in inspect.type_info(struct).fields:  # type: ignore[attr-defined]
            if said[field.name]:  # a part of the file has none, and a table of its own
                parts[-1] += f"| `{field.name}` | {describe(field.type)} | {_default(field)} | {said[field.name]} |\n"
    return "\n".join(parts)


def honoured_by(key: str) -> str:
    """Return the kinds of run that honour a key, as words."""
    absent = {section for kind in all_kinds() for section in kind.sections}
    found = {
        declared.kind: declared.honours(key, absent) for kind in reversed(all_kinds()) for declared in kind.declared()
    }
    without = [name for name, honours in found.items() if not honours]
    if not without:
        return "all"
    if len(without) < len(found) / 2:
        return f"all but {', '.join(without)}"
    return ", ".join(name for name, honours in found.items() if honours)


def _default(field: inspect.Field) -> str:
    if field.required:
        return "has to be given"
    if field.default is msgspec.NODEFAULT:
        return "`{}`"
    if field.default is None:
        return ""
    if isinstance(field.default, str):
        return f'`"{field.default}"`'
    if isinstance(field.default, tuple):
        return "`[" + ", ".join(f'"{item}"' for item in field.default) + "]`"
    return f"`{str(field.default).lower()}`" if isinstance(field.default, bool) else f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
