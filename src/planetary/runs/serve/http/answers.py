"""Answers in OpenAI's form."""

from __future__ import annotations

import base64
import codecs
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from planetary.data.tokenizer import Tokenizer
from planetary.runs.serve.scheduling.sequences import Token


def usage(prompt: int, generated: int) -> dict[str, int]:
    """Return the tokens a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def envelope(kind: str, number: str, model: str) -> dict[str, Any]:
    """Return the common fields of all answers."""
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as chat completions have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    return {
        "content": [
            {
                **entry(one.token, one.logprob or 0.0),
                "top_logprobs": [entry(token, value) for token, value in one.likeliest],
            }
            for one in tokens
        ],
        "refusal": None,
    }


def token_text(tokenizer: Tokenizer, token: int) -> str:
    r"""Return a token as completions name it: the text, or as `bytes:\xf0\x9f` where it is a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """Log-probabilities of one choice as completions have them, piece by piece."""

    def __init__(
        self, tokenizer: Tokenizer, likeliest: int, offset: int, *, unwritten: int = 0, lost: bytes = b""
    ) -> None:
        """Begin.

        Args:
            tokenizer: of the tokens.
            likeliest: how many of the likeliest tokens are wanted beside the drawn one; 0: none.
            offset: characters of the choice's text before the first token.
            unwritten: tokens at the beginning whose text is no part of the choice's.
            lost: bytes of the first written token that are no part of it, either.
        """
        self._tokenizer, self._likeliest, self._offset = tokenizer, likeliest, offset
        self._unwritten, self._lost = unwritten, lost
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return those of the next tokens. A token that goes on with a character has the character's offset."""
        names = [token_text(self._tokenizer, one.token) for one in tokens]
        top = [
            None
            if one.logprob is None
            else {
                **{token_text(self._tokenizer, token): value for token, value in reversed(one.likeliest)},
                name: one.logprob,
            }
            for name, one in zip(names, tokens, strict=True)
        ]
        return {
            "tokens": names,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": top if self._likeliest else None,
            "text_offset": [self._pass(one.token) for one in tokens],
        }

    def _pass(self, token: int) -> int:
        """Return the offset of the next token."""
        offset = self._offset
        if self._unwritten:
            self._unwritten -= 1
        else:
            data, self._lost = self._tokenizer.token_bytes(token).removeprefix(self._lost), b""
            self._offset += len(self._decoder.decode(data))
        return offset


def embedding(mean: np.ndarray, dimensions: int, encoding: Literal["float", "base64"]) -> list[float] | str:
    """Return the first `dimensions` numbers of a mean, scaled to length 1: as numbers, or as float32 in Base64."""
    kept = mean[:dimensions].astype(np.float64)
    scaled = (kept / max(float(np.linalg.norm(kept)), 1e-30)).astype("<f4")
    return base64.b64encode(scaled.tobytes()).decode() if encoding == "base64" else scaled.tolist()
