"""Greedy text with speculation against greedy text without: the same tokens, or where they part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cotrain.lossless.family import CheckResult


@dataclass(frozen=True)
class Difference:
    """Where the two texts of a prompt first differ; what follows cannot be compared."""

    prompt: int
    position: int
    plain: int | None
    """None: the text has ended."""
    speculated: int | None
    tied: bool
    """Both tokens have the largest logit, up to the number format."""


@dataclass(frozen=True)
class Identity:
    """Texts of some prompts, compared token by token."""

    num_prompts: int
    differences: tuple[Difference, ...]

    @property
    def num_identical(self) -> int:
        """Prompts without any difference."""
        return self.num_prompts - len(self.differences)

    @property
    def passed(self) -> bool:
        """No difference but ties."""
        return all(difference.tied for difference in self.differences)

    @property
    def first(self) -> Difference | None:
        """The earliest difference that is no tie."""
        return min((d for d in self.differences if not d.tied), key=lambda d: d.position, default=None)

    def result(self, setting: str) -> CheckResult:
        """As a check of a family: a difference is proof. Effect: share of prompts that differ other than by a tie."""
        differing = sum(not difference.tied for difference in self.differences)
        p = 0.0 if differing else 1.0
        return CheckResult("identity", setting, self.num_prompts, differing, differing / self.num_prompts, "share", p)

    def __str__(self) -> str:
        text = f"{self.num_identical}/{self.num_prompts} prompts identical"
        if tied := sum(difference.tied for difference in self.differences):
            text += f", {tied} up to a rounding tie"
        if self.first:
            text += f"; prompt {self.first.prompt} differs first at token {self.first.position}"
        return text


def compare_texts(
    plain: Sequence[Sequence[int]],
    speculated: Sequence[Sequence[int]],
    is_tie: Callable[[int, int], bool] = lambda prompt, position: False,
) -> Identity:
    """Texts [prompt][token] of both arms. is_tie(prompt, position) is asked where two tokens differ first.

    Raises ValueError when the arms have a different number of prompts, or none.
    """
    if len(plain) != len(speculated) or not plain:
        raise ValueError(
            f"{len(plain)} texts without and {len(speculated)} with speculation: give one a prompt in both"
        )
    differences = []
    for prompt, (a, b) in enumerate(zip(plain, speculated, strict=True)):
        if list(a) == list(b):
            continue
        shorter = min(len(a), len(b))
        position = next((i for i in range(shorter) if a[i] != b[i]), shorter)
        both_go_on = position < shorter
        token_a = a[position] if position < len(a) else None
        token_b = b[position] if position < len(b) else None
        tied = both_go_on and is_tie(prompt, position)
        differences.append(Difference(prompt, position, token_a, token_b, tied))
    return Identity(len(plain), tuple(differences))
