"""The loss function of a model's author as a function of arrays: random key, step and mode are arguments, too.

A loss may name, after the batch, `key` (a JAX random key, another one in each step), `step` (the number of the inner
step) and `train` (whether it is called by a training step). It may return, beside the value, new values of some given
arrays: *statistics*, such as running means. Evaluations are a separate graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from planetary.compiler.frontend.manifest import EVALUATION, KEY_SHAPE, LOSS, Role
from planetary.core.errors import CompileError

_KEY_TYPE = "threefry2x32"  # key type of `planetary.core.random_keys`
_TYPES: dict[str, jax.ShapeDtypeStruct] = {
    "key": jax.ShapeDtypeStruct(KEY_SHAPE, np.uint32),
    "step": jax.ShapeDtypeStruct((), np.int32),
}


@dataclass(frozen=True)
class LossInterface:
    """A loss function, and how it is called.

    Attributes:
        params: the parameters that `main` takes: statistics of integers or booleans as float32.
        main: takes the parameters, the arrays of a batch and those of `extra`; returns `results`.
        train: the same arguments; returns the loss in a training step alone, without statistics.
        extra: roles of the arguments after the batch.
        results: of `main`, as of `Manifest`.
        notes: sentences for reports.
    """

    params: Any
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
    """Return how a loss function is called; `name` is the model's, for notes and errors.

    An evaluation calls the loss without `key` and `step`. Where that fails, it has the key of seed 0 and step 0.

    Raises:
        CompileError: the loss returns a new value of something that is no array of `params`, or one of another type.
    """
    named = _optional_arguments(loss_fn, len(batch))
    roles: tuple[Role, ...] = ("key", "step")
    extra: tuple[Role, ...] = tuple(role for role in roles if role in named)

    def called(arguments: Sequence[Any], given: Sequence[str], *, train: bool) -> Any:
        data = [_as_given(arguments[0], params), *arguments[1 : 1 + len(batch)]]
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
        found = in_training(*arguments)
        loss = _loss_of(found)
        evaluation = _loss_of(in_evaluation(*arguments)) if named else loss
        new = _by_name(found[1]) if statistics else {}
        return loss, evaluation, *(_averaged(new[statistic]) for statistic in statistics)

    found = jax.eval_shape(in_training if named else loss_fn, params, *batch, *(_TYPES[role] for role in extra))
    statistics = _statistics(found, params, name)
    if not named and not statistics:
        plain = loss_fn if not _has_statistics(found) else lambda *arguments: loss_fn(*arguments)[0]
        return LossInterface(params, plain, plain, (), (LOSS,))
    carried = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _averaged(leaf) if dotted(path) in statistics else leaf, params
    )
    evaluated: tuple[Role, ...] = tuple(role for role in extra if named[role].default is inspect.Parameter.empty)
    notes: tuple[str, ...] = ()
    if len(evaluated) < len(extra):
        try:
            jax.eval_shape(in_evaluation, carried, *batch, *(_TYPES[role] for role in extra))
        except Exception as error:  # noqa: BLE001 - whatever the user's function raises; traced again with the key
            evaluated = extra
            reason = str(error).partition("\n")[0]
            notes = (f"{_fixed(name, evaluated)}: without, it fails ({type(error).__name__}: {reason})",)
    if evaluated and not notes:
        notes = (f"{_fixed(name, evaluated)}, for which its loss has no default",)
    results = (LOSS, EVALUATION, *statistics)
    return LossInterface(carried, both, lambda *arguments: _loss_of(in_training(*arguments)), extra, results, notes)


def flat_batch(loss_fn: Callable[..., Any], example_batch: Any) -> tuple[Callable[..., Any], list[Any], list[str]]:
    """Return a loss that takes the arrays of a batch one by one, these arrays, and their names.

    An array is called like the parameter of the loss that takes it, and inside a tree like the path to it, such as
    "batch.image"; of a batch that is one tree, the path alone. A loss without names of its own has `batch.0`, ….

    Args:
        loss_fn: takes the parameters, then the items of `example_batch`, or the mapping that it is.
        example_batch: a mapping, or a sequence of arrays and trees of arrays.
    """
    items = [example_batch] if isinstance(example_batch, Mapping) else list(example_batch)
    is_one_tree = len(items) == 1 and not hasattr(items[0], "shape")
    outer = [""] if is_one_tree else _positional_names(loss_fn, len(items))
    found, structures = [], []
    for name, item in zip(outer, items, strict=True):
        leaves, structure = jax.tree_util.tree_flatten_with_path(item)
        structures.append(structure)
        inner = [(dotted(path) if path else "", one) for path, one in leaves]
        found += [(f"{name}.{of}" if name and of else name or of, one) for of, one in inner]
    names, arrays = [name for name, _ in found], [one for _, one in found]
    if all(map(jax.tree_util.treedef_is_leaf, structures)):
        return loss_fn, arrays, names

    @functools.wraps(loss_fn)
    def flat(params: Any, *given: Any, **options: Any) -> Any:
        rest = iter(given)
        trees = (one.unflatten([next(rest) for _ in range(one.num_leaves)]) for one in structures)
        return loss_fn(params, *trees, **options)

    parameter = inspect.Parameter
    places = [parameter(f"array_{i}", parameter.POSITIONAL_ONLY) for i in range(1 + len(arrays))]
    optional = _optional_arguments(loss_fn, len(items)).values()
    vars(flat)["__signature__"] = inspect.Signature(
        [*places, *(one.replace(kind=parameter.KEYWORD_ONLY) for one in optional)]
    )
    return flat, arrays, names


def _positional_names(loss_fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of a loss's positional parameters after the first, or `batch.0`, `batch.1`, …."""
    given = getattr(loss_fn, "planetary_batch", None)
    if given is not None:
        return list(given)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        names = [p.name for p in inspect.signature(loss_fn).parameters.values() if p.kind in positional]
    except (TypeError, ValueError):
        names = []
    names = names[1 : 1 + count]
    return names if len(names) == count else [f"batch.{i}" for i in range(count)]


def dotted(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf of a tree, such as "layers.0.bias"; "params" where the tree is one array."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "params"


def _averaged(leaf: Any) -> Any:
    """Return a statistic as rounds average it: integers and booleans as float32."""
    exact = jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    return leaf if exact else jax.numpy.asarray(leaf, jax.numpy.float32)


def _as_given(params: Any, template: Any) -> Any:
    """Return parameters in the types of the author's, with statistics of integers rounded to the nearest."""

    def leaf(value: Any, like: Any) -> Any:
        exact = jax.numpy.issubdtype(like.dtype, jax.numpy.inexact)  # perhaps in double precision, for a comparison
        return value if exact or value.dtype == like.dtype else jax.numpy.round(value).astype(like.dtype)

    return jax.tree_util.tree_map(leaf, params, template)


def _has_statistics(found: Any) -> bool:
    return isinstance(found, tuple) and len(found) == 2


def _loss_of(found: Any) -> Any:
    return found[0] if _has_statistics(found) else found


def _statistics(found: Any, params: Any, model: str) -> tuple[str, ...]:
    """Return the names of the arrays of `params` a loss returns new values of, in the order of `params`."""
    if not _has_statistics(found):
        return ()
    held, given = _by_name(params), _by_name(found[1])
    for name, new in given.items():
        old = held.get(name)
        if old is None:
            raise CompileError(
                f"{model}: the loss must return one floating-point scalar, or (loss, statistics) with new values of "
                "arrays of its parameters, in the same tree, such as {'norm': {'mean': …}} (docs/models.md); "
                f"{name!r} is none of them. There are: {', '.join(held)}"
            )
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise CompileError(
                f"{model}: the loss returns the statistic {name!r} as {new.dtype}{list(new.shape)}, expected "
                f"{old.dtype}{list(old.shape)}, as it was given"
            )
    return tuple(name for name in held if name in given)


def _by_name(tree: Any) -> dict[str, Any]:
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _fixed(name: str, roles: Sequence[str]) -> str:
    values = {"key": "the random key of seed 0", "step": "step 0"}
    return f"every evaluation of {name} has {' and '.join(values[role] for role in roles)}"


def _optional_arguments(loss_fn: Callable[..., Any], count: int) -> dict[str, inspect.Parameter]:
    """Return those of `key`, `step` and `train` a loss takes beside the parameters and `count` arrays."""
    try:
        given = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # a builtin has no signature
        return {}
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][: 1 + count]
    named = [p for p in given if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in positional]
    return {p.name: p for p in named if p.name in ("key", "step", "train")}
