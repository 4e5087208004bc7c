"""The token files a run trains on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planetary.core.config import Config
from planetary.core.token_slice import Slice
from planetary.data.reader import counted, read_slice, split
from planetary.data.slices import SliceOrder, eval_chunks
from planetary.data.token_file import MARKED_DTYPES, TokenFile
from planetary.data.tokenizer import Tokenizer


class PreparedData(msgspec.Struct, frozen=True):
    """Token files that are ready to be trained on."""

    train: TokenFile
    held_out: TokenFile
    vocab_size: int  # every token is below it
    tokenizer: Tokenizer | None  # None: the source is a token file and no tokenizer.json was given
    block_tokens: int
    key: str  # sha256 (hex) of everything the files depend on: equal keys mean equal tokens in equal order
    folder: Path
    documents: int
    sets: dict[str, TokenFile] = {}  # `eval.sets`, as many of the rows as are evaluated
    notes: tuple[str, ...] = ()  # line for each source: kind, and the beginning of the first text

    def order(self, config: Config, slice_tokens: int | None = None) -> SliceOrder:
        """Return which lease stands for which tokens; raises `UserError` for less than one slice.

        `slice_tokens`: of a lease; None: as the configuration divides the data among workers.
        """
        return SliceOrder(
            self.train,
            config.tokens_per_slice if slice_tokens is None else slice_tokens,
            self.block_tokens,
            config.run.seed,
            config.data.sampling,
            config.data.shuffle_leases,
            config.leases_per_slice if slice_tokens is None else 1,
        )

    def targets_in(self, piece: Slice) -> int:
        """Return how many targets of the blocks in a slice count."""
        if piece.dtype not in MARKED_DTYPES:
            return piece.count // self.block_tokens * (self.block_tokens - 1)
        _, targets = split(read_slice(piece))
        return counted(targets.reshape(-1, self.block_tokens)[:, 1:])

    def eval_chunks(self, config: Config, batches_per_chunk: int | None = None) -> list[tuple[Slice, int]]:
        """Return the held-out batches that `config.eval.batches` asks for; see `slices.eval_chunks`."""
        return eval_chunks(self.held_out, config.eval.batches, config.tokens_per_batch, batches_per_chunk)
