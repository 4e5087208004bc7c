from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planetary.core.config import load_config
from planetary.runs.rl.config import RlConfig, check_keys
from planetary.runs.rl.environments.judging import task_of

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("name", ["reverse", "sort", "add"])
def test_examples_answers_fit_and_its_imitation_ends_early(name: str) -> None:
    """Prompt, answer and end are within the text's length, of which all but the last token are read."""
    config = load_config(EXAMPLES / f"{name}.toml")
    check_keys(config)
    rl = config.of(RlConfig)
    for number in range(200):
        problem = task_of(rl.task).problem(np.random.default_rng(number))
        assert len(problem.answer) + 1 <= rl.max_tokens
        assert len(problem.prompt) + len(problem.answer) + 1 <= config.train.sequence_length + 1
    assert 0 < rl.imitation_goal < 0.4
    assert rl.goal == 0  # a fixed number of rounds: the reward of the last is none that was chosen
    assert 0 < rl.imitated_rounds < config.train.rounds
