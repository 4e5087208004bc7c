"""Part d: a Llama of 135 million random parameters, served: a token, eight texts, and a chunk of a prompt.

The functions that a serving worker calls, in one process, against transformers with the same weights: its `generate`
with its cache, and its forward pass over a prompt.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import BENCH, PJRT, REHEARSAL, TORCH, Process, Record, last_json, tail

from planetary.runs.serve.config import ServeConfig

OPTIONS: dict[str, Any] = {
    "n_layer": 30, "n_head": 9, "n_kv_head": 3, "n_embd": 576, "n_hidden": 1536, "vocab_size": 49152,
}  # fmt: skip
if REHEARSAL:
    OPTIONS = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "n_hidden": 64, "vocab_size": 512}
TOKENS = 8 if REHEARSAL else 64
CHUNK = 32 if REHEARSAL else 512
REACH = 8 if REHEARSAL else 64  # blocks of a text
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31]
ROUNDS = 3
READY = "ready to be timed"
READY_S = 240.0 if REHEARSAL else 70.0


def best(work: Callable[[], Any]) -> float:
    """Return the least seconds of a few calls, after one that is not counted."""
    work()
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def wait_for_turn() -> None:
    """Say that all is compiled, and wait until the others' turns are over."""
    print(READY, flush=True)
    sys.stdin.readline()


def ours(run: Path, weights: str) -> dict[str, Any]:
    """Time our functions; greedy tokens of a text too."""
    import msgspec
    import numpy as np

    from planetary.artifacts.store import BlobStore
    from planetary.compiler.backends.iree import compile_program
    from planetary.compiler.backends.targets import Target
    from planetary.core.config import config_from_tables
    from planetary.core.step import ProgramSpec
    from planetary.run.model.served import load_traced
    from planetary.runs.serve.loaded_model import LoadedModel, next_call, with_draws
    from planetary.runs.serve.messages import ComputeCall
    from planetary.runs.serve.program.shape import decode_name, prefill_name
    from planetary.runs.serve.scheduling.sampling import Drawing, SamplingOptions
    from planetary.runtime.device_program import Program, open_program

    began = time.perf_counter()
    serve = {"weights": weights, "batch": 8, "context": 1024 if not REHEARSAL else 128}
    config = config_from_tables({"serve": {"model": str(run), **serve}})
    model = load_traced(config)
    shape = msgspec.structs.replace(
        model.shape(config.of(ServeConfig)),
        batches=(1, 8),
        chunks=(CHUNK,),
        context_sizes=(REACH,),
        scores_prompts=False,
    )
    program = model.program(shape)
    spec = ProgramSpec("bench", dict(program.functions), shape.integers_below, program.digest, program.weights)
    target = Target(PJRT, "stablehlo")
    artifact = compile_program(program.portable, spec, target, BlobStore(run.parent / f"cache-{weights}"))
    runner = open_program(artifact.data, Program(b"", program.functions), backend=PJRT)
    served = LoadedModel(runner, shape, model.arrays())
    built = time.perf_counter() - began
    greedy = Drawing(SamplingOptions(temperature=0.0), frozenset())
    vocabulary = OPTIONS["vocab_size"]

    def pages(batch: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(1 + row * REACH, 1 + row * REACH + REACH)) for row in range(batch))

    def decode(batch: int, first: int, start: int, count: int) -> list[int]:
        call: ComputeCall | None = ComputeCall(
            call=0, function=decode_name(batch, REACH), tokens=((first,),) * batch, starts=(start,) * batch,
            page_tables=pages(batch), full=False, extra_steps=count - 1, drawings=(greedy,) * batch,
            vocabulary=vocabulary,
        )  # fmt: skip
        drawn = []
        while call is not None:
            answer = with_draws(call, served.compute(call))
            call = next_call(call, answer)
            if call is not None:
                drawn.append(call.tokens[0][0])
        return drawn

    def prefill(tokens: list[int]) -> Any:
        call = ComputeCall(
            call=0, function=prefill_name(CHUNK, REACH), tokens=(tuple(tokens),), starts=(0,), page_tables=pages(1),
            full=False,
        )  # fmt: skip
        return served.compute(call)

    long = [int(i) for i in np.random.default_rng(0).integers(0, vocabulary, CHUNK)]
    began = time.perf_counter()
    prefill(long)
    decode(1, 7, 8, 2)
    decode(8, 7, 8, 2)
    found = {"built_s": built, "compiled_s": time.perf_counter() - began}
    wait_for_turn()
    found["prefill_s"] = best(lambda: prefill(long))
    found["one_text_s"] = best(lambda: decode(1, 7, 8, TOKENS))
    found["eight_texts_s"] = best(lambda: decode(8, 7, 8, TOKENS))
    for position, token in enumerate(PROMPT[:-1]):
        decode(1, token, position, 1)
    found["greedy"] = decode(1, PROMPT[-1], len(PROMPT) - 1, 17)[:16]
    return found


def theirs(folder: Path, weights: str) -> dict[str, Any]:
    """Time transformers with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if weights == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind).eval().to(TORCH)
    wait = torch.cuda.synchronize if TORCH == "cuda" else lambda: None

    def generate(prompt: list[int], batch: int, count: int) -> list[int]:
        text = torch.tensor([prompt] * batch, device=TORCH)
        with torch.no_grad():
            made = model.generate(text, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0)
        return made[0, len(prompt) :].tolist()

    def forward(tokens: list[int]) -> None:
        with torch.no_grad():
            model(torch.tensor([tokens], device=TORCH), logits_to_keep=1)
        wait()

    long = torch.randint(0, OPTIONS["vocab_size"], (CHUNK,)).tolist()
    generate(PROMPT, 1, 2)
    wait_for_turn()
    return {
        "prefill_s": best(lambda: forward(long)),
        "one_text_s": best(lambda: generate([7] * 9, 1, TOKENS)),
        "eight_texts_s": best(lambda: generate([7] * 9, 8, TOKENS)),
        "greedy": generate(PROMPT, 1, 16),
    }


def main() -> None:
    """Record both, in float32 and bfloat16."""
    sys.path.insert(0, str(BENCH))
    record = Record("d-serving")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        code, output = Process([__file__, "write", folder / "run"]).wait(40)
        record.put("model written, s", round(time.perf_counter() - began, 1) if code == 0 else tail(output))
        for who, place in (("ours", folder / "run"), ("theirs", folder / "run-hf")):
            _take_turns(record, who, place)


def _take_turns(record: Record, who: str, place: Path) -> None:
    """Let both precisions get ready at the same time, and time one after the other."""
    started = {weights: Process([__file__, who, place, weights]) for weights in ("f32", "bf16")}
    until = time.monotonic() + READY_S
    said = dict.fromkeys(started, "")
    waiting = set(started)
    while waiting and time.monotonic() < until:
        for one in list(waiting):
            piece = started[one].read(0.05)
            said[one] += piece or ""
            if piece is None or READY in said[one]:
                waiting.remove(one)
    for weights, process in started.items():
        code, output = 124, said[weights]
        if READY in output:
            code, rest = process.wait(30, "go\n")
            output += rest
        process.end()
        found = (last_json(output) if code == 0 else None) or {"failed": code, "output": tail(output)}
        for key in ("one_text_s", "eight_texts_s"):
            if key in found:
                found[key.replace("_s", "_ms_a_token")] = 1e3 * found[key] / TOKENS
        record.put(f"{who}, {weights}", found)


def write(run: Path) -> None:
    """Write the model as a run's folder, and as one that transformers loads."""
    sys.path.insert(0, str(BENCH))
    from serving_models import write_run

    from planetary.run.model.pretrained_export import export_pretrained

    write_run(run, "planetary.models.llama:build", OPTIONS, scale=0.05)
    export_pretrained(run, run.with_name("run-hf"))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        main()
    elif sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        made = {"ours": ours, "theirs": theirs}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
        print(json.dumps(made), flush=True)
        os._exit(0)
