"""Train, stop early, resume and use a model from Python; then ask what faults would have cost.

    pip install -e '.[all]'
    python examples/train_from_python.py

Works the same in a notebook. The run folder is what `planetary train` writes: `planetary dashboard runs/from-python`.
"""

from __future__ import annotations

import planetary

CONFIG = {
    "run": {"name": "from-python"},
    "model": {"source": "planetary.models.nanochat:build", "options": {"n_layer": 2, "n_head": 4, "n_embd": 128}},
    "data": {"source": "stdlib", "tokenizer": "byte"},
    "train": {"rounds": 60, "inner_steps": 10, "batch_size": 4, "sequence_length": 64},
    "optimizer": {"learning_rate": 0.004, "warmup_steps": 30},
    "eval": {"every": 5, "batches": 16},
}
GOOD_ENOUGH = 2.6  # nats per byte


def main() -> None:
    """Run the example."""

    def on_round(metrics: planetary.RoundMetrics) -> None:
        print(f"round {metrics.round}: loss {metrics.loss:.3f}, {metrics.tokens_per_s:,.0f} tokens/s")
        if metrics.loss < GOOD_ENOUGH:
            run.stop()

    run = planetary.train(CONFIG, workers=2, on_round=on_round, wait=False)
    run.wait()  # Ctrl+C, or an interrupted cell, stops the run in order
    rounds = len(run.metrics)
    print(f"{run}; its parameters: {sum(array.size for array in run.params().values()):,}")

    run.resume(rounds=rounds + 2)
    print(repr(run.generate("def ", max_tokens=40, temperature=0.5)))

    for faults in (0, 20):
        done = planetary.simulate(CONFIG, workers=8, rounds=8, faults=faults)
        print(f"8 workers, {len(done.faults)} faults: loss {done.losses[-1]:.3f} after {done.seconds:.0f} simulated s")


if __name__ == "__main__":
    main()
