"""Extension points: the objects of one kind, found by name, whoever wrote them.

Three kinds of name, in this order:

- `file.py:Name`: a class in a file of the user. The file is read once and known by the digest of its text.
- a built-in name: the attribute `name` of a class in the modules of the kind. There is no table: a class is found by
  being there.
- the name of an entry point in the kind's group, of a package installed on the machine.

A file's code may go to other machines. `pin` turns `file.py:Name` into `file.py:Name@digest`, a name of the same class
everywhere, found only where the text of this digest was loaded: by `pin` itself at the gateway, and by
`user_code.load_text` on a worker whose operator allows code of the gateway.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, TypeVar, cast

import msgspec

from planetary.core.errors import LocalProtocolError, PlanetaryError, UserError, did_you_mean
from planetary.core.user_code import keep_text, load_text, loaded_module

T = TypeVar("T")

OWN = '"file.py:Name" of your own'
_PLACE = re.compile(r"(?s)(?P<file>.+\.py):(?P<name>[^\W\d]\w*)")
_PINNED = re.compile(r"(?P<file>[^/\\:@]+\.py):(?P<name>[^\W\d]\w*)@(?P<digest>[0-9a-f]{64})")


class PinnedFile(msgspec.Struct, frozen=True):
    """A file whose class a run uses.

    Attributes:
        file: its name, without folders.
        digest: SHA-256 of its text, in hex.
    """

    file: str
    digest: str


class Chosen(msgspec.Struct, frozen=True):
    """An object as it travels.

    Attributes:
        name: pinned, of its class.
        values: arguments of the class: the keys of a section that it declares in `keys`.
    """

    name: str
    values: dict[str, Any] = {}


class Registry(Generic[T]):
    """The objects of one kind.

    Attributes:
        kind: in words: "codec".
        group: of the entry points.
        families: the "module:function" of each family, whose function makes a class of the text behind `family:`.
        apart: whether a user's class runs in separate processes only, so that the gateway does not run the file.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        base: str,
        modules: Sequence[str],
        but: Sequence[str] = (),
        *,
        apart: bool = False,
        families: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is imported before a name is looked up.

        Args:
            kind: in words.
            group: of the entry points.
            base: "module:Class", the interface, which every class of the kind is derived from. With a class method
                `of_function`, a function may stand in place of a class.
            modules: of the built-in classes; "package.*" are all modules in a package.
            but: modules of the package that are not imported.
            apart, families: as the attributes.
        """
        self.kind, self.group, self.apart, self.families = kind, group, apart, families or {}
        self._base, self._modules, self._but = base, tuple(modules), tuple(but)

    @functools.cached_property
    def built_in(self) -> dict[str, type[T]]:
        """Built-in classes by name, in the order of their modules."""
        found: dict[str, type[T]] = {}
        for module in map(importlib.import_module, self._module_names()):
            for value in vars(module).values():
                own = isinstance(value, type) and value.__module__ == module.__name__
                if own and isinstance(name := vars(value).get("name"), str):
                    found[name] = cast("type[T]", value)
        return found

    def names(self) -> list[str]:
        """Return the names of the built-in classes and of the entry points."""
        points = (point.name for point in importlib.metadata.entry_points(group=self.group))
        return [*self.built_in, *sorted(set(points) - self.built_in.keys())]

    def check_name(self, name: str, also: Sequence[str] = ()) -> None:
        """Raise `UserError` for the name of no class, and for no place in a file. No code of a user is run.

        `also`: values that stand beside the names.
        """
        if name in also or _PLACE.fullmatch(name) or _PINNED.fullmatch(name) or self._family(name):
            return
        if name not in self.built_in and name not in self.names():
            known = [*also, *self.names(), *(f"{family}:NAME" for family in self.families)]
            raise UserError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, known)} There are {', '.join(known)}; others are "
                f"entry points of the group {self.group!r}, and {OWN}"
            )

    def declared(self, name: str) -> type[T] | None:
        """Return the class of a name for its declarations; None: it is in a user's file, which is not run for that."""
        return None if _PLACE.fullmatch(name) else self.find(name)

    def find(self, name: str) -> type[T]:
        """Return the class of a name; a user's file is run.

        Raises:
            UserError: there is none, it cannot be loaded, or it is no class of this kind.
            LocalProtocolError: a pinned file was not loaded here.
        """
        if pinned := _PINNED.fullmatch(name):
            module = loaded_module(pinned["digest"])
            if module is None:
                raise LocalProtocolError(f"{name}: the file of this digest was not loaded here")
            return self._class(vars(module).get(pinned["name"]), name)
        if place := _PLACE.fullmatch(name):
            path = Path(place["file"])
            return self._class(vars(load_text(path.name, _read(path), folder=path.parent)).get(place["name"]), name)
        if family := self._family(name):
            module, _, function = family.partition(":")
            return cast("type[T]", getattr(importlib.import_module(module), function)(name.partition(":")[2]))
        if name in self.built_in:
            return self.built_in[name]
        self.check_name(name)
        point = next(iter(importlib.metadata.entry_points(group=self.group, name=name)))
        try:
            return self._class(point.load(), name)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.kind} {name!r}: the entry point {point.value} cannot be loaded: {error}") from error

    def pin(self, name: str) -> str:
        """Return a name of the same class on every machine; a user's file is named with a digest.

        Raises as `find`.
        """
        place = _PLACE.fullmatch(name)
        if place is None:
            return name
        if not self.apart:
            self.find(name)
        path = Path(place["file"])
        return f"{path.name}:{place['name']}@{keep_text(_read(path))}"

    def chosen(self, name: str, section: msgspec.Struct) -> Chosen:
        """Return the object of a name with the values of its `keys` in a section of the configuration.

        Raises as `find`.
        """
        keys, fields = getattr(self.find(name), "keys", ()), type(section).__struct_fields__
        if unknown := sorted(set(keys) - set(fields)):
            raise UserError(f"{self.kind} {name}: its keys {', '.join(unknown)} are not among {', '.join(fields)}")
        return Chosen(self.pin(name), {key: getattr(section, key) for key in keys})

    def make(self, chosen: Chosen) -> T:
        """Return a new object. Raises as `find`, and `UserError` where the class does not take its values."""
        try:
            return self.find(chosen.name)(**chosen.values)
        except PlanetaryError:
            raise
        except Exception as error:
            shown = ", ".join(f"{key} = {value!r}" for key, value in chosen.values.items())
            raise UserError(
                f"{self.kind} {chosen.name}: it cannot be made with {shown or 'no arguments'}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _family(self, name: str) -> str:
        """Return the function of a name's family; "": the name is in none."""
        head, colon, _ = name.partition(":")
        return self.families.get(head, "") if colon else ""

    def _class(self, found: Any, name: str) -> type[T]:
        module, _, base_name = self._base.partition(":")
        base = getattr(importlib.import_module(module), base_name)
        if isinstance(found, FunctionType) and hasattr(base, "of_function"):
            return base.of_function(found)
        if not isinstance(found, type) or not issubclass(found, base):
            what = "no class" if not isinstance(found, type) else f"no {base_name}"
            raise UserError(
                f"{self.kind} {name}: {what}; expected a class derived from planetary.extend.{base_name} "
                "(docs/extending.md)"
            )
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise UserError(f"{self.kind} {name}: the class lacks {', '.join(missing)} (docs/extending.md)")
        return cast("type[T]", found)

    def _module_names(self) -> Iterator[str]:
        for module in self._modules:
            package = module.removesuffix(".*")
            if package == module:
                yield module
                continue
            path = importlib.import_module(package).__path__
            yield from (f"{package}.{one.name}" for one in pkgutil.iter_modules(path) if one.name not in self._but)


def files_of(names: Iterable[str]) -> tuple[PinnedFile, ...]:
    """Return the files of the pinned names among these, each once."""
    return tuple(sorted({file for name in names if (file := pinned_file(name)) is not None}, key=lambda one: one.file))


def pinned_file(name: str) -> PinnedFile | None:
    """Return the file of a pinned name; None for any other name."""
    pinned = _PINNED.fullmatch(name)
    return None if pinned is None else PinnedFile(pinned["file"], pinned["digest"])


def file_of(name: str) -> str | None:
    """Return the path of a user's file a name is in; None: it is in none."""
    place = _PLACE.fullmatch(name)
    return None if place is None else place["file"]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path.absolute()}: {error.strerror or error}") from error
