"""Workers that forge: valid messages about other workers' tasks, other rounds, old attempts, with wrong tensors.

A forging worker works honestly beside forgeries, so a fault shows as damage and not as absence. It knows every message
of every worker of the cluster: the worst case. Some of its own messages are sent with other numbers in them: another
loss, more tokens than the lease has, another digest. NaN and infinity have no JSON form, so the largest numbers stand
in for them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import msgspec
import numpy as np

from planetary.wire.message import Message

Tensors = Mapping[str, np.ndarray]

IDENTITIES = frozenset(
    (
        *("task", "call", "round", "attempt", "version", "lease", "group", "seq", "revision", "base"),
        *("shard", "epoch", "layer", "fragment", "tier", "step", "first", "count", "progress"),
        *("outer_version", "opt_state_round"),
    )
)
"""Fields of messages that say what a message is about."""
PLUMBING = frozenset({"id", "task", "call", "payload", "artifact", "change", "weights"})
"""Fields that stay true in a worker's own messages: numbers that were given to it, and names of bytes."""
EDGES = (0, -1, 1, 2**31, 2**53, 2**63 - 1)
NUMBERS = (0.0, -0.0, -1.0, 1e-300, 1e6, 1e30, 3e38, -3e38, 1.7e308, -1.7e308)
COUNTS = (*EDGES, 2, 10**6, -(2**63), 10**30)
MOST_REMEMBERED = 20  # messages of a class, and values of a field, of all workers
SHARE = 0.5  # fraction of a forging worker's messages with forgeries after them
FALSIFIED = 0.25  # fraction of a forging worker's own messages with false values
VALUE = np.float32(1000.0)  # every number in forged tensors


def is_forged(tensors: Tensors) -> bool:
    """Whether a forger made these tensors up."""
    return all(bool(np.all(array == (VALUE if array.dtype.kind == "f" else 0))) for array in tensors.values())


@dataclass(frozen=True)
class Forged:
    """A forged message with tensors; None: it has none."""

    message: Message
    tensors: Tensors | None


@dataclass
class Forgery:
    """The forgers' knowledge of a cluster; one per cluster.

    Attributes:
        forgers: names of workers that forge.
        sent: forged messages that were sent, by class.
        false: false values that were sent in a worker's own messages, by class and field.
    """

    seed: int
    forgers: set[str] = field(default_factory=set)
    sent: dict[str, int] = field(default_factory=dict)
    false: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Draw from a separate source: a cluster without forgers has the story it had."""
        self._random = random.Random(f"forgeries {self.seed}")
        self._messages: dict[type[Message], deque[tuple[str, Message]]] = {}
        self._values: dict[str, deque[int]] = {}  # values by name of the field
        self._forms: dict[type[Message], dict[str, tuple[tuple[int, ...], np.dtype]]] = {}

    def observe(self, worker: str, message: Message) -> None:
        """Take note of a worker's message."""
        names = IDENTITIES.intersection(message.__struct_fields__)
        if not names:
            return
        self._messages.setdefault(type(message), deque(maxlen=MOST_REMEMBERED)).append((worker, message))
        for name in names:
            value = getattr(message, name)
            if isinstance(value, int):
                self._values.setdefault(name, deque(maxlen=MOST_REMEMBERED)).append(value)

    def observed(self, message: Message, tensors: Callable[[], Tensors]) -> Callable[[], Tensors]:
        """Return the source of a message's tensors, whose form is remembered."""

        def read() -> Tensors:
            found = tensors()
            self._forms[type(message)] = {name: (array.shape, array.dtype) for name, array in found.items()}
            return found

        return read

    def forge(self, worker: str) -> list[Forged]:
        """Return what a worker sends beside an honest message; mostly nothing, when it does not forge."""
        if worker not in self.forgers or not self._messages or self._random.random() >= SHARE:
            return []
        return [self._forged(worker) for _ in range(self._random.randint(1, 3))]

    def falsified(self, worker: str, message: Message) -> Message:
        """Return a worker's own message, in which values may be false when it forges."""
        if worker not in self.forgers or self._random.random() >= FALSIFIED:
            return message
        fields = {one.name: one for one in msgspec.structs.fields(message) if one.name not in PLUMBING}
        pools = {
            name: pool for name, one in sorted(fields.items()) if (pool := _pool(one.type, getattr(message, name)))
        }
        for name in self._random.sample([*pools], min(len(pools), self._random.choice((1, 1, 2)))):
            message = msgspec.structs.replace(message, **{name: self._random.choice(pools[name])})
            key = f"{type(message).__name__}.{name}"
            self.false[key] = self.false.get(key, 0) + 1
        return message

    def _forged(self, worker: str) -> Forged:
        sent = self._messages[self._random.choice(list(self._messages))]
        others = [message for name, message in sent if name != worker]
        own = [message for name, message in sent if name == worker]
        message = self._random.choice(others if others and (not own or self._random.random() < 0.7) else own)
        names = sorted(IDENTITIES.intersection(message.__struct_fields__))
        names = [name for name in names if not isinstance(getattr(message, name), str)]
        for name in self._random.sample(names, min(len(names), self._random.choice((0, 1, 1, 2)))):
            pool = (*self._values.get(name, ()), *EDGES)
            message = msgspec.structs.replace(message, **{name: self._random.choice(pool)})
        kind = type(message).__name__
        self.sent[kind] = self.sent.get(kind, 0) + 1
        return Forged(message, self._tensors(type(message)))

    def _tensors(self, kind: type[Message]) -> Tensors | None:
        form = self._forms.get(kind)
        if form is None:
            return None
        tensors = {
            name: (np.full(shape, VALUE, dtype) if dtype.kind == "f" else np.zeros(shape, dtype))
            for name, (shape, dtype) in form.items()
        }
        match self._random.choice(("same", "same", "same", "none", "fewer", "shape")):
            case "none":
                return None
            case "fewer" if len(tensors) > 1:
                tensors.pop(self._random.choice(sorted(tensors)))
            case "shape":
                name = self._random.choice(sorted(tensors))
                tensors[name] = tensors[name].reshape(-1)[:1]
            case _:
                pass
        return tensors


def _pool(kind: Any, value: object) -> tuple[object, ...]:
    """Return false values of a field of this type, which has this value; empty: it is left alone."""
    if get_origin(kind) is Literal:
        return tuple(other for other in get_args(kind) if other != value)
    match value:
        case bool():
            return (not value,)
        case int():
            return (*COUNTS, value + 1, value - 1, value * 1000)
        case float():
            return (*NUMBERS, -value, value * 1.5)
        case str() if len(value) >= 32 and set(value) <= set("0123456789abcdef"):  # a digest
            return (value[::-1], "0" * len(value))
        case _:
            return ()
