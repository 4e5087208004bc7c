"""Reads of configuration keys by the code that a kind of run reaches, found in its source.

Definitions are followed by name from some starts, through imports, wherever these stand. Annotations are not followed,
and neither are the definitions and packages that a caller leaves out.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from planetary.core.configuration.keys import FIELDS, SECTIONS
from planetary.core.configuration.schema import Config, DataConfig
from planetary.core.configuration.step_options import ComputeOptions, StepOptions, UpdateOptions

SECTION_OF = {struct.__name__: section for section, struct in SECTIONS.items()}
"""Name of a section's struct -> the section."""
OPTIONS = {
    **{name: f"optimizer.{name}" for name in UpdateOptions.__struct_fields__},
    **{name: f"train.{name}" for name in ComputeOptions.__struct_fields__},
    "optimizer": "optimizer.name",
}
"""Field of `StepOptions` -> the key that it comes from."""
OF_DATA = {"marked_targets"}
"""Fields of `StepOptions` that the prepared data decide, not a key."""
assert set(OPTIONS) | OF_DATA == set(StepOptions.__struct_fields__)

Place = tuple[str, str]
"""A module, and a name that it defines."""


@dataclass
class Module:
    """A module's definitions and imports, by the names that they have there."""

    definitions: dict[str, ast.AST] = field(default_factory=dict)
    imports: dict[str, Place] = field(default_factory=dict)


@functools.cache
def module_of(name: str) -> Module | None:
    """Return a module of the package; None for any other name."""
    if not name.startswith("planetary"):
        return None
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name of something in a module
        return None
    if spec is None or spec.origin is None:
        return None
    found = Module()
    tree = ast.parse(Path(spec.origin).read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [inner.id for one in targets for inner in ast.walk(one) if isinstance(inner, ast.Name)]
            found.definitions |= dict.fromkeys(names, node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.imports |= {one.asname or one.name: (node.module, one.name) for one in node.names}
    return found


def without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but what only names types."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from without_annotations(child)


def reached(starts: Collection[Place], left_out: Collection[str]) -> dict[Place, ast.AST]:
    """Return the definitions that are reached; `left_out`: modules, packages, or "module:name"."""
    found: dict[Place, ast.AST] = {}
    waiting = list(starts)
    while waiting:
        place = waiting.pop()
        module = module_of(place[0])
        if place in found or module is None or any(_is_in(place, one) for one in left_out):
            continue
        node = module.definitions.get(place[1])
        if node is None:
            if place[1] in module.imports:
                waiting.append(module.imports[place[1]])
            continue
        found[place] = node
        for inner in without_annotations(node):
            if isinstance(inner, ast.Name):
                waiting.append(module.imports.get(inner.id, (place[0], inner.id)))
            elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                base = module.imports.get(inner.value.id)
                if base is not None and module_of(".".join(base)) is not None:
                    waiting.append((".".join(base), inner.attr))
    return found


def _is_in(place: Place, name: str) -> bool:
    return ":".join(place) == name or place[0] == name or place[0].startswith(f"{name}.")


def keys_read_by(places: Iterable[Place]) -> set[str]:
    """Return the keys that some definitions read themselves."""
    found: set[str] = set()
    for module, name in places:
        defined = module_of(module)
        assert defined is not None
        found |= keys_read(defined.definitions[name])
    return found


@functools.cache
def keys_read(node: ast.AST) -> frozenset[str]:
    """Return the keys that a definition reads by name: of a section, of an alias of one, or of `StepOptions`."""
    aliases = dict(_aliases(node))
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "keys_of":
            found |= {f"moe.{name}" for name in _struct_fields(inner.args[1]) if name in FIELDS["moe"]}
        if not isinstance(inner, ast.Attribute):
            continue
        found |= _of_property(inner.attr)
        section = aliases.get(ast.unparse(inner.value)) or _section(inner.value)
        if section is not None and inner.attr in FIELDS[section]:
            found.add(f"{section}.{inner.attr}")
        if ast.unparse(inner.value).rpartition(".")[2] == "options" and inner.attr in OPTIONS:
            found.add(OPTIONS[inner.attr])
    return frozenset(found)


def _section(node: ast.AST) -> str | None:
    """Return the section that an expression is: `config.train`, or `config.of(RlConfig)`."""
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "of":
        return SECTION_OF.get(ast.unparse(node.args[0]))
    return node.attr if isinstance(node, ast.Attribute) and node.attr in SECTIONS else None


def _aliases(node: ast.AST) -> Iterator[tuple[str, str]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg) and inner.annotation is not None:
            kind = ast.unparse(inner.annotation).rpartition(".")[2]
            if kind in SECTION_OF:
                yield inner.arg, SECTION_OF[kind]
                yield from ((name, SECTION_OF[kind]) for name in _kept_as(inner.arg, node))
        if isinstance(inner, ast.Lambda):  # whose arguments have no types
            yield from ((one.arg, one.arg) for one in inner.args.args if one.arg in SECTIONS)
        if isinstance(inner, ast.Assign):
            values, target = inner.value, inner.targets[0]
            pairs = (
                zip(target.elts, values.elts, strict=True)
                if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple)
                else [(target, values)]
            )
            yield from ((ast.unparse(name), found) for name, value in pairs if (found := _section(value)))


def _kept_as(name: str, node: ast.AST) -> Iterator[str]:
    """Yield the attributes that an argument becomes: `self._options = options`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Name) and inner.value.id == name:
            yield ast.unparse(inner.targets[0])
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Tuple):
            targets = inner.targets[0]
            values = inner.value.elts
            if isinstance(targets, ast.Tuple):
                for target, value in zip(targets.elts, values, strict=True):
                    if isinstance(value, ast.Name) and value.id == name:
                        yield ast.unparse(target)


def _struct_fields(node: ast.expr) -> tuple[str, ...]:
    from planetary.runs.mixture.config import MixtureOptions
    from planetary.runs.mixture.methods.acceptance import Policy

    return {"MixtureOptions": MixtureOptions, "Policy": Policy}[ast.unparse(node)].__struct_fields__


@functools.cache
def _of_property(name: str) -> frozenset[str]:
    """Return the keys that a property of the whole configuration, or of its data, is made of."""
    for struct, section in ((Config, None), (DataConfig, "data")):
        if not isinstance(struct.__dict__.get(name), property):
            continue
        module = module_of(struct.__module__)
        assert module is not None
        body = module.definitions[struct.__name__]
        (node,) = (one for one in ast.walk(body) if isinstance(one, ast.FunctionDef) and one.name == name)
        if section is None:
            return keys_read(node)
        own = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
        return frozenset(f"{section}.{key}" for key in own if key in FIELDS[section])
    return frozenset()
