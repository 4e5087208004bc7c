"""Whether a node's process may take part, beyond what the transport has already checked (protocol, token)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from planetary.core.errors import TrustError
from planetary.core.printable import NAME_RULE, is_name
from planetary.fleet.protocol.messages import Hello, Refused
from planetary.fleet.protocol.run_fold import Ban
from planetary.net import invite
from planetary.net.identity import shown

MOST_BANNED = 3  # machines that one invite brought, after which it brings no new ones; one, if it is a node's own


class Admits(Protocol):
    """The terms of a run, or of a hub, on which processes are let in."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of workers; empty: there is one role only."""
        ...

    def refuse(self, hello: Hello) -> Refused | None:
        """Return why a worker or a site is refused that nothing else forbids; None: it is not."""
        ...


class KnownNames(Protocol):
    """Names the journal has."""

    @property
    def keys(self) -> Mapping[str, str]:
        """Public key of the machine a name belongs to, by name."""
        ...

    @property
    def bans(self) -> Mapping[str, Ban]:
        """Of names that are not used any more, by name."""
        ...


def invite_of(hello: Hello) -> str:
    """Return the id of the invite a process shows, which the transport found genuine; "" without one."""
    shown_invite = _invite_of(hello)
    return "" if shown_invite is None else shown_invite.id


def _invite_of(hello: Hello) -> invite.Invite | None:
    """Return the invite; None without one. A gateway without TLS looks at no token, so it may be anything."""
    try:
        return invite.read(hello.token) if hello.token else None
    except TrustError:
        return None


def refuse(hello: Hello, policy: Admits, state: KnownNames, connected: Mapping[str, tuple[str, str]]) -> Refused | None:
    """Return why `hello` is refused, or None.

    Args:
        hello: the process's description of itself; it has the key it names.
        policy: of the run, or of the hub.
        state: whose names belong to which keys, and who is banned.
        connected: worker -> node and key a live connection of that name comes from.
    """
    for part, given in (("worker", hello.worker), ("node", hello.node)):
        if not is_name(given):
            return Refused(
                code="name",
                reason=f"a {part} is named with {NAME_RULE}, found {given[:128]!r}; choose another --node-name",
                kind="data",
            )
    if refusal := _banned(hello, state):
        return refusal
    shown_invite = _invite_of(hello)
    if shown_invite is not None and (node := shown_invite.node) not in ("", hello.node):
        return Refused(
            code="token",
            reason=f"the invite token {invite_of(hello)} is for node {node}, not for {hello.node}; start this node "
            f"with --node-name {node}, or ask for an invite of its own",
            kind="data",
        )
    owner = state.keys.get(hello.worker, hello.identity)
    if owner != hello.identity:
        return Refused(
            code="name",
            reason=f"the name {hello.worker} belongs to the machine with the key {shown(owner)}, this one has "
            f"{shown(hello.identity) or 'none'}; start this node with another --node-name, or with the --state "
            f"folder that it had. Is that lost? A run that is resumed with --forgive {hello.worker} takes the new key",
            kind="data",
        )
    node, identity = connected.get(hello.worker, (hello.node, hello.identity))
    if (node, identity) != (hello.node, hello.identity):
        return Refused(
            code="busy",
            reason=f"a worker named {hello.worker} is already connected from node {node}; start this node with "
            "another --node-name",
        )
    if hello.roles and policy.roles and not set(hello.roles) & set(policy.roles):
        given = " ".join(f"--role {role}" for role in hello.roles)
        return Refused(
            code="role",
            reason=f"worker {hello.worker} was started with {given}, and the roles of this run are "
            f"{', '.join(policy.roles)}: start it with one of these, or without --role",
            kind="data",
        )
    return policy.refuse(hello) if hello.role != "supervisor" else None


def _banned(hello: Hello, state: KnownNames) -> Refused | None:
    """A name, a machine's key, or an invite behind several banned machines."""
    lasting = [ban for ban in state.bans.values() if ban.lasting and ban.identity]
    ban = state.bans.get(hello.worker) or next((one for one in lasting if one.identity == hello.identity), None)
    if ban is not None:
        who = f"worker {ban.worker}" if ban.worker == hello.worker else f"the machine of worker {ban.worker}"
        reason = f"{who} is not used in this run any more: {ban.reason}"
        return Refused(code="banned", reason=reason, kind=ban.kind)
    shown_invite = _invite_of(hello)
    if shown_invite is None or hello.identity in state.keys.values():
        return None
    brought = {one.identity for one in lasting if one.invite == shown_invite.id}
    if len(brought) < (1 if shown_invite.node else MOST_BANNED):
        return None
    reason = f"machines that came with the invite token {shown_invite.id} were banned; it lets no new ones in"
    return Refused(code="banned", reason=f"{reason}. Ask for another", kind="peer")
