"""One way to generate that is put to the test, and the usual set of them."""

from dataclasses import dataclass

from drafters.base import Sampler

PLAIN = Sampler(1.0, 1.0, 0, "")
STANDARD_SAMPLERS: tuple[Sampler, ...] = (PLAIN, Sampler(0.7, 0.9, 0, ""), Sampler(1.3, 1.0, 20, ""))
GREEDY = Sampler(0.0, 1.0, 0, "")

METHODS = ("greedy", "probabilistic")


@dataclass(frozen=True)
class Setting:
    """Draft length, drafting, and the sampling parameters of a batch, which may differ from request to request."""

    draft_tokens: int
    """0: no speculation."""
    method: str
    """greedy or probabilistic drafts; of no effect without any."""
    samplers: tuple[Sampler, ...]
    """Request i has samplers[i % len(samplers)]; their draft_sample_method is not read."""
    unsteady: bool = False
    """While it runs, the draft length jumps between 0 and draft_tokens, and drafters are swapped for each other."""

    def sampler(self, request: int) -> Sampler:
        """Sampling parameters of a request."""
        return self.samplers[request % len(self.samplers)]

    def is_seeded(self, request: int) -> bool:
        """Whether a request has a seed of its own: every other one of each sampler has."""
        return request // len(self.samplers) % 2 == 0

    def num_checks(self, num_orders: int) -> int:
        """Checks that `setting_checks` makes at most; num_orders counts BY_PROBABILITY too.

        Tokens are sorted by place into draft_tokens + 2 strata, unless draft lengths that jump to 0 hide the places.
        """
        strata = self.draft_tokens + 2 if self.draft_tokens and not self.unsteady else 0
        return 2 + num_orders * (1 + strata)

    def __str__(self) -> str:
        lengths = f"k=0..{self.draft_tokens} jumping, drafter swaps," if self.unsteady else f"k={self.draft_tokens}"
        drafts = f"{lengths} {self.method}" if self.draft_tokens else "no speculation"
        mixed = "mixed " if len(self.samplers) > 1 else ""
        return f"{drafts}, {mixed}{' | '.join(map(describe, self.samplers))}"


def describe(sampler: Sampler) -> str:
    """Write a sampler as T=0.7 top_p=0.9."""
    top_p = f" top_p={sampler.top_p:g}" if sampler.top_p < 1 else ""
    top_k = f" top_k={sampler.top_k}" if sampler.top_k > 0 else ""
    return f"T={sampler.temperature:g}{top_p}{top_k}"


def standard_settings(draft_tokens: int, samplers: tuple[Sampler, ...] = STANDARD_SAMPLERS) -> list[Setting]:
    """No speculation, then for both kinds of drafting: every sampler, every shorter draft length, a mixed batch, and
    one during which draft length and drafter change.

    The first is a control. Without speculation the engine must have the target's law too: if that setting fails, the
    model of the laws is not the engine's, and the other settings say nothing about speculation.
    """
    settings = [Setting(0, METHODS[0], samplers[:1])]
    mixed = tuple(dict.fromkeys((*samplers, *STANDARD_SAMPLERS, GREEDY)))
    for method in METHODS:
        settings += [Setting(draft_tokens, method, (sampler,)) for sampler in samplers]
        settings += [Setting(k, method, samplers[:1]) for k in range(1, draft_tokens)]
        settings.append(Setting(draft_tokens, method, mixed))
        settings.append(Setting(draft_tokens, method, samplers[:1], unsteady=True))
    return settings
