"""`planetary serve` as real processes: its workers are killed in the middle of streams, and no client sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
import pytest
from serving_run import write_run

from planetary.artifacts.adapter_folder import write_adapter
from planetary.cli.main import main
from planetary.runs.serve.scheduling.sampling import choice_seed
from waiting import HANG_S, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.compiles]


class Server:
    """A running `planetary serve`."""

    def __init__(self, run: Path, place: Path, *flags: str, beside: str = "") -> None:
        self.run = run
        self._log = (place / "serve.log").open("w+")
        models = [str(run), *([beside] if beside else [])]
        command = [sys.executable, "-m", "planetary", "serve", *models, "--port=0", f"--run-dir={place / 'served'}"]
        self.process = subprocess.Popen(
            [*command, f"--cache={place / 'cache'}", "--backend=cpu", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.url = self._url()

    def _url(self) -> str:
        def announced() -> list[str]:
            return [line.split()[2] for line in self.lines() if line.startswith("serving at ")]

        said = Path(self._log.name).read_text
        return wait_until(announced, "the server's address", said=said, process=self.process)[0]

    def lines(self) -> list[str]:
        return Path(self._log.name).read_text().splitlines()

    def workers(self) -> list[int]:
        """Return the processes of workers."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = []
        for child in children:
            try:
                if "worker" in child.cmdline()[1:5]:
                    found.append(child.pid)
            except psutil.Error:
                continue
        return found

    def gateway(self) -> int:
        """Return the gateway's process; 0: there is none now."""
        for child in psutil.Process(self.process.pid).children():
            if "gateway" in " ".join(child.cmdline()[1:5]):
                return child.pid
        return 0

    def close(self) -> int:
        """Stop as Ctrl+C does; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(HANG_S)
        finally:
            self._log.close()
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("serving")
    write_run(place / "noise", 1, seed=1)
    found = Server(place / "noise", place, "--workers=2", "--follow")
    yield found
    assert found.close() == 0


def test_killed_workers_are_not_seen_in_streams(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S)
    killed = 0
    for seed in range(4):
        asked = {
            "model": "noise", "prompt": "To be continued", "max_tokens": 200, "seed": seed, "logprobs": 1,
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        whole = client.completions.create(**asked).choices[0]
        text, tokens, pieces = "", [], 0
        for one in client.completions.create(**asked, stream=True):
            choice = one.choices[0]
            text, pieces = text + choice.text, pieces + 1
            tokens += (choice.logprobs.tokens or []) if choice.logprobs is not None else []
            if pieces in (10, 60) and (workers := server.workers()):
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)
                    killed += 1
        assert text == whole.text
        assert whole.logprobs is not None
        assert tokens == whole.logprobs.tokens
        assert len(tokens) == 200
    assert killed >= 8
    assert any("lost" in line for line in server.lines())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generate_gives_the_served_text(server: Server, temperature: float, capsys: pytest.CaptureFixture[str]) -> None:
    """All choices of a request, with the seeds that the endpoint gives them; float32 on both sides."""
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S)
    prompt = "To be continued"
    found = client.completions.create(
        model="noise", prompt=prompt, max_tokens=60, seed=7, n=3, temperature=temperature
    ).choices
    command = ["generate", str(server.run), "--prompt", prompt, "--tokens", "60", "--temperature", str(temperature)]
    for choice in found:
        assert main([*command, "--seed", str(choice_seed(7, choice.index))]) == 0
        assert capsys.readouterr().out == f"{prompt}{choice.text}\n"
    assert len({choice.text for choice in found}) == (1 if temperature == 0 else 3)


def test_a_newer_checkpoint_is_served_without_a_failed_request(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S)
    asked = {"model": "noise", "prompt": "a", "max_tokens": 30, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    before = client.completions.create(**asked).choices[0].text
    assert httpx.get(f"{server.url}/models").json()["data"][0]["version"] == 1
    write_run(server.run, 2, seed=2)
    texts = [before]

    def is_new() -> bool:
        texts.append(client.completions.create(**asked).choices[0].text)
        return before != texts[-1] == texts[-2]  # one may begin with the old parameters and end with the new

    wait_until(is_new, "texts of the new version", said=lambda: "\n".join(server.lines()))
    assert httpx.get(f"{server.url}/models").json()["data"][0]["version"] == 2


def test_lost_or_hanging_gateway_answers_again_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed in the middle of a stream, and stopped: no client hangs, and later texts are equal.

    They are those of two models at one endpoint, and of an adapter of the first.
    """
    write_run(tmp_path / "noise", 1, seed=1)
    write_run(tmp_path / "hum", 1, seed=2)
    rng, layer = np.random.default_rng(0), "blocks.1.mlp.up"
    values = {f"{layer}.lora_A.weight": (4, 32), f"{layer}.lora_B.weight": (128, 4)}
    tensors = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in values.items()}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [layer]}
    (tmp_path / "style").mkdir()
    write_adapter(tmp_path / "style", config, {name: name for name in tensors}, tensors, {})
    adapter = f"style={tmp_path / 'style'}"
    server = Server(tmp_path / "noise", tmp_path, "--adapter", adapter, beside=f"other={tmp_path / 'hum'}")
    try:
        client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=20)

        def text(model: str) -> str:
            asked: Any = {"model": model, "prompt": "Again", "max_tokens": 20, "temperature": 0.0}
            return client.completions.create(**asked, extra_body={"ignore_eos": True}).choices[0].text

        def kill_in_stream(process: int) -> None:
            asked: Any = {"model": "style", "prompt": "a", "max_tokens": 230, "stream": True}
            for pieces, _ in enumerate(client.completions.create(**asked, extra_body={"ignore_eos": True})):
                if pieces == 3:
                    os.kill(process, signal.SIGKILL)

        answers: set[tuple[int, str]] = set()

        def texts() -> list[str]:
            try:
                return [text(name) for name in names]
            except openai.APIStatusError as error:
                answers.add((error.status_code, error.response.headers["retry-after"]))
            except openai.APIConnectionError:  # also a time-out
                pass
            return []

        def later() -> list[str]:
            """Return all texts, once they are answered."""
            return wait_until(texts, "three answers", said=lambda: "\n".join(server.lines()))

        names = ("noise", "style", "other")
        assert [one.id for one in client.models.list()] == [*names]
        before, first = later(), server.gateway()
        assert len({*before}) == 3
        for place, run in ((0, "noise"), (2, "hum")):
            alone = ["generate", str(tmp_path / run), "--prompt", "Again", "--tokens", "20", "--temperature", "0"]
            assert main(alone) == 0
            assert capsys.readouterr().out == f"Again{before[place]}\n"
        # Of the HTTP library beneath the client: httpx, and httpx2 from openai 3.3 on.
        with pytest.raises(Exception, match=r"peer closed connection|[Cc]onnection (reset|error)"):
            kill_in_stream(first)
        assert later() == before
        second = server.gateway()
        assert second not in (0, first)
        os.kill(second, signal.SIGSTOP)
        assert later() == before
        assert server.gateway() not in (0, first, second)
        assert answers <= {(503, "1")}
        lost = [line for line in server.lines() if "started again" in line]
        assert [reason in line for reason, line in zip(("SIGKILL", "does not answer"), lost, strict=True)] == [True] * 2
    finally:
        assert server.close() == 0
