"""The loss function of a model's author as a function of arrays: random key, step and mode are its arguments, too.

A loss may name, after its batch, `key` (a JAX random key, another one in each step), `step` (the number of the inner
step) and `train` (whether it is called by a training step). Its evaluations are a graph of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from planetary.compiler.frontend.manifest import EVALUATION, KEY_SHAPE, LOSS, Role

_KEY_TYPE = "threefry2x32"  # which `planetary.core.random_keys` computes
_TYPES: dict[str, jax.ShapeDtypeStruct] = {
    "key": jax.ShapeDtypeStruct(KEY_SHAPE, np.uint32),
    "step": jax.ShapeDtypeStruct((), np.int32),
}


@dataclass(frozen=True)
class LossInterface:
    """A loss function, and how it is called.

    Attributes:
        main: takes the parameters, the arrays of a batch and those of `extra`; returns `results`.
        train: the same arguments; returns the loss in a training step alone.
        extra: roles of the arguments after the batch.
        results: of `main`, as of `Manifest`.
        notes: sentences for reports.
    """

    main: Callable[..., Any]
    train: Callable[..., Any]
    extra: tuple[Role, ...]
    results: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of the arguments of `extra`."""
        return [_TYPES[role] for role in self.extra]


def loss_interface(loss_fn: Callable[..., Any], params: Any, batch: Sequence[Any], name: str) -> LossInterface:
    """Return how a loss function is called; `name` is the model's, for notes.

    An evaluation calls the loss without `key` and `step`. Where that fails, it has the key of seed 0 and step 0.
    """
    named = _optional_arguments(loss_fn, len(batch))
    if not named:
        return LossInterface(loss_fn, loss_fn, (), (LOSS,))
    roles: tuple[Role, ...] = ("key", "step")
    extra: tuple[Role, ...] = tuple(role for role in roles if role in named)

    def called(arguments: Sequence[Any], given: Sequence[str], *, train: bool) -> Any:
        data = arguments[: 1 + len(batch)]
        values: dict[str, Any] = dict(zip(extra, arguments[1 + len(batch) :], strict=True))
        options: dict[str, Any] = {role: values[role] for role in given}
        if "key" in options:
            options["key"] = jax.random.wrap_key_data(options["key"], impl=_KEY_TYPE)
        if "train" in named:
            options["train"] = train
        return loss_fn(*data, **options)

    def in_training(*arguments: Any) -> Any:
        return called(arguments, extra, train=True)

    def in_evaluation(*arguments: Any) -> Any:
        return called(arguments, evaluated, train=False)

    def both(*arguments: Any) -> Any:
        return in_training(*arguments), in_evaluation(*arguments)

    evaluated: tuple[Role, ...] = tuple(role for role in extra if named[role].default is inspect.Parameter.empty)
    notes: tuple[str, ...] = ()
    if len(evaluated) < len(extra):
        try:
            jax.eval_shape(in_evaluation, params, *batch, *(_TYPES[role] for role in extra))
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises; traced again with the key
            evaluated = extra
            reason = str(error).partition("\n")[0]
            notes = (f"{_fixed(name, evaluated)}: without, it fails ({type(error).__name__}: {reason})",)
    if evaluated and not notes:
        notes = (f"{_fixed(name, evaluated)}, for which its loss has no default",)
    return LossInterface(both, in_training, extra, (LOSS, EVALUATION), notes)


def _fixed(name: str, roles: Sequence[str]) -> str:
    values = {"key": "the random key of seed 0", "step": "step 0"}
    return f"every evaluation of {name} has {' and '.join(values[role] for role in roles)}"


def _optional_arguments(loss_fn: Callable[..., Any], count: int) -> dict[str, inspect.Parameter]:
    """Return those of `key`, `step` and `train` that a loss takes beside its parameters and `count` arrays."""
    try:
        given = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        return {}
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: 1 + count]
    named = [p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in positional]
    return {p.name: p for p in named if p.name in ("key", "step", "train")}
