"""A hook that fails is left out, and off at its third failure."""

from cotrain.engine.host.breaker import MOST_FAILURES, Breaker


def test_a_hook_that_fails_is_off_at_the_third_time() -> None:
    breaker, calls = Breaker(), []

    def broken(number: int) -> int:
        calls.append(number)
        raise RuntimeError("planted")

    assert [breaker.call(broken, n) for n in range(5)] == [None] * 5
    assert calls == [0, 1, 2] and breaker.off == ["broken"] and breaker.failures["broken"] == MOST_FAILURES
    assert breaker.call(divmod, 7, 2) == (3, 1)


def test_engines_of_one_process_do_not_share_failures() -> None:
    first, second = Breaker(), Breaker()
    for _ in range(MOST_FAILURES):
        first.call(divmod, 1, 0)
    assert first.off == ["divmod"] and first.call(divmod, 7, 2) is None
    assert second.off == [] and second.call(divmod, 7, 2) == (3, 1)
