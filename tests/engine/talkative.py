"""An environment for test_environments.py, whose tools answer whatever the policy says, and some of which break."""

import os
import time


class Talkative:
    """Three turns. BREAK says how the tools of every fifth trajectory break in the second turn: raise, die or are slow."""

    begun = 0

    def __init__(self, seed: int):
        self._seed, self._turns = seed, list[str]()
        Talkative.begun += 1
        self._breaks = os.environ.get("BREAK", "") if Talkative.begun % 5 == 0 else ""

    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self._seed % 97} + 5 ="}]

    def step(self, text: str) -> str | None:
        self._turns.append(text)
        if self._breaks and len(self._turns) == 2:
            if self._breaks == "raise":
                raise RuntimeError("the tool is broken")
            if self._breaks == "die":
                os._exit(1)
            time.sleep(2)
        return f"you said {text[:6]}" if len(self._turns) < 3 else None

    def reward(self) -> float:
        return sum(text.count("1") for text in self._turns) / 10
