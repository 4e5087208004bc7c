"""Time and memory of a training step of a large vocabulary, by what exists at once.

`tiles`: logits exist a tile at a time. `whole`: all at once. With `-one-hot` lookups in the table are products with
one-hot rows, as they are for small tables.

    python bench/cross_entropy.py [--tokens 256 2048 8192] [--words 50257] [--width 64] [--rounds 2]

A GPT-2 of one layer with texts of 256 tokens, float32, AdamW; how it is measured: bench/step_kinds.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import step_kinds

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep

KINDS = {"tiles": (1, 0), "whole": (1 << 60, 0), "tiles-one-hot": (1, 1 << 60), "whole-one-hot": (1 << 60, 1 << 60)}
"""From how many logits on they exist in tiles; up to how many rows of a table lookups are products."""
LENGTH = 256


def main() -> None:
    parser = step_kinds.parser_of(__doc__, list(KINDS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--words", type=int, default=50_257)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    def make(kind: str, tokens: int) -> TrainStep:
        from planetary.compiler.autodiff import losses
        from planetary.compiler.frontend.export import export_model
        from planetary.compiler.rewrites import normalise
        from planetary.compiler.step.train_step import build_train_step

        losses.LARGE, normalise.ONE_HOT_ROWS = KINDS[kind]
        sizes = {"n_layer": 1, "n_embd": options.width, "n_head": 1, "vocab_size": options.words}
        batch = {"sequence_length": LENGTH, "batch_size": tokens // LENGTH}
        return build_train_step(export_model("planetary.models.gpt2:build", sizes | batch))

    step_kinds.compare(options, options.tokens, make, size="tokens", kind="logits", against="whole")


if __name__ == "__main__":
    main()
