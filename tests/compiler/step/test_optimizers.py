"""Every optimizer over 20 steps against optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from step_runs import Run, close, mlp_batch, mlp_loss, mlp_model, mlp_params

from planetary.compiler import ir
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model
from planetary.compiler.step import optimizers
from planetary.compiler.step.optimizers_adafactor import (
    clip_each_by_rms,
    factored_dimensions,
    scale_by_factored_rms,
    scale_by_parameter_rms,
)
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.core.tensors import TensorSpec

STEPS = 20
RATE = 0.02
CONSTANT = Schedule(kind="constant", peak=RATE)
GRADIENT = jax.jit(jax.grad(mlp_loss))


@pytest.fixture(scope="module")
def model() -> Model:
    return mlp_model()


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def _is_cube(spec: TensorSpec) -> bool:
    return spec.name == "cube"


def _with_cube_apart(alone: optax.GradientTransformation) -> optax.GradientTransformation:
    """What takes each matrix of the stack `cube` as a parameter."""

    def apart(tree: Any) -> Any:
        return {n: {str(i): p[i] for i in range(len(p))} if n == "cube" else p for n, p in tree.items()}

    def update(gradients: Any, state: Any, params: Any) -> Any:
        steps, state = alone.update(apart(gradients), state, apart(params))
        return {**steps, "cube": jax.numpy.stack([steps["cube"][str(i)] for i in range(len(steps["cube"]))])}, state

    return optax.GradientTransformation(lambda params: alone.init(apart(params)), update)


def _follow(run: Run, transform: optax.GradientTransformation, tolerance: float = 2e-4) -> Any:
    """Run both for `STEPS` steps; returns optax's parameters after each."""
    params = mlp_params()
    state = transform.init(params)
    update = jax.jit(transform.update)
    history = []
    for index in range(STEPS):
        batch = mlp_batch(index)
        run(index, batch)
        updates, state = update(GRADIENT(params, *batch), state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
        for have, want in zip(run.params, params.values(), strict=True):
            close(have, want, tolerance)
    start = mlp_params()
    assert all(np.max(np.abs(np.asarray(params[k]) - start[k])) > 1e-3 for k in params)  # everything moved
    return history


def _options(**changes: Any) -> StepOptions:
    base = {"weight_decay": 0.1, "clip_norm": 0.5}
    return StepOptions(**(base | changes))


def _around(core: optax.GradientTransformation, mask: Callable[[Any], Any] = _is_matrix) -> Any:
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        core,
        optax.add_decayed_weights(0.1, mask),
        optax.scale_by_learning_rate(RATE),
    )


@pytest.mark.parametrize(
    ("changes", "core"),
    [
        ({"optimizer": "adamw"}, optax.scale_by_adam(0.9, 0.95, 1e-8)),
        ({"optimizer": "lion", "beta2": 0.99}, optax.scale_by_lion(0.9, 0.99)),
        ({"optimizer": "sgd", "momentum": 0.9}, optax.trace(0.9, nesterov=True)),
        ({"optimizer": "sgd", "momentum": 0.0}, optax.identity()),
    ],
    ids=["adamw", "lion", "nesterov", "sgd"],
)
@pytest.mark.slow
def test_twenty_steps_are_those_of_optax(model: Model, changes: dict, core: optax.GradientTransformation) -> None:
    run = Run(build_train_step(model, _options(**changes)), mlp_params(), CONSTANT)
    _follow(run, _around(core))


@pytest.mark.parametrize("min_size", [4, 128])
@pytest.mark.slow
def test_adafactor_is_that_of_optax(model: Model, min_size: int) -> None:
    """Its published order of transforms, factored (4) and whole (128)."""
    ours = optimizers.chain(
        scale_by_factored_rms(min_size=min_size),
        clip_each_by_rms(),
        optimizers.scale_by_learning_rate(),
        scale_by_parameter_rms(),
    )
    run = Run(build_train_step(model, optimizer=ours), mlp_params(), CONSTANT)
    _follow(run, optax.adafactor(RATE, min_dim_size_to_factor=min_size))
    names = {spec.name: spec.shape for spec in run.step.spec.opt_state}
    assert names["adafactor.count"] == ()
    if min_size == 4:
        assert names["adafactor.row.up"] == (5,)
        assert names["adafactor.column.up"] == (7,)
        assert names["adafactor.row.cube"] == (7, 4)
        assert names["adafactor.square.gain"] == (7,)
    else:
        assert names["adafactor.square.cube"] == (7, 7, 4)


@pytest.mark.slow
def test_adafactor_by_name_clips_and_decays_like_the_others(model: Model) -> None:
    run = Run(build_train_step(model, _options(optimizer="adafactor")), mlp_params(), CONSTANT)
    parts = optax.adafactor(1.0, min_dim_size_to_factor=128)
    _follow(run, _around(optax.chain(parts, optax.scale(-1.0))))


@pytest.mark.parametrize("min_size", [4, 128])
@pytest.mark.slow
def test_adafactor_takes_a_stack_as_single_matrices(model: Model, min_size: int) -> None:
    """So that an expert's update is the same whichever experts it is computed beside."""
    stacked = _is_cube
    ours = optimizers.chain(
        scale_by_factored_rms(min_size=min_size, stacked=stacked),
        clip_each_by_rms(stacked=stacked),
        optimizers.scale_by_learning_rate(),
        scale_by_parameter_rms(stacked=stacked),
    )
    run = Run(build_train_step(model, optimizer=ours), mlp_params(), CONSTANT)
    _follow(run, _with_cube_apart(optax.adafactor(RATE, min_dim_size_to_factor=min_size)))
    assert all(spec.shape[0] == 7 for spec in run.step.spec.opt_state if spec.name.endswith(".cube"))


@pytest.mark.slow
def test_adafactor_by_name_takes_stacks_that_are_named(model: Model) -> None:
    options = _options(optimizer="adafactor", matrix_stacks=("cub*",))
    run = Run(build_train_step(model, options), mlp_params(), CONSTANT)
    parts = _with_cube_apart(optax.adafactor(1.0, min_dim_size_to_factor=128))
    _follow(run, _around(optax.chain(parts, optax.scale(-1.0))))


@pytest.mark.slow
def test_muon_is_optax_for_matrices_and_adamw_for_the_rest(model: Model) -> None:
    run = Run(
        build_train_step(model, _options(optimizer="muon", adam_for=("emb*",), clip_norm=0.0)),
        mlp_params(),
        CONSTANT,
    )

    def label(params: Any) -> Any:
        return {name: "muon" if name in {"up", "down"} else "adam" for name in params}

    matrices = optax.contrib.muon(RATE, beta=0.95, weight_decay=0.1, nesterov=True, consistent_rms=0.2)
    rest = optax.adamw(RATE, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=_is_matrix)
    _follow(run, optax.partition({"muon": matrices, "adam": rest}, label))
    names = [spec.name for spec in run.step.spec.opt_state]
    assert names[:4] == ["muon.count", "muon.mean.down", "muon.mean.up", "adam.count"]
    assert "adam.square.cube" in names


@pytest.mark.slow
def test_muon_takes_a_stack_of_matrices_as_matrices_of_their_own(model: Model) -> None:
    options = _options(optimizer="muon", adam_for=("emb*",), matrix_stacks=("cub*",), clip_norm=0.0)
    run = Run(build_train_step(model, options), mlp_params(), CONSTANT)
    alone = optax.contrib.muon(RATE, beta=0.95, weight_decay=0.1, nesterov=True, consistent_rms=0.2)

    def label(params: Any) -> Any:
        return {name: "muon" if name in {"up", "down", "cube"} else "adam" for name in params}

    rest = optax.adamw(RATE, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=_is_matrix)
    _follow(run, optax.partition({"muon": _with_cube_apart(alone), "adam": rest}, label))
    assert "muon.mean.cube" in [spec.name for spec in run.step.spec.opt_state]


def test_muon_without_matrices_is_adamw(model: Model) -> None:
    step = build_train_step(model, _options(optimizer="muon", adam_for=("*",)))
    assert step.spec.opt_state[0].name == "adam.count"
    run, adamw = Run(step, mlp_params(), CONSTANT), Run(build_train_step(model, _options()), mlp_params(), CONSTANT)
    for index in range(3):
        assert run(index, mlp_batch(index)) == adamw(index, mlp_batch(index))
    for have, want in zip(run.params, adamw.params, strict=True):
        np.testing.assert_array_equal(have, want)


def test_an_orthogonalised_matrix_has_singular_values_near_one() -> None:
    from planetary.compiler.step.optimizers_muon import orthogonalised

    rng = np.random.default_rng(0)
    for shape in ((6, 4), (4, 6), (3, 6, 4)):
        with ir.new_context():
            module = ir.empty_module()
            with ir.new_function(module, "main", [ir.tensor(shape, ir.f32())]) as (arguments, finish):
                finish([orthogonalised(arguments[0], 1e-8)])
            text = ir.to_text(module)
        found = run_reference(text, "main", [rng.standard_normal(shape, np.float32)], ["f32"])[0]
        assert found.shape == shape
        values = np.linalg.svd(found, compute_uv=False)
        assert np.all((values > 0.6) & (values < 1.3)), values


@pytest.mark.slow
def test_names_choose_what_does_not_decay(model: Model) -> None:
    run = Run(build_train_step(model, _options(no_decay=("emb*", "cube"))), mlp_params(), CONSTANT)
    mask = {"cube": False, "down": True, "embed": False, "gain": False, "up": True}
    _follow(run, _around(optax.scale_by_adam(0.9, 0.95, 1e-8), lambda params: mask))


@pytest.mark.slow
def test_weight_average_is_incremental_after_the_first_update(model: Model) -> None:
    """The average of the weights is incremental and starts after the first update."""
    run = Run(build_train_step(model, _options(average_decay=0.8)), mlp_params(), CONSTANT)
    average, *rest = _follow(run, _around(optax.scale_by_adam(0.9, 0.95, 1e-8)))
    for params in rest:
        average = optax.incremental_update(params, average, 1 - 0.8)
    found = run.named()
    for name, want in average.items():
        close(found[f"average.{name}"], want, 2e-4)
    assert int(found["average.count"]) == STEPS


def test_ties_and_small_dimensions_decide_what_is_factored() -> None:
    assert factored_dimensions((8, 8), 8) == (0, 1)
    assert factored_dimensions((9, 2, 8), 8) == (2, 0)
    assert factored_dimensions((9, 7), 8) is None
    assert factored_dimensions((900,), 8) is None


def test_a_chain_hands_each_transform_its_own_state() -> None:
    """Two momenta in a row are told apart although they have equal shapes."""
    from planetary.compiler.step.optimizers_adaptive import add_momentum

    both = optimizers.chain(
        add_momentum(0.9),
        add_momentum(0.5),
        optimizers.scale_by_learning_rate(),
    )
    run = Run(build_train_step(mlp_model(), optimizer=both), mlp_params(), CONSTANT)
    _follow(run, optax.chain(optax.trace(0.9, True), optax.trace(0.5, True), optax.scale(-RATE)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"momentum": 1.0}, "momentum"),
        ({"average_decay": -0.1}, "average_decay"),
        ({"micro_batches": 0}, "micro_batches"),
        ({"remat": "some"}, "remat"),
        ({"remat": "3 TB"}, "remat"),
    ],
)
def test_options_outside_their_range_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        StepOptions(**wrong)
