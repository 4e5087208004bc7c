"""The HTTP server of a served model, on the gateway's event loop: OpenAI's interface, probes and metrics."""

from __future__ import annotations

import asyncio
import importlib.resources
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from planetary.core.errors import ResourceError, UserError
from planetary.net.addresses import is_local_name
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http import answers
from planetary.runs.serve.http.chat_renderer import ChatRenderer
from planetary.runs.serve.http.generation import Choice, ChoicePiece, Generation, embedding_of
from planetary.runs.serve.http.grammar import Grammars
from planetary.runs.serve.http.keys import KeyFile
from planetary.runs.serve.http.metrics import ServingMetrics
from planetary.runs.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    Prompt,
    TokenizeRequest,
    request_of,
    template_names,
)
from planetary.runs.serve.http.service import Service
from planetary.runs.serve.http.text_assembly import TextPiece
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.scheduling.constraint import Constraint
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.web.api_errors import ApiError, wrong
from planetary.web.browser_guard import BrowserGuard, origins_of
from planetary.web.http_server import WebServer
from planetary.web.request_bodies import read_body

log = logging.getLogger(__name__)

MOST_BODY = 16 << 20  # bytes
RETRY_S = 1
LONG_TEXT = 1 << 14
"""Bytes or tokens from which on a text is encoded or decoded in a thread. 16 MiB take seconds."""
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint:
    """A running server.

    Attributes:
        url: of the root.
    """

    def __init__(self, service: Service, options: ServeConfig) -> None:
        """Raises `UserError` for unreadable keys or template, or an address without needed keys."""
        self._service, self._options = service, options
        self._keys = KeyFile(Path(options.keys)) if options.keys else None
        if self._keys is None and not is_local_name(options.host):
            raise UserError(
                f"serve.host = {options.host!r} admits every client that reaches it: name a file of keys (serve.keys, "
                "--keys), or stay on 127.0.0.1"
            )
        self._origins = origins_of(options.origins, "serve.origins")
        self._metrics = ServingMetrics(service)
        self._chats = ChatRenderer()
        self._grammars: tuple[ServedModel, Grammars] | None = None
        self.url = ""
        self._server: WebServer | None = None

    @staticmethod
    async def start(service: Service, options: ServeConfig) -> Endpoint:
        """Listen. Raises `UserError` as the constructor, `ResourceError` if the port is taken."""
        endpoint = Endpoint(service, options)
        await endpoint.listen()
        return endpoint

    async def listen(self) -> None:
        """Begin to answer; see `start`."""
        options = self._options
        self._server = await WebServer.start(self._guarded(), options.host, options.port, what="the model's endpoint")
        self.url = self._server.url

    async def close(self) -> None:
        """Stop listening; answers under way get a moment."""
        if self._server is not None:
            await self._server.close()
        await self._chats.close()

    def app(self) -> Starlette:
        """Return the application."""
        guarded = {
            ("/v1/models", "GET"): self._models,
            ("/v1/models/{name:path}", "GET"): self._one_model,
            ("/v1/completions", "POST"): self._completions,
            ("/v1/chat/completions", "POST"): self._chat,
            ("/v1/embeddings", "POST"): self._embeddings,
            ("/tokenize", "POST"): self._tokenize,
            ("/detokenize", "POST"): self._detokenize,
            ("/tokenizer_info", "GET"): self._tokenizer_info,
            ("/metrics", "GET"): self._metrics_text,
        }
        open_to_all = {
            ("/", "GET"): self._page,
            ("/live", "GET"): self._live,
            ("/health", "GET"): self._ready,
            ("/ready", "GET"): self._ready,
        }
        routes = [
            *(Route(path, self._answered(handler), methods=[method]) for (path, method), handler in guarded.items()),
            *(
                Route(path, self._answered(handler, guarded=False), methods=[method])
                for (path, method), handler in open_to_all.items()
            ),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})

    def _guarded(self) -> BrowserGuard:
        """Return the application as served on a separate port."""
        options = self._options
        return BrowserGuard(
            self.app(), options.host, loopback=True, origins=self._origins, any_host=self._keys is not None
        )

    # --- around every request ---------------------------------------------------------------------------------

    def _answered(self, handler: Handler, *, guarded: bool = True) -> Handler:
        async def answer(request: Request) -> Response:
            number = request.headers.get("x-request-id") or f"req-{secrets.token_hex(12)}"
            request.state.number = number
            try:
                if guarded:
                    request.state.user = self._user(request)
                response = await handler(request)
            except ApiError as error:
                response = error.response()
            except UserError as error:  # such as a tokenizer's, of a text or tokens it cannot take
                response = ApiError(400, str(error), code="invalid_value").response()
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                response = ApiError(
                    500, "an internal error; the gateway's log has it", code="internal_error"
                ).response()
            response.headers["x-request-id"] = number[:128]
            return response

        return answer

    def _user(self, request: Request) -> str:
        """Return whose request it is. Raises `ApiError` without a key that is known."""
        if self._keys is None:
            return ""
        user = self._keys.user(_bearer(request))
        if user is None:
            raise ApiError(
                401,
                "a key is needed: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return user

    def _loaded(self) -> ServedModel:
        model = self._service.model
        if model is None or self._service.shape is None:
            raise ApiError(503, f"not ready yet: {self._service.why_not_ready}", code="not_ready", headers=_retry())
        return model

    def _named(self, name: str | None) -> ServedModel:
        """Return the model a request asks for. Raises `ApiError`."""
        model = self._loaded()
        if name is not None and name != model.name:
            raise ApiError(
                404, f"the model {name!r} is not served; there is {model.name!r}", param="model", code="model_not_found"
            )
        return model

    # --- models, texts as tokens, probes ----------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _one_model(self, request: Request) -> Response:
        self._named(request.path_params["name"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        model, shape = self._loaded(), self._service.shape
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "planetary",
            "max_model_len": 0 if shape is None else shape.window,
            "version": model.version,
            "has_chat_template": bool(model.chat_template),
        }

    async def _tokenize(self, request: Request) -> Response:
        body = request_of(await read_body(request, MOST_BODY), TokenizeRequest)
        model = self._named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "expected either a prompt or messages")
        text = body.prompt if body.prompt is not None else await self._chat_text(model, body)
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        tokens = await _encoded(model, text, special=special)
        shape = self._service.shape
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": 0 if shape is None else shape.window})

    async def _detokenize(self, request: Request) -> Response:
        body = request_of(await read_body(request, MOST_BODY), DetokenizeRequest)
        model = self._named(body.model)
        _known(body.tokens, model, "tokens")
        text = await _apart(len(body.tokens), lambda: model.tokenizer.decode(body.tokens))
        return _json({"prompt": text.decode(errors="replace")})

    async def _tokenizer_info(self, request: Request) -> Response:
        """Return what evaluation harnesses ask for before they use `/tokenize`, as vLLM has it."""
        model, shape = self._loaded(), self._service.shape
        names: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        if model.ends:
            names["eos_token"] = model.tokenizer.token_bytes(min(model.ends)).decode(errors="replace")
        return _json(
            {
                **names,
                **dict(model.special_tokens),
                "tokenizer_class": type(model.tokenizer).__name__,
                "chat_template": model.chat_template or None,
                "model_max_length": 0 if shape is None else shape.window,
            }
        )

    async def _page(self, request: Request) -> Response:
        """Return the chat page, which asks for a key where one is needed."""
        page = importlib.resources.files("planetary.runs.serve.http").joinpath("chat_page.html").read_bytes()
        return Response(page, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def _live(self, request: Request) -> Response:
        """Answer while the gateway does, for an orchestrator that would otherwise end it while the model is loaded."""
        return _json({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Answer 200 while requests are answered, as vLLM's and llama.cpp's `/health` does."""
        if self._service.is_ready:
            return _json({"status": "ready"})
        return ApiError(503, self._service.why_not_ready, code="not_ready", headers=_retry()).response()

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    # --- completions ------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        body = request_of(await read_body(request, MOST_BODY), CompletionRequest)
        model = self._named(body.model)
        given = [
            await _prompt_text(prompt, model, "prompt", special=body.add_special_tokens)
            for prompt in _prompts(body.prompt, "prompt")
        ]
        prompts = [one.tokens for one in given]
        most = 16 if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise wrong("max_tokens", "expected 1 or more, unless the prompt is echoed")
        likeliest = body.logprobs or 0
        scores = body.echo and body.logprobs is not None
        make = await self._constraints(model, body)
        texts = self._texts(
            request, body, model, prompts, most=max(most, 1), likeliest=likeliest, scores=scores, make=make
        )
        generation = self._generation(request, body, model, texts)
        number = f"cmpl-{secrets.token_hex(12)}"
        asked = [given[i // body.choices] for i in range(len(texts))]
        echoes = [one.text if body.echo else "" for one in asked]
        only_prompt = most == 0
        logprobs_of = [
            answers.CompletionLogprobs(model.tokenizer, likeliest, 0, unwritten=one.added, lost=one.lost)
            if scores
            else answers.CompletionLogprobs(model.tokenizer, likeliest, len(echo))
            for one, echo in zip(asked, echoes, strict=True)
        ]

        def choice(piece: ChoicePiece, prefix: str) -> dict[str, Any]:
            text = prefix + piece.piece.text
            logprobs = None if body.logprobs is None else logprobs_of[piece.choice].of(piece.piece.tokens)
            return {
                "index": piece.choice,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": piece.reason or None,
            }

        prompt_tokens = sum(len(prompt) for prompt in prompts)
        if body.stream:
            if only_prompt:
                raise wrong("stream", "a prompt alone is not streamed")
            left = list(echoes)

            def line(piece: ChoicePiece) -> dict[str, Any]:
                prefix, left[piece.choice] = left[piece.choice], ""
                return {**answers.envelope("text_completion", number, model.name), "choices": [choice(piece, prefix)]}

            end = {**answers.envelope("text_completion", number, model.name), "choices": []}
            return await self._streamed(body, generation, line, end, prompt_tokens)
        found = await generation.whole()
        if only_prompt:
            found = [_prompt_only(one, text, echo) for one, text, echo in zip(found, texts, echoes, strict=True)]
            echoes = ["" for _ in echoes]
        choices = [choice(ChoicePiece(i, _piece_of(one), one.reason), echoes[i]) for i, one in enumerate(found)]
        used = answers.usage(prompt_tokens, 0 if only_prompt else generation.generated)
        return _json({**answers.envelope("text_completion", number, model.name), "choices": choices, "usage": used})

    # --- chat -------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        body = request_of(await read_body(request, MOST_BODY), ChatRequest)
        model = self._named(body.model)
        text = await self._chat_text(model, body)
        prompt = await _encoded(model, text, special=body.add_special_tokens)
        if not prompt:
            raise wrong("messages", "the chat is an empty text")
        if body.top_logprobs and not body.logprobs:
            raise wrong("top_logprobs", "needs logprobs to be true")
        shape = self._service.shape
        most = body.max_completion_tokens or body.max_tokens or (shape.window if shape is not None else 1)
        make = await self._constraints(model, body)
        texts = self._texts(request, body, model, [prompt], most=most, likeliest=body.top_logprobs or 0, make=make)
        generation = self._generation(request, body, model, texts)
        number = f"chatcmpl-{secrets.token_hex(12)}"

        def logprobs(tokens: Any) -> dict[str, Any] | None:
            return answers.chat_logprobs(model.tokenizer, tokens) if body.logprobs else None

        if body.stream:
            begun: set[int] = set()

            def line(piece: ChoicePiece) -> dict[str, Any]:
                delta: dict[str, Any] = {} if piece.choice in begun else {"role": "assistant"}
                begun.add(piece.choice)
                choice = {
                    "index": piece.choice,
                    "delta": {**delta, "content": piece.piece.text},
                    "logprobs": logprobs(piece.piece.tokens),
                    "finish_reason": piece.reason or None,
                }
                return {**answers.envelope("chat.completion.chunk", number, model.name), "choices": [choice]}

            end = {**answers.envelope("chat.completion.chunk", number, model.name), "choices": []}
            return await self._streamed(body, generation, line, end, len(prompt))
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": logprobs(one.tokens),
                "finish_reason": one.reason,
            }
            for index, one in enumerate(await generation.whole())
        ]
        used = answers.usage(len(prompt), generation.generated)
        return _json({**answers.envelope("chat.completion", number, model.name), "choices": choices, "usage": used})

    async def _chat_text(self, model: ServedModel, body: ChatRequest | TokenizeRequest) -> str:
        """Return the prompt of a chat. Raises `ApiError`."""
        if not model.chat_template:
            raise ApiError(
                400,
                f"the model {model.name!r} has no chat template: use /v1/completions, or start the server with "
                "--chat-template FILE",
                code="no_chat_template",
            )
        names = {**dict(model.special_tokens), **template_names(body)}
        try:
            return await self._chats.text(model.chat_template, names)
        except UserError as error:
            raise ApiError(
                400,
                f"the chat template of the model {model.name!r}: {error}",
                param="messages",
                code="chat_template_failed",
            ) from None
        except ResourceError as error:
            raise ApiError(503, str(error), code="unavailable", headers=_retry()) from None

    # --- embeddings -------------------------------------------------------------------------------------------

    async def _embeddings(self, request: Request) -> Response:
        """Answer with the mean of the last hidden states of each text's tokens, scaled to length 1."""
        body = request_of(await read_body(request, MOST_BODY), EmbeddingRequest)
        model, shape = self._named(body.model), self._service.shape
        assert shape is not None
        if not shape.hidden:
            raise ApiError(
                400,
                f"the model {model.name!r} gives no embeddings: only its logits are known, not its hidden states",
                param="model",
                code="no_embeddings",
            )
        dimensions = body.dimensions or shape.hidden
        if dimensions > shape.hidden:
            raise wrong("dimensions", f"expected at most {shape.hidden}, the width of the model, found {dimensions}")
        prompts = [(await _prompt_text(prompt, model, "input")).tokens for prompt in _prompts(body.input, "input")]
        texts = [
            SequenceRequest(
                number=self._service.next_sequence(),
                user=request.state.user or body.user or "",
                prompt=tuple(prompt),
                most=1,
                embeds=True,
            )
            for prompt in prompts
        ]
        self._check_room(texts, "input")
        for text in texts:
            self._metrics.prompt_tokens.inc(len(text.prompt))
        means = await asyncio.gather(*(embedding_of(self._service, text) for text in texts))
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": answers.embedding(mean, dimensions, body.encoding_format),
            }
            for index, mean in enumerate(means)
        ]
        count = sum(len(prompt) for prompt in prompts)
        return _json(
            {
                "object": "list",
                "data": data,
                "model": model.name,
                "usage": {"prompt_tokens": count, "total_tokens": count},
            }
        )

    # --- both -------------------------------------------------------------------------------------------------

    async def _constraints(self, model: ServedModel, body: GenerationRequest) -> Callable[[], Constraint] | None:
        """Return the maker of constraints for a request's texts; None: there are none. Raises `ApiError`."""
        if body.response_format is None:
            return None
        if self._grammars is None or self._grammars[0].tokenizer is not model.tokenizer:
            self._grammars = model, Grammars(model)
        return await asyncio.to_thread(self._grammars[1].constraints, body.response_format)

    def _texts(
        self,
        request: Request,
        body: GenerationRequest,
        model: ServedModel,
        prompts: list[list[int]],
        *,
        most: int,
        likeliest: int,
        scores: bool = False,
        make: Callable[[], Constraint] | None = None,
    ) -> list[SequenceRequest]:
        """Return the texts of a request, under the constraints of `make`. Raises `ApiError` as `_check_room`."""
        shape = self._service.shape
        assert shape is not None
        texts = []
        options = body.options(model.vocabulary)
        ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.ends)
        for prompt in prompts:
            for choice in range(body.choices):
                texts.append(
                    SequenceRequest(
                        number=self._service.next_sequence(),
                        user=request.state.user or body.user or "",
                        prompt=tuple(prompt),
                        most=most,
                        options=msgspec.structs.replace(options, seed=body.seed_of(choice)),
                        ends=ends,
                        likeliest=min(likeliest, shape.candidates),
                        scores_prompt=scores,
                        constraint=None if make is None else make(),
                    )
                )
        self._check_room(texts, "messages" if isinstance(body, ChatRequest) else "prompt")
        return texts

    def _check_room(self, texts: Sequence[SequenceRequest], param: str) -> None:
        """Raise `ApiError` for prompts that are too long, or too many texts."""
        shape = self._service.shape
        assert shape is not None
        longest = max(len(text.prompt) for text in texts)
        if longest >= shape.window:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens; the context of {shape.window} has room for {shape.window - 1} and "
                "one more",
                param=param,
                code="context_length_exceeded",
            )
        if self._service.waiting + len(texts) > self._options.queue:
            raise ApiError(
                429,
                f"{self._service.waiting} texts wait already; {self._options.queue} may",
                code="queue_full",
                headers=_retry(),
            )

    def _generation(
        self, request: Request, body: GenerationRequest, model: ServedModel, texts: list[SequenceRequest]
    ) -> Generation:
        keys, key = self._keys, _bearer(request)
        allowed = (lambda: True) if keys is None else (lambda: keys.user(key) is not None)
        return Generation(
            self._service,
            self._metrics,
            texts,
            tokenizer=model.tokenizer,
            stops=body.stops,
            still_allowed=allowed,
        )

    async def _streamed(
        self,
        body: GenerationRequest,
        generation: Generation,
        line: Callable[[ChoicePiece], dict[str, Any]],
        end: dict[str, Any],
        prompt_tokens: int,
    ) -> Response:
        """Answer with server-sent events. A failure before the first piece has a separate status."""
        pieces = generation.pieces()
        first = await anext(pieces, None)

        async def events() -> AsyncIterator[bytes]:
            try:
                if first is not None:
                    yield _event({**line(first), **({"usage": None} if body.with_usage else {})})
                async for piece in pieces:
                    yield _event({**line(piece), **({"usage": None} if body.with_usage else {})})
                if body.with_usage:
                    yield _event({**end, "usage": answers.usage(prompt_tokens, generation.generated)})
                yield b"data: [DONE]\n\n"
            except ApiError as error:
                yield b"data: " + error.body() + b"\n\n"
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(events(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


def _prompts(prompt: Prompt, param: str) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts = [one for one in prompt if not isinstance(one, int)]
    if prompt and not texts:
        return [[one for one in prompt if isinstance(one, int)]]
    if not prompt or len(texts) != len(prompt) or len({type(one) for one in texts}) != 1:
        raise wrong(param, "expected a text, a list of tokens, or a list of either, none of them empty")
    return texts


@dataclass(frozen=True)
class _PromptText:
    """A prompt.

    Attributes:
        tokens: one at least.
        text: as the client wrote it, or from tokens.
        added: tokens at the beginning that `text` does not have.
        lost: bytes at the beginning of the token after them that `text` does not have: some tokenizers begin a text
            with a space.
    """

    tokens: list[int]
    text: str
    added: int = 0
    lost: bytes = b""


async def _prompt_text(prompt: str | list[int], model: ServedModel, param: str, *, special: bool = True) -> _PromptText:
    """Return a prompt of a request. Raises `ApiError`."""
    if isinstance(prompt, str):
        tokens, added = await _encoded(model, prompt, special=special), len(model.begins) if special else 0
        begins_with_space = len(tokens) > added and model.tokenizer.token_bytes(tokens[added])[:1] == b" "
        found = _PromptText(tokens, prompt, added, b" " if begins_with_space and prompt[:1] != " " else b"")
    else:
        _known(prompt, model, param)
        found = _PromptText(prompt, model.tokenizer.decode(prompt).decode(errors="replace"))
    if not found.tokens:
        raise wrong(param, "expected at least one token")
    _known(found.tokens, model, param)
    return found


async def _encoded(model: ServedModel, text: str, *, special: bool) -> list[int]:
    """Return the tokens of a text; `special`: with those that begin every text of the model. Raises `ApiError`."""
    try:
        data = text.encode()
        found = (await _apart(len(data), lambda: model.tokenizer.encode(data))).tolist()
    except (UserError, UnicodeEncodeError) as error:  # a character the tokenizer does not have
        raise wrong("prompt", str(error)) from None
    return [*model.begins, *found] if special else found


async def _apart(size: int, work: Callable[[], Any]) -> Any:
    """Return the result of work on a text of `size`: of a long one in a thread, so streams go on meanwhile."""
    return work() if size < LONG_TEXT else await asyncio.to_thread(work)


def _known(tokens: list[int], model: ServedModel, param: str) -> None:
    strange = next((token for token in tokens if not 0 <= token < model.vocabulary), None)
    if strange is not None:
        raise wrong(param, f"the model knows tokens from 0 to {model.vocabulary - 1}, found {strange}")


def _piece_of(choice: Choice) -> TextPiece:
    return TextPiece(choice.text, tuple(choice.tokens))


def _prompt_only(choice: Choice, text: SequenceRequest, echo: str) -> Choice:
    """Return a choice without the generated tokens."""
    return Choice(echo, choice.tokens[: len(text.prompt)] if text.scores_prompt else [], "length")


def _bearer(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def _event(line: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n\n"


def _json(answer: dict[str, Any]) -> Response:
    return Response(json.dumps(answer, ensure_ascii=False).encode(errors="replace"), media_type="application/json")


def _retry() -> dict[str, str]:
    return {"retry-after": str(RETRY_S)}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response()
