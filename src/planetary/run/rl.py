"""`planetary.rl`: a policy learns from rewards on this machine, from Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import msgspec

from planetary.core.configuration.ranges import check_instance, show_found
from planetary.core.errors import UserError
from planetary.core.places import cache_folder
from planetary.data.chat.records import is_chat
from planetary.fleet.gateway.run_files import CODE
from planetary.run.choice import ConfigSource, new_run, settings
from planetary.run.given_code import text_of
from planetary.run.handle import Run, start_run
from planetary.run.processes.local_run import LocalRunOptions
from planetary.run.processes.round_observer import OnRound
from planetary.run.train import check_config
from planetary.runs.rl.config import RlConfig
from planetary.runs.rl.environments.tasks import Task

PROMPTS, TASK = "given_prompts.jsonl", "given_task.py"

Reward = Callable[[Any, str, dict[str, Any]], float]
"""Returns the reward of a completion. Arguments: the prompt, the completion, and the other fields of the record."""
Prompts = str | os.PathLike[str] | Sequence[str | Mapping[str, Any]]
"""A file, or records with the field "prompt" or "messages", maybe "answer", and whatever the reward needs; a text is a
prompt."""


def rl(
    config: ConfigSource | None = None,
    *,
    policy: str | os.PathLike[str] | Run | None = None,
    task: str | type[Task] | Reward | None = None,
    prompts: Prompts | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    wait: bool = True,
    cache: str | os.PathLike[str] | None = None,
    plain_loopback: bool = False,
) -> Run:
    """Let a policy learn from rewards with a gateway and workers on this machine, as `planetary rl` does.

    Workers continue prompts with the newest weights, the task rewards the texts in processes of its own, and workers
    train on them. `run.rewards` has the rewards of every round. Works as `planetary.train` on any thread, beside a
    running event loop, and ends with this program.

    Args:
        config: as of `planetary.train`, with a section [rl]; by default only the arguments below, and default values.
        policy: a run or run folder, a checkpoint's folder, or a folder with a pretrained model that the policy starts
            as, in place of `rl.start`; by default as `[model]` says.
        task: in place of `rl.task`: a built-in task ("sort"), "file.py:Name", a class derived from
            `planetary.extend.Task`, or a function `reward(prompt, completion, meta) -> float`. Judges run it in
            processes of their own, so its text is copied into the run folder: the whole file of a module; of a
            package's module, a notebook or this program's own file the definition alone, which may use modules and
            constants from outside.
        prompts: in place of `rl.prompts`: a file, or records such as `{"prompt": "2+2=", "answer": "4"}`, or with
            `messages`.
        run_dir: folder of the run; by default `runs/<name>`, with a number behind it when that is taken.
        workers: processes that sample and train, in place of `fabric.workers`.
        rounds: length of the run, in place of `train.rounds`.
        overrides: other keys, such as `{"rl.objective": "grpo", "rl.groups": 8}`.
        on_round: called with the `RoundMetrics` of every round that ends, on the run's own thread. An exception stops
            the run, and `wait` raises it.
        wait: whether to return when the run has ended. False: return at once; see `Run.wait` and `Run.stop`.
        cache: folder of compiled functions; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.
        plain_loopback: no TLS and no token between the processes.

    Raises:
        UserError: the configuration or an argument is wrong, or the task cannot be loaded by another process.
        PlanetaryError: the run failed; the class is that of the cause. Finished rounds are kept.

    Example:
        >>> def lower(prompt, completion, meta):
        ...     return sum(one.islower() for one in completion) / max(1, len(completion))
        >>> small = {
        ...     "model": {
        ...         "source": "planetary.models.gpt2:build",
        ...         "options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256, "n_position": 16},
        ...     },
        ...     "rl": {"groups": 2, "completions": 4, "max_tokens": 8, "held_out": 4, "equal": "keep"},
        ...     "train": {"inner_steps": 1, "batch_size": 8, "sequence_length": 15},
        ... }
        >>> prompts = [f"{number}:" for number in range(16)]
        >>> run = planetary.rl(small, task=lower, prompts=prompts, run_dir="runs/lower", workers=1, rounds=2)
        >>> [(one.round, 0 <= one.sampled <= 1, 0 <= one.greedy <= 1) for one in run.rewards]
        [(1, True, True), (2, True, True)]
    """
    name, text = ("", "") if task is None or isinstance(task, str) else _task_of(task)
    given: dict[str, Any] = {
        "rl.start": _path_of(policy),
        "rl.task": task if isinstance(task, str) else None,
        "rl.prompts": os.fspath(prompts) if isinstance(prompts, str | os.PathLike) else None,
    }
    asked = {"rl.start": policy, "rl.task": task, "rl.prompts": prompts}
    if twice := [key for key, value in asked.items() if value is not None and key in (overrides or {})]:
        raise UserError(f"rl: {twice[0]} is in overrides, and an argument: leave one of them out")
    own = settings(
        {**(overrides or {}), **{key: value for key, value in given.items() if value is not None}},
        workers=workers,
        rounds=rounds,
    )
    resolved, folder = new_run({} if config is None else config, own, Path(run_dir) if run_dir is not None else None)
    section, files = resolved.of(RlConfig), dict[str, bytes]()
    if text:
        section = msgspec.structs.replace(section, task=f"{folder / CODE / TASK}:{name}")
        files[TASK] = text.encode()
    if prompts is not None and not isinstance(prompts, str | os.PathLike):
        section = msgspec.structs.replace(section, prompts=str(folder / CODE / PROMPTS))
        files[PROMPTS] = _lines_of(prompts)
    if not section.task:
        raise UserError(
            'rl: there is no task: give task="sort", a reward function, or a configuration with rl.task; '
            "planetary.train trains on data"
        )
    resolved = resolved.having(section)
    check_config(resolved)
    for file, data in files.items():
        (folder / CODE).mkdir(parents=True, exist_ok=True)
        (folder / CODE / file).write_bytes(data)
    options = LocalRunOptions(folder=folder, cache=cache_folder(cache), plain=plain_loopback)
    run = start_run(resolved, options, on_round)
    return run.wait() if wait else run


def _task_of(task: object) -> tuple[str, str]:
    """Return the name of a class of tasks, and the text of a file that has it. Raises `UserError`."""
    text = text_of(task, "task")
    assert isinstance(task, FunctionType | type)
    if isinstance(task, type) and not issubclass(task, Task):
        raise UserError(f"task: {task.__name__} is no task: derive the class from planetary.extend.Task (docs/rl.md)")
    return task.__name__, text


def _path_of(policy: str | os.PathLike[str] | Run | None) -> str | None:
    if isinstance(policy, Run):
        return str(policy.folder)
    check_instance("policy", policy, (str, os.PathLike, type(None)), "a planetary.Run, or the path of a model")
    return None if policy is None else str(Path(policy).absolute())


def _lines_of(prompts: Sequence[str | Mapping[str, Any]]) -> bytes:
    """Return records as lines of JSON. Raises `UserError` for one that is none."""
    lines = []
    for number, one in enumerate(prompts):
        record = {"prompt": one} if isinstance(one, str) else one
        if not isinstance(record, Mapping) or not (isinstance(record.get("prompt"), str | list) or is_chat(record)):
            raise UserError(
                f'prompts[{number}]: expected a text, or a record such as {{"prompt": "2+2=", "answer": "4"}} or '
                f'{{"messages": [{{"role": "user", "content": "2+2?"}}]}}, found {show_found(one)}'
            )
        try:
            lines.append(msgspec.json.encode(record) + b"\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"prompts[{number}]: expected values of JSON, as the judges get them: {error}") from None
    if not lines:
        raise UserError("prompts: expected at least one prompt, found none")
    return b"".join(lines)
