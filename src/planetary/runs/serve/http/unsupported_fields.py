"""Fields of requests in OpenAI's and vLLM's forms that are not used: which values are accepted, and why no others.

A client sends many of them without meaning anything. Null is the same as no field, in every request. A field without
effect on the text is ignored, whatever its value; the log has it once. Of a field that would change the text, neutral
values are accepted, because leaving it out would change nothing, and others are refused by name. The used fields are
those of the structs in `requests`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planetary.web.api_errors import ApiError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unsupported:
    """One field.

    Attributes:
        why: it is not used.
        neutral: values that change nothing, beside the empty list.
        allows: whether another value changes nothing in this request, either; None: none does.
        is_ignored: whether no value changes the text.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    allows: Callable[[Any, Mapping[str, Any]], bool] | None = None
    is_ignored: bool = False

    def is_neutral(self, value: Any, request: Mapping[str, Any]) -> bool:
        """Whether a value changes nothing in a request."""
        same = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)
        return self.is_ignored or value == [] or same or (self.allows is not None and self.allows(value, request))


def _is_count(value: Any, request: Mapping[str, Any]) -> bool:
    """`best_of` as large as `n`: all texts are given out."""
    return value == (request.get("n") or 1) and not isinstance(value, bool)


_STORED, _CACHED = "nothing is stored", "beginnings of texts are shared by themselves"
_IGNORED: Mapping[str, Unsupported] = {
    name: Unsupported(why, is_ignored=True)
    for name, why in (
        ("metadata", _STORED),
        ("prediction", "there is no speculative decoding"),
        ("priority", "users get equal shares"),
        ("prompt_cache_key", _CACHED),
        ("prompt_cache_options", _CACHED),
        ("prompt_cache_retention", _CACHED),
        ("safety_identifier", "users are told apart by their keys, and by user"),
        ("service_tier", "there is one tier"),
        ("store", _STORED),
    )
}
_SAMPLING: Mapping[str, Unsupported] = {
    **_IGNORED,
    "allowed_token_ids": Unsupported("logit_bias can favour tokens"),
    "bad_words": Unsupported("logit_bias can exclude tokens"),
    "best_of": Unsupported("every text is given out: use n", allows=_is_count),
    "detokenize": Unsupported("every answer is text", (True,)),
    "guided_choice": Unsupported("use response_format"),
    "guided_grammar": Unsupported("use response_format", ("",)),
    "guided_json": Unsupported("use response_format"),
    "guided_regex": Unsupported("use response_format", ("",)),
    "include_stop_str_in_output": Unsupported("a text ends before its stop", (False,)),
    "length_penalty": Unsupported("there is no beam search", (1, 0)),
    "min_tokens": Unsupported("use ignore_eos with max_tokens", (0,)),
    "prompt_logprobs": Unsupported("use echo and logprobs of /v1/completions", (False,)),
    "repetition_penalty": Unsupported("use presence_penalty or frequency_penalty", (1,)),
    "return_token_ids": Unsupported("use logprobs, or /tokenize", (False,)),
    "return_tokens_as_token_ids": Unsupported("tokens are given as text", (False,)),
    "skip_special_tokens": Unsupported("special tokens that do not end a text are part of it", (False,)),
    "spaces_between_special_tokens": Unsupported("a text is what its tokens say", (True,)),
    "truncate_prompt_tokens": Unsupported("a prompt is never cut", (0,)),
    "typical_p": Unsupported("use top_p, top_k or min_p", (1,)),
    "use_beam_search": Unsupported("tokens are drawn one by one", (False,)),
}
_COMPLETION: Mapping[str, Unsupported] = {**_SAMPLING, "suffix": Unsupported("a text is continued at its end", ("",))}


_CHAT: Mapping[str, Unsupported] = {
    **_SAMPLING,
    "audio": Unsupported("answers are text"),
    "chat_template": Unsupported("the operator chooses it: start the server with --chat-template", ("",)),
    "continue_final_message": Unsupported("use /v1/completions to continue a text", (False,)),
    "function_call": Unsupported("use tool_choice", ("none", "auto")),
    "functions": Unsupported("use tools"),
    "mm_processor_kwargs": Unsupported("messages are text", ({},)),
    "modalities": Unsupported("answers are text", (["text"],)),
    "verbosity": Unsupported("say it in a message", ("medium",)),
    "web_search_options": Unsupported("there is no search"),
}
_TOKENIZE: Mapping[str, Unsupported] = {
    name: one
    for name, one in _CHAT.items()
    if name in ("chat_template", "continue_final_message", "mm_processor_kwargs")
} | {"return_token_strs": Unsupported("use /detokenize", (False,))}
_EMBEDDING: Mapping[str, Unsupported] = {
    name: one for name, one in _SAMPLING.items() if name in {"truncate_prompt_tokens", *_IGNORED}
}

_RESPONSES: Mapping[str, Unsupported] = {
    **{name: one for name, one in _IGNORED.items() if name != "metadata"},
    "background": Unsupported("nothing is stored: an answer has to be waited for", (False,)),
    "context_management": Unsupported("a prompt is never cut"),
    "conversation": Unsupported("nothing is stored: send all items"),
    "max_tool_calls": Unsupported("there are no tools of the server", is_ignored=True),
    "previous_response_id": Unsupported("nothing is stored: send all items", ("",)),
    "prompt": Unsupported("there are no stored prompts"),
    "truncation": Unsupported("a prompt is never cut", ("disabled",)),
}
_COUNT: Mapping[str, Unsupported] = {
    "cache_control": Unsupported(_CACHED, is_ignored=True),
    "context_management": Unsupported("a prompt is never cut"),
    "mcp_servers": Unsupported("there are no tools of the server"),
    "thinking": Unsupported("the model's reasoning is a part of its text", ({"type": "disabled"},)),
}
_MESSAGES: Mapping[str, Unsupported] = {
    **_COUNT,
    "container": Unsupported("there are no tools of the server"),
    "inference_geo": Unsupported("there is one place", is_ignored=True),
    "metadata": Unsupported("users are told apart by their keys", is_ignored=True),
    "service_tier": Unsupported("there is one tier", is_ignored=True),
    "speed": Unsupported("there is one speed", is_ignored=True),
}

UNSUPPORTED: Mapping[str, Mapping[str, Unsupported]] = {
    "CompletionRequest": _COMPLETION,
    "ChatRequest": _CHAT,
    "EmbeddingRequest": _EMBEDDING,
    "TokenizeRequest": _TOKENIZE,
    "DetokenizeRequest": {},
    "ResponsesRequest": _RESPONSES,
    "MessagesRequest": _MESSAGES,
    "CountTokensRequest": _COUNT,
}
"""By the struct of a request: unsupported fields."""


def accepted(request: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a request that are used. Raises `ApiError` for those that cannot be honoured."""
    found = {name: value for name, value in request.items() if value is not None}
    for name, one in UNSUPPORTED[kind].items():
        if name not in found:
            continue
        if not one.is_neutral(found[name], found):
            raise ApiError(400, f"{name} is not supported here: {one.why}", param=name, code="unsupported_parameter")
        if one.is_ignored:
            note_ignored(name, one.why)
        del found[name]
    return found


@functools.cache
def note_ignored(name: str, why: str) -> None:
    """Log that a field of requests has no effect, once in this process."""
    log.info("requests have %s, which is ignored: %s", name, why)
