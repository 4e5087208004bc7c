"""A composer's and an expert worker's program with micro-batches, bf16 factors and rematerialisation."""

from __future__ import annotations

import numpy as np
import pytest
from lockstep_trainer import open_on_iree
from moe_support import OPTIONS, TINY, build, train
from msgspec.structs import replace

from planetary.compiler import ir
from planetary.compiler.backends.targets import Target
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.runs.mixture.program.programs import composer_program, expert_program
from planetary.runs.mixture.program.signature import ComposerShape
from planetary.runtime.device_program import DeviceProgram, Program, open_on_xla

# A balance loss of the whole batch is not the mean of its parts'.
MODEL = replace(TINY, balance=0.0, batch_size=4)
SHAPE = ComposerShape(2, 3, MODEL.batch_size)


def composer(**options: object) -> DeviceProgram:
    return open_on_xla(composer_program(MODEL, SHAPE, replace(OPTIONS, **options)), optimise=False)


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return build(MODEL, slots=2, rank=3).tensors


def apart(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest distance of two results, relative to the expected one's length."""
    assert found.keys() == expected.keys()
    return max(
        float(np.linalg.norm(found[name] - value) / max(np.linalg.norm(value), 1e-12))
        for name, value in expected.items()
    )


@pytest.mark.slow
def test_micro_batches_give_the_whole_batchs_gradients_and_rows(tensors: dict[str, np.ndarray]) -> None:
    whole, parts = composer(), composer(micro_batches=2)
    for function in ("gradients", "evaluate"):
        expected = whole(function, tensors)
        found = parts(function, tensors)
        assert {n: v.shape for n, v in found.items()} == {n: v.shape for n, v in expected.items()}
        assert apart(found, expected) < 1e-5
    rows = parts("gradients", tensors)["layers.0.seen.g_y"]
    assert all(np.any(rows[half]) for half in (slice(None, len(rows) // 2), slice(len(rows) // 2, None)))


def test_a_batch_that_has_no_equal_parts_is_refused() -> None:
    with pytest.raises(UserError, match="4 sequences has no 3 equal micro-batches"):
        composer_program(MODEL, SHAPE, replace(OPTIONS, micro_batches=3))


def factors(program: Program, function: str) -> set[str]:
    """Element types of the factors of a function's contractions."""
    found: set[str] = set()

    def visit(op: ir.Operation) -> None:
        if op.name == "stablehlo.dot_general":
            found.update(str(ir.element_of(operand)) for operand in op.operands)

    with ir.new_context():
        module = ir.parse_module(program.portable)
        ir.walk(ir.functions(module)[function], visit)
    return found


@pytest.mark.slow
def test_bf16_rounds_the_factors_and_nothing_else(tensors: dict[str, np.ndarray]) -> None:
    exact, low = composer(), composer(precision="bf16")
    assert factors(low.program, "gradients") == {"bf16"}
    assert factors(low.program, "evaluate") == {"bf16"}
    expected, found = exact("gradients", tensors), low("gradients", tensors)
    assert all(value.dtype == expected[name].dtype for name, value in found.items())
    assert found["loss"] != expected["loss"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.01)
    gradients = {name: value for name, value in expected.items() if name.startswith("gradient.")}
    assert 1e-4 < apart({name: found[name] for name in gradients}, gradients) < 0.1


def test_expert_gradients_are_rounded_and_the_proxy_is_not() -> None:
    program = expert_program(MODEL, 2, MODEL.batch_size * MODEL.sequence_length, replace(OPTIONS, precision="bf16"))
    assert factors(program, "gradients") == {"bf16"}
    assert factors(program, "proxy") == {"f32"}


@pytest.mark.slow
def test_f16_is_refused() -> None:
    with pytest.raises(UserError, match=r'found train\.precision = "f16"'):
        composer_program(MODEL, SHAPE, StepOptions(precision="f16"))


@pytest.mark.slow
def test_rematerialised_gradients_equal_with_fewer_kept_values(
    tensors: dict[str, np.ndarray],
) -> None:
    """Rematerialised gradients are the same and computed from fewer kept values."""
    kept, again = composer(), composer(remat="blocks")
    barriers: list[ir.Operation] = []
    with ir.new_context():
        module = ir.parse_module(again.program.portable)
        ir.walk(module.operation, lambda op: barriers.append(op) if op.name.endswith("optimization_barrier") else None)
        made = {ir.defining_op(value) for op in barriers for value in op.operands}
        assert barriers
        assert all(op is None or op.name != "stablehlo.constant" for op in made)  # a constant delays nothing
    assert apart(again("gradients", tensors), kept("gradients", tensors)) < 1e-6


@pytest.mark.slow
def test_a_mixture_trains_in_bf16_in_parts_and_with_less_memory() -> None:
    options = replace(OPTIONS, precision="bf16", micro_batches=2, remat="blocks")
    trainer, _, reports = train(6, dense=options, experts=options)
    assert all(np.isfinite(report.cross_entropy) for report in reports)
    assert trainer.training.dense.precision == "bf16"
    _, _, exact = train(6)
    assert [r.cross_entropy for r in reports] == pytest.approx([r.cross_entropy for r in exact], rel=0.02)
    assert [r.cross_entropy for r in reports] != [r.cross_entropy for r in exact]


@pytest.mark.compiles
def test_iree_computes_micro_batches_of_a_mixture_as_xla_does(tensors: dict[str, np.ndarray]) -> None:
    program = composer(micro_batches=2, precision="bf16", remat="blocks").program
    found = open_on_iree(program, Target("cpu", "host"), ["gradients"])("gradients", tensors)
    assert apart(found, open_on_xla(program, optimise=False)("gradients", tensors)) < 5e-3
