"""What a run sends to MLflow: entries in order, from a thread of their own. What cannot be sent delays neither run nor entries.

If an entry fails, the outbox writes a tag. If that fails too, the store is down: all entries wait, and each new one starts
another try. Otherwise the store refuses this entry alone, and the entries after it are sent.
"""

import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from cotrain.run.mlflow_store import in_short

MOST_WAITING = 1000  # most entries that wait for a store that is down; the oldest are dropped


class Entry(NamedTuple):
    what: str
    send: Callable[[], Any]
    sent: Future


class Outbox:
    """Entries on their way to one MLflow run."""

    def __init__(self, write_tag: Callable[[str], Any], say: Callable[[str], None]):
        """write_tag: writes a tag of the MLflow run with this text. say: prints the few lines that a user must read."""
        self.say, self.is_down = say, False
        self._write_tag, self._failures = write_tag, 0
        self._waiting, self._refused = deque[Entry](), dict[str, None]()
        self._thread, self._scheduled = ThreadPoolExecutor(1, "mlflow"), False

    def add(self, what: str, send: Callable[[], Any]) -> Future:
        """Queue an entry, which messages call `what`. The future gets the result of `send`; it is never done if that fails."""
        self._waiting.append(entry := Entry(what, send, Future()))
        if not self._scheduled:
            self._scheduled = True
            self._thread.submit(self._send_waiting)
        return entry.sent

    def close(self, what: str, send: Callable[[], Any], timeout_s: float) -> list[str]:
        """Send what waits and a last entry. Returns the names of entries that MLflow does not have."""
        self._waiting.append(Entry(what, send, Future()))
        wait([self._thread.submit(self._send_waiting)], timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return [*self._refused, *(entry.what for entry in self._waiting)]

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting:
            entry = self._waiting.popleft()
            try:
                entry.sent.set_result(entry.send())
            except Exception as error:  # whatever a store or its network raises, the run continues without it
                if self._is_store_down(entry.what, error):
                    self._waiting.appendleft(entry)
                    while len(self._waiting) > MOST_WAITING:
                        self._waiting.popleft()
                    return
            if self.is_down:
                self.is_down = False
                self.say("MLflow takes metrics again, and gets those that it has missed")

    def _is_store_down(self, what: str, error: Exception) -> bool:
        """Say that MLflow does not take an entry; of entries whose names differ in numbers only, once."""
        try:
            # The number makes the text a new one: a database that only reads would accept an old one.
            self._write_tag(f"{self._failures + 1} failures, the last one of {what}: {in_short(error)}")
        except Exception:
            if not self.is_down:
                self.say(f"MLflow takes no metrics ({in_short(error)}); the run goes on, each step tries again")
            self.is_down = True
            return True
        self._failures += 1
        if re.sub(r"\d+", "", what) not in (re.sub(r"\d+", "", refused) for refused in self._refused):
            self.say(f"MLflow does not take {what} ({in_short(error)}); the run goes on without it")
        self._refused[what] = None
        return False
