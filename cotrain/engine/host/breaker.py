"""The sidecar's hooks must never end an engine: a failed call is skipped, and a hook that keeps failing is switched off."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

MOST_FAILURES = 3

log = logging.getLogger("vllm.cotrain")  # a child of vLLM's logger, so that its lines appear where the host's do


class Breaker:
    """Calls the hooks of one process of an engine, and counts what they raise."""

    def __init__(self, shared: Collection[str] = ()):
        """shared: names of hooks in which the engine's ranks wait for each other.

        What torch raises in them may come on one rank alone, and a rank that went on would answer the others' next question. So
        the host gets it, as it would from vLLM's own drafting.
        """
        self._shared = shared
        self.failures: Counter[str] = Counter()  # number of failed calls by name of the hook
        self.stopped = False  # was a hook off on any rank when the ranks last agreed?

    @property
    def off(self) -> list[str]:
        """Names of the hooks that are not called any more. An engine that has one does not speculate."""
        return sorted(name for name, count in self.failures.items() if count >= MOST_FAILURES)

    def agree(self, failures: Iterable[Counter[str]]) -> None:
        """Take over what has failed on any of the engine's ranks, so that all of them call the same hooks."""
        for counted in failures:
            for name, count in counted.items():
                self.failures[name] = max(self.failures[name], count)
        self.stopped = bool(self.off)

    def call(self, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the hook returns, or None if it raises. After MOST_FAILURES failures it is not called any more."""
        name = getattr(hook, "__name__", repr(hook))
        if self.failures[name] < MOST_FAILURES:
            try:
                return hook(*args, **options)
            except Exception as error:
                if name in self._shared and isinstance(error, RuntimeError | MemoryError):
                    raise
                self.failures[name] += 1
                log.exception("cotrain: %s failed (time %d of %d)", name, self.failures[name], MOST_FAILURES)
        return None
