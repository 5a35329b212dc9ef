"""What a run sends to MLflow: entries in order, from a thread of their own. What cannot be sent holds up neither run nor entries.

If an entry fails, the outbox writes a tag. Does that fail too, the store is down: all entries wait, and each new one starts
another try. Otherwise the store refuses this entry alone: it is set aside, and tried once more at the end.
"""

import re
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from cotrain.run.mlflow_store import in_short

MOST_WAITING = 1000
"""Most entries that wait for a store that is down, and most that are set aside; the oldest are dropped."""


class Entry(NamedTuple):
    what: str
    """Names the entry in messages; of several that were set aside under one name, the newest is kept."""
    send: Callable[[], Any]
    sent: Future


class Outbox:
    """Entries on their way to one MLflow run."""

    def __init__(self, write_tag: Callable[[str], Any], say: Callable[[str], None]):
        """write_tag: gives the MLflow run a tag with this text. say: prints the few lines that a user must read."""
        self.is_down = False
        self.dropped = 0
        """Number of entries that were dropped because too many waited."""
        self._write_tag, self._say = write_tag, say
        self._waiting, self._aside = deque[Entry](), dict[str, Entry]()
        self._thread, self._scheduled = ThreadPoolExecutor(1, "mlflow"), False
        self._failures, self._said = 0, set[str]()

    def add(self, what: str, send: Callable[[], Any]) -> Future:
        """Queue an entry. The future gets the result of `send`; it is never done if the entry is never sent."""
        self._waiting.append(entry := Entry(what, send, Future()))
        if not self._scheduled:
            self._scheduled = True
            self._thread.submit(self._send_waiting)
        return entry.sent

    def close(self, what: str, send: Callable[[], Any], timeout_s: float) -> list[str]:
        """Send what waits, what was set aside, and a last entry. Returns the names of entries that MLflow does not have."""

        def send_all() -> None:
            last_try, self._aside = [*self._aside.values(), Entry(what, send, Future())], {}
            self._waiting.extend(last_try)
            self._send_waiting()

        wait([self._thread.submit(send_all)], timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return [entry.what for entry in (*self._aside.values(), *self._waiting)]

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting:
            entry = self._waiting[0]
            try:
                entry.sent.set_result(entry.send())
            except Exception as error:  # whatever a store or its network raises, the run continues without it
                if self._is_store_down(entry, error):
                    while len(self._waiting) > MOST_WAITING:
                        self._waiting.popleft()
                        self.dropped += 1
                    return
                self._set_aside(entry, error)
            if self.is_down:
                self._say("MLflow takes metrics again, and gets those that it has missed")
            self.is_down = False
            self._waiting.popleft()

    def _is_store_down(self, entry: Entry, error: Exception) -> bool:
        try:
            # The number makes the text a new one: a database that only reads would take an old one.
            self._write_tag(f"{self._failures + 1} failures, the last one of {entry.what}: {in_short(error)}")
            self._failures += 1
            return False
        except Exception:
            if not self.is_down:
                self._say(f"MLflow takes no metrics ({in_short(error)}); the run goes on, each step tries again")
            self.is_down = True
            return True

    def _set_aside(self, entry: Entry, error: Exception) -> None:
        self._aside[entry.what] = entry
        if len(self._aside) > MOST_WAITING:
            del self._aside[next(iter(self._aside))]
        if (kind := re.sub(r"\d+", "", entry.what)) not in self._said:
            self._said.add(kind)
            what = f"{entry.what} ({in_short(error)})"
            self._say(f"MLflow does not take {what}; the run goes on, and tries it once more at its end")
