"""Advice of a run with lag: given when its reason has lasted, once, and again when the reason has come back."""

from cotrain.run.advice import DRIFT_STEPS, STARVED_STEPS, Advice


def said(advice: Advice, steps: int, **row: float) -> list[int]:
    """Steps in which something was said."""
    fields = {name.replace("__", "/"): value for name, value in row.items()}
    return [step for step in range(steps) if advice.look(fields, 1)]


def test_a_learner_that_waits_most_of_the_time_is_starved() -> None:
    advice = Advice()
    assert said(advice, 60, idle__policy=0.6) == [STARVED_STEPS - 1]
    assert said(advice, 60, idle__policy=0.1) == []
    assert len(said(advice, 60, idle__policy=0.9)) == 1
    assert said(Advice(), 100, idle__policy=0.45) == []
    told = [Advice().look({"idle/policy": 0.9}, 1) for _ in range(40)]
    assert not any(told)  # a first step says nothing


def test_rollouts_far_from_the_policy_are_told_after_some_steps() -> None:
    advice = Advice()
    assert said(advice, 20, policy__behaviour_capped=0.3) == [DRIFT_STEPS - 1]
    assert said(advice, 3, policy__behaviour_capped=0.0) == []
    assert said(advice, 20, policy__behaviour_ess=0.2, policy__behaviour_masked=0.1) == [DRIFT_STEPS - 1]
    for _ in range(50):
        assert said(advice, DRIFT_STEPS - 1, policy__behaviour_masked=0.3) == []
        assert said(advice, 1, policy__behaviour_ess=0.8) == []


def test_the_advice_names_fields() -> None:
    advice = Advice()
    row = {"idle/policy": 0.8, "policy/behaviour_capped": 0.4}
    texts = [text for _ in range(STARVED_STEPS) for text in advice.look(row, 2)]
    assert [text.split(":")[0] for text in texts] == ["behaviour_drift", "starved"]
    assert "stream.max_policy_lag = 3" in texts[1] and "40% of the tokens" in texts[0]
