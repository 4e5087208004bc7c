"""A separate process for the code and the files of a job: model, data, tokenizer.

A site has the runs of many jobs in one process, and code of users may end the process it runs in, never return, or take
all memory. So a process prepares each job before the site does: it leaves everything in the cache, where the site finds
it without running the job's code. The process's death is a failure of that job alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from planetary.core import decoding, errors
from planetary.core.configuration.ranges import NotNegative, Positive
from planetary.core.configuration.schema import Config, config_from_json
from planetary.core.errors import CompileError, PlanetaryError, UserError
from planetary.core.exit_status import describe_exit
from planetary.fleet.gateway.gateway import GatewayOptions
from planetary.fleet.shell.child import Child, end_group, end_with_parent
from planetary.runtime.host import available_memory

LOOK_S = 0.1
MEMORY_SHARE = 0.8
"""Share of the free memory a preparation may take unless the configuration says how much."""
SHAPES_DEADLINE_S = 120.0
LAST_LINES = 6
_OUTPUT, _ANSWER, _STAGE, _REQUEST = "output.txt", "answer.json", "stage.txt", "request.json"
GB = 10**9


class PreparationLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`preparation`: limits of the process that runs the code of a submitted job."""

    deadline_s: Positive = 4 * 3600.0  # limit of the preparation of data, model and training step
    memory_gb: NotNegative = 0.0  # memory in 1e9 bytes; 0: four fifths of the free memory at the start


class _Request(msgspec.Struct, frozen=True):
    """`folder`: of the job's run; "": only for the shapes of the compiled model."""

    config: msgspec.Raw
    memory: int
    folder: str = ""
    cache: str = ""
    resume: bool = False


class _Answer(msgspec.Struct, frozen=True):
    """`error`: name of a class of `core.errors`; "": it succeeded."""

    config: msgspec.Raw
    error: str = ""
    text: str = ""


async def shapes_apart(config: Config, limits: PreparationLimits) -> Config:
    """Return a configuration with the batch of the compiled model; see `with_model_shapes`, whose errors it raises."""
    request = _Request(msgspec.Raw(msgspec.json.encode(config)), _memory(limits))
    return await _answer(request, min(limits.deadline_s, SHAPES_DEADLINE_S), None, lambda _: None)


async def prepare_apart(
    config: Config, options: GatewayOptions, limits: PreparationLimits, stage: Callable[[str], None]
) -> None:
    """Prepare a run in a separate process, whose products are in the cache when this returns.

    Args:
        config: of the run.
        options: of the gateway. Output of the process goes to `logs/preparation.log` of the run's folder.
        limits: of the process.
        stage: is called with the name of each activity.

    Raises:
        UserError: the process died, or took longer or more memory than it may; the text has the last lines. Otherwise
            the error of the preparation.
    """
    log = options.folder / "logs" / "preparation.log"
    log.unlink(missing_ok=True)
    request = _Request(
        msgspec.Raw(msgspec.json.encode(config)),
        _memory(limits),
        str(options.folder),
        str(options.cache),
        options.resume,
    )
    await _answer(request, limits.deadline_s, log, stage)


def _memory(limits: PreparationLimits) -> int:
    return int(limits.memory_gb * GB) or int(MEMORY_SHARE * (available_memory() or 0))


async def _answer(request: _Request, deadline_s: float, log: Path | None, stage: Callable[[str], None]) -> Config:
    with tempfile.TemporaryDirectory(prefix="planetary-model-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / _REQUEST).write_bytes(msgspec.json.encode(request))
        output = log or folder / _OUTPUT
        child = await Child.start([sys.executable, "-m", __name__, name], log=output)
        try:
            async with asyncio.timeout(deadline_s):
                code = await _wait(child, folder / _STAGE, stage)
        except TimeoutError:
            raise UserError(
                f"the model's code did not end within {deadline_s:.0f} s (preparation.deadline_s of the gateway); it "
                f"was at: {_read(folder / _STAGE) or 'its start'}{_last_lines(output)}"
            ) from None
        finally:
            child.kill_group()
            await child.wait()  # otherwise the event loop may end before the system has told of the process's end
        try:
            answer = decoding.from_json((folder / _ANSWER).read_bytes(), _Answer)
        except (FileNotFoundError, msgspec.MsgspecError):
            at = _read(folder / _STAGE)
            raise UserError(
                f"the process that runs the model's code ended ({describe_exit(code)}{f', while {at}' if at else ''}); "
                f"it may take {request.memory / GB:.1f} GB of memory{_last_lines(output)}"
            ) from None
    if answer.error:
        raise _error(answer.error, answer.text)
    return config_from_json(answer.config)


async def _wait(child: Child, path: Path, stage: Callable[[str], None]) -> int:
    waiting, shown = asyncio.ensure_future(child.wait()), ""
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=LOOK_S)
            if (found := _read(path)) not in ("", shown):
                shown = found
                stage(found)
        return waiting.result()
    finally:
        waiting.cancel()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:200]
    except OSError:
        return ""


def _last_lines(output: Path) -> str:
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:]
    except OSError:
        lines = []
    return "; its last lines: " + " | ".join(line.strip()[:200] for line in lines) if lines else "; it printed nothing"


def _error(name: str, text: str) -> PlanetaryError:
    kind = getattr(errors, name, UserError)
    return CompileError(text) if kind is errors.UnsupportedOpError else kind(text)


# --- in the process -------------------------------------------------------------------------------------------


def _limit(memory: int) -> None:
    """Bound this process, and have the system end it before any other where memory is short."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limited, most in ((resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # a lower limit is there already
            if most or limited == resource.RLIMIT_CORE:
                resource.setrlimit(limited, (most, most))


def _carry_out(config: Config, request: _Request, folder: Path) -> Config:
    if not request.folder:
        from planetary.runs.rounds.preparation.model_shapes import with_model_shapes

        return with_model_shapes(config)
    from planetary.run.kinds import kind_of

    options = GatewayOptions(
        folder=Path(request.folder),
        cache=Path(request.cache),
        host="127.0.0.1",
        port=0,
        resume=request.resume,
        on_loan=True,
    )

    def stage(text: str) -> None:
        (folder / "stage.new").write_text(text)
        (folder / "stage.new").rename(folder / _STAGE)

    kind_of(config).prepare(config, options, stage)
    return config


def _serve(folder: Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    request = decoding.from_json((folder / _REQUEST).read_bytes(), _Request)
    _limit(request.memory)
    try:
        made = _carry_out(config_from_json(request.config), request, folder)
        answer = _Answer(msgspec.Raw(msgspec.json.encode(made)))
    except PlanetaryError as error:
        answer = _Answer(request.config, type(error).__name__, str(error))
    except MemoryError:
        text = f"the model's code takes more than {request.memory / GB:.1f} GB of memory (preparation.memory_gb)"
        answer = _Answer(request.config, "ResourceError", text)
    except Exception as error:  # noqa: BLE001 - the site gets every reason
        traceback.print_exc()
        answer = _Answer(request.config, "UserError", f"the preparation failed: {type(error).__name__}: {error}")
    (folder / "answer.new").write_bytes(msgspec.json.encode(answer))
    (folder / "answer.new").rename(folder / _ANSWER)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the site ends it
    end_with_parent(end_group)
    _serve(Path(sys.argv[1]))
    os._exit(0)
