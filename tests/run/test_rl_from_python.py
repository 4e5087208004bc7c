"""`planetary.rl`: what it starts, without processes; and a reward function that real judges run."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_story import metrics

import planetary
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.extend import Task
from planetary.run import handle
from planetary.run.metrics import rewards_of
from planetary.run.processes.local_run import LocalRunOptions, Outcome, RunObserver
from planetary.runs.rl.config import RlConfig
from planetary.runs.rl.environments.judging import task_of
from planetary.runs.rl.status import PolicyMetrics


class FakeRun:
    """Ends at once, with one line of metrics of a round that was rewarded."""

    made: list[FakeRun]

    def __init__(self, config: Config, options: LocalRunOptions, observer: RunObserver) -> None:
        self.config, self.options, self.observer = config, options, observer
        self.made.append(self)

    async def run(self) -> Outcome:
        await asyncio.sleep(0)
        return "finished"

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    @property
    def rl(self) -> RlConfig:
        return self.config.of(RlConfig)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeRun]:
    kind = type("Fake", (FakeRun,), {"made": []})
    monkeypatch.setattr(handle, "LocalRun", kind)
    monkeypatch.chdir(tmp_path)
    return kind


def test_policy_task_and_prompts_are_given_as_objects(fake: type[FakeRun], tmp_path: Path) -> None:
    def reward(prompt: str, completion: str, meta: dict[str, Any]) -> float:
        return float(completion == meta["answer"])

    (tmp_path / "events.jsonl").write_text("")
    policy = planetary.Run.open(tmp_path)
    prompts = ["1+1=", {"prompt": "2+2=", "answer": "4"}]
    run = planetary.rl(policy=policy, task=reward, prompts=prompts, run_dir="here", rounds=3, workers=1)
    (made,) = fake.made
    assert run.folder == made.options.folder == tmp_path / "here"
    assert (made.rl.start, made.config.train.rounds, made.config.fabric.workers) == (str(tmp_path), 3, 1)
    lines = [json.loads(line) for line in Path(made.rl.prompts).read_text().splitlines()]
    assert lines == [{"prompt": "1+1="}, {"prompt": "2+2=", "answer": "4"}]
    assert task_of(made.rl.task).judge("2+2=", ("4",), lines[1]) == 1.0
    assert {Path(made.rl.task.rpartition(":")[0]).parent, Path(made.rl.prompts).parent} == {tmp_path / "here" / "code"}


def test_example_of_the_page_of_rl_runs(fake: type[FakeRun], tmp_path: Path) -> None:
    """As a script, whose function is copied out of the file."""
    page = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "planetary.rl" in block)
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "script.py").write_text(example)
    runpy.run_path("script.py", run_name="__main__")
    (made,) = fake.made
    assert (made.rl.objective, made.rl.start) == ("grpo", str(tmp_path / "runs" / "start"))
    assert task_of(made.rl.task).judge("2+2=", ("4",), {"answer": "4"}) == 1.0
    assert len(Path(made.rl.prompts).read_text().splitlines()) == 100


def test_rewards_are_those_of_rounds_that_sampled() -> None:
    lines = [metrics(1, 3.0), metrics(2, 2.0)]
    lines.append(
        msgspec.structs.replace(
            lines[1], round=3, own=PolicyMetrics(reward=0.25, held_out_reward=0.5, held_out_sampled=0.4)
        )
    )
    assert rewards_of(lines) == (planetary.RoundRewards(3, 0.25, 0.5, 0.4),)


def test_a_name_and_files_are_taken_as_they_are(fake: type[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[rl]\ntask = "add"\ngroups = 5\n')
    planetary.rl("my.toml", task="sort", prompts="prompts.jsonl", policy="start", overrides={"rl.lag": 3})
    (made,) = fake.made
    assert (made.rl.task, made.rl.groups, made.rl.lag) == ("sort", 5, 3)
    assert (made.rl.prompts, made.rl.start) == (str(tmp_path / "prompts.jsonl"), str(tmp_path / "start"))
    assert not made.options.folder.exists()


def test_wrong_arguments_of_rl_are_named_and_start_nothing(fake: type[FakeRun], tmp_path: Path) -> None:
    class Silent(Task):
        def judge(self, prompt: str, completions: Any, meta: Any) -> float:
            return 0.0

    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({}, "there is no task"),
        ({"task": "sorted"}, "did you mean sort"),
        ({"task": "sort", "overrides": {"rl.task": "add"}}, r"rl\.task is in overrides, and an argument"),
        ({"task": Silent()}, "a Silent has no code that another process could load"),
        ({"task": "sort", "prompts": []}, "at least one prompt"),
        ({"task": "sort", "prompts": [{"text": "a"}]}, r"prompts\[0\]: expected a text, or a record"),
        ({"task": "sort", "prompts": [{"prompt": "a", "when": object()}]}, r"prompts\[0\]: expected values of JSON"),
        ({"task": "sort", "policy": 3}, r"policy: expected a planetary\.Run"),
        ({"task": "sort", "overrides": {"sync.topology": "ring"}}, r"sync\.topology"),
    )
    for arguments, said in wrong:
        with pytest.raises(UserError, match=said):
            planetary.rl(**arguments)
    assert not fake.made
    assert not (tmp_path / "runs").exists()
