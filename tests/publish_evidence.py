"""What a drafter is expected to reach, as a test reads it off rollouts that it was served on."""

from collections.abc import Sequence

import torch

from cotrain.publish.acceptance import ExpectedAcceptance, expected_of
from cotrain.records import Rollout
from drafters.acceptance import RolloutAcceptance


def expected_from(rollouts: Sequence[Rollout]) -> ExpectedAcceptance:
    """Served counts of these rollouts as the expectation for those after them, at every draft length alike."""
    counted = [(r.prompt_id, r.speculation) for r in rollouts if r.speculation is not None and r.speculation.num_drafts]
    steps = torch.tensor([float(counts.num_drafts) for _, counts in counted], dtype=torch.float64)
    accepted = torch.tensor([counts.accepted_per_position for _, counts in counted], dtype=torch.float64)
    known = torch.ones(len(counted), dtype=torch.int64)
    scores = [RolloutAcceptance(steps, accepted[:, :k], known) for k in range(1, accepted.shape[1] + 1)]
    found = expected_of(scores, [prompt for prompt, _ in counted])
    assert found is not None
    return found
