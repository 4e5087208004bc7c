"""`planetary.train`: a whole run on this machine, from Python."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.places import cache_folder
from planetary.run.choice import ConfigSource, new_run, settings
from planetary.run.handle import Run, start_run
from planetary.run.kinds import kind_of
from planetary.run.processes.local_run import LocalRunOptions
from planetary.run.processes.round_observer import OnRound


def train(
    config: ConfigSource,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    wait: bool = True,
    cache: str | os.PathLike[str] | None = None,
    plain_loopback: bool = False,
) -> Run:
    """Train a model with a gateway and workers on this machine, as `planetary train` does, and return the run.

    Works on any thread and beside a running event loop, so in a notebook too; it installs no signal handler. The
    run's processes end with this program, however that ends.

    Args:
        config: a path (TOML, or PCP's experiment.json), a `planetary.Config`, or its tables as a dictionary:
            `{"model": {"source": "planetary.models.nanochat:build"}, "train": {"rounds": 3}}`.
        run_dir: folder of the run; by default `runs/<name>`, with a number behind it when that is taken.
        workers: processes that train, in place of `fabric.workers`.
        rounds: length of the run, in place of `train.rounds`; `train.target_minutes` then has no effect.
        overrides: other keys, such as `{"train.inner_steps": 20}`.
        on_round: called with the `RoundMetrics` of every round that ends, on the run's own thread. An exception stops
            the run, and `wait` raises it.
        wait: whether to return when the run has ended. False: return at once; see `Run.wait` and `Run.stop`.
        cache: folder of prepared data and compiled steps; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.
        plain_loopback: no TLS and no token between the processes.

    Raises:
        UserError: the configuration, the model's source or the data is wrong, or `run_dir` holds a run.
        PlanetaryError: the run failed; the class is that of the cause. Finished rounds are kept.

    Example:
        >>> tiny = {
        ...     "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256}},
        ...     "train": {"inner_steps": 5, "batch_size": 4, "sequence_length": 32},
        ... }
        >>> def show(metrics):
        ...     print("round", metrics.round, "of", metrics.tokens, "tokens")
        >>> run = planetary.train(tiny, run_dir="runs/tiny", workers=2, rounds=2, on_round=show)
        round 1 of 1280 tokens
        round 2 of 1280 tokens
        >>> run
        Run('runs/tiny'): finished, 2 of 2 rounds
    """
    given = settings(overrides, workers=workers, rounds=rounds)
    resolved, folder = new_run(config, given, Path(run_dir) if run_dir is not None else None)
    check_config(resolved)
    options = LocalRunOptions(folder=folder, cache=cache_folder(cache), plain=plain_loopback)
    run = start_run(resolved, options, on_round)
    return run.wait() if wait else run


async def train_async(
    config: ConfigSource,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    rounds: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    on_round: OnRound | None = None,
    cache: str | os.PathLike[str] | None = None,
    plain_loopback: bool = False,
) -> Run:
    """Train as `train` does, without blocking the event loop. Cancelling the task stops the run in order.

    Arguments, return value and exceptions are those of `train`.

    Example:
        >>> async def two(tables):
        ...     runs = [planetary.train_async(tables, run_dir=f"runs/{name}", rounds=1) for name in "ab"]
        ...     return await asyncio.gather(*runs)
        >>> [run.status.state for run in asyncio.run(two(tiny))]
        ['finished', 'finished']
    """

    def start() -> Run:
        return train(
            config,
            run_dir=run_dir,
            workers=workers,
            rounds=rounds,
            overrides=overrides,
            on_round=on_round,
            wait=False,
            cache=cache,
            plain_loopback=plain_loopback,
        )

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await (await asyncio.shield(starting))
    except asyncio.CancelledError:
        await asyncio.to_thread((await starting).stop)
        raise


def check_config(config: Config) -> None:
    """Raise for a model no process of the run could load; warn of settings that are probably mistakes."""
    if config.model.source.startswith("__main__:"):
        raise UserError(
            f'model.source is "{config.model.source}": the gateway is a process of its own and cannot import this '
            "program's __main__; put the function into a module, and name that"
        )
    for warning in kind_of(config).check(config):
        warnings.warn(warning, stacklevel=3)
