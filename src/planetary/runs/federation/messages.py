"""Messages between a hub and its sites, beside those between every gateway and workers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planetary.core.tensors import TensorSpec
from planetary.runs.federation.config import SiteEntry
from planetary.runs.rounds import messages as rm

SITE = "site"
"""The role of a gateway that joins; also backend and target."""


def masters_of(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the specs of tensors that cross a border for these parameters: their float32 masters.

    In a narrower type the low bits an outer step adds would be lost at each border.
    """
    return tuple(TensorSpec(spec.name, "f32", spec.shape) for spec in specs)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts shared by a hub and its sites, beside the parameters' names, types and shapes."""

    model: str  # digest of the loss: `[model]` without initial values
    vocabulary: int
    tokenizer: str  # digest
    data: str  # `PreparedData.key`: the tokens and their order
    lease: int  # tokens of one lease of a site
    order: str  # digest of the options that map leases to tokens


class SiteTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Name and data of one site in a federation."""

    entry: SiteEntry
    part: int  # part of the hub's data, from 0; where `entry.data` is "own", 0
    parts: int  # number of parts of the data; where `entry.data` is "own", 1


class SiteJob(rm.TrainingJob, frozen=True, kw_only=True):
    """The worker is a site: it trains rounds with further workers, and contributes the parameters at the end."""

    hub: str  # identity of the hub's run
    facts: Facts
    sites: dict[str, SiteTerms]  # terms by site name

    @property
    def loads(self) -> tuple[str, ...]:
        """A hub that goes on with other sites is joined anew."""
        return self.artifact, self.hub, msgspec.json.encode(self.sites, order="deterministic").decode()


FEDERATION = rm.ROUNDS.extended(SiteJob)
"""The protocol of a hub and its sites."""
