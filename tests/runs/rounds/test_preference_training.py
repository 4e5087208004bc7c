"""Two workers train on pairs of answers as a plain loop in JAX does, and prefer those they are to prefer."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_support import PLAIN, tokenizer_folder
from killable_run import KillableRun
from test_chat_training import BATCH, MODEL, RATE, ROUNDS, SETTINGS, STEPS

import planetary
from planetary.core.config import load_config
from planetary.core.errors import UserError
from planetary.data.reader import read_slice
from planetary.runs.rounds.preparation.preparation import prepare_run

LENGTH, BETA = 31, 0.5
LOGITS = '\ndef logits(params, tokens, **options):\n    return params["embed"][tokens] @ params["head"]\n'


def loss_fn(params: dict[str, jax.Array], columns: list[np.ndarray]) -> jax.Array:
    """DPO's loss over the pairs of a batch: tokens and targets [n, 2, LENGTH], reference [n, 2]."""
    tokens, targets, reference = columns
    losses = jax.nn.log_softmax(params["embed"][tokens] @ params["head"])
    rows = jnp.take_along_axis(losses, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    moved = jnp.where(targets >= 0, rows, 0.0).sum(-1) - reference
    return -jax.nn.log_sigmoid(BETA * (moved[:, 0] - moved[:, 1])).mean()


@pytest.mark.processes
def test_run_on_pairs_equals_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + LOGITS)
    tokenizer = tokenizer_folder(tmp_path / "model", PLAIN["chatml"])
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": f"No {n % 7}!"} for n in range(200)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = tmp_path / "run.toml"
    settings.write_text(
        f'{SETTINGS}[model]\nsource = "{tmp_path / "model.py"}:build"\n'
        f'[data]\nsource = "{tmp_path / "pairs.jsonl"}"\nformat = "preference"\ntokenizer = "{tokenizer}"\n'
        f'delivery = "gateway"\ndpo_beta = {BETA}\n'
    )
    overrides = (f"train.sequence_length={LENGTH}", "train.micro_batches=1")
    run = KillableRun(tmp_path / "run", tmp_path / "cache", example=str(settings), overrides=overrides)
    try:
        code, output, error = run.finish()
        assert code == 0, error
    finally:
        run.close()
    assert "200 pairs of answers, of which " in output

    config = load_config(tmp_path / "run" / "config.toml")
    data = prepare_run(config, tmp_path / "cache", lambda _: None).data
    assert data.layout is not None
    names, order = [column.name for column in data.layout.columns], data.order(config)
    keys = jax.random.split(jax.random.key(1))
    params = {"embed": jax.random.normal(keys[0], (400, 16)), "head": jax.random.normal(keys[1], (16, 400))}

    def columns(raw: np.ndarray, size: int) -> list[list[np.ndarray]]:
        arrays = [data.layout.column(raw, name) for name in names]  # type: ignore[union-attr]
        return [[part[at : at + size] for part in arrays] for at in range(0, len(arrays[0]), size)]

    held = columns(np.concatenate([read_slice(piece) for piece, _ in data.eval_chunks(config)]), 10**6)[0]
    assert float(loss_fn(params, held)) == pytest.approx(np.log(2), abs=1e-4)
    for index in range(ROUNDS):
        ends = []
        for lease in (2 * index, 2 * index + 1):
            own = params
            batches = columns(read_slice(order.locate(lease)), BATCH)
            assert len(batches) == STEPS
            for batch in batches:
                gradient = jax.grad(loss_fn)(own, batch)
                own = jax.tree.map(lambda value, slope: value - RATE * slope, own, gradient)
            ends.append(own)
        params = jax.tree.map(lambda one, other: (one + other) / 2, *ends)
    found = planetary.Run.open(tmp_path / "run")
    for name, values in found.params().items():
        np.testing.assert_allclose(values, params[name], rtol=1e-5, atol=2e-6)
    losses = {event["version"]: event["loss"] for event in run.of("eval_finished")}
    assert losses[ROUNDS] == pytest.approx(float(loss_fn(params, held)), rel=1e-4)
    assert losses[ROUNDS] < 0.5

    own = found.evaluate(metrics=["loss"], cache=tmp_path / "cache")
    assert own == {"held_out": {"loss": pytest.approx(losses[ROUNDS], rel=1e-5)}}
    with pytest.raises(UserError, match=r"--metric accuracy: .* of which only the loss is known"):
        found.evaluate(metrics=["accuracy"], cache=tmp_path / "cache")
