"""Measure the tree: importers, folders, lines, private reaches, doubled names, words.

`python bench/structure.py` prints a table, and with `--list` the places that each number counts. The source is read,
never imported.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "planetary"
MODELS_AND_RULES = ("models/", "compiler/autodiff/rules/", "compiler/ops/")
# No part of another object: an operating system's call, the parent class, a named tuple's methods, a lock's owner.
NOT_A_REACH = {"_exit", "_replace", "_asdict", "_fields", "_make"}

# Rules of the derivative and operations register in a package's `__init__`; these are the other registries.
REGISTRIES = {
    "planetary.site.api.control_api",  # of groups of operations
    "planetary.monitor.sinks.sink_kinds",
    "planetary.compiler.step.inner_optimizers",  # of optimizers
    "planetary.sync.payload",  # of codecs
}


REACHED = ("fleet", "runs.rounds", "runs.federation", "runs.serve", "runs.rl", "runs.mixture", "site")


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Return the files of the package by module name."""
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def has_code(path: Path) -> bool:
    """Return whether a file holds more than a docstring and imports of a package's front."""
    return path.name != "__init__.py"


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a file imports, lazily or for types, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("planetary"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & known.keys()


def importers() -> dict[str, set[str]]:
    """Return for each module with code the modules that import it."""
    known = modules()
    by_module: dict[str, set[str]] = {name: set() for name, path in known.items() if has_code(path)}
    for name, path in known.items():
        for target in imported(path, known):
            if target in by_module and target != name:
                by_module[target].add(name)
    return by_module


def single_importers() -> dict[str, str]:
    """Return the modules that one module alone imports, with that one. The command line's table names commands, too."""
    commands = str((PACKAGE / "cli" / "commands").relative_to(SOURCE)).replace("/", ".")
    return {
        name: next(iter(users))
        for name, users in importers().items()
        if len(users) == 1 and not (name.startswith(commands) and name.rpartition(".")[2] in _command_modules())
    }


def _command_modules() -> set[str]:
    """Return the last parts of the modules that the command line's table names by strings."""
    tree = ast.parse((PACKAGE / "cli" / "command_table.py").read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text.rpartition(".")[2] for text in texts if re.fullmatch(r"[a-z_.]+", text)}


def loaded_early(name: str, known: dict[str, Path]) -> tuple[set[str], set[str]]:
    """Return what importing a module imports at once: modules of the package, and other packages by name."""
    inside: set[str] = set()
    outside: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.If):
                visit(node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else [*node.body, *node.orelse])
            elif isinstance(node, ast.Try | ast.With):
                visit(node.body)
            elif isinstance(node, ast.Import):
                outside.update(alias.name.split(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & known.keys()
                inside.update(inner or {node.module} & known.keys())
                outside.add(node.module.split(".")[0])

    visit(ast.parse(known[name].read_text()).body)
    return inside, outside


def packages_of(name: str, known: dict[str, Path]) -> set[str]:
    """Return the packages of others that are loaded once a module is imported."""
    seen, todo, outside = {name}, [name], set[str]()
    while todo:
        inner, others = loaded_early(todo.pop(), known)
        outside |= others
        todo += inner - seen
        seen |= inner
    return outside - sys.stdlib_module_names - {"planetary"}


def is_loaded_late(name: str, importer: str) -> bool:
    """Return whether a module is apart for its importer to start without the packages that the module loads.

    The importer imports it inside a function only, and does without some of these packages at its start: numba, JAX,
    rich, or anything beyond the standard library in `planetary --help`.
    """
    known = modules()
    return name not in loaded_early(importer, known)[0] and bool(
        packages_of(name, known) - packages_of(importer, known)
    )


def is_registered(importer: str) -> bool:
    """Return whether an importer is a registry or a package's face: the only place that is meant to name the module."""
    return importer in REGISTRIES or modules()[importer].name in ("__init__.py", "__main__.py")


def largest_folder() -> tuple[int, str]:
    """Return the number of modules with code in the fullest folder, and the folder."""
    folders: dict[str, int] = defaultdict(int)
    for path in modules().values():
        if has_code(path):
            folders[str(path.parent.relative_to(PACKAGE))] += 1
    return max((count, folder) for folder, count in folders.items())


def lines_of_source() -> int:
    """Return the lines of the package without models and rules of the derivative."""
    return sum(
        len(path.read_text().splitlines())
        for path in modules().values()
        if not str(path.relative_to(PACKAGE)).startswith(MODELS_AND_RULES)
    )


def private_reaches(folder: Path) -> list[str]:
    """Return the places below a folder that touch a private attribute of another object than `self` or `super()`."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not re.match(r"_[a-z]", node.attr) or node.attr in NOT_A_REACH:
                continue
            holder = node.value
            if isinstance(holder, ast.Name) and holder.id in ("self", "cls"):
                continue
            if isinstance(holder, ast.Call) and isinstance(holder.func, ast.Name) and holder.func.id == "super":
                continue
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    return found


def has_given_name(path: Path) -> bool:
    """Return whether others chose a file's names.

    A command's file is named after the word that a user types, and may share it with its subject; `compat` has the
    names of the library that it replaces.
    """
    return str(path.relative_to(PACKAGE)).startswith(("cli/commands/", "compat/"))


def doubled_classes() -> dict[str, list[str]]:
    """Return the class names that more than one file of the package defines, except where names are given."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        if has_given_name(path):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(PACKAGE)))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def reached(package: str) -> int:
    """Return the lines of a package and of all it imports, late or for types; names in a registry are no imports."""
    known = modules()
    todo = [name for name in known if f"{name}.".startswith(f"planetary.{package}.")]
    seen = set(todo)
    while todo:
        more = imported(known[todo.pop()], known) - seen
        todo += more
        seen |= more
    return sum(len(known[name].read_text().splitlines()) for name in seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print what each number counts")
    arguments = parser.parse_args()
    single = single_importers()
    by_registry = {name for name, importer in single.items() if is_registered(importer)}
    late = {name for name in single.keys() - by_registry if is_loaded_late(name, single[name])}
    fullest, folder = largest_folder()
    reaches, test_reaches = private_reaches(PACKAGE), private_reaches(ROOT / "tests")
    classes = doubled_classes()
    rows = [
        (f"modules in the largest folder ({folder})", fullest),
        ("lines of src without models and rules", lines_of_source()),
        ("modules with exactly one importer", len(single)),
        ("of them parts that a registry or a package's face names", len(by_registry)),
        ("of them parts that load packages which their importer starts without", len(late)),
        ("the others", len(single) - len(by_registry) - len(late)),
        ("private reaches in src", len(reaches)),
        ("private reaches in tests", len(test_reaches)),
        ("doubled class names", len(classes)),
        *((f"lines reached by imports from {package}", reached(package)) for package in REACHED),
    ]
    for label, value in rows:
        print(f"{label:72}{value:>8,}")
    if arguments.list:
        for name, importer in sorted(single.items()):
            kind = " (registry)" if name in by_registry else " (loaded late)" if name in late else ""
            print(f"one importer{kind}: {name} <- {importer}")
        for place in reaches + test_reaches:
            print("reach:", place)
        for name, where in classes.items():
            print("doubled:", name, *where)


if __name__ == "__main__":
    main()
