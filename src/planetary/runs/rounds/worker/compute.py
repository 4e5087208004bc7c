"""The inner loop of a task, in a separate thread: the worker's event loop stays responsive."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
from msgspec.structs import replace

from planetary.core.errors import NumericsError, PlanetaryError, ProtocolError, ResourceError, UserError
from planetary.core.example_layout import Batch, ExampleLayout
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.tensors import Tensors
from planetary.data.reader import batches_of, counted, read_slices
from planetary.fleet.shell.system import SYSTEM, System
from planetary.machine.events import Event, Payload
from planetary.runs.rounds.events import EndParametersOf
from planetary.runs.rounds.messages import EvalTask, TrainTask
from planetary.runs.rounds.worker.events import (
    EvaluationDone,
    StepDone,
    TaskBroke,
    TaskStopped,
    TrainingDone,
    TrainingPaused,
)
from planetary.runs.rounds.worker.exchange import Exchange, Trained
from planetary.runs.rounds.worker.inner_state import BackgroundSaver, InnerStates
from planetary.runtime.executor import Executor, StepResult
from planetary.sync.contributions import check_contribution

log = logging.getLogger(__name__)


def inner_steps(
    executor: Executor, task: TrainTask, schedule: Schedule, given: Iterable[Batch], seed: int = 0
) -> Iterator[StepResult]:
    """Train on each batch with the executor's parameters and optimizer state, and yield each step's result.

    `seed`: of the run, for the keys of random numbers the model draws.

    Raises:
        NumericsError: a loss or gradient norm is not finite; the error's `step` counts the steps of the task.
    """
    for steps, batch in enumerate(given, start=1):
        index = task.first_step + steps - 1
        keys = executor.spec.keys_of(seed, task.lease, index)
        result = executor.train_step(index, schedule.rate(index), [*batch, *keys])
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            what = "loss" if not math.isfinite(result.loss) else "gradient norm"
            value = result.loss if what == "loss" else result.grad_norm
            error = NumericsError(
                f"the {what} became {value} at inner step {steps} of {task.steps} (step "
                f"{task.first_step + steps} of the run); the worker stopped there. A lower "
                "optimizer.learning_rate or optimizer.clip_norm may help"
            )
            error.step = steps  # type: ignore[attr-defined]
            raise error
        yield result


class _Stopped(Exception):
    """The task under way is not wanted any more."""


class _LeaseRun(msgspec.Struct):
    """A lease that is trained, as far as it is."""

    task: TrainTask
    start: Tensors
    steps: Iterator[StepResult]
    last: StepResult | None = None
    count: int = 0
    total: float = 0.0  # sum of the steps' losses
    seconds: float = 0.0  # duration of the inner steps


class Compute:
    """One executor and the tasks it runs, in order.

    `report` is called from the compute thread with each event.
    """

    def __init__(
        self,
        executor: Executor,
        spec: StepSpec,
        buffers: Tensors,
        states: InnerStates,
        *,
        reset_inner_state: bool,
        exchange: Exchange | None = None,
        delay: int = 0,
        feedback: InnerStates | None = None,
        check_ends: bool = False,
        seed: int = 0,
        layout: ExampleLayout | None = None,
        report: Callable[[Event], None],
        system: System = SYSTEM,
    ) -> None:
        """Start with an executor that nothing is loaded in.

        `exchange`: the form of a task's payload, None: end parameters; `delay`: inner steps before the version to mix
        in; `feedback`: saved residuals, if any;
        `check_ends`: whether useless end parameters fail the task; otherwise the gateway checks;
        `seed`: of the run's random numbers;
        `layout`: of examples of several arrays; None: slices are tokens.
        """
        self.exchange: Exchange = Exchange(spec.params) if exchange is None else exchange
        self._feedback, self._delay = feedback, delay
        self._paused: _LeaseRun | None = None  # the task that waits for a version
        self._executor = executor
        self._spec = spec
        self._buffers = buffers
        self._states = states
        self._reset = reset_inner_state
        self._check_ends = check_ends
        self._seed = seed
        self._layout = layout
        self._report = report
        self._clock = system.clock
        self._thread = system.threads("compute")
        self._aside = system.threads("versions")
        self._taking: Future[None] | None = None  # the version that was read ahead last
        self._exchanging = threading.Lock()  # one of the two threads uses the exchange
        self._saver = BackgroundSaver(system)
        self._params: Tensors | None = None  # parameters of the tasks to come, as the gateway sent them
        self._on_device = False  # exactly these are on the device
        self._loaded = False  # buffers and optimizer state are on the device
        self._feedback_round = 0  # the round after which the exchange's residual is; 0: of none
        self._state_round: int | None = 0  # the round after which the device's optimizer state is; None: of no use
        self._last: tuple[Trained, TrainingDone, Tensors | None] | None = None  # and the residual before it
        self._stop: set[int] = set()
        self._ends_early: set[int] = set()
        self._rounds: dict[int, int] = {}  # task -> the round it counts in, if not the task's own
        self._unusable: Exception | None = None  # why the parameters of the tasks to come are not here
        self._ends: dict[int, Tensors] = {}  # payload of the last finished train task

    # --- called from the event loop ---------------------------------------------------------------------------

    def use_parameters(self, params: Callable[[], Tensors]) -> None:
        """Start later tasks from the result of `params`, called in the compute thread; the arrays must not change."""
        taking, self._taking = self._taking, None

        def use() -> None:
            try:
                if taking is not None:
                    taking.result()
                with self._exchanging:
                    self._params, self._on_device, self._unusable = params(), False, None
            except PlanetaryError as error:
                self._unusable = error
            except Exception as error:  # tasks to come fail with it, rather than begin from the version before
                log.exception("parameters cannot be used")
                self._unusable = error

        self._thread.submit(use)

    def take_ahead(self, take: Callable[[], None]) -> None:
        """Read a version beside the task under way; `use_parameters` of that version, which follows, has the error."""

        def take_now() -> None:
            with self._exchanging:
                take()

        self._taking = self._aside.submit(take_now)

    def train(self, task: TrainTask, schedule: Schedule, tokens: np.ndarray | None) -> None:
        """Start a task; `tokens` is None when they are to be read from the task's slice."""
        self._thread.submit(self._guarded, task, lambda: self._train(task, schedule, tokens))

    def count_in(self, task: int, round_: int) -> None:
        """Let the result of a running task count in another round."""
        self._rounds[task] = round_

    def give_again(self, task: int, round_: int) -> None:
        """Give the result of a task for another round, if it is the last that was trained."""
        self._thread.submit(self._give_again, task, round_)

    def mix(self, task: TrainTask, take: Callable[[], None]) -> None:
        """Go on with the task that has paused; `take` makes the version it mixes in the newest."""

        def take_first() -> None:  # whatever becomes of the task: the next fragment counts from this version
            try:
                take()
            except PlanetaryError as error:
                self._unusable = error
            except Exception as error:  # as in `use_parameters`
                log.exception("a version cannot be mixed in")
                self._unusable = error

        self._thread.submit(take_first)
        self._thread.submit(self._guarded, task, lambda: self._resume(task))

    def evaluate(self, task: EvalTask, tokens: np.ndarray | None) -> None:
        """Start an evaluation; `tokens` as in `train`."""
        self._thread.submit(self._guarded, task, lambda: self._evaluate(task, tokens))

    def stop(self, task: int) -> None:
        """Stop a task after the current inner step."""
        self._stop.add(task)

    def finish(self, task: int) -> None:
        """End a train task after the current inner step, with the steps so far."""
        self._ends_early.add(task)

    def end_parameters(self, payload: Payload) -> Tensors:
        """Return the payload of a finished train task, an `EndParametersOf`, once."""
        assert isinstance(payload, EndParametersOf)
        return self._ends.pop(payload.task)

    def close(self) -> None:
        """Wait for the current inner step and for files being saved, then release the device."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._aside.shutdown(wait=True, cancel_futures=True)
        self._saver.close()
        self._executor.close()

    # --- in the compute thread --------------------------------------------------------------------------------

    def _guarded(self, task: TrainTask | EvalTask, work: Callable[[], Event]) -> None:
        try:
            self._check_wanted(task.task)
            if self._unusable is not None:
                raise self._unusable
            event = work()
        except _Stopped:
            event = TaskStopped(task.task)
        except NumericsError as error:
            event = TaskBroke(task.task, "numerics", str(error), getattr(error, "step", 0))
        except UserError as error:
            event = TaskBroke(task.task, "data", str(error))
        except ProtocolError as error:
            log.error("task %d cannot begin: %s", task.task, error)
            event = TaskBroke(task.task, "parameters", str(error))
        except (ResourceError, MemoryError) as error:
            event = TaskBroke(task.task, "resource", str(error) or "out of memory")
        except Exception as error:
            log.exception("task %d failed", task.task)
            event = TaskBroke(task.task, "internal", f"{type(error).__name__}: {error}")
        if not isinstance(event, TrainingPaused):
            self._stop.discard(task.task)
            self._ends_early.discard(task.task)
        self._report(event)

    def _train(self, task: TrainTask, schedule: Schedule, tokens: np.ndarray | None) -> Event:
        if tokens is None:
            tokens = read_slices(task.slices)
        self._prepare_inner_state(task.round)
        self._put_parameters()
        self._report(StepDone(task.task, 0, None))
        assert self._params is not None
        steps = inner_steps(self._executor, task, schedule, self._batches(tokens), self._seed)
        run = _LeaseRun(task, self._params, steps)
        if task.mixes < 0:
            return self._finish(run)
        self._paused = run
        self._advance(run, self._delay)
        return TrainingPaused(task.task)

    def _resume(self, task: TrainTask) -> Event:
        """Go on with the task that has paused, with the newest version mixed in."""
        run, self._paused = self._paused, None
        assert run is not None
        assert run.task.task == task.task
        own = run.start if run.count == 0 else self._executor.read_params()
        self._executor.set_params(self.exchange.mix(own, task.mixes))
        return self._finish(run)

    def _advance(self, run: _LeaseRun, most: int) -> None:
        """Take the steps of a lease that are left, `most` at most."""
        began = self._clock.monotonic()
        self._on_device, self._state_round = False, None  # the device holds neither in between
        for result in itertools.islice(run.steps, most):
            run.last, run.count, run.total = result, run.count + 1, run.total + result.loss
            self._check_wanted(run.task.task)
            self._report(StepDone(run.task.task, run.count, result.loss))
            if run.task.task in self._ends_early:
                break
        run.seconds += self._clock.monotonic() - began

    def _finish(self, run: _LeaseRun) -> Event:
        task = run.task
        self._advance(run, task.steps)
        assert run.last is not None
        round_ = self._rounds.pop(task.task, task.round)
        self._rounds.clear()  # of tasks that had ended
        self._state_round = round_
        self._save_inner_state(round_)
        ends = self._executor.read_params()
        defect = check_contribution(self._spec.params, ends) if self._check_ends else ""
        if defect:
            raise NumericsError(f"after inner step {run.count} of {task.steps}: {defect}")
        tokens_trained = run.count * self._weight_of_batch
        trained, before = Trained(task.task, round_, tokens_trained, run.start, ends), self.exchange.residual
        done = TrainingDone(
            task.task,
            round_,
            run.count,
            tokens_trained,
            run.total / run.count,
            run.last.grad_norm,
            run.seconds,
            digest=self._give(trained),
        )
        self._last = trained, done, before
        return done

    def _give(self, trained: Trained) -> str:
        """Make the payload of a task, save the remaining feedback, and return the digest."""
        with self._exchanging:
            outgoing = self.exchange.give(trained)
        if self._feedback is not None and self.exchange.residual is not None:
            self._saver.save(self._feedback, trained.round, self.exchange.residual)
            self._feedback_round = trained.round
        self._ends = {trained.task: outgoing.tensors}
        return outgoing.digest

    def _give_again(self, task: int, round_: int) -> None:
        if self._last is None or self._last[0].task != task:
            return
        trained, done, before = self._last
        self.exchange.residual = before  # the payload for the other round is not counted
        trained = replace(trained, round=round_)
        done = replace(done, round=round_, digest=self._give(trained))
        self._last = trained, done, before
        self._report(done)

    def _evaluate(self, task: EvalTask, tokens: np.ndarray | None) -> Event:
        if tokens is None:
            tokens = read_slices(task.slices)
        self._ensure_loaded()
        self._put_parameters()
        size = 1 if self._layout is None else self._layout.nbytes
        ends = np.cumsum([piece.count * size for piece in task.slices])[:-1]
        loss, *sets = [self._loss_of(task, part) for part in np.split(tokens, ends)]
        return EvaluationDone(task.task, task.version, loss, task.batches, tuple(sets))

    def _loss_of(self, task: EvalTask, tokens: np.ndarray) -> float:
        """Return the mean over the targets that count."""
        total, targets_counted = 0.0, 0
        for batch in self._batches(tokens):
            count = self._counted(batch)
            total += count * self._executor.eval_step(batch)
            targets_counted += count
            self._check_wanted(task.task)
        if not math.isfinite(total):
            raise NumericsError(f"the held-out loss of the parameters after round {task.version} is {total}")
        return total / targets_counted

    def _batches(self, tokens: np.ndarray) -> Iterator[Batch]:
        return batches_of(self._spec.batch, tokens, self._layout)

    @property
    def _weight_of_batch(self) -> int:
        """Target tokens of a batch, or examples."""
        shape = self._spec.batch[0].shape
        return shape[0] if self._layout is not None else shape[0] * shape[1]

    def _counted(self, batch: Batch) -> int:
        """Return the weight of a batch in a held-out loss."""
        if self._layout is None:
            return counted(batch[1])
        return counted(batch[-1]) if self._layout.targets else len(batch[0])

    def _check_wanted(self, task: int) -> None:
        if task in self._stop:
            raise _Stopped

    def _ensure_loaded(self) -> None:
        if not self._loaded:
            assert self._params is not None
            self._executor.load(self._params, self._buffers, None)
            self._loaded = self._on_device = True

    def _put_parameters(self) -> None:
        assert self._params is not None
        if not self._on_device:
            self._executor.set_params(self._params)
            self._on_device = True

    def _prepare_inner_state(self, round_: int) -> None:
        """Make optimizer state and error feedback those from before `round_`: the newest there are, else zeros."""
        self._ensure_loaded()
        is_there = 0 < self._feedback_round < round_
        if self._feedback is not None and self.exchange.residual_specs and not is_there:
            self._saver.wait()  # the feedback being saved may be the one to load
            kept = self._feedback.load(round_)
            self._feedback_round, self.exchange.residual = (0, None) if kept is None else kept
        if self._reset:
            self._executor.reset_opt_state()
            return
        if self._state_round is not None and 0 < self._state_round < round_:
            return
        self._saver.wait()
        saved = self._states.load(round_)
        if saved is None:
            self._executor.reset_opt_state()
            return
        assert self._params is not None
        self._executor.load(self._params, self._buffers, saved[1])
        self._on_device = True

    def _save_inner_state(self, round_: int) -> None:
        if not self._reset:
            self._saver.save(self._states, round_, self._executor.read_opt_state())
