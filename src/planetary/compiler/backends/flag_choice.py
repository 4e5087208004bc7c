"""Which further flags of IREE's compiler a training step is compiled with: the candidates, the choice among them by
measured times, and where a choice is kept.

No flag is best everywhere: it depends on the graph's shapes and on the machine. `planetary tune` measures the
candidates on the machine that will train, and `compile_artifact` uses the choice for this step and this target.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence

import msgspec

from planetary.compiler import ir
from planetary.compiler.backends.artifact_manifest import ArtifactCache
from planetary.compiler.backends.pipeline import LATEST_CHOICE
from planetary.core import decoding
from planetary.core.errors import TrustError, UserError

MIN_GAIN = 0.03
"""A candidate replaces the default flags only if it is faster by this share; less may be noise."""


class FlagSet(msgspec.Struct, frozen=True):
    """Flags of `iree-compile` beyond those the target needs."""

    name: str
    flags: tuple[str, ...]


DEFAULT = FlagSet("default", ())

_DATA_TILING = (
    "--iree-dispatch-creation-data-tiling",
    "--iree-llvmcpu-stack-allocation-limit=1048576",
    "--iree-llvmcpu-fail-on-large-vector=false",
)

# No optimisation levels (`--iree-opt-level`): O2 and O3 change the sign of converted booleans that feed a product.
CANDIDATES: dict[str, tuple[FlagSet, ...]] = {
    "cpu": (
        DEFAULT,
        FlagSet("data-tiling", _DATA_TILING),
        FlagSet("micro-kernels", (*_DATA_TILING, "--iree-llvmcpu-enable-ukernels=all")),
        FlagSet("aggressive-fusion", ("--iree-dispatch-creation-enable-aggressive-fusion",)),
        FlagSet("distribution-256", ("--iree-llvmcpu-distribution-size=256",)),
    ),
}
"""Flag sets worth measuring, by backend. Each was faster than the default on some machine or shape."""


class FlagTrial(msgspec.Struct, frozen=True):
    """The measurement of one candidate.

    Attributes:
        flags: the candidate.
        least_ms: fastest step in milliseconds, the least disturbed by other programs. 0 after a failure.
        failure: why there is no time: it did not compile, crashed, or computed something else; "" otherwise.
    """

    flags: FlagSet
    least_ms: float = 0.0
    failure: str = ""


class FlagChoice(msgspec.Struct, frozen=True):
    """The flags a step is compiled with for one target, and why."""

    flags: FlagSet
    why: str
    trials: tuple[FlagTrial, ...]


def candidates_for(backend: str) -> tuple[FlagSet, ...]:
    """Return the candidates for `backend`, the default first, or raise `UserError` where there is nothing."""
    found = CANDIDATES.get(backend)
    if found is None:
        raise UserError(
            f"there are no flags to try for backend {backend!r}; known candidates: {', '.join(CANDIDATES)}. "
            "XLA's backends tune themselves where they run"
        )
    return found


def finalists(trials: Sequence[FlagTrial]) -> list[FlagSet]:
    """Return the candidates that are worth a second look: the default and the fastest other one, if they work."""
    works = [trial for trial in trials if not trial.failure]
    others = [trial for trial in works if trial.flags.name != DEFAULT.name]
    best = [min(others, key=lambda trial: trial.least_ms)] if others else []
    return [trial.flags for trial in works if trial.flags.name == DEFAULT.name or trial in best]


def choose_flags(trials: Sequence[FlagTrial]) -> FlagChoice:
    """Return the fastest candidate that works, or the default if none is faster by `MIN_GAIN`.

    Raises:
        UserError: the default is not among the trials.
    """
    default = next((trial for trial in trials if trial.flags.name == DEFAULT.name), None)
    if default is None:
        raise UserError("a choice of flags needs a trial of the default ones to compare with; found none")
    works = [trial for trial in trials if not trial.failure]
    if not works:
        return FlagChoice(default.flags, "no candidate works; the default's failure will be reported", tuple(trials))
    best = min(works, key=lambda trial: trial.least_ms)
    if default.failure:
        why = f"the default flags fail ({default.failure}); this is the fastest that works"
        return FlagChoice(best.flags, why, tuple(trials))
    gain = 1 - best.least_ms / default.least_ms
    if best is default:
        return FlagChoice(default.flags, "no candidate is faster than the default", tuple(trials))
    if gain < MIN_GAIN:
        why = f"{best.flags.name} is only {gain:.1%} faster than the default; below {MIN_GAIN:.0%} it may be noise"
        return FlagChoice(default.flags, why, tuple(trials))
    return FlagChoice(best.flags, f"{best.flags.name} is {gain:.1%} faster than the default", tuple(trials))


def keep_choice(cache: ArtifactCache, key: str, choice: FlagChoice) -> None:
    """Remember a choice under `flag_key(...)`."""
    digest = cache.put(msgspec.json.encode(choice))
    cache.link(key, digest)
    cache.link(LATEST_CHOICE, digest)


def read_choice(cache: ArtifactCache, key: str) -> FlagChoice | None:
    """Return the choice kept under `key`; None if there is none, or only a damaged one (`tune` makes it anew)."""
    digest = cache.resolve(key)
    if digest is None:
        return None
    with contextlib.suppress(TrustError, msgspec.DecodeError):
        return decoding.from_json(cache.get(digest), FlagChoice)
    return None


def flag_key(portable: bytes, *, compiler: str, backend: str, target: str, features: str) -> str:
    """Return the key of a choice: the step's structure, the compiler's version and the target with the CPU."""
    parts = {
        "structure": structure_digest(portable),
        "iree": compiler,
        "backend": backend,
        "target": target,
        "features": features,
    }
    return "flags " + json.dumps(parts, sort_keys=True)


def structure_digest(portable: bytes) -> str:
    """Return the sha256 of a module's operations and their types, constants left out.

    Two steps that differ in a constant of the optimizer alone take the same time, so they share a choice of flags.
    (Not even the number of constants counts: equal ones are one operation.)
    """
    seen = hashlib.sha256()
    with ir.new_context():
        module = ir.parse_module(portable)

        def visit(op: ir.Operation) -> None:
            if op.operation.name == "stablehlo.constant":
                return
            types = " ".join(str(result.type) for result in op.operation.results)
            seen.update(f"{op.operation.name} {types}\n".encode())

        ir.walk(module, visit)
    return seen.hexdigest()
