"""A refused artifact names its first wrong operation: the graph is cut, compiled in pieces and compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_runs import mlp_model, mlp_params

from planetary.compiler import ir, ops
from planetary.compiler.backends.iree import Artifact, compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import verify as verification
from planetary.compiler.check.offender import RefusedFunction, deviation, name_offender, nudged
from planetary.compiler.check.pieces import cut_out, outline
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import export_loss
from planetary.compiler.step.train_step import TrainStep, build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import CompileError, ResourceError
from planetary.core.step import StepSpec

Damage = Callable[[ir.Module], None]


def portable(function: Callable[..., object], *arguments: np.ndarray) -> bytes:
    text = jax.jit(function).lower(*arguments).as_text(debug_info=True)
    with ir.new_context():
        module = ir.parse_module(text)
        return ir.to_portable_artifact(module)


def run(piece: TrainStep, inputs: Sequence[np.ndarray], damage: Damage | None = None) -> list[np.ndarray]:
    spec = piece.spec
    code = piece.portable
    if damage is not None:
        with ir.new_context():
            module = ir.parse_module(code)
            damage(module)
            code = ir.to_portable_artifact(module)
    scalars = np.array(0, np.int32), np.array(0, np.float32)  # step and learning rate, which a piece does not look at
    arguments = [*(tensor.zeros() for tensor in spec.params), *inputs, *scalars]
    return run_reference(code, "train_step", arguments, [*(t.dtype for t in spec.params), "f32", "f32"])[:-2]


def each(module: ir.Module, name: str) -> list[ir.Operation]:
    found: list[ir.Operation] = []
    ir.walk(module.operation, lambda op: found.append(op) if op.name == name else None)
    return found


def tanh_is_sine(module: ir.Module) -> None:
    for op in each(module, "stablehlo.tanh"):
        with ir.insert_before(op):
            ir.replace_uses(op.results[0], ops.sine(op.operands[0]))


def difference_of_sums_is_zero(module: ir.Module) -> None:
    """A mistake of a fusion: subtract, where both of its operands are made in the same program."""
    for op in each(module, "stablehlo.subtract"):
        if all((made := ir.defining_op(v)) is not None and made.name == "stablehlo.add" for v in op.operands):
            with ir.insert_before(op):
                ir.replace_uses(op.results[0], ops.zeros_like(op.results[0]))


X = np.linspace(0.5, 2, 6, dtype=np.float32).reshape(2, 3)


def small(x: jax.Array) -> jax.Array:
    y = jnp.exp(x) * 2 + x
    z = jax.lax.select(x > 1, y, -y)
    return jnp.log(jnp.tanh(z) ** 2 + 1).sum() + (y + z - (x + 1)).astype(jnp.bfloat16).astype(jnp.float32).sum()


def refused(damage: Damage | None, code: bytes = b"") -> RefusedFunction:
    return RefusedFunction(
        portable=code or portable(small, X),
        function="main",
        arguments=[X],
        dtypes=["f32"],
        replaced=[],
        wrong=lambda piece, inputs: run(piece, inputs, damage),
        right=run,
        tolerance=1e-4,
        change_tolerance=2e-3,
        roundings={},
    )


def test_every_cut_of_a_function_gives_its_values() -> None:
    code = portable(small, X)
    graph = outline(code, "main")
    whole = run(cut_out(code, "main", 0, graph.frontier(len(graph.nodes))).step, [X])
    np.testing.assert_allclose(whole[0], small(jnp.asarray(X)), rtol=1e-6)
    names = [node.name for node in graph.nodes]
    assert "stablehlo.constant" not in names
    assert {"stablehlo.compare", "stablehlo.select", "stablehlo.reduce"} <= set(names)
    for stop in (names.index("stablehlo.select"), len(names) // 2):
        cut = graph.frontier(stop)
        first = cut_out(code, "main", 0, cut)
        values = dict(zip(cut, run(first.step, [X]), strict=True))
        assert {tensor.dtype for tensor in first.step.spec.params} <= {"f32", "i8"}
        rest = cut_out(code, "main", stop, graph.frontier(len(names)))
        assert set(rest.inputs) <= {*cut, (-1, 0)}
        inputs = [X if key == (-1, 0) else values[key] for key in rest.inputs]
        np.testing.assert_allclose(run(rest.step, inputs)[0], whole[0], rtol=1e-6)


def test_a_wrong_operation_is_named_with_its_place() -> None:
    said = name_offender(refused(tanh_is_sine))
    assert "The first wrong operation is stablehlo.tanh -> tensor<2x3xf32> at " in said
    assert f"{Path(__file__).name}, line " in said
    assert " in jit(small)/tanh: given right inputs" in said
    assert "given right inputs, its result is" in said


@pytest.mark.slow
def test_jointly_wrong_operations_are_named_together() -> None:
    said = name_offender(refused(difference_of_sums_is_zero))
    assert "The first wrong operation is stablehlo.subtract" in said
    assert "together with" in said
    assert "stablehlo.add" in said


def test_a_search_that_finds_nothing_or_fails_says_so() -> None:
    assert "No operation can be named" in name_offender(refused(None))

    def broken(module: ir.Module) -> None:
        raise ResourceError("no such device")

    assert "could not be searched for: no such device" in name_offender(refused(broken))

    def defect(module: ir.Module) -> None:
        raise ZeroDivisionError("oops")

    assert "failed: ZeroDivisionError: oops" in name_offender(refused(defect))
    assert "failed: CompileError" in name_offender(refused(None, code=b"no module"))
    said = name_offender(refused(tanh_is_sine), most_compilations=2)
    assert "ended early (2 compilations" in said


def test_a_place_is_short() -> None:
    called = 'loc("jit(f)/tanh"(callsite("f"("m.py":7:50 to :65) at "n.py":9:1)))'
    assert ir.source_place(called) == "m.py, line 7 in jit(f)/tanh"
    assert ir.source_place(called.replace("m.py", "/x/site-packages/m.py")) == "n.py, line 9 in jit(f)/tanh"
    assert ir.source_place('loc("m.py":7:5)') == "m.py, line 7"
    assert ir.source_place('loc("head")') == "in head"
    assert ir.source_place('loc("-":5:10)') == "line 5 of the StableHLO text"
    assert ir.source_place("loc(unknown)") == "an unknown place"


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64])
def test_deviations_of_numbers(dtype: type) -> None:
    want = np.array([1, -2, 0.5], dtype)
    assert deviation(want, want, want, 1e-4) == 0
    off = deviation(want, want, want + np.array([0, 0, 2e-4], dtype), 1e-4)
    assert 0.9 < off < 1.1
    assert deviation(want, want + np.array([0, 0, 1e-3], dtype), want + np.array([0, 0, 1e-3], dtype), 1e-4) < 1
    assert deviation(want, want, want * np.nan, 1e-4) == np.inf
    assert deviation(want * 0, want * 0, want * 1e-9, 1e-4) == np.inf
    masked = np.array([1, -np.inf, np.nan], np.float32)
    assert deviation(masked, masked, masked, 1e-4) == 0
    assert deviation(masked, masked, np.array([1, -np.inf, 0], np.float32), 1e-4) == np.inf
    moved = nudged([want, np.arange(3)])
    assert 0 < np.abs(moved[0] - want).max() < 8 * np.finfo(dtype).eps
    np.testing.assert_array_equal(moved[1], np.arange(3))


def test_deviations_of_integers_count_elements() -> None:
    want = np.zeros(1000, np.int8)
    have = want.copy()
    have[:2] = 1
    assert deviation(want, want, have, 1e-4) == 1
    have[2] = 1
    assert deviation(want, want, have, 1e-4) > 1
    assert deviation(np.zeros((), np.int32), np.zeros((), np.int32), np.ones((), np.int32), 1e-4) == 2


# --- the refusal of an artifact -----------------------------------------------------------------------------


@pytest.mark.compiles
def test_artifact_with_a_wrong_tanh_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An artifact whose tanh is wrong is refused and says that it is the tanh."""
    from planetary.compiler.backends import iree
    from planetary.runtime.executor import open_executor
    from planetary.runtime.host import host_features

    params = {"w": np.ones((3, 1), np.float32)}
    rows = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    model = export_loss(lambda p, x, y: jnp.mean((jnp.tanh(x @ p["w"]) - y) ** 2), params, rows)
    step = build_train_step(model, StepOptions(optimizer="sgd"))
    local = Target("cpu", "host", host_features())
    real = iree.run_compiler
    texts: list[str] = []

    def wrong_compiler(text: str, flags: list[str]) -> bytes:
        with ir.new_context():
            module = ir.parse_module(text)
            tanh_is_sine(module)
            texts.append(ir.to_text(module))
        return real(texts[-1], flags)

    monkeypatch.setattr(iree, "run_compiler", wrong_compiler)

    def open_runner(artifact: Artifact, spec: StepSpec) -> verification.StepRunner:
        path = tmp_path / artifact.digest
        path.write_bytes(artifact.data)
        return open_executor(path, spec, backend="cpu")

    heard: list[str] = []
    with pytest.raises(CompileError, match=r"The first wrong operation is stablehlo\.tanh -> tensor<2x1xf32>") as error:
        verify_artifact(
            step,
            compile_artifact(step, local),
            open_runner,
            params=params,
            buffers={},
            local=local,
            on_refusal=heard.append,
        )
    assert "differs from the reference execution" in str(error.value)
    assert "does not agree with it either" in str(error.value)
    assert len(heard) == 1
    assert heard[0] == str(error.value)[: len(heard[0])]
    assert len(texts) <= 14


@pytest.mark.slow
def test_a_refusal_without_a_working_runner_stands() -> None:
    step = build_train_step(mlp_model())
    spec = step.spec
    opened: list[StepSpec] = []

    class Wrong:
        def load(self, params: dict, buffers: dict, opt_state: dict | None) -> None:
            self.params, self.state = dict(params), dict(opt_state or {})

        def train_step(self, index: int, rate: float, batch: Sequence[np.ndarray]) -> tuple[float, float]:
            return 0.0, 0.0

        def eval_step(self, batch: Sequence[np.ndarray]) -> float:
            return 0.0

        def read_params(self) -> dict[str, np.ndarray]:
            return self.params

        def read_opt_state(self) -> dict[str, np.ndarray]:
            return self.state

        def close(self) -> None:
            pass

    def open_runner(artifact: Artifact, given: StepSpec) -> verification.StepRunner:
        opened.append(given)
        if given != spec:
            raise ResourceError("the device is gone")
        return Wrong()

    with pytest.raises(CompileError, match=r"is wrong: .*could not be searched for: the device is gone"):
        verify_artifact(
            step,
            compile_artifact(step, Target("pjrt:cpu", "stablehlo")),
            open_runner,
            params=mlp_params(),
            buffers={},
            local=Target("cpu", "host", "here"),
        )
    assert [given == spec for given in opened] == [True, False]
    assert opened[1].params[0].name == "value.0"
    assert {tensor.shape for tensor in opened[1].params} >= {tensor.shape for tensor in spec.params}
    assert opened[1].batch == ()
