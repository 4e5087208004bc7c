"""A worker's name belongs to the machine that joined with it, and bans for lies go by machine and by invite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from controller_bench import Bench

from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.admission import MOST_BANNED
from planetary.fleet.protocol.records import WorkerBanned, WorkerForgiven, WorkerJoined
from planetary.fleet.protocol.run_fold import forgiven
from planetary.machine.journal import replay
from planetary.net.invite import mint, read
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.gateway.gateway import RoundsSetup
from planetary.runs.rounds.lease_ledger import LeaseLedger
from planetary.runs.rounds.records import LeaseMark, RoundsResumed, TrainingStarted
from planetary.runs.rounds.state import ControllerState

SECRET, PRINT = bytes(range(32)), bytes(range(100, 132))
HONEST, OTHER = "a1" * 32, "b2" * 32


def token(node: str = "") -> str:
    return mint(SECRET, PRINT, node=node)


def attended() -> Bench:
    """A run that somebody else takes part in, so that it does not end with those who are banned."""
    bench = Bench(workers=3)
    bench.join("friend", identity="ff" * 32)
    return bench


def refusal(bench: Bench, session: int) -> m.Refused:
    (found,) = [message for to, message in bench.sent if to == session and isinstance(message, m.Refused)]
    return found


def is_taken(bench: Bench, session: int) -> bool:
    return any(to == session and isinstance(message, m.Welcome) for to, message in bench.sent)


def leave(bench: Bench, session: int) -> None:
    bench.tell(e.Closed(session, "the connection ended"))


def resumed(bench: Bench, *, forgive: tuple[str, ...] = ()) -> Bench:
    """A new controller from what the first one wrote."""
    first = TrainingStarted(run="sim", rounds=bench.policy.length.rounds, config_hash="c", model="m", params=8)
    mark = LeaseMark(0, 0, 1, LeaseLedger())
    state = replay([first, *bench.journal], ControllerState())
    again = RoundsResumed(run="sim", rounds=bench.policy.length.rounds, mark=mark, config_hash="c")
    state.apply(again)
    pardons = forgiven(state, forgive)
    for pardon in pardons:
        state.apply(pardon)
    other = Bench(workers=3)
    other.controller = Controller(bench.policy, state, 0.0)
    other.journal = [*bench.journal, again, *pardons]
    return other


def ban(bench: Bench, session: int, *, lasting: bool) -> None:
    desk = bench.controller.desk
    desk.out = []
    bench.controller.membership.ban(desk.workers[session], "it lies", "peer", lasting=lasting)
    bench.journal += [instruction.record for instruction in desk.out if isinstance(instruction, e.Append)]
    leave(bench, session)


def test_a_name_belongs_to_the_machine_that_joined_with_it() -> None:
    bench, invite = attended(), token()
    first = bench.join("a", identity=HONEST, token=invite)
    assert [record.identity for record in bench.records(WorkerJoined)][-1] == HONEST
    thief = bench.connect("a", identity=OTHER, token=invite)
    assert refusal(bench, thief).code == "name"
    assert first in bench.controller.desk.workers  # it goes on
    leave(bench, first)
    absent = bench.connect("a", identity=OTHER, token=invite)
    found = refusal(bench, absent)
    assert "the name a/0 belongs to the machine with the key a1a1a1a1a1a1, this one has b2b2b2b2b2b2" in found.reason
    assert "--node-name" in found.reason
    assert is_taken(bench, bench.connect("a", identity=HONEST, token=invite))
    assert not bench.controller.membership.banned


def test_connected_name_is_not_taken_by_another_machine() -> None:
    """A name that is connected and has not joined is not taken by another machine."""
    bench, invite = attended(), token()
    loading = bench.connect("a", identity=HONEST, token=invite)
    assert refusal(bench, bench.connect("a", identity=OTHER, token=invite)).code == "busy"
    assert loading in bench.controller.desk.workers


def test_names_and_bans_for_lies_outlast_a_resume() -> None:
    bench, invite = attended(), token()
    honest = bench.join("a", identity=HONEST, token=invite)
    leave(bench, honest)
    ban(bench, bench.join("liar", identity=OTHER, token=invite), lasting=True)
    ban(bench, bench.join("unlucky", identity="c3" * 32, token=invite), lasting=False)
    assert [record.worker for record in bench.records(WorkerBanned)] == ["liar/0", "unlucky/0"]
    assert refusal(bench, bench.connect("unlucky", identity="c3" * 32, token=invite)).code == "banned"
    after = resumed(bench)
    assert refusal(after, after.connect("a", identity="d4" * 32, token=invite)).code == "name"
    assert refusal(after, after.connect("liar", identity=OTHER, token=invite)).kind == "peer"
    assert is_taken(after, after.connect("unlucky", identity="c3" * 32, token=invite))
    assert not after.controller.membership.hopeless


def test_a_liar_is_not_taken_under_another_name() -> None:
    bench, invite = attended(), token()
    ban(bench, bench.join("liar", identity=OTHER, token=invite), lasting=True)
    again = refusal(bench, bench.connect("honest", identity=OTHER, token=invite))
    assert again.reason == "the machine of worker liar/0 is not used in this run any more: it lies"
    assert is_taken(bench, bench.connect("honest", identity=HONEST, token=invite))


def test_other_bans_are_of_one_worker_of_a_machine() -> None:
    bench, invite = attended(), token()
    ban(bench, bench.join("gpus", identity=OTHER, token=invite), lasting=False)
    assert is_taken(bench, bench.connect("more-gpus", identity=OTHER, token=invite))


def test_invite_of_several_liars_brings_no_new_machine() -> None:
    bench, invite = attended(), token()
    known = bench.join("known", identity=HONEST, token=invite)
    leave(bench, known)
    for number in range(MOST_BANNED):
        liar = bench.join(f"liar{number}", identity=f"{number:064x}", token=invite)
        assert is_taken(bench, liar)
        ban(bench, liar, lasting=True)
    refused = refusal(bench, bench.connect("new", identity=OTHER, token=invite))
    assert f"invite token {read(invite).id} were banned" in refused.reason
    assert is_taken(bench, bench.connect("known", identity=HONEST, token=invite))
    assert is_taken(bench, bench.connect("new", identity=OTHER, token=token()))


def test_node_invite_is_for_that_node_and_ends_with_a_lie() -> None:
    """An invite for one node is good for that node only and ends with its first lie."""
    bench, invite = attended(), token("mine")
    refused = refusal(bench, bench.connect("yours", identity=OTHER, token=invite))
    assert (refused.code, f"invite token {read(invite).id} is for node mine, not for yours" in refused.reason) == (
        "token",
        True,
    )
    ban(bench, bench.join("mine", identity=OTHER, token=invite), lasting=True)
    again = refusal(bench, bench.connect("mine", identity=HONEST, token=invite, worker="mine/1"))
    assert "lets no new ones in" in again.reason


def test_who_is_forgiven_is_taken_again_with_any_key() -> None:
    bench, invite = attended(), token()
    ban(bench, bench.join("a", identity=HONEST, token=invite), lasting=True)
    after = resumed(bench, forgive=("a/0",))
    assert [record.worker for record in after.records(WorkerForgiven)] == ["a/0"]
    assert is_taken(after, after.join("a", identity=OTHER, token=invite))
    with pytest.raises(
        UserError, match=r"--forgive nobody: the run knows no such worker; those it knows are a/0, friend/0"
    ):
        forgiven(bench.controller.state, ["nobody"])


def test_in_a_local_run_names_belong_to_nobody() -> None:
    bench, invite = Bench(workers=3, local=True), token()
    leave(bench, bench.join("a", identity=HONEST, token=invite))
    assert is_taken(bench, bench.connect("a", identity=OTHER, token=invite))


def test_a_resumed_gateway_knows_the_keys_of_its_run() -> None:
    """Whose invites may have expired meanwhile."""
    bench = attended()
    bench.join("a", identity=HONEST, token=token())
    after = resumed(bench)
    options = GatewayOptions(folder=Path(), cache=Path(), host="", port=0, resume=True)
    gateway = Gateway[Any](Config(), options, Security(), RoundsSetup())
    assert gateway.knows(HONEST) is None, "the journal is not read yet"
    gateway.parts = cast("Any", SimpleNamespace(controller=after.controller))
    assert (gateway.knows(HONEST), gateway.knows(OTHER)) == (True, False)
