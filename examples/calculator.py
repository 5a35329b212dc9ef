"""An environment with a calculator: the policy must ask it twice, for a product and then for a sum.

    cotrain train configs/tools.toml

An environment needs no base class. cotrain makes one for each trajectory, in a process beside the engines.
"""

import random
import re

RULES = "You cannot compute. Ask the calculator, one step at a time: calc(A*B) or calc(A+B)."
CALL = re.compile(r"\s*calc\((\d{1,9})\s*([*+])\s*(\d{1,9})\)\s*")


class Calculator:
    """One question of the form A * B + C, with one that is answered before it as an example. It ends when the calculator has the result."""

    def __init__(self, seed: int):
        generator = random.Random(seed)
        shown, self._asked = [
            (generator.randint(11, 99), generator.randint(11, 99), generator.randint(101, 999)) for _ in range(2)
        ]
        self._messages = [{"role": "system", "content": RULES}, *self._example(*shown)]
        self._messages.append({"role": "user", "content": self._question(*self._asked)})
        self._results, self._mistakes = list[int](), 0

    def messages(self) -> list[dict[str, str]]:
        """Return the chat that the trajectory begins with."""
        return self._messages

    def step(self, text: str) -> str | None:
        """Answer a call. What is wrong is an answer too, which says what to ask."""
        a, b, c = self._asked
        if (call := CALL.fullmatch(text)) is not None:
            first, second = int(call[1]), int(call[3])
            self._results.append(first * second if call[2] == "*" else first + second)
            if self._results[-1] == a * b + c:
                return None
            if self._results[-1] == a * b:
                return f"= {a * b}"
        self._mistakes += 1
        return f"error: ask for calc({a * b}+{c})" if a * b in self._results else f"error: ask for calc({a}*{b})"

    def reward(self) -> float:
        """Return 1 if the calculator has got to the result, 0.5 if it has got to the product alone, and 0.2 less for each mistake."""
        a, b, c = self._asked
        reached = 1.0 if a * b + c in self._results else 0.5 * (a * b in self._results)
        return max(0.0, reached - 0.2 * self._mistakes)

    @staticmethod
    def _question(a: int, b: int, c: int) -> str:
        return f"What is {a} times {b}, plus {c}?"

    def _example(self, a: int, b: int, c: int) -> list[dict[str, str]]:
        said = [f"calc({a}*{b})", f"= {a * b}", f"calc({a * b}+{c})", f"= {a * b + c}"]
        turns = [{"role": ("assistant", "tool")[i % 2], "content": text} for i, text in enumerate(said)]
        return [{"role": "user", "content": self._question(a, b, c)}, *turns]
