"""Seconds that the learner takes for a step's responses, from the floating-point operations of a transformer."""

from collections.abc import Sequence
from dataclasses import dataclass

from cotrain.simulation.rollout import requests_of


@dataclass(frozen=True)
class Learner:
    """Log probabilities and an update for all tokens of the prompts and responses.

    active_parameters: of the policy, for one token. attention_width: layers x heads x head dimension. flops_per_s: peak of all
    devices together, of which the two stages reach the shares mfu.
    """

    active_parameters: float
    attention_width: float
    flops_per_s: float
    train_mfu: float = 0.4
    logprob_mfu: float = 0.25

    def seconds(self, lengths: Sequence[int], prompt_tokens: Sequence[int] | int) -> dict[str, float]:
        """logprob and train.

        A forward pass is 2 operations for each active parameter and token, and 4 for each unit of attention width and pair
        of tokens, of which a causal model computes half (Megatron-LM, arXiv 2104.04473); a backward pass is two forward ones.
        """
        requests, prompts = requests_of(lengths, prompt_tokens)
        sequences = (requests + prompts).astype(float)
        forward = float((2 * self.active_parameters * sequences + 2 * self.attention_width * sequences**2).sum())
        speeds = {"logprob": self.logprob_mfu, "train": self.train_mfu / 3}
        return {name: forward / (self.flops_per_s * speed) for name, speed in speeds.items()}
