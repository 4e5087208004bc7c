"""`planetary.serve` around an orchestration that starts no process, with an endpoint on loopback."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

import planetary
from planetary.cli.commands import serve as serve_command
from planetary.cli.main import build_parser
from planetary.core.configuration.schema import Config
from planetary.core.errors import ClosedError, CompileError, TrustError, UserError
from planetary.run import serve as module
from planetary.run.processes.announcement import Announcement
from planetary.run.processes.local_run import LocalRunOptions, Outcome, RunObserver
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.status import ServingStatus


class Endpoint(BaseHTTPRequestHandler):
    """Answers with the status of a served model, and echoes requests."""

    asked: list[tuple[str, str, Any]]

    def do_GET(self) -> None:
        url = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        serving = ServingStatus(run="x", state="serving", endpoint=url, model="noise", version=1)
        self._answer(200, msgspec.json.encode(serving))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers.get("authorization", ""), body))
        if body.get("temperature") == -1:
            error = {"error": {"message": "temperature: expected 0 to 100, found -1", "code": "invalid_value"}}
            return self._answer(400, json.dumps(error).encode())
        text = {"text": "and so on"} if self.path == "/v1/completions" else {"message": {"content": "Hello"}}
        return self._answer(200, json.dumps({"choices": [text]}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None: ...


class FakeRun:
    """A gateway that is ready at once, unless it is to fail or to prepare for ever."""

    made: list[FakeRun]
    port = 0
    failure: BaseException | None = None
    prepares = False

    def __init__(self, config: Config, options: LocalRunOptions, observer: RunObserver) -> None:
        self.config, self.options, self.observer = config, options, observer
        self.stopped = asyncio.Event()
        self.made.append(self)

    async def run(self) -> Outcome:
        self.options.folder.mkdir(parents=True)
        if self.failure is not None:
            raise self.failure
        if not self.prepares:
            self.observer.listening(Announcement("127.0.0.1", 1, f"http://127.0.0.1:{self.port}/", "", "x"))
            await self.observer.look()
        await self.stopped.wait()
        return "stopped"

    def stop(self) -> None:
        self.stopped.set()

    def kill(self) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeRun]]:
    Endpoint.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        kind = type("Fake", (FakeRun,), {"made": [], "port": server.server_address[1]})
        monkeypatch.setattr(module, "LocalRun", kind)
        yield kind
        for one in kind.made:
            assert one.stopped.is_set() or one.failure is not None
        server.shutdown()


def test_server_answers_until_its_block_ends(fake: type[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "noise").mkdir()
    with planetary.serve(tmp_path / "noise", weights="int8", overrides={"serve.batch": 2}, workers=3) as server:
        assert server.url == f"http://127.0.0.1:{fake.port}/v1"
        assert repr(server) == f"Server({server.url!r}): noise"
        assert server.complete("def ", 5, temperature=0.0, top_k=3) == "and so on"
        assert server.chat("Hi", seed=4, stop=["."]) == "Hello"
        assert server.status.state == "serving"
        folder = server.folder
        assert folder.is_dir()
    (made,) = fake.made
    serve = made.config.of(ServeConfig)
    assert (serve.model, serve.host, serve.port, serve.weights) == (str(tmp_path / "noise"), "127.0.0.1", 0, "int8")
    assert (serve.batch, made.config.fabric.workers, made.config.run.name) == (2, 3, "serve-noise")
    assert Endpoint.asked == [
        (
            "/v1/completions",
            "",
            {"model": "noise", "prompt": "def ", "max_tokens": 5, "temperature": 0.0, "top_k": 3},
        ),
        (
            "/v1/chat/completions",
            "",
            {"model": "noise", "messages": [{"role": "user", "content": "Hi"}], "seed": 4, "stop": ["."]},
        ),
    ]
    assert not folder.parent.exists()
    assert repr(server) == "Server: stopped"
    server.stop()
    for call in (lambda: server.url, lambda: server.complete("a"), server.wait):
        with pytest.raises(ClosedError, match=r"planetary\.serve starts another"):
            call()


def test_example_of_the_serving_page_runs(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (example,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "planetary.serve" in block)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "stdlib").mkdir(parents=True)
    exec(example, {})
    assert capsys.readouterr().out == f"and so on\nhttp://127.0.0.1:{fake.port}/v1\n"
    assert fake.made[0].config.of(ServeConfig).weights == "int8"


def test_exception_in_the_block_stops_the_server(fake: type[FakeRun], tmp_path: Path) -> None:
    def fail() -> None:
        with planetary.serve(tmp_path, run_dir=tmp_path / "served") as server:
            assert server.folder == tmp_path / "served"
            raise KeyError("of the test")

    with pytest.raises(KeyError, match="of the test"):
        fail()
    assert (tmp_path / "served").is_dir()


def test_serving_works_beside_a_running_event_loop(fake: type[FakeRun], tmp_path: Path) -> None:
    async def notebook() -> str:
        with planetary.serve(tmp_path) as server:
            return server.complete("a")

    assert asyncio.run(notebook()) == "and so on"


def test_error_of_the_gateway_is_raised_with_its_class(fake: type[FakeRun], tmp_path: Path) -> None:
    fake.failure = CompileError("it has no logits")
    with pytest.raises(CompileError, match="it has no logits"):
        planetary.serve(tmp_path)
    assert not fake.made[0].options.folder.parent.exists()


def test_wait_says_how_far_a_slow_start_is(fake: type[FakeRun], tmp_path: Path) -> None:
    fake.prepares = True
    server = planetary.serve(tmp_path, wait=False)
    assert repr(server) == "Server: starting"
    with pytest.raises(TimeoutError, match=r"not served after 0\.01 s: starting"):
        server.wait(0.01)
    with pytest.raises(ClosedError, match=r"not served yet: wait\(\)"):
        server.complete("a")
    server.stop()
    with pytest.raises(ClosedError, match="the server was stopped"):
        server.wait()


def test_interrupt_while_waiting_stops_the_server(
    fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, interrupts = concurrent.futures.wait, [KeyboardInterrupt()]

    def interrupted(*arguments: Any) -> Any:
        if interrupts:
            raise interrupts.pop()
        return waiting(*arguments)

    fake.prepares = True
    server = planetary.serve(tmp_path, wait=False)
    monkeypatch.setattr(concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.wait()
    assert server._background.outcome.result(0) == "stopped"


def test_key_of_the_file_is_shown_and_refusals_are_typed(fake: type[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("# whom\nada secret-of-ada\nbob other\n")
    with planetary.serve(tmp_path, overrides={"serve.keys": str(tmp_path / "keys.txt")}) as server:
        with pytest.raises(UserError, match="temperature: expected 0 to 100"):
            server.complete("a", temperature=-1)
        with pytest.raises(UserError, match=r"n: one text is returned here; ask http://127\.0\.0\.1"):
            server.complete("a", n=2)
    assert [key for _, key, _ in Endpoint.asked] == ["Bearer secret-of-ada"]


def test_wrong_arguments_are_errors_before_anything_starts(fake: type[FakeRun], tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("[train]\nrounds = 3\n")
    wrong: tuple[tuple[Any, dict[str, Any], str], ...] = (
        (tmp_path / "nothing", {}, "there is no .*nothing: expected a run folder"),
        (3, {}, r"expected a planetary\.Run or the path of a model, found 3"),
        (tmp_path, {"overrides": {"serve.port": 8000}}, r"serve\.port is in overrides, and an argument"),
        (tmp_path, {"overrides": {"serve.bach": 8}}, r"did you mean serve\.batch"),
        (tmp_path, {"weights": "int3"}, r"serve\.weights: expected"),
        (tmp_path, {"overrides": {"train.rounds": 8}}, r"train\.rounds"),
        (tmp_path / "train.toml", {}, r"has no serve\.model"),
        (tmp_path, {"models": {"b": tmp_path / "no"}}, "there is no .*no, the model 'b'"),
        (tmp_path, {"models": {"b": tmp_path}, "workers": 1}, "2 models need as many workers .* found 1"),
        (tmp_path, {"adapters": {"b": 3}}, r"a planetary\.Run or the path of an adapter, found 3"),
    )
    for model, options, said in wrong:
        with pytest.raises(UserError, match=said):
            planetary.serve(model, **options)  # type: ignore[arg-type]
    assert not fake.made


def test_command_names_models_and_adapters(tmp_path: Path) -> None:
    for name in ("a", "b", "c=d"):
        (tmp_path / name).mkdir()

    def config(*words: str) -> Config:
        return serve_command._config(build_parser("serve").parse_args(["serve", *words]))

    found = config(f"first={tmp_path / 'a'}", str(tmp_path / "b"), str(tmp_path / "c=d"), f"--adapter=x={tmp_path}")
    serve = found.of(ServeConfig)
    assert (serve.name, serve.model, found.fabric.workers) == ("first", str(tmp_path / "a"), 3)
    assert serve.models == {"b": str(tmp_path / "b"), "c=d": str(tmp_path / "c=d")}
    assert serve.adapters == {"x": str(tmp_path)}
    assert config(str(tmp_path / "a")).fabric.workers == 1
    with pytest.raises(UserError, match="two models 'b': give each a name of its own"):
        config(str(tmp_path / "a"), str(tmp_path / "b"), f"b={tmp_path / 'a'}")
    with pytest.raises(UserError, match="--adapter style: expected NAME=FOLDER"):
        config(str(tmp_path / "a"), "--adapter", "style")


def test_an_unknown_key_is_a_trust_error(fake: type[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Endpoint) -> None:
        self._answer(401, b'{"error": {"message": "a key is needed"}}')

    monkeypatch.setattr(Endpoint, "do_POST", refuse)
    with planetary.serve(tmp_path) as server, pytest.raises(TrustError, match="a key is needed"):
        server.complete("a")
