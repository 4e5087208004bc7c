"""Answers in OpenAI's form."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from planetary.data.tokenizer import Tokenizer
from planetary.serve.scheduling.texts import Token


def usage(prompt: int, generated: int) -> dict[str, int]:
    """Return the tokens that a request took."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def envelope(kind: str, number: str, model: str) -> dict[str, Any]:
    """Return the common fields of all answers."""
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token as text; a part of a character is the replacement character."""
    return tokenizer.decode([token]).decode(errors="replace")


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return log-probabilities as chat completions have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.decode([token])
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


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token], likeliest: int, offset: int) -> dict[str, Any]:
    """Return log-probabilities as completions have them; `offset` is where the tokens' text begins."""
    texts = [token_text(tokenizer, one.token) for one in tokens]
    offsets = [offset]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [
        None
        if one.logprob is None
        else {
            **{token_text(tokenizer, token): value for token, value in reversed(one.likeliest)},
            token_text(tokenizer, one.token): one.logprob,
        }
        for one in tokens
    ]
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": top if likeliest else None,
        "text_offset": offsets[: len(texts)],
    }


def embedding(mean: np.ndarray, dimensions: int, encoding: Literal["float", "base64"]) -> list[float] | str:
    """Return the first `dimensions` numbers of a mean, scaled to length 1: as numbers, or as float32 in Base64."""
    kept = mean[:dimensions].astype(np.float64)
    scaled = (kept / max(float(np.linalg.norm(kept)), 1e-30)).astype("<f4")
    return base64.b64encode(scaled.tobytes()).decode() if encoding == "base64" else scaled.tolist()
