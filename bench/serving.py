"""What serving costs and what it survives: `python bench/serving.py [RUN]`; without a run, a Llama of 3 million
parameters that has trained for a moment.

Everything is measured in one run of one server on this machine, as ratios. `--kills N` kills the worker N times in
streams and counts texts that differ. Where PyTorch and transformers are installed, a run of `models.gpt2` or
`models.llama` is compared with theirs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import openai
import psutil

from planetary.core.config import config_from_tables
from planetary.models.context import WholeText
from planetary.models.llama import LlamaConfig
from planetary.run.model.served import load_served

STREAMS = 8


def random_run(folder: Path) -> Path:
    """Return the folder of a short run."""
    config = folder / "random.toml"
    model = '[model]\nsource = "planetary.models.llama:build"\n'
    config.write_text(model + "[train]\nrounds = 1\ninner_steps = 10\n[fabric]\nworkers = 1\n")
    command = [sys.executable, "-m", "planetary", "train", str(config), f"--run-dir={folder / 'random'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "random"


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


def timed(work: Callable[[], Any], times: int = 5) -> float:
    """Return the median seconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of workers that run now."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "worker" in child.cmdline()[1:5]:
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


def transformers_text(run: Path, prompt: list[int], count: int) -> Callable[[], Any]:
    """Return what continues a prompt with transformers, the same weights, greedily, on all cores."""
    import torch
    from transformers import AutoModelForCausalLM

    from planetary.run.model.pretrained_export import export_pretrained

    with tempfile.TemporaryDirectory() as folder:
        export_pretrained(run, Path(folder) / "model")
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", attn_implementation="eager").eval()
    text = torch.tensor([prompt])

    def generate() -> Any:
        with torch.no_grad():
            return model.generate(text, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)

    generate()
    return generate


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only-kills", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run = args.run or random_run(folder)
        model = load_served(config_from_tables({"serve": {"model": str(run.resolve())}}))
        args.source = run
        process, url = serve(run, folder, args.backend, args.workers)
        try:
            measure(args, model, process, openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def measure(args: argparse.Namespace, model: Any, process: subprocess.Popen[bytes], client: openai.OpenAI) -> None:
    """Print the table's rows."""
    name, window = model.name, model.window // 16 * 16
    rng = np.random.default_rng(0)
    size = model.tokenizer.vocab_size

    @partial(jax.jit)
    def whole(params: Any, tokens: Any) -> Any:
        return jax.nn.log_softmax(model.decode(params, tokens, WholeText(tokens)))

    def complete(prompt: list[int], count: int, **options: Any) -> Any:
        extra = {"ignore_eos": True, **options.pop("extra_body", {})}
        asked: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0.0, **options}
        return client.completions.create(**asked, extra_body=extra)

    short = rng.integers(0, size, 8).tolist()
    count = window - 24
    if not args.only_kills:
        compare(args, model, complete=complete, whole=whole, short=short, count=count)
    kill(args, process, complete, short, count)


def compare(
    args: argparse.Namespace,
    model: Any,
    *,
    complete: Callable[..., Any],
    whole: Callable[..., Any],
    short: list[int],
    count: int,
) -> None:
    """Print how tokens compare with the whole forward pass, and times with those of others."""
    window, rng, size = model.window // 16 * 16, np.random.default_rng(0), model.tokenizer.vocab_size
    prompts = [rng.integers(0, size, rng.integers(1, window // 2)).tolist() for _ in range(args.prompts)]
    equal = worst = 0.0
    for prompt in prompts:
        choice = complete(prompt, 8, logprobs=1).choices[0]
        row = np.asarray(whole(model.params, np.asarray([[*prompt, *([0] * (window - len(prompt)))]], np.int32)))[0]
        first = row[len(prompt) - 1]
        worst = max(worst, abs(float(first.max()) - choice.logprobs.token_logprobs[0]))
        likeliest = model.tokenizer.decode([int(first.argmax())]).decode(errors="replace")
        equal += likeliest == choice.logprobs.tokens[0]
    print(f"first greedy tokens equal to the whole forward pass: {int(equal)} of {len(prompts)}")
    print(f"largest difference of their log-probabilities: {worst:.1e}")

    one = timed(lambda: complete(short, count))

    def together() -> None:
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(lambda i: complete([i, *short], count), range(STREAMS)))

    several = timed(together, 3)
    print(f"tokens a second of {STREAMS} streams, of one: {STREAMS * one / several:.2f}")

    forward = timed(lambda: jax.block_until_ready(whole(model.params, np.zeros((1, window), np.int32))), 20)
    print(f"time of a token in a stream, of a forward pass of {window} tokens with XLA: {one / count / forward:.2f}")

    if all(importlib.util.find_spec(library) is not None for library in ("torch", "transformers")):
        theirs = timed(transformers_text(args.source, short, count), 5)
        print(f"time of a token in a stream, of transformers' generate with its cache: {one / theirs:.2f}")

    is_llama = model.decode.func.__module__ == LlamaConfig.__module__
    if is_llama and all(importlib.util.find_spec(name) for name in ("gguf", "llama_cpp")):
        from serving_llama_cpp import continues, write_gguf

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, msgspec.convert(model.decode.keywords, LlamaConfig), path)
            for threads in (1, 2):
                theirs = timed(continues(path, short, count, threads), 3)
                print(f"time of a token in a stream, of llama.cpp with {threads} threads: {one / theirs:.2f}")


def kill(
    args: argparse.Namespace,
    process: subprocess.Popen[bytes],
    complete: Callable[..., Any],
    short: list[int],
    count: int,
) -> None:
    """Kill workers in streams, and print how many texts differ."""
    asked: dict[str, Any] = {"seed": 1, "temperature": 1.0, "logprobs": 1}
    expected = complete(short, count, **asked).choices[0].logprobs.tokens
    kills = differ = 0
    while kills < args.kills:
        found: list[str] = []
        for place, piece in enumerate(complete(short, count, stream=True, **asked)):
            found += piece.choices[0].logprobs.tokens if piece.choices[0].logprobs else []
            workers = workers_of(process) if place % 35 == 5 else []
            if workers and kills < args.kills:
                os.kill(workers[kills % len(workers)], signal.SIGKILL)
                kills += 1
        differ += found != expected
    print(f"texts that differ or fail after {kills} kills of {args.workers} workers in streams: {differ}")


if __name__ == "__main__":
    main()
