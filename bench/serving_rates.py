"""Times of served functions on one thread of this machine's CPU: `python bench/serving_rates.py [llama] [mixture]`.

`llama`: a token of one text, in float32 and bfloat16, against llama.cpp and transformers with the same weights (where
`gguf`, `llama_cpp`, `torch` and `transformers` are installed); eight texts against one; a chunk of a prompt against the
rate of numpy's matrix product. `mixture`: PARALLAX section 16.4's figures, with real experts, surrogates, and the
experts of a composer.

All contenders compute in this process with one thread each, in turns. A time is the processor time that the process
takes, and the mean of the fastest quarter, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from serving_llama_cpp import LlamaCpp, write_gguf
from serving_models import train_mixture, write_run

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_program
from planetary.compiler.backends.targets import Target
from planetary.core.config import config_from_tables
from planetary.core.step import ProgramSpec
from planetary.models.latent_moe import LatentMoeConfig, forward, real_mixture
from planetary.models.llama import LlamaConfig
from planetary.models.model_options import configure
from planetary.run.model.pretrained_export import export_pretrained
from planetary.run.model.served import load_traced
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.loaded_model import LoadedModel, next_call, with_draws
from planetary.runs.serve.messages import ComputeCall
from planetary.runs.serve.program.shape import PAGE, decode_name, prefill_name
from planetary.runs.serve.program.traced_model import TracedModel
from planetary.runs.serve.scheduling.sampling import Drawing, SamplingOptions
from planetary.runtime.device_program import Program, open_program
from planetary.runtime.host import host_features

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
TOKENS = 64
GREEDY = Drawing(SamplingOptions(temperature=0.0), frozenset())
LLAMAS: dict[str, dict[str, Any]] = {
    "3M": {"n_layer": 4, "n_head": 4, "n_kv_head": 4, "n_embd": 256, "n_hidden": 688, "vocab_size": 256},
    "25M": {"n_layer": 8, "n_head": 8, "n_kv_head": 8, "n_embd": 512, "n_hidden": 1376, "vocab_size": 256},
    "99M": {"n_layer": 14, "n_head": 12, "n_kv_head": 12, "n_embd": 768, "n_hidden": 2048, "vocab_size": 256},
}
CONTEXTS = (128, 512, 2048)


class Contenders:
    """Work that is timed in turns."""

    def __init__(self) -> None:
        self.works: dict[str, Callable[[], Any]] = {}
        self.times: dict[str, list[float]] = {}

    def measure(self, rounds: int) -> dict[str, float]:
        """Return seconds of processor time: the mean of the fastest quarter."""
        for work in self.works.values():
            work()
        for _ in range(rounds):
            for name, work in self.works.items():
                began = time.process_time()
                work()
                self.times.setdefault(name, []).append(time.process_time() - began)
        return {name: float(np.mean(sorted(found)[: max(1, rounds // 4)])) for name, found in self.times.items()}


def loaded(
    model: TracedModel, serve: Mapping[str, Any], scratch: Path, *, chunk: int, backend: str = "cpu"
) -> LoadedModel:
    """Compile the functions that are timed, and load them with one thread."""
    shape = model.shape(config_from_tables({"serve": {"model": "x", **serve}}).of(ServeConfig))
    shape = msgspec.structs.replace(shape, batches=(1, 8), chunks=(chunk,), scores_prompts=False)
    program = model.program(shape)
    spec = ProgramSpec("bench", dict(program.functions), shape.integers_below, program.digest, program.weights)
    target = Target(backend, "stablehlo" if backend.startswith("pjrt") else "host", host_features())
    artifact = compile_program(program.portable, spec, target, BlobStore(scratch / "cache"))
    runner = open_program(
        artifact.data, Program(b"", program.functions), backend=backend, threads=None if target.is_pjrt else 1
    )
    return LoadedModel(runner, shape, model.arrays())


def decoding(
    served: LoadedModel, batch: int, start: int, context_pages: int, count: int = TOKENS
) -> Callable[[], None]:
    """Return what continues `batch` texts by `count` tokens each, as a worker that draws ahead."""
    pages = tuple(
        tuple(range(1 + row * context_pages, 1 + row * context_pages + context_pages)) for row in range(batch)
    )

    def work() -> None:
        call: ComputeCall | None = ComputeCall(
            call=0, function=decode_name(batch, context_pages), tokens=((7,),) * batch, starts=(start,) * batch,
            page_tables=pages, full=False, extra_steps=count - 1, drawings=(GREEDY,) * batch, vocabulary=256,
        )  # fmt: skip
        while call is not None:
            call = next_call(call, with_draws(call, served.compute(call)))

    return work


def prefilling(served: LoadedModel, chunk: int, start: int, context_pages: int) -> Callable[[], None]:
    """Return what takes a chunk of a prompt."""
    tokens = tuple(int(i) for i in np.random.default_rng(0).integers(0, 256, chunk))
    call = ComputeCall(
        call=0, function=prefill_name(chunk, context_pages), tokens=(tokens,), starts=(start,),
        page_tables=(tuple(range(1, context_pages + 1)),), full=False,
    )  # fmt: skip
    return lambda: served.compute(call)


def llama(size: str, scratch: Path, rounds: int) -> None:
    """Print the times of one Llama."""
    options = LLAMAS[size]
    run = write_run(scratch / size, "planetary.models.llama:build", options, scale=0.05)
    found, chunk = Contenders(), 112
    for weights in ("f32", "bf16"):
        serve = {"weights": weights, "batch": 8}
        model = load_traced(config_from_tables({"serve": {"model": str(run), **serve}}))
        served = loaded(model, serve, scratch, chunk=chunk)
        found.works[f"one text, {weights}"] = decoding(served, 1, 8, 8)
        found.works[f"eight texts, {weights}"] = decoding(served, 8, 8, 8)
        found.works[f"chunk, {weights}"] = prefilling(served, chunk, 0, 8)
        if weights == "f32":
            operations = 2 * sum(spec.size for spec in model.specs if len(spec.shape) == 2) * chunk
            if importlib.util.find_spec("llama_cpp") is not None:
                import gguf

                config = msgspec.convert(model.decode.keywords, LlamaConfig)  # type: ignore[attr-defined]
                for kind, stored in (("f32", None), ("bf16", gguf.GGMLQuantizationType.BF16)):
                    path = scratch / f"{size}-{kind}.gguf"
                    write_gguf(model, config, path, stored)
                    for name, texts in (("one text", 1), ("eight texts", 8)):
                        other = LlamaCpp(path, texts, 128, 1)
                        found.works[f"llama.cpp, {name}, {kind}"] = other.continues([7] * 9, TOKENS)
            if importlib.util.find_spec("transformers") is not None:
                found.works["transformers, f32"] = transformers_text(run, scratch / f"{size}-hf", [7] * 8)
    square = np.random.default_rng(0).standard_normal((512, 512), np.float32)
    found.works["matmul"] = lambda: [square @ square for _ in range(4)]
    wide = np.random.default_rng(0).standard_normal((options["n_embd"], options["n_hidden"]), np.float32)
    rows = np.random.default_rng(0).standard_normal((chunk, options["n_embd"]), np.float32)
    found.works["matmul of the chunk"] = lambda: [rows @ wide for _ in range(16)]
    seconds = found.measure(rounds)
    rate = 4 * 2 * 512**3 / seconds["matmul"]
    own = 16 * 2 * rows.size * wide.shape[1] / seconds["matmul of the chunk"]
    print(f"\n{size}, one thread; numpy {rate / 1e9:.0f} GFLOP/s (512³), {own / 1e9:.0f} (this model's shapes)")
    for weights in ("f32", "bf16"):
        one, eight = seconds[f"one text, {weights}"], seconds[f"eight texts, {weights}"]
        print(f"| {weights}: a token of one text, ms | {1e3 * one / TOKENS:.2f} |")
        for other in (f"llama.cpp, one text, {weights}", "transformers, f32"):
            if other in seconds:
                print(f"| {weights}: a token of one text, of {other} | {one / seconds[other]:.2f} |")
        print(f"| {weights}: a step of eight texts, ms | {1e3 * eight / TOKENS:.2f} |")
        print(f"| {weights}: tokens of eight texts, of one, in equal time | {8 * one / eight:.2f} |")
        if (other := f"llama.cpp, eight texts, {weights}") in seconds:
            theirs = 8 * seconds[f"llama.cpp, one text, {weights}"] / seconds[other]
            print(f"| {weights}: the same in llama.cpp | {theirs:.2f} |")
            print(f"| {weights}: a step of eight texts, of llama.cpp's | {eight / seconds[other]:.2f} |")
        part = operations / seconds[f"chunk, {weights}"]
        print(
            f"| {weights}: rate of a chunk of {chunk}, of numpy's | {part / rate:.2f}, {part / own:.2f} |", flush=True
        )


def transformers_text(run: Path, folder: Path, prompt: list[int]) -> Callable[[], Any]:
    """Return what continues a prompt with transformers' `generate` and its cache, eagerly."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    export_pretrained(run, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    text = torch.tensor([prompt])

    def generate() -> Any:
        with torch.no_grad():
            return model.generate(text, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS, pad_token_id=0)

    return generate


def mixture(run: Path | None, scratch: Path, rounds: int, backend: str) -> None:
    """Print PARALLAX section 16.4's figures."""
    run = run or train_mixture(scratch / "trained")
    found, models = Contenders(), {}
    for experts in ("real", "surrogates", "composer:0"):
        serve = {"experts": experts, "batch": 8, "context": CONTEXTS[-1]}
        model = models[experts] = load_traced(config_from_tables({"serve": {"model": str(run), **serve}}))
        served = loaded(model, serve, scratch, chunk=CONTEXTS[0], backend=backend)
        for context in CONTEXTS:
            context_pages, start = context // PAGE, context - 40
            found.works[f"{experts} prefill {context}"] = prefilling(served, 128, context - 128, context_pages)
            for batch in (1, 8):
                found.works[f"{experts} decode {batch} {context}"] = decoding(served, batch, start, context_pages, 32)
    seconds = found.measure(rounds)
    print("\n| experts | context | prefill, tokens/s | decode of 1 | of 8, tokens/s | CPU hours a million tokens |")
    for experts, model in models.items():
        for context in CONTEXTS:
            prefill = 128 / seconds[f"{experts} prefill {context}"]
            one, eight = (batch * 32 / seconds[f"{experts} decode {batch} {context}"] for batch in (1, 8))
            hours = 1e6 / eight / 3600
            print(f"| {experts} | {context} | {prefill:.0f} | {one:.0f} | {eight:.0f} | {hours:.2f} |", flush=True)
        size, sizes = sum(spec.nbytes for spec in model.specs), model.sizes
        print(f"| {experts} | parameters, bytes | {size} | | | |")
        token = 8 * sizes.layers * sizes.heads * sizes.width  # type: ignore[union-attr]
        print(f"| {experts} | cache of a token, and of {CONTEXTS[-1]}, bytes | {token} | {token * CONTEXTS[-1]} | | |")
    residency(models["real"])


def residency(model: TracedModel) -> None:
    """Print which experts the tokens of a text use, and how often a cache of recently used ones has them."""
    config = configure("latent_moe", LatentMoeConfig, model.decode.keywords)  # type: ignore[attr-defined]
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, 256, (1, 512)), jnp.int32)
    layers = model.params["layers"]
    _, _, seen = forward(model.params, tokens, config, lambda i, u, g: real_mixture(layers[i]["experts"], u, g, config))
    chosen = [np.asarray(gates) for _, gates, _ in seen]
    used = [np.flatnonzero(row) for row in chosen[0]]
    count, active = chosen[0].shape[-1], len(used[0])
    expert = sum(spec.nbytes for spec in model.specs if "experts" in spec.name) / count / len(chosen)
    read = active * expert * len(chosen)
    print(
        f"| bytes of the experts that a token is routed to, {active} of {count} in {len(chosen)} layers | {read:.0f} |"
    )
    for batch in (1, 8):
        union = np.mean([len(set(np.concatenate(used[i : i + batch]))) for i in range(0, len(used), batch)])
        print(f"| experts of a layer that {batch} texts are routed to in a call | {union:.1f} of {count} |")
    for kept in (active, count // 2):
        recent: list[int] = []
        hits = total = 0
        for row in used:
            for one in row.tolist():
                hits += one in recent
                total += 1
                recent = [one, *(other for other in recent if other != one)][:kept]
        print(f"| hits of a cache of the {kept} experts used last, one text | {hits / total:.2f} |", flush=True)


def main() -> None:
    """Measure and print."""
    if os.environ.get("OMP_NUM_THREADS") != "1":  # read once, when numpy is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=("llama", "mixture"), default=["llama", "mixture"])
    parser.add_argument("--sizes", default=",".join(LLAMAS))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--run", type=Path, help="of a mixture with composers (default: one that trains for a moment)")
    parser.add_argument("--backend", default="cpu", help="for the mixture: cpu or pjrt:cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "llama" in args.parts:
            for size in args.sizes.split(","):
                llama(size, Path(folder), args.rounds)
        if "mixture" in args.parts:
            mixture(args.run, Path(folder), args.rounds, args.backend)


if __name__ == "__main__":
    main()
