"""The text of a function or class that a program gives as an object, for processes that load a file."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import textwrap
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, NoneType
from typing import Any

from planetary.core.errors import UserError

_REMEDY = 'put it into a file, and give "FILE.py:NAME"'
_POSTPONED = "from __future__ import annotations"


def text_of(given: object, what: str) -> str:
    """Return the text of a file that defines a function or class under its name.

    The whole file of a module that is in no package; of a package's module, a notebook or the program's own file (which
    would be run again) the definition alone, with the constants and imports of the modules that it uses.

    Args:
        given: a function or a class.
        what: name of the argument, for errors.

    Raises:
        UserError: it is no function or class with a name, its text is not known, or it uses other objects of the
            program; these are named.
    """
    if not isinstance(given, FunctionType | type):
        raise UserError(
            f"{what}: a {type(given).__name__} has no code that another process could load by name: expected a "
            f"function or a class; {_REMEDY}"
        )
    name = given.__name__
    if name == "<lambda>":
        raise UserError(f"{what}: a lambda has no name: write it as a function (def), or {_REMEDY}")
    if path := _own_file(given):
        return path.read_text()
    try:
        text = textwrap.dedent(inspect.getsource(given))
    except (OSError, TypeError):
        raise UserError(f"{what}: the source of {name} is not known here: {_REMEDY}") from None
    imports = _imports(given, text, what)
    source = "\n".join([_POSTPONED, "", *imports, "", "", text])
    try:
        exec(compile(source, f"<{name}>", "exec"), {"__name__": "given"})  # the caller's own definition, once more
    except Exception as error:
        raise UserError(f"{what}: {name} cannot be loaded alone: {type(error).__name__}: {error}; {_REMEDY}") from error
    return source


def _own_file(given: FunctionType | type) -> Path | None:
    """Return the file of an imported module in no package that has the object under its name."""
    module = sys.modules.get(given.__module__)
    if module is None or given.__module__ == "__main__" or getattr(module, given.__name__, None) is not given:
        return None
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py") or getattr(module, "__package__", ""):
        return None
    return Path(path) if Path(path).is_file() else None


def _imports(given: FunctionType | type, text: str, what: str) -> list[str]:
    """Return the imports that a text needs. Raises `UserError` for names of other objects."""
    space = _space_of(given)
    used = _names_in(compile(f"{_POSTPONED}\n{text}", "text", "exec")) - {given.__name__}
    outside = {name: space[name] for name in used if name in space and not name.startswith("__")}
    lines: list[str] = []
    foreign: list[str] = []
    for name, value in sorted(outside.items()):
        if getattr(builtins, name, None) is value:
            continue
        home = getattr(value, "__module__", "")
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif home in sys.modules and home != "__main__" and _is_named(value, sys.modules[home]):
            lines.append(f"from {home} import {value.__name__} as {name}")
        elif _is_constant(value):
            lines.append(f"{name} = {value!r}")
        else:
            foreign.append(name)
    if foreign:
        raise UserError(
            f"{what}: {given.__name__} uses {', '.join(foreign)} of this program, which other processes do not have: "
            f"{_REMEDY}"
        )
    return lines


def _is_constant(value: Any) -> bool:
    """Whether a value cannot change, and its text is the value."""
    if not isinstance(value, str | bytes | int | float | tuple | NoneType):
        return False
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _is_named(value: Any, module: ModuleType) -> bool:
    """Whether an importable module has a value under the value's own name."""
    name = getattr(value, "__name__", "")
    return bool(name) and getattr(module, name, None) is value and getattr(module, "__file__", None) is not None


def _space_of(given: FunctionType | type) -> dict[str, Any]:
    """Return the names around a definition, those of enclosing functions included."""
    if isinstance(given, FunctionType):
        cells = zip(given.__code__.co_freevars, given.__closure__ or (), strict=True)
        return {**given.__globals__, **{name: cell.cell_contents for name, cell in cells}}
    space = dict(vars(sys.modules[given.__module__])) if given.__module__ in sys.modules else {}
    for value in vars(given).values():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        plain = plain.fget if isinstance(plain, property) else plain
        space |= _space_of(plain) if isinstance(plain, FunctionType) else {}
    return space


def _names_in(code: CodeType) -> set[str]:
    """Return the names that code, and the code inside it, looks up outside of it."""
    found, own = set(), set()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(str(one.argval))
        elif one.opname == "STORE_NAME":
            own.add(str(one.argval))
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return (found - own).union(*map(_names_in, inner))
