"""`cotrain bench` without an engine: which arms, which prompts, in which order, and the arithmetic of the report."""

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from cotrain.config.load import load_config
from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from cotrain.records import RolloutBatch, RolloutRequest, SpeculationCounts, StepTotal, Window
from cotrain.simulation.roofline import Model
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import DFlashConfig, DrafterModelConfig, DraftModelConfig, Eagle3Config
from pipelines.bench.command import (
    Bench,
    add_arguments,
    choose_arms,
    main,
    prepare,
    take_turns,
)
from pipelines.bench.report import (
    ADAPTIVE,
    NO_SPECULATION,
    Arm,
    Turn,
    results,
    roofline,
    simulated_ms,
    write_results,
)
from pipelines.bench.synthetic import random_drafter
from pipelines.engines import EngineSetup

GREEDY = Arm("greedy", 2)
SUFFIX = Arm("suffix", 2)
PROBABILISTIC = Arm("probabilistic", 2)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "tiny:llama", *arguments])


def small_bench(arms: list[Arm], *arguments: str) -> Bench:
    given = options("--batch", "2", "--rounds", "3", "--k", "2", "--tokens", "10", *arguments)
    setup = EngineSetup(Path("model"), [[i] for i in range(6)], RolloutConfig(), None, None)
    return Bench(given, arms, setup)


def turn(arm: Arm, round_: int, seconds: float, **changes: Any) -> Turn:
    return replace(Turn(str(arm), 1, round_, num_tokens=60, timed_tokens=60, seconds=seconds), **changes)


def rows(turns: list[Turn]) -> list[dict[str, Any]]:
    return results(turns).to_dict("records")


def test_arms_are_all_that_is_possible_by_default() -> None:
    assert choose_arms(None, [1, 3], has_drafter=False, temperature=1.0) == [
        NO_SPECULATION, Arm("suffix", 1), Arm("suffix", 3)
    ]  # fmt: skip
    methods = {arm.method for arm in choose_arms(None, [1], has_drafter=True, temperature=0.0)}
    assert methods == {"none", "greedy"}


def test_no_speculation_is_always_measured_and_on_a_stock_engine() -> None:
    arms = choose_arms(["probabilistic"], [2], has_drafter=True, temperature=1.0)
    assert arms == [NO_SPECULATION, PROBABILISTIC]
    engines = [arm.engine for arm in (NO_SPECULATION, SUFFIX, GREEDY, PROBABILISTIC, Arm(ADAPTIVE, 2))]
    assert engines == ["stock", "suffix", "drafter", "drafter", "drafter"]


def test_the_adaptive_arm_comes_once_and_only_when_asked_for() -> None:
    arms = choose_arms(["greedy", ADAPTIVE], [1, 3], has_drafter=True, temperature=1.0)
    assert arms == [NO_SPECULATION, Arm("greedy", 1), Arm("greedy", 3), Arm(ADAPTIVE, 3)]
    assert [str(arm) for arm in arms[2:]] == ["greedy k=3", "adaptive k<=3"]
    assert ADAPTIVE not in {arm.method for arm in choose_arms(None, [1], has_drafter=True, temperature=1.0)}
    with pytest.raises(ValueError, match="--methods: adaptive need a drafter"):
        choose_arms([ADAPTIVE], [1], has_drafter=False, temperature=1.0)


def test_what_drafts_from_history_has_an_engine_of_its_own_in_each_adaptive_arm() -> None:
    """Else it would draft from what another arm has generated in the same round."""
    arms = choose_arms(["suffix", "adaptive-suffix"], [1, 2], has_drafter=False, temperature=1.0)[1:]
    assert [arm.num_speculative_tokens for arm in arms] == [1, 2, 2]
    assert [arm.engine for arm in arms] == ["suffix", "suffix", "adaptive-suffix"]
    assert str(arms[-1]) == "adaptive-suffix k<=2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "greedy"], "--methods: greedy need a drafter; give --drafter"),
        (["--drafter", "d", "--methods", "probabilistic", "--temperature", "0"], "--methods: probabilistic drafts are"),
        (["--tokens", "100000"], "--tokens: the longest prompt has .* positions of tiny:llama; lower --tokens"),
        (["--drafter", "nowhere"], "--drafter: nowhere has no config.json"),
        (["--prompts", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(options(*arguments), tmp_path / "pulled")


def synthetic(shape: str, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--synthetic", shape, "--batch", "4", "--k", "2", *arguments])


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    """The shape of tiny:llama."""
    config = json.loads((resolve_model("tiny:llama") / "config.json").read_text())
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(config))
    return tmp_path / "shape" / "config.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accept", "1.5"], "--accept: 1.5 is no share"),
        (["--prompts", "x.toml"], "--prompts: prompts are random"),
        (["--drain"], "--drain: prompts are random"),
        (["--methods", "suffix"], "--methods: random text repeats nothing"),
        (
            ["--drafter", "history"],
            "--drafter: 'history' is no kind with random weights; give eagle3, dflash, dspark, mtp, draft_model or none",
        ),
        (["--batch", "1000000"], r"--batch: 2 engines with 1000000 requests take .* GiB, above 90%"),
        (["--gpu", "h1000"], "(?s)--gpu: .*'h1000' is not known"),
        (["--calibrate", "/"], "--calibrate: / exists"),
        (["--context", "4000"], "--tokens: the longest prompt has 4000 tokens"),
    ],
)
def test_what_random_weights_cannot_have_is_refused_by_name(
    arguments: list[str], message: str, shape: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(synthetic(str(shape), *arguments), tmp_path / "prepared")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("qwen3-9b", r"--synthetic: 'qwen3-9b' is no file here .*; did you mean qwen3-8b\?"),
        ("Qwen3-235B-A22B", "--synthetic: Qwen3-235B-A22B cannot be trained: architecture one with experts is none"),
    ],
)
def test_an_unknown_shape_is_refused(given: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(synthetic(given), tmp_path / "prepared")


def test_a_drafter_that_the_shape_cannot_have_is_refused(shape: Path, tmp_path: Path) -> None:
    config = json.loads(shape.read_text())
    shape.write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"--drafter: eagle3 does not fit this shape: .*aux layers"):
        prepare(synthetic(str(shape)), tmp_path / "prepared")
    shape.write_text(json.dumps(config | {"architectures": ["GPT2Model"]}))
    with pytest.raises(ValueError, match="cannot be trained: architecture GPT2Model is none that vLLM"):
        prepare(synthetic(str(shape)), tmp_path / "other")


def test_a_model_of_the_simulator_is_described_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.bench.synthetic.machine", lambda: {"gpus": [], "memory_gib": 200.0})
    bench = prepare(synthetic("Qwen/qwen3-8b", "--drafter", "none", "--gpu", "h100-sxm"), tmp_path / "prepared")
    assert bench.arms == [NO_SPECULATION] and bench.setup.drafter is None
    assert TargetSpec.from_pretrained(bench.setup.model).num_layers == 36
    assert {len(prompt) for prompt in bench.setup.prompts} == {512} and len(bench.setup.prompts) == 4 * 5
    assert bench.setup.rollout.vllm["load_format"] == "dummy"
    simulated = simulated_ms(bench.cost)
    assert simulated is not None and 4 < simulated(0, 1) < 10 < simulated(2, 256)


@pytest.mark.parametrize(
    ("config", "one_pass", "fused"),
    [
        (DFlashConfig(type="dflash", draft_vocab_size=128, num_layers=2), True, 3),
        (Eagle3Config(type="eagle3", draft_vocab_size=128), False, 3),
        (DraftModelConfig(type="draft_model"), False, 0),
    ],
)
def test_the_simulator_is_told_of_the_drafter_as_it_is(
    config: DrafterModelConfig, one_pass: bool, fused: int, tmp_path: Path
) -> None:
    model = resolve_model("tiny:llama")
    target = TargetSpec.from_pretrained(model)
    drafter = build_drafter(config, target, seed=0)
    drafter.start_from(model)
    drafter.save(tmp_path / "drafter", torch.float32)
    cost = roofline(options(), EngineSetup(model, [[1, 2]], RolloutConfig(), drafter, tmp_path / "drafter"))
    described, sizes = cost["models"][cost["drafter"]], drafter.shape.sizes
    assert (described["layers"], described["hidden"]) == (sizes.num_layers, sizes.hidden_size)
    assert (described["one_pass"], described["fused"]) == (one_pass, fused * target.hidden_size)
    assert described["vocabulary"] == (128 if fused else target.vocab_size)


def test_steps_without_drafts_are_measured_too_and_rates_fall_by_position(shape: Path, tmp_path: Path) -> None:
    bench = prepare(synthetic(str(shape), "--accept", "0.5"), tmp_path / "prepared")
    assert bench.arms == [NO_SPECULATION, Arm("probabilistic", 0), Arm("probabilistic", 2)]
    assert bench.setup.synthetic_rates == (0.5, 0.25) and bench.setup.drafter is not None
    greedy = prepare(synthetic(str(shape), "--temperature", "0"), tmp_path / "greedy")
    assert greedy.arms == [NO_SPECULATION, Arm("greedy", 0), Arm("greedy", 2)]


def test_only_the_synthetic_bench_lets_drafts_be_accepted_whatever_they_are() -> None:
    root = Path(__file__).parents[2]
    files = {file for folder in ("cotrain", "pipelines", "drafters") for file in (root / folder).rglob("*.py")}
    named = {str(file.relative_to(root)) for file in files if "synthetic_rates" in file.read_text()}
    assert named == {"cotrain/engine/arguments.py", "pipelines/engines.py", "pipelines/bench/synthetic.py"}
    table = '{method = "eagle3", rejection_sample_method = "synthetic", synthetic_acceptance_length = 2.0}'
    with pytest.raises(ValueError, match=r"rollout\.vllm\.speculative_config: is set by cotrain"):
        load_config([root / "configs" / "smoke.toml"], [f"rollout.vllm.speculative_config={table}"])


@pytest.mark.parametrize("name", ["k", "batch", "rounds", "groups", "threads"])
def test_a_number_below_one_is_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(f"--{name}", "0")
    assert f"argument --{name}: 0 is below 1" in capsys.readouterr().err


def test_a_temperature_below_zero_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--temperature", "-0.5")
    assert "argument --temperature: -0.5 is below 0.0" in capsys.readouterr().err


def test_responses_end_in_one_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--drain", "--stop-at-eos")
    assert "--stop-at-eos: not allowed with argument --drain" in capsys.readouterr().err


def test_a_model_must_be_given(tmp_path: Path) -> None:
    parsed = options()
    parsed.model = None
    with pytest.raises(ValueError, match="--model: give a folder"):
        prepare(parsed, tmp_path)


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    target = TargetSpec.from_pretrained(resolve_model("tiny:llama"))
    other = replace(target, hidden_size=2 * target.hidden_size)
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5))
    build_drafter(config, other, seed=0).save(tmp_path / "drafter", torch.float32)
    with pytest.raises(ValueError, match=r"--drafter: .*made for another target"):
        prepare(options("--drafter", str(tmp_path / "drafter")), tmp_path / "pulled")


def test_drafting_beyond_the_trained_depth_is_refused_as_in_training(tmp_path: Path) -> None:
    target = TargetSpec.from_pretrained(resolve_model("tiny:llama"))
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5), trained_depth=2)
    build_drafter(config, target, seed=0).save(tmp_path / "drafter", torch.float32)
    drafter = tmp_path / "drafter"
    with pytest.raises(
        ValueError, match=r"^--k: 3 is above drafter\.model\.trained_depth = 2; lower it, or raise trained_depth"
    ):
        prepare(options("--drafter", str(drafter), "--k", "2", "3"), tmp_path / "pulled")
    assert prepare(options("--drafter", str(drafter), "--k", "1", "2"), tmp_path / "pulled").setup.drafter is not None
    content = json.loads((drafter / "config.json").read_text()) | {"speculators_config": None}
    (drafter / "config.json").write_text(json.dumps(content))  # a folder that does not say has no limit
    assert prepare(options("--drafter", str(drafter), "--k", "3"), tmp_path / "pulled").setup.drafter is not None


def test_the_whole_batch_is_prefilled_in_one_step(tmp_path: Path) -> None:
    prepared = prepare(options("--batch", "300", "--rounds", "2", "--tokens", "8"), tmp_path)
    assert prepared.setup.rollout.vllm["max_num_seqs"] == 300
    assert prepared.setup.rollout.vllm["max_num_batched_tokens"] >= sum(map(len, prepared.setup.prompts[:300]))


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "engine.log").touch()
    with pytest.raises(ValueError, match="--model: give a folder"):  # which is looked at next
        main(["--out", str(tmp_path)])  # of a command that was stopped in its start
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--out: .* is not empty"):
        main(["--model", "tiny:llama", "--out", str(tmp_path)])


def test_responses_end_at_eos_only_when_asked(tmp_path: Path) -> None:
    assert prepare(options("--methods", "none"), tmp_path).setup.rollout.ignore_eos
    assert not prepare(options("--methods", "none", "--stop-at-eos"), tmp_path).setup.rollout.ignore_eos


def test_every_round_has_other_prompts_and_no_two_turns_share_a_request() -> None:
    bench = small_bench([], "--groups", "3")
    assert [r.prompt_token_ids for r in bench.requests(2, 1, 0)] == [[0], [1]]
    assert [r.prompt_token_ids for r in bench.requests(2, 1, 1)] == [[2], [3]]
    numbers = [r.sample_index for round_ in range(2) for group in range(3) for r in bench.requests(2, round_, group)]
    assert numbers == list(range(12))


def test_a_batch_that_drains_ends_evenly_spread() -> None:
    bench = small_bench([], "--drain")
    assert [r.max_new_tokens for r in bench.requests(4, 1, 0)] == [3, 5, 8, 10]
    assert [r.max_new_tokens for r in bench.requests(16, 0, 0)][:4] == [2, 2, 2, 3]
    assert {r.max_new_tokens for r in small_bench([]).requests(2, 1, 0)} == {None}


class RecordingEngine:
    """Notes what an engine is asked for. A draft length that is never set stays "stock"."""

    decode_seconds = 1.0
    generated = 5  # tokens of a response
    num_speculative_tokens: Any = "stock"
    method = ""

    def __init__(self, name: str, log: list[Any]):
        self.name, self.log = name, log

    async def take_window(self) -> Window:
        prompts = StepTotal(2, 2, "prompts", 1, 2, 9.0)
        return Window(None, [prompts, StepTotal(2, 2, "steady", 1, 6, 0.5), StepTotal(2, 1, "steady", 1, 2, 0.5)])

    async def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    async def set_draft_sample_method(self, method: str) -> None:
        self.method = method

    async def reset_prefix_cache(self) -> None:
        self.log.append("reset")

    async def on_workers(self, method: Any) -> None:
        """Forget the history."""

    async def generate(self, requests: list[RolloutRequest], tap: bool) -> RolloutBatch:
        self.log.append((self.name, self.method, self.num_speculative_tokens, [r.sample_index for r in requests]))
        counts = SpeculationCounts({(2, 0): 1, (2, 1): 1, (2, 2): 1} if self.method else {})
        return RolloutBatch([], [], 1.0, self.generated * len(requests), speculation=counts)


def measured(bench: Bench) -> tuple[list[Turn], list[Any], str]:
    log: list[Any] = []
    engines: Any = {name: RecordingEngine(name, log) for name in ("stock", "drafter", "suffix")}
    lines: list[str] = []
    turns = asyncio.run(take_turns(bench, engines, lines.append))
    assert log[::2] == ["reset"] * (len(log) // 2)
    return turns, [entry for entry in log if entry != "reset"], "\n".join(lines)


def test_every_round_runs_all_arms_on_the_same_prompts_and_starts_with_another() -> None:
    turns, asked, printed = measured(small_bench([NO_SPECULATION, SUFFIX, GREEDY, PROBABILISTIC]))
    assert asked[4:8] == [("stock", "", "stock", [0, 1]), ("suffix", "", 2, [0, 1]), ("drafter", "greedy", 2, [0, 1]),
                          ("drafter", "probabilistic", 2, [0, 1])]  # fmt: skip
    assert [entry[:3] for entry in asked[8:12]] == [entry[:3] for entry in [*asked[5:8], asked[4]]]
    assert {tuple(entry[3]) for entry in asked[8:12]} == {(2, 3)}
    assert [(t.round, t.num_tokens) for t in turns] == [(r, 8) for r in (0, 1, 2) for _ in range(4)]
    assert [t.accepted_per_position for t in turns[:4]] == [(), (), (2, 1), (2, 1)]
    assert "warm-up, then 3 rounds" in printed and "round 3/3: about 0s left" in printed


def test_the_time_left_is_that_of_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch takes as many seconds as it has requests; a large one does not make small ones look slow."""
    now, lines = 0.0, list[str]()
    monkeypatch.setattr("pipelines.bench.command.time.monotonic", lambda: now)

    class Slow(RecordingEngine):
        async def generate(self, requests: list[RolloutRequest], tap: bool) -> RolloutBatch:
            nonlocal now
            now += len(requests)
            return await super().generate(requests, tap)

    bench = small_bench([NO_SPECULATION, GREEDY], "--batch", "2", "6", "--rounds", "2", "--groups", "3")
    asyncio.run(take_turns(bench, {name: Slow(name, []) for name in ("stock", "drafter")}, lines.append))  # type: ignore[misc]
    assert lines == [
        "warm-up, then 2 rounds of 3 x 2 batches, each by 2 arms",
        "round 1/2: about 48s left",
        "round 2/2: about 0s left",
    ]


def test_the_adaptive_arm_gives_the_choice_to_the_engine() -> None:
    _, asked, _ = measured(small_bench([NO_SPECULATION, GREEDY, Arm(ADAPTIVE, 2)]))
    assert asked[2][:3] == ("drafter", "probabilistic", None)


def test_the_arms_take_turns_with_every_batch() -> None:
    turns, asked, _ = measured(small_bench([NO_SPECULATION, GREEDY], "--groups", "3"))
    plain, greedy = ("stock", "", "stock"), ("drafter", "greedy", 2)
    of_first = [plain, greedy, greedy, plain, plain, greedy]
    assert [entry[:3] for entry in asked[2:8]] == of_first, "after a warm-up with one batch"
    assert [entry[3] for entry in asked[2:8:2]] == [[0, 1], [2, 3], [4, 5]]
    assert {(t.num_tokens, t.timed_tokens, t.seconds, t.num_drafts) for t in turns} == {(8, 6, 0.5, 0), (8, 6, 0.5, 3)}
    assert len(turns) == 3 * 3 * 2


def test_a_round_whose_responses_all_end_at_once_is_refused() -> None:
    bench, engine = small_bench([NO_SPECULATION]), RecordingEngine("stock", [])
    engine.generated = 1
    with pytest.raises(ValueError, match="--groups: every response of a round ended with its first token; give more"):
        asyncio.run(take_turns(bench, {"stock": engine}, print))


@pytest.mark.parametrize("option", ["--drain", "--stop-at-eos"])
def test_where_responses_end_one_by_one_the_whole_turn_counts(option: str) -> None:
    turns, _, _ = measured(small_bench([NO_SPECULATION, GREEDY], option))
    assert {(t.timed_tokens, t.seconds) for t in turns} == {(8, 1.0)}


ABOUT = {
    "date": "2026-11-21", "packages": {"vllm": "0.32.0"}, "notes": ["k = 2 is much"], "load": 0.1,
    "machine": {"gpus": [], "cpu": "EPYC", "cores": 2}, "options": vars(options("--drafter", "folder")),
}  # fmt: skip


def test_the_ratio_compares_within_a_round() -> None:
    """A machine that slows down threefold in the last round changes speeds, not ratios."""
    seconds = {0: 2.0, 1: 2.0, 2: 6.0}
    halves = {"num_tokens": 30, "timed_tokens": 30}
    plain = [turn(NO_SPECULATION, r, s / 2 + more, **halves) for r, s in seconds.items() for more in (0.5, -0.5)]
    drafted = [turn(GREEDY, r, s / up) for (r, s), up in zip(seconds.items(), (1.5, 1.2, 1.4), strict=True)]
    none, greedy = rows([*plain, *drafted])
    assert (none["ratio"], none["tokens/s"], none["acceptance length"]) == (1.0, 30.0, 1.0)
    assert (greedy["min"], greedy["max"]) == pytest.approx((1.2, 1.5))
    # Logs of 1.5, 1.2 and 1.4: mean 0.30808, standard deviation 0.11425.
    assert (greedy["ratio"], greedy["+-"]) == pytest.approx((1.36082, 0.08976), rel=1e-3)


def test_batch_sizes_have_baselines_of_their_own() -> None:
    turns = [turn(NO_SPECULATION, 0, 2.0), turn(GREEDY, 0, 1.0)]
    larger = [turn(NO_SPECULATION, 0, 2.0, batch=4), turn(GREEDY, 0, 4.0, batch=4)]
    found = results([*larger, *turns])
    assert found["ratio"].to_dict() == pytest.approx(
        {
            "batch 1, no speculation": 1,
            "batch 1, greedy k=2": 2,
            "batch 4, no speculation": 1,
            "batch 4, greedy k=2": 0.5,
        }
    )


def test_a_single_round_has_no_error() -> None:
    turns = [turn(NO_SPECULATION, 0, 2.0), turn(GREEDY, 0, 1.0)]
    assert pd.isna(rows(turns)[1]["+-"])


def test_acceptance_length_counts_steps_without_a_draft() -> None:
    drafter = turn(GREEDY, 0, 1.0, num_drafts=40, accepted_per_position=(16, 4))
    # The history had 5 drafts, of which 6 tokens were accepted: 60 tokens in 54 steps.
    suffix = turn(SUFFIX, 0, 1.0, num_drafts=5, accepted_per_position=(4, 2))
    _, suffix_row, drafter_row = rows([turn(NO_SPECULATION, 0, 1.0), suffix, drafter])
    assert (drafter_row["acceptance length"], drafter_row["accepted at 1, 2, ..."]) == (1.5, [0.4, 0.1])
    assert suffix_row["acceptance length"] == pytest.approx(60 / 54)
    assert suffix_row["accepted at 1, 2, ..."] == [0.8, 0.4]


def test_a_history_that_never_matched() -> None:
    row = rows([turn(NO_SPECULATION, 0, 1.0), turn(SUFFIX, 0, 1.0)])[1]
    assert (row["acceptance length"], row["accepted at 1, 2, ..."]) == (1.0, [])


def test_report_files(tmp_path: Path) -> None:
    drafted = turn(GREEDY, 0, 0.5, num_drafts=40, accepted_per_position=(16, 4))
    write_results(tmp_path, ABOUT, [turn(NO_SPECULATION, 0, 1.0), drafted])
    text = (tmp_path / "bench.md").read_text()
    cells = [cell.strip() for cell in next(line for line in text.splitlines() if "greedy k=2" in line).split("|")]
    assert cells[1:-1] == ["batch 1, greedy k=2", "120.0", "2.0", "-", "2.0", "2.0", "-", "1.5", "[0.4, 0.1]"]
    assert "Note: k = 2 is much." in text and "EPYC, " in text and "vllm 0.32.0" in text
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [arm["arm"] for arm in found["arms"]] == ["batch 1, no speculation", "batch 1, greedy k=2"]
    assert found["arms"][1]["+-"] is None and found["turns"][1]["num_drafts"] == 40


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_a_random_drafter_has_the_shape_that_the_simulator_takes(kind: str) -> None:
    target = replace(TargetSpec.from_pretrained(resolve_model("tiny:llama")), vocab_size=40_000, unused_token_id=None)
    policy = Model(8, 128, 4, 2, 32, 256, target.vocab_size, "a test")
    shape = random_drafter(kind, target, 3, 0).shape
    assert (shape.sizes.num_layers, shape.draft_vocab_size) == (
        policy.drafter(kind).layers,
        policy.drafter(kind).vocabulary,
    )  # type: ignore[attr-defined]
