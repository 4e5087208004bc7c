"""Logits that are found in the graph of a loss are the model's own, and nothing else passes for them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.check.logits import Logits, find_logits
from planetary.compiler.frontend.export import Model, export_model, load_model
from planetary.core.errors import UserError
from planetary.models import nanochat

EXPORTS = Path(__file__).parents[1] / "torch_exports"
MIXTURE = {
    "n_layer": 1,
    "n_head": 2,
    "n_kv_head": 1,
    "n_embd": 16,
    "n_expert": 2,
    "n_active": 1,
    "n_hidden": 8,
    "balance": 0.1,
} | {
    "vocab_size": 32,
    "sequence_length": 8,
    "batch_size": 2,
}
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


def logits_of(found: Logits, values: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(jax.jit(found.traced())(found.values(values), tokens[None])[0])


@pytest.mark.parametrize("name", ["nanogpt_bf16", "qwen"])
def test_logits_of_torch_exports_are_found(name: str) -> None:
    found = find_logits(load_model(EXPORTS / f"{name}.mlir"))
    assert found.shape == (2, 8, 32)


@pytest.mark.slow
def test_found_logits_have_the_probabilities_of_the_models_own(tmp_path: Path) -> None:
    model = export_model("planetary.models.nanochat:build", TINY)
    _, params, _ = nanochat.build(**TINY)
    tokens = np.arange(8, dtype=np.int32) * 3
    own = nanochat.logits(params, jnp.asarray(tokens)[None], **{k: v for k, v in TINY.items() if k != "batch_size"})
    found = logits_of(find_logits(model), {**model.initial("param"), **model.initial("buffer")}, tokens)
    np.testing.assert_allclose(jax.nn.log_softmax(found), jax.nn.log_softmax(own[0]), atol=1e-5)


SCORES = """
import jax, jax.numpy as jnp, numpy as np

def build():
    def loss(params, x, y):
        scores = params["table"][x]
        BODY
    return loss, {"table": np.eye(9, dtype=np.float32)}, (np.zeros((2, 5), np.int32), np.zeros((2, 5), np.int32))
"""


def written(tmp_path: Path, body: str) -> Model:
    (tmp_path / "scored.py").write_text(SCORES.replace("BODY", body))
    return export_model(f"{tmp_path / 'scored.py'}:build", {})


CROSS_ENTROPY = "-jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(scores), y[..., None], -1))"


def test_a_cross_entropy_of_scores_is_accepted(tmp_path: Path) -> None:
    assert find_logits(written(tmp_path, f"return {CROSS_ENTROPY}")).shape == (2, 5, 9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        "jnp.mean(scores[..., 0] ** 2) + 3.0",
        "1e-4 * jnp.mean(jax.nn.logsumexp(scores, -1) ** 2)",  # the "z loss" of PaLM
        "0.1 * jnp.mean(jax.nn.softmax(scores[..., :4]) ** 2)",  # as the balance of a router
    ],
)
def test_terms_that_do_not_depend_on_the_targets_may_be_added(other: str, tmp_path: Path) -> None:
    model = written(tmp_path, f"return {CROSS_ENTROPY} + {other}")
    found = find_logits(model)
    table = np.random.default_rng(3).standard_normal((9, 9), np.float32)
    tokens = np.arange(5, dtype=np.int32)
    scores = logits_of(found, {"table": table}, tokens)
    np.testing.assert_allclose(jax.nn.log_softmax(scores), jax.nn.log_softmax(table[tokens]), atol=1e-5)


@pytest.mark.slow
def test_mixture_logits_with_balancing_term_are_found() -> None:
    model = export_model("planetary.models.moe:build", MIXTURE)
    assert find_logits(model).shape == (2, 8, 32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        f"return {CROSS_ENTROPY} + jnp.mean((scores[..., 0] - y) ** 2)",  # a second term of the targets
        f"return 0.9 * {CROSS_ENTROPY}",  # other probabilities
        f"return {CROSS_ENTROPY} + jnp.mean(jnp.sum(scores**2, -1) * (y == 3))",  # depends on some targets only
        "return jnp.mean((scores[..., 0] - y) ** 2)",  # no probabilities at all
        f"scores = jnp.cumsum(scores[:, ::-1], 1)[:, ::-1]; return {CROSS_ENTROPY}",  # later tokens are seen
        f"scores = 0 * scores; return {CROSS_ENTROPY}",  # a constant: any values of this shape would do
    ],
)
def test_what_is_not_proved_is_refused(body: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its graph shows no logits"):
        find_logits(written(tmp_path, body))
