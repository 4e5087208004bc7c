"""What is recomputed, that it is worth it, and that it changes nothing."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from planetary.compiler.check.interpreter import run_interpreter
from planetary.compiler.frontend.export import Model, export_model
from planetary.compiler.step.remat_policy import TapeStep, plan
from planetary.compiler.step.step_module import Plan
from planetary.compiler.step.train_step import TrainStep, build_train_step
from planetary.core.configuration.step_options import StepOptions, remat_budget

# --- the policy ---------------------------------------------------------------------------------------------

STREAM, INNER = 10, 100


def _blocks(count: int) -> list[TapeStep]:
    """Blocks of a stream: a cheap and a dear inner value that the backward pass needs, then the new stream."""
    tape = [TapeStep((), STREAM, 1.0, needed=True)]
    for _ in range(count):
        stream = len(tape) - 1
        tape.append(TapeStep((stream,), INNER, 5000.0, needed=True))
        tape.append(TapeStep((stream + 1,), INNER, 100.0, needed=True))
        tape.append(TapeStep((stream + 2,), STREAM, 5000.0, needed=False))
        tape.append(TapeStep((stream, stream + 3), STREAM, 10.0, needed=True))
    return tape


def _check(tape: list[TapeStep], found: Plan) -> None:
    """A plan can be carried out: whatever is computed again reads kept values or what was computed just before."""
    starts = [0, *(cut + 1 for cut in found.cuts)]
    for (start, end), again in zip(itertools.pairwise(starts), found.recomputed, strict=True):
        have = set(found.kept)
        for position in again:
            assert start <= position < end
            assert set(tape[position].inputs) <= have
            have.add(position)
        assert all(not tape[i].needed or i in have for i in range(start, end))


def test_blocks_are_cut_where_only_the_stream_crosses() -> None:
    tape = _blocks(8)
    found = plan(tape, 0)
    _check(tape, found)
    assert found.bytes_before == 9 * STREAM + 16 * INNER
    assert found.bytes_after <= 8 * STREAM + 2 * INNER + STREAM
    assert all(i % 4 == 0 for i in found.kept)  # the stream alone
    inner = sum(step.cost for step in tape if step.nbytes == INNER)
    assert found.cost < inner / sum(step.cost for step in tape)  # the last block is not computed again


def test_a_budget_keeps_what_is_dear_to_compute() -> None:
    tape = _blocks(8)
    least, budget = plan(tape, 0), 1000
    found = plan(tape, budget)
    _check(tape, found)
    assert least.bytes_after < found.bytes_after <= budget
    assert found.cost < least.cost
    extra = found.kept - least.kept
    assert extra
    assert all(tape[i].cost == 5000.0 for i in extra if tape[i].nbytes == INNER)


def test_nothing_is_recomputed_without_need_or_gain() -> None:
    tape = _blocks(8)
    for found in (plan(tape, 10**6), plan(_blocks(1), 0), plan([], 0)):
        assert found.recomputed == ()
        assert found.bytes_after == found.bytes_before
        assert found.cost == 0


def test_plans_of_random_tapes_can_be_carried_out() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        tape: list[TapeStep] = []
        for position in range(int(rng.integers(1, 40))):
            inputs = tuple(sorted(set(rng.integers(max(0, position - 6), position, 2).tolist()))) if position else ()
            tape.append(
                TapeStep(inputs, int(rng.integers(0, 50)), float(rng.integers(1, 50)), bool(rng.integers(0, 2)))
            )
        for budget in (0, 200):
            found = plan(tape, budget)
            _check(tape, found)
            assert found.bytes_after <= found.bytes_before


def test_budgets_in_words() -> None:
    assert remat_budget("none") is None
    assert remat_budget("blocks") == 0
    assert remat_budget("1500") == 1500
    assert remat_budget("1.5 KiB") == 1536
    assert remat_budget("2GB") == 2 * 10**9


# --- in the graph -------------------------------------------------------------------------------------------

SIZES = {"n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 16, "batch_size": 4}


@functools.cache
def _model(layers: int) -> Model:
    return export_model("planetary.models.nanochat:build", SIZES | {"n_layer": layers})


@functools.cache
def _step(layers: int, remat: str, **options: object) -> TrainStep:
    return build_train_step(_model(layers), StepOptions(remat=remat, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_loss_gradients_and_state_are_bit_equal(micro_batches: int) -> None:
    """Operation by operation, as the interpreter runs them; compilers may fuse the two graphs in different ways."""
    sizes = {"n_layer": 3, "n_head": 1, "n_embd": 4, "vocab_size": 8, "sequence_length": 4, "batch_size": 2}
    model = export_model("planetary.models.nanochat:build", sizes)
    rng = np.random.default_rng(0)
    params = [v + 0.05 * rng.standard_normal(v.shape, np.float32) for v in model.initial("param").values()]
    batch = [rng.integers(0, 8, (2 * micro_batches, 4)).astype(np.int32) for _ in range(2)]
    found = []
    for remat in ("none", "blocks"):
        step = build_train_step(model, StepOptions(remat=remat, micro_batches=micro_batches))
        assert ("optimization_barrier" in step.stablehlo) is (remat == "blocks")
        spec = step.spec
        scalars = np.array(0, np.int32), np.array(0.01, np.float32)  # step and learning rate
        arguments = [*params, *(tensor.zeros() for tensor in spec.opt_state), *scalars, *batch]
        dtypes = [tensor.dtype for tensor in (*spec.params, *spec.opt_state)] + ["f32", "f32"]
        found.append(run_interpreter(step.portable, "train_step", arguments, dtypes))
    for have, want in zip(found[1], found[0], strict=True):
        np.testing.assert_array_equal(have, want)


def test_each_block_is_computed_again_once() -> None:
    plain, again = _step(4, "none"), _step(4, "blocks")
    assert plain.remat is None
    assert again.remat is not None
    assert 2 * again.remat.bytes_after <= again.remat.bytes_before
    assert again.stablehlo.count("optimization_barrier") == len(again.remat.cuts)

    def products(step: TrainStep) -> int:
        return step.stablehlo[: step.stablehlo.index("@eval_step")].count("dot_general")

    forward = again.stablehlo[again.stablehlo.index("@eval_step") :].count("dot_general")
    assert products(plain) < products(again) < products(plain) + forward


def test_graph_and_plan_grow_linearly_with_depth() -> None:
    counts = [_step(layers, "blocks").stablehlo.count("stablehlo.") for layers in (2, 4, 6)]
    assert abs((counts[2] - counts[1]) - (counts[1] - counts[0])) <= 0.1 * counts[0]


def test_a_budget_is_met_and_costs_less_than_blocks() -> None:
    blocks = _step(4, "blocks").remat
    assert blocks is not None
    budget = (blocks.bytes_before + blocks.bytes_after) // 2
    found = _step(4, str(budget)).remat
    assert found is not None
    assert blocks.bytes_after < found.bytes_after <= budget
    assert found.cost < blocks.cost


def test_the_graph_is_untouched_where_everything_fits() -> None:
    assert _step(2, "1GB").spec == _step(2, "none").spec


def test_recomputation_goes_with_micro_batches_and_low_precision() -> None:
    step = _step(2, "blocks", micro_batches=2, precision="bf16")
    train = step.stablehlo[: step.stablehlo.index("@eval_step")]
    assert train.index("stablehlo.while") < train.index("optimization_barrier")
    wide = [line for line in train.splitlines() if "dot_general" in line and "bf16" not in line]
    assert not wide  # what is computed again is rounded like the first time


@pytest.mark.compiles
def test_xla_needs_less_than_half_the_memory() -> None:
    """Of the compiled step, as XLA reports it: barriers alone would not do, see `barriers_to_selects`."""
    from planetary.compiler.check.reference import temporary_memory

    sizes = SIZES | {"n_layer": 4, "n_embd": 32, "sequence_length": 64, "batch_size": 8}
    model = export_model("planetary.models.nanochat:build", sizes)
    plain, again = (temporary_memory(build_train_step(model, StepOptions(remat=remat))) for remat in ("none", "blocks"))
    assert 2 * again < plain
