"""Evidence of a step as a test makes it up."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cotrain.publish.acceptance import ExpectedAcceptance, expected_of
from cotrain.publish.evidence import Evidence, FreshScores, Publication
from cotrain.records import Rollout, RolloutBatch, Versions
from drafters.scores import RolloutAcceptance


def expected_from(rollouts: Sequence[Rollout]) -> ExpectedAcceptance:
    """Served counts of these rollouts as the expectation for those after them, at every draft length alike."""
    counted = [(r.prompt_id, np.array(r.verification_steps)) for r in rollouts if r.verification_steps]
    steps = np.array([float(len(own)) for _, own in counted])
    longest = max(int(own[:, 0].max()) for _, own in counted)
    accepted = np.array([[(own[:, 1] > k).sum() for k in range(longest)] for _, own in counted], np.float64)
    known = np.ones(len(counted), np.int64)
    scores = [RolloutAcceptance(steps, accepted[:, :k], known) for k in range(1, accepted.shape[1] + 1)]
    found = expected_of(scores, [prompt for prompt, _ in counted])
    assert found is not None
    return found


def evidence_of(batch: RolloutBatch, versions: Versions, **changes: Any) -> Evidence:
    """Evidence of a step that scored no drafter; nothing is expected of the serving one unless `changes` say so."""
    serving = Publication(versions.drafter)
    evidence = Evidence(1, batch, versions, serving, FreshScores([], [], None, 0, []))
    return replace(evidence, **changes)
