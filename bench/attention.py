"""Time and memory of a training step whose attention is made of tiles, and of one that holds every score.

    python bench/attention.py [--lengths 512 1024 2048 4096] [--layers 2] [--width 256] [--rounds 3] [--steps 6]

A GPT-2 with one text a batch, float32, AdamW; how it is measured: bench/step_kinds.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import step_kinds

if TYPE_CHECKING:
    from planetary.compiler.step.train_step import TrainStep

WHOLE = {"tiles": 0, "whole": 1 << 30}


def main() -> None:
    parser = step_kinds.parser_of(__doc__, list(WHOLE))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    options = parser.parse_args()

    def make(kind: str, length: int) -> TrainStep:
        from planetary.compiler.frontend.export import export_model
        from planetary.compiler.step.train_step import build_train_step
        from planetary.models import layers

        layers.WHOLE = WHOLE[kind]
        sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.heads, "vocab_size": 256}
        return build_train_step(
            export_model("planetary.models.gpt2:build", sizes | {"sequence_length": length, "batch_size": 1})
        )

    step_kinds.compare(options, options.lengths, make, size="positions", kind="attention", against="whole")


if __name__ == "__main__":
    main()
