"""`cotrain verify` without an engine: options, sizes, and all its steps on the simulated sampler."""

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.lossless.family import CheckResult, Verdict, judge
from cotrain.lossless.setting import PLAIN, Setting, standard_settings
from cotrain.models.loading import resolve_model
from cotrain.records import WeightPayload
from drafters.base import SamplingParams, TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.verify.checks import Distributions, Plan, Verifier, perturbed, target_distributions
from pipelines.verify.command import build_parser, main, outcome, prepare
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
def distributions() -> Distributions:
    return target_distributions(MarkovModel(), MODEL.draft_vocabulary.tolist(), "float32")


def plan_of(*settings: Setting, tokens: int = 2000) -> Plan:
    return Plan(settings, [[i] for i in range(8)], K, 40, tokens, "float32", 0, ALPHA)


def verifier_of(
    engine: MarkovEngine, plan: Plan, distributions: Distributions, lines: list[str] | None = None
) -> Verifier:
    said = [] if lines is None else lines
    return Verifier(engine, plan, distributions, DRAFTERS, said.append)


def verdict_of(engine: MarkovEngine, plan: Plan, distributions: Distributions) -> Verdict:
    return judge(asyncio.run(verifier_of(engine, plan, distributions).sampled()), ALPHA)


def greedy_of(engine: MarkovEngine, distributions: Distributions) -> list[CheckResult]:
    return asyncio.run(verifier_of(engine, plan_of(), distributions).greedy())


def options(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["--model", "tiny:llama", *arguments])


def test_a_clean_sampler_passes_every_setting(distributions: Distributions) -> None:
    plan = plan_of(*standard_settings(K))
    verdict = verdict_of(MarkovEngine(), plan, distributions)
    assert verdict.passed, str(verdict)
    settings = {result.setting.split(":")[0] for result in verdict.results}
    assert {str(setting) for setting in plan.settings} == settings
    strata = {result.setting.split(": ")[1] for result in verdict.results if ": " in result.setting}
    assert strata == {"undrafted", "drafted 1", "drafted 2", "bonus"} - ({"undrafted"} if 2000 / 40 < 100 else set())


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("typical acceptance", "uniformity by probability"),
        ("recovered token from p", "uniformity by draft vocabulary"),
        ("truncation keeps the draft token", "support"),
    ],
)
def test_a_planted_bug_fails_its_check(distributions: Distributions, bug: str, check: str) -> None:
    settings = (Setting(K, "probabilistic", (PLAIN,)), Setting(K, "probabilistic", (SamplingParams(0.8, 0.9, 8, ""),)))
    verdict = verdict_of(MarkovEngine(bug), plan_of(*settings, tokens=4000), distributions)
    assert check in {result.check for result in verdict.failures}


def test_a_mixed_batch_tests_every_sampler_of_it(distributions: Distributions) -> None:
    engine = MarkovEngine()
    mixed = Setting(K, "greedy", (PLAIN, SamplingParams(0.5, 1.0, 0, ""), SamplingParams(0.0, 1.0, 0, "")))
    verdict = verdict_of(engine, plan_of(mixed), distributions)
    assert verdict.passed
    counts = {result.check: result.num for result in verdict.results if result.setting == str(mixed)}
    assert counts["support"] == 2000
    assert counts["uniformity by probability"] == 34 * 40  # greedy tokens have a law without chance
    wrong = replace(mixed, samplings=(PLAIN, SamplingParams(0.6, 1.0, 0, ""), SamplingParams(0.0, 1.0, 0, "")))
    shifted = target_laws_of(distributions, mixed, wrong)
    assert not verdict_of(MarkovEngine(), plan_of(mixed, tokens=4000), shifted).passed


def target_laws_of(distributions: Distributions, asked: Setting, believed: Setting) -> Distributions:
    names = dict(zip(asked.samplings, believed.samplings, strict=True))
    return lambda rollout, sampling: distributions(rollout, names[sampling])


def test_greedy_identity_holds_over_swaps_and_the_first_drafter_is_served_again(distributions: Distributions) -> None:
    engine = MarkovEngine()
    results = greedy_of(engine, distributions)
    assert [result.p for result in results] == [1.0] * (K + 1)
    assert engine.received[-1] is DRAFTERS[0]
    assert "mid-generation" in results[-1].setting


def test_lengths_jump_and_drafters_take_turns_in_an_unsteady_setting(distributions: Distributions) -> None:
    lengths: list[int] = []

    class Slow(MarkovEngine):
        async def set_num_speculative_tokens(self, num_speculative_tokens: int) -> None:
            lengths.append(num_speculative_tokens)
            await super().set_num_speculative_tokens(num_speculative_tokens)

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            at_first = self.num_speculative_tokens
            await asyncio.sleep(0.5)
            self.num_speculative_tokens = at_first
            return await super().generate(*arguments, **options)

    engine = Slow()
    unsteady = Setting(K, "probabilistic", (PLAIN,), unsteady=True)
    verdict = verdict_of(engine, plan_of(unsteady), distributions)
    assert verdict.passed
    assert lengths[1:6] == [1, 0, 1, 2, 1]
    assert engine.received[:2] == DRAFTERS[::-1] and engine.received[-1] is DRAFTERS[0]
    assert not any(": " in result.setting for result in verdict.results)


def test_a_difference_of_greedy_text_is_proof(distributions: Distributions) -> None:
    engine = MarkovEngine("accepted prefix one too long")
    engine.greedy_differs = True
    assert [result.p for result in greedy_of(engine, distributions)] == [0.0] * (K + 1)


def test_an_engine_that_does_not_speculate_verifies_nothing(distributions: Distributions) -> None:
    class Idle(MarkovEngine):
        async def set_num_speculative_tokens(self, num_speculative_tokens: int) -> None:
            self.num_speculative_tokens = 0

    with pytest.raises(RuntimeError, match="nothing is verified"):
        verdict_of(Idle(), plan_of(Setting(K, "greedy", (PLAIN,))), distributions)


def test_seeds_are_distinct_over_settings(distributions: Distributions) -> None:
    seeds: list[int | None] = []

    class Recording(MarkovEngine):
        async def generate(self, requests: list[Any], **options: Any) -> Any:
            seeds.extend(request.seed for request in requests)
            return await super().generate(requests, **options)

    verifier = verifier_of(Recording(), plan_of(*(Setting(k, "greedy", (PLAIN,)) for k in (0, 1, 2))), distributions)
    asyncio.run(verifier.sampled())
    own = [seed for seed in seeds if seed is not None]
    assert len(own) == len(set(own)) == 3 * 25
    assert max(own) < 2**31


def test_sizes_come_from_the_power_calculation(drafter_folder: Path, tmp_path: Path) -> None:
    sizes = []
    for distance in ("0.1", "0.05"):
        arguments = ("--drafter", str(drafter_folder), "--distance", distance)
        plan, _ = prepare(options(*arguments), tmp_path)
        sizes.append(plan.tokens)
        assert plan.num_speculative_tokens == 3
        assert len(plan.settings) == 15
    assert sizes[1] == pytest.approx(4 * sizes[0], rel=0.01)


def test_a_runs_configuration_gives_model_sampling_and_draft_length(drafter_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        'name = "n"\nsteps = 1\n[policy]\nmodel = "tiny:llama"\n[task]\ntype = "reasoning_gym"\nname = "chain_sum"\n'
        '[rollout]\ntemperature = 0.8\nnum_speculative_tokens = 2\ndtype = "float32"\n'
    )
    args = build_parser().parse_args(["--config", str(config), "--drafter", str(drafter_folder)])
    plan, setup = prepare(args, tmp_path)
    assert plan.num_speculative_tokens == 2
    assert setup.rollout.dtype == "float32"
    assert plan.settings[1].samplings == (SamplingParams(0.8, 1.0, 0, ""),)
    assert setup.rollout.tensor_parallel_size == 1
    args.tensor_parallel_size = 2
    assert prepare(args, tmp_path)[1].rollout.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k: 0 is below 1"),
        (["--tokens", "1"], "--tokens: 1 is below 2"),
        (["--alpha", "0"], "--alpha: 0 is not between 0 and 1"),
        (["--distance", "1"], "--distance: 1 is not between 0 and 1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*arguments)
    assert f"argument {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100000"], "--tokens: the longest prompt has .* positions of tiny:llama; lower --tokens"),
        (["--drafter", "nowhere"], "--drafter: nowhere has no config.json"),
        (["--drafter", ""], "--model, --drafter: give a model, .* and either a drafter or --history"),
        (["--history"], "--model, --drafter: give a model, .* and either a drafter or --history"),
        (["--model", "tiny:none"], r"^--model: unknown model"),
        (
            ["--tensor-parallel-size", "3"],
            r"^--tensor-parallel-size: 3 does not divide the model's num_attention_heads",
        ),
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


@pytest.mark.parametrize("bug", [None, "recovered token from q"])
def test_the_plan_is_judged_with_time_left(distributions: Distributions, bug: str | None) -> None:
    lines: list[str] = []
    plan = plan_of(Setting(0, "greedy", (PLAIN,)), Setting(K, "probabilistic", (PLAIN,)))
    assert asyncio.run(verifier_of(MarkovEngine(bug), plan, distributions, lines).verdict()).passed == (bug is None)
    assert len(lines) == (2 + K) + 2 and all("about " in line and "left" in line for line in lines)
    assert lines[-1].startswith(f"{4 + K}/{4 + K} k=2 probabilistic, T=1, smallest p")
    assert lines[-1].endswith("about 0s left")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "verify.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--out: .* is not empty"):
        main(["--model", "tiny:llama", "--drafter", "d", "--out", str(tmp_path)])


def test_a_perturbed_drafter_differs_in_matrices_only() -> None:
    state = {"matrix": torch.ones(3, 4).cumsum(1), "norm": torch.ones(4), "d2t": torch.arange(4)}
    other = perturbed(state, seed=0)
    assert not torch.equal(other["matrix"], state["matrix"])
    assert torch.equal(other["norm"], state["norm"]) and torch.equal(other["d2t"], state["d2t"])


def test_the_report_says_what_failed_and_what_would_be_found(distributions: Distributions) -> None:
    verdict = verdict_of(
        MarkovEngine("typical acceptance"), plan_of(Setting(K, "probabilistic", (PLAIN,))), distributions
    )
    written = json.loads(json.dumps(outcome(verdict)))
    assert written["passed"] is False
    finds = [row["finds"] for row in written["checks"] if row["check"].startswith("uniformity")]
    assert all(0 < distance <= 1 for distance in finds)
    assert written["verdict"].startswith("NOT lossless")
    failed = [row["setting"] for row in written["checks"] if row["failed"]]
    assert sorted(failed) == sorted(result.setting for result in verdict.failures) and failed
