"""A run of reinforcement learning in real processes: a worker and the gateway are killed, and it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from bad_input_support import events, gateway, node_flags, started
from chat_support import tokenizer_folder

import planetary
from planetary.core.errors import PlanetaryError
from planetary.fleet.gateway.run_files import holder_of
from waiting import HANG_S, wait_until

pytestmark = pytest.mark.processes

TINY = {
    "rl": {
        "task": "sort",
        "groups": 2,
        "completions": 4,
        "max_tokens": 8,
        "imitated_rounds": 2,
        "held_out": 4,
        "verified": 1.0,
        "kl": 0.01,
        "judges": 1,
        "equal": "keep",
    },
    "model": {
        "source": "planetary.models.gpt2:build",
        "options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_position": 16},
    },
    "train": {"rounds": 40, "inner_steps": 1, "batch_size": 8, "sequence_length": 15},
    "optimizer": {"warmup_steps": 0},
    "outer": {"learning_rate": 1.0, "momentum": 0.0, "merge": "mean"},
    "fabric": {"workers": 2},
    "eval": {"every": 10},
    "checkpoint": {"every": 2},
}


def test_rounds_go_on_after_a_worker_and_the_gateway_are_killed(tmp_path: Path, shared_cache: Path) -> None:
    folder = tmp_path / "run"
    run = planetary.train(TINY, run_dir=folder, wait=False, cache=shared_cache, plain_loopback=True)
    wait_until(lambda: (folder / "metrics.jsonl").exists() and len(run.metrics) >= 4, "four rounds")
    joined = [event for event in run.events if event["event"] == "worker_joined"]
    os.kill(joined[0]["pid"], signal.SIGKILL)
    wait_until(lambda: any(event["event"] == "worker_lost" for event in run.events), "a lost worker")
    before = len(run.metrics)
    wait_until(lambda: len(run.metrics) >= before + 2, "two more rounds")
    gateway = holder_of(folder)
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    with pytest.raises(PlanetaryError):
        run.wait(HANG_S)
    finished = run.metrics[-1].round
    again = planetary.Run.open(folder).resume(rounds=finished + 4, cache=shared_cache, plain_loopback=True)
    assert [line.round for line in again.metrics] == list(range(1, finished + 5))
    events = list(again.events)
    assert events[-1]["event"] == "run_finished"
    assert events[-1]["ok"]
    assert any(event["event"] == "run_resumed" for event in events)
    assert not any(event["event"] in {"texts_refused", "worker_banned"} for event in events)
    # Every round that counts was made of groups whose rewards the journal has, or of answers.
    rewarded = {event["group"] for event in events if event["event"] == "group_sampled"}
    for event in events:
        if event["event"] == "groups_learned" and event["round"] > 2:
            assert set(event["groups"]) <= rewarded
            assert all(0 <= event["version"] - version <= 2 for version in event["sampled"])
    last = again.metrics[-1].own
    assert last is not None
    assert last.held_out_reward is not None
    assert last.reference_divergence is not None
    assert (folder / "reward.png").exists()
    assert again.params().keys() == again.checkpoint().velocity.keys()


def test_actors_and_learners_are_apart_on_four_workers(tmp_path: Path, shared_cache: Path) -> None:
    """Two nodes of two workers: one samples, one trains. Each round's bytes are those of weights and rollouts."""
    sections = {**TINY, "data": {}, "train": {**TINY["train"], "rounds": 7}, "fabric": {"workers": 4, "threads": 1}}
    rl = {**TINY["rl"], "ahead": 1, "lag": 1, "groups": 4, "imitated_rounds": 1, "kl": 0.0}
    config = tmp_path / "apart.toml"
    config.write_text(_toml({**sections, "rl": rl, "eval": {"every": 3}}))
    with gateway(config, tmp_path, shared_cache, plain=True) as (process, announced):
        wait_until(lambda: events(tmp_path / "run"), "the run began", process=process)
        flags = [*node_flags(announced, tmp_path, shared_cache), "--scale=2", "--threads=1"]
        with contextlib.ExitStack() as nodes:
            for role in ("actor", "learner"):
                own = [f"--role={role}", f"--node-name={role}", f"--state={tmp_path / role}"]
                nodes.enter_context(started("node-manager", *flags, *own, cwd=tmp_path, log=tmp_path / f"{role}.log"))
            assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()
    found = events(tmp_path / "run")
    sampled = [event for event in found if event["event"] == "group_sampled"]
    learned = [event for event in found if event["event"] == "groups_learned"]
    assert {event["worker"] for event in sampled} == {"actor/0", "actor/1"}
    assert {event["worker"] for event in learned} <= {"learner/0", "learner/1"}
    shares = [event["worker"] for event in learned if event["round"] > 3]  # both have joined by then
    assert shares.count("learner/0") == shares.count("learner/1") == 4
    # With rl.ahead = 1 the texts of a round are sampled while the round before is trained.
    lags = {event["version"] - version for event in learned for version in event["sampled"] if event["round"] > 1}
    assert 1 in lags <= {0, 1}
    run = planetary.Run.open(tmp_path / "run")
    weights = sum(array.nbytes for array in run.params().values())
    lines = run.metrics[1:]
    # Up: the parameters of two learners. Down: a version to both, and to the actors, which may be rounds ahead.
    assert all(2 * weights < line.bytes_up < 2.5 * weights < 1.1 * line.bytes_down for line in lines)
    assert 3 * weights < sum(line.bytes_down for line in lines) / len(lines) < 5 * weights
    status = run.status
    assert status.bytes_up == sum(line.bytes_up for line in run.metrics)
    assert status.bytes_down == sum(line.bytes_down for line in run.metrics)


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, dict):
            return "{ " + ", ".join(f"{key} = {value(part)}" for key, part in one.items()) + " }"
        return json.dumps(one)

    sections = (
        "\n".join([f"[{name}]", *(f"{key} = {value(one)}" for key, one in table.items())])
        for name, table in tables.items()
    )
    return "\n".join(sections) + "\n"


LETTERS = """
from planetary.extend import Task

class Letters(Task):
    def judge(self, prompt, completions, meta):
        text = completions[-1]
        return sum(character.islower() and character.isascii() for character in text) / max(len(text), 1)
"""


def test_rewards_rise_sampled_and_greedy(tmp_path: Path, shared_cache: Path) -> None:
    """A policy that starts from random weights learns to write small letters, a tenth of all bytes at first."""
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{i}:"}}\n' for i in range(64)))
    rl = {
        **TINY["rl"],
        "task": f"{tmp_path / 'letters.py'}:Letters",
        "prompts": str(tmp_path / "prompts.jsonl"),
        "groups": 8,
        "completions": 8,
        "imitated_rounds": 0,
        "held_out": 8,
        "verified": 0.1,
        "objective": "grpo",
        "kl": 0.0,
        "learning_rate": 0.02,
    }
    train = {**TINY["train"], "rounds": 24, "batch_size": 64}
    tables = {**TINY, "rl": rl, "train": train, "eval": {"every": 5}, "fabric": {"workers": 1}}
    run = planetary.train(tables, run_dir=tmp_path / "run", cache=shared_cache, plain_loopback=True)
    policies = [line.own for line in run.metrics if line.own is not None]
    sampled = [policy.reward for policy in policies if policy.reward is not None]
    greedy = [policy.held_out_reward for policy in policies if policy.held_out_reward is not None]
    assert sum(sampled[:5]) / 5 < 0.3
    assert sum(sampled[-5:]) / 5 > sum(sampled[:5]) / 5 + 0.4
    assert greedy[-1] > 0.7
    assert all(line.bytes_up > 0 and line.bytes_down > 0 for line in run.metrics)


TOOLS = """
from planetary.extend import Problem, Task

class Adding(Task):
    most_calls = 1
    tools = [{"type": "function", "function": {"name": "a"}}]

    def problem(self, rng):
        return Problem([{"role": "user", "content": str(int(rng.integers(10)))}], CALL, {})

    def call(self, name, arguments, meta):
        return "5"

    def judge(self, prompt, completions, meta):
        return 0.5 + 0.1 * len(completions) + 0.001 * len(completions[-1])

CALL = '<tool_call>{"name":"a"}</tool_call>'
"""


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for one in m.tool_calls or [] %}{{ '<tool_call>' + one.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.soak  # minutes; rollouts/test_chats.py has the dialogues, the tests above the processes
def test_a_policy_calls_tools_in_chats(tmp_path: Path, shared_cache: Path) -> None:
    """It imitates a call of a tool until it samples calls, whose answers a dialogue goes on with."""
    tokenizer = tokenizer_folder(tmp_path / "tokenizer", CHATML)
    settings = json.loads((tokenizer.parent / "tokenizer_config.json").read_text())
    (tokenizer.parent / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|im_end|>"}))
    (tmp_path / "adding.py").write_text(TOOLS)
    rl = {**TINY["rl"], "task": f"{tmp_path / 'adding.py'}:Adding", "max_tokens": 36, "imitated_rounds": 40, "kl": 0.0}
    model = {**TINY["model"], "options": {**TINY["model"]["options"], "vocab_size": 512, "n_position": 128}}
    tables = {
        **TINY,
        "rl": {**rl, "imitation_goal": 0.65, "imitation_every": 5},
        "model": model,
        "data": {"tokenizer": str(tokenizer)},
        "train": {**TINY["train"], "rounds": 42, "sequence_length": 127},
        "optimizer": {"warmup_steps": 0, "learning_rate": 0.03, "schedule": "constant"},
        "fabric": {"workers": 1},
    }
    run = planetary.train(tables, run_dir=tmp_path / "run", cache=shared_cache, plain_loopback=True)
    evaluated = [line.own for line in run.metrics if line.own is not None and line.own.held_out_reward is not None]
    # A dialogue of one completion has at most 0.636; an answered call adds another.
    assert evaluated[-1].held_out_reward > 0.7
    assert not any(event["event"] == "texts_refused" for event in run.events)
