"""How a run is stopped: the first signal lets it finish what it is doing and save, the second ends it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def two_stage_stop(say: Callable[[str], None], unit: str) -> Iterator[Callable[[], bool]]:
    """First SIGINT or SIGTERM: finish the `unit` and save. Second: KeyboardInterrupt. Yields "was a stop asked for?"."""
    requested = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        # A thread says it, because the signal may have come in the middle of a line, and files refuse to be re-entered.
        message = f"stopping after this {unit} and saving; once more to stop at once"
        threading.Thread(target=say, args=(message,)).start()

    previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
