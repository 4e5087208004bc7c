"""Python of a user: the one way in which a model's file, a reward's or any other is loaded.

A file is loaded as Python loads a script in a package: the module is registered, so dataclasses with postponed
annotations, `typing.get_type_hints` and pickling find it; files beside it can be imported, by `import neighbour` and by
`from .neighbour import name`. A file is run again at each load, and so are the neighbours: a notebook's next call sees
the file as it is then.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import linecache
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from planetary.core.errors import LocalProtocolError, PlanetaryError, UserError

_BARRED: ContextVar[str] = ContextVar("barred", default="")
_NEIGHBOURS: dict[str, Path] = {}  # module imported from a file's own folder -> the folder


def load_module(place: str) -> ModuleType:
    """Return the module of a user: `path/to/file.py`, or the dotted name of a module.

    Raises:
        UserError: there is none, or it failed while it was loaded; the text names file and line. The cause is the
            exception.
        LocalProtocolError: the caller is in `barred`, and the module is not of this package.
    """
    if _BARRED.get() and not place.startswith("planetary."):
        raise LocalProtocolError(f"{place}: code of users does not run here: {_BARRED.get()}")
    return load_file(Path(place)) if place.endswith(".py") else _import(place)


@contextlib.contextmanager
def barred(why: str) -> Iterator[None]:
    """Let no user's code be loaded by this task, nor by threads it starts with `asyncio.to_thread`."""
    token = _BARRED.set(why)
    try:
        yield
    finally:
        _BARRED.reset(token)


def load_file(path: Path) -> ModuleType:
    """Return the module of a file; see `load_module`."""
    if not path.is_file():
        raise UserError(f"there is no file {path.resolve()}")
    path = path.resolve()
    folder = path.parent
    package = f"planetary_user_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    name = f"{package}.{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"cannot load {path} as a Python file")
    _forget_neighbours(folder)
    _register_package(package, folder)
    module = importlib.util.module_from_spec(spec)
    before = set(sys.modules)
    sys.modules[name] = module
    sys.path[:] = [str(folder), *(one for one in sys.path if one != str(folder))]
    importlib.invalidate_caches()  # of a neighbour that was written a moment ago
    try:
        spec.loader.exec_module(module)
    except PlanetaryError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(str(path), error) from error
    finally:
        # At the end, so an import inside a function still finds a neighbour, and none hides another module.
        sys.path.remove(str(folder))
        sys.path.append(str(folder))
        for one in set(sys.modules) - before:
            file = getattr(sys.modules[one], "__file__", None)
            if isinstance(file, str) and Path(file).is_relative_to(folder):
                _NEIGHBOURS[one] = folder
    return module


_MODULES: dict[str, ModuleType] = {}  # SHA-256 of a text -> its module
_TEXTS: dict[str, bytes] = {}  # SHA-256 -> text


def keep_text(text: bytes) -> str:
    """Keep a file's text for `kept_text`; return its SHA-256, in hex."""
    digest = hashlib.sha256(text).hexdigest()
    _TEXTS[digest] = text
    return digest


def kept_text(digest: str) -> bytes:
    """Return the text that was kept or loaded here. Raises `KeyError` for another digest."""
    return _TEXTS[digest]


def loaded_module(digest: str) -> ModuleType | None:
    """Return the module that `load_text` made of the text with this digest; None: it made none."""
    return _MODULES.get(digest)


def load_text(file: str, text: bytes, *, folder: Path | None = None) -> ModuleType:
    """Return the module of a file that stands alone, so it can be sent to other machines; run once per text.

    Args:
        file: its name.
        text: its source.
        folder: where the file lies; modules beside it would not travel with it. None: it came from elsewhere.

    Raises:
        UserError: it imports a file beside it, or failed while it was loaded; the text names file and line.
        LocalProtocolError: the caller is in `barred`.
    """
    if _BARRED.get():
        raise LocalProtocolError(f"{file}: code of users does not run here: {_BARRED.get()}")
    digest = keep_text(text)
    if digest in _MODULES:
        return _MODULES[digest]
    shown = f"<{file}@{digest[:12]}>"
    module = ModuleType(f"planetary_text_{digest[:12]}")
    module.__file__ = shown
    source = text.decode(errors="replace")
    linecache.cache[shown] = (len(source), None, source.splitlines(keepends=True), shown)  # source lines of tracebacks
    try:
        tree = ast.parse(text, shown)
        _refuse_neighbours(file, tree, folder)
        sys.modules[module.__name__] = module
        exec(compile(tree, shown, "exec"), vars(module))  # the operator asked for it: see docs/trust.md
    except BaseException as error:
        sys.modules.pop(module.__name__, None)
        if isinstance(error, PlanetaryError) or not isinstance(error, Exception | SystemExit):
            raise
        raise _failure(file, error) from error
    _MODULES[digest] = module
    return module


def _refuse_neighbours(file: str, tree: ast.Module, folder: Path | None) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." if node.level else node.module or ""]
        else:
            continue
        for name in names:
            top = name.partition(".")[0]
            if top == "planetary":
                continue
            files = [] if folder is None else [folder / f"{top}.py", folder / top / "__init__.py"]
            beside = any(path.is_file() for path in files)
            if not top or beside:
                raise UserError(
                    f"{file}, line {node.lineno}: it imports {top or 'a module'} from its own folder. A file of an "
                    "extension is sent to other machines alone: put all into one file, or into an installed package "
                    "with an entry point (docs/extending.md)"
                )


def file_of_module(name: str) -> str | None:
    """Return the file of an importable module, without importing module or packages; None: there is none."""
    find_modules_here()
    search: Sequence[str] | None = None
    spec = None
    for depth in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:depth]), search)
        if spec is None:
            return None
        search = list(spec.submodule_search_locations or ())
    return spec.origin if spec is not None else None


def find_modules_here() -> None:
    """Let modules of the current folder be imported, as `python my_program` finds those beside it."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _import(name: str) -> ModuleType:
    find_modules_here()
    try:
        return importlib.import_module(name)
    except PlanetaryError:
        raise
    except (Exception, SystemExit) as error:
        raise _failure(name, error) from error


def _register_package(package: str, folder: Path) -> None:
    if package not in sys.modules:
        made = ModuleType(package)
        made.__path__ = [str(folder)]
        sys.modules[package] = made


def _forget_neighbours(folder: Path) -> None:
    """Let files of `folder` be read again, and hide those of other folders whose names are here, too."""
    for name, of in list(_NEIGHBOURS.items()):
        top = name.partition(".")[0]
        if of == folder or (folder / f"{top}.py").exists() or (folder / top).is_dir():
            sys.modules.pop(name, None)
            del _NEIGHBOURS[name]


def _failure(place: str, error: BaseException) -> UserError:
    if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
        return UserError(f"there is no module {place}; a file is given as path/to/file.py")
    where = line_of(error)
    cause = f"it called exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
    return UserError(f"{place} failed while it was loaded: {cause}{f' ({where})' if where else ''}")


def line_of(error: BaseException) -> str:
    """Return file and line of the last frame that is the user's; "" where none is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    loaders = (__file__, "<frozen")
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(loaders)]
    frames = [one for one in frames if "/importlib/" not in one.filename]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    frames = own or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
