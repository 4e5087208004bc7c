"""Decoding into types, in any thread.

msgspec (0.22) builds the description of a Struct type at the type's first use, and shows it half-built to other threads
meanwhile: two threads that decode a type for the first time crash the process. Here one lock covers
the first use of every type; later uses take no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_building = threading.RLock()
_built: set[Any] = set()  # types whose descriptions are complete


@overload
def from_json(
    data: bytes | bytearray | memoryview | str, kind: type[T], *, dec_hook: Callable[[type, Any], Any] | None = None
) -> T: ...
@overload
def from_json(
    data: bytes | bytearray | memoryview | str, kind: Any, *, dec_hook: Callable[[type, Any], Any] | None = None
) -> Any: ...
def from_json(
    data: bytes | bytearray | memoryview | str, kind: Any, *, dec_hook: Callable[[type, Any], Any] | None = None
) -> Any:
    """Return the value of JSON text. Raises as `msgspec.json.decode`."""
    _build(kind)
    return msgspec.json.decode(data, type=kind, dec_hook=dec_hook)


@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Return the value of MessagePack bytes. Raises as `msgspec.msgpack.decode`."""
    _build(kind)
    return msgspec.msgpack.decode(data, type=kind)


@overload
def convert(value: Any, kind: type[T], *, strict: bool = True, str_keys: bool = False) -> T: ...
@overload
def convert(value: Any, kind: Any, *, strict: bool = True, str_keys: bool = False) -> Any: ...
def convert(value: Any, kind: Any, *, strict: bool = True, str_keys: bool = False) -> Any:
    """Return a value of plain objects as the type. Raises as `msgspec.convert`."""
    _build(kind)
    return msgspec.convert(value, kind, strict=strict, str_keys=str_keys)


@overload
def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...
@overload
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return a decoder for many values; any number of threads may use it."""
    with _building:
        return msgspec.json.Decoder(kind)


def _build(kind: Any) -> None:
    if kind not in _built:
        with _building:
            msgspec.msgpack.Decoder(kind)
            _built.add(kind)
