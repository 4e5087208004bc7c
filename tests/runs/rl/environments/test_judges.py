"""An environment that hangs, raises, forks, prints, allocates or leaves processes costs its rollout only."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from planetary.core.errors import UserError
from planetary.runs.rl.environments.judge_process import Case
from planetary.runs.rl.environments.judges import JudgeLimits, JudgeProcesses, check_environment
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.environments.tasks import Problem

pytestmark = pytest.mark.processes

ENVIRONMENT = """
import os, subprocess, sys, time

FORGED = b'{"ticket":"","verdict":{"reward":1e9}}\\n'

from planetary.extend import Task

class Reward(Task):
  def judge(self, prompt, completions, meta):
    completion = completions[-1]
    if completion == "hang":
        while True: time.sleep(1)
    if completion == "raise":
        raise ValueError("no")
    if completion == "exit":
        os._exit(3)
    if completion == "leave":
        sys.exit(2)
    if completion == "fork":
        os.fork()
        return 0.5
    if completion == "process":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(meta["pid"], "w").write(str(child.pid))
        return 0.5
    if completion == "memory":
        return len(bytearray(1 << 34))
    if completion == "print":
        print("x" * (64 << 20), flush=True)
        sys.stderr.write("y" * (64 << 20))
    if completion.startswith("forge"):
        for fd in range(3, 30):
            try:
                os.write(fd, FORGED * int(completion[-1]))
            except OSError:
                pass
    if completion == "nan":
        return float("nan")
    return 1.0
"""


TASK = "from planetary.extend import Task\n"


async def judged(task: str, completions: list[str], meta: dict[str, str], seconds: float = 2.0) -> list[Judged]:
    judges = JudgeProcesses(task, JudgeLimits(processes=2, seconds=seconds, memory_bytes=2 << 30))
    try:
        return await judges.judge([Case("p", (completion,), dict(meta)) for completion in completions])
    finally:
        await judges.close()


def test_a_broken_completion_costs_itself_only(tmp_path: Path) -> None:
    path, pid = tmp_path / "environment.py", tmp_path / "pid"
    path.write_text(ENVIRONMENT)
    bad = ["hang", "raise", "exit", "leave", "fork", "process", "memory", "nan"]
    completions = [one for name in bad for one in (name, "fine")] + ["print"]
    found = dict(enumerate(asyncio.run(judged(f"{path}:Reward", completions, {"pid": str(pid)}))))
    assert [found[i].reward for i in range(1, 2 * len(bad), 2)] == [1.0] * len(bad)
    problems = {name: found[2 * i].problem for i, name in enumerate(bad)}
    assert problems == {
        "hang": "it took longer than 2 s",
        "raise": "it raised ValueError: no",
        "exit": "its process exited with status 3",
        "leave": "it raised SystemExit: 2",
        "fork": problems["fork"],
        "process": "it left processes running",
        "memory": "it raised MemoryError: ",
        "nan": "it returned nan",
    }
    assert found[10].reward is None
    assert found[2 * len(bad)].reward == 1.0  # what is printed goes nowhere
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(10)  # it was killed; the system buries it a moment later


def test_a_reward_cannot_write_verdicts_by_itself(tmp_path: Path) -> None:
    """Lines that the environment writes to the pipe of the verdicts count for no completion, its own or a later one."""
    path = tmp_path / "environment.py"
    path.write_text(ENVIRONMENT)
    completions = ["fine", "forge1", "fine", "forge3", "fine", "fine"]
    verdicts = asyncio.run(judged(f"{path}:Reward", completions, {}))
    assert {verdict.reward for verdict in verdicts} <= {1.0, None}
    assert [verdicts[i].reward for i in (0, 2, 4, 5)] == [1.0] * 4
    assert {verdicts[i].problem for i in (1, 3)} == {"it wrote to the pipe of the verdicts"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(3)", "exited with status 3 before it was ready"),
        ("import nothing_of_this_name", "failed while it was loaded: .*No module named 'nothing_of_this_name'"),
        ("class Rewards: pass", "Reward: no class; expected a class derived from planetary.extend.Task"),
        ("def Reward(prompts, completions, **kwargs): return [1.0]", r"called with .* .prompt, completion, meta., one"),
        ("Reward = 1.0", "Reward: no class; expected a class derived from"),
        ("class Reward: pass", "Reward: no Task; expected a class derived from planetary.extend.Task"),
        (f"{TASK}class Reward(Task): pass", "Reward: the class lacks judge"),
        (
            f"{TASK}class Reward(Task):\n    judge = print\n    def problems(self): return 1 / 0",
            "Reward: its prompts or tools: ZeroDivisionError",
        ),
        (
            f"{TASK}class Reward(Task):\n    def judge(self, prompts): return 1",
            "called with .prompt, completions, meta.",
        ),
    ],
)
def test_a_useless_environment_is_refused_at_the_start(tmp_path: Path, code: str, reason: str) -> None:
    path = tmp_path / "environment.py"
    path.write_text(code)
    with pytest.raises(UserError, match=reason):
        check_environment(f"{path}:Reward", JudgeLimits(processes=1, seconds=2.0, memory_bytes=2 << 30))


def test_an_environment_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('not today')")
    with pytest.raises(UserError, match="RuntimeError: not today"):
        asyncio.run(judged(f"{path}:Reward", ["x"], {}))


def test_calls_of_tools_run_in_the_process(tmp_path: Path) -> None:
    """An answer is a message, what a call raises is its text, and a dialogue that is over is judged."""
    path = tmp_path / "tools.py"
    path.write_text(
        f"{TASK}from planetary.extend import Problem\nimport os\n"
        "class Reward(Task):\n"
        "    tools = [{'type': 'function', 'function': {'name': 'process'}}]\n"
        "    def problems(self): return [Problem([{'role': 'user', 'content': 'a'}], '', {})]\n"
        "    def judge(self, prompt, completions, meta): return float(len(completions))\n"
        "    def call(self, name, arguments, meta): return f'{os.getpid()} {arguments[\"x\"]}'\n"
    )

    def chat(arguments: dict[str, int]) -> tuple[dict[str, Any], ...]:
        call = {"id": "call00001", "function": {"name": "process", "arguments": arguments}}
        return ({"role": "assistant", "content": "", "tool_calls": [call]},)

    async def ask() -> list[Judged]:
        judges = JudgeProcesses(f"{path}:Reward", JudgeLimits(processes=1, seconds=5.0, memory_bytes=2 << 30))
        cases = [Case([], ("a",), {}, chat({"x": 1})), Case([], ("a",), {}, chat({"y": 1}))]
        try:
            return await judges.judge([*cases, Case([], ("a", "b"), {}, chat({"x": 1}), is_over=True)])
        finally:
            await judges.close()

    answered, failed, over = asyncio.run(ask())
    assert answered.messages is not None
    pid, _, given = answered.messages[0].pop("content").partition(" ")
    assert (int(pid) != os.getpid(), given) == (True, "1")
    assert answered.messages == [{"role": "tool", "tool_call_id": "call00001", "name": "process"}]
    assert failed.messages is not None
    assert failed.messages[0]["content"] == "KeyError: 'x'"
    assert over == Judged(reward=2.0)
    (tool,), problems = check_environment(f"{path}:Reward", JudgeLimits(1, 5.0, 2 << 30))
    assert tool["function"]["name"] == "process"
    assert problems == (Problem([{"role": "user", "content": "a"}], "", {}, []),)
