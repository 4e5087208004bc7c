"""Compares a model at import with the author's framework: the loss, and every parameter's gradient.

The expected values are the framework's own (`frontend.author`), on the first batch and on a second one of other values.
They are compared in float32, in double precision if they differ there, and with the author's own change under a
rounding of the parameters where double precision is not possible. A StableHLO file comes without an author: there,
finite differences of the loss along random directions are compared with the gradient.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from planetary.compiler import ir
from planetary.compiler.autodiff.differentiate import value_and_gradients
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.author import Author
from planetary.compiler.frontend.export import Model
from planetary.compiler.frontend.manifest import LOSS
from planetary.compiler.frontend.markers import CUSTOM_VJP, STOP_GRADIENT
from planetary.compiler.rewrites.precision import promoted
from planetary.compiler.step.train_step import with_source_line
from planetary.core.errors import CompileError, PlanetaryError, UnsupportedOpError
from planetary.core.meaning import Meaning
from planetary.core.tensors import host_dtype

log = logging.getLogger(__name__)

LARGEST_COST = 10**13
"""Operations of a training step (six per parameter and element of the first input) up to which a model is compared."""

LARGEST_SLOPE_COST = 10**12
"""The same for finite differences, which take the loss a dozen times."""

TOLERANCES = {"f32": 1e-4, "f64": 1e-6}
"""Accepted difference, relative to the largest element of a gradient, or to the loss."""

ROUNDING = {"f32": 2e-7, "f64": 1e-13}
"""Accepted difference relative to the largest element of all gradients: the rounding of terms that cancel out."""

NOISE = 4
"""Accepted difference as a multiple of the author's own change under other roundings of the parameters."""

SLOPE_TOLERANCE = 0.05
"""Accepted relative difference of a finite difference and the slope the gradient gives."""


_HELD = ("param", "buffer", "statistic")  # roles of arguments a model comes with


class _Values(dict[str, np.ndarray]):
    """Gradients by name; the loss is under `LOSS`."""


@dataclass(frozen=True)
class _Difference:
    relative: float
    name: str
    found: float
    expected: float


@dataclass(frozen=True)
class Comparison:
    """A model's loss and gradients against its author's.

    Attributes:
        meaning: the result.
        first: loss, and norm of all gradients, of the first batch at the initial values; None: neither was computed.
    """

    meaning: Meaning
    first: tuple[float, float] | None = None


def with_checked_meaning(model: Model, batch: Sequence[np.ndarray] | None = None) -> Model:
    """Return the model with the result of `check_meaning` in the manifest."""
    meaning = check_meaning(model, batch)
    return dataclasses.replace(model, manifest=msgspec.structs.replace(model.manifest, meaning=meaning))


def check_meaning(model: Model, batch: Sequence[np.ndarray] | None = None) -> Meaning:
    """Return the result of `compare_meaning` alone."""
    return compare_meaning(model, batch).meaning


def compare_meaning(model: Model, batch: Sequence[np.ndarray] | None = None) -> Comparison:
    """Compare loss and gradients of a model with the author's.

    Args:
        model: with its author, or one loaded from files. A model whose manifest has the result of an earlier comparison
            of the same artifact keeps it.
        batch: arrays in the order of the model's inputs and targets; default: the batch it was exported with.

    Raises:
        CompileError: they differ; the text names the parameter and the first use.
    """
    known = model.manifest.meaning
    if known is not None and known.digest == model.digest and known.author != "none":
        return Comparison(known)
    first = _first_batch(model, batch)
    cost = 6 * model.weight_count * first[0].size
    if cost > (LARGEST_COST if model.author is not None else LARGEST_SLOPE_COST):
        return _unjudged(model, f"a step takes {cost:.1e} operations, too many for a comparison on this machine")
    second = _second_batch(first)
    if model.author is not None:
        return _against_author(model, model.author, [first, second])
    return _against_slopes(model, first)


def _unjudged(model: Model, why: str, found: _Values | None = None) -> Comparison:
    log.warning("gradients of %s are not compared with their source: %s", model.manifest.model, why)
    return Comparison(Meaning("none", "", 0, 0.0, "", model.digest, why), None if found is None else _size(found))


def _size(found: _Values) -> tuple[float, float]:
    """Return the loss and the norm of all gradients."""
    squares = (float(np.sum(np.square(value, dtype=np.float64))) for name, value in found.items() if name != LOSS)
    return float(found[LOSS]), math.sqrt(sum(squares))


# --- batches --------------------------------------------------------------------------------------------------


def _first_batch(model: Model, batch: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    specs = model.manifest.of_role("input", "target")
    given = model.example if batch is None else batch
    if len(given) != len(specs):
        given = [np.zeros(spec.shape, host_dtype(spec.dtype)) for spec in specs]
    extra = {"key": np.array([0, 7], np.uint32), "step": np.array(0, np.int32)}
    roles = [argument.role for argument in model.manifest.arguments if argument.role in extra]
    return [*map(np.asarray, given), *(extra[role] for role in roles)]


def _second_batch(first: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return other values: integers within the range of the first, at least 0 and 1; floats around their mean.

    Negative integers stay: they are no ids, but mark targets that do not count.
    """
    rng = np.random.default_rng(1)

    def other(part: np.ndarray) -> np.ndarray:
        if part.dtype == np.bool_:
            return rng.permutation(part.ravel()).reshape(part.shape)
        if np.issubdtype(part.dtype, np.integer):
            low, high = (max(int(part.min()), 0), int(part.max())) if part.size else (0, 0)
            return np.where(part < 0, part, rng.integers(low, max(high, low + 1) + 1, part.shape)).astype(part.dtype)
        wide = np.asarray(part, np.float64)
        return (wide.mean() + (wide.std() or 1.0) * rng.standard_normal(part.shape)).astype(part.dtype)

    return [other(part) for part in first]


# --- the author -----------------------------------------------------------------------------------------------


def _against_author(model: Model, author: Author, batches: Sequence[Sequence[np.ndarray]]) -> Comparison:
    values = _initial(model)
    text = _text(model)
    worst = _Difference(0.0, "", 0.0, 0.0)
    precision, first = "f32", None
    for number, batch in enumerate(batches, 1):
        values = values if number == 1 else _moved(model, values)
        expected = _expected(model, author, values, batch)
        found = _found(model, text, values, batch)
        first = first or _size(found)
        difference = _largest(found, expected, "f32")
        kind = "f32"
        if difference.relative > TOLERANCES["f32"]:
            kind, difference = _closer(model, author, text, values, batch, difference, (found, expected))
        if kind == "":
            raise CompileError(_refusal(model, difference, number))
        precision = precision if kind == "f32" else kind
        worst = max(worst, difference, key=lambda d: d.relative)
    meaning = Meaning("framework", precision, len(batches), worst.relative, worst.name, model.digest)
    return Comparison(meaning, first)


def _moved(model: Model, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return parameters around the initial ones, none of them zero: a zero hides the gradients of those before it."""
    rng = np.random.default_rng(3)
    trained = {spec.name for spec in model.manifest.of_role("param")}
    return {
        name: (v + 0.1 * _scale(v) * rng.standard_normal(v.shape)).astype(v.dtype) if name in trained else v
        for name, v in values.items()
    }


def _closer(  # noqa: PLR0917 - the two sides of a comparison
    model: Model,
    author: Author,
    text: str,
    values: Mapping[str, np.ndarray],
    batch: Sequence[np.ndarray],
    difference: _Difference,
    results: tuple[_Values, _Values],
) -> tuple[str, _Difference]:
    """Return how a difference in float32 is explained ("": not at all), and the difference that counts."""
    wide = {name: v.astype(np.float64) if v.dtype == np.float32 else v for name, v in values.items()}
    data = [part.astype(np.float64) if part.dtype == np.float32 else part for part in batch]
    try:
        # The graph that is trained, with wider numbers: another export in double precision would prove nothing of it.
        found = _run(model, promoted(text), wide, data, "f64")
        exact = _largest(found, _expected(model, author, wide, data), "f64")
        if exact.relative <= TOLERANCES["f64"]:
            return "f64", exact
    except Exception as error:  # noqa: BLE001 - an author, or numbers of 16 bits, need not allow double precision
        log.debug("no comparison in double precision: %s", error)
    found, expected = results
    _refuse_changing(model, expected, _expected(model, author, values, batch))
    noise = _conditioning(model, author, values, batch, expected)
    rounding = ROUNDING["f32"] * _largest_element(expected)
    unexplained = [name for name in expected if _distance(found[name], expected[name]) > NOISE * noise[name] + rounding]
    if not unexplained:
        return "conditioning", difference
    left = {name: found[name] for name in unexplained}, {name: expected[name] for name in unexplained}
    return "", _largest(_Values(left[0]), _Values(left[1]), "f32")


def _refuse_changing(model: Model, first: _Values, again: _Values) -> None:
    """Raise `CompileError` where the author's own results are others when they are computed once more."""
    change = _largest(again, first, "f32")
    if change.relative > TOLERANCES["f32"]:
        raise CompileError(
            f"{model.manifest.model}: the framework's own {_words(change.name)} is {change.expected:.6g} at one call "
            f"and {change.found:.6g} at the next, with equal parameters, batch and key. The model keeps a state "
            "that is neither parameter nor buffer (a counter in Python, the time, random numbers of NumPy), which no "
            "compiled step has: keep it in a buffer, or let the loss take `step` or `key` (docs/meaning.md)"
        )


def _words(name: str) -> str:
    return "loss" if name == LOSS else f"gradient of {name!r}"


def _conditioning(
    model: Model,
    author: Author,
    values: Mapping[str, np.ndarray],
    batch: Sequence[np.ndarray],
    expected: _Values,
) -> dict[str, float]:
    """Return the author's largest change of each gradient when the parameters are rounded otherwise."""
    narrow = b"bf16" in model.located or any(a.dtype in ("bf16", "f16") for a in model.manifest.arguments)
    size = 2.0**-9 if narrow else 2.0**-22
    noise = dict.fromkeys(expected, 0.0)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        moved = {
            name: (v * (1 + size * rng.uniform(-1, 1, v.shape))).astype(v.dtype) if v.dtype == np.float32 else v
            for name, v in values.items()
        }
        changed = _expected(model, author, moved, batch)
        noise = {name: max(noise[name], _distance(changed[name], expected[name])) for name in expected}
    return noise


def _expected(model: Model, author: Author, values: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]) -> _Values:
    try:
        loss, gradients = author.loss_and_gradients(values, batch)
    except PlanetaryError:
        raise
    except Exception as error:  # whatever the author's framework raises
        raise CompileError(
            f"{model.manifest.model}: its own framework gives no gradient to compare with: {type(error).__name__}: "
            f"{error}. Mend the loss so that the framework differentiates it"
        ) from error
    found = _Values({LOSS: np.asarray(loss)})
    for spec in model.manifest.of_role("param"):
        gradient = gradients.get(spec.name)
        found[spec.name] = np.zeros(spec.shape) if gradient is None else np.asarray(gradient).reshape(spec.shape)
    return found


def _largest(found: _Values, expected: _Values, precision: str) -> _Difference:
    """Return the largest difference, relative to each gradient, or to what sums of terms leave that cancel out."""
    floor = ROUNDING[precision] / TOLERANCES[precision] * _largest_element(expected) or 1e-30
    differences = []
    for name, wanted in expected.items():
        given = found[name]
        size = float(np.nan_to_num(np.abs(wanted), nan=0.0, posinf=0.0).max(initial=0.0))
        relative = _distance(given, wanted) / max(size, floor)
        at = int(np.argmax(_apart(given, wanted))) if given.size else 0
        pair = (float(given.ravel()[at]), float(wanted.ravel()[at])) if given.size else (0.0, 0.0)
        differences.append(_Difference(relative, name, *pair))
    return max(differences, key=lambda difference: difference.relative)


def _largest_element(values: _Values) -> float:
    """Return the largest finite element of all gradients."""
    sizes = [np.nan_to_num(np.abs(v), nan=0.0, posinf=0.0).max(initial=0.0) for n, v in values.items() if n != LOSS]
    return float(max(sizes, default=0.0))


def _distance(given: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference; infinite where only one of the two is a number."""
    return float(_apart(given, wanted).max(initial=0.0))


def _apart(given: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        apart = np.where((given == wanted) | (np.isnan(given) & np.isnan(wanted)), 0.0, np.abs(given - wanted))
    return np.nan_to_num(apart, nan=np.inf, posinf=np.inf)


def _refusal(model: Model, difference: _Difference, number: int) -> str:
    if difference.name == LOSS:
        what = f"the loss is {difference.found:.7g}, but {difference.expected:.7g} in its own framework"
        where = ""
    else:
        what = (
            f"the gradient of {difference.name!r} differs from that of its own framework by {difference.relative:.2g} "
            f"of its largest element: {difference.found:.6g} where {difference.expected:.6g} is expected"
        )
        where = _first_use(model, difference.name)
    return (
        f"{model.manifest.model}: on batch {number} of the comparison at the import, {what}{where}. Nothing is trained "
        "from a graph that means something else. Look there for an operation with a derivative of its own, or "
        "with one of several at equal elements (topk, kthvalue, mode), and write "
        'it with plain operations or jax.custom_vjp, or give the parameter the role "buffer" (model.roles); '
        "docs/meaning.md has the kinds that are known, please report others"
    )


def _first_use(model: Model, name: str) -> str:
    """Return where a parameter is first used in the author's source, "" if that is unknown."""
    if not model.located:
        return ""
    position = [a.name for a in model.manifest.arguments].index(name)
    with ir.new_context():
        module = ir.parse_module(model.located)
        argument = ir.entry_block(ir.main_function(module)).arguments[position]
        lines = [ir.location_text(op) for op, _ in ir.uses_of(argument) if ir.has_source_line(op)]
    return f" (first used at {lines[-1]})" if lines else ""


# --- our graph ------------------------------------------------------------------------------------------------


def _positions(model: Model) -> list[int]:
    return [i for i, argument in enumerate(model.manifest.arguments) if argument.role == "param"]


def _text(model: Model) -> str:
    try:
        return value_and_gradients(model.stablehlo, _positions(model), model.manifest.results.index(LOSS))
    except UnsupportedOpError as error:
        raise with_source_line(model, error) from None


def _initial(model: Model) -> dict[str, np.ndarray]:
    """Return parameters and buffers as an author takes them: floats of less than 32 bits in float32."""
    types = {a.name: a.dtype for a in model.manifest.arguments}
    values = model.start | model.initial("buffer")

    def wide(name: str, value: np.ndarray) -> np.ndarray:
        if types[name] == "bf16":
            return (value.astype(np.uint32) << 16).view(np.float32).reshape(value.shape)
        return value.astype(np.float32) if types[name] == "f16" else value

    return {name: wide(name, value) for name, value in values.items()}


def _found(model: Model, text: str, values: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]) -> _Values:
    return _run(model, text, values, batch, "")


def _run(model: Model, text: str, values: Mapping[str, np.ndarray], batch: Sequence[np.ndarray], kind: str) -> _Values:
    """Run loss and gradients with XLA; `kind` is the type of all floats, "" for those of the manifest."""
    rest = iter(batch)
    arguments = []
    for argument in model.manifest.arguments:
        value = values[argument.name] if argument.role in _HELD else next(rest)
        dtype = kind if kind and argument.is_float else argument.dtype
        arguments.append(_as_argument(np.asarray(value), dtype))
    trained = model.manifest.of_role("param")
    results = [re.search(r"-> \(?tensor<(?:\d+x)*(\w+)>", text), *trained]
    loss_type = results[0].group(1) if isinstance(results[0], re.Match) else "f32"
    dtypes = [loss_type, *(kind or spec.dtype for spec in trained)]
    given = run_reference(text, "main", arguments, dtypes)
    numbers = [_as_numbers(value, dtype) for value, dtype in zip(given, dtypes, strict=True)]
    return _Values(zip([LOSS, *(spec.name for spec in trained)], numbers, strict=True))


def _as_argument(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        return (np.ascontiguousarray(value, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(value.shape)
    return np.ascontiguousarray(value).astype(host_dtype(dtype))


def _as_numbers(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bf16":
        value = (value.astype(np.uint32) << 16).view(np.float32).reshape(value.shape)
    return value.astype(np.float64 if dtype == "f64" else np.float32)


# --- without an author ----------------------------------------------------------------------------------------


def _against_slopes(model: Model, batch: Sequence[np.ndarray]) -> Comparison:
    """Compare the gradient with the loss's change along random directions, with two steps of different length."""
    is_marked = any(mark.encode() in model.stablehlo for mark in (CUSTOM_VJP, STOP_GRADIENT))
    values = _initial(model)
    trained = [spec.name for spec in model.manifest.of_role("param")]
    found = _found(model, _text(model), values, batch)
    forward = value_and_gradients(model.stablehlo, [], model.manifest.results.index(LOSS))

    def loss(step: float, direction: Mapping[str, np.ndarray]) -> float:
        moved = {name: (v + step * direction[name] if name in direction else v) for name, v in values.items()}
        return float(_run_loss(model, forward, moved, batch))

    worst, judged = 0.0, 0
    rng = np.random.default_rng(2)
    for _ in range(3):
        draws = {name: rng.standard_normal(values[name].shape) for name in trained}
        direction = {name: _uphill(found[name], draw, values[name]) for name, draw in draws.items()}
        slope = sum(float(np.vdot(found[n].astype(np.float64), direction[n].astype(np.float64))) for n in trained)
        measured = [(loss(h, direction) - loss(-h, direction)) / (2 * h) for h in (1e-2, 3e-3)]
        spread = abs(measured[0] - measured[1])
        size = max(abs(slope), *map(abs, measured), 1e-12)
        if not np.isfinite(size) or spread > SLOPE_TOLERANCE / 2 * size:
            continue  # the loss is not smooth along this direction, or rounding is as large as the change
        judged += 1
        apart = abs(measured[1] - slope) / size
        worst = max(worst, apart)
        if apart > SLOPE_TOLERANCE + spread / size:
            if is_marked:  # of a straight-through estimator the slope is another by intention
                return _unjudged(model, "its author is not here, and it has gradients of its author's own", found)
            raise CompileError(
                f"{model.manifest.model}: along a random direction the loss changes by {measured[1]:.6g}, but the "
                f"gradient says {slope:.6g}. Nothing is trained from a gradient that is not the loss's: export the "
                "model from its Python source, so that its own framework can be asked, and report the file"
            )
    if not judged:
        why = "its author is not here, and its loss is not smooth enough for finite differences"
        return _unjudged(model, why, found)
    return Comparison(Meaning("finite differences", "f32", 1, worst, "", model.digest), _size(found))


def _uphill(gradient: np.ndarray, draw: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return a random direction along which the loss rises; of any sign where the gradient is zero."""
    signed = np.where(gradient == 0, draw, np.sign(gradient) * np.abs(draw))
    return (signed * _scale(value)).astype(value.dtype)


def _scale(value: np.ndarray) -> float:
    return float(np.abs(value).mean()) or 0.02


def _run_loss(model: Model, text: str, values: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]) -> float:
    rest = iter(batch)
    arguments = [
        _as_argument(np.asarray(values[a.name] if a.role in _HELD else next(rest)), a.dtype)
        for a in model.manifest.arguments
    ]
    kind = re.search(r"-> \(?tensor<(\w+)>", text)
    dtype = kind[1] if kind else "f32"
    return float(_as_numbers(run_reference(text, "main", arguments, [dtype])[0], dtype))
