"""One row for all responses to a prompt, which the policy then reads once.

Worked example, prompt [7 8], responses [4 5 6] and [3 9]. Each response goes on where the prompt ends, and sees the prompt and itself:

    token_ids   7 8 4 5 3        positions   0 1 2 3 2        parts   0 0 1 1 2

A token of part p sees the tokens before it of parts 0 and p. Log-probs and gradients are those of separate rows, up to rounding.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.records import ScoredRollout

LONGEST = 4096
"""Most tokens of a shared row, whose mask has as many bytes as their square."""

LARGEST_ERROR = 0.05
"""Relative difference of hidden states between a shared row and separate ones that 16-bit rounding may make. Another mask makes more."""


def input_tokens(row: Sequence[ScoredRollout]) -> int:
    """Count the tokens that the model reads: the prompt, and each response without its last token."""
    return len(row[0].rollout.prompt_token_ids) + sum(len(scored.rollout.token_ids) - 1 for scored in row)


def rows_of(rollouts: Sequence[ScoredRollout], most: int) -> list[list[ScoredRollout]]:
    """Put rollouts of one prompt into rows of at most `most` tokens, where that makes less work in every layer, else alone.

    Work that grows with tokens always becomes less. Attention grows with their square, so a row is shared if its square is not above the
    sum of theirs: with 4 samples, if responses are half as long as the prompt or shorter.
    """
    by_prompt, rows = defaultdict[tuple[int, ...], list[ScoredRollout]](list), list[list[ScoredRollout]]()
    for scored in rollouts:
        by_prompt[tuple(scored.rollout.prompt_token_ids)].append(scored)
    for prompt, group in by_prompt.items():
        parts, room = list[list[ScoredRollout]](), 0
        for scored in group:
            added = len(scored.rollout.token_ids) - 1
            if not parts or added > room:
                parts.append([])
                room = min(most, LONGEST) - len(prompt)
            parts[-1].append(scored)
            room -= added
        for part in parts:
            pays = input_tokens(part) ** 2 <= sum(input_tokens([scored]) ** 2 for scored in part)
            rows += [part] if pays else [[scored] for scored in part]
    return rows


def positions_and_parts(row: Sequence[ScoredRollout]) -> tuple[Tensor, Tensor]:
    """Return the position of each token of a row in its own text, and its part: 0 for the prompt, i for the i-th response."""
    prompt = len(row[0].rollout.prompt_token_ids)
    lengths = [len(scored.rollout.token_ids) - 1 for scored in row]
    positions = [torch.arange(prompt), *(torch.arange(prompt, prompt + length) for length in lengths)]
    return torch.cat(positions), torch.arange(len(row) + 1).repeat_interleave(torch.tensor([prompt, *lengths]))


def mask_of(parts: Tensor) -> Tensor:
    """Return which tokens each token sees, [B, 1, L, L] bool. parts: [B, L]; padding may have any."""
    seen, sees = parts[:, None, None, :], parts[:, None, :, None]
    causal = torch.ones(parts.shape[1], parts.shape[1], dtype=torch.bool, device=parts.device).tril()
    return causal & ((seen == 0) | (seen == sees))


@torch.no_grad()
def can_share(policy: ResponseLogProbs) -> bool:
    """Whether a model on the CPU computes the same in a shared row as in separate ones. It is tried on a short one.

    A model with other layers than full attention carries something from token to token, or sees a window of them, and cannot.
    """
    config = policy.model.config.get_text_config()
    kinds, window = getattr(config, "layer_types", None) or (), getattr(config, "sliding_window", None)
    if {*kinds} - {"full_attention"} or (window is not None and window < LONGEST):
        return False
    prompt, first, second = [3, 5, 7, 11, 13], [17, 19, 23], [29, 31]
    parts = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 5, 6]])

    def hidden(tokens: list[int], **options: Tensor) -> Tensor:
        return policy.last_hidden(torch.tensor([tokens]) % config.vocab_size, **options).last_hidden_state[0].float()

    try:
        shared = hidden(prompt + first + second, attention_mask=mask_of(parts), position_ids=positions)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # a model's own code refuses the mask
        return False
    alone = torch.cat([hidden(prompt + first), hidden(prompt + second)[5:]])
    return float((shared - alone).norm() / alone.norm()) < LARGEST_ERROR
