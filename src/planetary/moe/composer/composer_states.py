"""The states of a composer, as a table. The diagram in docs/parallax.md is made from it."""

from __future__ import annotations

from enum import StrEnum

from planetary.machine.state_table import Table


class Phase(StrEnum):
    """A composer's state: whether it has a shard, a connection, and steps to take."""

    STANDBY = "standby"  # without a shard
    COMPOSING = "composing"
    DETACHED = "detached"  # it trains without a connection; nothing is published or saved
    FINISHED = "finished"  # no step of the run is left; its last state is saved
    FINISHED_DETACHED = "finished detached"  # its last state is saved when there is a connection

    @property
    def connected(self) -> bool:
        """Whether messages about the shard count."""
        return self in {Phase.COMPOSING, Phase.FINISHED}

    @property
    def finished(self) -> bool:
        """Whether no step of the run is left."""
        return self in {Phase.FINISHED, Phase.FINISHED_DETACHED}


GRANTED, RESUMED = "shard granted", "shard resumed"  # with its saved state; with what is here
STOOD_DOWN, LOST, ENDED = "stood down", "connection lost", "run ended"

COMPOSER: Table = {
    (Phase.STANDBY, GRANTED): Phase.COMPOSING,
    (Phase.STANDBY, RESUMED): Phase.COMPOSING,
    (Phase.STANDBY, STOOD_DOWN): Phase.STANDBY,
    (Phase.STANDBY, LOST): Phase.STANDBY,
    (Phase.COMPOSING, GRANTED): Phase.COMPOSING,
    (Phase.COMPOSING, RESUMED): Phase.COMPOSING,
    (Phase.COMPOSING, STOOD_DOWN): Phase.STANDBY,
    (Phase.COMPOSING, LOST): Phase.DETACHED,
    (Phase.COMPOSING, ENDED): Phase.FINISHED,
    (Phase.DETACHED, GRANTED): Phase.COMPOSING,
    (Phase.DETACHED, RESUMED): Phase.COMPOSING,
    (Phase.DETACHED, STOOD_DOWN): Phase.STANDBY,
    (Phase.DETACHED, LOST): Phase.DETACHED,
    (Phase.DETACHED, ENDED): Phase.FINISHED_DETACHED,  # in lock step, where its own count is everybody's
    (Phase.FINISHED, GRANTED): Phase.COMPOSING,  # an older state: the gateway lost the newest
    (Phase.FINISHED, RESUMED): Phase.FINISHED,
    (Phase.FINISHED, STOOD_DOWN): Phase.STANDBY,
    (Phase.FINISHED, LOST): Phase.FINISHED_DETACHED,
    (Phase.FINISHED_DETACHED, GRANTED): Phase.COMPOSING,
    (Phase.FINISHED_DETACHED, RESUMED): Phase.FINISHED,
    (Phase.FINISHED_DETACHED, STOOD_DOWN): Phase.STANDBY,
    (Phase.FINISHED_DETACHED, LOST): Phase.FINISHED_DETACHED,
}
