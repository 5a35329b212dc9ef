"""The sidecar's hooks must never end an engine: a failed call is skipped, and a hook that keeps failing is switched off."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

MOST_FAILURES = 3

log = logging.getLogger("vllm.cotrain")  # a child of vLLM's logger, so that its lines appear where the host's do


class Breaker:
    """Calls the hooks of one engine, and counts what they raise."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()  # number of failed calls by name of the hook

    @property
    def off(self) -> list[str]:
        """Names of the hooks that are not called any more. An engine that has one does not speculate."""
        return sorted(name for name, count in self.failures.items() if count >= MOST_FAILURES)

    def call(self, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the hook returns, or None if it raises. After MOST_FAILURES failures it is not called any more."""
        name = getattr(hook, "__name__", repr(hook))
        if self.failures[name] < MOST_FAILURES:
            try:
                return hook(*args, **options)
            except Exception:
                self.failures[name] += 1
                log.exception("cotrain: %s failed (time %d of %d)", name, self.failures[name], MOST_FAILURES)
        return None
