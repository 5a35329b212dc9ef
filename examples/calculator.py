"""An environment with a calculator: the policy must ask it twice, for a product and then for a sum, and then say the result.

    cotrain train configs/tools.toml

An environment needs no base class. cotrain makes one for each trajectory, in a process beside the engines.
"""

import random
import re

RULES = "You cannot compute. Ask the calculator, one step at a time: calc(A*B) or calc(A+B). When you have the result, say only the number."
CALL = re.compile(r"\s*calc\((\d{1,9})\s*([*+])\s*(\d{1,9})\)\s*")


class Calculator:
    """One question of the form A * B + C, with one that is answered before it as an example."""

    def __init__(self, seed: int):
        generator = random.Random(seed)
        shown, asked = [
            (generator.randint(11, 99), generator.randint(11, 99), generator.randint(101, 999)) for _ in range(2)
        ]
        self._messages = [{"role": "system", "content": RULES}, *self._example(*shown)]
        self._messages.append({"role": "user", "content": self._question(*asked)})
        self._product, self._last = asked[0] * asked[1], ""
        self._answer = self._product + asked[2]
        self._results: list[int] = []

    def messages(self) -> list[dict[str, str]]:
        """Return the chat that the trajectory begins with."""
        return self._messages

    def step(self, text: str) -> str | None:
        """Answer a call, or end the trajectory. What is wrong with a call is an answer too."""
        self._last = text
        if (call := CALL.fullmatch(text)) is None:
            return "error: one step at a time, such as calc(12*34)" if text.strip().startswith("calc(") else None
        a, b = int(call[1]), int(call[3])
        self._results.append(a * b if call[2] == "*" else a + b)
        return f"= {self._results[-1]}"

    def reward(self) -> float:
        """Return 1 if the policy said the right number at the end, or else 0.3 for each of product and sum that it has got from the
        calculator."""
        if self._last.strip().removesuffix(".") == str(self._answer):
            return 1.0
        return 0.3 * sum(result in self._results for result in (self._product, self._answer))

    @staticmethod
    def _question(a: int, b: int, c: int) -> str:
        return f"What is {a} times {b}, plus {c}?"

    def _example(self, a: int, b: int, c: int) -> list[dict[str, str]]:
        said = [f"calc({a}*{b})", f"= {a * b}", f"calc({a * b}+{c})", f"= {a * b + c}", f"{a * b + c}"]
        turns = [{"role": ("assistant", "tool")[i % 2], "content": text} for i, text in enumerate(said)]
        return [{"role": "user", "content": self._question(a, b, c)}, *turns]
