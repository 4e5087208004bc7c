"""Every function of a program on random numbers, and the results of a reference execution.

The sibling of `core.trials.step` for modules of separate functions, as those of mixtures are: the reference of an
artifact travels to every worker, and each repeats the comparison on its device. Arguments are not in it: they are drawn
again from the digest of the module.

How far a result may be off is measured where the reference is made: the reference runs a second time on arguments
nudged by a few roundings. A router sends a token whose experts are nearly equally likely another way then, which
changes some rows altogether; so many numbers are spared of the comparison, and no others. Choices, such as the ids of
the largest scores, are compared by the scores they choose among: of a near tie, a device may choose either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.errors import CompileError, TrustError
from planetary.core.step import GRADIENT, RATE, FunctionSpec, ProgramSpec
from planetary.core.tensors import TensorSpec, to_host_dtype
from planetary.core.trials.deviations import MOST_NOISE, NOISE_FACTOR, ROUNDING, ROUNDINGS, Accepted, as_float, error_of
from planetary.core.trials.drawn import (
    EXACT_ELEMENTS,
    REFERENCE_BYTES,
    TRIAL_RATE,
    ExpectedResult,
    block_sums,
    block_within,
    normal,
    random_words,
    uniform,
)

TOLERANCE = 0.05
"""Accepted error of a number, relative to the root mean square of the tensor's nonzero numbers.

Rounding makes 10⁻⁵ in float32. Where one token of a batch takes another way, every gradient changes a little.
"""
SPARED_SHARE = 8  # no more than one number in so many is spared
_SCALE = 0.1  # scale of normal arguments
_NUDGE = 2.0**-18  # relative, in float32: the rounding of a contraction over some thousand terms

Arrays = Mapping[str, np.ndarray]
Run = Callable[[str, Arrays], Arrays]
"""Runs a function of the program, by name, on arguments by name; returns the results by name."""


@dataclass(frozen=True)
class FunctionTrial:
    """One function of a program on random arguments.

    Attributes:
        digest: of the module, from which everything is drawn.
        name: of the function.
        function: signature of the function.
    """

    digest: str
    name: str
    function: FunctionSpec

    def arguments(self, integers_below: int) -> dict[str, np.ndarray]:
        """Return random arguments: bit for bit the same for the same module, on every machine.

        The state of an optimizer is positive and away from zero, as in a step's trial: the state is overwritten
        beside the parameters, and has no gradient.
        """
        names = {spec.name for spec in self.function.arguments}
        overwritten = {self.function.arguments[i].name for i in self.function.replaced}
        state = {one for one in overwritten if GRADIENT + one not in names}

        def made(tensor: TensorSpec) -> np.ndarray:
            if tensor == RATE:
                return np.array(TRIAL_RATE, np.float32)
            words = random_words(f"{self.digest} {self.name} {tensor.name}", tensor.size)
            if tensor.dtype not in ROUNDING:
                below = np.uint64(integers_below)
                drawn = np.full(tensor.shape, 3) if tensor.name in state else words % below
                return drawn.astype(tensor.zeros().dtype).reshape(tensor.shape)
            if tensor.name in state:
                drawn = (1e-3 + 1e-3 * uniform(words)).astype(np.float32)
            else:
                drawn = np.float32(_SCALE) * normal(words)
            return to_host_dtype(drawn, tensor.dtype).reshape(tensor.shape)

        return {tensor.name: made(tensor) for tensor in self.function.arguments}

    def nudged(self, arguments: Arrays, by: float) -> dict[str, np.ndarray]:
        """Return arguments of which every element is larger or smaller by this share of itself."""

        def made(tensor: TensorSpec) -> np.ndarray:
            values = arguments[tensor.name]
            if tensor.dtype not in ROUNDING or tensor == RATE:
                return values
            words = random_words(f"{self.digest} nudge {tensor.name}", tensor.size).reshape(tensor.shape)
            factors = np.where(words & np.uint64(1), np.float32(1 + by), np.float32(1 - by))
            return to_host_dtype(as_float(values, tensor.dtype).astype(np.float32) * factors, tensor.dtype)

        return {tensor.name: made(tensor) for tensor in self.function.arguments}

    def numbers(self, index: int, arguments: Arrays, results: Arrays, block: int) -> np.ndarray:
        """Return the compared numbers of a result: the changes of the elements, or sums over blocks of them.

        Changes are from the argument the result overwrites, or from 0.
        """
        result, replaced = self.function.results[index], self.function.replaced
        before = arguments[self.function.arguments[replaced[index]].name] if index < len(replaced) else None
        return block_sums(
            f"{self.digest} sign {self.name} {result.name}",
            as_float(results[result.name], result.dtype),
            None if before is None else as_float(before, result.dtype),
            block,
        )


class ProgramReference(msgspec.Struct, frozen=True):
    """The expected results of the trial of one program, for any device."""

    stablehlo: str  # digest of the module
    integers_below: int  # bound as in `ProgramSpec`
    functions: dict[str, tuple[ExpectedResult, ...]]  # expected results by function, in order
    against: str  # the execution it comes from, e.g. "XLA"

    def errors(self, name: str, function: FunctionSpec, run: Run) -> dict[str, float]:
        """Run one function; return by result, as `RESULT of FUNCTION`, errors as fractions of the accepted ones."""
        trial = FunctionTrial(self.stablehlo, name, function)
        given = trial.arguments(self.integers_below)
        found = run(name, given)
        errors, scores = {}, _scores_of(function)
        for i, (result, expected) in enumerate(zip(function.results, self.functions[name], strict=True)):
            numbers = trial.numbers(i, given, found, expected.block)
            if i in scores:
                among = self.functions[name][scores[i]].numbers
                error = choice_error(expected.numbers, numbers, among, result.shape[-1], expected.accepted.error)
            else:
                error = error_of(expected.numbers, numbers, expected.accepted)
            errors[f"{result.name} of {name}"] = error
        return errors


def make_reference(spec: ProgramSpec, run: Run, *, factor_rounding: float, against: str) -> ProgramReference:
    """Run every function twice and return the reference that travels to workers.

    Args:
        spec: of the program.
        run: the reference execution.
        factor_rounding: relative spacing of the factors of the program's contractions.
        against: name of the reference execution, for people.

    Raises:
        CompileError: a result is not finite.
    """
    exact = {name: {i for pair in _scores_of(f).items() for i in pair} for name, f in spec.functions.items()}
    sizes = (r.size for name, f in spec.functions.items() for i, r in enumerate(f.results) if i not in exact[name])
    block_of_large = block_within(REFERENCE_BYTES, sizes)
    nudge = factor_rounding / 2 if factor_rounding > ROUNDING["f32"] else _NUDGE
    functions = {}
    for name, function in spec.functions.items():
        trial = FunctionTrial(spec.stablehlo_digest, name, function)
        given = trial.arguments(spec.integers_below)
        nudged = trial.nudged(given, nudge)
        results, others = run(name, given), run(name, nudged)
        expected: list[ExpectedResult] = []
        scores, noise = _scores_of(function), {}
        for i, result in enumerate(function.results):
            block = block_of_large if result.size > EXACT_ELEMENTS and i not in exact[name] else 1
            numbers, beside = trial.numbers(i, given, results, block), trial.numbers(i, nudged, others, block)
            if not np.all(np.isfinite(numbers)):
                raise CompileError(
                    f"{against} computes numbers that are not finite on random arguments: result {result.name} of "
                    f"{name}. No device could be compared with them; report the model"
                )
            stored = as_float(results[result.name], result.dtype)
            rounding = ROUNDINGS * ROUNDING.get(result.dtype, 0.0) * float(np.max(np.abs(stored), initial=0.0))
            accepted = _accepted(numbers, beside, rounding * max(1.0, block**0.5 / 8))
            noise[i] = NOISE_FACTOR * float(np.max(np.abs(beside - numbers.astype(np.float64)), initial=0.0)) + rounding
            expected.append(ExpectedResult(numbers.astype("<f4").tobytes(), block, accepted))
        for i, scored in scores.items():
            expected[i] = msgspec.structs.replace(expected[i], accepted=Accepted(noise[scored]))
        functions[name] = tuple(expected)
    return ProgramReference(spec.stablehlo_digest, spec.integers_below, functions, against)


def _scores_of(function: FunctionSpec) -> dict[int, int]:
    """Return, by the place of a choice among results, the place of the scores."""
    place = {result.name: i for i, result in enumerate(function.results)}
    return {place[choice]: place[score] for choice, score in function.choices}


def choice_error(want: np.ndarray, have: np.ndarray, scores: np.ndarray, width: int, accepted: float) -> float:
    """Return how far a device's choices are off: the largest error of a score, as a fraction of the accepted one.

    The choice of each rank should have the score of that rank. Of a near tie, either order is right; two scores that
    are off in opposite directions change places across twice the error of one. The score of a choice beyond the
    expected ones is not known, but is no larger than the last of them.

    Args:
        want: ids of the largest scores, in rows of `width`.
        have: the same of a device.
        scores: of `want`, in descending order in each row.
        width: choices of a row.
        accepted: error of one score.
    """
    if np.array_equal(want, have):
        return 0.0
    worst = 0.0
    for expected, found, row in zip(*(one.reshape(-1, width) for one in (want, have, scores)), strict=True):
        known = dict(zip(expected.tolist(), row.tolist(), strict=True))
        chosen = found.tolist()
        if len(set(chosen)) < width or not min(chosen) >= 0:  # no choices at all
            return float("inf")
        worst = max(worst, *(abs(row[k] - known.get(one, row[-1])) for k, one in enumerate(chosen)))
    return float(worst) / (2 * accepted) if accepted > 0 else float("inf")


def _accepted(numbers: np.ndarray, beside: np.ndarray, rounding: float) -> Accepted:
    """Return the tolerance of the numbers of one result, which a nudge of the arguments turns into `beside`."""
    wide = numbers.astype(np.float64)
    size = float(np.sqrt(np.sum(wide * wide) / max(1, np.count_nonzero(wide))))
    apart = np.abs(beside - wide)
    noise = float(np.sqrt(np.mean(apart * apart))) if apart.size else 0.0
    error = max(TOLERANCE * size, min(NOISE_FACTOR * noise, MOST_NOISE * size)) + rounding
    unstable = int(np.count_nonzero(~(apart <= error)))
    return Accepted(error, min(2 * unstable, numbers.size // SPARED_SHARE))


def encode_program_reference(reference: ProgramReference) -> bytes:
    """Return the bytes, a function of the reference."""
    return msgspec.msgpack.encode(reference)


def decode_program_reference(data: bytes, functions: Mapping[str, FunctionSpec]) -> ProgramReference:
    """Reverse `encode_program_reference`.

    Raises:
        TrustError: the bytes are no reference of a program with these functions.
    """
    try:
        reference = decoding.from_msgpack(data, ProgramReference)
    except msgspec.MsgspecError as error:
        raise TrustError(f"the reference results of the program cannot be read: {error}") from error
    for name, function in functions.items():
        known = reference.functions.get(name, ())
        if not _are_of(function.results, known):
            raise TrustError(f"the reference results of function {name!r} are missing, or are of other results")
    if reference.integers_below < 1:
        raise TrustError(f"the reference results are of integers below {reference.integers_below}")
    return reference


def _are_of(results: Iterable[TensorSpec], expected: tuple[ExpectedResult, ...]) -> bool:
    specs = tuple(results)
    return len(specs) == len(expected) and all(e.fits(s.size) for s, e in zip(specs, expected, strict=True))
