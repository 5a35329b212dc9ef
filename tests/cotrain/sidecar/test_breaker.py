"""A hook that fails is left out, and off at its third failure."""

import pytest

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


def test_what_failed_on_one_rank_is_off_on_all() -> None:
    first, second = Breaker(), Breaker()
    for _ in range(MOST_FAILURES):
        second.call(divmod, 1, 0)
    first.call(int, "")
    for breaker in (first, second):
        breaker.agree([first.failures.copy(), second.failures.copy()])
        assert breaker.off == ["divmod"] and breaker.stopped and breaker.failures["int"] == 1


def test_an_error_of_torch_where_ranks_wait_for_each_other_is_the_hosts() -> None:
    def drafts(error: Exception) -> None:
        raise error

    breaker = Breaker({"drafts"})
    for error in (RuntimeError("out of memory"), MemoryError()):
        with pytest.raises(type(error)):
            breaker.call(drafts, error)
    assert breaker.call(drafts, ValueError("of our own, and so on all ranks")) is None
    assert breaker.failures == {"drafts": 1}
