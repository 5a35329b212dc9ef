"""The one holder of the versions in force."""

from cotrain.records import Versions, WeightPayload
from cotrain.weights.versions import CurrentWeights

PAYLOAD = WeightPayload("file", 10, {})


def test_with_lag_earlier_versions_are_known_until_their_rollouts_must_have_ended() -> None:
    current = CurrentWeights(Versions(0, 0), max_policy_lag=1)
    current.record_attempt(1)  # refused: all go on with drafter 0
    current.record_policy(PAYLOAD, 1)
    assert current.versions == Versions(1, 0) and current.earlier == {Versions(0, 0), Versions(0, 1)}
    current.record_attempt(2)
    current.record_drafter(PAYLOAD, 2)
    current.record_policy(PAYLOAD, 2)
    assert current.versions == Versions(2, 2) and current.earlier == {Versions(1, 0), Versions(1, 2)}
    assert current.policy == current.drafter == PAYLOAD


def test_without_lag_only_the_current_versions_may_be_seen() -> None:
    current = CurrentWeights(Versions(3, 1))
    current.record_attempt(2)
    current.record_drafter(PAYLOAD, 2)
    assert current.versions == Versions(3, 2) and not current.earlier


def test_what_a_hosts_engines_serve_replaces_what_is_known() -> None:
    current = CurrentWeights(Versions(0, 1), max_policy_lag=9)
    current.record_policy(None, 1)
    current.observe(4, [Versions(4, 0), Versions(4, 1)])
    assert current.versions == Versions(4, 1) and current.earlier == {Versions(4, 0), Versions(4, 1)}
