"""The table of operations: each stands in it exactly once, with a rule, as inactive, or as unsupported.

A *rule* receives a `ReverseSite` (the operation in the forward graph, and which inputs want a gradient) and the
cotangents of the results, emits the backward operations at the insertion point, and returns one contribution per input:
a value of the input's type, None for zero, or an `InPlace`. A *pattern* lets a rule stand for several operations at
once. An *inactive* operation has derivative zero everywhere it has one, or carries no numbers. An *unsupported* one
raises when a gradient has to pass through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from planetary.compiler import ir
from planetary.compiler.ir import Operation, Value


@dataclass(frozen=True)
class InPlace:
    """A contribution that is cheaper to write into an existing cotangent than to add to it.

    Attributes:
        onto: given the cotangent gathered so far, returns it with this contribution added.
    """

    onto: Callable[[Value], Value]


Contribution: TypeAlias = Value | InPlace | None


@dataclass(eq=False)
class ReverseSite:
    """One operation of the forward graph and the emission of its backward operations.

    Attributes:
        op: the operation.
        inputs: operands, then the outside values of the regions.
        results: results of the operation.
        needs: for every input, whether a gradient is needed.
        notes: scratch shared by all sites of one backward pass, for rules that work in pairs.
    """

    op: Operation
    inputs: list[Value]
    results: list[Value]
    needs: list[bool]
    notes: dict[Any, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.op.name

    @property
    def x(self) -> Value:
        """The first input."""
        return self.inputs[0]

    @property
    def y(self) -> Value:
        """The first result."""
        return self.results[0]


Rule: TypeAlias = Callable[[ReverseSite, list[Value | None]], Sequence[Contribution]]


@dataclass(frozen=True)
class RuleEntry:
    """How the differentiator treats one operation. Exactly one of `rule`, `inactive`, `unsupported` is
    set.
    """

    name: str
    rule: Rule | None = None
    inactive: str | None = None
    unsupported: str | None = None
    note: str = ""


Pattern: TypeAlias = Callable[[Operation], "tuple[list[Value], Rule] | None"]

Activity: TypeAlias = Callable[[Operation, Set[Value]], Sequence[Value]]

_entries: dict[str, RuleEntry] = {}
_activities: dict[str, Activity] = {}
_patterns: dict[str, list[tuple[str, Pattern]]] = {}


def _enter(entry: RuleEntry) -> None:
    if entry.name in _entries:
        raise AssertionError(f"{entry.name} stands in the rule table twice")
    _entries[entry.name] = entry


def entries() -> dict[str, RuleEntry]:
    """A copy of the table by operation name; custom calls and composites appear as `stablehlo.custom_call
    @name`.
    """
    return dict(_entries)


def key_of(op: Operation) -> str:
    """The name under which an operation stands in the table."""
    name: str = op.name
    if name == "stablehlo.custom_call":
        return f"{name} @{ir.text(op, 'call_target_name')}"
    if name == "stablehlo.composite":
        return f"{name} @{ir.text(op, 'name')}"
    return name


def find(op: Operation) -> RuleEntry | None:
    """The entry for an operation, or None if it stands nowhere."""
    return _entries.get(key_of(op))


def rule_many(*names: str, note: str = "") -> Callable[[Rule], Rule]:
    """Register a rule that receives the list of all result cotangents (None: zero)."""

    def register(function: Rule) -> Rule:
        for name in names:
            _enter(RuleEntry(name, rule=function, note=note))
        return function

    return register


def rule(*names: str, note: str = "") -> Callable[..., Any]:
    """Register a rule of a one-result operation: `function(site, cotangent)`."""

    def register(function: Callable[[ReverseSite, Value], Sequence[Contribution]]) -> Any:
        def many(site: ReverseSite, cotangents: list[Value | None]) -> Sequence[Contribution]:
            return function(site, cotangents[0])

        for name in names:
            _enter(RuleEntry(name, rule=many, note=note))
        return function

    return register


def inactive(reason: str, *names: str) -> None:
    """Register operations whose derivative is zero, or that carry no gradient."""
    for name in names:
        _enter(RuleEntry(name, inactive=reason))


def unsupported(reason: str, *names: str) -> None:
    """Register operations through which no gradient can pass; the reason names the remedy."""
    for name in names:
        _enter(RuleEntry(name, unsupported=reason))


def activity(*names: str) -> Callable[[Activity], Activity]:
    """Register a function that returns which results of an operation with regions change with the values in a set.

    Without one, all of an operation's results count as changing with any input.
    """

    def register(function: Activity) -> Activity:
        _activities.update((name, function) for name in names)
        return function

    return register


def changing_results(op: Operation, values: Set[Value]) -> Sequence[Value]:
    """The results of an operation a change of `values`, some of which it uses, can reach."""
    find = _activities.get(op.name)
    return list(op.results) if find is None else find(op, values)


def pattern(name: str, root: str) -> Callable[[Pattern], Pattern]:
    """Register a way to see several operations as one function with a separate rule.

    Args:
        name: the function.
        root: the operation with the function's result. The decorated function gets such an operation and returns the
            function's arguments and the rule, or None if the operation is something else. The rule's site has these
            arguments as inputs; values in between get no cotangent from this result.
    """

    def register(find: Pattern) -> Pattern:
        _patterns.setdefault(root, []).append((name, find))
        return find

    return register


def patterns() -> list[str]:
    """The names of all registered patterns, in order of registration by root."""
    return [name for entries in _patterns.values() for name, _ in entries]


def match_pattern(op: Operation) -> tuple[list[Value], Rule] | None:
    """The arguments and the rule of the function whose result `op` makes, if a pattern knows it."""
    for _, find in _patterns.get(op.name, ()):
        found = find(op)
        if found is not None:
            return found
    return None
