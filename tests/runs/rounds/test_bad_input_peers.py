"""A gateway among broken, outdated and hostile peers: each is named and costs the run nothing but time."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bad_input_support import events, gateway, node_flags, started, write_config
from rogue_worker import Rogue, dial, hello, knock

from planetary.artifacts.checkpoint import load_latest
from planetary.core.errors import PlanetaryError, TrustError
from planetary.fleet.gateway.invites import InviteList
from planetary.fleet.protocol import messages as m
from planetary.net.authority import Authority
from planetary.net.handshake import say_hello
from planetary.net.invite import mint, read
from planetary.run.processes.announcement import Announcement
from waiting import HANG_S

pytestmark = [pytest.mark.processes, pytest.mark.compiles]

ROUNDS = 3

# Behaviour -> what the journal must say of it.
REJECTED = {
    "nan": "contains NaN or infinite",
    "inf": "contains NaN or infinite",
    "shape": "expected shape",
    "dtype": "expected element type f32",
    "missing": "is missing",
    "tokens": "tokens instead of",
}
DISCONNECTED = {
    "unknown": "'backdoor' is not expected",
    "surplus": "expected 1 to 8 tensors, found 9",
    "huge": "the tensors of one message",
    "truncated": "in the middle of what it sent",
    "corrupted": "does not match its checksum",
    "oversized": "payload may have 1 to 4194304 bytes, it has 4194305",
    "garbage": "expected it to start with b'PLNT'",
}
BEHAVIOURS = [*REJECTED, *DISCONNECTED]


@dataclass
class Hostile:
    """What is left of a run among rogues."""

    code: int
    folder: Path
    journal: list[dict[str, Any]]
    parting: dict[str, str]  # behaviour -> how the rogue was got rid of
    refused: dict[str, m.Welcome | m.Refused | PlanetaryError]
    log: str

    def of(self, name: str, worker: str) -> list[dict[str, Any]]:
        return [e for e in self.journal if e["event"] == name and e.get("worker") == worker]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Hostile:
    """One real gateway with TLS, every rogue, and one real node with one good worker."""
    folder = tmp_path_factory.mktemp("hostile")
    config = write_config(folder, fabric__workers=len(BEHAVIOURS) + 1, train__rounds=ROUNDS)
    with gateway(config, folder, shared_cache) as (process, announced):
        refused, parting = asyncio.run(_among_rogues(process, announced, folder, shared_cache))
        code = process.wait(HANG_S)
    run = folder / "run"
    return Hostile(code, run, events(run), parting, refused, (folder / "gateway.log").read_text())


async def _among_rogues(
    process: subprocess.Popen[str], announced: Announcement, folder: Path, cache: Path
) -> tuple[dict[str, m.Welcome | m.Refused | PlanetaryError], dict[str, str]]:
    refused = await _strangers(announced, folder)
    rogues = {behaviour: Rogue(behaviour, announced) for behaviour in BEHAVIOURS}
    ready = {behaviour: asyncio.Event() for behaviour in BEHAVIOURS}
    runs = {b: asyncio.create_task(rogue.run(ready[b])) for b, rogue in rogues.items()}
    with contextlib.ExitStack() as stack:
        async with asyncio.timeout(100):
            await asyncio.gather(*(event.wait() for event in ready.values()))
            refused["thief"] = await knock(announced, hello(f"rogue-{BEHAVIOURS[0]}", announced.token))
            stack.enter_context(started("node-manager", *node_flags(announced, folder, cache), cwd=folder))
            partings = dict(zip(runs, await asyncio.gather(*runs.values()), strict=True))
            while process.poll() is None:
                await asyncio.sleep(0.05)
    assert all(rogue.tasks > 0 for rogue in rogues.values()), "a rogue that never got a task proves nothing"
    return refused, partings


async def _strangers(announced: Announcement, folder: Path) -> dict[str, m.Welcome | m.Refused | PlanetaryError]:
    """Everyone who must not get in, and what they are told."""
    own = Authority.open(folder / "state", time.time())
    other = Authority.open(folder / "other-state", time.time())
    foreign = mint(other.invite_secret, other.fingerprint)
    forged = mint(other.invite_secret, own.fingerprint)
    expired = mint(own.invite_secret, own.fingerprint, expires=time.time() - 7200)
    found: dict[str, m.Welcome | m.Refused | PlanetaryError] = {}
    greetings = {
        "forged": hello("n", forged),
        "expired": hello("n", expired),
        "old protocol": hello("n", announced.token, protocol=m.FABRIC.version - 1),
        "new protocol": hello("n", announced.token, protocol=m.FABRIC.version + 1),
        "old iree": hello("n", announced.token, iree_version="2.0.0"),
        "new iree": hello("n", announced.token, iree_version="99.0.0"),
    }
    for name, greeting in greetings.items():
        found[name] = await knock(announced, greeting)
    found["no key"] = await knock(announced, msgspec.structs.replace(hello("n", announced.token), identity=""))
    invites = InviteList(own)
    personal = invites.issue(time.time(), node="guest")
    found["another's invite"] = await knock(announced, hello("n", personal))
    found["revoked while connected"] = await _stay_until_revoked(announced, personal, invites)
    found["revoked"] = await knock(announced, hello("guest", personal))
    try:
        found["foreign"] = await knock(announced, hello("n", foreign), token=foreign)
    except TrustError as error:
        found["foreign"] = error
    return found


async def _stay_until_revoked(announced: Announcement, token: str, invites: InviteList) -> PlanetaryError:
    """Come in with an invite that is revoked then; return how the connection ends."""
    connection = await dial(announced, token)
    try:
        assert isinstance(await say_hello(connection, hello("guest", token), 10.0), m.Welcome)
        invites.revoke(read(token).id, time.time())
        while True:
            await connection.receive(20.0)
    except PlanetaryError as error:
        return error
    finally:
        connection.abort()


# --- who is not let in --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "code", "words"),
    [
        ("forged", "token", ["was not made by this gateway", "planetary invite"]),
        ("expired", "token", ["expired 2 hours ago", "ask for a new one"]),
        (
            "old protocol",
            "protocol",
            ["the gateway speaks", "upgrade planetary on the side of the worker 'n/0'"],
        ),
        ("new protocol", "protocol", ["upgrade planetary on the side of the gateway"]),
        ("old iree", "iree", ["runs 2.0.0", "upgrade iree-base-runtime on the worker"]),
        ("no key", "identity", ["worker 'n/0' does not prove that it has the key"]),
        ("thief", "name", ["belongs to the machine with the key", "another --node-name"]),
        ("another's invite", "token", ["is for node guest, not for n"]),
        ("revoked", "token", ["was revoked; ask for a new one"]),
        ("new iree", "iree", ["runs 99.0.0", "upgrade iree-base-compiler on the gateway to 99.0.0"]),
    ],
)
def test_a_stranger_is_told_why_it_is_refused(hostile: Hostile, who: str, code: str, words: list[str]) -> None:
    answer = hostile.refused[who]
    assert isinstance(answer, m.Refused)
    assert answer.code == code
    assert not answer.retry
    for word in words:
        assert word in answer.reason


def test_another_gateways_token_is_never_shown_to_this_one(hostile: Hostile) -> None:
    error = hostile.refused["foreign"]
    assert isinstance(error, TrustError)
    assert "is not the gateway that the invite token is for: expected a certificate authority" in str(error)


def test_a_connection_ends_with_its_invite(hostile: Hostile) -> None:
    error = hostile.refused["revoked while connected"]
    assert isinstance(error, PlanetaryError)
    assert "was revoked" in str(error)


# --- who is let in and misbehaves -----------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", REJECTED)
def test_a_bad_result_is_rejected_and_names_its_worker(hostile: Hostile, behaviour: str) -> None:
    worker = f"rogue-{behaviour}/0"
    rejected = hostile.of("delta_rejected", worker)
    assert rejected
    assert REJECTED[behaviour] in rejected[0]["reason"]
    assert {"worker", "node", "pid", "round", "lease", "reason"} <= set(rejected[0])
    assert not hostile.of("delta_accepted", worker)
    assert "3 failed tasks in a row" in hostile.parting[behaviour], "a worker that is always wrong is not kept"


@pytest.mark.parametrize("behaviour", DISCONNECTED)
def test_a_bad_frame_costs_its_sender_the_connection(hostile: Hostile, behaviour: str) -> None:
    worker = f"rogue-{behaviour}/0"
    lost = hostile.of("worker_lost", worker)
    assert len(lost) == 1
    assert DISCONNECTED[behaviour] in lost[0]["reason"]
    assert not hostile.of("delta_accepted", worker)


def test_the_run_goes_on_and_loses_nothing(hostile: Hostile) -> None:
    assert hostile.code == 0, hostile.log
    assert "Traceback" not in hostile.log
    last = hostile.journal[-1]
    assert (last["event"], last["ok"], last["kind"]) == ("run_finished", True, "done")
    finished = [e for e in hostile.journal if e["event"] == "round_finished"]
    assert [e["round"] for e in finished] == list(range(1, ROUNDS + 1))
    accepted = [e for e in hostile.journal if e["event"] == "delta_accepted"]
    assert len({e["lease"] for e in accepted}) == len(accepted), "a lease counted twice"
    assert finished[-1]["tokens_total"] == sum(e["tokens"] for e in accepted)
    returned = [e for e in hostile.journal if e["event"] == "lease_returned" and e["to"] == "pool"]
    assigned = {e["lease"] for e in hostile.journal if e["event"] == "lease_assigned"}
    assert assigned == {e["lease"] for e in [*accepted, *returned]}, "a lease is trained or goes back"
    later = {e["lease"] for e in accepted if e["round"] > 1}
    assert later <= {e["lease"] for e in returned}, "what the rogues did not train is trained before anything new"
    assert load_latest(hostile.folder / "checkpoints").info.round == ROUNDS
