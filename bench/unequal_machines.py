"""Two workers of speeds 1 and 4 against two equal ones: held-out loss and simulated seconds of a small transformer.

    python bench/unequal_machines.py [--seeds 3]

Real numerics in simulated time (`planetary.simulate`); 8 rounds of 20 inner steps on average. Prints one JSON object a
seed: for speeds 1 and 1, and for 1 and 4 with measured and with equal leases.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import planetary

CASES = {"1, 1": ((1, 1), "equal"), "1, 4 measured": ((1, 4), "measured"), "1, 4 equal": ((1, 4), "equal")}


def tables(folder: Path) -> dict[str, Any]:
    corpus, source = folder / "corpus.txt", random.Random(0)
    words = ["def", "return", "for", "in", "import", "class", "self"]
    corpus.write_text("\n".join(" ".join(source.choices(words, k=8)) for _ in range(4000)))
    return {
        "model": {"options": {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 256}},
        "data": {"source": str(corpus)},
        "train": {"rounds": 8, "inner_steps": 20, "batch_size": 2, "sequence_length": 16},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 5},
        "fabric": {"workers": 2},
        "eval": {"every": 8, "batches": 8},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        config = tables(Path(folder))
        for seed in range(options.seeds):
            found = {}
            for name, (speeds, leases) in CASES.items():
                overrides = {"fabric.leases": leases, "run.seed": seed}
                done = planetary.simulate(config, speeds=speeds, overrides=overrides, cache=Path(folder) / "cache")
                found[name] = {"loss": round(done.eval_losses[-1][1], 4), "seconds": round(done.seconds, 1)}
            print(json.dumps({"seed": seed, **found}), flush=True)


if __name__ == "__main__":
    main()
