"""The HTTP server of a served model, on the gateway's event loop: interfaces of clients, probes and metrics."""

from __future__ import annotations

import asyncio
import importlib.resources
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from planetary.core.errors import ResourceError, UserError
from planetary.core.extension_points import TOOL_FORMATS
from planetary.data.chat.renderer import ChatRenderer
from planetary.net.addresses import is_local_name
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.http import answers
from planetary.runs.serve.http.generation import RETRY, Generation, embedding_of
from planetary.runs.serve.http.grammar import Grammars
from planetary.runs.serve.http.interfaces import anthropic, responses
from planetary.runs.serve.http.interfaces.answer_form import AnswerForm
from planetary.runs.serve.http.interfaces.anthropic import CountTokensRequest, MessagesForm, MessagesRequest
from planetary.runs.serve.http.interfaces.openai import ChatForm, CompletionForm
from planetary.runs.serve.http.interfaces.responses import ResponsesForm, ResponsesRequest
from planetary.runs.serve.http.keys import KeyAccess, KeyFile
from planetary.runs.serve.http.metrics import ServingMetrics
from planetary.runs.serve.http.prompts import apart, encoded, prompt_text, prompts_of, require_known
from planetary.runs.serve.http.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerationRequest,
    TokenizeRequest,
    request_of,
    template_names,
)
from planetary.runs.serve.http.service import Service
from planetary.runs.serve.http.tools.tool_format import AnswerReader, ToolFormat, format_of
from planetary.runs.serve.http.unsupported_fields import note_ignored
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import ServingShape
from planetary.runs.serve.scheduling.constraint import Constraint
from planetary.runs.serve.scheduling.sequences import SequenceRequest
from planetary.web.access import Scope
from planetary.web.api_errors import ApiError, wrong
from planetary.web.application import application
from planetary.web.browser_guard import BrowserGuard, origins_of
from planetary.web.http_server import WebServer
from planetary.web.router import EVENTS, HTML, Caller, Media, operation

log = logging.getLogger(__name__)

MOST_BODY = 16 << 20  # bytes
METRICS = "text/plain; version=0.0.4"
_OF_MODEL: Mapping[str, Any] = {"group": "model", "scope": Scope.READ, "refuses": (404, 429, 503)}
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


class Served(NamedTuple):
    """A model of a service, or one with an adapter of it."""

    service: Service
    model: ServedModel
    shape: ServingShape


class Endpoint:
    """A running server.

    Attributes:
        app: the application, which needs a `BrowserGuard` on a port of its own.
        url: of the root.
    """

    def __init__(self, service: Service, options: ServeConfig, beside: Sequence[Service] = ()) -> None:
        """Raises `UserError` for unreadable keys, an unknown tool format, or an address without needed keys.

        `service`: of the model that requests without a name are for; `beside`: of other models.
        """
        self._services, self._options = (service, *beside), options
        self._access = KeyAccess(KeyFile(Path(options.keys)) if options.keys else None)
        if not options.keys and not is_local_name(options.host):
            raise UserError(
                f"serve.host = {options.host!r} admits every client that reaches it: name a file of keys (serve.keys, "
                "--keys), or stay on 127.0.0.1"
            )
        self._origins = origins_of(options.origins, "serve.origins")
        self._metrics = ServingMetrics(self._services)
        self._chats = ChatRenderer()
        named = options.tool_format
        self._own_tool_format: type[ToolFormat] | None = TOOL_FORMATS.find(named) if named else None
        self._tool_formats: dict[str, ToolFormat] = {}  # by chat template
        self._grammars: dict[int, Grammars] = {}  # by the id of the tokenizer, which each has
        self.url = ""
        self.app = application(
            (self,),
            self._access,
            title="planetary's served model",
            text="OpenAI's and Anthropic's interfaces of a served model, with the paths of vLLM for its tokens.",
            most_body=MOST_BODY,
            decode=request_of,
            is_strict=False,
        )
        self._server: WebServer | None = None

    @staticmethod
    async def start(service: Service, options: ServeConfig, beside: Sequence[Service] = ()) -> Endpoint:
        """Listen. Raises `UserError` as the constructor, `ResourceError` if the port is taken."""
        endpoint = Endpoint(service, options, beside)
        await endpoint.listen()
        return endpoint

    async def listen(self) -> None:
        """Begin to answer; see `start`."""
        options = self._options
        guarded = BrowserGuard(
            self.app, options.host, loopback=True, origins=self._origins, any_host=bool(options.keys)
        )
        self._server = await WebServer.start(guarded, options.host, options.port, what="the model's endpoint")
        self.url = self._server.url

    async def close(self) -> None:
        """Stop listening; answers under way get a moment."""
        if self._server is not None:
            await self._server.close()
        await self._chats.close()

    def _loaded(self) -> list[Served]:
        """Return every model and adapter that can be asked for; the first one is that of requests without a name."""
        return [
            Served(one, chosen, one.shape)
            for one in self._services
            if one.model is not None and one.shape is not None
            for chosen in (one.model, *one.model.variants)
        ]

    def _named(self, name: str | None) -> Served:
        """Return the model a request asks for. Raises `ApiError`."""
        loaded = self._loaded()
        found = [one for one in loaded if name in (one.model.name, None)]
        if found and (name is not None or found[0].service is self._services[0]):
            return found[0]
        waits = next((one for one in self._services if one.model is None or one.shape is None), None)
        if waits is not None:
            raise ApiError(503, f"not ready yet: {waits.why_not_ready}", code="not_ready", headers=RETRY)
        served = ", ".join(repr(one.model.name) for one in loaded)
        raise ApiError(
            404, f"the model {name!r} is not served; there is {served}", param="model", code="model_not_found"
        )

    # --- models, texts as tokens, probes ----------------------------------------------------------------------

    @operation("GET", "/v1/models", **_OF_MODEL)
    async def list_models(self) -> dict[str, Any]:
        """List the served models, each with the adapters beside it."""
        self._named(None)
        return {"object": "list", "data": [self._card(one) for one in self._loaded()]}

    @operation("GET", "/v1/models/{name:path}", **_OF_MODEL)
    async def get_model(self, name: str) -> dict[str, Any]:
        """Return a served model."""
        return self._card(self._named(name))

    @staticmethod
    def _card(served: Served) -> dict[str, Any]:
        model, base = served.model, served.service.model
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "planetary",
            "max_model_len": served.shape.window,
            "version": model.version,
            "has_chat_template": bool(model.chat_template),
            **({"parent": base.name} if model.adapter and base is not None else {}),
        }

    @operation("POST", "/tokenize", **_OF_MODEL)
    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or a chat."""
        _, model, shape = self._named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "expected either a prompt or messages")
        text = body.prompt if body.prompt is not None else await self._chat_text(model, body)
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        tokens = await encoded(model, text, special=special)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": shape.window}

    @operation("POST", "/detokenize", **_OF_MODEL)
    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens."""
        model = self._named(body.model).model
        require_known(body.tokens, model, "tokens")
        text = await apart(len(body.tokens), lambda: model.tokenizer.decode(body.tokens))
        return {"prompt": text.decode(errors="replace")}

    @operation("GET", "/tokenizer_info", **_OF_MODEL)
    async def get_tokenizer_info(self) -> dict[str, Any]:
        """Return what evaluation harnesses ask for before they use `/tokenize`, as vLLM has it."""
        _, model, shape = self._named(None)
        names: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        if model.ends:
            names["eos_token"] = model.tokenizer.token_bytes(min(model.ends)).decode(errors="replace")
        return {
            **names,
            **dict(model.special_tokens),
            "tokenizer_class": type(model.tokenizer).__name__,
            "chat_template": model.chat_template or None,
            "model_max_length": shape.window,
        }

    @operation("GET", "/", group="page")
    async def show_page(self) -> Annotated[Response, Media(HTML)]:
        """Return the chat page, which asks for a key where one is needed."""
        page = importlib.resources.files("planetary.runs.serve.http").joinpath("chat_page.html").read_bytes()
        return Response(page, media_type=HTML, headers=_PAGE_HEADERS)

    @operation("GET", "/live", group="probes")
    async def check_live(self) -> dict[str, str]:
        """Answer while the gateway does, for an orchestrator that would otherwise end it while the model is loaded."""
        return {"status": "ok"}

    @operation("GET", "/health", name="check_health", group="probes", refuses=(503,))
    @operation("GET", "/ready", group="probes", refuses=(503,))
    async def check_ready(self) -> dict[str, str]:
        """Answer 200 while requests are answered, as vLLM's and llama.cpp's `/health` does."""
        waits = next((one for one in self._services if not one.is_ready), None)
        if waits is not None:
            raise ApiError(503, waits.why_not_ready, code="not_ready", headers=RETRY)
        return {"status": "ready"}

    @operation("GET", "/metrics", **_OF_MODEL)
    async def get_metrics(self) -> Annotated[Response, Media(METRICS)]:
        """Return the numbers of the endpoint for Prometheus."""
        return Response(self._metrics.text(), media_type=METRICS)

    # --- completions ------------------------------------------------------------------------------------------

    @operation("POST", "/v1/completions", **_OF_MODEL)
    async def complete(
        self, request: Request, by: Caller, body: CompletionRequest
    ) -> Annotated[dict[str, Any] | Response, Media(EVENTS)]:
        """Continue texts."""
        served = self._named(body.model)
        model = served.model
        prompts = [
            await prompt_text(prompt, model, "prompt", special=body.add_special_tokens)
            for prompt in prompts_of(body.prompt, "prompt")
        ]
        most = 16 if body.max_tokens is None else body.max_tokens
        if most == 0 and not body.echo:
            raise wrong("max_tokens", "expected 1 or more, unless the prompt is echoed")
        if most == 0 and body.stream:
            raise wrong("stream", "a prompt alone is not streamed")
        scores = body.echo and body.logprobs is not None
        texts = self._texts(
            by,
            body,
            served,
            [one.tokens for one in prompts],
            most=max(most, 1),
            likeliest=body.logprobs or 0,
            scores=scores,
            make=await self._constraints(model, body),
        )
        generation = self._generation(request, body, served, texts)
        return await _given_out(generation, CompletionForm(body, model, prompts), is_streamed=bool(body.stream))

    # --- chat -------------------------------------------------------------------------------------------------

    @operation("POST", "/v1/chat/completions", **_OF_MODEL)
    async def chat(
        self, request: Request, by: Caller, body: ChatRequest
    ) -> Annotated[dict[str, Any] | Response, Media(EVENTS)]:
        """Continue a chat."""
        return await self._answer(request, by, body, partial(ChatForm, body))

    @operation("POST", "/v1/responses", **_OF_MODEL)
    async def respond(
        self, request: Request, by: Caller, body: ResponsesRequest
    ) -> Annotated[dict[str, Any] | Response, Media(EVENTS)]:
        """Continue a chat of items, as OpenAI's Responses and Open Responses have it; nothing is stored."""
        return await self._answer(request, by, responses.chat_of(body), partial(ResponsesForm, body))

    @operation("POST", "/v1/messages", refusal=anthropic.refusal, **_OF_MODEL)
    async def send_message(
        self, request: Request, by: Caller, body: MessagesRequest
    ) -> Annotated[dict[str, Any] | Response, Media(EVENTS)]:
        """Continue a chat, as Anthropic's Messages have it."""
        return await self._answer(request, by, anthropic.chat_of(body), MessagesForm)

    @operation("POST", "/v1/messages/count_tokens", refusal=anthropic.refusal, **_OF_MODEL)
    async def count_message_tokens(self, body: CountTokensRequest) -> dict[str, int]:
        """Return the number of a chat's tokens."""
        chat = anthropic.chat_of(body)
        model = self._named(chat.model).model
        return {"input_tokens": len(await encoded(model, await self._chat_text(model, chat), special=False))}

    async def _answer(
        self, request: Request, by: str, body: ChatRequest, form: Callable[[ServedModel, int], AnswerForm]
    ) -> dict[str, Any] | Response:
        """Return the answer to a chat; `form` is made of the model and the number of the prompt's tokens."""
        served = self._named(body.model)
        model, tools = served.model, body.tool_use
        has_schema = body.response_format is not None and body.response_format.schema is not None
        if has_schema and tools.functions and not tools.is_forced:
            raise wrong("response_format", 'with tools it needs the tool_choice "none" or "required"')
        format_ = self._tool_format(model)
        text = await self._chat_text(model, body) + (format_.forced if tools.is_forced else "")
        prompt = await encoded(model, text, special=body.add_special_tokens)
        if not prompt:
            raise wrong("messages", "the chat is an empty text")
        if body.top_logprobs and not body.logprobs:
            raise wrong("top_logprobs", "needs logprobs to be true")
        most = body.max_completion_tokens or body.max_tokens or served.shape.window
        if tools.is_forced:
            schema = tools.schema(format_.key)
            make = await asyncio.to_thread(self._grammars_of(model).constraints, schema, "tools", is_spaced=True)
        else:
            make = await self._constraints(model, body)
        if body.tools and len(prompt) >= served.shape.window:
            await self._refuse_tools(served, body, len(prompt))
        texts = self._texts(by, body, served, [prompt], most=most, likeliest=body.top_logprobs or 0, make=make)
        reader = partial(tools.reader, format_) if tools.functions else None
        generation = self._generation(request, body, served, texts, reader)
        return await _given_out(generation, form(model, len(prompt)), is_streamed=bool(body.stream))

    async def _refuse_tools(self, served: Served, body: ChatRequest, tokens: int) -> NoReturn:
        """Raise the `ApiError` of a chat that does not fit with the tools; `tokens`: of the prompt."""
        model, window = served.model, served.shape.window
        bare = await self._chat_text(model, msgspec.structs.replace(body, tools=None, tool_choice=None))
        others = len(await encoded(model, bare, special=body.add_special_tokens))
        raise ApiError(
            400,
            f"the prompt has {tokens} tokens, of which the tools take {tokens - others}; the context of {window} has "
            f"room for {window - 1} and one more",
            param="messages" if others >= window else "tools",
            code="context_length_exceeded",
        )

    def _tool_format(self, model: ServedModel) -> ToolFormat:
        """Return how a model writes calls of tools."""
        found = self._tool_formats.get(model.chat_template)
        if found is None:
            kind = self._own_tool_format or format_of(model.chat_template)
            found = self._tool_formats[model.chat_template] = kind()
            log.info("calls of tools are read and written as %s does (serve.tool_format)", kind.__name__)
        return found

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
        callable_ = () if body.tool_choice == "none" else names["tools"] or ()
        if callable_ or "tool" not in model.chat_template:
            names["messages"], tools = self._tool_format(model).shown(names["messages"], callable_)
            names["tools"] = list(tools) or None
        if body.reasoning_effort is not None and "reasoning_effort" not in model.chat_template:
            note_ignored("reasoning_effort", "the chat template does not read it")
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
            raise ApiError(503, str(error), code="unavailable", headers=RETRY) from None

    # --- embeddings -------------------------------------------------------------------------------------------

    @operation("POST", "/v1/embeddings", **_OF_MODEL)
    async def embed(self, by: Caller, body: EmbeddingRequest) -> dict[str, Any]:
        """Return the mean of the last hidden states of each text's tokens, scaled to length 1."""
        served = self._named(body.model)
        service, model, shape = served
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
        prompts = [(await prompt_text(prompt, model, "input")).tokens for prompt in prompts_of(body.input, "input")]
        texts = [
            SequenceRequest(
                number=service.next_sequence(),
                user=by or body.user or "",
                prompt=tuple(prompt),
                most=1,
                embeds=True,
                adapter=model.adapter,
            )
            for prompt in prompts
        ]
        self._check_room(served, texts, "input")
        for text in texts:
            self._metrics.prompt_tokens.inc(len(text.prompt))
        means = await asyncio.gather(*(embedding_of(service, text) for text in texts))
        data = [
            {
                "object": "embedding",
                "index": index,
                "embedding": answers.embedding(mean, dimensions, body.encoding_format),
            }
            for index, mean in enumerate(means)
        ]
        count = sum(len(prompt) for prompt in prompts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": model.name, "usage": usage}

    # --- both -------------------------------------------------------------------------------------------------

    async def _constraints(self, model: ServedModel, body: GenerationRequest) -> Callable[[], Constraint] | None:
        """Return the maker of constraints for a request's texts; None: there are none. Raises `ApiError`."""
        if body.response_format is None:
            return None
        return await asyncio.to_thread(self._grammars_of(model).constraints, body.response_format.schema)

    def _grammars_of(self, model: ServedModel) -> Grammars:
        if id(model.tokenizer) not in self._grammars:
            self._grammars[id(model.tokenizer)] = Grammars(model)
        return self._grammars[id(model.tokenizer)]

    def _texts(
        self,
        by: str,
        body: GenerationRequest,
        served: Served,
        prompts: list[list[int]],
        *,
        most: int,
        likeliest: int,
        scores: bool = False,
        make: Callable[[], Constraint] | None = None,
    ) -> list[SequenceRequest]:
        """Return the texts of a request, under the constraints of `make`. Raises `ApiError` as `_check_room`."""
        service, model, shape = served
        texts = []
        options = body.options(model.vocabulary)
        ends = frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else model.ends)
        for prompt in prompts:
            for choice in range(body.choices):
                texts.append(
                    SequenceRequest(
                        number=service.next_sequence(),
                        user=by or body.user or "",
                        prompt=tuple(prompt),
                        most=most,
                        options=msgspec.structs.replace(options, seed=body.seed_of(choice)),
                        ends=ends,
                        likeliest=min(likeliest, shape.candidates),
                        scores_prompt=scores,
                        adapter=model.adapter,
                        constraint=None if make is None else make(),
                    )
                )
        self._check_room(served, texts, "messages" if isinstance(body, ChatRequest) else "prompt")
        return texts

    def _check_room(self, served: Served, texts: Sequence[SequenceRequest], param: str) -> None:
        """Raise `ApiError` for prompts that are too long, or too many texts."""
        service, _, shape = served
        longest = max(len(text.prompt) for text in texts)
        if longest >= shape.window:
            raise ApiError(
                400,
                f"the prompt has {longest} tokens; the context of {shape.window} has room for {shape.window - 1} and "
                "one more",
                param=param,
                code="context_length_exceeded",
            )
        if service.waiting + len(texts) > self._options.queue:
            raise ApiError(
                429,
                f"{service.waiting} texts wait already; {self._options.queue} may",
                code="queue_full",
                headers=RETRY,
            )

    def _generation(
        self,
        request: Request,
        body: GenerationRequest,
        served: Served,
        texts: list[SequenceRequest],
        reader: Callable[[], AnswerReader] | None = None,
    ) -> Generation:
        return Generation(
            served.service,
            self._metrics,
            texts,
            tokenizer=served.model.tokenizer,
            stops=body.stops,
            still_allowed=self._access.still_allows(request),
            reader=reader,
        )


async def _given_out(generation: Generation, form: AnswerForm, *, is_streamed: bool) -> dict[str, Any] | Response:
    """Answer in one piece, or with server-sent events. A failure before the first piece has a separate status."""
    if not is_streamed:
        return form.whole(await generation.whole(), generation.generated)
    pieces = generation.pieces()
    first = await anext(pieces, None)

    async def events() -> AsyncIterator[bytes]:
        try:
            for event in form.begin():
                yield event
            if first is not None:
                for event in form.events(first):
                    yield event
            async for piece in pieces:
                for event in form.events(piece):
                    yield event
            for event in form.end(generation.generated):
                yield event
        except ApiError as error:
            for event in form.failed(error):
                yield event
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(events(), media_type=EVENTS, headers={"cache-control": "no-cache"})
