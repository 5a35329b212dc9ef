"""Brings finished rollouts to the index of a worker while others are still generated."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from cotrain.records import Rollout

Row = tuple[list[int], list[int], list[float], int]


class HistoryFeed:
    """Sends rollouts between two engine steps: those that finish while a call is under way go with the next one."""

    def __init__(self, send: Callable[[list[Row]], Awaitable[Any]]):
        self._send = send
        self._waiting: list[Row] = []
        self._sending: asyncio.Task[None] | None = None

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Begin to send these; only tokens that were emitted may come here."""
        self._waiting += [(r.prompt_token_ids, r.token_ids, r.log_probs, r.versions.policy) for r in rollouts]
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send_all())

    async def sent(self) -> None:
        """Wait until all has arrived. Raises what the worker raised."""
        if self._sending is not None:
            await self._sending

    async def _send_all(self) -> None:
        while self._waiting:
            rows, self._waiting = self._waiting, []
            await self._send(rows)
