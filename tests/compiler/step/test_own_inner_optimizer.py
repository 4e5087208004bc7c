"""An inner optimizer and a schedule from a folder outside the package, in a compiled step and on a worker."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from step_runs import Run, mlp_batch, mlp_model, mlp_params

from planetary.compiler.step.train_step import build_train_step
from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.extension_points import INNER_OPTIMIZERS
from planetary.core.schedules import Schedule
from planetary.runs.rounds.preparation.training_options import schedule_of, step_options

PAGE = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))
FIXED = ("optimizer.weight_decay=0", "optimizer.clip_norm=0")


def test_an_own_inner_optimizer_is_compiled_into_the_step(tmp_path: Path) -> None:
    """The first step of Adagrad moves a coordinate by the rate times g / (|g| + ε), and the state is the squares."""
    (tmp_path / "my_inner.py").write_text(EXAMPLES["my_inner.py"])
    options = step_options(apply_overrides(Config(), [f"optimizer.name={tmp_path}/my_inner.py:Adagrad", *FIXED]))
    assert re.fullmatch(r"my_inner\.py:Adagrad@[0-9a-f]{64}", options.optimizer)
    run = Run(build_train_step(mlp_model(), options), mlp_params(), Schedule(kind="constant", peak=0.01))
    before = [value.copy() for value in run.params]
    run(0, mlp_batch(0))
    squares = run.named()
    for spec, old, new in zip(run.step.spec.params, before, run.params, strict=True):
        gradient = np.sqrt(squares[f"adagrad.sum.{spec.name}"])
        np.testing.assert_allclose(np.abs(new - old), 0.01 * gradient / (gradient + 1e-8), rtol=2e-3, atol=1e-7)
    second = [value.copy() for value in run.params]
    run(1, mlp_batch(1))
    moved = [
        np.abs(a - b).mean() for a, b in ((run.params, second), (second, before)) for a, b in zip(a, b, strict=True)
    ]
    assert np.mean(moved[: len(moved) // 2]) < np.mean(moved[len(moved) // 2 :])  # squares only grow


def test_another_text_is_another_step(tmp_path: Path) -> None:
    path = tmp_path / "my_inner.py"
    path.write_text(EXAMPLES["my_inner.py"])
    config = apply_overrides(Config(), [f"optimizer.name={path}:Adagrad"])
    before = step_options(config)
    path.write_text(EXAMPLES["my_inner.py"].replace("adagrad.sum", "sums"))
    assert step_options(config) != before
    assert INNER_OPTIMIZERS.find(before.optimizer) is not INNER_OPTIMIZERS.find(step_options(config).optimizer)


def test_an_own_schedule_gives_the_rates(tmp_path: Path) -> None:
    """It warms up as the others do, and travels by the pinned name."""
    (tmp_path / "my_schedule.py").write_text(EXAMPLES["my_schedule.py"])
    given = [f"optimizer.schedule={tmp_path}/my_schedule.py:Steps", "optimizer.learning_rate=0.5", "train.rounds=10"]
    schedule = schedule_of(apply_overrides(Config(), [*given, "optimizer.warmup_steps=2"]), 100)
    schedule = msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule)
    assert [round(schedule.rate(step), 6) for step in (0, 1, 49, 50, 75, 200)] == [0.25, 0.5, 0.5, 0.05, 0.005, 0.005]


def test_a_curve_with_unknown_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from planetary.extend import Curve\n"
        "class Own(Curve):\n    keys = ('beta1',)\n    def fraction(self, *given): return 1.0\n"
    )
    with pytest.raises(UserError, match="expected no keys but final_fraction, found beta1"):
        schedule_of(apply_overrides(Config(), [f"optimizer.schedule={tmp_path}/own.py:Own"]), 100)
