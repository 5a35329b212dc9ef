"""What the sidecar hooks into an engine must never end it: a hook that fails is left out, and soon for good."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

MOST_FAILURES = 3

log = logging.getLogger("vllm.cotrain")  # below vLLM's logger, so that lines appear where the host's own do


class Breaker:
    """Calls the hooks of one engine, and counts what they raise."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """By name of the hook."""

    @property
    def off(self) -> list[str]:
        """The hooks that are not called any more, by name. An engine with one of them does not speculate."""
        return sorted(name for name, count in self.failures.items() if count >= MOST_FAILURES)

    def call(self, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the hook returns; None where it raises, and without calling it after the third time."""
        name = getattr(hook, "__name__", None) or repr(hook)
        if self.failures[name] >= MOST_FAILURES:
            return None
        try:
            return hook(*args, **options)
        except Exception:
            self.failures[name] += 1
            log.exception("cotrain: %s failed (%d of %d); the engine goes on", name, self.failures[name], MOST_FAILURES)
            return None
