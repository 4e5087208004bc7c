"""The controller's constants of a run in rounds: shape, data, and every limit. All times in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from planetary.core.configuration.ranges import RELAY, InnerState, LeaseShares
from planetary.core.configuration.schema import FabricConfig, OuterConfig, OverlapName, SyncConfig
from planetary.core.example_layout import ExampleLayout
from planetary.core.extension_points import MERGE_RULES, OVERLAPS
from planetary.core.registry import PinnedFile, files_of, pinned_file
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.token_slice import Slice
from planetary.data.metrics import OWN_SET, Metric
from planetary.data.run_length import RunLength
from planetary.fleet.protocol.messages import Hello, Refused
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.runs.rounds.messages import Compression, Fragmentation, RingJob, TrainingJob, TrainResult
from planetary.sync.judgement import Judging, judge
from planetary.sync.outer_optimizers import OuterOptimizer, optimizer_of
from planetary.sync.rounds import RoundPolicy
from planetary.wire.message import Message

_OUTER = OuterConfig()


class EvalChunk(msgspec.Struct, frozen=True):
    """A run of held-out batches that one worker evaluates in one task, and shares of named sets."""

    slice: Slice
    batches: int
    targets: int = 0  # counted targets; 0: not known, so a chunk counts by its batches
    nbytes: int = 0  # bytes of text of the targets; 0: no metric reads them
    set: str = OWN_SET
    more: tuple[EvalChunk, ...] = ()  # chunks of named sets

    @property
    def all_batches(self) -> int:
        """Batches of the task."""
        return self.batches + sum(part.batches for part in self.more)


class RingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the ring topology."""

    job: RingJob  # part of the workers' job
    start_digest: str  # digest of the gateway's first outer state
    most_attempts: int = 8  # reductions that may fail in a row, without a lost worker, before the run goes on in a star


class ControllerPolicy(FabricPolicy, frozen=True, kw_only=True):
    """The controller's constants for one run of rounds."""

    length: RunLength  # workers of the first round, which waits `startup_grace_s` for them after the first is ready
    config_hash: str

    round: RoundPolicy
    first_step_s: float  # a task without any progress for this long is stuck, before step times are known
    stall_steps: float = 20.0  # a task without progress for this many observed step times is stuck ...
    stall_floor_s: float = 20.0  # ... but not before this

    inner_state: InnerState
    schedule: Schedule
    tokens_per_lease: int  # target tokens
    leases: LeaseShares = FabricConfig().leases  # how they are shared out; see `controller.pace.SHARES`
    locate: Callable[[int], Slice]  # lease -> place of the tokens
    held_out: tuple[EvalChunk, ...]  # the fixed held-out batches; empty: no evaluation
    eval_every: int
    metrics: Mapping[str, Metric] = {}  # of each set beside the loss
    patience: int = 0  # evaluations without a gain; see `controller.early_stopping`
    least_gain: float = 0.0  # nats per token
    gateway_delivers: bool  # tokens travel with the task instead of being read by the worker

    outer: OuterOptimizer = optimizer_of(_OUTER)
    merge: str = _OUTER.merge  # pinned name of the merge rule
    judge: Judging = judge  # judge of contributions, by the table of their inner products
    loss_rise: float = 0.0  # part by which a loss may be higher than the best before the run goes back; 0: never does

    checkpoint_every: int
    last_checkpoint_tries: int = 5  # how often the last round's is tried, one grace time apart, when it fails
    topology: str = SyncConfig().topology  # pinned name
    ring: RingPolicy | None = None  # constants of a topology in which workers reduce among themselves
    compression: Compression = Compression()  # compression of the star
    start_digest: str = ""  # digest of the initial parameters in their codec; "": they are sent as tensors
    overlap: OverlapName = SyncConfig().overlap  # overlap of a round's reduction with further training
    fragments: Fragmentation = Fragmentation()
    spec: StepSpec
    seed: int = 0  # seed as of `TrainingJob`
    layout: ExampleLayout | None = None  # layout as of `TrainingJob`
    buffers: str  # digest of the packed model buffers, "" without any
    inner_state_of: str = ""  # optimizer state as of `TrainingJob`

    @property
    def roles(self) -> tuple[str, ...]:
        return ("trainer",)

    @property
    def code(self) -> tuple[PinnedFile, ...]:
        names = [
            self.schedule.kind,
            *self.compression.codecs,
            *([] if self.ring is None else [self.ring.job.outer.name]),
        ]
        return files_of([*names, *([self.merge] if self.compression.down == RELAY else [])])

    @property
    def inner_steps(self) -> int:
        """Of an average worker in a round."""
        return self.length.inner_steps

    @property
    def delivers_held_out(self) -> bool:
        """Whether held-out tokens travel with their task."""
        return self.gateway_delivers

    @property
    def watches_training_loss(self) -> bool:
        """Whether damage is looked for in the training loss."""
        return not self.held_out

    def steps_of(self, worker: str, leases: int) -> int:
        """Return the inner steps that so many leases of this worker have."""
        return leases * self.length.lease_steps

    def defect_of(self, result: TrainResult, steps: int, *, ends_early: bool) -> str:
        """Return the fault in the numbers that come with a worker's result, "" for none.

        `steps`: that were asked for; `ends_early`: whether fewer are as good, at least those of one lease.
        """
        each = self.length.lease_steps
        whole = ends_early and each <= result.steps < steps and result.steps % each == 0
        if result.steps != steps and not whole:
            return f"it trained {result.steps} inner steps instead of {steps}"
        tokens = result.steps // each * self.tokens_per_lease
        if result.tokens != tokens:
            return f"it counts {result.tokens} tokens instead of {tokens}"
        return ""

    def most_steps(self, steps: int) -> int:
        """Return the last inner step of a task of so many that a worker may report."""
        return steps

    def job(self, artifact: str, reference: str) -> Message:
        overlap = OVERLAPS.find(self.overlap)
        return TrainingJob(
            run=self.run,
            artifact=artifact,
            buffers=self.buffers,
            reference=reference,
            spec=self.spec,
            inner_state=self.inner_state,
            schedule=self.schedule,
            seed=self.seed,
            layout=self.layout,
            ring=None if self.ring is None else self.ring.job,
            compression=self.compression,
            code=self.code,
            eager_rate=self.outer.eager_rate() if overlap.eager else 0.0,
            eager_radial=MERGE_RULES.find(self.merge).radial,
            fragments=self.fragments if overlap.fragmented else None,
            inner_state_of=self.inner_state_of,
        )

    def refuse(self, hello: Hello) -> Refused | None:
        needed = {name for name in self.compression.codecs if pinned_file(name) is None}
        refusal, unknown = super().refuse(hello), sorted(needed - set(hello.codecs))
        if refusal is not None or not unknown:
            return refusal
        return Refused(
            code="codec",
            reason=f"this run sends updates as {', '.join(unknown)}, and the planetary of worker {hello.worker} "
            f"has {', '.join(hello.codecs) or 'no codecs'}: install the gateway's version there, or set "
            "sync.compression and sync.broadcast_compression to one of these",
            kind="data",
        )

    def may_fetch(self, digest: str, artifact: str, reference: str) -> bool:
        code = (file.digest for file in self.code)
        return digest in (artifact, reference, self.buffers, *code) and bool(digest)

    def rates_of(self, round_: int) -> float:
        """Return the sum of the learning rates of the inner steps behind a round's deltas: the scale of their length.

        A fragment was synchronised last as many rounds ago as there are fragments.
        """
        first = max(0, round_ - self.fragments.count) * self.inner_steps
        return sum(self.schedule.rate(step) for step in range(first, round_ * self.inner_steps))

    def rounds_like(self, round_: int, rounds: Iterable[int]) -> list[int]:
        """Return those of `rounds` that came before one and ended with the same fragment, ascending."""
        count = self.fragments.count
        return sorted(number for number in rounds if number < round_ and (round_ - number) % count == 0)

    def missed_of_fragment(self, version: int, round_: int) -> int:
        """Return how many newer versions of a round's fragment there are than the one in `version`."""
        return len(self.rounds_like(round_, range(version + 1, round_)))
