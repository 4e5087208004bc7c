"""Every model of the zoo: its options, its gradient after export, and its compiled training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from stablehlo_interpreter import interpret

from checked_step import checked
from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.frontend.export import export_model, find_builder
from planetary.compiler.step.train_step import build_train_step
from planetary.core.errors import UserError
from planetary.models import gpt2, llama, mamba2, moe, vit
from planetary.models.initial import count, undrawn
from planetary.models.zoo import ZOO

TOKEN_MODELS = [name for name, model in ZOO.items() if model.batch == "tokens"]


def built(name: str) -> tuple[Any, Any, list[np.ndarray]]:
    """Loss, parameters of which none is zero, and a random batch."""
    loss, params, example = find_builder(ZOO[name].source)(**ZOO[name].options("tiny"))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: p + 0.1 * rng.standard_normal(p.shape).astype(np.float32), params)
    batch = [
        rng.integers(0, 5, x.shape).astype(np.int32)
        if x.dtype == np.int32
        else rng.standard_normal(x.shape).astype(np.float32)
        for x in example
    ]
    return loss, params, batch


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.slow
def test_the_gradient_after_export_is_jaxs(name: str) -> None:
    loss, params, batch = built(name)
    leaves = jax.tree.leaves(params)
    text = jax.jit(loss, keep_unused=True).lower(params, *batch).as_text()
    ours = interpret(differentiate(text, range(len(leaves))), [*leaves, *batch, np.float32(1)])
    grad = jax.jit(jax.grad(loss), keep_unused=True).lower(params, *batch).as_text()
    theirs = interpret(grad, [*leaves, *batch])
    for found, expected in zip(ours, theirs, strict=True):
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=5e-6 * scale)


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_the_first_loss_is_about_that_of_guessing(name: str) -> None:
    step = export_model(ZOO[name].source, ZOO[name].options("tiny"))
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, 32, (2, 8)).astype(np.int32) for _ in range(2)]
    loss = interpret(step.text, [*step.initial("param").values(), *batch])[0]
    assert loss == pytest.approx(np.log(32), abs=0.15)


@pytest.mark.parametrize(
    ("tree", "published"),
    [
        (gpt2.parameters(gpt2.Gpt2Config(**gpt2.PRESETS["124m"])), 124_439_808),
        (llama.parameters(llama.LlamaConfig(**llama.PRESETS["1b"])), 1_100_048_384),
        (moe.parameters(moe.MoeModelConfig(**moe.PRESETS["8x7b"])), 46_702_792_704),
        (mamba2.parameters(mamba2.Mamba2Config(**mamba2.PRESETS["130m"])), 128_989_632),
        (vit.parameters(vit.VitConfig(**vit.PRESETS["base"])), 86_567_656),
    ],
    ids=["gpt2", "llama", "moe", "mamba2", "vit"],
)
def test_a_published_size_has_exactly_its_parameter_count(tree: dict[str, Any], published: int) -> None:
    assert count(tree) == published


@pytest.mark.parametrize("name", [name for name in ZOO if name != "nanochat"])
def test_parameters_depend_on_the_seed_alone(name: str) -> None:
    build, tiny = find_builder(ZOO[name].source), ZOO[name].options("tiny")
    one, again, other = (jax.tree.leaves(build(**tiny, seed=seed)[1]) for seed in (4, 4, 5))
    for a, b in zip(one, again, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32
    assert any((a != c).any() for a, c in zip(one, other, strict=True))
    with pytest.raises(UserError, match=f"{name}: .*n_layers"):
        build(n_layers=2)
    with pytest.raises(UserError, match=f"{name}: batch_size must be at least 1, found 0"):
        build(**{**tiny, "batch_size": 0})


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gpt2", {"n_head": 3}, "n_embd must be a multiple of n_head"),
        ("llama", {"n_head": 4, "n_kv_head": 3}, "n_head must be a multiple of n_kv_head"),
        ("llama", {"n_embd": 12, "n_head": 4}, r"multiple of 2 \* n_head"),
        ("moe", {"n_expert": 2, "n_active": 3}, "n_active=3"),
        ("latent_moe", {"n_expert": 2, "n_active": 3}, "n_active=3"),
        ("mamba2", {"head_size": 7}, "multiple of head_size"),
        ("vit", {"patch_size": 5}, "multiple of patch_size"),
        ("convnet", {"image_size": 6, "n_stage": 3}, r"2\^\(n_stage - 1\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, options: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_builder(ZOO[name].source)(**options)


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    assert ZOO["gpt2"].options("default") == {}
    with pytest.raises(UserError, match="no preset 'huge'; it has: tiny, default, 124m"):
        ZOO["gpt2"].options("huge")


@pytest.mark.compiles
@pytest.mark.parametrize(
    "name",
    # A mixture compiles in CI with `moe`; the other one takes as long again.
    [pytest.param(n, marks=[pytest.mark.soak] * (n == "latent_moe")) for n in ZOO if n != "nanochat"],
)
def test_the_compiled_training_step_is_the_references(name: str, tmp_path: Path) -> None:
    model = export_model(ZOO[name].source, ZOO[name].options("tiny"))
    report = checked(model, build_train_step(model), tmp_path)
    assert not report.stand_in
    assert report.worst_error < 1


def test_undrawn_model_has_shapes_and_no_numbers() -> None:
    options = {**llama.PRESETS["tiny"]}
    with undrawn():
        shapes = jax.tree.leaves(llama.build(**options)[1])
    drawn = jax.tree.leaves(llama.build(**options)[1])
    assert [(leaf.shape, leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in drawn]
    assert all(leaf.base.nbytes == 4 for leaf in shapes)
    assert drawn[0].std() > 0
