"""Checks a compiled artifact against a reference execution before anybody trains with it.

Compilers lie: a sign folded wrongly or a sum cut short makes a module that runs, converges a little and is
wrong. So one training step and one evaluation on random numbers are compared, tensor by tensor, with XLA's
execution of the same StableHLO. XLA is a compiler too: where the two differ and the step is small enough, the
StableHLO interpreter says which of them is wrong.

A model with bf16 activations rounds after every operation, and compilers differ in where: some keep float32 across
operations. The resulting distance of two right executions of one step depends on the model and the depth, so it is
measured: the step is run with all arithmetic in float32, once without any rounding and once with a rounding after every
operation. In float32 the distance is far below what is accepted, but for models with values of very different sizes, as
deep pretrained ones have. Where an artifact is not clearly within, the reference is run in double precision, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from planetary.compiler import ir, ops
from planetary.compiler.backends.artifact_manifest import ArtifactCache
from planetary.compiler.backends.iree import Artifact, compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import interpreter
from planetary.compiler.check.offender import VALUE_TOLERANCE, Execute, RefusedFunction, name_offender
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verification_report import VerifyReport, read_report, write_report
from planetary.compiler.ir import Operation, Type, Value
from planetary.compiler.rewrites.precision import CONTRACTIONS, coarsest_factor
from planetary.compiler.step.step_module import TrainStep, replaced_arguments
from planetary.core.errors import CompileError, TrustError
from planetary.core.step import RATE, STEP, StepSpec
from planetary.core.trials.deviations import (
    CHANGE_TOLERANCE,
    FACTOR_ROUNDINGS,
    NOISE_FACTOR,
    ROUNDING,
    ROUNDINGS,
    change_of,
    errors_of,
    noise_between,
    worst_of,
)
from planetary.core.trials.step import (
    TRIAL_RATE,
    TRIAL_STEP,
    ParameterValues,
    StepReference,
    StepRunner,
    Trial,
    decode_reference,
    draw_trial,
    encode_reference,
    make_reference,
    run_trial,
    values_of,
)

_MOVES = frozenset({
    "func.func",
    "func.return",
    "stablehlo.broadcast_in_dim",
    "stablehlo.concatenate",
    "stablehlo.constant",
    "stablehlo.reshape",
    "stablehlo.return",
    "stablehlo.select",
    "stablehlo.slice",
    "stablehlo.transpose",
})  # fmt: skip
_EXACT = _MOVES | CONTRACTIONS | {"stablehlo.convert"}
_VALUES = ("stablehlo.constant", "stablehlo.bitcast_convert")  # their results keep the type
_BODIES = ("func.func", "stablehlo.while", "stablehlo.case", "stablehlo.if")  # others' bodies are inside one operation
_BITS = {"bf16": (8, 7), "f16": (5, 10)}  # bits of exponent and mantissa


def rounds_between_operations(stablehlo: str | bytes) -> bool:
    """Whether a module does other arithmetic than contractions in bf16 or f16."""
    found: list[str] = []

    def visit(op: Operation) -> None:
        if op.name not in _EXACT and any(_is_narrow(value) for value in (*op.operands, *op.results)):
            found.append(op.name)

    with ir.new_context():
        ir.walk(ir.parse_module(stablehlo).operation, visit)
    return bool(found)


@dataclass(frozen=True)
class _Widening:
    """Arithmetic in a wider type.

    Attributes:
        narrow: names of the types it stands for.
        wide: that type, in the module's context.
        rounding: whether the result of every operation is rounded as in the narrow type.
    """

    narrow: frozenset[str]
    wide: Type
    rounding: bool = False

    def holds(self, value: Value) -> bool:
        return ir.is_tensor(value) and str(ir.element_of(value)) in self.narrow

    def retype(self, value: Value) -> None:
        if self.holds(value):
            value.set_type(ir.tensor(ir.shape_of(value), self.wide))


_NARROW = frozenset({"bf16", "f16"})


def widened(stablehlo: str | bytes, *, rounding: bool) -> str:
    """Return a module with f32 in place of bf16 and f16 arithmetic, with the same arguments and results.

    Constants and arguments keep their values, and results of functions are rounded. With `rounding`, so is the result
    of every operation (sums in the body of a reduction are not).
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        for function in ir.functions(module).values():
            _widen(function, _Widening(_NARROW, ir.f32(), rounding))
        ir.verify(module)
        return ir.to_text(module)


def doubled(stablehlo: str | bytes) -> str:
    """Return a module with f64 in place of f32 arithmetic, with the same arguments and results.

    Raises:
        CompileError: an operation has no form in double precision, such as a call of a library.
    """
    with ir.new_context():
        module = ir.parse_module(stablehlo)
        for function in ir.functions(module).values():
            _widen(function, _Widening(frozenset({"f32"}), ir.f64()))
        ir.verify(module)
        return ir.to_text(module)


def _widen(function: Operation, widening: _Widening) -> None:
    block = ir.entry_block(function)
    end = ir.terminator(block)
    returned = [value.type for value in end.operands]
    first = ir.operations(block)[0]
    found: list[Operation] = []
    ir.walk(function, found.append)
    for argument in block.arguments:
        if widening.holds(argument):
            _convert_behind(argument, first, widening)
    for op in found:
        if op.name == "func.func":
            continue
        for region in op.regions:
            for inner in region.blocks:
                for argument in inner.arguments:
                    widening.retype(argument)
        if op.name == "stablehlo.bitcast_convert":
            _convert_operands(op, widening)
        for result in op.results:
            if not widening.holds(result):
                continue
            if op.name in _VALUES:
                _convert_behind(result, _following(op), widening)
                continue
            element = str(ir.element_of(result))
            widening.retype(result)
            if widening.rounding and op.name not in _MOVES and _is_in_a_body(op):
                _round_behind(result, _following(op), _BITS[element])
    with ir.insert_before(end), ir.located(end):
        for position, kind in enumerate(returned):
            if end.operands[position].type != kind:
                end.operands[position] = ops.convert(end.operands[position], ir.element_of_type(kind))


def _convert_operands(op: Operation, widening: _Widening) -> None:
    """Let an operation of bits have operands of the narrow type. What is before it is widened already."""
    for position, operand in enumerate(op.operands):
        if ir.is_tensor(operand) and ir.element_of(operand) == widening.wide:
            with ir.insert_before(op), ir.located(op):
                op.operands[position] = ops.convert(operand, ir.f32())


def _convert_behind(value: Value, before: Operation, widening: _Widening) -> None:
    """Let all users of a value have it in the wide type, converted before an operation."""
    with ir.insert_before(before), ir.located(before):
        wide = ops.convert(value, widening.wide)
    ir.replace_uses(value, wide)
    converted = ir.defining_op(wide)
    assert converted is not None
    converted.operands[0] = value


def _round_behind(value: Value, before: Operation, bits: tuple[int, int]) -> None:
    exponent, mantissa = (ir.integer_attribute(number, 32) for number in bits)
    attributes = {"exponent_bits": exponent, "mantissa_bits": mantissa}
    with ir.insert_before(before), ir.located(before):
        rounded = ir.emit("stablehlo.reduce_precision", [value], [value.type], attributes)
    ir.replace_uses(value, rounded.results[0])
    rounded.operands[0] = value


def _is_in_a_body(op: Operation) -> bool:
    owner = ir.owner_of_block(op.block)
    return owner is not None and owner.name in _BODIES


def _following(op: Operation) -> Operation:
    block = op.block
    found = ir.operations(block)
    return found[found.index(op) + 1]


def _is_narrow(value: Value) -> bool:
    return ir.is_tensor(value) and str(ir.element_of(value)) in _NARROW


CLEARLY_WITHIN = 0.1
"""Part of the accepted errors up to which the rounding of float32 is not measured."""
MOST_FLOAT32_NOISE = 0.02
"""Largest accepted error from measured rounding, as a part of a tensor's change: ten times the plain tolerance."""
_TRIAL_SCALARS = (np.array(TRIAL_STEP, np.int32), np.array(TRIAL_RATE, np.float32))


def _reference_key(spec: StepSpec) -> str:
    """Return the key of the reference for artifacts of a step. The digest tells all else that a trial is drawn from."""
    return f"reference 4 {' '.join(map(str, spec.trial_bounds))} {spec.stablehlo_digest}"


def verify_artifact(
    train_step: TrainStep,
    artifact: Artifact,
    open_runner: Callable[[Artifact, StepSpec], StepRunner],
    *,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    local: Target,
    cache: ArtifactCache | None = None,
    on_refusal: Callable[[str], None] = lambda text: None,
    begun: Future[ReferenceRun] | None = None,
) -> VerifyReport:
    """Run one training and one evaluation step of `artifact` and compare them with the reference.

    A refused artifact is then searched for the wrong operation, which may take minutes; see
    `planetary.compiler.check.offender` for the limits.

    Args:
        train_step: that the artifact was compiled from.
        artifact: to check. If it is no CPU artifact of this machine, a build of the same operations for `local` is
            checked instead, and the report says so.
        open_runner: loads an artifact on this machine.
        params: the model's initial parameters; they are perturbed, so none is zero.
        buffers: the model's buffers.
        local: the CPU target of this machine.
        cache: remembers reports by the artifact's digest, so the same bytes are checked once.
        on_refusal: called with the refusal before the search for the operation begins: the search runs
            compiled pieces of the step, and if this process dies of it, the refusal is still known.
        begun: the reference execution, begun while the artifact was compiled; None: it is run here where it is needed.

    Raises:
        CompileError: a result differs by more than the tolerance; the text names the worst tensor, and the first
            wrong operation if it can be found.
    """
    if cache is not None and reference_digest(cache, train_step.spec) is not None:
        known = read_report(cache, artifact.digest)
        if known is not None:
            return known
    started = time.perf_counter()
    spec = train_step.spec
    stand_in = not runs_here(artifact.target, local)
    local = Target("pjrt:cpu", artifact.target.name) if artifact.target.is_pjrt else local
    subject = compile_artifact(train_step, local, cache) if stand_in else artifact
    target = f"{subject.target.backend} {subject.target.name}"
    kept = None if cache is None else read_reference(cache, spec)

    def found_with(trial: Trial) -> dict[str, np.ndarray]:
        return run_found(spec, open_runner(subject, spec), trial)

    name, error, against = "", float("inf"), ""
    found: Mapping[str, np.ndarray] = {}
    if kept is not None:
        trial, against = draw_trial(spec, kept.values, buffers), kept.against
        found = found_with(trial)
        name, error = worst_of(kept.errors(spec, trial.before, found))
    if not error <= 1:  # also catches NaN. The reference is run here, for the first time or to search for the cause
        reference = run_for_check(train_step, params, buffers) if begun is None else begun.result()
        values, trial, expected = reference.values, reference.trial, reference.expected
        found = found_with(trial)
        noise = _noise(train_step, trial)
        plain = errors_of(spec, trial.before, expected, found, ROUNDING[coarsest_factor(train_step.portable)])
        if not noise and not worst_of(plain)[1] <= CLEARLY_WITHIN:
            noise = _noise_of_float32(train_step, trial, expected)
        suspect = _Suspect(train_step, trial, expected, found, noise, subject.target, open_runner)
        name, error, against, right = suspect.judge(target, on_refusal)
        if cache is not None:
            made = make_reference(
                spec, values, trial.before, right, factor_rounding=suspect.rounding, against=against, noise=noise
            )
            cache.link(_reference_key(spec), cache.put(encode_reference(made)))
    report = VerifyReport(
        digest=artifact.digest,
        checked=subject.digest,
        target=target,
        stand_in=stand_in,
        loss=float(found["loss"]),
        worst_tensor=name,
        worst_error=error,
        seconds=time.perf_counter() - started,
        against=against,
        notes=train_step.notes,
    )
    if cache is not None:
        write_report(cache, report)
    return report


@dataclass(frozen=True)
class ReferenceRun:
    """The reference execution of one training and one evaluation step.

    Attributes:
        values: distributions that the parameters are drawn from.
        trial: the random inputs.
        expected: the results, under the names of `run_trial`.
    """

    values: Mapping[str, ParameterValues]
    trial: Trial
    expected: Mapping[str, np.ndarray]


def run_for_check(
    train_step: TrainStep, params: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]
) -> ReferenceRun:
    """Run the reference execution that `verify_artifact` compares an artifact with. Raises `CompileError`."""
    values = values_of(train_step.spec, params)
    trial = draw_trial(train_step.spec, values, buffers)
    return ReferenceRun(values, trial, run_expected(train_step, trial))


def read_reference(cache: ArtifactCache, spec: StepSpec) -> StepReference | None:
    """Return the reference of a step's artifacts; None if it is not there, or damaged."""
    digest = reference_digest(cache, spec)
    if digest is None:
        return None
    with contextlib.suppress(TrustError):
        return decode_reference(cache.get(digest), spec)
    return None


def reference_digest(cache: ArtifactCache, spec: StepSpec) -> str | None:
    """Return the digest of the blob that workers compare their own results with; None if there is none yet."""
    return cache.resolve(_reference_key(spec))


@dataclass(frozen=True)
class _Suspect:
    """One execution beside the reference."""

    train_step: TrainStep
    trial: Trial
    expected: Mapping[str, np.ndarray]
    found: Mapping[str, np.ndarray]
    noise: Mapping[str, float]
    target: Target
    open_runner: Callable[[Artifact, StepSpec], StepRunner]

    @property
    def rounding(self) -> float:
        """Relative spacing of the factors of the model's contractions."""
        return ROUNDING[coarsest_factor(self.train_step.portable)]

    def judge(self, target: str, on_refusal: Callable[[str], None]) -> tuple[str, float, str, Mapping[str, np.ndarray]]:
        """Return the worst tensor, the error, the name of the agreeing execution, and that execution's results.

        Raises:
            CompileError: it agrees with none; see `verify_artifact`.
        """
        train_step, trial, rounding = self.train_step, self.trial, self.rounding
        expected, found = self.expected, self.found

        def compared(reference: Mapping[str, np.ndarray]) -> dict[str, float]:
            return errors_of(train_step.spec, trial.before, reference, found, rounding, noise=self.noise)

        errors = compared(expected)
        name, error = worst_of(errors)
        if error <= 1:
            return name, error, "XLA", expected
        verdict, truth = _arbitrate(train_step, trial)
        name_of_truth, error_of_truth = worst_of(compared(truth)) if truth is not None else (name, error)
        if truth is not None and error_of_truth <= 1:
            against = f"the StableHLO interpreter (XLA does not: {name!r} is {error:.3g} times the accepted error off)"
            return name_of_truth, error_of_truth, against, truth
        refusal = (
            f"the artifact for {target} is wrong: {name!r} differs from the reference execution by {error:.3g} "
            f"times the accepted error; loss {found['loss']:.6g}, expected {expected['loss']:.6g}. {verdict} It "
            "was not published; report the model and the IREE version, and try another target"
        )
        on_refusal(f"{refusal}.")
        run = run_reference
        if truth is not None and not compare(train_step.spec, trial, truth, expected, rounding)[1] <= 1:
            run, errors = interpreter.run_interpreter, compared(truth)
        wrong = _suspect(self.target, self.open_runner)
        refused = _refused(train_step, trial, errors, rounding, wrong=wrong, run=run)
        raise CompileError(f"{refusal}. {name_offender(refused)}")


def runs_here(target: Target, local: Target) -> bool:
    """Whether an artifact for `target` runs on the machine whose own CPU target is `local`."""
    if target.backend == "pjrt:cpu":
        return True
    if target.backend != "cpu":
        return False
    if target.name == "host":
        return target == local
    return target.name == "baseline" and target.features == local.features.partition("-")[0]


def make_trial(spec: StepSpec, params: Mapping[str, np.ndarray], buffers: Mapping[str, np.ndarray]) -> Trial:
    """Return random inputs for a step from the initial values; see `draw_trial`."""
    return draw_trial(spec, values_of(spec, params), buffers)


class FunctionRunner(Protocol):
    """Runs one function of a module; `run_reference` and `run_interpreter` do."""

    def __call__(
        self, stablehlo: bytes, function: str, arguments: Sequence[np.ndarray], result_dtypes: Sequence[str], /
    ) -> list[np.ndarray]: ...


def run_expected(train_step: TrainStep, trial: Trial, run: FunctionRunner = run_reference) -> dict[str, np.ndarray]:
    """Return the reference's results by name: new parameters and state, `loss`, `grad_norm`, `eval_loss`."""
    spec = train_step.spec
    changed = [*spec.params, *spec.opt_state]
    dtypes = [*(tensor.dtype for tensor in changed), "f32", "f32"]
    results = run(train_step.portable, "train_step", _arguments(spec, trial, "train_step")[1], dtypes)
    names = [*(tensor.name for tensor in changed), "loss", "grad_norm"]
    evaluated = run(train_step.portable, "eval_step", _arguments(spec, trial, "eval_step")[1], ["f32"])
    return dict(zip(names, results, strict=True)) | {"eval_loss": evaluated[0]}


def _noise(train_step: TrainStep, trial: Trial) -> dict[str, float]:
    """Return, by name, the change from rounding in 16-bit arithmetic between contractions; empty without any."""
    if not rounds_between_operations(train_step.portable):
        return {}
    rounded, wide = (run_expected(train_step, trial, _run_widened(rounding)) for rounding in (True, False))
    return noise_between(train_step.spec, rounded, wide)


def _noise_of_float32(train_step: TrainStep, trial: Trial, expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return, by name, the distance of the reference's results from those in double precision.

    No more than a share of a tensor's change counts, so that a reference that is wrong excuses nobody. Empty where the
    step has no form in double precision.
    """
    try:
        exact = run_expected(train_step, trial, _run_doubled)
    except CompileError:
        return {}
    found = noise_between(train_step.spec, expected, exact)
    return {
        name: min(value, MOST_FLOAT32_NOISE / NOISE_FACTOR * change_of(train_step.spec, name, trial.before, expected))
        for name, value in found.items()
    }


def _run_doubled(
    stablehlo: bytes, function: str, arguments: Sequence[np.ndarray], result_dtypes: Sequence[str], /
) -> list[np.ndarray]:
    return run_reference(doubled(stablehlo), function, arguments, result_dtypes)


def _run_widened(rounding: bool) -> FunctionRunner:
    """Return a runner of functions with XLA, with f32 in place of all 16-bit arithmetic."""

    def run(
        stablehlo: bytes, function: str, arguments: Sequence[np.ndarray], result_dtypes: Sequence[str], /
    ) -> list[np.ndarray]:
        return run_reference(widened(stablehlo, rounding=rounding), function, arguments, result_dtypes)

    return run


def _arguments(spec: StepSpec, trial: Trial, function: str) -> tuple[list[str], list[np.ndarray]]:
    """Return the element types and the host arrays of a function's arguments."""
    tensors, arrays = [*spec.params, *spec.buffers], [*trial.params.values(), *trial.buffers.values()]
    if function == "train_step":
        tensors += [*spec.opt_state, STEP, RATE]
        arrays += [*trial.opt_state.values(), *_TRIAL_SCALARS]
        return [tensor.dtype for tensor in (*tensors, *spec.train_batch)], [*arrays, *trial.train_batch]
    return [tensor.dtype for tensor in (*tensors, *spec.batch)], [*arrays, *trial.batch]


def _suspect(target: Target, open_runner: Callable[[Artifact, StepSpec], StepRunner]) -> Execute:
    """Return a function that compiles and runs a piece of a step as artifacts for `target` are."""

    def execute(piece: TrainStep, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        runner = open_runner(compile_artifact(piece, target), piece.spec)
        try:
            names = [tensor.name for tensor in piece.spec.buffers]
            runner.load(_zeros(piece.spec), dict(zip(names, inputs, strict=True)), {})
            runner.train_step(TRIAL_STEP, TRIAL_RATE, [])
            found = runner.read_params()
        finally:
            runner.close()
        return [found[tensor.name] for tensor in piece.spec.params]

    return execute


def _refused(
    train_step: TrainStep,
    trial: Trial,
    errors: Mapping[str, float],
    rounding: float,
    *,
    wrong: Execute,
    run: FunctionRunner,
) -> RefusedFunction:
    """Return the facts about a refused artifact for the search of the wrong operation."""

    def right(piece: TrainStep, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        spec = piece.spec
        arguments = [*_zeros(spec).values(), *inputs, *_TRIAL_SCALARS]
        dtypes = [*(tensor.dtype for tensor in spec.params), "f32", "f32"]
        return run(piece.portable, "train_step", arguments, dtypes)[:-2]

    train_is_right = all(error <= 1 for name, error in errors.items() if name != "eval_loss")
    function = "eval_step" if train_is_right else "train_step"
    dtypes, arguments = _arguments(train_step.spec, trial, function)
    return RefusedFunction(
        portable=train_step.portable,
        function=function,
        arguments=arguments,
        dtypes=dtypes,
        replaced=[] if train_is_right else replaced_arguments(train_step.spec),
        wrong=wrong,
        right=right,
        tolerance=max(VALUE_TOLERANCE, FACTOR_ROUNDINGS * rounding),
        change_tolerance=max(CHANGE_TOLERANCE, FACTOR_ROUNDINGS * rounding),
        roundings={dtype: ROUNDINGS * unit for dtype, unit in ROUNDING.items()},
    )


def _zeros(spec: StepSpec) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.zeros() for tensor in spec.params}


def _arbitrate(train_step: TrainStep, trial: Trial) -> tuple[str, dict[str, np.ndarray] | None]:
    """Return a sentence for the error, and the interpreter's results; None if it cannot give them."""
    if interpreter.step_cost(train_step.spec) > interpreter.LARGEST_COST:
        return "The step is too large for the StableHLO interpreter to say which of the two is wrong.", None
    try:
        truth = run_expected(train_step, trial, interpreter.run_interpreter)
    except CompileError as error:
        return f"The StableHLO interpreter could not say which of the two is wrong: {error}.", None
    return "The StableHLO interpreter does not agree with it either.", truth


def run_found(spec: StepSpec, runner: StepRunner, trial: Trial) -> dict[str, np.ndarray]:
    """Return the artifact's results, under the names of `run_expected`; closes the runner."""
    try:
        return run_trial(spec, runner, trial)
    finally:
        runner.close()


def compare(
    spec: StepSpec,
    trial: Trial,
    expected: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    factor_rounding: float = ROUNDING["f32"],
) -> tuple[str, float]:
    """Return the name of the most different tensor and the error, as `errors_of` measures it."""
    return worst_of(errors_of(spec, trial.before, expected, found, factor_rounding))
