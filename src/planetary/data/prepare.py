"""Turns sources into two token files, once: training tokens and held-out tokens, both shuffled in blocks.

A block is `sequence_length + 1` tokens: one sequence and the shifted target. Shuffling the blocks on disk lets a lease
be one contiguous range, read with one range request, while batches are still drawn from everywhere. Several sources are
mixed on disk too, in the shares that their weights say (`data.mixing`): readers of the files know nothing of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from planetary.core import decoding
from planetary.core.configuration.schema import Config
from planetary.core.errors import ResourceError, UserError
from planetary.core.example_layout import ExampleLayout
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import array_dtype, element_bytes
from planetary.data.document import Document
from planetary.data.packing import Packer
from planetary.data.pairs import pair_examples
from planetary.data.prepared_data import PreparedData
from planetary.data.recipe import FORMAT, Recipe, RecipePart, recipe_of
from planetary.data.shuffle import permutation
from planetary.data.sources import is_held_out, summary, tokens
from planetary.data.token_file import TokenFile, smallest_dtype
from planetary.data.tokenizer import CharTokenizer, JsonTokenizer, Tokenizer

MANY_PASSES = 4
"""Passes over the same text up to which more of them are worth almost as much as other text (Muennighoff et al. 2023,
arXiv:2305.16264, section 5)."""


# A block is a sequence: `sequence_length + 1` tokens.


def blocks_of_mixture(counts: Sequence[int], weights: Sequence[float], *, repeat: bool) -> list[int]:
    """Return how many blocks each source has in a mixture in which their shares are those of the weights.

    With `repeat` every block of every source is in it, and blocks of a source with few for the weight more than once;
    else no block is in it twice, and of a source with more than the weight needs some are left out.

    Args:
        counts: blocks of the sources, each at least 1.
        weights: of the sources, each above 0.
        repeat: see above.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    ratios = [count / share for count, share in zip(counts, shares, strict=True)]
    size = max(ratios) if repeat else min(ratios)
    found = [max(1, round(share * size)) for share in shares]
    # Rounding must neither lose a block of the deciding source nor use a missing one.
    return [max(n, c) if repeat else min(n, c) for n, c in zip(found, counts, strict=True)]


def chosen_blocks(count: int, wanted: int, *seed: int) -> np.ndarray:
    """Return which of a source's blocks are in a mixture, int64 [wanted].

    Each of the `count` blocks is there as often as any other or once more; which ones are is drawn from `seed`.
    """
    whole, rest = divmod(wanted, count)
    drawn = permutation(count, *seed)[:rest] if rest else np.empty(0, np.int64)
    return np.concatenate([np.tile(np.arange(count), whole), drawn])


class FlatWriter:
    """A token file under construction; a context manager.

    Attributes:
        path: of the file.
        count: tokens written so far.
        largest: largest token written so far; -1 before the first.
    """

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        """Open `path` for tokens, or examples, of element type `dtype`."""
        self.path = path
        self.count = 0
        self.largest = -1
        self._dtype = dtype
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens [n], which must fit the element type."""
        if tokens.size:
            if tokens.dtype.kind != "V":
                self.largest = max(self.largest, int(tokens.max()), ~int(tokens.min()))
            self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
            self.count += tokens.size

    def tokens(self) -> np.ndarray:
        """Return all tokens of the closed file [count], mapped read-only."""
        if self.count == 0:
            return np.empty(0, self._dtype)
        return np.memmap(self.path, self._dtype, mode="r")


log = logging.getLogger(__name__)

HELD_OUT_SEED = 0x6865_6C64  # not the run's seed: runs with different seeds are measured on the same batches
SHUFFLE_BYTES = 32 << 20  # copied at a time
_FLAT_FILES = ("train.flat", "held_out.flat")


class Preparation(msgspec.Struct, frozen=True):
    """The contents of `prepared.json` in the cache; the file's presence marks the folder as complete."""

    format: int
    key: str
    source: str
    source_digest: str
    tokenizer_digest: str
    vocab_size: int
    block_tokens: int
    dtype: str
    documents: int  # 1: the held-out part is the end of one long text
    train_count: int
    train_digest: str
    held_out_count: int
    held_out_digest: str
    target_share: float  # fraction of the training tokens that are targets
    layout: ExampleLayout | None = None  # form of an example; None: tokens


class _Flat(msgspec.Struct, frozen=True):
    """The tokens of all sources, one after the other, each from the start of a block on.

    `train` and `held_out` have an entry for each source: the whole blocks with a target, int64 [n], counted on from the
    first file to the second.
    """

    tokens: tuple[np.ndarray, np.ndarray]  # open files: training documents, and held-out ones
    read: tuple[int, ...]  # tokens of each source
    train: tuple[np.ndarray, ...]
    held_out: tuple[np.ndarray, ...]
    vocab_size: int
    documents: int
    layout: ExampleLayout | None


def build(config: Config, recipe: Recipe, folder: Path) -> Preparation:
    """Write the files, and last `prepared.json`, into `folder`, and return the latter's contents.

    Raises:
        UserError: a source or a token is not usable, or there is no whole sequence to train on or to hold out.
        ResourceError: there is no room for the files.
        OSError: writing failed.
    """
    block_tokens = config.block_tokens
    tokenizer = recipe.tokenizer
    if recipe.characters:
        texts = (document.text for part in recipe.parts for document in part.documents())
        tokenizer = CharTokenizer.of_texts(texts, recipe.names)
        tokenizer.save(folder)
    flat = _write_flat(config, recipe, tokenizer, folder)
    splits = [_split(config, recipe, index, flat) for index in range(len(recipe.parts))]
    orders = {
        "train": _train_order(config, recipe, [train for train, _ in splits]),
        "held_out": _held_out_order(recipe, [held for _, held in splits]),
    }
    layout = flat.layout
    dtype = smallest_dtype(flat.vocab_size, marked=recipe.has_chats) if layout is None else layout.dtype
    _check_room(folder, sum(order.size for order in orders.values()) * block_tokens * element_bytes(dtype))
    digests = {
        name: _write_blocks(flat.tokens, order, block_tokens, folder / f"{name}.{dtype}", array_dtype(dtype))
        for name, order in orders.items()
    }
    for name in _FLAT_FILES:
        (folder / name).unlink()
    preparation = Preparation(
        format=FORMAT,
        key=recipe.key,
        source=recipe.names,
        source_digest=recipe.parts[0].contents.digest,
        tokenizer_digest=tokenizer.digest if tokenizer else "",
        vocab_size=flat.vocab_size,
        block_tokens=block_tokens,
        dtype=dtype,
        documents=flat.documents,
        train_count=orders["train"].size * block_tokens,
        train_digest=digests["train"],
        held_out_count=orders["held_out"].size * block_tokens,
        held_out_digest=digests["held_out"],
        target_share=_target_share(folder / f"train.{dtype}", array_dtype(dtype), layout),
        layout=layout,
    )
    with (folder / "prepared.json").open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(preparation), indent=2))
        file.flush()
        os.fsync(file.fileno())
    return preparation


def _target_share(path: Path, dtype: np.dtype, layout: ExampleLayout | None) -> float:
    if layout is not None and layout.targets:
        examples = np.memmap(path, np.uint8, mode="r")
        places = examples.size // layout.nbytes * layout.columns[0].size
        size = max(1, SHUFFLE_BYTES // layout.nbytes) * layout.nbytes
        return sum(layout.counted(examples[at : at + size]) for at in range(0, examples.size, size)) / places
    return 1.0 if dtype.kind in "uV" else float(np.mean(np.memmap(path, dtype, mode="r") >= 0))


def _train_order(config: Config, recipe: Recipe, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the blocks of the training file in file order, int64."""
    wanted = blocks_of_mixture([part.size for part in parts], recipe.weights, repeat=True)
    if len(parts) > 1:
        _say_shares(recipe, parts, wanted)
    seed = config.run.seed
    chosen = [part[chosen_blocks(part.size, n, seed, i)] for i, (part, n) in enumerate(zip(parts, wanted, strict=True))]
    blocks = np.concatenate(chosen)
    return blocks if config.data.sampling != "random" else blocks[permutation(blocks.size, seed)]


def _held_out_order(recipe: Recipe, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the blocks of the held-out file in file order, int64: no block twice, as that would measure nothing."""
    wanted = blocks_of_mixture([part.size for part in parts], recipe.weights, repeat=False)
    chosen = [
        part if n == part.size else part[permutation(part.size, HELD_OUT_SEED, i)[:n]]
        for i, (part, n) in enumerate(zip(parts, wanted, strict=True))
    ]
    blocks = np.concatenate(chosen)
    return blocks[permutation(blocks.size, HELD_OUT_SEED)]


def _say_shares(recipe: Recipe, parts: Sequence[np.ndarray], wanted: Sequence[int]) -> None:
    for source, part, count in zip(recipe.parts, parts, wanted, strict=True):
        passes = count / part.size
        said = (
            f"{source.source}: {count / sum(wanted):.1%} of the training sequences, each {passes:.2f} times in a pass"
        )
        if passes > MANY_PASSES:
            log.warning(
                "%s; above about %d times more of the same teaches little: lower its weight, or add text",
                said,
                MANY_PASSES,
            )
        else:
            log.info("%s", said)


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ResourceError(
            f"the prepared data takes {nbytes / 1e9:.3g} GB, and {folder.parent} has {free / 1e9:.3g} GB free: make "
            "room, choose another --cache, or give weights that are nearer to the sources' sizes"
        )


def _split(config: Config, recipe: Recipe, index: int, flat: _Flat) -> tuple[np.ndarray, np.ndarray]:
    """Return the blocks of a source trained on, and those held out."""
    source, train, held = recipe.parts[index], flat.train[index], flat.held_out[index]
    least = recipe.least_of(index)
    if source.has_many and held.size < max(1, least) and train.size:
        log.warning(
            "%s: its %s are too few to hold %g of them out whole; the end of the last ones is held out",
            source.source,
            "documents" if source.columns is None else "examples",
            config.data.held_out_fraction,
        )
    if not source.has_many or held.size < max(1, least):
        # One long text: the last blocks are held out, at least one, and never more than half for the sake of a whole
        # batch.
        if flat.layout is not None:
            train = np.concatenate([train, held])  # no example is lost
        count = max(1, round(train.size * config.data.held_out_fraction), min(least, train.size // 2))
        train, held = train[:-count], train[-count:]
    if not flat.read[index]:
        raise UserError(f"the training data {source.source} is empty: expected text or tokens")
    for name, part in (("train", train), ("held-out", held)):
        if part.size < 1:
            if flat.layout is not None:
                raise UserError(
                    f"the {name} part of {source.source} has no example, of {flat.read[index]} in all: give more data, "
                    "or change data.held_out_fraction"
                )
            raise UserError(
                f"the {name} part of {source.source} has fewer than {config.block_tokens} tokens "
                f"(sequence_length + 1), of {flat.read[index]} in all: give more data, change data.held_out_fraction, "
                "or lower train.sequence_length"
            )
    return train, held


def _write_flat(config: Config, recipe: Recipe, tokenizer: Tokenizer | None, folder: Path) -> _Flat:
    """Write all tokens in the order of the sources."""
    block_tokens, layout = config.block_tokens, recipe.layout(tokenizer, config.train.sequence_length)
    kinds = [part.dtype for part in recipe.parts if part.dtype is not None]
    if layout is not None:
        dtype = array_dtype(layout.dtype)
    elif kinds:
        dtype = max(map(host_dtype, kinds), key=lambda kind: kind.itemsize)
    else:
        dtype = host_dtype(smallest_dtype(_size(tokenizer), marked=recipe.has_chats))
    read, ends, count = [], ([], []), 0
    with FlatWriter(folder / _FLAT_FILES[0], dtype) as train, FlatWriter(folder / _FLAT_FILES[1], dtype) as held:
        for part in recipe.parts:
            before = [writer.count for writer in (train, held)]
            count += _write_source(config, part, tokenizer, layout, train, held)
            written = [writer.count - start for writer, start in zip((train, held), before, strict=True)]
            read.append(sum(written))
            for writer, start, own, found in zip((train, held), before, written, ends, strict=True):
                found.append(np.arange(start // block_tokens, start // block_tokens + own // block_tokens))
                if len(recipe.parts) > 1:  # the next one begins with a whole block
                    writer.write(np.zeros(-writer.count % block_tokens, dtype))
    largest = max(train.largest, held.largest)
    vocab_size = tokenizer.vocab_size if tokenizer else largest + 1
    if largest >= vocab_size:
        raise UserError(
            f"{recipe.names} contains token {largest}, but the tokenizer {config.data.tokenizer} only has ids "
            f"below {vocab_size}: they do not belong together"
        )
    after = -(-train.count // block_tokens)  # blocks of the second file are counted on from here
    files = train.tokens(), held.tokens()
    if recipe.has_chats and layout is None:
        ends = tuple(
            [_with_targets(tokens, blocks, block_tokens) for blocks in some]
            for tokens, some in zip(files, ends, strict=True)
        )
    held_out = tuple(after + blocks for blocks in ends[1])
    return _Flat(files, tuple(read), tuple(ends[0]), held_out, vocab_size, count, layout)


def _with_targets(tokens: np.ndarray, blocks: np.ndarray, block_tokens: int) -> np.ndarray:
    """Return the blocks of a file that have a target: the others teach nothing, and a mean over no target is NaN."""
    return np.array([one for one in blocks if (tokens[one * block_tokens :][1:block_tokens] >= 0).any()], np.int64)


def _size(tokenizer: Tokenizer | None) -> int:
    assert tokenizer is not None, "only tokens need none"
    return tokenizer.vocab_size


def _write_source(  # noqa: PLR0917 - the two files, and how to write them
    config: Config,
    part: RecipePart,
    tokenizer: Tokenizer | None,
    layout: ExampleLayout | None,
    train: FlatWriter,
    held: FlatWriter,
) -> int:
    """Write the tokens, or examples, of a source and return the number of documents."""
    if part.columns is not None:
        for examples in part.columns.examples():
            is_held = np.array(
                [is_held_out(hashlib.sha256(one).hexdigest(), config.data.held_out_fraction) for one in examples]
            )
            for out, chosen in ((train, ~is_held), (held, is_held)):
                out.write(_as_elements(examples[chosen], part.columns.layout))
        return part.columns.count
    if layout is not None and config.data.has_pairs:
        pairs = 0
        for name, example in pair_examples(encoded(part, tokenizer), layout, part.source):
            is_held = is_held_out(name, config.data.held_out_fraction)
            (held if is_held else train).write(_as_elements(example, layout))
            pairs += 1
        return pairs
    if layout is not None:
        return _write_packed(config, part, tokenizer, layout, {False: train, True: held})
    count, many = 0, part.contents.has_many_documents
    for document, piece in encoded(part, tokenizer):
        is_held = document is not None and many and is_held_out(document.name, config.data.held_out_fraction)
        (held if is_held else train).write(piece)
        count += document is not None and document.last
    return count if part.dtype is None else 1


def encoded(part: RecipePart, tokenizer: Tokenizer | None) -> Iterator[tuple[Document | None, np.ndarray]]:
    """Yield the tokens of a source in pieces [n], in order, each with its document; None: the source has tokens.

    Tokens that are no targets are complements.
    """
    if part.dtype is not None:
        yield from ((None, piece) for piece in tokens(part.contents))
        return
    assert tokenizer is not None
    end = tokenizer.end_of_document if part.contents.has_many_documents else None
    for document in part.documents():
        if document.trained is not None:  # a chat ends as its template says
            assert isinstance(tokenizer, JsonTokenizer)
            yield document, tokenizer.encode_marked(document)
            continue
        ids = tokenizer.encode(document.text)
        yield document, ids if end is None or not document.last else np.append(ids, np.uint32(end))


def _as_elements(examples: np.ndarray, layout: ExampleLayout) -> np.ndarray:
    return examples.reshape(-1).view(array_dtype(layout.dtype))


def _write_packed(
    config: Config,
    part: RecipePart,
    tokenizer: Tokenizer | None,
    layout: ExampleLayout,
    files: Mapping[bool, FlatWriter],
) -> int:
    """Write the packed documents of a source; return how many documents there are."""
    packers = {is_held: Packer(layout) for is_held in files}
    count, pieces = 0, []
    for document, piece in encoded(part, tokenizer):
        assert document is not None, "tokens are not packed"
        pieces.append(piece)
        if not document.last:
            continue
        is_held = part.has_many and is_held_out(document.name, config.data.held_out_fraction)
        for example in packers[is_held].add(np.concatenate(pieces)):
            files[is_held].write(_as_elements(example, layout))
        count, pieces = count + 1, []
    for is_held, packer in packers.items():
        for example in packer.close():
            files[is_held].write(_as_elements(example, layout))
    return count


def _write_blocks(
    files: tuple[np.ndarray, np.ndarray], order: np.ndarray, block_tokens: int, path: Path, dtype: np.dtype
) -> str:
    """Write blocks of the two flat files in `order` as `dtype`; return the sha256 of the file."""
    first, second = (tokens[: tokens.size // block_tokens * block_tokens].reshape(-1, block_tokens) for tokens in files)
    after = -(-files[0].size // block_tokens)
    step = max(1, SHUFFLE_BYTES // (block_tokens * dtype.itemsize))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for start in range(0, order.size, step):
            wanted = order[start : start + step]
            part = np.empty((wanted.size, block_tokens), dtype)
            is_first = wanted < after
            part[is_first] = first[wanted[is_first]]
            part[~is_first] = second[wanted[~is_first] - after]
            raw = part.tobytes()
            digest.update(raw)
            file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


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
    cache = Path(cache_dir).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    recipe = recipe_of(config, cache)
    folder = cache / recipe.key[:32]
    preparation = _load(folder, recipe.key)
    if preparation is None:
        with _building(folder) as temporary:
            preparation = build(config, recipe, temporary)
    tokenizer = CharTokenizer.load(folder) if recipe.characters else recipe.tokenizer
    notes = tuple(
        part.columns.summary
        if part.columns is not None
        else summary(part.contents, part.source, part.documents, _shower(tokenizer))
        for part in recipe.parts
    )
    if recipe.packing:
        notes += (
            f"{preparation.documents} documents are packed into {preparation.train_count} training sequences, of whose "
            f"places {preparation.target_share:.1%} are targets",
        )
    elif preparation.layout is not None and recipe.has_chats:
        notes += (f"{preparation.documents} pairs of answers, of which {preparation.train_count} are trained on",)
    elif recipe.has_chats:
        notes += (f"of the training tokens {preparation.target_share:.1%} are targets: what the assistant says",)
    for note in notes:
        log.info("%s", note)
    return PreparedData(
        train=_token_file(folder, "train", preparation),
        held_out=_token_file(folder, "held_out", preparation),
        vocab_size=preparation.vocab_size,
        tokenizer=tokenizer,
        block_tokens=config.block_tokens,
        key=recipe.key,
        folder=folder,
        documents=preparation.documents,
        layout=preparation.layout,
        notes=notes,
    )


def _shower(tokenizer: Tokenizer | None) -> Callable[[np.ndarray], str]:
    """Return the function that shows tokens to people: as text where it is known, else as numbers."""
    if tokenizer is None:
        return lambda ids: " ".join(map(str, ids[:20]))
    return lambda ids: tokenizer.decode(ids.tolist()).decode("utf-8", "replace")


# --- the cache ----------------------------------------------------------------------------------------------


def _token_file(folder: Path, which: str, preparation: Preparation) -> TokenFile:
    count = preparation.train_count if which == "train" else preparation.held_out_count
    digest = preparation.train_digest if which == "train" else preparation.held_out_digest
    return TokenFile(str(folder / f"{which}.{preparation.dtype}"), preparation.dtype, count, digest)


def _load(folder: Path, key: str) -> Preparation | None:
    """Return a prepared folder's description when it is complete and intact; remove it when it is damaged."""
    try:
        preparation = decoding.from_json((folder / "prepared.json").read_bytes(), Preparation)
    except (OSError, msgspec.DecodeError):
        preparation = None
    if preparation is not None and preparation.key == key:
        files = [_token_file(folder, which, preparation) for which in ("train", "held_out")]
        if all(_file_digest(Path(file.url)) == file.digest for file in files):
            return preparation
    if folder.exists():
        shutil.rmtree(folder)  # it is a cache: a damaged folder is made again
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
