"""Dropout has a key per lease and step: whoever trains a lease again draws the masks of the first time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from killable_run import KillableRun

import planetary

STEPS = 4000  # long enough that a worker is killed in the middle of its lease

MODEL = """
import jax, jax.numpy as jnp, numpy as np

def build(batch_size, sequence_length):
    keys = jax.random.split(jax.random.key(1))
    params = {
        "embed": jax.random.normal(keys[0], (256, 16)) * 0.1,
        "head": jax.random.normal(keys[1], (16, 256)) * 0.1,
    }

    def loss_fn(params, tokens, targets, *, key=None):
        x = params["embed"][tokens]
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0.0)
        scores = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(scores, targets[..., None], -1).mean()

    batch = np.zeros((batch_size, sequence_length), np.int32)
    return loss_fn, params, (batch, batch)
"""
SETTINGS = f"""
[run]
seed = 11
[data]
source = "stdlib"
[train]
rounds = 1
inner_steps = {STEPS}
batch_size = 4
sequence_length = 32
[optimizer]
warmup_steps = 2
schedule = "constant"
[outer]
merge = "mean"
judge = "none"
[eval]
batches = 1
[sync]
compression = "none"
broadcast_compression = "none"
start_compression = "none"
[fabric]
workers = 2
quorum = 2
threads = 1
"""


@pytest.fixture
def runs() -> Iterator[list[KillableRun]]:
    begun: list[KillableRun] = []
    yield begun
    for run in begun:
        run.close()


@pytest.mark.processes
def test_lease_trained_again_elsewhere_gives_the_same_bits(tmp_path: Path, runs: list[KillableRun]) -> None:
    """A worker is killed in its lease and does not come back; the other one trains the lease in the same round."""
    (tmp_path / "dropout.py").write_text(MODEL)
    settings = tmp_path / "run.toml"
    settings.write_text(f'{SETTINGS}[model]\nsource = "{tmp_path / "dropout.py"}:build"\n')
    cache = tmp_path / "cache"

    def start(name: str) -> KillableRun:
        runs.append(KillableRun(tmp_path / name, cache, example=str(settings), overrides=()))
        return runs[-1]

    calm = start("calm")
    code, _, error = calm.finish()
    assert code == 0, error

    disturbed = start("disturbed")
    started = disturbed.wait_for_event("lease_started", round=1)
    node, supervisor = disturbed.child("node-manager"), disturbed.child("supervisor", started["worker"])
    node.suspend()  # which would start the supervisor again
    supervisor.kill()
    disturbed.wait_for_event("worker_lost", worker=started["worker"])
    again = disturbed.wait_for_event("lease_started", lease=started["lease"])
    assert again["worker"] != started["worker"]
    accepted = disturbed.wait_for_event("delta_accepted", lease=started["lease"])
    assert (accepted["worker"], accepted["round"]) == (again["worker"], 1)
    node.resume()
    code, _, error = disturbed.finish()
    assert code == 0, error

    found, expected = (planetary.Run.open(tmp_path / name).params() for name in ("disturbed", "calm"))
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    before = 0.1 * jax.random.normal(jax.random.split(jax.random.key(1))[0], (256, 16))
    assert not np.array_equal(before, expected["embed"]), "nothing was trained"
