"""The checks of `planetary doctor`, as pure functions from measured values to findings with remedies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from planetary.core.errors import (
    PeerError,
    PlanetaryError,
    RemoteProtocolError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.monitor import human_numbers as human

MIB, GIB = 1 << 20, 1 << 30
LEAST_DISK, SOME_DISK = 1 * GIB, 10 * GIB  # limits: below is bad, and worth a warning
LEAST_MEMORY, SOME_MEMORY = 512 * MIB, 2 * GIB
LEAST_FILES, SOME_FILES = 256, 1024  # open files a process may have
CLOCK_WRONG_S, CLOCK_OFF_S = 60.0, 2.0  # invites and certificates are valid by the clock
SLOW_LINK = 1e6  # bytes/s
LONG_WAY_S = 0.3


_ERRORS = {error.__name__: error for error in (UserError, TrustError, PeerError, ResourceError)}


class State(StrEnum):
    """How grave a finding is."""

    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the examination.

    Attributes:
        check: name of the check, e.g. "clock".
        state: how grave it is.
        found: the finding.
        remedy: the action to take; "" where none is needed.
        error: name of the class in `core.errors` that a command fails with for it; "" unless it is bad.
    """

    check: str
    state: State
    found: str
    remedy: str = ""
    error: str = ""


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of an examination, which `planetary plan --measured` reads.

    Attributes:
        address: of the gateway, "" where none was named.
        rtt_s: round trip to the gateway.
        up, down: bytes/s to the gateway and from it; 0: not measured.
        clock_offset_s: the gateway's clock minus this machine's.
        reachable: whether the gateway could connect to a port of this machine; None: not tried.
        peers: that reduced together; 0: not measured.
        ring_rate: bytes/s of the slowest link of their ring.
        ring_rtt_s: of an all-reduce of one number, divided by the 2 (peers − 1) stages.
        memory: bytes that are available.
        cores: that a process may use.
    """

    address: str = ""
    rtt_s: float = 0.0
    up: float = 0.0
    down: float = 0.0
    clock_offset_s: float = 0.0
    reachable: bool | None = None
    peers: int = 0
    ring_rate: float = 0.0
    ring_rtt_s: float = 0.0
    memory: int = 0
    cores: int = 0


def good(check: str, found: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(check=check, state=State.GOOD, found=found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that does not keep the machine from taking part."""
    return Finding(check=check, state=State.WARNING, found=found, remedy=remedy)


def bad(check: str, found: str, remedy: str, error: type[PlanetaryError]) -> Finding:
    """Return a finding that keeps the machine from taking part."""
    return Finding(check=check, state=State.BAD, found=found, remedy=remedy, error=error.__name__)


def failure(findings: Iterable[Finding]) -> type[PlanetaryError] | None:
    """Return the class of the first bad finding; None where none is."""
    return next((_ERRORS[one.error] for one in findings if one.state is State.BAD), None)


# --- this machine -----------------------------------------------------------------------------------------------


def judge_amount(check: str, found: str, free: int, limits: tuple[int, int], remedy: str) -> Finding:
    """Judge free bytes: below the first limit no run works, below the second one may have to stop."""
    least, some = limits
    if free < least:
        return bad(check, f"{found}, at least {human.size(least)} are needed", remedy, ResourceError)
    if free < some:
        return warning(check, found, remedy)
    return good(check, found)


def judge_disk(folder: str, free: int) -> Finding:
    """Judge the free bytes of a folder that takes compiled steps, tokens and optimizer states."""
    remedy = f"make room in {folder}, or name another folder with --cache and --state"
    return judge_amount("disk", f"{human.size(free)} free in {folder}", free, (LEAST_DISK, SOME_DISK), remedy)


def judge_memory(available: int) -> Finding:
    """Judge the available bytes of memory."""
    remedy = "end other programs, or train a model that fits (planetary plan gives the memory beside the step)"
    return judge_amount("memory", f"{human.size(available)} free", available, (LEAST_MEMORY, SOME_MEMORY), remedy)


def judge_open_files(limit: int) -> Finding:
    """Judge how many files a process may have open; -1: any number."""
    found = "any number of open files" if limit < 0 else f"{limit} open files a process"
    remedy = "raise the limit (ulimit -n 4096): every connection takes one"
    if 0 <= limit < LEAST_FILES:
        return bad("open files", found, remedy, ResourceError)
    if 0 <= limit < SOME_FILES:
        return warning("open files", found, remedy)
    return good("open files", found)


def judge_own_clock(now: float, newest_file: float, shown: str) -> Finding:
    """Judge a clock without another one: `now` must not lie before this package was installed (Unix seconds)."""
    if now < newest_file - CLOCK_WRONG_S:
        days = human.duration(newest_file - now)
        return bad(
            "clock", f"{shown}, which is {days} before planetary was installed", _SET_CLOCK.format(""), TrustError
        )
    return good("clock", shown)


_SET_CLOCK = "set the clock{} by a time server (timedatectl set-ntp true)"


def judge_packages(versions: Mapping[str, str]) -> list[Finding]:
    """Judge installed versions by package; "" for one that is not installed."""
    runtime, compiler = versions["iree-base-runtime"], versions["iree-base-compiler"]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not runtime:
        remedy = "pip install iree-base-runtime, or take a backend of PJRT (--backend pjrt:cpu)"
        return [bad("packages", f"{shown}; iree-base-runtime is not installed", remedy, UserError)]
    if compiler and compiler != runtime:
        return [
            bad(
                "packages",
                f"{shown}: modules do not load across versions of IREE",
                f"pip install iree-base-compiler=={runtime} iree-base-runtime=={runtime}",
                TrustError,
            )
        ]
    return [good("packages", shown)]


def judge_device(backend: str, devices: Sequence[str], error: str) -> Finding:
    """Judge the devices the driver of a backend lists; `error`: why it could not be asked."""
    check = f"backend {backend}"
    remedy = f"install the driver of {backend}, or take another --backend"
    if error:
        return bad(check, error, remedy, ResourceError)
    if not devices:
        return bad(check, "its driver lists no device", remedy, ResourceError)
    return good(check, ", ".join(devices))


def judge_port(port: int, error: str) -> Finding:
    """Judge whether this user can listen on a port; `error`: why not, with the holder."""
    check = f"port {port}" if port else "ports"
    if not error:
        return good(check, "free for a gateway" if port else "this user can listen")
    if port:
        return warning(check, error, "only a gateway needs it; start that with --port and --gateway-port of your own")
    return bad(check, error, "let this user open sockets", ResourceError)


# --- the gateway ------------------------------------------------------------------------------------------------


def judge_failure(error: PlanetaryError) -> Finding:
    """Turn a connection that failed into a finding."""
    text = " ".join(str(error).split())
    match error:
        case RemoteProtocolError():
            remedy = "install the version of planetary that the gateway has; or the port is another program's"
            return bad("protocol", text, remedy, TrustError)
        case TrustError():
            remedy = "make an invite on the gateway's machine (planetary invite) and pass it whole with --token-file"
            return bad("trust", text, remedy, TrustError)
        case UserError():
            return bad("arguments", text, "give the address and the flags that `planetary worker` takes", UserError)
        case _:
            remedy = "start the gateway, check host and port, and let this machine's firewall pass it"
            return bad("gateway", text, remedy, PeerError)


def judge_refusal(code: str, reason: str) -> Finding:
    """Judge why the gateway refused this machine; `code` as of `net.session.Refused`."""
    if code == "protocol":
        return bad("protocol", reason, "install the same version of planetary on both sides", TrustError)
    if code == "busy":
        return bad("gateway", reason, "try again in a minute", PeerError)
    remedy = "make an invite on the gateway's machine (planetary invite) and pass it whole with --token-file"
    return bad("trust", reason, remedy, TrustError)


def judge_clock(offset_s: float, rtt_s: float) -> Finding:
    """Judge the gateway's clock minus this machine's, known to half a round trip."""
    off = abs(offset_s) - rtt_s / 2
    side = "ahead of" if offset_s > 0 else "behind"
    found = f"the gateway's is {human.brief(abs(offset_s))} {side} this machine's"
    remedy = _SET_CLOCK.format(" of both machines")
    if off > CLOCK_WRONG_S:
        return bad("clocks", f"{found}: invites and certificates are valid by the clock", remedy, TrustError)
    if off > CLOCK_OFF_S:
        return warning("clocks", found, remedy)
    return good("clocks", f"agree within {human.brief(abs(offset_s) + rtt_s / 2)}")


def judge_versions(own: str, gateways: str, runtime: str, compiler: str, backends: Sequence[str]) -> list[Finding]:
    """Judge this machine's version of planetary and of IREE's runtime against the gateway's and the compiler's."""
    found = []
    if own != gateways:
        remedy = f"install planetary {gateways} here"
        found.append(warning("version", f"planetary {own} here, {gateways} at the gateway", remedy))
    else:
        found.append(good("version", f"planetary {own} on both sides"))
    loads = [backend for backend in backends if not backend.startswith("pjrt:")]
    if not loads or not runtime or not compiler:
        return found
    if runtime != compiler:
        found.append(
            bad(
                "iree",
                f"iree-base-runtime {runtime} here, the gateway compiles with {compiler}: modules do not load across "
                "versions",
                f"pip install iree-base-runtime=={compiler}, or take a backend of PJRT",
                TrustError,
            )
        )
    else:
        found.append(good("iree", f"{runtime} on both sides"))
    return found


def judge_link(rtt_s: float, up: float, down: float) -> list[Finding]:
    """Judge the link to the gateway: round trip in seconds, bytes/s each way."""
    trip = f"{human.brief(rtt_s)} to the gateway and back"
    far = rtt_s > LONG_WAY_S
    found = [
        warning("round trip", trip, "nothing, if it is that far; train more inner steps a round")
        if far
        else good("round trip", trip)
    ]
    for check, rate in (("upload", up), ("download", down)):
        shown = human.rate(rate)
        if rate < SLOW_LINK:
            remedy = "take a preset that sends less (planetary plan --measured FILE names it)"
            found.append(warning(check, shown, remedy))
        else:
            found.append(good(check, shown))
    return found


def judge_reach(address: str, own: str, error: str) -> Finding:
    """Judge whether the gateway reached a port of this machine.

    Workers of the star need no inbound connection; those of a ring connect to each other.

    Args:
        address: of this machine as the gateway sees it.
        own: as this machine does.
        error: why the gateway did not reach it, "" where it did.
    """
    if not error:
        return good("inbound", f"the gateway reaches this machine at {address}")
    translated = address != own
    found = f"the gateway does not reach this machine at {address}: {error}"
    if translated:
        found += f"; its own address is {own}, so a router translates addresses between"
    remedy = (
        "none for the star; for the ring, let the firewall or router pass connections to this machine, or use the star"
    )
    return warning("inbound", found, remedy)


def judge_ring(peers: int, rate: float, rtt_s: float, shorter: float) -> list[Finding]:
    """Judge a ring of peers: bytes/s of the slowest link, a stage's round trip, and the gain of the best order."""
    found = f"{peers} reduce at {human.rate(rate)} on the slowest link, {human.brief(rtt_s)} a stage"
    order = f"; another order is expected to be {shorter:.1f} times as fast" if shorter > 1.05 else ""
    if rate < SLOW_LINK:
        return [warning("peers", found + order, 'use the star (sync.topology = "star") with a preset that sends less')]
    return [good("peers", found + order)]
