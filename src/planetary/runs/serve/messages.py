"""The messages of a served model, beside those of every kind of run."""

from __future__ import annotations

import msgspec

from planetary.core import decoding
from planetary.core.step import FunctionSpec
from planetary.core.tensors import Tensors, TensorSpec
from planetary.fleet.protocol import messages as m
from planetary.runs.serve.program.shape import DRAWN, DRAWN_VALUES, IDS, ROW, VALUES, ServingShape
from planetary.runs.serve.scheduling.sampling import Candidates, Drawing, Drawn
from planetary.runs.serve.scheduling.scheduler import Call

WEIGHTS = "weights of a served model"
"""Label of the packed parameters of a model, or of an adapter's A and B."""


class FurtherFunctions(msgspec.Struct, frozen=True):
    """Functions in an artifact of their own, beside those of a job's."""

    artifact: str  # sha256
    functions: tuple[str, ...]


class AdapterPart(msgspec.Struct, frozen=True):
    """An adapter of a served model, whose A and B a call takes in place of zeros."""

    weights: str  # sha256 of the packed A and B
    trial: str  # as `ServingJob.trial`, with the adapter


class ServingJob(m.RoleJob, frozen=True, kw_only=True):
    """The worker holds the model and a cache, and computes calls.

    Attributes:
        weights: sha256 of the packed parameters.
        params: of the model, in the order in which functions take them.
        trial: sha256 of a sequence with the results of the whole forward pass with these weights, for comparison with
            the worker's results (`runs.serve.program.trial`).
        adapters: of the model, in the order of their numbers from 1 on.
        further: functions to add to those of the artifact, `ServingShape.first_calls`. A job with more of them comes
            when they are compiled, and makes no new role.
    """

    weights: str
    params: tuple[TensorSpec, ...]
    trial: str
    adapters: tuple[AdapterPart, ...] = ()
    further: tuple[FurtherFunctions, ...] = ()

    @property
    def loads(self) -> tuple[str, ...]:
        """Other weights are another role, with an empty cache."""
        return (*super().loads, self.weights)

    @staticmethod
    def plan_of(shape: ServingShape) -> str:
        """Return the plan: the sizes of the functions."""
        return msgspec.json.encode(shape).decode()

    @property
    def shape(self) -> ServingShape:
        """The sizes of the functions."""
        return decoding.from_json(self.plan, ServingShape)

    @property
    def functions(self) -> dict[str, FunctionSpec]:
        """Signatures of the compiled functions, by name. Each names all parameters: a message holds these once."""
        return self.shape.functions(self.params)


class ServingReady(m.RoleMessage, frozen=True, kw_only=True):
    """The worker has the model and an empty cache."""

    artifact: str
    weights: str
    device: str
    verified: str
    functions: tuple[str, ...] = ()  # beside the first ones


class FunctionsChecked(m.RoleMessage, frozen=True, kw_only=True):
    """The worker has compared further functions, and has them from now on unless they are refused."""

    functions: tuple[str, ...]
    refused: str = ""  # the reason


class ComputeCall(m.RoleMessage, frozen=True, kw_only=True):
    """Compute a call. A worker gets the next one when it has answered, the last time if it draws tokens itself.

    All lists have one entry a sequence. Sequences keep their pages from call to call; the gateway alone knows whose
    they are.
    """

    call: int  # counts up
    function: str
    tokens: tuple[tuple[int, ...], ...]  # new tokens
    starts: tuple[int, ...]  # position of the first of them
    page_tables: tuple[tuple[int, ...], ...]  # pages of the sequence, in order
    full: bool  # send the log-probabilities of all tokens
    likeliest: int = 0  # how many of the likeliest tokens to send
    drawings: tuple[Drawing | None, ...] = ()  # None: nothing is drawn, or by the gateway
    vocabulary: int | None = None  # bound of drawn tokens; None: all
    extra_steps: int = 0  # further calls with the drawn tokens, unless a sequence ends before
    adapter: int = 0  # of all the sequences, from 1; 0: none
    following: tuple[int, ...] = ()  # the token after the new ones, for a scoring call; -1: there is none yet

    @staticmethod
    def of(number: int, call: Call, vocabulary: int) -> ComputeCall:
        """Return the message of a scheduler's call."""
        return ComputeCall(
            call=number,
            function=call.function,
            tokens=tuple(slot.tokens for slot in call.slots),
            starts=tuple(slot.start for slot in call.slots),
            page_tables=tuple(slot.page_table for slot in call.slots),
            full=call.full,
            likeliest=call.likeliest,
            drawings=tuple(slot.drawing for slot in call.slots),
            vocabulary=vocabulary,
            extra_steps=call.extra_steps,
            adapter=call.adapter,
            following=tuple(slot.following for slot in call.slots) if call.scores else (),
        )


class Computed(m.RoleMessage, frozen=True, kw_only=True):
    """A call's results.

    Its tensors are `drawn` i32 [B], `drawn_values` f32 [B], of the likeliest tokens `values` f32 [B, K] and `ids` i32
    [B, K], and `row` f32 [B, V] if asked for.

    A scoring call's also are `scores` f32 [B, S], and of the likeliest tokens `score_values` f32 and `score_ids` i32
    [B, S, L].
    """

    call: int
    seconds: float  # duration on the device
    last: bool = True  # no further results of this call follow, of tokens the worker drew itself


SERVING = m.FABRIC.extended(ServingJob, ServingReady, FunctionsChecked, ComputeCall, Computed)
"""The messages of a served model."""


def candidates_of(sent: Tensors) -> list[Candidates]:
    """Return the results of a call as the scheduler takes them, one entry a sequence, without scores."""
    row = sent.get(ROW)
    return [
        Candidates(ids, values, None if row is None else row[i], None, Drawn(int(token), float(value)))
        for i, (ids, values, token, value) in enumerate(
            zip(sent[IDS], sent[VALUES], sent[DRAWN], sent[DRAWN_VALUES], strict=True)
        )
    ]
