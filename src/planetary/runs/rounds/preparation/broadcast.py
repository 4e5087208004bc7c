"""The forms in which the gateway sends new versions to workers: whole, as coded changes, or relayed.

One object per run. The controller chooses a form per worker from the `Change` it announces; a worker reads it with an
`Exchange`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from planetary.core.configuration.ranges import RELAY
from planetary.core.tensors import Tensors, TensorSpec
from planetary.runs.rounds.changes import WHOLE, Change, CodedChange, RelayedChange
from planetary.runs.rounds.messages import Compression, Relay
from planetary.sync.fragments import Fragments
from planetary.sync.merge import MergeRule
from planetary.sync.outer import OuterStep, published_params
from planetary.sync.payload import PAYLOAD, PayloadForm, Shown
from planetary.sync.relay import COEFFICIENTS, params_digest, relayed_name


class Broadcast:
    """The form in which the gateway sends new versions: whole parameters, or the whole tensors of a fragment.

    Attributes:
        change: to the newest version.
    """

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments) -> None:
        self._specs, self._fragments = tuple(specs), fragments
        self.change: Change = WHOLE
        self._changes: dict[int, Tensors] = {}

    @property
    def shown(self) -> Tensors:
        """The newest version as workers have it, where that is not the master copy; else empty."""
        return {}

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """Return the newest version, whose master copy is `params`, as workers get it whole."""
        return published_params(self._specs, params)

    def attached(self, attachment: int, payload: np.ndarray | None, digest: str) -> None:
        """Take note of the bytes, and their digest, in which a contribution came; None: it came as tensors."""

    def dropped(self, attachment: int) -> None:
        """Forget a contribution."""

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        """Make the change to the version after a round; `parts`: attachments of the contributions by task."""
        if self._fragments.count > 1:
            specs = self._fragments.of_round(round_)
            self.change, self._changes[round_] = CodedChange(), published_params(specs, step.state.params)

    def change_of(self, version: int, own: Collection[int] = ()) -> Tensors:
        """Return the tensors of a change that was announced, without the payloads of the tasks `own`."""
        return self._changes[version]

    def keep(self, versions: Sequence[int]) -> None:
        """Forget the changes to all other versions."""
        self._changes = {v: change for v, change in self._changes.items() if v in versions}

    def go_back(self, params: Tensors) -> None:
        """Let workers have `params`, float32 by name; there is no change."""
        self._changes, self.change = {}, WHOLE


class CodedChanges(Broadcast):
    """Changes in a codec, relative to the parameters that workers have. See `Shown`."""

    change: Change

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments, codec: str, params: Tensors) -> None:
        """`params`: as workers have them, float32 by name."""
        super().__init__(specs, fragments)
        self._parts = [Shown(codec, part, _of(part, params)) for part in fragments.parts]

    @property
    def shown(self) -> Tensors:
        return {name: values for part in self._parts for name, values in part.params.items()}

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """As float32, to which changes are added."""
        return self.shown

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        payload, digest = self._parts[self._fragments.number_of(round_)].advance(step.state.params)
        self.change, self._changes[round_] = CodedChange(digest=digest), {PAYLOAD: payload}

    def go_back(self, params: Tensors) -> None:
        super().go_back(params)
        for part, specs in zip(self._parts, self._fragments.parts, strict=True):
            part.params = _of(specs, params)


class RelayedUpdates(Broadcast):
    """The contributions of a round as they came. See `sync.relay`."""

    change: Change

    def __init__(self, specs: Sequence[TensorSpec], fragments: Fragments, codec: str) -> None:
        """`codec`: of the contributions."""
        super().__init__(specs, fragments)
        self._payload_bytes = PayloadForm(codec, specs).spec.nbytes
        self._payloads: dict[int, tuple[np.ndarray, str]] = {}  # payload and digest by attachment

    def newest(self, params: Tensors) -> Mapping[str, np.ndarray]:
        """The master copy, from which workers take outer steps."""
        return params

    def attached(self, attachment: int, payload: np.ndarray | None, digest: str) -> None:
        """A contribution without a payload is refused, and never counts."""
        if payload is not None:
            self._payloads[attachment] = payload, digest

    def dropped(self, attachment: int) -> None:
        self._payloads.pop(attachment, None)

    def advance(self, round_: int, step: OuterStep, rule: MergeRule, parts: Mapping[int, int]) -> None:
        assert step.coefficients is not None
        tasks = tuple(sorted(parts))
        payloads = {task: self._payloads.pop(parts[task]) for task in tasks}
        digests = tuple(payloads[task][1] for task in tasks)
        self.change = RelayedChange(
            relay=Relay(rule=rule.chosen, rate=step.rate, tasks=tasks, digests=digests),
            digest=params_digest(self._specs, step.state.params),
            payload_bytes=self._payload_bytes,
            more_bytes=step.coefficients.nbytes,
            whole_bytes=sum(4 * spec.size for spec in self._specs),
        )
        tensors = {relayed_name(task): payload for task, (payload, _) in payloads.items()}
        self._changes[round_] = {COEFFICIENTS: step.coefficients, **tensors}

    def change_of(self, version: int, own: Collection[int] = ()) -> Tensors:
        left_out = {relayed_name(task) for task in own}
        return {name: values for name, values in self._changes[version].items() if name not in left_out}


def broadcast_of(
    specs: Sequence[TensorSpec], fragments: Fragments, compression: Compression, params: Tensors
) -> Broadcast:
    """Return the broadcast of a run; `params`: as workers have them, float32 by name."""
    if compression.down == "none":
        return Broadcast(specs, fragments)
    if compression.down == RELAY:
        return RelayedUpdates(specs, fragments, compression.up)
    return CodedChanges(specs, fragments, compression.down, params)


def _of(specs: Sequence[TensorSpec], tensors: Tensors) -> dict[str, np.ndarray]:
    return {spec.name: tensors[spec.name] for spec in specs}
