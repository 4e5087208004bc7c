"""Events and instructions of a run in rounds, beside those of the fleet."""

from __future__ import annotations

from planetary.core.step import StepSpec
from planetary.core.token_slice import Slice
from planetary.fleet.protocol.events import (  # noqa: F401  # this module is all that the machines of rounds speak
    Append,
    BlobOf,
    Close,
    Closed,
    Compile,
    Compiled,
    CompileFailed,
    Dial,
    DropAttachment,
    Event,
    Exit,
    Finish,
    Instruction,
    LetGo,
    Opened,
    Payload,
    PayloadArrives,
    PayloadSent,
    Received,
    RestartRequested,
    Send,
    SendFailed,
    StopRequested,
    Tick,
    WriteMetrics,
)
from planetary.runs.rounds.changes import (  # noqa: F401  # the same
    WHOLE,
    Change,
    ChangeOf,
    ParametersOf,
)
from planetary.runs.rounds.records import LeaseMark, Mark
from planetary.sync.deltas import Table

# --- events for the controller ------------------------------------------------------------------------------------


class StepOffered(Event, frozen=True, kw_only=True):
    """A training step of equal signature is compiled for the targets in use and verified: it replaces the run's."""

    spec: StepSpec
    buffers: str  # digest, as of `TrainingJob`
    compiled: tuple[Compiled, ...]
    by: str  # name of the token
    why: str
    back: bool = False  # return to an earlier step of the run


class ContributionsMeasured(Event, frozen=True):
    """The inner products of the deltas of a round's contributions are known."""

    round: int
    table: Table


class OuterStepDone(Event, frozen=True):
    """The parameters of version `round` exist."""

    round: int
    delta_norm: float  # Euclidean norm of the merged delta
    autocorrelation: float | None = None  # autocorrelation of the merged delta with the previous round's
    change: Change = WHOLE  # the form in which workers with the version before get it


class OuterStepFailed(Event, frozen=True):
    """The outer step gave numbers that are not finite."""

    round: int
    reason: str


class ParametersRestored(Event, frozen=True):
    """The gateway's parameters are those of a checkpoint again, or the initial ones."""

    mark: LeaseMark
    digest: str  # digest of the outer state


class RestoreFailed(Event, frozen=True):
    """The gateway could not go back."""

    reason: str


class CheckpointDone(Event, frozen=True):
    """A checkpoint was committed."""

    round: int
    path: str
    seconds: float


class CheckpointLost(Event, frozen=True):
    """A checkpoint could not be written."""

    round: int
    reason: str


# --- tensors that messages carry ----------------------------------------------------------------------------------


class TokensOf(Payload, frozen=True):
    """Runs of tokens of the training or held-out file, one after the other as one tensor "tokens"."""

    held_out: bool
    slices: tuple[Slice, ...]


class EndParametersOf(Payload, frozen=True):
    """The worker's parameters after the last inner step of a task."""

    task: int


class OuterStateOf(Payload, frozen=True):
    """The outer state of one version: the one the sender holds."""

    version: int


# --- instructions of the controller -------------------------------------------------------------------------------


class UseStep(Instruction, frozen=True):
    """The offered step of this digest is the run's from now on."""

    model: str


class UseStar(Instruction, frozen=True):
    """The run goes on in a star from `version`, whose outer state the gateway has."""

    version: int
    why: str


class MeasureContributions(Instruction, frozen=True):
    """Compare these end parameters with the start of the round; answer with `ContributionsMeasured`."""

    round: int
    contributions: tuple[tuple[int, int], ...]  # (task, attachment), in task order


class TakeOuterStep(Instruction, frozen=True):
    """Merge these end parameters, take the outer step; answer with `OuterStepDone` or `OuterStepFailed`."""

    round: int
    rule: str  # name in the merge rules
    contributions: tuple[tuple[int, int, int], ...]  # (task, tokens, attachment), in task order


class RestoreParameters(Instruction, frozen=True):
    """Go back to the newest checkpoint of a round up to `newest`, or to the start; answer with `ParametersRestored`.

    `RestoreFailed` where reading or writing fails.
    """

    newest: int


class KeepParameters(Instruction, frozen=True):
    """Parameters of other versions than these are not needed any more."""

    versions: tuple[int, ...]


class KeepOuterState(Instruction, frozen=True):
    """Ring: the outer state that came with a message is the gateway's from now on."""

    version: int
    attachment: int


class ForgetRounds(Instruction, frozen=True):
    """Ring: rounds after this one will be trained again; their metrics are void."""

    after: int


class WriteCheckpoint(Instruction, frozen=True):
    """Write a checkpoint of version `mark.round`; answer with `CheckpointDone` or `CheckpointLost`."""

    mark: Mark
    protected: tuple[int, ...] = ()  # earlier rounds whose checkpoints stay
