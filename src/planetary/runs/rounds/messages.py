"""The messages of a run in rounds, beside those of the fleet: the trainer's job, leases, versions and the ring.

`task` identifies one unit of work for one worker: a reply for a task that is not under way is stale and is dropped.
`round` is the outer step a task belongs to. `version` names a set of global parameters by the number of outer steps
behind it (0 = initial).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from planetary.core.configuration.ranges import InnerState, RingPrecision
from planetary.core.example_layout import ExampleLayout
from planetary.core.registry import Chosen, PinnedFile
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.token_slice import Slice
from planetary.fleet.protocol.messages import FABRIC, WorkerJob
from planetary.wire.message import Message, Order


class RingJob(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run in which the workers reduce among themselves."""

    port: int  # port of the ring's master, on the gateway's host
    connections: int  # TCP streams to the next worker
    precision: RingPrecision  # precision of the deltas on the wire
    outer: Chosen
    gather_s: float  # how long a worker waits for the others to take part
    overlap: bool = False  # the next round is trained during a reduction
    radial: bool = False  # radial-directional averaging in place of the mean
    eager: bool = False  # overlap: a worker begins with its own part of the round under reduction
    measures: bool = False  # new groups measure their links and order the ring by them
    bits: int = 0  # bits of a number on the wire; 0: not quantised


class Compression(msgspec.Struct, frozen=True, kw_only=True):
    """Codecs of the star, by their pinned names (`core.registry`); "none": whole parameters.

    Attributes:
        up: of the workers' results.
        down: of the changes they get; "relay": the other workers' results as they came.
        start: of the initial parameters.
    """

    up: str = "none"
    down: str = "none"
    start: str = "none"

    @property
    def codecs(self) -> set[str]:
        """Those both sides must know."""
        return {self.up, self.down, self.start} - {"none"}


class Fragmentation(msgspec.Struct, frozen=True, kw_only=True):
    """How the parameters are synchronised in parts; see `sync.fragments`.

    Attributes:
        count: P, fragments; 1: a round synchronises all parameters.
        delay: τ, inner steps of the next lease after which a worker takes the merged fragment.
        mixing: α, fraction of own values kept then.
    """

    count: int = 1
    delay: int = 0
    mixing: float = 0.0


class TrainingJob(WorkerJob, frozen=True, kw_only=True):
    """The worker trains leases, and evaluates.

    The schedule is read from the newest job before every task, so a run that is lengthened loads nothing.
    """

    buffers: str  # sha256 of the packed model buffers, or "" when the model has none
    spec: StepSpec
    inner_state: InnerState  # the optimizer's state at the start of a round
    schedule: Schedule  # schedule of the learning rate, an argument of every step
    seed: int = 0  # seed of the run: keys of the model's random numbers derive from it
    layout: ExampleLayout | None = None  # examples of several arrays; None: slices are tokens
    ring: RingJob | None = None  # None: results go to the gateway
    compression: Compression = Compression()
    code: tuple[PinnedFile, ...] = ()  # files with classes the worker uses
    eager_rate: float = 0.0  # star: step of a worker's own delta at the start of the next lease; 0: not at all
    eager_radial: bool = False  # rounds are merged by radial-directional averaging
    fragments: Fragmentation | None = None  # streaming; None: every lease begins at the newest version
    inner_state_of: str = ""  # digest of the step whose optimizer states are used; "": this step's own

    @property
    def loads(self) -> tuple[str, ...]:
        topology = "star" if self.ring is None else "ring"
        seed = (str(self.seed),) if self.spec.keys else ()
        code = (file.digest for file in self.code)
        compression = self.compression
        layout = () if self.layout is None else (str(self.layout),)
        return self.artifact, topology, compression.up, compression.down, compression.start, *seed, *layout, *code


class Ready(Message, frozen=True, kw_only=True):
    """The worker loaded the artifact and can take tasks."""

    artifact: str
    opt_state_round: int  # round of the saved optimizer state; 0: fresh
    device: str = ""  # device name from the driver
    verified: str = ""  # result of the comparison with the job's reference, in words
    in_ring: bool = False  # role of a ring
    outer_version: int = -1  # ring: of the outer state it still has from an earlier connection; -1: none
    outer_digest: str = ""  # ring: of that state


class Relay(msgspec.Struct, frozen=True, kw_only=True):
    """How a version was made from the results of its round; see `sync.relay`.

    Attributes:
        rule: merge rule.
        rate: of the outer step.
        tasks: of all results that count, ascending.
        digests: of their payloads.
        own: those of the tasks whose payload the worker has itself; the others' come as tensors.
    """

    rule: Chosen
    rate: float
    tasks: tuple[int, ...]
    digests: tuple[str, ...]
    own: tuple[int, ...] = ()


class Parameters(Message, frozen=True, kw_only=True):
    """Global parameters of one version, as one tensor per parameter. Later tasks refer to them by version.

    With a codec for the broadcast, whole parameters are float32, and `digest` names a change since `since` that comes
    as one tensor of bytes, "payload". With fragments and without such a codec a change comes as the fragment's tensors.
    """

    version: int
    counted: int = 0  # hub only: the site's tokens in this version, since the site's run began
    since: int = -1  # the version the change is to be added to; -1: these are whole parameters
    digest: str = ""  # digest of "payload", or of the version that `relay` makes; "": these are tensors
    codec: str = ""  # codec of whole parameters in "payload"; "": they are tensors
    relay: Relay | None = None  # the worker takes the outer step itself


class RingState(Message, frozen=True, kw_only=True):
    """Ring: the outer state of one version, as float32 tensors: each parameter's master copy and velocity, and moments.

    Down: the state that later tasks start from. Up: the answer to `SendOuterState`.
    """

    version: int
    digest: str


class SendOuterState(Message, frozen=True, kw_only=True):
    """Ring: the gateway wants the outer state the worker has, to keep it or to pass it on."""

    version: int


class Reduce(Message, frozen=True, kw_only=True):
    """Ring: average the results of the round with the other workers of `group` and take the outer step.

    Answered with `ReduceDone` or `ReduceFailed`. The step is taken from the outer state of `round - 1`, whichever
    version the results were trained from. A recipient without that state, or without one of its `own` results, refuses:
    the sum has what the journal says, or there is none. With nothing of its own it takes part to get the new state.
    """

    round: int
    attempt: int  # counts up over the whole run
    group: int  # group of the ring's master; a new one when the participants change, or an attempt failed
    peers: int  # how many take part
    own: dict[int, int]  # tokens of each counted result of the recipient, by task
    contributions: int  # counted results of all workers
    tokens: int  # tokens of all these results


class ReduceDone(Message, frozen=True, kw_only=True):
    """The worker has the outer state of `round`."""

    round: int
    attempt: int
    digest: str  # digest of that state
    sent_bytes: int = 0
    received_bytes: int = 0


class ReduceFailed(Message, frozen=True, kw_only=True):
    """The worker still has the outer state of `round - 1` and the results of the round."""

    round: int
    attempt: int
    kind: Literal["peer", "numerics", "refused"]  # refused: without the state or a result the order names
    reason: str


class TrainTask(Message, frozen=True, kw_only=True):
    """Train `steps` inner steps from parameters `version` on `slice` and `more`, then answer with `TrainResult`."""

    task: int
    round: int
    version: int
    lease: int  # position of the slice in the run's data order
    slice: Slice
    more: tuple[Slice, ...] = ()  # slices after `slice`, in this order
    steps: int
    first_step: int  # inner step index of the first step, for the schedule
    ahead: tuple[int, ...] = ()  # eager: tasks of the round that is reduced, whose part the worker begins with
    ahead_tokens: int = 0  # tokens of all contributions to that round
    after: int = 0  # streaming: own task whose end parameters the worker goes on from; 0: from the version
    mixes: int = -1  # streaming: the version whose fragment is mixed in after `Fragmentation.delay` steps; -1: none
    missed: tuple[int, ...] = ()  # decoupled: versions whose fragments are mixed in before the first step

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All that it is trained on, in order."""
        return (self.slice, *self.more)


class EvalTask(Message, frozen=True, kw_only=True):
    """Evaluate parameters `version` on `slice` (whole batches), then answer with `EvalResult`.

    Attributes:
        batches: of `slice`.
        more: whole batches of named sets, of the same element type.
    """

    task: int
    version: int
    slice: Slice
    batches: int
    more: tuple[Slice, ...] = ()

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All that it is evaluated on, in order."""
        return (self.slice, *self.more)


class CountIn(Message, frozen=True, kw_only=True):
    """Decoupled: the round of a task closed; the result counts in a later one, for the later fragment.

    A worker that has sent the result sends it again.
    """

    order: ClassVar[Order] = Order.AHEAD
    task: int
    round: int


class CancelTask(Message, frozen=True, kw_only=True):
    """Stop working on `task`; no answer is wanted."""

    task: int
    reason: str


class FinishTask(Message, frozen=True, kw_only=True):
    """End `task` after the inner step under way, and answer with the steps that are trained."""

    task: int


class Progress(Message, frozen=True, kw_only=True):
    """The worker finished inner step `step` (1-based within the task)."""

    order: ClassVar[Order] = Order.AHEAD
    task: int
    round: int
    step: int  # 0: the first one is about to start
    loss: float | None = None  # loss of that inner step


class TrainResult(Message, frozen=True, kw_only=True):
    """A finished train task; the parameters after the last inner step follow as tensors."""

    task: int
    round: int
    steps: int
    tokens: int  # target tokens trained on
    loss: float  # mean over the inner steps
    grad_norm: float  # norm at the last inner step, before clipping
    seconds: float  # duration of the inner steps
    through: int = 0  # site only: all tokens since the site's run began, up to the last in this result
    # held: end parameters are kept until `Reduce`; delta: the tensor "payload" encodes the change
    payload: Literal["end_parameters", "held", "delta"] = "end_parameters"
    digest: str = ""  # digest of a delta's bytes


class EvalResult(Message, frozen=True, kw_only=True):
    """A finished eval task."""

    order: ClassVar[Order] = Order.AHEAD
    task: int
    version: int
    loss: float  # mean over the batches' targets that count
    batches: int
    sets: tuple[float, ...] = ()  # the same of the task's `more`


ROUNDS = FABRIC.extended(
    TrainingJob,
    Ready,
    Parameters,
    RingState,
    SendOuterState,
    Reduce,
    ReduceDone,
    ReduceFailed,
    TrainTask,
    EvalTask,
    CountIn,
    CancelTask,
    FinishTask,
    Progress,
    TrainResult,
    EvalResult,
)
"""The messages between the gateway of a run in rounds and its workers."""
