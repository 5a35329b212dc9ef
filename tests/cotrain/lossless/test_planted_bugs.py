"""Every planted bug is caught at a stated number of tokens, and a clean sampler raises no more alarms than stated."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from cotrain.lossless.checks import by_stratum
from cotrain.lossless.family import CheckResult, Verdict, judge
from tests.cotrain.lossless.conftest import MODEL, all_checks, draws, split
from tests.cotrain.lossless.simulated_sampler import BUGS, Emitted, Setting, speculate

ALPHA = 0.01
CHAIN = 50  # tokens of a chain
MAX_CHECKS = 15  # of the family below: 3 on all tokens and on each of 4 strata

PLAIN = Setting()
GREEDY = Setting(drafts="greedy")
TRUNCATED = Setting(temperature=0.8, top_k=8, top_p=0.9)
COLD = Setting(temperature=0.6, k=1)

ALL, BONUS, FIRST = "all tokens", "bonus", "drafted 1"
SHAPE, MEMBERS = "uniformity by probability", "uniformity by draft vocabulary"

CAUGHT = {  # bug: setting, tokens that suffice for power 0.99, and which check finds it then
    "draft temperature is not the ratio's": (PLAIN, 2000, SHAPE, ALL),
    "drafting stops at an unsure draft token": (PLAIN, 4000, SHAPE, FIRST),
    "truncation keeps the draft token": (TRUNCATED, 1000, "support", ALL),
    "renormalised draft vocabulary": (PLAIN, 8000, MEMBERS, ALL),
    "bonus token from the row before": (PLAIN, 3000, SHAPE, BONUS),
    "accepted prefix one too long": (PLAIN, 2000, MEMBERS, FIRST),
    "accepted prefix one too short": (GREEDY, 2000, SHAPE, ALL),
    "recovered token from q": (PLAIN, 1000, MEMBERS, ALL),
    "recovered token from p": (PLAIN, 2000, MEMBERS, ALL),
    "typical acceptance": (PLAIN, 1000, SHAPE, ALL),
    "greedy drafts treated as probabilistic": (GREEDY, 2000, SHAPE, ALL),
    "temperatures from uninitialised memory": (PLAIN, 2000, SHAPE, ALL),
}


def family(run: Emitted, setting: Setting, rng: np.random.Generator) -> list[CheckResult]:
    found = all_checks(draws(run, setting), ALL, rng)
    for name, part in by_stratum(draws(run, setting), run.strata).items():
        found += all_checks(part, name, rng)
    assert len(found) <= MAX_CHECKS
    return found


def verdict(run: Emitted, setting: Setting, rng: np.random.Generator) -> Verdict:
    return judge(family(run, setting, rng), ALPHA)


def runs_of(setting: Setting, tokens: int, count: int, rng: np.random.Generator, bug: str | None) -> list[Emitted]:
    return split(speculate(MODEL, setting, count * tokens // CHAIN, CHAIN, rng, bug), tokens // CHAIN)


def test_every_bug_has_its_sample_size():
    assert CAUGHT.keys() == set(BUGS)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug):
    """The power of one check of the family at Holm's strictest level, from 40 runs.

    sqrt(-2 log p) is close to normal under an alternative, so that its mean and deviation tell the power: 3 deviations
    above the critical value are a power of 0.9987, and above 0.99 with the error of 40 runs. Impossible tokens are
    close to Poisson: with a mean of 5 none at all has probability 0.007.
    """
    setting, tokens, check, stratum = CAUGHT[bug]
    rng = np.random.default_rng(BUGS.index(bug))
    runs = runs_of(setting, tokens, 40, rng, bug)
    found: list[CheckResult] = []
    for run in runs:
        of_stratum = draws(run, setting)
        if stratum != ALL:
            of_stratum = of_stratum.select(run.strata == stratum)
        found += [result for result in all_checks(of_stratum, stratum, rng) if result.check == check]
    strength = np.sqrt([-2 * np.log(max(result.p, 1e-300)) for result in found])
    critical = np.sqrt(-2 * np.log(ALPHA / MAX_CHECKS))
    assert len(found) == 40
    assert strength.min() > critical
    assert strength.mean() - critical > 3 * strength.std()
    if check == "support":
        assert np.mean([result.effect * result.num for result in found]) > 5

    judged = verdict(runs[0], setting, rng)
    assert not judged.passed
    assert str(judged).startswith("NOT lossless")
    assert any((result.check, result.setting) == (check, stratum) for result in judged.failures)


@pytest.fixture(scope="module")
def clean_families() -> list[list[CheckResult]]:
    """200 clean runs of 1000 tokens, 50 of each setting."""
    rng = np.random.default_rng(7)
    settings = (PLAIN, GREEDY, TRUNCATED, COLD)
    return [family(run, setting, rng) for setting in settings for run in runs_of(setting, 1000, 50, rng, None)]


@pytest.mark.parametrize("alpha", [0.01, 0.1])
def test_a_clean_sampler_raises_no_more_alarms_than_stated(clean_families, alpha):
    alarms = sum(not judge(results, alpha).passed for results in clean_families)
    assert alarms <= stats.binom.ppf(0.999, len(clean_families), alpha)


def test_the_family_is_not_blind(clean_families):
    """Alarms do come up when the stated rate allows many."""
    assert sum(not judge(results, 0.3).passed for results in clean_families) >= 10


@pytest.mark.parametrize("check", [SHAPE, MEMBERS])
def test_p_values_of_a_clean_sampler_are_uniform(clean_families, check):
    p = [result.p for results in clean_families for result in results if result.check == check]
    assert len(p) > 600
    assert all(stats.kstest(p[i::4], "uniform").pvalue > 1e-3 for i in range(4))
    assert np.mean(np.array(p) < 0.01) < stats.binom.ppf(0.9999, len(p), 0.01) / len(p)


def test_a_deterministic_drafter_may_stop_where_it_likes():
    """Greedy drafts are settled before anything is drawn, so that stopping at an unsure one loses nothing."""
    rng = np.random.default_rng(3)
    run = speculate(MODEL, replace(GREEDY, k=2), 200, CHAIN, rng, "drafting stops at an unsure draft token")
    assert verdict(run, replace(GREEDY, k=2), rng).passed


def test_more_tokens_find_a_bug_more_surely():
    rng = np.random.default_rng(5)
    setting, tokens, check, _ = CAUGHT["renormalised draft vocabulary"]
    medians = []
    for n in (tokens // 8, tokens // 2, 2 * tokens):
        runs = runs_of(setting, n, 11, rng, "renormalised draft vocabulary")
        p = [r.p for run in runs for r in all_checks(draws(run, setting), ALL, rng) if r.check == check]
        medians.append(np.median(p))
    assert all(a > 10 * b for a, b in pairwise(medians))
