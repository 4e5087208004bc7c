"""Relaying: the workers take the outer step themselves, from the payloads of all contributions as they were sent.

The gateway passes on the other workers' payloads, unchanged, with the coefficients of the merge rule. Decoding and the
outer step (`sync.outer.outer_step_with`) are operations on single coordinates in a fixed order, so a worker that had
the bits of one version gets those of the next; the version's digest shows it. Nothing is lost on the way down, at M − 1
times the bytes of one update. Inner products are computed once, at the gateway: their bits depend on the machine. Outer
momentum and Adam would need the outer state, which newcomers do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planetary.core.errors import NumericsError, ProtocolError
from planetary.core.tensors import Tensors, TensorSpec
from planetary.sync.contributions import Contribution
from planetary.sync.merge import MergeRule
from planetary.sync.outer import outer_step_with
from planetary.sync.outer_optimizers import Nesterov, OuterState
from planetary.sync.payload import PayloadForm, payload_digest

COEFFICIENTS = "coefficients"
"""Name of the tensor of the merge rule's coefficients: float64 [tensors, contributions]."""


def relayed_name(task: int) -> str:
    """Return the name of the tensor with the payload of a task."""
    return f"payload-{task}"


def params_digest(specs: Sequence[TensorSpec], params: Tensors) -> str:
    """Return the digest of float32 master parameters, in the specs' order; see `payload_digest`."""
    return payload_digest(*(np.ascontiguousarray(params[spec.name]) for spec in specs))


class RelayedVersion:
    """A worker's copy of the shared parameters, bit for bit.

    Attributes:
        params: float32 masters by name.
    """

    def __init__(self, codec: str, specs: Sequence[TensorSpec], params: Tensors) -> None:
        """`codec`: of the workers' updates; `params`: whole, as the gateway has them."""
        self._form, self._specs = PayloadForm(codec, specs), tuple(specs)
        self.params: dict[str, np.ndarray] = dict(params)

    def advance(
        self,
        payloads: Mapping[int, tuple[np.ndarray, str]],
        coefficients: np.ndarray,
        rule: MergeRule,
        digest: str,
        *,
        rate: float = 1.0,
    ) -> None:
        """Take the outer step without momentum; `params` stay as they were where it fails.

        Args:
            payloads: of all contributions, with their digests, by task.
            coefficients: as of `outer_step_with`, in task order.
            rule: how the round was merged.
            digest: of the next version, as `params_digest`.
            rate: of the outer step.

        Raises:
            ProtocolError: a payload does not match the digest, or the result has other bits than the gateway's.
        """
        contributions = [
            Contribution(task, 1, self._form.decode(*payloads[task]), form="deltas") for task in sorted(payloads)
        ]
        velocity = {spec.name: np.zeros(spec.shape, np.float32) for spec in self._specs}  # of momentum 0: unused
        state = OuterState(self.params, velocity)
        try:
            made = outer_step_with(
                self._specs, state, contributions, coefficients, rule=rule, optimizer=Nesterov(rate)
            ).state.params
        except NumericsError as error:
            raise ProtocolError(f"the relayed outer step failed: {error}") from error
        found = params_digest(self._specs, made)
        if found != digest:
            raise ProtocolError(
                f"the relayed outer step gave parameters of digest {found}, expected {digest}: this machine computes "
                "other bits than the gateway, or began from others"
            )
        self.params = made
