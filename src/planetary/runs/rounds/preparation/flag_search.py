"""Finds the compiler flags that run a training step fastest on this machine, and keeps them for later compilations."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.artifacts.store import BlobStore
from planetary.core.errors import CompileError, UserError
from planetary.runs.rounds.preparation.step_timing import TimingRequest, time_steps, write_values
from planetary.runtime.host import host_features

if TYPE_CHECKING:
    from planetary.compiler.backends.flag_choice import FlagChoice, FlagSet, FlagTrial
    from planetary.compiler.backends.targets import Target
    from planetary.fleet.preparation.compiling import ModelToCompile
    from planetary.runs.rounds.preparation.preparation import Prepared


async def search_flags(
    model: Prepared | ModelToCompile,
    target: Target,
    cache: Path,
    *,
    rounds: int = 3,
    steps: int = 5,
    threads: int = 0,
    stage: Callable[[str], None] = lambda text: None,
) -> FlagChoice:
    """Compile a step with each candidate, time them in turns, verify the fastest and keep the choice in the cache.

    Every timing runs in a separate process, so a crash or hang is only a failed candidate. Each has one turn; then the
    default and the fastest other one take turns, so other work on the machine meets both of them. The fastest step of
    each counts.

    Args:
        model: the training step and the values it starts from.
        target: to compile for; it has to run here.
        cache: where compiled steps are kept.
        rounds: further turns of the two finalists.
        steps: training steps of each turn.
        threads: of a CPU; 0: all usable cores.
        stage: called with the name of each activity.

    Raises:
        UserError: the target has no candidates or does not run on this machine.
        CompileError: no candidate works, or the chosen one computes something else than the reference.
    """
    from planetary.compiler.backends.flag_choice import candidates_for, choose_flags, finalists, keep_choice
    from planetary.compiler.backends.iree import choice_key
    from planetary.fleet.preparation.compiling import CompileTarget, compile_apart

    candidates = candidates_for(target.backend)
    if target.backend == "cpu" and target.name == "host" and target.features != host_features():
        raise UserError(f"flags for {target.backend} {target.name} have to be measured on that machine itself")
    store = BlobStore(cache / "blobs")
    key = choice_key(model.step, target)
    race = _Race(model, target, store, steps=steps, threads=threads, stage=stage)
    for flags in candidates:
        await race.compile(flags)
    with tempfile.TemporaryDirectory(prefix="planetary-tune-") as name:
        folder = Path(name)
        write_values(folder, model.params, model.buffer_values)
        for flags in candidates:
            await race.time(flags, folder)
        for _ in range(rounds):
            for flags in finalists(race.trials(candidates)):
                await race.time(flags, folder)
    while True:
        choice = choose_flags(race.trials(candidates))
        if choice.flags.name in race.failures:
            raise CompileError(
                f"no candidate works for {target.backend} {target.name}: {race.failures[choice.flags.name]}"
            )
        keep_choice(store, key, choice)  # now, since `compile_apart` reads it
        stage(f"verifying {choice.flags.name}")
        try:
            await compile_apart(model, CompileTarget(target.backend, target.name, target.features), cache)
        except CompileError as error:
            race.failures[choice.flags.name] = str(error)
        else:
            return choice


class _Race:
    """The candidates, compiled, with the times measured so far."""

    def __init__(
        self,
        model: Prepared | ModelToCompile,
        target: Target,
        store: BlobStore,
        *,
        steps: int,
        threads: int,
        stage: Callable[[str], None],
    ) -> None:
        self._model, self._target, self._store = model, target, store
        self._steps, self._threads, self._stage = steps, threads, stage
        self._digests: dict[str, str] = {}
        self._times: dict[str, list[float]] = {}
        self.failures: dict[str, str] = {}

    async def compile(self, flags: FlagSet) -> None:
        """Compile with a candidate, or note why that fails."""
        from planetary.compiler.backends.iree import compile_artifact

        self._stage(f"compiling with {flags.name}")
        try:
            artifact = await asyncio.to_thread(
                compile_artifact, self._model.step, self._target, self._store, further_flags=flags.flags
            )
        except CompileError as error:
            self.failures[flags.name] = str(error)
        else:
            self._digests[flags.name] = artifact.digest

    async def time(self, flags: FlagSet, folder: Path) -> None:
        """Give a candidate a turn, or note why it fails; a failed candidate gets none."""
        if flags.name in self.failures:
            return
        self._stage(f"timing {flags.name}")
        artifact = self._store.verified_path(self._digests[flags.name])
        request = TimingRequest(str(artifact), self._model.step.spec, self._target.backend, self._threads, self._steps)
        try:
            times = await time_steps(folder, request)
        except CompileError as error:
            self.failures[flags.name] = str(error)
        else:
            self._times.setdefault(flags.name, []).extend(times.milliseconds)

    def trials(self, candidates: Sequence[FlagSet]) -> list[FlagTrial]:
        """Return the result of each candidate."""
        from planetary.compiler.backends.flag_choice import FlagTrial

        return [
            FlagTrial(flags, failure=self.failures[flags.name])
            if flags.name in self.failures
            else FlagTrial(flags, least_ms=min(self._times[flags.name]))
            for flags in candidates
        ]
