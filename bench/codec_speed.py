"""What encoding and decoding an update costs: processor time for 100 million parameters, by codec.

    python bench/codec_speed.py

A worker encodes its delta with error feedback (`PayloadForm.compress`, which decodes its own payload for the residual)
and decodes the change that it gets, in its compute thread: the event loop is free. The gateway does as much for each
worker. Times are of one thread, scaled from 16 million parameters in matrices of 4096 x 1024; shares are of a round of
3.9 s (`docs/synchronisation.md`), and of the time that the same thread needs to copy the parameters once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from planetary.core.tensors import TensorSpec
from planetary.diloco.payload import CODECS, PayloadForm, payload_digest

SPECS = tuple(TensorSpec(f"w{number}", "f32", (4096, 1024)) for number in range(4))
SIZE = sum(spec.size for spec in SPECS)
ROUND_S, PARAMS = 3.9, 100e6


def fastest(work: Callable[[], object]) -> float:
    """Return the least processor time of three calls after one, for `PARAMS` parameters."""
    work()
    times: list[float] = []
    for _ in range(3):
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times) * PARAMS / SIZE


def main() -> None:
    random = np.random.default_rng(0)
    update = {spec.name: random.standard_normal(spec.shape).astype(np.float32) for spec in SPECS}
    copy = fastest(lambda: {name: values.copy() for name, values in update.items()})
    print(f"a copy of 100M float32: {copy:.3f} s\n")
    print("| codec | compress, s | decode, s | both, in copies | both, of a round of 3.9 s |")
    print("|---|---:|---:|---:|---:|")
    for codec in CODECS:
        form = PayloadForm(codec, SPECS)
        payload, residual = form.compress(update, None)
        digest = payload_digest(payload)
        there = fastest(lambda form=form, residual=residual: form.compress(update, residual))
        back = fastest(lambda form=form, payload=payload, digest=digest: form.decode(payload, digest))
        both = there + back
        print(f"| `{codec}` | {there:.2f} | {back:.2f} | {both / copy:.1f} | {both / ROUND_S:.0%} |", flush=True)


if __name__ == "__main__":
    main()
