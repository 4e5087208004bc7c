"""Greedy tokens of served models against their whole forward pass: `python bench/serving_greedy.py [--prompts 1000]`.

The prompts are spread over every family that can be served, each behind its own `planetary serve`. A text is right if
each of its tokens is the likeliest of the whole forward pass (XLA, float32) over prompt and earlier tokens; so the
text is the one that a loop of whole forward passes writes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
from serving_models import CHARACTERS, FAMILIES, published_folders, train_mixture, write_run

from planetary.core.config import config_from_tables
from planetary.models.context import WholeText
from planetary.run.model.served import load_traced

STREAMS = 4


@contextlib.contextmanager
def serving(model: Path, flags: list[str], scratch: Path) -> Iterator[openai.OpenAI]:
    """Serve a folder; yield a client."""
    log = scratch / "serve.log"
    command = [sys.executable, "-m", "planetary", "serve", str(model), "--port=0", f"--batch={STREAMS}", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, f"--cache={scratch / 'cache'}"], stdout=file, stderr=subprocess.STDOUT)
    try:
        while not (found := [line for line in log.read_text().splitlines() if line.startswith("serving at ")]):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield openai.OpenAI(base_url=found[0].split()[2], api_key="none", max_retries=0, timeout=600)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def compare(
    name: str, source: tuple[Path, dict[str, Any]], *, prompts: int, tokens: int, scratch: Path
) -> tuple[int, int]:
    """Print a row; return how many texts are equal, and how many there are."""
    path, serve = source
    model = load_traced(config_from_tables({"serve": {"model": str(path.resolve()), **serve}}))
    window = model.window // 16 * 16
    rng = np.random.default_rng(0)
    asked = [rng.integers(0, 256, rng.integers(1, window - tokens)).tolist() for _ in range(prompts)]

    @jax.jit
    def whole(params: Any, text: Any) -> Any:
        return jax.nn.log_softmax(model.decode(params, text, WholeText(text))[0])

    flags = [f"--{key.replace('_', '-')}={value}" for key, value in serve.items()]
    with serving(path, flags, scratch) as client, concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:

        def complete(prompt: list[int]) -> list[int]:
            answer = client.completions.create(
                model=model.name, prompt=prompt, max_tokens=tokens, temperature=0.0, extra_body={"ignore_eos": True}
            )
            return [CHARACTERS.index(one) for one in answer.choices[0].text]

        texts = list(pool.map(complete, asked))
    equal, compared, margins = 0, 0, []
    with jax.default_matmul_precision("highest"):
        for prompt, text in zip(asked, texts, strict=True):
            padded = np.zeros((1, window), np.int32)
            padded[0, : len(prompt) + len(text)] = [*prompt, *text]
            rows = np.asarray(whole(model.params, padded))[len(prompt) - 1 : len(prompt) + len(text) - 1]
            wrong = [
                float(row.max() - row[token]) for row, token in zip(rows, text, strict=True) if row.argmax() != token
            ]
            compared += len(text)
            equal += not wrong and len(text) == tokens
            margins += wrong
    worst = f"; the reference prefers its own by at most {max(margins):.1g} nats" if margins else ""
    print(f"| {name} | {equal} of {prompts} | {compared} |{worst}", flush=True)
    return equal, prompts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--only", metavar="MODEL", help="one row of the table")
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models: dict[str, tuple[Path, dict[str, Any]]] = {
            name: (write_run(scratch / name, *family), {}) for name, family in FAMILIES.items()
        }
        mixture = scratch / "trained" / "mixture"
        if not args.only or "latent_moe" in args.only:
            train_mixture(mixture.parent)
        for experts in ("real", "surrogates", "composer:0"):
            models[f"latent_moe, {experts}"] = mixture, {"experts": experts}
        models |= {name: (path, {}) for name, path in published_folders(scratch / "published").items()}
        for weights in ("bf16", "int8", "int4"):
            models[f"llama, {weights}"] = scratch / "llama", {"weights": weights}
        shares = np.diff(np.linspace(0, args.prompts, len(models) + 1).astype(int))
        print("| model | equal texts | tokens |", flush=True)
        counts = [
            compare(name, source, prompts=int(share), tokens=args.tokens, scratch=scratch)
            for share, (name, source) in zip(shares, models.items(), strict=True)
            if args.only in (None, name)
        ]
        print(f"| all | {sum(a for a, _ in counts)} of {sum(b for _, b in counts)} | |")


if __name__ == "__main__":
    main()
