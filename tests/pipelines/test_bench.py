"""`cotrain bench` without an engine: which arms, which prompts, in which order, and the arithmetic of the report."""

import argparse
import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from cotrain.records import RolloutBatch, RolloutRequest
from drafters.base import Serving, TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.bench import command as bench_module
from pipelines.bench.command import Bench, add_arguments, choose_arms, main, prepare, take_turns
from pipelines.bench.report import ADAPTIVE, NO_SPECULATION, Arm, Measurement, StepTimes, markdown, plot, results
from tests.native_models import qwen3_next_model, write_native

GREEDY = Arm("greedy", 2)
NGRAM = Arm("ngram", 2)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "tiny:llama", *arguments])


def small_bench(**changes: Any) -> Bench:
    fields: dict[str, Any] = {
        "arms": [NO_SPECULATION, NGRAM, GREEDY, Arm("probabilistic", 2)], "batches": [1, 2], "rounds": 3, "groups": 1,
        "seed": 7, "model": Path("model"), "drafter": Path("drafter"), "serving": Serving("eagle3", (1, 2, 3)), "rollout": RolloutConfig(),
        "prompts": [[i] for i in range(6)], "threads": 1, "breakdown": False, "notes": [],
    }  # fmt: skip
    return Bench(**fields | changes)


def measured(arm: Arm, round_: int, seconds: float, **changes: Any) -> Measurement:
    turn = Measurement(
        arm=arm, batch=1, round=round_, num_tokens=60, decode_seconds=seconds, seconds=seconds + 1,
        num_drafts=0, num_draft_tokens=0, accepted_per_position=(),
    )  # fmt: skip
    return replace(turn, **changes)


def test_arms_are_all_that_is_possible_by_default() -> None:
    assert choose_arms(None, [1, 3], has_drafter=False, temperature=1.0) == [
        NO_SPECULATION, Arm("ngram", 1), Arm("ngram", 3)
    ]  # fmt: skip
    methods = {arm.method for arm in choose_arms(None, [1], has_drafter=True, temperature=0.0)}
    assert methods == {"none", "ngram", "greedy"}


def test_no_speculation_is_always_measured() -> None:
    assert choose_arms(["probabilistic"], [2], has_drafter=True, temperature=1.0) == [
        NO_SPECULATION, Arm("probabilistic", 2)
    ]  # fmt: skip


def test_the_adaptive_arm_comes_once_and_only_when_asked_for() -> None:
    arms = choose_arms(["greedy", ADAPTIVE], [1, 3], has_drafter=True, temperature=1.0)
    assert arms == [NO_SPECULATION, Arm("greedy", 1), Arm("greedy", 3), Arm(ADAPTIVE, 3)]
    assert [str(arm) for arm in arms[2:]] == ["greedy k=3", "adaptive k<=3"]
    assert ADAPTIVE not in {arm.method for arm in choose_arms(None, [1], has_drafter=True, temperature=1.0)}
    with pytest.raises(ValueError, match="--methods: adaptive need a drafter"):
        choose_arms([ADAPTIVE], [1], has_drafter=False, temperature=1.0)


def test_the_adaptive_arm_gives_the_choice_to_the_engine() -> None:
    log: list[Any] = []
    bench = small_bench(arms=[NO_SPECULATION, Arm(ADAPTIVE, 2)], batches=[2], rounds=1)
    assert bench.speculations == ["drafter"]
    assert {r.seed for r in bench.requests(Arm(ADAPTIVE, 2), 2, 1, 0)} == {None}, "its drafts are probabilistic"
    engines: Any = {"drafter": RecordingEngine("drafter", log)}
    asyncio.run(take_turns(bench, engines, io.StringIO()))
    turns = [entry for entry in log if entry != "reset"]
    assert turns == [("drafter", "", 0, 2), ("drafter", "probabilistic", None, 2)] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "greedy"], "--methods: greedy need a drafter; give --drafter"),
        (["--drafter", "d", "--methods", "probabilistic", "--temperature", "0"], "--methods: probabilistic drafts are"),
        (["--k", "0", "1"], "--k: 0 is below 1"),
        (["--batch", "0"], "--batch: 0 is below 1"),
        (["--tokens", "1"], "--tokens: 1 is below 2"),
        (["--groups", "0"], "--groups: 0 is below 1"),
        (["--rounds", "0"], "--rounds: 0 is below 1"),
        (["--drain", "--stop-at-eos"], "--drain: gives every response its length"),
        (["--threads", "0"], "--threads: 0 is below 1"),
        (["--tokens", "100000"], "--tokens: the longest prompt has .* positions of tiny:llama; lower --tokens"),
        (["--drafter", "nowhere"], "--drafter: nowhere/config.json does not exist"),
        (["--prompts", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(options(*arguments), tmp_path / "pulled")


def test_linear_attention_in_float32_is_refused_by_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    parsed = options("--dtype", "float32")
    parsed.model = str(write_native(tmp_path / "next", qwen3_next_model(), "Qwen3NextForCausalLM"))
    with pytest.raises(ValueError, match=r"^--dtype: vLLM computes linear attention on a CPU in bfloat16 only"):
        prepare(parsed, tmp_path)


def test_an_unknown_model_is_refused_by_the_option(tmp_path: Path) -> None:
    parsed = options()
    parsed.model = "tiny:none"
    with pytest.raises(ValueError, match=r"^--model: unknown model"):
        prepare(parsed, tmp_path)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    target = TargetSpec.from_pretrained(resolve_model("tiny:llama"))
    other = replace(target, hidden_size=2 * target.hidden_size)
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5))
    build_drafter(config, other, seed=0).save(tmp_path / "drafter", torch.float32)
    with pytest.raises(ValueError, match=r"--drafter: .*made for another target"):
        prepare(options("--drafter", str(tmp_path / "drafter")), tmp_path / "pulled")


def test_drafting_beyond_the_trained_depth_is_said(tmp_path: Path) -> None:
    target = TargetSpec.from_pretrained(resolve_model("tiny:llama"))
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5), trained_depth=2)
    build_drafter(config, target, seed=0).save(tmp_path / "drafter", torch.float32)
    prepared = prepare(options("--drafter", str(tmp_path / "drafter"), "--k", "2", "3"), tmp_path / "pulled")
    assert prepared.notes == ["k = 3 is beyond the 2 draft positions the drafter was trained for"]
    assert (prepared.serving, prepared.speculations) == (Serving("eagle3", (2, 4, 5)), ["drafter", "ngram"])


def test_the_whole_batch_is_prefilled_in_one_step(tmp_path: Path) -> None:
    prepared = prepare(options("--batch", "300", "--rounds", "2", "--tokens", "8"), tmp_path)
    assert prepared.speculations == ["ngram"]
    assert prepared.rollout.vllm["max_num_seqs"] == 300
    assert prepared.rollout.vllm["max_num_batched_tokens"] >= sum(map(len, prepared.prompts[:300]))


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--out: .* is not empty"):
        main(["--model", "tiny:llama", "--out", str(tmp_path)])


def test_responses_end_at_eos_only_when_asked(tmp_path: Path) -> None:
    assert prepare(options("--methods", "none"), tmp_path).rollout.ignore_eos
    assert not prepare(options("--methods", "none", "--stop-at-eos"), tmp_path).rollout.ignore_eos


def test_all_arms_of_a_round_get_the_same_requests() -> None:
    bench = small_bench()
    assert bench.requests(NO_SPECULATION, 2, 1, 0) == bench.requests(GREEDY, 2, 1, 0)
    assert [r.prompt_token_ids for r in bench.requests(GREEDY, 2, 1, 0)] == [[2], [3]]
    assert [r.prompt_token_ids for r in bench.requests(GREEDY, 2, 2, 0)] == [[4], [5]]
    assert [r.seed for r in bench.requests(GREEDY, 2, 1, 0)] == [9, 10]
    assert {r.seed for r in bench.requests(Arm("probabilistic", 1), 2, 1, 0)} == {None}


def test_a_batch_that_drains_does_so_alike_in_all_arms(tmp_path: Path) -> None:
    bench = prepare(options("--methods", "none", "--tokens", "10", "--batch", "4", "--drain"), tmp_path)
    lengths = {arm: [r.max_new_tokens for r in bench.requests(arm, 4, 1, 0)] for arm in (NO_SPECULATION, GREEDY)}
    assert lengths[NO_SPECULATION] == lengths[GREEDY] == [3, 5, 8, 10]
    assert [r.max_new_tokens for r in bench.requests(GREEDY, 16, 0, 0)][:4] == [2, 2, 2, 3]
    assert {r.max_new_tokens for r in small_bench().requests(GREEDY, 2, 1, 0)} == {None}


def test_no_two_turns_share_a_request() -> None:
    bench = small_bench(groups=3)
    seeds = [r.seed for round_ in range(2) for group in range(3) for r in bench.requests(GREEDY, 2, round_, group)]
    assert seeds == list(range(7, 19))


class RecordingEngine:
    """Notes what an engine is asked for."""

    decode_seconds = 1.0

    def __init__(self, name: str, log: list[Any]):
        self.name, self.log = name, log
        self.decoded = {2: (6, 0.5), 1: (2, 0.5)}  # two requests, then one

    async def set_draft_tokens(self, draft_tokens: int | None) -> None:
        self.draft_tokens, self.method = draft_tokens, ""

    async def set_draft_sample_method(self, method: str) -> None:
        self.method = method

    async def reset_prefix_cache(self) -> None:
        self.log.append("reset")

    async def generate(self, requests: list[RolloutRequest], tap: bool) -> RolloutBatch:
        self.log.append((self.name, self.method, self.draft_tokens, len(requests)))
        return RolloutBatch([], [], None, 1.0, 5 * len(requests))

    async def take_step_times(self) -> list[dict[str, float]]:
        return []


def test_every_round_runs_all_arms_and_starts_with_another() -> None:
    log: list[Any] = []
    engines: Any = {name: RecordingEngine(name, log) for name in ("drafter", "ngram")}
    console = io.StringIO()
    measurements, _ = asyncio.run(take_turns(small_bench(batches=[2]), engines, console))
    turns = [entry for entry in log if entry != "reset"]
    assert turns[:4] == [("drafter", "", 0, 2), ("ngram", "", 2, 2), ("drafter", "greedy", 2, 2),
                         ("drafter", "probabilistic", 2, 2)]  # fmt: skip
    assert turns[8:12] == [*turns[1:4], turns[0]]
    assert log[::2] == ["reset"] * len(turns)
    assert [(m.round, m.num_tokens) for m in measurements] == [(r, 8) for r in (0, 1, 2) for _ in range(4)]
    assert "warm-up, batch 2" in console.getvalue()
    assert "round 3/3, batch 2: 0 s, about 0:00 left" in console.getvalue()


def test_a_turn_is_the_sum_of_its_groups() -> None:
    engines: Any = {name: RecordingEngine(name, []) for name in ("drafter", "ngram")}
    bench = small_bench(batches=[2], groups=3, rollout=RolloutConfig(ignore_eos=True))
    measurements, _ = asyncio.run(take_turns(bench, engines, io.StringIO()))
    assert {(m.num_tokens, m.decode_seconds, m.seconds) for m in measurements} == {(3 * 8, 3.0, 3.0)}
    assert {(m.full_tokens, m.full_seconds) for m in measurements} == {(3 * 6, 1.5)}


@pytest.mark.parametrize(
    "asked_for",
    [{"drain": True, "rollout": RolloutConfig(ignore_eos=True)}, {"rollout": RolloutConfig(ignore_eos=False)}],
)
def test_where_responses_end_one_by_one_the_whole_turn_counts(asked_for: dict[str, Any]) -> None:
    engines: Any = {name: RecordingEngine(name, []) for name in ("drafter", "ngram")}
    measurements, _ = asyncio.run(take_turns(small_bench(batches=[2], **asked_for), engines, io.StringIO()))
    assert {(m.full_tokens, m.full_seconds, m.tokens_per_second) for m in measurements} == {(0, 0.0, 8.0)}


def test_speed_is_that_of_the_whole_batch_and_beside_it_that_until_the_end() -> None:
    plain = measured(NO_SPECULATION, 0, 2.0, full_tokens=60, full_seconds=2.0)
    drafted = measured(GREEDY, 0, 2.5, full_tokens=40, full_seconds=0.8)  # one response was slow
    _, row = results([plain, drafted], [])["arms"]
    assert (row["tokens_per_second"], row["ratio"], row["ratio_to_the_end"]) == pytest.approx((50.0, 50 / 30, 0.8))
    assert " 0.800 " in markdown(ABOUT, {"arms": [row], "breakdown": []})


ABOUT = {
    "date": "2026-11-21", "packages": {"vllm": "0.32.0"}, "threads": 2, "notes": ["k = 2 is much"],
    "machine": {"gpus": [], "cpu": "EPYC", "cores": 2, "load_average_before": 0.1},
    "options": vars(options("--drafter", "folder")),
}  # fmt: skip


def test_the_ratio_compares_within_a_round() -> None:
    """A machine that slows down threefold in the last round changes speeds, not ratios."""
    seconds = {0: 2.0, 1: 2.0, 2: 6.0}
    plain = [measured(NO_SPECULATION, r, s) for r, s in seconds.items()]
    drafted = [
        measured(GREEDY, r, s / speedup) for (r, s), speedup in zip(seconds.items(), (1.5, 1.2, 1.4), strict=True)
    ]
    none, greedy = results([*drafted, *plain], [])["arms"]
    assert (none["method"], none["ratio"], none["acceptance_length"]) == ("none", 1.0, None)
    assert none["tokens_per_second"] == 30.0
    assert (greedy["ratio"], greedy["ratio_min"], greedy["ratio_max"]) == pytest.approx((1.4, 1.2, 1.5))
    # Logs of 1.5, 1.2 and 1.4: mean 0.30808, standard deviation 0.11425.
    assert (greedy["ratio_mean"], greedy["ratio_error"]) == pytest.approx((1.36082, 0.08976), rel=1e-3)
    assert " 1.361 +- 0.090 " in markdown(ABOUT, {"arms": [none, greedy], "breakdown": []})


def test_a_single_round_has_no_error() -> None:
    _, greedy = results([measured(NO_SPECULATION, 0, 2.0), measured(GREEDY, 0, 1.0)], [])["arms"]
    assert (greedy["ratio_mean"], greedy["ratio_error"]) == (2.0, None)
    assert "+-" not in markdown(ABOUT, {"arms": [greedy], "breakdown": []})


def test_acceptance_length_counts_steps_without_a_draft() -> None:
    drafter = measured(GREEDY, 0, 1.0, num_drafts=40, num_draft_tokens=80, accepted_per_position=(16, 4))
    # n-gram found 5 drafts and had 6 tokens accepted: 60 tokens in 54 steps.
    ngram = measured(NGRAM, 0, 1.0, num_drafts=5, num_draft_tokens=9, accepted_per_position=(4, 2))
    _, ngram_row, drafter_row = results([measured(NO_SPECULATION, 0, 1.0), drafter, ngram], [])["arms"]
    assert drafter_row["acceptance_length"] == 1.5
    assert drafter_row["acceptance_per_position"] == [0.4, 0.1]
    assert ngram_row["acceptance_length"] == pytest.approx(60 / 54)
    assert ngram_row["acceptance_per_position"] == [0.8, 0.4]


def test_n_grams_that_never_matched() -> None:
    turns = [measured(NO_SPECULATION, 0, 1.0), measured(NGRAM, 0, 1.0)]
    row = results(turns, [])["arms"][1]
    assert (row["acceptance_length"], row["acceptance_per_position"]) == (1.0, [])


def step(start: float, requests: int = 2, prefill: float = 0.0, **changes: float) -> dict[str, float]:
    times = {"worker": 0.008, "verify": 0.003, "sample": 0.001, "draft": 0.002, "draft_model": 0.0015}
    return {"start": start, "requests": requests, "prefill": prefill, **times, **changes}


def test_the_breakdown_is_of_decoding_steps_with_the_whole_batch() -> None:
    prefill = [step(0.1 * i, prefill=1.0, verify=0.9) for i in range(3)]
    smaller = [step(1.02 + 0.1 * i, requests=1, verify=0.5) for i in range(3)]
    rows = [*prefill, step(1.0), step(1.010), *smaller]
    (row,) = results([replace(measured(NO_SPECULATION, 0, 1.0), batch=2)], [StepTimes(NO_SPECULATION, 2, rows)])[
        "breakdown"
    ]
    phases = {name: pytest.approx(ms) for name, ms in {
        "step": 10, "verify": 3, "sample": 1, "draft_model": 1.5, "draft_host": 0.5, "worker_host": 2, "engine": 2,
    }.items()}  # fmt: skip
    assert row == {"batch": 2, "method": "none", "draft_tokens": 0, **phases}


def test_report_files(tmp_path: Path) -> None:
    drafted = measured(GREEDY, 0, 0.5, num_drafts=40, num_draft_tokens=80, accepted_per_position=(16, 4))
    found = results([measured(NO_SPECULATION, 0, 1.0), drafted], [StepTimes(GREEDY, 1, [step(0.0, 1), step(0.01, 1)])])
    text = markdown(ABOUT, found)
    assert "| 1     | greedy k=2     | 120.0    | 2.00  | 2.00..2.00 | 2.000 | 2.000      | 1.50 " in text
    assert "| 1     | greedy k=2 | 10.0 | 3.0 " in text
    assert "Note: k = 2 is much." in text
    plot(found["arms"], tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 5000


def test_bench_starts_without_heavy_imports() -> None:
    import subprocess
    import sys

    code = f"import sys, {bench_module.__name__}; print([m for m in ('torch', 'vllm', 'ray', 'mlflow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
