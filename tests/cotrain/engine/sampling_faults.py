"""vLLM's verification on CPU with and without cotrain's patches, as JSON. A process of its own: patches cannot be undone.

Each of NUM_REQUESTS requests verifies one draft token, drawn from DRAFT, against the same target logits; requests have
temperature 0.5 and 2 in turns. The first output token must then have the distribution softmax(logits / temperature).
"""

import json
from types import SimpleNamespace

import torch
import vllm.v1.sample.rejection_sampler as rejection_sampler
from vllm.platforms import current_platform

from cotrain.engine import cpu as vllm_compat

NUM_REQUESTS, VOCAB = 20_000, 8
TEMPERATURES = (0.5, 2.0)


def metadata(temperature: torch.Tensor, top_k: torch.Tensor | None = None) -> SimpleNamespace:
    """What verification reads of vLLM's SamplingMetadata."""
    return SimpleNamespace(
        temperature=temperature, all_greedy=False, all_random=True, top_p=None, top_k=top_k, generators={}
    )


def expanded() -> dict[str, list]:
    """Parameters of requests with 2, 0 and 3 draft tokens; the last is greedy and counts as temperature 1."""
    running_sum = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperature = torch.tensor([0.5, 9.0, 0.0])
    top_k = torch.tensor([7, 9, 40], dtype=torch.int32)
    return {
        "temperature": rejection_sampler.expand_batch_to_tokens(temperature, running_sum, 5, 0, 1).tolist(),
        "top_k": rejection_sampler.expand_batch_to_tokens(top_k, running_sum, 5).tolist(),
    }


DRAFT = torch.softmax(torch.linspace(1, -1, VOCAB), dim=0)
GREEDY = torch.nn.functional.one_hot(torch.tensor(5), VOCAB).float()


def first_token_counts(top_k: int | None, draft: torch.Tensor = DRAFT, probs: bool | float = True) -> list[list[int]]:
    """[temperature, token] counts of the first output token.

    probs: are the drafter's probabilities handed over? A number stands in for each of them.
    """
    logits = torch.linspace(-2, 2, VOCAB)
    temperature = torch.tensor(TEMPERATURES).repeat(NUM_REQUESTS // 2)
    running_sum = torch.arange(1, NUM_REQUESTS + 1, dtype=torch.int32)
    sampling = metadata(temperature, None if top_k is None else torch.full((NUM_REQUESTS,), top_k))
    target = rejection_sampler.apply_sampling_constraints(logits.repeat(NUM_REQUESTS, 1), running_sum, sampling)
    output = rejection_sampler.rejection_sample(
        draft_token_ids=torch.multinomial(draft, NUM_REQUESTS, replacement=True).int(),
        num_draft_tokens=[1] * NUM_REQUESTS,
        max_spec_len=1,
        cu_num_draft_tokens=running_sum,
        draft_probs=(draft * probs).repeat(NUM_REQUESTS, 1) if probs else None,
        target_logits=target,
        bonus_token_ids=torch.zeros(NUM_REQUESTS, 1, dtype=torch.int32),
        sampling_metadata=sampling,
    )
    return [output[i::2, 0].bincount(minlength=VOCAB).tolist() for i in range(2)]


def seeded_pairs() -> list[list[str]]:
    """Recovered tokens of a seeded request and of one without a seed, as text, in each of 4 calls."""
    calls = []
    for _ in range(4):
        sampling = metadata(torch.ones(3))
        sampling.generators = {1: torch.Generator().manual_seed(7)}
        law = torch.full((32, 64), 1 / 64)
        ends = torch.tensor([0, 16, 32], dtype=torch.int32)
        drafts = torch.zeros(32, dtype=torch.int32)
        tokens = rejection_sampler.sample_recovered_tokens(
            16, [0, 16, 16], ends, drafts, None, law, sampling, torch.device("cpu")
        )
        calls.append([str(tokens[:16].tolist()), str(tokens[16:].tolist())])
    return calls


def accepted_at_rates(greedy: bool) -> list[int]:
    """Of NUM_REQUESTS requests with two draft tokens, how many accept none, one and both at conditional rates 0.8 and 0.25."""
    sampling = metadata(torch.full((NUM_REQUESTS,), 0.0 if greedy else 1.0))
    sampling.all_greedy, sampling.all_random = greedy, not greedy
    output = rejection_sampler.rejection_sample(
        torch.randint(VOCAB, (2 * NUM_REQUESTS,), dtype=torch.int32), [2] * NUM_REQUESTS, 2,
        torch.arange(2, 2 * NUM_REQUESTS + 1, 2, dtype=torch.int32), torch.full((2 * NUM_REQUESTS, VOCAB), 1 / VOCAB),
        torch.randn(2 * NUM_REQUESTS, VOCAB), torch.zeros(NUM_REQUESTS, 1, dtype=torch.int32), sampling,
        synthetic_mode=True, synthetic_conditional_rates=torch.tensor([0.8, 0.25]),
    )  # fmt: skip
    return ((output >= 0).sum(1) - 1).bincount(minlength=3).tolist()


def refused() -> str:
    """What vLLM says to acceptance at given rates."""
    try:
        return str(accepted_at_rates(False))
    except AssertionError as error:
        return str(error)


def findings() -> dict[str, object]:
    """Everything the tests look at."""
    torch.manual_seed(0)
    return {
        "expanded": expanded(),
        "counts": first_token_counts(None),
    }


if __name__ == "__main__":
    current_platform.register_triton_kernel_overrides()  # as vLLM's worker does
    torch.use_deterministic_algorithms(True)  # new memory then holds NaN or the largest integer, never a lucky value
    before = findings() | {"rates": refused()}
    vllm_compat.apply_patches()
    after = findings() | {
        "counts_top_k": first_token_counts(3),
        "counts_greedy": first_token_counts(None, GREEDY, False),
        "counts_nan": first_token_counts(None, DRAFT, torch.nan),
        "seeded": seeded_pairs(),
        "rates": [accepted_at_rates(greedy) for greedy in (False, True)],
    }
    print(json.dumps({"before": before, "after": after}))
