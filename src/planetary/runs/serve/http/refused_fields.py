"""Fields of OpenAI's and vLLM's requests a served model does not honour: what they may say, and why no more.

A client sends many of them without meaning anything: null, an empty list, or the default. Null is the same as no field,
in every request; a neutral value is accepted, because leaving it out would change nothing; any other is refused by
name. The honoured fields are those of the structs in `requests`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planetary.web.api_errors import ApiError


@dataclass(frozen=True)
class Refused:
    """One field.

    Attributes:
        why: it is not honoured.
        neutral: values that change nothing.
        allows: whether another value changes nothing in this request, either; None: none does.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    allows: Callable[[Any, Mapping[str, Any]], bool] | None = None

    def is_neutral(self, value: Any, request: Mapping[str, Any]) -> bool:
        """Whether a value changes nothing in a request."""
        same = any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.neutral)
        return same or (self.allows is not None and self.allows(value, request))


def _is_text(value: Any, request: Mapping[str, Any]) -> bool:
    return isinstance(value, str)


def _is_count(value: Any, request: Mapping[str, Any]) -> bool:
    """`best_of` as large as `n`: all texts are given out."""
    return value == (request.get("n") or 1) and not isinstance(value, bool)


_SAMPLING: Mapping[str, Refused] = {
    "allowed_token_ids": Refused("logit_bias can favour tokens", ([],)),
    "bad_words": Refused("logit_bias can exclude tokens", ([],)),
    "best_of": Refused("every text is given out: use n", allows=_is_count),
    "detokenize": Refused("every answer is text", (True,)),
    "guided_choice": Refused("use response_format", ([],)),
    "guided_grammar": Refused("use response_format", ("",)),
    "guided_json": Refused("use response_format"),
    "guided_regex": Refused("use response_format", ("",)),
    "include_stop_str_in_output": Refused("a text ends before its stop", (False,)),
    "length_penalty": Refused("there is no beam search", (1, 0)),
    "min_tokens": Refused("use ignore_eos with max_tokens", (0,)),
    "priority": Refused("users get equal shares", (0,)),
    "prompt_cache_key": Refused("beginnings of texts are shared by themselves", allows=_is_text),  # only a hint
    "prompt_logprobs": Refused("use echo and logprobs of /v1/completions", (False,)),
    "repetition_penalty": Refused("use presence_penalty or frequency_penalty", (1,)),
    "return_token_ids": Refused("use logprobs, or /tokenize", (False,)),
    "return_tokens_as_token_ids": Refused("tokens are given as text", (False,)),
    "service_tier": Refused("there is one tier", ("auto", "default")),
    "skip_special_tokens": Refused("special tokens that do not end a text are part of it", (False,)),
    "spaces_between_special_tokens": Refused("a text is what its tokens say", (True,)),
    "truncate_prompt_tokens": Refused("a prompt is never cut", (0,)),
    "typical_p": Refused("use top_p, top_k or min_p", (1,)),
    "use_beam_search": Refused("tokens are drawn one by one", (False,)),
}
_COMPLETION: Mapping[str, Refused] = {**_SAMPLING, "suffix": Refused("a text is continued at its end", ("",))}


def _without_tools(value: Any, request: Mapping[str, Any]) -> bool:
    return isinstance(value, bool) and not request.get("tools")


_CHAT: Mapping[str, Refused] = {
    **_SAMPLING,
    "audio": Refused("answers are text"),
    "chat_template": Refused("the operator chooses it: start the server with --chat-template", ("",)),
    "continue_final_message": Refused("use /v1/completions to continue a text", (False,)),
    "function_call": Refused("calls in an answer are not recognised", ("none", "auto")),
    "functions": Refused("calls in an answer are not recognised", ([],)),
    "metadata": Refused("nothing is stored", ({},)),
    "mm_processor_kwargs": Refused("messages are text", ({},)),
    "modalities": Refused("answers are text", (["text"], [])),
    "parallel_tool_calls": Refused("calls in an answer are not recognised", (False,), _without_tools),
    "prediction": Refused("there is no speculative decoding"),
    "prompt_cache_retention": Refused("beginnings of texts are shared by themselves", ("in_memory", "24h")),
    "reasoning_effort": Refused("chat_template_kwargs passes names to the template", ("none",)),
    "store": Refused("nothing is stored", (False,)),
    "verbosity": Refused("say it in a message", ("medium",)),
    "web_search_options": Refused("there is no search"),
}
_TOKENIZE: Mapping[str, Refused] = {
    name: one
    for name, one in _CHAT.items()
    if name in ("chat_template", "continue_final_message", "mm_processor_kwargs")
} | {"return_token_strs": Refused("use /detokenize", (False,))}
_EMBEDDING: Mapping[str, Refused] = {
    name: one for name, one in _SAMPLING.items() if name in ("truncate_prompt_tokens", "priority")
}

REFUSED: Mapping[str, Mapping[str, Refused]] = {
    "CompletionRequest": _COMPLETION,
    "ChatRequest": _CHAT,
    "EmbeddingRequest": _EMBEDDING,
    "TokenizeRequest": _TOKENIZE,
    "DetokenizeRequest": {},
}
"""By the struct of a request: unsupported fields."""


def accepted(request: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a request that say something. Raises `ApiError` for those that cannot be honoured."""
    found = {name: value for name, value in request.items() if value is not None}
    for name, one in REFUSED[kind].items():
        if name not in found:
            continue
        if not one.is_neutral(found[name], found):
            raise ApiError(400, f"{name} is not supported here: {one.why}", param=name, code="unsupported_parameter")
        del found[name]
    return found
