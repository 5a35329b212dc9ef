"""Task sets, harnesses and games of verifiers as environments (pip install 'cotrain[verifiers]').

verifiers runs an agent's program, which asks a model for each turn at an address of this process. That model is Policy, a client of
verifiers: it hands the question to the trajectory, and what cotrain's engine said back to the program. So an engine generates each turn
after the tokens that it sampled itself, and verifiers encodes none.
"""

import asyncio
import itertools
import json
import threading
import time
from concurrent.futures import Future
from functools import cached_property
from queue import SimpleQueue
from typing import Any, NamedTuple
from uuid import uuid4

from verifiers.v1.clients import Client, ModelContext, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.interception import server as interception
from verifiers.v1.types import AssistantMessage, Response, ToolCall, content_text
from verifiers.v1.utils.loaders import environment_class, resolve_env_config

from cotrain.tasks.prompts import Messages
from cotrain.tasks.trl_environments import CALL

NAME = "policy"


class Question(NamedTuple):
    """What an agent's program asks the policy."""

    messages: list[Any]  # of the whole conversation
    known: int  # of these, how many the conversation had before
    tools: list[dict[str, Any]]
    answer: asyncio.Future[str]


class Policy(Client):
    """The policy of a run, as verifiers sees it."""

    def __init__(self) -> None:
        self.asked: dict[str, SimpleQueue[Question | None]] = {}  # by the name of the trace

    async def get_response(
        self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: Any = None, turn: Any = None,
        headers: Any = None,
    ) -> Response:  # fmt: skip
        """Return what the policy says, once it has."""
        if not isinstance(dialect, ChatDialect):
            raise NotImplementedError("cotrain answers OpenAI's chat requests alone; take the harness null or bash")
        answer = asyncio.get_running_loop().create_future()
        self.asked[session_id].put(Question(turn.prompt, turn.tail_start, body.get("tools") or [], answer))
        text = await answer
        calls = [ToolCall(id=uuid4().hex, **call) for call in map(_call, CALL.findall(text)) if call is not None]
        message = AssistantMessage(
            content=text.partition("<tool_call>")[0] if calls else text, tool_calls=calls or None
        )
        finish = "tool_calls" if calls else "stop"
        response = Response(id=uuid4().hex, created=int(time.time()), model=NAME, message=message, finish_reason=finish)
        response.raw = serialize_completion(response, NAME)
        return response


class VerifiersEnvironments:
    """What makes the environments of one process. They share the servers of their tools and of the policy."""

    def __init__(self, table: dict[str, Any], size: int):
        """table: the [env] table of verifiers. size: most tasks. Raises whatever verifiers does about them."""
        config = resolve_env_config(table)
        self._env = environment_class(config.taskset.id, config.id)(config)
        self._tasks = list(itertools.islice(self._env.taskset, size))
        self.rows = [{"index": index} for index in range(len(self._tasks))]
        self._policy = Policy()
        self._loop = self._serve()

    def __call__(self, index: int) -> "VerifiersEnvironment":
        return VerifiersEnvironment(self, self._tasks[index])

    def play(self, task: Any, asked: SimpleQueue[Question | None]) -> Future[Any]:
        """Let the agents of verifiers play a task, whose questions come in `asked`, and None after the last. Returns the episode."""
        names = list[str]()

        def begun(trace: Any) -> None:
            if names:
                raise NotImplementedError(
                    "it plays several agents with the policy; give all but one a client of their own"
                )
            names.append(trace.id)
            self._policy.asked[trace.id] = asked

        def ended(_: Any) -> None:
            for name in names:
                self._policy.asked.pop(name, None)
            asked.put(None)

        context = ModelContext(model=NAME, client=TrainClientConfig(base_url=NAME, api_key_var=NAME))
        episode = asyncio.run_coroutine_threadsafe(self._env.run_episode(task, context, on_trace=begun), self._loop)
        episode.add_done_callback(ended)
        return episode

    @cached_property
    def opening(self) -> tuple[Messages, list[dict[str, Any]]]:
        """The messages that the agent's program puts before those of a task, and its tools. The first task is begun to see them."""
        task = self._tasks[0]
        environment = VerifiersEnvironment(self, task)
        question = environment.begin()
        environment.close()
        first, own = _wire(question.messages), messages_of(task)
        if own != first[len(first) - len(own) :]:
            raise ValueError(f"its harness changes the task's messages: {own} became {first}")
        return first[: len(first) - len(own)], question.tools

    def _serve(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of a thread in which verifiers serves."""
        loop, serves, others = asyncio.new_event_loop(), Future[None](), interception.resolve_client

        async def serve() -> None:
            try:
                async with self._env.serving():
                    serves.set_result(None)
                    await asyncio.Event().wait()
            except Exception as error:
                serves.set_exception(error)

        # verifiers makes each client from its configuration, and has no other place for one of ours.
        interception.resolve_client = lambda config: self._policy if config.base_url == NAME else others(config)
        threading.Thread(target=loop.run_until_complete, args=[serve()], daemon=True).start()
        serves.result()
        return loop


class VerifiersEnvironment:
    """A task that an agent of verifiers plays with the policy; see Environment."""

    def __init__(self, environments: VerifiersEnvironments, task: Any):
        self._environments, self._task = environments, task
        self._asked = SimpleQueue[Question | None]()
        self._episode: Future[Any] | None = None
        self._question: Question | None = None

    def messages(self) -> Messages:
        """Return the messages of the agent's program and of the task."""
        return self._environments.opening[0] + messages_of(self._task)

    def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the agent's tools."""
        return self._environments.opening[1]

    def begin(self) -> Question:
        """Start the agent's program, and return its first question. Raises RuntimeError if it has none."""
        self._episode = self._environments.play(self._task, self._asked)
        question = self._next()
        if question is None:
            raise RuntimeError("the agent's program has ended before it asked the policy")
        return question

    def step(self, text: str) -> str | None:
        """Give the program what the policy said, and return what is new in its next question. Raises RuntimeError if something old is."""
        question = self._question
        if question is None:
            question = self.begin()
            if _wire(question.messages) != self.messages():
                raise RuntimeError(f"its first messages are not those of the prompt, but {_wire(question.messages)}")
        self._say(text)
        known, question = len(question.messages) + 1, self._next()
        if question is None:
            return None
        new = question.messages[known:]
        if question.known < known or not new or any(isinstance(message, AssistantMessage) for message in new):
            raise RuntimeError("the agent's program rewrites what was said before, which no trajectory can follow")
        return "\n".join(content_text(message.content) for message in new)

    def reward(self) -> float:
        """Return the sum of the task's rewards. To an agent that would go on, the policy says nothing more, until it ends."""
        if self._episode is None:
            self.begin()
        while self._question is not None:
            self._say("")
            self._next()
        assert self._episode is not None
        return sum(trace.reward for trace in self._episode.result().traces)

    def close(self) -> None:
        """End the agent's program."""
        if self._episode is not None:
            self._episode.cancel()

    def _say(self, text: str) -> None:
        assert self._question is not None
        answer = self._question.answer
        answer.get_loop().call_soon_threadsafe(answer.set_result, text)

    def _next(self) -> Question | None:
        """Wait for the next question; None after the last. Raises RuntimeError if the episode has failed."""
        self._question = self._asked.get()
        if self._question is None and self._episode is not None:
            episode = self._episode.result()
            if not episode.ok:
                errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
                raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        return self._question


def messages_of(task: Any) -> Messages:
    """Return a task's own messages."""
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    prompt = task.data.prompt
    return system + ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else _wire(prompt or []))


def _wire(messages: list[Any]) -> Messages:
    return [message_to_wire(parse_message(one) if isinstance(one, dict) else one) for one in messages]


def _call(text: str) -> dict[str, str] | None:
    """Return the name and the arguments of a call in tags, or None if it is none."""
    try:
        said = json.loads(text)
        return {"name": said["name"], "arguments": json.dumps(said.get("arguments", {}))}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
