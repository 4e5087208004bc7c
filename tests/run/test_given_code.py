"""A task given as an object: the text that judges load, and what cannot be given."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planetary.core.errors import UserError
from planetary.extend import Task
from planetary.run.given_code import text_of
from planetary.run.rl import _task_of
from planetary.runs.rl.environments.judging import task_of
from waiting import HANG_S

FACTOR = 3
strip = "a variable named like a method"


def judged(given: Any, folder: Path, *completions: str) -> float | str:
    """Write the text of a task into a file, load it as a judge does, and judge."""
    name, text = _task_of(given)
    (folder / "given_task.py").write_text(text)
    return task_of(f"{folder / 'given_task.py'}:{name}").judge("2+2=", completions, {"answer": "4"})


def test_nested_function_is_copied_with_its_modules(tmp_path: Path) -> None:
    def reward(prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return math.floor(len(re.findall("a", completion.strip())) + len(Path(completion).name)) + FACTOR * len(meta)

    assert judged(reward, tmp_path, "aab") == 8.0


def test_class_of_tasks_is_copied(tmp_path: Path) -> None:
    class Twice(Task):
        limit = math.inf

        def judge(self, prompt: str, completions: Any, meta: Any) -> float | str:
            return min(self.limit, len(completions)) if len(completions) == 2 else "and?"

    assert judged(Twice, tmp_path, "a") == "and?"
    assert judged(Twice, tmp_path, "a", "b") == 2.0


def test_file_of_a_module_is_copied_whole(tmp_path: Path) -> None:
    """A function of a file may use the rest of the file; one of a package's module is copied alone."""
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def half(x):\n    return x / 2\n\n\ndef reward(prompt, completion, meta):\n    return half(len(completion))\n"
    )
    spec = importlib.util.spec_from_file_location("my_rewards", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_rewards"] = module
    try:
        spec.loader.exec_module(module)
        assert judged(module.reward, tmp_path, "four") == 2.0
    finally:
        del sys.modules["my_rewards"]
    assert "class Task" not in text_of(Task.judge, "task")


def test_code_that_cannot_travel_is_named() -> None:
    factor = {"a": FACTOR}

    def uses_factor(prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return factor["a"] * len(completion)

    class Reward:
        def __call__(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
            return 1.0

    given: tuple[tuple[Any, str], ...] = (
        (uses_factor, r'task: uses_factor uses factor of this program.*give "FILE\.py:NAME"'),
        (Reward(), "a Reward has no code that another process could load"),
        (Reward, r"Reward is no task: derive the class from planetary\.extend\.Task"),
        (lambda prompt, completion, meta: 1.0, "a lambda has no name"),
        (len, "a builtin_function_or_method has no code"),
    )
    for value, said in given:
        with pytest.raises(UserError, match=said):
            _task_of(value)


def test_function_of_a_script_is_copied_and_the_script_not_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nfrom planetary.run.given_code import text_of\n\n\n"
        "def reward(prompt, completion, meta):\n    return len(json.dumps(completion))\n\n\n"
        'print(text_of(reward, "task"))\n'
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "import json as json" in done.stdout
    assert "text_of" not in done.stdout
