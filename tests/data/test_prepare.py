from __future__ import annotations

import errno
import json
from pathlib import Path

import fsspec
import msgspec
import numpy as np
import pytest

from planetary.core.config import apply_overrides, load_config
from planetary.core.configuration.schema import Config
from planetary.core.errors import ResourceError, UserError
from planetary.data import prepare as building_module
from planetary.data import prepare as prepare_module
from planetary.data import sources
from planetary.data.formats import notations
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import read_slice
from planetary.data.tokenizer import load_tokenizer

BASE = apply_overrides(
    Config(),
    [
        "train.inner_steps=2",
        "train.batch_size=2",
        "train.sequence_length=7",
        "eval.batches=1",
        "optimizer.warmup_steps=1",
    ],
)


def config_for(source: Path | str, *overrides: str) -> Config:
    return apply_overrides(BASE, [f"data.source={source}", *overrides])


def blocks(data: PreparedData, which: str = "train") -> list[bytes]:
    file = getattr(data, which)
    return [row.tobytes() for row in read_slice(file.slice(0, file.count)).reshape(-1, data.block_tokens)]


def text_of(lines: int) -> bytes:
    return b"".join(b"%06d," % n if n % 5 else b"%06d\n" % n for n in range(lines))


# --- text ---------------------------------------------------------------------------------------------------


def test_text_is_cut_into_blocks_with_the_last_held_out(tmp_path: Path) -> None:
    text = text_of(1000)
    (tmp_path / "t.txt").write_bytes(text)
    data = prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache")
    expected = [text[i : i + 8] for i in range(0, len(text) - 7, 8)]
    held = round(len(expected) * 0.05)
    assert sorted(blocks(data)) == sorted(expected[:-held])
    assert sorted(blocks(data, "held_out")) == sorted(expected[-held:])
    assert blocks(data) != expected[:-held]  # shuffled
    assert (data.vocab_size, data.train.dtype, data.documents) == (256, "ui8", 1)


def test_preparing_twice_reads_the_cache_and_damage_is_repaired(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    config = config_for(tmp_path / "t.txt")
    first = prepare(config, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "build", None)  # calling it would fail
        second = prepare(config, tmp_path / "cache")
    assert (second.key, second.train, second.held_out) == (first.key, first.train, first.held_out)
    path = Path(first.train.url)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert prepare(config, tmp_path / "cache").train == first.train
    assert path.read_bytes() == raw
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [first.key[:32]]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("run.seed=1", False),
        ("train.sequence_length=6", False),
        ("data.held_out_fraction=0.5", False),
        ("train.batch_size=3", True),
        ("outer.momentum=0.5", True),
    ],
)
def test_the_key_is_what_the_files_depend_on(tmp_path: Path, override: str, same: bool) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    key = prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache").key
    assert (prepare(config_for(tmp_path / "t.txt", override), tmp_path / "cache").key == key) is same


def test_other_contents_are_other_data(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    key = prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache").key
    (tmp_path / "t.txt").write_bytes(text_of(1001))
    assert prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache").key != key


def test_seeds_change_the_order_but_not_what_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    one, two = (prepare(config_for(tmp_path / "t.txt", f"run.seed={n}"), tmp_path / "cache") for n in (1, 2))
    assert blocks(one) != blocks(two)
    assert sorted(blocks(one)) == sorted(blocks(two))
    assert blocks(one, "held_out") == blocks(two, "held_out")


def test_a_url_is_prepared_like_a_path(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    fsspec.filesystem("memory").pipe_file("/prepare-test/t.txt", text_of(1000))
    here = prepare(config_for(tmp_path / "t.txt"), tmp_path / "a")
    there = prepare(config_for("memory://prepare-test/t.txt"), tmp_path / "b")
    assert here.train.digest == there.train.digest


def test_pieces_of_a_long_text_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notations, "CHUNK_BYTES", 10)
    (tmp_path / "t.txt").write_bytes(b"ab\ncd\n" + b"x" * 35 + b"\nend")
    pieces = [piece.text for piece in sources.documents(sources.source_contents(str(tmp_path / "t.txt")), "text")]
    assert b"".join(pieces) == b"ab\ncd\n" + b"x" * 35 + b"\nend"
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert len(pieces) > 2


# --- documents ----------------------------------------------------------------------------------------------


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> None:
    path.write_text("".join(json.dumps({key: text, "n": 1}) + "\n\n" for text in texts), "utf-8")


def test_json_lines_are_held_out_whole(tmp_path: Path) -> None:
    texts = [f"document {n:04d} {'ä' * (n % 7)}" for n in range(400)]
    write_jsonl(tmp_path / "t.jsonl", texts, "body")
    config = config_for(tmp_path / "t.jsonl", "data.text_key=body", "data.held_out_fraction=0.2")
    data = prepare(config, tmp_path / "cache")
    assert data.documents == 400
    train, held = (b"".join(sorted(blocks(data, which))) for which in ("train", "held_out"))
    assert 0.1 < len(held) / len(train + held) < 0.3
    split = [
        sources.is_held_out(d.name, 0.2)
        for d in sources.documents(sources.source_contents(str(tmp_path / "t.jsonl")), "body")
    ]
    kept = b"".join(t.encode() + b"\0" for t, out in zip(texts, split, strict=True) if not out)
    assert len(train) == len(kept) // 8 * 8
    assert sorted(blocks(data)) == sorted(kept[i : i + 8] for i in range(0, len(train), 8))


def test_copies_of_a_text_are_on_the_same_side(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", ["same"] * 3)
    assert (
        len(
            {
                document.name
                for document in sources.documents(sources.source_contents(str(tmp_path / "t.jsonl")), "text")
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": ', "line 2 is not valid JSON"),
        ('{"body": "x"}', "line 2: expected an object with a string under 'text' .*found 'body'"),
        ('{"text": 3}', "line 2: expected an object with a string under 'text'"),
        ("[1]", "found list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=words):
        prepare(config_for(tmp_path / "t.jsonl"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_standard_library_is_listed_in_order_without_tests(tmp_path: Path) -> None:
    """The standard library is listed in order without tests and packages."""
    for name in (
        "b.py",
        "a/z.py",
        "a/test/t.py",
        "site-packages/p.py",
        "_sysconfigdata_x.py",
        "config-3/c.py",
        "n.txt",
        "empty.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else f"# {name}\r\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    assert sources.stdlib_files(tmp_path) == ["a/z.py", "b.py", "empty.py", "latin.py"]
    assert [(d.name, d.text) for d in sources.stdlib_documents(tmp_path)] == [
        ("a/z.py", b"# a/z.py\n"),
        ("b.py", b"# b.py\n"),
        ("latin.py", "# coding: latin-1\n# é\n".encode()),
    ]


def test_the_held_out_share_is_about_right_and_fixed() -> None:
    share = sum(sources.is_held_out(f"file{n}", 0.05) for n in range(4000)) / 4000
    assert 0.04 < share < 0.06
    assert sources.is_held_out("traceback.py", 0.05)
    assert not sources.is_held_out("argparse.py", 0.05)


def test_the_real_standard_library_is_enough_to_train_on(tmp_path: Path) -> None:
    data = prepare(load_config(Path(__file__).parents[2] / "examples" / "stdlib.toml"), tmp_path / "cache")
    assert data.documents > 300
    assert data.train.count > 2_000_000
    assert data.held_out.count > 50_000


# --- token files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "dtype", "width"), [("u8", "ui8", 1), ("u16", "ui16", 2), ("u32", "ui32", 4)])
def test_token_files_are_shuffled_copies(
    tmp_path: Path, suffix: str, dtype: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "CHUNK_BYTES", 13)  # pieces end within tokens
    tokens = (np.arange(900) % 251).astype(f"<u{width}")
    tokens[5] = largest = min(70_000, 256**width - 1)
    tokens.tofile(tmp_path / f"t.{suffix}")
    data = prepare(config_for(tmp_path / f"t.{suffix}"), tmp_path / "cache")
    assert data.tokenizer is None
    assert data.vocab_size == largest + 1
    assert data.train.dtype == dtype
    rows = tokens[: 900 // 8 * 8].reshape(-1, 8)
    assert sorted(blocks(data) + blocks(data, "held_out")) == sorted(row.tobytes() for row in rows)


def test_a_token_file_that_ends_within_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.u16").write_bytes(bytes(1001))
    with pytest.raises(UserError, match="1001 bytes, which is no whole number of 2-byte tokens"):
        prepare(config_for(tmp_path / "t.u16"), tmp_path / "cache")


# --- tokenizers ---------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n for n in range(300)} | {"[UNK]": 300, "<|endoftext|>": 301}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_json_is_used_with_its_separator(tmp_path: Path, tokenizer_json: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [f"w{n} w{n + 1}" for n in range(0, 298)] * 2)
    data = prepare(
        config_for(tmp_path / "t.jsonl", f"data.tokenizer={tokenizer_json}", "data.held_out_fraction=0.2"),
        tmp_path / "cache",
    )
    assert (data.vocab_size, data.train.dtype) == (302, "ui16")
    tokens = read_slice(data.train.slice(0, data.train.count))
    assert 0.3 < (tokens == 301).mean() < 0.36  # every third token ends a document
    assert data.tokenizer is not None
    assert data.tokenizer.encode(b"w7 w9").tolist() == [7, 9]
    assert data.tokenizer.decode([7, 9]) == b"w7 w9"


def test_tokens_beyond_the_given_vocabulary_are_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    np.full(900, 302, "<u2").tofile(tmp_path / "t.u16")
    with pytest.raises(UserError, match=r"contains token 302, but .* only has ids below 302"):
        prepare(config_for(tmp_path / "t.u16", f"data.tokenizer={tokenizer_json}"), tmp_path / "cache")


def test_wrong_tokenizers_are_user_errors(tmp_path: Path, tokenizer_json: Path) -> None:
    with pytest.raises(UserError, match=r'cannot read the tokenizer .*expected "byte", "char" or the path'):
        load_tokenizer(str(tmp_path / "absent.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path / "bad.json"))
    with pytest.raises(UserError, match="must be UTF-8"):
        load_tokenizer(str(tokenizer_json)).encode(b"\xff")


def test_bytes_are_their_own_tokens() -> None:
    tokenizer = load_tokenizer("byte")
    assert tokenizer.encode(b"\x00\xffa").tolist() == [0, 255, 97]
    assert tokenizer.decode([0, 255, 97]) == b"\x00\xffa"


def test_raw_tokens_of_any_name(tmp_path: Path) -> None:
    tokens = (np.arange(900) % 251).astype("<u2")
    tokens.tofile(tmp_path / "t.bin")
    data = prepare(config_for(tmp_path / "t.bin", "data.tokenizer=u16"), tmp_path / "cache")
    assert (data.tokenizer, data.vocab_size, data.train.count + data.held_out.count) == (None, 251, 896)
    for name in ("t.u32", "t.jsonl"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match=r"is for a file of 16-bit tokens, but data\.source is"):
            prepare(config_for(tmp_path / name, "data.tokenizer=u16"), tmp_path / "cache")


def test_the_tokenizer_of_qwen_has_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(100))
    with pytest.raises(UserError, match=r"published beside the model's weights .* --set data\.tokenizer="):
        prepare(config_for(tmp_path / "t.txt", "data.tokenizer=qwen"), tmp_path / "cache")
    with pytest.raises(UserError, match=r"name its path in data\.tokenizer"):
        load_tokenizer("u16")


# --- the order of the data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["fifo", "sequence"])
def test_sampling_in_order_keeps_the_sources_order(tmp_path: Path, sampling: str) -> None:
    text = text_of(1000)
    (tmp_path / "t.txt").write_bytes(text)
    config = config_for(tmp_path / "t.txt", f"data.sampling={sampling}")
    data = prepare(config, tmp_path / "cache")
    expected = [text[i : i + 8] for i in range(0, len(text) - 7, 8)]
    assert blocks(data) == expected[: len(blocks(data))]
    order = data.order(config)
    offsets = [order.locate(lease).offset for lease in range(order.per_epoch)]
    assert (offsets == sorted(offsets)) is (sampling == "fifo")
    assert prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache").key != data.key


# --- too little, missing, full ------------------------------------------------------------------------------


def test_less_than_a_sequence_is_refused_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"x" * 9)
    with pytest.raises(UserError, match=r"the train part of .* has fewer than 8 tokens"):
        prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache")
    (tmp_path / "t.txt").write_bytes(b"")
    for tokenizer in ("byte", "char"):
        with pytest.raises(UserError, match=r"t\.txt is empty: expected text or tokens"):
            prepare(config_for(tmp_path / "t.txt", f"data.tokenizer={tokenizer}"), tmp_path / "cache")


@pytest.mark.parametrize("source", ["absent.txt", "absent.u16", "absent.jsonl", "."])
def test_a_missing_source_is_a_user_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match="cannot read the training data"):
        prepare(config_for(tmp_path / source), tmp_path / "cache")


def test_an_unknown_protocol_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the training data nosuch://x/y"):
        prepare(config_for("nosuch://x/y"), tmp_path / "cache")


def test_a_full_disk_is_a_resource_error_and_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def full(*args: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "t.txt").write_bytes(text_of(1000))
    monkeypatch.setattr(building_module, "_write_blocks", full)
    with pytest.raises(ResourceError, match="No space left on device"):
        prepare(config_for(tmp_path / "t.txt"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_another_process_finished_first_is_used(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    config = config_for(tmp_path / "t.txt")
    build = prepare_module.build

    def slower_than_another(*args):
        with monkeypatch.context() as patch:
            patch.setattr(prepare_module, "build", build)
            patch.setattr("os.getpid", lambda: 1)
            prepare(config, tmp_path / "cache")
        return build(*args)

    monkeypatch.setattr(prepare_module, "build", slower_than_another)
    data = prepare(config, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert len(blocks(data)) == data.train.count // 8


def test_an_interrupted_preparation_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    config = config_for(tmp_path / "t.txt")
    data = prepare(config, tmp_path / "cache")
    (data.folder / "prepared.json").unlink()
    Path(data.train.url).write_bytes(b"half")
    again = prepare(config, tmp_path / "cache")
    assert Path(again.train.url).stat().st_size == again.train.nbytes == data.train.nbytes


def test_prepared_data_gives_leases_and_held_out_batches(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(text_of(1000))
    config = config_for(tmp_path / "t.txt", "eval.batches=3")
    data = prepare(config, tmp_path / "cache")
    order = data.order(config)
    assert order.per_epoch == data.train.count // config.tokens_per_slice
    assert read_slice(order.locate(5)).size == config.tokens_per_slice
    chunks = data.eval_chunks(config, 2)
    assert [count for _, count in chunks] == [2, 1]
    assert [piece.count for piece, _ in chunks] == [2 * 16, 16]
    decoded = msgspec.json.decode(msgspec.json.encode(order.locate(5)))
    assert decoded["url"] == data.train.url
