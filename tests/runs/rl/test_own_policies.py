"""A policy from a user's file is compared with JAX before the run, as the model of every other kind of run is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from planetary.compiler.frontend.author import JaxAuthor
from planetary.compiler.frontend.manifest import manifest_from_json
from planetary.core.config import load_config
from planetary.core.errors import CompileError
from planetary.fleet.gateway.gateway import GatewayOptions
from planetary.fleet.gateway.run_files import MANIFEST
from planetary.run.model.served import load_folder, new_model
from planetary.runs.rl.preparation import PreparedPolicy, policy_of_run, prepare_policy
from planetary.runs.rl.start import begin_policy

OWN = """
import jax
import jax.numpy as jnp
from planetary.models import gpt2

cache_sizes = gpt2.cache_sizes

def decode(params, tokens, context, **options):
    scores = gpt2.decode(params["net"], tokens, context, **options)
    return scores * params["sharpness"]

def build(**options):
    _, params, example = gpt2.build(**options)
    return (lambda *_: 0.0), {"net": params, "sharpness": jnp.ones(())}, example
"""
RUN = """
[rl]
task = "reverse"
groups = 2
completions = 2
max_tokens = 8
imitated_rounds = 1

[model]
source = "own.py:build"
options = { n_layer = 1, n_head = 2, n_embd = 16, vocab_size = 256, n_position = 16 }

[train]
rounds = 2
inner_steps = 1
batch_size = 4
sequence_length = 14
micro_batches = 2

[outer]
learning_rate = 1.0
momentum = 0.0
"""

pytestmark = pytest.mark.slow


def prepared(folder: Path) -> PreparedPolicy:
    """The run of a policy of the user's, in `folder`."""
    (folder / "own.py").write_text(OWN)
    (folder / "run.toml").write_text(RUN)
    return prepare_policy(load_config(folder / "run.toml"), lambda stage: None, new_model, load_folder)


def test_comparison_is_in_the_manifest_of_the_run(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    options = GatewayOptions(folder=tmp_path / "run", cache=tmp_path, host="127.0.0.1", port=0, resume=False)
    begin_policy(run.config, options, run, policy_of_run(run.config, run, local=True))
    manifest = manifest_from_json((tmp_path / "run" / MANIFEST).read_bytes())
    assert manifest == run.manifest
    assert manifest.meaning is not None
    assert (manifest.meaning.author, manifest.meaning.batches) == ("framework", 2)
    assert manifest.meaning.worst < 1e-4
    assert [spec.name for spec in manifest.of_role("param")] == [spec.name for spec in run.model.specs]


def test_another_gradient_is_refused_with_parameter_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = JaxAuthor.loss_and_gradients

    def other(
        self: JaxAuthor, params: Mapping[str, np.ndarray], batch: Sequence[np.ndarray]
    ) -> tuple[float, dict[str, np.ndarray | None]]:
        loss, gradients = known(self, params, batch)
        gradient = gradients["sharpness"]
        assert gradient is not None
        return loss, {**gradients, "sharpness": gradient * 1.001}

    monkeypatch.setattr(JaxAuthor, "loss_and_gradients", other)
    says = r"policy: on batch 1 .*the gradient of 'sharpness' differs .*first used at .*own\.py, line 10 in"
    with pytest.raises(CompileError, match=says):
        prepared(tmp_path)
