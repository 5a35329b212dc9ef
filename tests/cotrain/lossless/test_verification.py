"""Strata of a verification step, and the laws of accepted and recovered tokens when the drafter's are known."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from cotrain.lossless.draws import draws_of
from cotrain.lossless.goodness import uniformity_check
from cotrain.lossless.verification import (
    by_stratum,
    step_strata,
)
from tests.cotrain.lossless.all_checks import all_checks
from tests.cotrain.lossless.conftest import MODEL, draws
from tests.cotrain.lossless.simulated_sampler import Setting, speculate


def test_tokens_are_sorted_by_what_was_accepted_before_them():
    assert step_strata([2, 2, 0, 2], [2, 0, 0, 1], num_tokens=8) == [
        "undrafted",
        *("drafted 1", "drafted 2", "bonus"),
        "drafted 1",
        "undrafted",
        *("drafted 1", "drafted 2"),
    ]


def test_the_last_step_may_reach_past_the_end():
    assert step_strata([3], [3], num_tokens=3) == ["undrafted", "drafted 1", "drafted 2"]


@pytest.mark.parametrize(
    ("drafted", "accepted", "num_tokens", "message"),
    [
        ([2], [3], 5, "must be 0..2"),
        ([2, 2], [2], 5, "give both"),
        ([2], [2], 9, "account for 4 of 9"),
        ([2, 2], [2, 0], 4, "go on after the 4"),
    ],
)
def test_steps_that_do_not_fit_are_refused(drafted, accepted, num_tokens, message):
    with pytest.raises(ValueError, match=message):
        step_strata(drafted, accepted, num_tokens)


def test_the_simulated_strata_are_those_of_the_steps():
    """The simulator tells offsets apart by itself; an engine reports accepted tokens a step."""
    run = speculate(MODEL, Setting(k=2), 1, 40, np.random.default_rng(0))
    starts = np.r_[np.flatnonzero(run.offset == 0), len(run.token)]
    accepted = [int(run.accepted[a:b].sum()) for a, b in pairwise(starts)]
    accepted[-1] = 2  # cut by the end of the text
    assert step_strata([2] * len(accepted), accepted, len(run.token), undrafted=0) == list(run.strata)


@pytest.fixture(scope="module", params=["probabilistic", "greedy"])
def run(request):
    setting = Setting(drafts=request.param)
    emitted = speculate(MODEL, setting, 100, 50, np.random.default_rng(1))
    emitted = emitted.select(emitted.offset < emitted.drafted)
    p = torch.from_numpy(MODEL.p(setting))[emitted.context]
    q = torch.from_numpy(MODEL.q_of(setting))[emitted.context]
    return setting, emitted, p, q


def test_accepted_tokens_alone_do_not_have_the_targets_law(run):
    """The trap that strata by the past avoid: a lossless engine would be called lossy."""
    setting, emitted, _, _ = run
    rng = np.random.default_rng(3)
    by_outcome = by_stratum(draws(emitted, setting), np.where(emitted.accepted, "accepted", "recovered"), 1)
    assert min(r.p for part in by_outcome.values() for r in all_checks(part, "", rng)) < 1e-10


def test_known_drafter_laws_find_a_bug_with_fewer_tokens():
    """Ordered by q / p the distance is the whole total variation distance."""
    setting, rng = Setting(), np.random.default_rng(4)
    emitted = speculate(MODEL, setting, 200, 50, rng, "recovered token from p")
    p = torch.from_numpy(MODEL.p(setting))[emitted.context]
    q = torch.from_numpy(MODEL.q_of(setting))[emitted.context]
    found = draws_of(p.log(), torch.from_numpy(emitted.token), {"q / p": -q / p})
    by_ratio, by_probability = (uniformity_check(found, "", rng, order) for order in ("q / p", "probability"))
    assert by_ratio.effect > 1.5 * by_probability.effect
    assert by_ratio.p < by_probability.p


def test_small_strata_are_left_out():
    setting = Setting()
    emitted = speculate(MODEL, setting, 20, 50, np.random.default_rng(5))
    sizes = {name: len(part) for name, part in by_stratum(draws(emitted, setting), emitted.strata, 100).items()}
    assert "drafted 1" in sizes
    assert min(sizes.values()) >= 100
    with pytest.raises(ValueError, match="1 strata for 1000 draws"):
        by_stratum(draws(emitted, setting), ["bonus"], 1)
