"""Which requests are tapped: chosen before they run, as many as fit by the lengths of earlier ones, each equally often."""

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from cotrain.engine.tap import FeatureTap
from cotrain.engine.tap_admission import (
    Admission,
    TapRequest,
    first_of_each_prompt,
    left_out,
)

ROW = 100


def groups(prompts: int, samples: int) -> dict[str, TapRequest]:
    return {f"{p}/{i}": TapRequest(str(p), 50, 150) for p in range(prompts) for i in range(samples)}


def choose(
    requests: dict[str, TapRequest], max_bytes: int, seed: object = 0, share: float = 1.0
) -> dict[str, TapRequest]:
    return Admission(max_bytes, ROW, str(seed)).choose(requests, share)


def test_all_are_tapped_when_all_fit() -> None:
    requests = groups(4, 4)
    exactly = (4 * 50 + 16 * 150) * ROW
    assert list(choose(requests, exactly)) == list(requests)
    assert len(choose(requests, exactly - 1)) == 15


def test_room_is_reserved_for_the_longest_responses_while_lengths_are_unknown() -> None:
    chosen = choose(groups(8, 8), 3000 * ROW)
    prompts = {request.prompt for request in chosen.values()}
    assert 3000 - 200 < len(chosen) * 150 + len(prompts) * 50 <= 3000


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_every_sample_is_tapped_equally_often_over_the_steps(share: float) -> None:
    counts = Counter(name for step in range(400) for name in choose(groups(4, 4), 80_000, step, share))
    mean = sum(counts.values()) / 16
    assert 50 < mean < 120
    assert all(0.6 * mean < count < 1.4 * mean for count in counts.values()) and len(counts) == 16


def test_no_more_is_tapped_than_the_share() -> None:
    numbers = [len(choose(groups(64, 8), 10**9, step, share=0.1)) for step in range(50)]
    assert 51.2 - 5 < np.mean(numbers) < 51.2 + 5
    assert choose(groups(4, 4), 10**9, share=False) == {} and len(choose(groups(4, 4), 10**9, share=True)) == 16


def test_a_prompt_that_does_not_fit_is_not_passed_over_for_a_shorter_one() -> None:
    requests = {str(i): TapRequest(str(i), 10 if i % 2 else 400, 100) for i in range(40)}
    chosen = [choose(requests, 300_000, step) for step in range(300)]
    lengths = [request.prompt_length for step in chosen for request in step.values()]
    # Half, but that the one which does not fit at the end is a long one more often than not; else it would be 0.8.
    assert lengths.count(10) / len(lengths) == pytest.approx(0.53, abs=0.03)


def test_one_is_tapped_however_long_it_may_get() -> None:
    admission = Admission(100, ROW, "")
    assert len(admission.choose(groups(2, 2))) == 1
    assert admission.choose({"later": TapRequest("p", 50, 150)}) == {}
    assert admission.dropped == {"no room in the tap": 4}


def test_the_first_request_of_each_prompt_computes_it() -> None:
    """The others then find it in the prefix cache, even in the same step."""
    tapped = {"a": TapRequest("x", 2, 30), "b": TapRequest("x", 2, 7), "c": TapRequest("y", 1, 30)}
    assert [name for name in tapped if name in first_of_each_prompt(tapped)] == ["a", "c"]


def test_what_runs_already_keeps_its_room() -> None:
    requests, rows = groups(4, 4), 4 * 50 + 16 * 150
    later = {f"later {name}": request._replace(prompt=f"later {request.prompt}") for name, request in requests.items()}
    for room, number in ((2 * rows, 16), (rows, 0), (rows + 400, 2)):
        admission = Admission(room * ROW, ROW, "")
        assert len(admission.choose(requests)) == 16
        assert len(admission.choose(later)) == number


def learnt(lengths: list[int], max_bytes: int) -> Admission:
    """An admission that has seen responses of these lengths end."""
    admission = Admission(max_bytes, ROW, "")
    names = {f"ended {i}": length for i, length in enumerate(lengths)}
    admission.choose({name: TapRequest(name, 1, 1) for name in names}, share=0.0)
    admission.observe(names)
    return admission


def test_room_is_reserved_by_the_lengths_of_earlier_responses() -> None:
    requests = {str(i): TapRequest(str(i // 4), 0, 32_000) for i in range(400)}
    assert len(learnt([100, 300] * 31, 64_000 * ROW).choose(requests)) == 2, "too few have ended"
    chosen = learnt([100, 300] * 32, 64_000 * ROW).choose(requests)
    alike = Counter(request.prompt for request in chosen.values())
    spread = 100 * sum(number**2 for number in alike.values()) ** 0.5  # prompts of their own decide the lengths
    assert 64_000 - 300 < len(chosen) * 200 + 3 * spread <= 64_000
    short = {name: request._replace(max_new_tokens=20) for name, request in requests.items()}
    assert len(learnt([100, 300] * 32, 8_000 * ROW).choose(short)) == 400, "never more than they can get"


def test_short_responses_that_end_first_do_not_count_before_the_others() -> None:
    admission = Admission(64_000 * ROW, ROW, "")
    admission.choose({str(i): TapRequest(str(i), 0, 32_000) for i in range(100)}, share=0.0)
    admission.observe({str(i): 1 for i in range(1, 100)})
    later = {f"later {i}": TapRequest(str(i), 0, 32_000) for i in range(100)}
    assert len(admission.choose(later)) == 2
    admission.observe({"0": 900})
    admission.tapped.clear()
    assert len(admission.choose(later)) > 50


def request_of_a_host(name: str, changes: dict[str, Any] | None = None, **sampling: Any) -> Any:
    fields = {"req_id": name, "prompt_token_ids": [1, 2, 3], "prefill_token_ids": None}
    fields |= {"mm_features": [], "lora_request": None}
    law = SamplingParams(max_tokens=7, **sampling)
    return SimpleNamespace(**fields | {"sampling_params": law} | (changes or {}))


def test_a_share_of_a_hosts_requests_is_tapped_as_long_as_there_is_room() -> None:
    admission = Admission(100 * ROW, ROW, "seed")
    tapped = admission.admit([request_of_a_host(str(i)) for i in range(40)], 0.25)
    assert 4 < len(tapped) < 14 and tapped == admission.tapped and not +admission.dropped
    assert {request[1:3] for request in tapped.values()} == {(3, 7)}
    assert all(request.rank % 1 < 0.25 for request in tapped.values())
    admission.admit([request_of_a_host(str(i)) for i in range(100, 140)], 0.25)
    room = (100 - 3) // 7
    assert len(admission.tapped) == room and admission.dropped["no room in the tap"] > 0
    admission.observe(dict.fromkeys(admission.tapped, 7))
    assert not admission.tapped
    assert admission.admit([request_of_a_host(str(i)) for i in range(200, 220)], 0.25)


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


WORDS = {"lora_request": SimpleNamespace(lora_name="words")}


@pytest.mark.parametrize(("adapter", "tapped"), [("", "0"), ("words", "1"), ("others", ""), ("*", "01")])
def test_requests_of_one_adapter_are_tapped_unless_all_are_asked_for(adapter: str, tapped: str) -> None:
    admission = Admission(100 * ROW, ROW, "seed")
    requests = [request_of_a_host("0"), request_of_a_host("1", WORDS)]
    chosen = admission.admit(requests, 1.0, adapter)
    assert "".join(chosen) == tapped
    reasons = {"0": "without an adapter", "1": "adapter words"}
    assert +admission.dropped == {reasons[name]: 1 for name in reasons if name not in tapped}
    assert len({request.prompt for request in chosen.values()}) == len(chosen), "an adapter's rows are its own"


def test_ever_new_adapters_of_a_host_do_not_add_counts_for_ever() -> None:
    admission = Admission(100 * ROW, ROW, "seed")
    for number in range(500):
        lora = {"lora_request": SimpleNamespace(lora_name=f"version {number}")}
        admission.admit([request_of_a_host(str(number), lora)], 1.0)
    assert len(+admission.dropped) <= 65 and admission.dropped.total() == 500


def test_what_goes_on_after_a_preemption_is_not_chosen_again() -> None:
    admission = Admission(100 * ROW, ROW, "seed")
    admission.admit([request_of_a_host("0")], 1.0)
    goes_on = {"prefill_token_ids": [1, 2, 3]}
    again = [request_of_a_host("0", goes_on), request_of_a_host("1", {"prefill_token_ids": [1, 2, 3, 4]})]
    assert admission.admit(again, 1.0) == {} and not +admission.dropped
    assert admission.admit([request_of_a_host("2", goes_on)], 1.0).keys() == {"2"}


def lognormal(rng: random.Random) -> int:
    """A response length as policies that reason write them: half below 1,000 tokens, one in twenty at the limit of 8,192."""
    return max(1, min(8192, int(rng.lognormvariate(np.log(1000), 1.3))))


def uniform(rng: random.Random) -> int:
    return rng.randint(100, 3000)


PROMPT_TOKENS, SAMPLES, RUNNING = 4, 4, 48


def simulated(
    length_of: Callable[[random.Random], int], max_rows: int, groups_: int, known: float = 1.0, seed: int = 7
) -> tuple[list[int], list[int], int]:
    """Run groups of requests through admission and tap. Returns the lengths of all responses, of those kept, and the drops.

    Groups enter as others end, as they do with lag, and RUNNING requests grow by 256 tokens at a time. Samples of a prompt have
    similar lengths. known: the lengths that the admission learns are this many times the true ones.
    """
    rng, tap, lengths, kept = random.Random(seed), FeatureTap(), list[int](), list[int]()
    admission = Admission(max_rows * 8, 8, "seed")
    running: dict[str, list[int]] = {}  # tokens so far and length, by name
    entering = iter(range(groups_))
    while True:
        while len(running) < RUNNING and (group := next(entering, None)) is not None:
            scale = length_of(rng)
            of_group = {f"{group}/{i}": max(1, min(8192, int(scale * rng.uniform(0.7, 1.3)))) for i in range(SAMPLES)}
            tapped = admission.choose({name: TapRequest(str(group), PROMPT_TOKENS, 8192) for name in of_group})
            tap.start(tapped, max_rows * 8)
            running |= {name: [0, length] for name, length in of_group.items()}
        if not running:
            return lengths, kept, tap.dropped
        for name, state in list(running.items()):
            grown = min(state[1], state[0] + 256) - state[0]
            rows = np.zeros((grown, 8), np.uint8)
            tap.record(name, PROMPT_TOKENS + state[0], np.zeros(grown, np.int64), [rows], torch.float32, 0)
            state[0] += grown
        ended = {group for group in {name.split("/")[0] for name in running}
                 if all(s[0] == s[1] for n, s in running.items() if n.split("/")[0] == group)}  # fmt: skip
        for name in [name for name in running if name.split("/")[0] in ended]:
            length = running.pop(name)[1]
            lengths.append(length)
            admission.observe({name: int(length * known)})
            if name in tap.requests:
                kept.append(length)
                tap._forget(name)


@pytest.mark.parametrize("length_of", [lognormal, uniform])
def test_tapped_lengths_are_those_of_all_responses(length_of: Callable[[random.Random], int]) -> None:
    """There is room for a third of what runs, hardly anything outgrows it, and long responses are kept as often as short ones."""
    lengths, kept, dropped = simulated(length_of, 64 * 1500, 1000)
    assert len(kept) > 0.3 * len(lengths) and dropped < 0.03 * len(kept)
    deviation = np.std(lengths) * (SAMPLES / len(kept)) ** 0.5  # of the mean, if samples of a prompt were all alike
    assert abs(np.mean(kept) - np.mean(lengths)) < 2 * deviation < 0.15 * np.mean(lengths)


def test_responses_that_outgrow_the_tap_favour_short_ones_by_less_than_what_is_dropped() -> None:
    """Responses get three times as long as they were. If those that need the room were dropped, the mean would fall by 0.19."""
    lengths, kept, dropped = simulated(lognormal, 64 * 1500, 1000, known=0.3)
    share = dropped / (dropped + len(kept))
    assert 0.15 < share < 0.3
    assert np.mean(kept) / np.mean(lengths) - 1 > -0.6 * share


def test_what_has_failed_frees_its_room_and_tells_no_length() -> None:
    admission = Admission(20 * ROW, ROW, "seed")
    first = admission.choose({"a": TapRequest("p", 4, 10), "b": TapRequest("q", 4, 10)})
    assert len(first) == 1, "the other one finds no room"
    admission.forget(["a", "b"])
    assert len(admission.choose({"c": TapRequest("r", 4, 10)})) == 1 and len(admission.tapped) == 1
    admission.observe({"c": 7})
    assert [*admission._lengths] == [7]
