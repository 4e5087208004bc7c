"""`planetary.serve`: a trained model behind an endpoint on this machine, from Python."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.ranges import show_found
from planetary.core.configuration.schema import Config
from planetary.core.configuration.toml import toml_value
from planetary.core.errors import ClosedError, PeerError, UserError
from planetary.core.places import cache_folder
from planetary.core.printable import command_line
from planetary.fleet.protocol.status import RunStatus
from planetary.run.choice import settings
from planetary.run.handle import EXIT_LIMIT_S, BackgroundRun, Run
from planetary.run.kinds import kind_of
from planetary.run.processes.announcement import Announcement
from planetary.run.processes.local_run import LocalRun, LocalRunOptions, Outcome
from planetary.run.status_source import status_source
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http.keys import KeyFile
from planetary.runs.serve.status import ServingStatus
from planetary.web.gateway_client import GatewayClient

USUAL_LIMIT_S = 600.0  # time limit of an answer: it may wait for others, and for a worker that starts again
_OF_MANY = ("n", "best_of", "stream", "stream_options", "logprobs", "top_logprobs")
"""Fields of a request whose effect is not in one text."""


def served_config(model: Path, given: Sequence[str]) -> Config:
    """Return the configuration with which a model is served.

    Args:
        model: run folder, checkpoint folder, a model's folder or file, or a configuration with a section [serve].
        given: settings, `section.key=value`.

    Raises:
        UserError: there is no such model, or a setting is wrong.
    """
    if not model.exists():
        raise UserError(f"serve: there is no {model}: expected a run folder, a checkpoint or a model's folder")
    if model.suffix not in (".toml", ".json") or not model.is_file():
        tables = {"serve": {"model": str(model.resolve())}, "run": {"name": f"serve-{model.resolve().name}"}}
        config = config_from_tables(tables, given)
    else:
        config = load_config(model, given)
    if not config.of(ServeConfig).model:
        command = kind_of(config).command
        raise UserError(f"serve: {model} has no serve.model: it is a configuration for: {command_line(command, model)}")
    beside = config.of(ServeConfig).models
    for name, path in beside.items():
        if not Path(path).exists():
            raise UserError(f"serve: there is no {path}, the model {name!r}: expected a model's folder or file")
    if config.fabric.workers <= len(beside):
        raise UserError(
            f"serve: {1 + len(beside)} models need as many workers (--workers, fabric.workers), because a worker has "
            f"one of them; found {config.fabric.workers}"
        )
    return config


class _Readiness:
    """Follows a gateway until a worker computes; a `planetary.run.processes.local_run.RunObserver`."""

    def __init__(self) -> None:
        self.ready: concurrent.futures.Future[ServingStatus] = concurrent.futures.Future()
        self.status = ServingStatus(run="", state="preparing", stage="starting")
        self._read: Callable[[], RunStatus] | None = None

    def listening(self, announcement: Announcement) -> None:
        self._read = status_source(announcement.dashboard)

    def lost(self, reason: str) -> None:
        self.status = msgspec.structs.replace(self.status, state="waiting", stage=reason)

    async def look(self) -> None:
        import asyncio

        if self._read is None:
            return
        with contextlib.suppress(PeerError):  # a busy gateway may answer late; the next look shows more
            status = await asyncio.to_thread(self._read)
            if isinstance(status, ServingStatus):
                self.status = status
        if self.status.state == "serving" and not self.ready.done():
            self.ready.set_result(self.status)

    async def ended(self) -> None: ...


class _InTemporaryFolder:
    """A local run whose folder goes with it."""

    def __init__(self, run: LocalRun, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._run, self._folder = run, folder
        self.stop, self.kill = run.stop, run.kill

    async def run(self) -> Outcome:
        with self._folder:
            return await self._run.run()


class Server:
    """A served model: a gateway with an HTTP endpoint, and workers, on this machine. `planetary.serve` returns one.

    It ends with `stop`, at the end of a `with` block, and with this program. A worker may be killed at any time.

    Attributes:
        folder: of the journal and the logs.
    """

    def __init__(self, config: Config, options: LocalRunOptions, scratch: tempfile.TemporaryDirectory[str] | None):
        """Made by `planetary.serve`."""
        self.folder = options.folder
        keys = config.of(ServeConfig).keys
        self._key = KeyFile(Path(keys)).first if keys else ""
        self._readiness = _Readiness()
        run = LocalRun(config, options, self._readiness)
        self._background = BackgroundRun(run if scratch is None else _InTemporaryFolder(run, scratch))

    def __repr__(self) -> str:
        if not self._background.outcome.done():
            ready = self._readiness.ready.done()
            return f"Server({self.url!r}): {self.model}" if ready else f"Server: {self._readiness.status.stage}"
        return "Server: stopped"

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Address of the interface, as `base_url` of OpenAI's client takes it: http://127.0.0.1:8000/v1."""
        return f"{self._serving().endpoint}/v1"

    @property
    def model(self) -> str:
        """Name of the model in requests."""
        return self._serving().model

    @property
    def status(self) -> ServingStatus:
        """The gateway a moment ago: state, stage, workers, events, texts and the served round."""
        return self._readiness.status

    def wait(self, timeout: float | None = None) -> Server:
        """Wait until a worker computes, so that requests are answered, and return the server.

        Ctrl+C stops the server in order before it is raised.

        Raises:
            PlanetaryError: the model cannot be served; the class is that of the cause.
            ClosedError: it was stopped.
            TimeoutError: it is not ready after `timeout` seconds, and goes on.
        """
        ready, outcome = self._readiness.ready, self._background.outcome
        try:
            ends: list[concurrent.futures.Future[Any]] = [ready, outcome]
            concurrent.futures.wait(ends, timeout, concurrent.futures.FIRST_COMPLETED)
        except KeyboardInterrupt:
            self.stop()
            raise
        self._check_open()
        if not ready.done():
            stage = self._readiness.status.stage
            raise TimeoutError(f"the model is not served after {timeout} s: {stage}; wait() goes on waiting")
        return self

    def stop(self) -> None:
        """Stop gateway and workers in order; texts under way are lost. Returns at once where they have ended."""
        if not self._background.outcome.done():
            self._background.end(EXIT_LIMIT_S)

    def complete(
        self,
        prompt: str,
        max_tokens: int = 16,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        timeout: float = USUAL_LIMIT_S,
        **options: Any,
    ) -> str:
        """Return the text that continues `prompt`, without the prompt.

        Args:
            prompt: text.
            max_tokens: the most to draw.
            temperature: divides the logits; 0 always takes the likeliest token. By default 1.
            seed: of the draws; equal requests with a seed have equal texts. By default a random one.
            stop: strings that end the text.
            timeout: seconds until the request is given up.
            options: other fields of a completion: top_p, top_k, min_p, logit_bias, response_format (docs/serving.md).
                For several texts, streams and log-probabilities use OpenAI's client, with `url`.

        Raises:
            UserError: the server refuses a value, by name.
            PeerError: it gave no answer in time, or its queue is full.
            ClosedError: the server was stopped.
        """
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop}
        return self._ask("/completions", {**body, **options}, timeout)["text"]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        *,
        temperature: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        timeout: float = USUAL_LIMIT_S,
        **options: Any,
    ) -> str:
        """Return the assistant's next message in a chat.

        It needs a chat template: the model's, or `serve.chat_template`.

        Args:
            messages: `[{"role": "user", "content": "Hello"}]`; a text is one message of the user.
            max_tokens: the most to draw; by default as many as the context has room for.
            temperature: as of `complete`, like the arguments below.
            seed: of the draws.
            stop: strings that end the message.
            timeout: seconds until the request is given up.
            options: other fields of a chat completion, such as `chat_template_kwargs`.

        Raises:
            UserError: the server refuses a value, or the model has no chat template.
            PeerError: it gave no answer in time, or its queue is full.
            ClosedError: the server was stopped.
        """
        told = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(one) for one in messages]
        body = {"messages": told, "max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop}
        return self._ask("/chat/completions", {**body, **options}, timeout)["message"]["content"] or ""

    def _ask(self, path: str, body: Mapping[str, Any], timeout: float) -> Any:
        if useless := [name for name in _OF_MANY if name in body]:
            raise UserError(
                f"{useless[0]}: one text is returned here; ask {self.url} with OpenAI's client for several texts, "
                "streams and log-probabilities"
            )
        client = GatewayClient(self.url, self._key, timeout_s=timeout)
        given = {name: value for name, value in body.items() if value is not None}
        try:
            return client.post(path, {"model": self.model, **given})["choices"][0]
        except PeerError:
            self._check_open()  # the reason why it is gone, where it is
            raise

    def _serving(self) -> ServingStatus:
        self._check_open()
        if not self._readiness.ready.done():
            raise ClosedError("the model is not served yet: wait() returns when it is")
        return self._readiness.ready.result()

    def _check_open(self) -> None:
        """Raise what ended the server."""
        if self._background.outcome.done():
            self._background.outcome.result()
            raise ClosedError("the server was stopped: planetary.serve starts another")


def serve(
    model: str | os.PathLike[str] | Run,
    *,
    host: str | None = None,
    port: int = 0,
    name: str | None = None,
    weights: str | None = None,
    context: int | None = None,
    follow: bool = False,
    models: Mapping[str, str | os.PathLike[str] | Run] | None = None,
    adapters: Mapping[str, str | os.PathLike[str] | Run] | None = None,
    workers: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    wait: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> Server:
    """Serve a trained model with an endpoint that speaks OpenAI's interface, as `planetary serve` does.

    Works on any thread and beside a running event loop, so in a notebook too. The processes end with the `with` block,
    `stop`, or this program, however that ends.

    Args:
        model: a run or run folder (its newest checkpoint), a checkpoint's folder, a folder with a pretrained
            model or of `planetary export --serving`, a StableHLO model, or a configuration with a section
            [serve].
        host: address of the endpoint, in place of `serve.host`: by default 127.0.0.1, this machine alone. Others need
            `overrides={"serve.keys": FILE}`.
        port: of the endpoint; 0: any free one.
        name: of the model in requests; by default the folder's.
        weights: form of the parameters: "f32", "bf16", "int8" or "int4".
        context: the longest text in tokens, prompt included.
        follow: serve every newer checkpoint of the run as soon as it exists.
        models: further models at the same endpoint by the name that requests choose them with, each with workers of
            its own.
        adapters: changes of the model by the name that requests choose them with: folders of `peft`, and runs that
            trained one. They share the model's parameters.
        workers: processes that compute; by default one for each model.
        overrides: other keys, such as `{"serve.batch": 4, "serve.cache_mb": 512}`.
        run_dir: folder of journal and logs; by default a temporary one, which goes with the server.
        wait: return when requests are answered; the first time some functions of the model are compiled before that.
            False: return at once; see `Server.wait`.
        cache: of compiled functions; by default `$PLANETARY_CACHE`, else `~/.cache/planetary`.

    Raises:
        UserError: there is no such model, or an argument is wrong.
        PlanetaryError: the model cannot be served; the class is that of the cause.

    Example:
        >>> with planetary.serve("runs/tiny") as server:
        ...     text = server.complete("def ", max_tokens=5, temperature=0, seed=1)
        ...     print(server.model, server.url.startswith("http://127.0.0.1:"))
        tiny True
        >>> text == planetary.Run.open("runs/tiny").generate("def ", max_tokens=5, temperature=0, seed=1)
        True
    """
    own = {"host": host, "port": port, "name": name, "weights": weights, "context": context, "follow": follow or None}
    own["models"] = {key: _folder("a model", one) for key, one in (models or {}).items()} or None
    own["adapters"] = {key: _folder("an adapter", one) for key, one in (adapters or {}).items()} or None
    given = {f"serve.{key}": value for key, value in own.items() if value is not None}
    if twice := [key for key in given if key in (overrides or {})]:
        raise UserError(f"serve: {twice[0]} is in overrides, and an argument: leave one of them out")
    needed = 1 + len(models or {})
    config = served_config(
        Path(_folder("a model", model)),
        [
            *settings(overrides, workers=needed if workers is None else workers),
            *(f"{key}={toml_value(value)}" for key, value in given.items()),
        ],
    )
    kind_of(config).check(config)
    scratch = tempfile.TemporaryDirectory(prefix="planetary-serve-") if run_dir is None else None
    folder = (
        Path(run_dir).absolute() if run_dir is not None else Path(scratch.name if scratch else "") / config.run.name
    )
    server = Server(config, LocalRunOptions(folder=folder, cache=cache_folder(cache), keeps_gateway=True), scratch)
    return server.wait() if wait else server


def _folder(of: str, value: object) -> str:
    path = value.folder if isinstance(value, Run) else value
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"serve: expected a planetary.Run or the path of {of}, found {show_found(path)}")
    return os.fspath(Path(path).absolute())
