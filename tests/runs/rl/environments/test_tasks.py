"""Built-in tasks, files of prompts, and what a user's file may have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from planetary.core.errors import UserError
from planetary.core.extension_points import TASKS
from planetary.runs.rl.environments.judging import Judged, task_of, verdict_of
from planetary.runs.rl.environments.problems import DrawnProblems, problems_of
from planetary.runs.rl.environments.tasks import Task

PAGE = (Path(__file__).parents[4] / "docs" / "extending.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n(?=# (\w+\.py))(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", TASKS.built_in)
def test_an_answer_has_the_reward_one_and_anything_else_less(name: str) -> None:
    task = task_of(name)
    for seed in range(50):
        problem = task.problem(np.random.default_rng(seed))
        assert task.judge(problem.prompt, [problem.answer], problem.meta) == 1.0
        for other in ("", "?", problem.answer[:-1], problem.answer + "x", "9" * 60):
            assert 0.0 <= float(task.judge(problem.prompt, [other], problem.meta)) <= 0.5


def test_a_countdown_is_right_whatever_the_order() -> None:
    task = task_of("countdown")

    def reward(prompt: str, completion: str, meta: dict[str, object]) -> float | str:
        return task.judge(prompt, [completion], meta)

    meta = {"numbers": [2, 3, 4], "target": 14}
    assert reward("", "2+3*4", meta) == reward("", "4*3+2", meta) == 1.0
    assert reward("", "2*3*4", meta) == 0.3
    assert reward("", "14", meta) == 0.1
    assert reward("", "2+3*4+0", meta) == 0.1
    assert reward("", "__import__('os')", meta) == 0.0


def test_a_reward_is_a_function_of_a_file(tmp_path: Path) -> None:
    """Its file is as people write it: with a dataclass and postponed annotations."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    letters: str\nRULE = Rule('ab')\n"
        "def reward(prompt: str, completion: str, meta: dict) -> float:\n"
        "    return sum(c in RULE.letters for c in completion) / meta['of']\n"
    )
    assert task_of(f"{path}:reward").judge("?", ["x", "abc"], {"of": 4}) == 0.5
    with pytest.raises(UserError, match=r"makes no prompts .*, so it needs rl\.prompts"):
        problems_of(f"{path}:reward", "", seed=0, held_out=2)


def test_prompts_depend_on_seed_and_number_alone() -> None:
    """Prompts are functions of seed and number and held-out ones of the number."""
    one, other = (DrawnProblems(task_of("reverse"), seed, 4) for seed in (0, 1))
    assert one.train(7) == DrawnProblems(task_of("reverse"), 0, 4).train(7)
    assert one.train(7) != other.train(7) != other.train(8)
    assert [one.held_out(i) for i in range(4)] == [other.held_out(i) for i in range(4)]


def test_a_task_of_few_prompts_trains_on_no_held_out_one() -> None:
    """There are some 2,000 prompts of countdown, so each is drawn every few rounds."""
    problems = DrawnProblems(task_of("countdown"), 1, 128)
    held = {problems.held_out(i).prompt for i in range(128)}
    trained = [problems.train(number) for number in range(1, 1001)]
    drawn = [task_of("countdown").problem(np.random.default_rng((1, 0, number))) for number in range(1, 1001)]
    assert not held & {one.prompt for one in trained}
    assert [a == b for a, b in zip(trained, drawn, strict=True)] == [one.prompt not in held for one in drawn]
    assert not all(a == b for a, b in zip(trained, drawn, strict=True))


def test_a_countdown_teaches_one_answer_of_a_prompt() -> None:
    problems = [task_of("countdown").problem(np.random.default_rng(seed)) for seed in range(4000)]
    assert len({(one.prompt, one.answer) for one in problems}) == len({one.prompt for one in problems}) < 2145


def test_prompt_file_holds_some_out_and_is_shuffled_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i, "level": i % 2}) for i in range(10)))
    problems = problems_of("mine.py:Reward", str(path), seed=1, held_out=3)
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
    problems = problems_of("mine.py:Reward", str(path), seed=0, held_out=1)
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
        problems_of("mine.py:Reward", str(path), seed=1, held_out=1)


def test_csv_has_prompts_too_and_a_task_of_ones_own_needs_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.csv"
    path.write_text("prompt,answer\na,b\nc,d\n")
    assert {problems_of("mine.py:Own", str(path), 0, 1).train(i).answer for i in (1, 2)} <= {"b", "d"}
    own = tmp_path / "mine.py"
    own.write_text("from planetary.extend import Task\nclass Own(Task):\n    def judge(self, *given): return 1\n")
    with pytest.raises(UserError, match=r"needs rl\.prompts"):
        problems_of(f"{own}:Own", "", 0, 1)


def test_an_own_task_makes_prompts_and_replies(tmp_path: Path) -> None:
    """The page's example makes prompts without a file, and goes on until the number is guessed."""
    path = tmp_path / "my_task.py"
    path.write_text(EXAMPLES["my_task.py"])
    problem = problems_of(f"{path}:Guess", "", seed=3, held_out=2).train(1)
    guess: Task = task_of(f"{path}:Guess")
    number = problem.meta["number"]
    assert guess.judge(problem.prompt, [str(number)], problem.meta) == 1.0
    assert guess.judge(problem.prompt, [str(number - 1)], problem.meta) == "\nmore:"
    assert guess.judge(problem.prompt, [str(number - 1), str(number)], problem.meta) == 0.5
    assert guess.judge(problem.prompt, ["?"], problem.meta) == 0.0


def test_a_verdict_is_a_number_or_a_text() -> None:
    assert verdict_of(2) == Judged(reward=2.0)
    assert verdict_of("no\n") == Judged(reply="no\n")
    assert verdict_of(float("nan")).problem == "it returned nan"
    assert verdict_of(None).problem == "it returned NoneType where a number or a text is expected"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ("revers", "unknown task 'revers'; did you mean reverse"),
        ("no_such_module:x", "unknown task .*file.py:Name"),
        ("missing.py:f", "cannot read .*missing.py"),
    ],
)
def test_a_task_that_is_not_there_is_named(task: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        task_of(task)
