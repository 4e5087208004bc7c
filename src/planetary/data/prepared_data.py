"""The token files a run trains on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from planetary.core.configuration.schema import Config
from planetary.core.example_layout import ExampleLayout
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
    layout: ExampleLayout | None = None  # form of an example of several arrays; None: the files hold tokens
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

    @property
    def is_marked(self) -> bool:
        """Whether some targets do not count."""
        return self.train.is_marked if self.layout is None else bool(self.layout.targets)

    @property
    def elements(self) -> str:
        """Elements of the files, for texts."""
        return "tokens" if self.layout is None else "examples"

    @property
    def counts(self) -> str:
        """Unit of `targets_in`, in the plural, for texts."""
        return self.elements if self.layout is None or not self.layout.targets else "targets"

    def targets_in(self, piece: Slice) -> int:
        """Return how many targets of the blocks in a slice count; of examples without targets, how many there are."""
        if self.layout is not None and not self.layout.targets:
            return piece.count
        if self.layout is None and piece.dtype not in MARKED_DTYPES:
            return piece.count // self.block_tokens * (self.block_tokens - 1)
        return counted(self.targets_of(piece))

    def targets_of(self, piece: Slice) -> np.ndarray:
        """Return the targets in a slice of tokens or packed documents, [sequences, length]; negative: do not count."""
        if self.layout is not None:
            return self.layout.column(read_slice(piece), self.layout.targets)
        _, targets = split(read_slice(piece))
        return targets.reshape(-1, self.block_tokens)[:, 1:]

    def eval_chunks(self, config: Config, batches_per_chunk: int | None = None) -> list[tuple[Slice, int]]:
        """Return the held-out batches that `config.eval.batches` asks for; see `slices.eval_chunks`."""
        return eval_chunks(self.held_out, config.eval.batches, config.tokens_per_batch, batches_per_chunk)
