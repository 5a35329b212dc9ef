"""Settings: the ways of generating that are tested, and the standard set of them."""

from dataclasses import dataclass

from drafters.base import SamplingParams

PLAIN = SamplingParams(1.0, 1.0, 0, "")
STANDARD_SAMPLINGS = (PLAIN, SamplingParams(0.7, 0.9, 0, ""), SamplingParams(1.3, 1.0, 20, ""))
GREEDY = SamplingParams(0.0, 1.0, 0, "")

METHODS = ("greedy", "probabilistic")


@dataclass(frozen=True)
class Setting:
    """Draft length, drafting method, and the sampling parameters of a batch, which may differ from request to request."""

    num_speculative_tokens: int  # 0: no speculation
    method: str  # greedy or probabilistic drafts; it has no effect without speculation
    samplings: tuple[SamplingParams, ...]  # see `sampling`; their draft_sample_method is not read
    unsteady: bool = False  # the draft length jumps between 0 and num_speculative_tokens, and drafters are swapped

    def sampling(self, request: int) -> SamplingParams:
        return self.samplings[request % len(self.samplings)]

    def is_seeded(self, request: int) -> bool:
        """Whether a request has a seed of its own, as every other request of each sampling has."""
        return request // len(self.samplings) % 2 == 0

    def num_checks(self, num_orders: int) -> int:
        """Most checks that `setting_checks` makes; num_orders: how many of ORDERS there are.

        Tokens are sorted by place into num_speculative_tokens + 2 strata, unless draft lengths that jump to 0 hide the places.
        """
        strata = self.num_speculative_tokens + 2 if self.num_speculative_tokens and not self.unsteady else 0
        return 2 + num_orders * (1 + strata)

    def __str__(self) -> str:
        k = self.num_speculative_tokens
        lengths = f"k=0..{k} jumping, any drafter swapped," if self.unsteady else f"k={k}"
        drafts = f"{lengths} {self.method}" if k else "no speculation"
        mixed = "mixed " if len(self.samplings) > 1 else ""
        return f"{drafts}, {mixed}{' | '.join(map(describe, self.samplings))}"


def describe(sampling: SamplingParams) -> str:
    """Write sampling parameters as T=0.7 top_p=0.9."""
    top_p = f" top_p={sampling.top_p:g}" if sampling.top_p < 1 else ""
    top_k = f" top_k={sampling.top_k}" if sampling.top_k > 0 else ""
    return f"T={sampling.temperature:g}{top_p}{top_k}"


def standard_settings(
    num_speculative_tokens: int, samplings: tuple[SamplingParams, ...] = STANDARD_SAMPLINGS
) -> list[Setting]:
    """Return one setting without speculation and, for both drafting methods, all sampling parameters, every shorter draft length,
    a mixed batch, and one setting during which draft length and drafter change.

    The first is a control. Without speculation the engine must have the target's distribution too: if that setting fails,
    the model of the forward pass is not the engine's, and the other settings say nothing about speculation.
    """
    settings = [Setting(0, METHODS[0], samplings[:1])]
    mixed = tuple(dict.fromkeys((*samplings, *STANDARD_SAMPLINGS, GREEDY)))
    for method in METHODS:
        settings += [Setting(num_speculative_tokens, method, (sampling,)) for sampling in samplings]
        settings += [Setting(k, method, samplings[:1]) for k in range(1, num_speculative_tokens)]
        settings.append(Setting(num_speculative_tokens, method, mixed))
        settings.append(Setting(num_speculative_tokens, method, samplings[:1], unsteady=True))
    return settings
