"""Streams of a served model, and streams whose workers are killed: `python bench/serving.py [RUN]`; without a run, a
Llama of 3 million random parameters.

Eight streams against one, end to end over HTTP: in seconds, and in processor time of gateway and workers, which other
work on the machine does not change. `--kills N` kills workers in the middle of streams, and counts texts that differ
from the one without a kill, or fail. Tokens are compared with the whole forward pass by `serving_greedy.py`, and times
with those of others by `serving_rates.py`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
from serving_models import write_run
from serving_rates import LLAMAS

STREAMS = 8


def serve(run: Path, folder: Path, backend: str, workers: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; return it and its URL."""
    log = folder / "serve.log"
    command = [sys.executable, "-m", "planetary", "serve", str(run), "--port=0", f"--backend={backend}"]
    command.append(f"--workers={workers}")
    with log.open("wb") as file:
        process = subprocess.Popen([*command, f"--batch={STREAMS}"], stdout=file, stderr=subprocess.STDOUT)
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving at "):
                return process, line.split()[2]
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of workers that run now."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "worker" in child.cmdline()[1:5]:
                found.append(child.pid)
    return found


def processor_s(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time of a server and its children so far, in seconds."""
    total = 0.0
    for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=30, help="after which workers are killed no more")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only-kills", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = args.run or write_run(folder / "llama", "planetary.models.llama:build", LLAMAS["3M"], scale=0.05)
        process, url = serve(run, folder, args.backend, args.workers)
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=600)
        card = client.models.list().data[0]

        def complete(prompt: list[int], count: int, **options: Any) -> Any:
            asked: dict[str, Any] = {"model": card.id, "prompt": prompt, "max_tokens": count, **options}
            return client.completions.create(**asked, extra_body={"ignore_eos": True})

        count = card.max_model_len - 24  # type: ignore[attr-defined]
        try:
            if not args.only_kills:
                compare(process, complete, count)
            kill(args, process, complete, count)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def compare(process: subprocess.Popen[bytes], complete: Callable[..., Any], count: int) -> None:
    """Print how much more eight streams give than one."""
    prompt = [7] * 8

    def together() -> None:
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda i: complete([i, *prompt], count, temperature=0.0), range(STREAMS)))

    def timed(work: Callable[[], Any]) -> tuple[float, float]:
        began, before = time.perf_counter(), processor_s(process)
        work()
        return time.perf_counter() - began, processor_s(process) - before

    ones, eights = [], []
    for _ in range(8):
        ones.append(timed(lambda: complete(prompt, count, temperature=0.0)))
        eights.append(timed(together))
    for place, name in enumerate(("seconds", "processor time")):
        one, eight = (statistics.median(found[place] for found in times) for times in (ones, eights))
        print(f"tokens of {STREAMS} streams, of one, in equal {name}: {STREAMS * one / eight:.2f}")
        print(f"{name} of a token of one stream: {1e3 * one / count:.2f} ms", flush=True)


def kill(args: argparse.Namespace, process: subprocess.Popen[bytes], complete: Callable[..., Any], count: int) -> None:
    """Kill workers in streams, and print how many texts differ."""
    asked: dict[str, Any] = {"seed": 1, "temperature": 1.0, "logprobs": 1}
    expected = complete([7] * 8, count, **asked).choices[0].logprobs.tokens
    kills = differ = texts = 0
    began = time.monotonic()
    while kills < args.kills and time.monotonic() - began < 60 * args.minutes:
        found: list[str] = []
        before = kills
        with contextlib.suppress(openai.APIError):  # a text that fails is one that differs
            for place, piece in enumerate(complete([7] * 8, count, stream=True, **asked)):
                found += piece.choices[0].logprobs.tokens if piece.choices[0].logprobs else []
                workers = workers_of(process) if place % 20 == 5 else []
                if workers and kills < args.kills:
                    os.kill(workers[kills % len(workers)], signal.SIGKILL)
                    kills += 1
        texts += kills > before
        differ += found != expected
    minutes = (time.monotonic() - began) / 60
    print(f"{kills} kills of {args.workers} workers in {texts} streams, {minutes:.0f} minutes: {differ} differ or fail")


if __name__ == "__main__":
    main()
