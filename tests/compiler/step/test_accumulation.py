"""A batch in parts is the batch in one piece."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from step_runs import Run, close, mlp_batch, mlp_model, mlp_params

from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import export_loss, export_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.models import nanochat


@pytest.mark.slow
def test_parts_add_up_to_the_whole() -> None:
    whole = build_train_step(mlp_model(8), StepOptions())
    parts = build_train_step(mlp_model(2), StepOptions(micro_batches=4))
    assert parts.spec.batch == whole.spec.batch
    assert parts.spec.opt_state == whole.spec.opt_state
    schedule = Schedule(kind="constant", peak=0.02)
    one, four = (Run(step, mlp_params(), schedule) for step in (whole, parts))
    for index in range(4):
        batch = mlp_batch(index)
        assert four(index, batch) == pytest.approx(one(index, batch), rel=1e-5)
        for have, want in zip(four.params, one.params, strict=True):
            close(have, want, 2e-5)
    arguments = [*one.params, *mlp_batch(9)]
    losses = [run_reference(step.portable, "eval_step", arguments, ["f32"])[0] for step in (whole, parts)]
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-6)


def test_the_graph_does_not_grow_with_the_number_of_parts() -> None:
    texts = [build_train_step(mlp_model(2), StepOptions(micro_batches=n)).stablehlo for n in (2, 16)]
    assert texts[0].count("stablehlo.") == texts[1].count("stablehlo.")
    assert texts[0].count("stablehlo.while") == 2  # one in each function


def test_one_part_is_no_loop() -> None:
    step = build_train_step(mlp_model(), StepOptions(micro_batches=1))
    assert step.spec == build_train_step(mlp_model()).spec
    assert "while" not in step.stablehlo


@pytest.mark.slow
def test_parts_weigh_as_many_targets_as_count() -> None:
    """With marked targets, a batch in parts is the batch in one piece, and the loss of JAX."""
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8}
    tokens, targets = (np.random.default_rng(n).integers(0, 32, (4, 8)).astype(np.int32) for n in range(2))
    targets[0, 1:] = targets[1, :7] = -100
    loss_fn, params, _ = nanochat.build(**sizes, batch_size=4)
    loss, gradient = jax.value_and_grad(loss_fn)(params, tokens, targets)
    expected = float(loss), float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))))
    for count in (1, 2, 4):
        model = export_model("planetary.models.nanochat:build", sizes | {"batch_size": 4 // count})
        start = model.initial("param")
        step = build_train_step(model, StepOptions(micro_batches=count, marked_targets=True))
        assert Run(step, start)(0, [tokens, targets]) == pytest.approx(expected, rel=1e-5)
        evaluated = run_reference(step.portable, "eval_step", [*start.values(), tokens, targets], ["f32"])
        assert float(evaluated[0]) == pytest.approx(expected[0], rel=1e-6)
    plain = build_train_step(model, StepOptions(micro_batches=4))
    assert Run(plain, start)(0, [tokens, targets])[0] != pytest.approx(expected[0], rel=1e-5)


@pytest.mark.slow
def test_a_transformer_trains_in_parts() -> None:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8}
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, 32, (4, 8)).astype(np.int32) for _ in range(2)]
    found = []
    for size, count in ((4, 1), (2, 2)):
        model = export_model("planetary.models.nanochat:build", sizes | {"batch_size": size})
        params = model.initial("param")
        run = Run(build_train_step(model, StepOptions(micro_batches=count)), params)
        found.append(run(0, batch))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_scalar_in_the_batch_cannot_be_split() -> None:
    params = {"w": np.ones((3, 3), np.float32)}
    model = export_loss(lambda p, x, y: jnp.sum(x @ p["w"]) * y, params, (np.zeros((2, 3), np.float32), np.float32(1)))
    with pytest.raises(UserError, match="is a scalar"):
        build_train_step(model, StepOptions(micro_batches=2))
