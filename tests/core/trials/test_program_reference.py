"""What travels of a program's reference execution finds a wrong result, and spares what rounding decides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from planetary.core.errors import CompileError, TrustError
from planetary.core.step import RATE, FunctionSpec, ProgramSpec
from planetary.core.tensors import TensorSpec
from planetary.core.trials import program as program_trial
from planetary.core.trials.program import (
    FunctionTrial,
    ProgramReference,
    decode_program_reference,
    encode_program_reference,
    make_reference,
)

WIDE, ROWS = (128, 96), (160, 64)
W, MEAN, G = TensorSpec("w", "f32", WIDE), TensorSpec("mean.w", "f32", WIDE), TensorSpec("gradient.w", "f32", WIDE)
X, TOKENS = TensorSpec("x", "f32", ROWS), TensorSpec("tokens", "i32", (160,))
COUNT = TensorSpec("count", "i32", ())
UPDATE = FunctionSpec((W, MEAN, COUNT, RATE, G), (W, MEAN, COUNT, TensorSpec("norm", "f32", ())))
ROUTE = FunctionSpec((X, TOKENS), (TensorSpec("gates", "f32", ROWS), TensorSpec("loss", "f32", ())))
SPEC = ProgramSpec("made up", {"update": UPDATE, "route": ROUTE}, 50, "7" * 64)
Arrays = dict[str, np.ndarray]


def program(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
    if name == "update":
        mean = 0.9 * given["mean.w"] + 0.1 * given["gradient.w"]
        norm = np.linalg.norm(given["gradient.w"])
        moved = {"w": given["w"] - given["rate"] * mean, "mean.w": mean}
        return moved | {"count": given["count"] + 1, "norm": np.asarray(norm, np.float32)}
    x = given["x"] * (1 + given["tokens"][:, None]).astype(np.float32)
    gates = np.where(x >= np.sort(x, axis=1)[:, -4:-3], x, np.float32(0))
    return {"gates": gates, "loss": np.asarray(np.square(gates).mean(), np.float32)}


def noisy(by: float) -> Callable[[str, Mapping[str, np.ndarray]], Arrays]:
    """The same program as another compiler executes it."""
    rng = np.random.default_rng(4)

    def run(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
        results = program(name, given)
        return {
            n: (v * (1 + by * rng.standard_normal(v.shape))).astype(v.dtype) if n != "count" else v
            for n, v in results.items()
        }

    return run


def changed(result: str, change: Callable[[np.ndarray], object]) -> Callable[[str, Mapping[str, np.ndarray]], Arrays]:
    def run(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
        results = {n: np.array(v) for n, v in program(name, given).items()}
        if result in results:
            change(results[result])
        return results

    return run


@pytest.fixture(params=["elements", "sums"])
def reference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProgramReference:
    """With every element, and with sums over blocks of 64."""
    if request.param == "sums":
        monkeypatch.setattr(program_trial, "REFERENCE_BYTES", 4 * (2 * 192 + 160))
    made = make_reference(SPEC, program, factor_rounding=2.0**-23, against="XLA")
    assert made.functions["update"][0].block == (64 if request.param == "sums" else 1)
    return made


def worst(reference: ProgramReference, run: Callable[[str, Mapping[str, np.ndarray]], Arrays]) -> tuple[float, str]:
    """As a worker finds it, from the bytes alone."""
    sent = decode_program_reference(encode_program_reference(reference), SPEC.functions)
    errors: dict[str, float] = {}
    for name, function in SPEC.functions.items():
        errors |= sent.errors(name, function, run)
    name = max(errors, key=lambda one: errors[one])
    return errors[name], name


def test_arguments_are_the_same_bits_on_every_machine() -> None:
    drawn = FunctionTrial(SPEC.stablehlo_digest, "update", UPDATE).arguments(50)
    data = b"".join(drawn[spec.name].tobytes() for spec in UPDATE.arguments)
    assert hashlib.sha256(data).hexdigest()[:16] == "3d195cf3c21dd1db"
    assert drawn["mean.w"].min() > 0  # the optimizer's, and not the parameter that it belongs to
    assert drawn["w"].min() < 0
    assert drawn["count"] == 3
    tokens = FunctionTrial(SPEC.stablehlo_digest, "route", ROUTE).arguments(50)["tokens"]
    assert (tokens.dtype, tokens.min() >= 0, tokens.max() < 50) == (np.int32, True, True)


def test_rounding_of_a_good_device_is_accepted(reference: ProgramReference) -> None:
    assert worst(reference, program)[0] == 0
    assert 0 < worst(reference, noisy(1e-7))[0] < 0.1


def _sign(array: np.ndarray) -> None:
    flat = array.reshape(-1)
    place = int(np.argmax(np.abs(flat)))
    flat[place] = -flat[place]


def _rows(array: np.ndarray) -> None:
    array[[3, 90]] = array[[90, 3]]


def _tile(array: np.ndarray) -> None:
    array[64:80, 32:48] = 0


def _nan(array: np.ndarray) -> None:
    array.reshape(-1)[7] = np.nan


@pytest.mark.parametrize("change", [_sign, _rows, _tile, _nan])
@pytest.mark.parametrize("result", ["mean.w", "gates"])
def test_a_wrong_result_is_found_and_named(
    reference: ProgramReference, result: str, change: Callable[[np.ndarray], None]
) -> None:
    error, name = worst(reference, changed(result, change))
    assert not error <= 1
    assert name == f"{result} of {'update' if result == 'mean.w' else 'route'}"


def test_half_step_is_found_beside_large_parameters(reference: ProgramReference) -> None:
    def halved(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
        results = program(name, given)
        return results | ({"w": (results["w"] + given["w"]) / 2} if name == "update" else {})

    error, name = worst(reference, halved)
    assert error > 1
    assert name == "w of update"


def test_only_rows_rerouted_by_a_nudge_are_spared() -> None:
    """A token whose experts are nearly equally likely may go another way on another device."""

    drawn = FunctionTrial(SPEC.stablehlo_digest, "route", ROUTE).arguments(50)["x"]

    def turned(rows: int) -> Callable[[np.ndarray], object]:
        return lambda gates: np.negative(gates[:rows], out=gates[:rows])

    def close(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
        nudged = name == "route" and not np.array_equal(given["x"], drawn)
        return changed("gates", turned(4 if nudged else 0))(name, given)

    made = make_reference(SPEC, close, factor_rounding=2.0**-23, against="XLA")
    assert 0 < made.functions["route"][0].accepted.spared <= 2 * 4 * 4  # four gates of a row are not zero
    assert made.functions["update"][0].accepted.spared == 0
    assert made.errors("route", ROUTE, changed("gates", turned(4)))["gates of route"] <= 1
    assert made.errors("route", ROUTE, changed("gates", turned(16)))["gates of route"] > 1


def test_choices_are_compared_by_their_scores() -> None:
    """Of two scores that are equal but for rounding, a device may choose either; any other choice is wrong."""
    scores, ids = TensorSpec("scores", "f32", (160, 8)), TensorSpec("ids", "i32", (160, 8))
    rank = FunctionSpec((X,), (scores, ids), (("ids", "scores"),))
    spec = ProgramSpec("ranks", {"rank": rank}, 50, "8" * 64)

    def ranked(change: Callable[[np.ndarray], object]) -> Callable[[str, Mapping[str, np.ndarray]], Arrays]:
        def run(name: str, given: Mapping[str, np.ndarray]) -> Arrays:
            x = given["x"].copy()
            largest = np.argsort(-x, axis=1)
            rows = np.arange(len(x))
            for first, second in ((2, 3), (7, 8)):  # near ties, also of the last choice with one that is not chosen
                x[rows, largest[:, second]] = x[rows, largest[:, first]] * np.float32(1 - 1e-7)
            found = np.argsort(-x, axis=1, kind="stable")[:, :9].astype(np.int32)
            chosen = np.take_along_axis(x, found[:, :8], axis=1)
            change(found)
            return {"scores": chosen, "ids": np.ascontiguousarray(found[:, :8])}

        return run

    def swap(first: int, second: int) -> Callable[[np.ndarray], None]:
        def change(found: np.ndarray) -> None:
            found[:, [first, second]] = found[:, [second, first]]

        return change

    def error(change: Callable[[np.ndarray], object]) -> float:
        return made.errors("rank", rank, ranked(change))["ids of rank"]

    made = make_reference(spec, ranked(lambda found: None), factor_rounding=2.0**-23, against="XLA")
    assert error(lambda found: None) == 0
    assert error(swap(2, 3)) <= 1  # in every row
    assert error(swap(7, 8)) <= 1
    assert error(swap(0, 1)) > 1
    assert error(swap(0, 8)) > 1
    assert error(lambda found: found[:1, :2].fill(3)) == float("inf")
    assert error(lambda found: np.negative(found, out=found)) == float("inf")


def test_a_reference_that_is_not_finite_is_none() -> None:
    with pytest.raises(CompileError, match=r"XLA computes numbers that are not finite.*mean\.w of update"):
        make_reference(SPEC, changed("mean.w", _nan), factor_rounding=2.0**-23, against="XLA")


def test_bytes_that_are_no_reference_are_refused(reference: ProgramReference) -> None:
    data = encode_program_reference(reference)
    with pytest.raises(TrustError, match="cannot be read"):
        decode_program_reference(data[:-3], SPEC.functions)
    with pytest.raises(TrustError, match="'other' are missing"):
        decode_program_reference(data, {"other": ROUTE})
    with pytest.raises(TrustError, match="'route' are missing, or are of other results"):
        decode_program_reference(data, {"route": FunctionSpec(ROUTE.arguments, UPDATE.results[:2])})
