"""Turns sources into two token files, once: training tokens and held-out tokens, both shuffled in blocks.

A block is `sequence_length + 1` tokens: one sequence and its shifted target. Shuffling the blocks on disk
lets a lease be one contiguous range, read with one range request, while its batches are still drawn from
everywhere. Several sources are mixed on disk too, in the shares that their weights say (`data.mixing`): what reads
the files knows nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from planetary.core.config import Config
from planetary.core.errors import ResourceError
from planetary.core.token_slice import Slice
from planetary.data.building import Preparation, build
from planetary.data.recipe import recipe_of
from planetary.data.slices import SliceOrder, eval_chunks
from planetary.data.token_file import TokenFile
from planetary.data.tokenizer import CharTokenizer, Tokenizer


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

    def eval_chunks(self, config: Config, batches_per_chunk: int | None = None) -> list[tuple[Slice, int]]:
        """Return the held-out batches that `config.eval.batches` asks for; see `slices.eval_chunks`."""
        return eval_chunks(self.held_out, config.eval.batches, config.tokens_per_batch, batches_per_chunk)


def prepare(config: Config, cache_dir: str | Path) -> PreparedData:
    """Tokenise, split, shuffle and cache the data that `config` names; the second call only checks digests.

    Documents (standard library files, JSON lines) are held out whole, by a hash of their name or text; of one
    long text or token file, and of documents too few for that, the end is held out. Whether there is enough for the
    run is judged by `data.fitting`.

    Args:
        config: reads `data`, `train.batch_size`, `train.sequence_length` and the seed.
        cache_dir: the prepared folders are kept here under their key; made when missing.

    Raises:
        UserError: the source, the tokenizer or a token is not usable, or there is no whole sequence to train on or to
            hold out.
        ResourceError: the disk is full or fails.
    """
    recipe = recipe_of(config)
    folder = Path(cache_dir).absolute() / recipe.key[:32]
    preparation = _load(folder, recipe.key)
    if preparation is None:
        with _building(folder) as temporary:
            preparation = build(config, recipe, temporary)
    return PreparedData(
        train=_token_file(folder, "train", preparation),
        held_out=_token_file(folder, "held_out", preparation),
        vocab_size=preparation.vocab_size,
        tokenizer=CharTokenizer.load(folder) if recipe.characters else recipe.tokenizer,
        block_tokens=config.train.sequence_length + 1,
        key=recipe.key,
        folder=folder,
        documents=preparation.documents,
    )


# --- the cache ----------------------------------------------------------------------------------------------


def _token_file(folder: Path, which: str, preparation: Preparation) -> TokenFile:
    count = preparation.train_count if which == "train" else preparation.held_out_count
    digest = preparation.train_digest if which == "train" else preparation.held_out_digest
    return TokenFile(str(folder / f"{which}.{preparation.dtype}"), preparation.dtype, count, digest)


def _load(folder: Path, key: str) -> Preparation | None:
    """Return a prepared folder's description when it is complete and intact; remove it when it is damaged."""
    try:
        preparation = msgspec.json.decode((folder / "prepared.json").read_bytes(), type=Preparation)
    except (OSError, msgspec.DecodeError):
        preparation = None
    if preparation is not None and preparation.key == key:
        files = [_token_file(folder, which, preparation) for which in ("train", "held_out")]
        if all(_file_digest(Path(file.url)) == file.digest for file in files):
            return preparation
    if folder.exists():
        shutil.rmtree(folder)  # it is a cache: what is damaged is made again
    return None


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end, or vanishes on an error."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "prepared.json").is_file():  # otherwise another process was faster with the same data
                raise
    except OSError as error:
        raise ResourceError(f"writing the prepared data to {folder.parent} failed: {error}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary)
