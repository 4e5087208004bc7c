"""Environments of the `verifiers` library as tasks: packages with `load_environment()`.

An environment asks a model through OpenAI's client. Here the client's transport replays the turns that the policy has
written. At the first request beyond them the rollout is stopped, and the messages that the request adds follow in the
dialogue. So the result is a function of the dialogue, as that of every task, and a policy's tokens and their
log-probabilities stay where they were sampled.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planetary.core.errors import UserError, did_you_mean
from planetary.data.chat.records import prompt_of
from planetary.runs.rl.environments.tasks import Problem, Task

if TYPE_CHECKING:
    import httpx

_FULL = {"error": {"message": "This model's maximum context length is exceeded", "code": "context_length_exceeded"}}
_INSTALL = "pip install 'verifiers<0.4'"


def environment_task(environment: str) -> type[Task]:
    """Return the task of an environment's package. Raises `UserError` for an empty name."""
    if not environment:
        raise UserError('rl.task = "verifiers:": expected "verifiers:ENV" with the name of an environment\'s package')

    class Environment(VerifiersTask):
        name_of_package = environment

    return Environment


class VerifiersTask(Task):
    """A task that an environment of the `verifiers` library decides."""

    name_of_package: str

    def __init__(self) -> None:
        """Load the environment. Raises `UserError` where the library or the package is missing, or has none."""
        library = _library(self.name_of_package)
        self._environment = _environment(self.name_of_package)
        self._policy = _Replay()
        self._client = library.OpenAIChatCompletionsClient(self._policy.client())
        self._loop = asyncio.new_event_loop()
        self.tools = [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.parameters},
            }
            for one in self._environment.tool_defs or ()
        ]

    def problems(self) -> Sequence[Problem]:
        rows = self._environment.get_dataset()
        asked = (prompt_of({"messages": row["prompt"]}, f"row {number}")[0] for number, row in enumerate(rows))
        return [
            Problem(messages, str(row.get("answer") or ""), {"row": number})
            for number, (messages, row) in enumerate(zip(asked, rows, strict=True))
        ]

    def judge(self, prompt: Any, completions: Sequence[str], meta: Mapping[str, Any]) -> float | str:
        raise NotImplementedError("an environment judges a chat")

    def follow(
        self,
        prompt: Any,
        completions: Sequence[str],
        meta: Mapping[str, Any],
        chat: Sequence[Mapping[str, Any]],
        *,
        is_over: bool = False,
    ) -> float | str | list[dict[str, Any]]:
        """Return the messages that the environment adds, or its reward. The context of a dialogue that is over is full:
        the environment's next request fails by its length.
        """
        return self._loop.run_until_complete(self._followed(meta["row"], chat, is_over))

    async def _followed(
        self, row: int, chat: Sequence[Mapping[str, Any]], is_over: bool
    ) -> float | list[dict[str, Any]]:
        asked = self._policy.replay([one for one in chat if one["role"] == "assistant"], is_over)
        rollout = asyncio.ensure_future(self._rewarded(row))
        await asyncio.wait((asked, rollout), return_when=asyncio.FIRST_COMPLETED)
        if rollout.done():
            asked.cancel()
            return rollout.result()
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)
        found = asked.result()
        if [one["role"] for one in found[: len(chat)]] != [one["role"] for one in chat] or len(found) == len(chat):
            raise UserError("the environment changes earlier messages of a dialogue: only new ones can follow")
        return found[len(chat) :]

    async def _rewarded(self, row: int) -> float:
        environment = self._environment
        state = await environment.rollout(environment.get_dataset()[row], self._client, "policy", {})
        if state["error"] is not None:
            raise UserError(f"the environment fails: {state['error']!r}")
        await environment.rubric.score_rollout(state)
        return float(state["reward"])


class _Replay:
    """The model that an environment asks: it answers with turns that were written before."""

    def __init__(self) -> None:
        self._turns: list[Mapping[str, Any]] = []
        self._is_over = False
        self._asked: asyncio.Future[list[dict[str, Any]]] | None = None

    def client(self) -> Any:
        """Return a client of OpenAI's whose requests come here."""
        import httpx
        from openai import AsyncOpenAI

        # The address is never resolved: the transport answers. OpenAI's types name a fork of httpx, and take both.
        http: Any = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        return AsyncOpenAI(base_url="http://policy/v1", api_key="none", max_retries=0, http_client=http)

    def replay(self, turns: Sequence[Mapping[str, Any]], is_over: bool) -> asyncio.Future[list[dict[str, Any]]]:
        """Answer with these turns; return the messages of the request after them, which has no answer.

        `is_over`: that request is refused as too long.
        """
        self._turns, self._is_over = list(turns), is_over
        self._asked = asyncio.get_running_loop().create_future()
        return self._asked

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        import httpx

        if self._turns:
            return httpx.Response(200, json=_completion(self._turns.pop(0)))
        if self._is_over:
            return httpx.Response(400, json=_FULL)
        assert self._asked is not None
        if not self._asked.done():
            self._asked.set_result(json.loads(request.content)["messages"])
        return await asyncio.Future()  # until the rollout is cancelled


def _completion(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn as an answer of `/v1/chat/completions`."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.get("content")}
    if calls := turn.get("tool_calls"):
        message["tool_calls"] = [
            {**one, "function": {**one["function"], "arguments": json.dumps(one["function"]["arguments"])}}
            for one in calls
        ]
    return {
        "id": "chatcmpl-replayed",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _library(environment: str) -> Any:
    task = f'rl.task = "verifiers:{environment}"'
    try:
        library = importlib.import_module("verifiers")
    except ImportError as error:
        raise UserError(f"{task} needs the library verifiers: {_INSTALL} ({error})") from None
    if not hasattr(library, "OpenAIChatCompletionsClient"):
        raise UserError(
            f"{task}: this version of verifiers has no environments of packages with load_environment(): {_INSTALL}"
        )
    return library


def _environment(name: str) -> Any:
    """Return a package's environment, as the library's own `load_environment` finds it."""
    task, module = f'rl.task = "verifiers:{name}"', name.replace("-", "_").rpartition("/")[2]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{task}: the environment's package {module} cannot be imported: {error}") from None
    if not hasattr(found, "load_environment"):
        raise UserError(
            f"{task}: the package {module} has no load_environment(){did_you_mean('load_environment', vars(found))}"
        )
    return found.load_environment()
