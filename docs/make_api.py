"""Write docs/api.md from the docstrings of the public names: `python docs/make_api.py`. A test keeps it current."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planetary
from planetary.core import errors

PAGE = Path(__file__).with_name("api.md")

CALLS = (
    *("train", "train_async", "Run", "rl", "serve", "Server", "simulate", "Simulated", "SimulatedLink", "Fault"),
    *("export", "compile", "vjp", "attention", "linear_cross_entropy", "Jobs", "Communicator", "Config"),
)
RECORDS = (
    "planetary.fleet.protocol.status:RunStatus",
    "planetary.fleet.protocol.status:WorkerStatus",
    "planetary.runs.rounds.training_status:TrainingStatus",
    "planetary.runs.rounds.training_status:TrainerStatus",
    "planetary.runs.serve.status:ServingStatus",
    "planetary.runs.rounds.metrics:Figure",
    "planetary.runs.rounds.metrics:RoundMetrics",
    "planetary.runs.rl.status:PolicyMetrics",
    "planetary.runs.mixture.status:MixtureMetrics",
    "planetary.run.metrics:Metrics",
    "planetary.run.metrics:RoundRewards",
    "planetary.monitor.report:Report",
    "planetary.artifacts.checkpoint:Checkpoint",
    "planetary.site.api.views:JobView",
    "planetary.site.placement.status:PlacedJobStatus",
    "planetary.client.jobs:JobEvent",
    "planetary.site.api.views:SiteView",
    "planetary.site.api.views:CheckpointView",
    "planetary.site.api.views:CheckpointFile",
    "planetary.site.api.views:StepHistory",
    "planetary.site.api.views:StepUse",
    "planetary.site.api.views:RollOutView",
    "planetary.run.model.authoring:CompiledStep",
    "planetary.compiler.frontend.export:Model",
)
PACKAGES = (
    "planetary.collectives",
    "planetary.models",
    "planetary.torch",
    "planetary.testing",
    "planetary.compat.pccl",
)
SECTIONS = ("Args", "Returns", "Raises", "Attributes", "Example")

HEAD = """# Python interface

Written by `docs/make_api.py` from the docstrings; do not edit. Its examples run as tests
(`tests/run/test_api_page.py`).

```python
import planetary

run = planetary.train("examples/stdlib.toml", workers=2, rounds=3)
print(run.metrics[-1].loss, run.generate("def "))
```

The names on this page are public: those of `planetary` itself, the records that they return, and the packages at the
end. **All other modules are private** and change without notice; [architecture.md](architecture.md) explains them.
Names are imported when they are used, so `import planetary` costs next to nothing (bench/results/import_time.md).
"""


def page() -> str:
    """Return the whole page."""
    named = {*CALLS, *(place.split(":")[1] for place in RECORDS), "__version__"}
    assert named >= set(planetary.__all__), "a public name is missing on the page"
    parts = [HEAD]
    for name in CALLS:
        parts += _entry(f"planetary.{name}", getattr(planetary, name))
    parts.append("## Records\n\nReturned by the calls above; all fields are read-only.\n")
    for place in RECORDS:
        module, name = place.split(":")
        parts += _record(name, getattr(importlib.import_module(module), name))
    parts.append("## Errors\n\nAll are classes of `planetary.core.errors`; code branches on the class.\n")
    parts.append(_block(inspect.getdoc(errors) or "", "text", start="    PlanetaryError"))
    parts.append("## Packages\n")
    for name in PACKAGES:
        parts.append(f"- `{name}`: {_first_sentence(importlib.import_module(name))}")
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"## {name}\n"
    if inspect.isclass(value):
        made = next((vars(cls)["__init__"] for cls in value.__mro__[:-1] if "__init__" in vars(cls)), None)
        if inspect.isfunction(made) and not (inspect.getdoc(made) or "").startswith("Made by"):
            yield f"```python\n{_signature(name, made)}\n```\n"
            yield from _body(inspect.getdoc(value) or "")
            yield from _body(inspect.getdoc(made) or "")
        else:
            yield from _body(inspect.getdoc(value) or "")
        for member, found in _members(value):
            yield f"### {value.__name__}.{member}\n"
            if callable(found):
                yield f"```python\n{_signature(f'{value.__name__}.{member}', found)}\n```\n"
                yield from _body(inspect.getdoc(found) or "")
            else:
                yield from _body(inspect.getdoc(found) or "")
        return
    yield f"```python\n{_signature(name, value)}\n```\n"
    yield from _body(inspect.getdoc(value) or "")


def _record(name: str, kind: type) -> Iterator[str]:
    yield f"### {name}\n"
    yield from _body(inspect.getdoc(kind) or "")
    lines = [] if "Attributes:" in (inspect.getdoc(kind) or "") else list(_fields(kind))
    for member, found in _members(kind):
        shown = _signature(f"{name}.{member}", found) if callable(found) else f"{name}.{member}"
        lines.append(f"- `{shown}`: {_first_sentence(found)}")
    yield "\n".join(lines) + "\n"


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties with a docstring, in the order of the class and its bases."""
    seen: set[str] = set()
    for cls in kind.__mro__:
        if not cls.__module__.startswith("planetary"):
            continue
        for name, found in vars(cls).items():
            plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            if name.startswith("_") or name in seen or not (inspect.isfunction(plain) or isinstance(found, property)):
                continue
            seen.add(name)
            yield name, found if isinstance(found, property) else getattr(kind, name)


def _fields(kind: type) -> Iterator[str]:
    """Yield a line for each field of a record, with its comment from the class's source."""
    comment: list[str] = []
    for line in inspect.getsource(kind).splitlines():
        above = re.fullmatch(r"\s+# (.*)", line)
        field = re.fullmatch(r"    (\w+): ([^=#]+?)(?: = [^#]+?)?(?:\s+# (.*))?", line)
        if above:
            comment.append(above[1])
        elif field and not line.strip().startswith(("def", "class")):
            meaning = field[3] or " ".join(comment)
            yield f"- `{field[1]}: {field[2].strip()}`" + (f": {meaning}" if meaning else "")
            comment = []
        else:
            comment = []


def _signature(name: str, function: Any) -> str:
    text = f"{name}{inspect.signature(function)}".replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"<(\w+\.\w+): [^>]*>", r"\1", text)  # members of enumerations
    if len(text) <= 110:
        return text
    head, _, rest = text.partition("(")
    inner, close, result = rest.rpartition(")")
    return f"{head}(\n" + "".join(f"    {part},\n" for part in _split(inner)) + close + result


def _split(arguments: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
    depth, begin = 0, 0
    for place, char in enumerate(arguments):
        depth += (char in "[({") - (char in "])}")
        if char == "," and depth == 0:
            yield arguments[begin:place].strip()
            begin = place + 1
    yield arguments[begin:].strip()


def _body(doc: str) -> Iterator[str]:
    """Turn a docstring into Markdown: sections into lists, examples into blocks."""
    section, lines = "", []
    for line in [*doc.splitlines(), "End:"]:
        heading = re.fullmatch(r"(\w+):", line)
        if heading and (heading[1] in SECTIONS or heading[1] == "End"):
            yield from _section(section, textwrap.dedent("\n".join(lines)).strip("\n"))
            section, lines = heading[1], []
        else:
            lines.append(line)


def _section(name: str, text: str) -> Iterator[str]:
    if not text:
        return
    if name == "Example":
        yield _block(text, "pycon")
    elif name in {"", "Returns"}:
        title = f"*{name}.* " if name else ""
        yield title + text + "\n"
    else:
        items = re.split(r"\n(?=\S)", text)
        entries = [re.sub(r"^([\w .*]+?):", r"`\1`:", " ".join(item.split()), count=1) for item in items]
        yield f"*{name}.*\n\n" + "\n".join(f"- {entry}" for entry in entries) + "\n"


def _block(text: str, language: str, start: str = "") -> str:
    if start:
        text = textwrap.dedent(text[text.index(start) :].split("\n\n", maxsplit=1)[0])
    return f"```{language}\n{text}\n```\n"


def _first_sentence(value: Any) -> str:
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


if __name__ == "__main__":
    PAGE.write_text(page())
