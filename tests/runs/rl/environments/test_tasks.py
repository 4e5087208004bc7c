"""Built-in tasks, files of prompts, and what a user's file may have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from planetary.core.errors import UserError
from planetary.runs.rl.environments.judging import Judged, judge_of
from planetary.runs.rl.environments.problems import DrawnProblems, problems_of
from planetary.runs.rl.environments.tasks import TASKS


@pytest.mark.parametrize("name", TASKS)
def test_an_answer_has_the_reward_one_and_anything_else_less(name: str) -> None:
    task = TASKS[name]
    for seed in range(50):
        problem = task.problem(np.random.default_rng(seed))
        assert task.reward(problem.prompt, problem.answer, problem.meta) == 1.0
        for other in ("", "?", problem.answer[:-1], problem.answer + "x", "9" * 60):
            assert 0.0 <= task.reward(problem.prompt, other, problem.meta) <= 0.5


def test_a_countdown_is_right_whatever_the_order() -> None:
    reward = TASKS["countdown"].reward
    meta = {"numbers": [2, 3, 4], "target": 14}
    assert reward("", "2+3*4", meta) == reward("", "4*3+2", meta) == 1.0
    assert reward("", "2*3*4", meta) == 0.3
    assert reward("", "14", meta) == 0.1
    assert reward("", "2+3*4+0", meta) == 0.1
    assert reward("", "__import__('os')", meta) == 0.0


def test_prompts_depend_on_seed_and_number_alone() -> None:
    """Prompts are functions of seed and number and held-out ones of the number."""
    one, other = (DrawnProblems(TASKS["reverse"], seed, 4) for seed in (0, 1))
    assert one.train(7) == DrawnProblems(TASKS["reverse"], 0, 4).train(7)
    assert one.train(7) != other.train(7) != other.train(8)
    assert [one.held_out(i) for i in range(4)] == [other.held_out(i) for i in range(4)]


def test_prompt_file_holds_some_out_and_is_shuffled_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i, "level": i % 2}) for i in range(10)))
    problems = problems_of("mine.py:reward", str(path), seed=1, held_out=3)
    held = {problems.held_out(i).prompt for i in range(3)}
    epochs = [[problems.train(number).prompt for number in range(1 + 7 * e, 8 + 7 * e)] for e in range(2)]
    assert len(held) == 3
    assert all(set(epoch) == {f"p{i}" for i in range(10)} - held for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert problems.train(1).meta.keys() == {"answer", "level"}


def test_prompts_of_a_parquet_file_have_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    rows = {"prompt": ["a", "b", "c"], "answer": ["x", "y", "z"], "level": [1, 2, 3]}
    parquet.write_table(pyarrow.table(rows), path)
    problems = problems_of("mine.py:reward", str(path), seed=0, held_out=1)
    found = [problems.held_out(0), problems.train(1), problems.train(2)]
    assert {(one.prompt, one.answer, one.meta["level"]) for one in found} == set(zip(*rows.values(), strict=True))


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('{"question": "x"}\n{"question": "y"}', 'the field "prompt"; found the fields question'),
        ('{"prompt": "x"}', "expected more than rl.held_out = 1"),
        ("[1]\n[2]", "expected an object"),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, lines: str, why: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=why):
        problems_of("mine.py:reward", str(path), seed=1, held_out=1)


def test_csv_has_prompts_too_and_a_task_of_ones_own_needs_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,answer\na,b\nc,d\n")
    assert {problems_of("x:y", str(path), 0, 1).train(i).answer for i in (1, 2)} <= {"b", "d"}
    with pytest.raises(UserError, match=r"needs rl\.prompts"):
        problems_of("x:y", "", 0, 1)


def test_functions_and_dialogues_judge(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def reward(prompt, completion, meta):\n"
        "    return {'nan': float('nan'), 'text': 'x', 'good': meta['worth']}[completion]\n"
        "class Guess:\n"
        "    def __init__(self, prompt, meta): self.tries, self.meta = 0, meta\n"
        "    def reply(self, completion):\n"
        "        self.tries += 1\n"
        "        return None if completion == self.meta['n'] or self.tries == 3 else 'no\\n'\n"
        "    def reward(self): return 1 / self.tries\n"
    )
    judge = judge_of(f"{path}:reward")
    assert judge("p", ["good"], {"worth": 2}) == Judged(reward=2.0)
    assert judge("p", ["nan"], {"worth": 2}).problem == "it returned nan"
    assert judge("p", ["text"], {"worth": 2}).problem == "it returned str where a number is expected"
    guess = judge_of(f"{path}:Guess")
    assert guess("p", ["3"], {"n": "5"}) == Judged(reply="no\n")
    assert guess("p", ["3", "5"], {"n": "5"}) == Judged(reward=0.5)
    assert guess("p", ["3", "4", "6"], {"n": "5"}) == Judged(reward=1 / 3)


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("revers", "expected reverse, add, sort, countdown"),
        ("no_such_module:x", "there is no module no_such_module"),
        ("json:no_such_name", "json has no function or class no_such_name"),
        ("missing.py:f", "there is no file .*missing.py"),
    ],
)
def test_a_task_that_is_not_there_is_named(task: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        judge_of(task)
