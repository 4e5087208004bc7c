"""One run in a site's process: gateway, sinks, and report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import PlanetaryError
from planetary.core.redaction import redacted
from planetary.core.user_code import barred
from planetary.data.prepared_data import PreparedData
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.parts import PreparedRun
from planetary.fleet.protocol.events import Finish
from planetary.fleet.protocol.records import MetricsLine
from planetary.fleet.protocol.status import RunStatus
from planetary.machine.journal import Record
from planetary.monitor.run_folder import collect_facts, write_facts
from planetary.monitor.sinks.sink_kinds import follow
from planetary.run.kinds import RunKind, kind_of
from planetary.site.book import Growth
from planetary.site.model_process import PreparationLimits, prepare_apart

log = logging.getLogger(__name__)


class Prepared(PreparedRun, Protocol):
    """A prepared run, with its data."""

    @property
    def data(self) -> PreparedData | None:
        """The prepared token files; None: nothing is trained."""
        ...


class Ended(Protocol):
    """Whether a run finished, and why it ended."""

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended; `reason` is also the text of an error."""

    ok: bool
    reason: str


async def outcome_of(run: Awaitable[Ended], name: str) -> RunOutcome:
    """Return how a run ended: whatever is wrong with it ends it and nothing else. `name`: for the log."""
    try:
        end = await run
    except PlanetaryError as error:
        return RunOutcome(False, redacted(str(error)))
    except Exception as error:
        log.exception("the run of %s failed", name)
        return RunOutcome(False, redacted(f"internal error: {type(error).__name__}: {error}"))
    return RunOutcome(end.ok, redacted(end.reason))


class HostedRun:
    """Make it, `open` it, `run` it.

    Attributes:
        gateway: decides and carries out.
        kind: of run.
        folder: of the run.
        growth: of the run's journal.
    """

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        security: Security,
        limits: PreparationLimits | None = None,
        gateway: Gateway[Any] | None = None,
    ) -> None:
        """Nothing is opened before `open`.

        `limits`: of the process that runs the job's code; None: it is the operator's own and runs in this one.
        `gateway`: of the run, if it is made.
        """
        self.kind: RunKind = kind_of(config)
        self.folder = options.folder
        self.gateway: Gateway[Any] = gateway or self.kind.gateway(config, options, security)
        self._sinks_of, self._again = config, options.again
        self._barred = limits is not None and not self.kind.loads_code
        if limits is not None and self.kind.has_code(config):
            own = self.gateway
            own.prepare_first = lambda: prepare_apart(own.config, options, limits, own.set_stage)
        self.growth = Growth()

    async def open(self) -> None:
        """Take the run folder. Raises as `Gateway.open`."""
        await self.gateway.open()

    async def run(self) -> Finish:
        """Run to the end, write the report, and return how it ended.

        Raises:
            PlanetaryError: the run failed before it could begin, or results cannot be written.
        """
        loop, gateway = asyncio.get_running_loop(), self.gateway

        def report(text: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(gateway.warn, text)

        config = self._sinks_of
        sinks = follow(config.sinks, config.run.name, self.folder, lambda: gateway.config, report)
        gateway.followers += [sinks, self]
        ok = False
        try:
            with (
                barred("a site has the runs of many jobs in one process") if self._barred else contextlib.nullcontext()
            ):
                end = await self.kind.results_after(gateway.run(self._write_facts), self.folder, self._again)
            ok = end.ok
            return end
        finally:
            await asyncio.to_thread(sinks.close, ok)  # last: a process that has to end soon is killed meanwhile
            self.growth.wake()

    def status(self) -> RunStatus:
        """Return the run as it is now."""
        return self.gateway.status()

    # --- a separate follower gateway --------------------------------------------------------------------------

    def write_metrics(self, line: MetricsLine) -> None: ...

    def write_event(self, record: Record) -> None:
        """The journal has grown."""
        self.growth.wake()

    def _write_facts(self, prepared: Prepared) -> None:
        from planetary.data.bigram import bigram_baseline
        from planetary.data.tokenizer import CharTokenizer
        from planetary.run.model.pretrained_files import keep_files

        gateway, data = self.gateway, prepared.data
        config = gateway.config
        keep_files(config, self.folder)
        if data is None:
            return
        if isinstance(data.tokenizer, CharTokenizer):
            data.tokenizer.save(self.folder)
        bigram = None if data.layout else bigram_baseline(data, data.eval_chunks(config)).loss
        gateway.facts["bigram_loss"] = bigram
        facts = collect_facts(
            run=config.run.name,
            params=prepared.param_count,
            inner_steps=config.train.inner_steps,
            config_hash=config_hash(config),
            seed=config.run.seed,
            bigram_loss=bigram,
        )
        write_facts(self.folder, facts)
