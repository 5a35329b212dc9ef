"""Which requests are tapped: chosen before they run, within the bound at their greatest length, each now and then."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams

from cotrain.config.schema import FeatureTapConfig, RolloutConfig
from cotrain.engine.tap_admission import (
    Admission,
    TapRequest,
    choose,
    fewest_tapped,
    first_of_each_prompt,
    left_out,
    reserved_bytes,
)

ROW = 100


def groups(prompts: int, samples: int) -> dict[str, TapRequest]:
    return {f"{p}/{i}": TapRequest(str(p), 50, 150) for p in range(prompts) for i in range(samples)}


def test_all_are_tapped_when_all_fit():
    requests = groups(4, 4)
    exactly = (4 * 50 + 16 * 150) * ROW
    assert choose(requests, "0", exactly, ROW) == requests
    assert len(choose(requests, "0", exactly - 1, ROW)) == 15


def test_the_room_of_the_longest_response_is_reserved():
    chosen = choose(groups(8, 8), "0", 3000 * ROW, ROW)
    prompts = {request.prompt for request in chosen.values()}
    assert 3000 - 200 < len(chosen) * 150 + len(prompts) * 50 <= 3000


def test_every_sample_is_tapped_equally_often_over_the_steps():
    counts = Counter(name for step in range(400) for name in choose(groups(4, 4), str(step), 80_000, ROW))
    mean = sum(counts.values()) / 16
    assert 50 < mean < 120
    assert all(0.6 * mean < count < 1.4 * mean for count in counts.values()) and len(counts) == 16


def test_a_prompt_that_does_not_fit_is_not_passed_over_for_a_shorter_one():
    requests = {str(i): TapRequest(str(i), 10 if i % 2 else 400, 100) for i in range(40)}
    chosen = [choose(requests, str(step), 300_000, ROW) for step in range(300)]
    lengths = [request.prompt_length for step in chosen for request in step.values()]
    # Half, but that the one which does not fit at the end is a long one more often than not; else it would be 0.8.
    assert lengths.count(10) / len(lengths) == pytest.approx(0.53, abs=0.03)


def test_not_even_one_is_an_error_that_names_the_bound():
    message = r"rollout\.features\.max_bytes: one sequence takes 20000 bytes of the tap, above 19999"
    with pytest.raises(ValueError, match=message):
        choose(groups(1, 2), "0", 19_999, ROW)


def test_the_first_request_of_each_prompt_computes_it():
    """The others then find it in the prefix cache, even in the same step."""
    tapped = {"a": TapRequest("x", 2, 30), "b": TapRequest("x", 2, 7), "c": TapRequest("y", 1, 30)}
    assert [name for name in tapped if name in first_of_each_prompt(tapped)] == ["a", "c"]


def test_the_share_of_a_run_is_that_of_all_its_engines():
    rollout = RolloutConfig(prompts_per_step=5, samples_per_prompt=4, max_prompt_tokens=50, max_new_tokens=150)
    features = FeatureTapConfig(max_bytes=(2 * 50 + 8 * 150) * ROW)  # two whole prompts
    for num_engines, at_least, at_most in ((1, 7, 8), (2, 14, 16), (3, 20, 20), (9, 20, 20)):
        config = rollout.model_copy(update={"num_engines": num_engines, "features": features})
        assert at_least <= fewest_tapped(config, ROW) <= at_most


def test_what_runs_already_keeps_its_room():
    first = choose(groups(4, 4), "0", 10**9, ROW)
    taken = reserved_bytes(first, ROW)
    assert taken == (4 * 50 + 16 * 150) * ROW
    later = {f"later {name}": request._replace(prompt=f"later {request.prompt}") for name, request in first.items()}
    assert choose(later, "1", 2 * taken, ROW, taken) == later
    assert choose(later, "1", taken, ROW, taken) == {}  # nothing is free, which is no error
    with pytest.raises(ValueError, match="above 100; raise it"):
        choose(later, "1", 100, ROW, taken)


def request_of_a_host(name: str, changes: dict[str, Any] | None = None, **sampling: Any) -> Any:
    fields = {"req_id": name, "prompt_token_ids": [1, 2, 3], "prefill_token_ids": None}
    fields |= {"mm_features": [], "lora_request": None}
    law = SamplingParams(max_tokens=7, **sampling)
    return SimpleNamespace(**fields | {"sampling_params": law} | (changes or {}))


def test_a_share_of_a_hosts_requests_is_tapped_as_long_as_there_is_room() -> None:
    admission = Admission(0.25, 100 * ROW, ROW, "seed")
    tapped = admission.admit([request_of_a_host(str(i)) for i in range(40)])
    assert 4 < len(tapped) < 14 and tapped == admission.tapped
    assert set(tapped.values()) == {TapRequest(tapped[min(tapped)].prompt, 3, 7)} and not +admission.dropped
    admission.admit([request_of_a_host(str(i)) for i in range(100, 140)])
    room = (100 - 3) // 7
    assert len(admission.tapped) == room and admission.dropped["no room in the tap"] > 0
    for name in list(admission.tapped):
        del admission.tapped[name]
    assert admission.admit([request_of_a_host(str(i)) for i in range(200, 220)])
    assert Admission(1.0, ROW, ROW, "seed").admit([request_of_a_host("too long")]) == {}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (request_of_a_host("a", temperature=0.0), None),
        (request_of_a_host("a", temperature=0.7, top_p=0.9, top_k=5, stop=["."], seed=3), None),
        (request_of_a_host("a", extra_args={"cotrain": True}), None),
        (request_of_a_host("a", extra_args={"cotrain": False}), "opted out"),
        (request_of_a_host("a", repetition_penalty=1.1), "repetition_penalty is set"),
        (request_of_a_host("a", logit_bias={3: 1.0}), "logit_bias is set"),
        (request_of_a_host("a", {"sampling_params": None}), "not text to text"),
        (request_of_a_host("a", {"mm_features": ["image"]}), "not text to text"),
    ],
)
def test_what_is_left_out_of_the_tap(request_: Any, reason: str | None) -> None:
    assert left_out(request_) == reason


def test_what_goes_on_after_a_preemption_is_not_chosen_again() -> None:
    admission = Admission(1.0, 100 * ROW, ROW, "seed")
    admission.admit([request_of_a_host("0")])
    goes_on = {"prefill_token_ids": [1, 2, 3]}
    again = [request_of_a_host("0", goes_on), request_of_a_host("1", {"prefill_token_ids": [1, 2, 3, 4]})]
    assert admission.admit(again) == {} and not +admission.dropped
    assert admission.admit([request_of_a_host("2", goes_on)]).keys() == {"2"}
