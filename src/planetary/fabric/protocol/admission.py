"""Whether a node's process may take part, beyond what the transport has already checked (protocol, token)."""

from __future__ import annotations

from collections.abc import Mapping

from planetary.core.printable import is_name
from planetary.fabric.protocol.messages import Hello, Refused
from planetary.fabric.protocol.policy import FabricPolicy
from planetary.runtime.backends import is_pjrt


def refuse(
    hello: Hello, policy: FabricPolicy, banned: Mapping[str, tuple[str, str]], nodes: Mapping[str, str]
) -> Refused | None:
    """Return why `hello` is refused, or None.

    Args:
        hello: what the process says of itself.
        policy: of the run.
        banned: worker -> what kind of failure it had, and why it is not used any more.
        nodes: worker -> the node that a live connection of that name comes from.
    """
    for what, said in (("worker", hello.worker), ("node", hello.node)):
        if not is_name(said):
            return Refused(
                code="name",
                reason=f"a {what} is called by 1 to 128 of the letters A to Z and a to z, digits and . _ : / -, found "
                f"{said[:128]!r}; choose another --node-name",
                kind="data",
            )
    if hello.worker in banned:
        kind, reason = banned[hello.worker]
        return Refused(
            code="banned", reason=f"worker {hello.worker} is not used in this run any more: {reason}", kind=kind
        )
    taken = nodes.get(hello.worker)
    if taken is not None and taken != hello.node:
        return Refused(
            code="busy",
            reason=f"a worker named {hello.worker} is already connected from node {taken}; start this node with "
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
    # What a PJRT worker loads is versioned StableHLO, which every later release reads.
    if hello.role == "worker" and not is_pjrt(hello.backend) and hello.iree_version != policy.iree_version:
        return Refused(
            code="iree",
            reason=f"compiled modules do not load across IREE versions: the gateway compiles with "
            f"{policy.iree_version} and worker {hello.worker} runs {hello.iree_version or 'none'}; upgrade "
            f"{_older(hello.iree_version, policy.iree_version)}",
        )
    return None


def _older(worker: str, gateway: str) -> str:
    """Which side has the older version, as the object of the sentence "upgrade ..."."""

    def key(version: str) -> list[int]:
        return [int(part) if part.isdigit() else 0 for part in version.split(".")]

    if key(worker) < key(gateway):
        return f"iree-base-runtime on the worker to {gateway}"
    return f"iree-base-compiler on the gateway to {worker}"
