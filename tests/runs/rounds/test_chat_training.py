"""Two workers train on chats as a plain loop in JAX does, which leaves out what the assistant did not say."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_support import PLAIN, said, tokenizer_folder
from killable_run import KillableRun

import planetary
from planetary.core.config import load_config
from planetary.data.prepare import prepare
from planetary.data.reader import read_slice

MODEL = """
import jax, jax.numpy as jnp, numpy as np
from planetary.models.layers import cross_entropy

def build(batch_size, sequence_length):
    keys = jax.random.split(jax.random.key(1))
    params = {
        "embed": jax.random.normal(keys[0], (400, 16)),
        "head": jax.random.normal(keys[1], (16, 400)),
    }
    batch = np.zeros((batch_size, sequence_length), np.int32)
    return lambda p, tokens, targets: cross_entropy(p["embed"][tokens] @ p["head"], targets), params, (batch, batch)
"""
ROUNDS, STEPS, BATCH, LENGTH, RATE = 2, 2, 4, 15, 0.5
SETTINGS = f"""
[train]
rounds = {ROUNDS}
inner_steps = {STEPS}
batch_size = {BATCH}
sequence_length = {LENGTH}
micro_batches = 2
[optimizer]
name = "sgd"
momentum = 0.0
learning_rate = {RATE}
weight_decay = 0.0
clip_norm = 0.0
warmup_steps = 0
schedule = "constant"
[outer]
learning_rate = 1.0
momentum = 0.0
merge = "mean"
judge = "none"
[eval]
batches = 3
[sync]
compression = "none"
broadcast_compression = "none"
start_compression = "none"
[fabric]
workers = 2
quorum = 2
threads = 1
"""


def loss_fn(params: dict[str, jax.Array], blocks: np.ndarray) -> jax.Array:
    """Mean over the tokens that are not negative, the complements of ids; blocks [n, LENGTH + 1]."""
    ids, targets = np.where(blocks < 0, ~blocks, blocks)[:, :-1], blocks[:, 1:]
    losses = -jax.nn.log_softmax(params["embed"][ids] @ params["head"])
    rows = jnp.take_along_axis(losses, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return rows[targets >= 0].mean()


@pytest.mark.processes
def test_run_on_chats_equals_a_plain_loop(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    tokenizer = tokenizer_folder(tmp_path / "model", PLAIN["chatml"])
    chats = [{"messages": said(f"{'why ' * (n % 9)}{n} + 1?", f"It is {n + 1}.")} for n in range(200)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings = tmp_path / "run.toml"
    settings.write_text(
        f'{SETTINGS}[model]\nsource = "{tmp_path / "model.py"}:build"\n'
        f'[data]\nsource = "{tmp_path / "chats.jsonl"}"\ntokenizer = "{tokenizer}"\ndelivery = "gateway"\n'
    )
    run = KillableRun(tmp_path / "run", tmp_path / "cache", example=str(settings), overrides=())
    try:
        code, output, error = run.finish()
        assert code == 0, error
    finally:
        run.close()
    assert "of chats; the first begins '<|im_start|>user" in output

    config = load_config(tmp_path / "run" / "config.toml")
    data = prepare(config, tmp_path / "cache" / "data")
    order = data.order(config)
    keys = jax.random.split(jax.random.key(1))
    params = {"embed": jax.random.normal(keys[0], (400, 16)), "head": jax.random.normal(keys[1], (16, 400))}
    for index in range(ROUNDS):
        ends = []
        for lease in (2 * index, 2 * index + 1):
            own = params
            for blocks in read_slice(order.locate(lease)).reshape(STEPS, BATCH, LENGTH + 1):
                gradient = jax.grad(loss_fn)(own, blocks)
                own = jax.tree.map(lambda value, slope: value - RATE * slope, own, gradient)
            ends.append(own)
        params = jax.tree.map(lambda one, other: (one + other) / 2, *ends)
    found = planetary.Run.open(tmp_path / "run")
    for name, values in found.params().items():
        np.testing.assert_allclose(values, params[name], rtol=1e-5, atol=1e-6)
    held = [read_slice(piece).reshape(-1, LENGTH + 1) for piece, _ in data.eval_chunks(config)]
    losses = {event["version"]: event["loss"] for event in run.of("eval_finished")}
    assert losses[ROUNDS] == pytest.approx(float(loss_fn(params, np.concatenate(held))), rel=1e-5)
