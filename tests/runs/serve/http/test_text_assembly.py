from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from planetary.data.tokenizer import ByteTokenizer
from planetary.runs.serve.http.text_assembly import TextAssembly
from planetary.runs.serve.scheduling.sequences import Token


def tokens_of(data: bytes) -> list[Token]:
    return [Token(byte, -1.0) for byte in data]


def assembled(data: bytes, stops: tuple[str, ...] = (), sizes: tuple[int, ...] = (1,)) -> tuple[str, list[int], bool]:
    assembly, text, ids, place = TextAssembly(ByteTokenizer(), stops), "", [], 0
    tokens = tokens_of(data)
    while place < len(tokens):
        size = sizes[place % len(sizes)]
        piece = assembly.add(tokens[place : place + size])
        text, ids, place = text + piece.text, ids + [one.token for one in piece.tokens], place + size
        if piece.stop:
            return text, ids, True
    piece = assembly.end()
    return text + piece.text, ids + [one.token for one in piece.tokens], bool(piece.stop)


@given(st.text(), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_make_the_text(text: str, sizes: list[int]) -> None:
    assert assembled(text.encode(), sizes=tuple(sizes)) == (text, list(text.encode()), False)


@given(st.binary())
def test_bytes_that_are_no_text_end_and_lose_no_token(data: bytes) -> None:
    text, ids, _ = assembled(data)
    assert ids == list(data)
    assert text.isascii() or data.decode(errors="replace")


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_a_text_ends_before_the_first_stop(text: str, stops: list[str], sizes: list[int]) -> None:
    found, _, stopped = assembled(text.encode(), tuple(stops), tuple(sizes))
    # What is complete first counts, so the shortest beginning of the text that has a stop decides.
    ends = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    if not ends:
        assert (found, stopped) == (text, False)
    else:
        before = text[: ends[0]]
        assert (found, stopped) == (before[: min(before.find(s) for s in stops if s in before)], True)


def test_what_may_become_a_stop_is_held_back() -> None:
    assembly = TextAssembly(ByteTokenizer(), ("END",))
    assert assembly.add(tokens_of(b"xEN")).text == "x"
    assert assembly.add(tokens_of(b"y")).text == "ENy"


def test_a_character_in_parts_is_held_back_until_it_is_whole() -> None:
    assembly = TextAssembly(ByteTokenizer())
    parts = "é".encode()
    assert assembly.add(tokens_of(parts[:1])).tokens == ()
    piece = assembly.add(tokens_of(parts[1:]))
    assert (piece.text, len(piece.tokens)) == ("é", 2)
