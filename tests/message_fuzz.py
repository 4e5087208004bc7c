"""Random valid messages of a protocol: every field has a value of its type, mostly one that matters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from planetary.wire.message import Message

INTEGERS = (0, 1, 2, 3, -1, 7, 255, 2**31, 2**53, 2**63 - 1)
TEXTS = ("", "a", "a/0", "p1", "0" * 64, "a" * 64, "\x00", "é" * 40)
FLOATS = (0.0, -1.0, 1.0, 1e-300, 1e300, 0.5)


class RandomMessages:
    """Draws messages of some classes; `integers` and `texts` are values that the receiver knows."""

    def __init__(self, seed: int, integers: Iterable[int] = (), texts: Iterable[str] = ()) -> None:
        self.random = random.Random(f"messages {seed}")
        self.integers, self.texts = [*INTEGERS, *integers], [*TEXTS, *texts]

    def of(self, kind: type[Message]) -> Message:
        """Draw a message of a class; a message that its class refuses is drawn again."""
        while True:
            try:
                return msgspec.convert(msgspec.to_builtins(self._of(types.type_info(kind), 0)), kind)
            except (msgspec.ValidationError, OverflowError):
                continue

    def _of(self, info: Any, depth: int) -> Any:
        draw = self.random
        match info:
            case types.IntType():
                return draw.choice(self.integers)
            case types.FloatType():
                return draw.choice(FLOATS)
            case types.BoolType():
                return draw.random() < 0.5
            case types.StrType():
                return draw.choice(self.texts)
            case types.BytesType():
                return bytes(draw.randrange(4))
            case types.LiteralType():
                return draw.choice(info.values)
            case types.EnumType():
                return draw.choice(list(info.cls)).value
            case types.NoneType():
                return None
            case types.UnionType():
                return self._of(draw.choice(info.types), depth)
            case types.TupleType():
                return [self._of(one, depth + 1) for one in info.item_types]
            case types.VarTupleType() | types.ListType() | types.SetType() | types.FrozenSetType():
                return [self._of(info.item_type, depth + 1) for _ in range(draw.randrange(3))]
            case types.DictType():
                return {self._of(info.key_type, depth): self._of(info.value_type, depth + 1) for _ in range(2)}
            case types.StructType():
                fields = {field.encode_name: self._of(field.type, depth + 1) for field in info.fields}
                return {**({info.tag_field: info.tag} if info.tag_field else {}), **fields}
            case types.AnyType():
                return None
            case _:
                raise TypeError(f"no values of {info}")


def bombard(
    tell: Callable[[Message], object], kinds: Sequence[type[Message]], source: RandomMessages, count: int
) -> None:
    """Send `count` random messages; an exception names the message that caused it."""
    for number in range(count):
        message = source.of(kinds[number % len(kinds)])
        try:
            tell(message)
        except BaseException as error:
            error.add_note(f"message {number}: {msgspec.json.encode(message).decode()[:400]}")
            raise
