"""`cotrain verify` on the real engine: every planted bug is caught, and a clean engine passes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cotrain.config.schema import MonitorConfig, RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.lossless import monitor as monitor_module
from cotrain.lossless.checks import UNKNOWN, response_strata
from cotrain.lossless.emitted import Draws, response_draws
from cotrain.lossless.family import Verdict, judge
from cotrain.lossless.monitor import LosslessMonitor
from cotrain.lossless.setting import PLAIN, Setting, standard_settings
from cotrain.process.scratch import scratch_folder
from cotrain.records import Rollout, WeightPayload
from drafters.alignment import DraftBatch
from drafters.base import Drafter, TargetWeights
from pipelines.verify.checks import Distributions, Plan, Verifier, perturbed, target_distributions
from tests.engine import planted_bugs
from tests.engine.conftest import SERVING, LiveEngine, distilled, eagle3, make_requests
from tests.engine.planted_bugs import WHERE, K

pytestmark = pytest.mark.engine

TOKENS = 4000
"""A third more than what any bug but one needs in tests/cotrain/lossless/test_planted_bugs.py to be caught 99 times of 100."""
OF_DRAFT_VOCABULARY = "renormalised draft vocabulary"
OF_THE_ENGINE = (OF_DRAFT_VOCABULARY, "bonus token from the row before", "vLLM's CPU sampler bug", "lossy acceptance")
"""One bug of each kind, which this engine must show. tests/cotrain/lossless and `make test-long` plant the others too."""
ALPHA = 0.01
CLEAN_ALPHA = 1e-4
"""Probabilistic drafts have no seeds: at ALPHA one of 100 clean verdicts would fail."""

SMALL_VOCABULARY = 10
"""Fewer tokens than the tiny target writes: a bug of the draft vocabulary needs tokens outside it."""


@pytest.fixture(scope="module")
def small_drafter(sampled_text: DraftBatch, target_weights: TargetWeights, target_folder: Path) -> Drafter:
    return distilled(sampled_text, target_weights, target_folder, eagle3(draft_vocab_size=SMALL_VOCABULARY))


@pytest.fixture(scope="module")
def small_drafter_folder(small_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-drafter") / "v0"
    small_drafter.save(folder, torch.float32)
    return folder


@pytest.fixture(scope="module")
def planting(rollout_config: RolloutConfig, target_folder: Path, small_drafter_folder: Path) -> Iterator[LiveEngine]:
    """An engine whose worker takes bugs, and records verification steps one by one."""
    vllm = {
        "worker_extension_cls": f"{planted_bugs.__name__}.PlantingWorker",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
    }
    config = rollout_config.model_copy(update={"num_speculative_tokens": K, "vllm": vllm})
    with scratch_folder("test-verify") as scratch:
        live = LiveEngine(EngineSpec(config, str(target_folder), str(small_drafter_folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


@pytest.fixture(scope="module")
def distributions(target_model: Any, small_drafter: Drafter) -> Distributions:
    return target_distributions(target_model, small_drafter.draft_to_target.tolist(), "float32")


@pytest.fixture(scope="module")
def drafters(planting: LiveEngine, small_drafter: Drafter) -> list[WeightPayload]:
    state = small_drafter.state_for_serving()
    return [planting.payload(state), planting.payload(perturbed(state, seed=0))]


def plant(live: LiveEngine, bug: str | None) -> None:
    live.run(live.engine._engine.collective_rpc("cotrain_plant", args=(bug,)))


def verifier_of(
    live: LiveEngine,
    distributions: Distributions,
    drafters: list[WeightPayload],
    *settings: Setting,
    tokens: int = TOKENS,
) -> Verifier:
    prompts = [request.prompt_token_ids for request in make_requests(32)]
    plan = Plan(settings, prompts, K, 48, tokens, "float32", seed=1, alpha=ALPHA)
    return Verifier(live.engine, plan, distributions, drafters, lambda line: None)


def verdict(
    live: LiveEngine,
    distributions: Distributions,
    drafters: list[WeightPayload],
    *settings: Setting,
    alpha: float,
    tokens: int = TOKENS,
) -> Verdict:
    return judge(live.run(verifier_of(live, distributions, drafters, *settings, tokens=tokens).sampled()), alpha)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[] if bug in OF_THE_ENGINE else pytest.mark.long) for bug in planted_bugs.BUGS]
)
def test_a_planted_bug_is_caught(
    planting: LiveEngine, distributions: Distributions, drafters: list[WeightPayload], bug: str
) -> None:
    plant(planting, bug)
    try:
        tokens = 2 * TOKENS if bug == OF_DRAFT_VOCABULARY else TOKENS
        found = verdict(planting, distributions, drafters, WHERE[bug], alpha=ALPHA, tokens=tokens)
    finally:
        plant(planting, None)
    assert not found.passed


def test_a_clean_engine_passes_all_settings(
    planting: LiveEngine, distributions: Distributions, drafters: list[WeightPayload]
) -> None:
    """Among them those in which the bugs were caught, now that they are out."""
    settings = {str(setting): setting for setting in [*standard_settings(K), *WHERE.values()]}
    found = verdict(planting, distributions, drafters, *settings.values(), alpha=CLEAN_ALPHA, tokens=TOKENS // 2)
    assert found.passed, str(found)
    assert len(found.results) > 100


@pytest.mark.parametrize("bug", [None, "accepted prefix one too long"])
def test_greedy_text_is_the_same_while_drafters_take_turns(
    planting: LiveEngine, distributions: Distributions, drafters: list[WeightPayload], bug: str | None
) -> None:
    plant(planting, bug)
    try:
        results = planting.run(verifier_of(planting, distributions, drafters).greedy())
    finally:
        plant(planting, None)
    assert [r.p for r in results] == [0.0 if bug else 1.0] * (K + 1)
    swaps = int(results[-1].setting.split(", ")[2].split()[0])
    assert swaps >= 2
    served = planting.run(planting.engine.served_digests(list(drafters[0].digests), draft=True))
    assert served == drafters[0].digests


@pytest.mark.parametrize("k", range(K + 1))
def test_steps_account_for_every_token(
    planting: LiveEngine, distributions: Distributions, drafters: list[WeightPayload], k: int
) -> None:
    """vLLM records a step if it had drafts, before the last one is cut; prefill emits one token before the first."""
    setting = Setting(k, "probabilistic", (PLAIN,))
    rollouts = planting.run(verifier_of(planting, distributions, drafters).generate(setting, 48))
    cut = 0
    for rollout in rollouts:
        steps = rollout.verification_steps
        strata = response_strata(steps, len(rollout.token_ids))
        assert UNKNOWN not in strata
        assert strata.count("undrafted") == (1 if k else 48)
        if k:
            surplus = 1 + sum(accepted + 1 for _, accepted in steps) - 48
            assert 0 <= surplus <= k
            cut += surplus > 0
            assert {drafted for drafted, _ in steps[:-1]} == {k}
    assert bool(cut) == bool(k)


@pytest.mark.parametrize("bug", [None, "bonus token from the row before", "vLLM's CPU sampler bug"])
def test_the_monitor_sees_a_bug_in_rollouts_of_a_run(
    planting: LiveEngine,
    distributions: Distributions,
    drafters: list[WeightPayload],
    target_model: Any,
    bug: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_module, "FALSE_ALARM_RATE", 1e-3)
    monitor = LosslessMonitor(MonitorConfig(tokens=8192), PLAIN, "float32", seed=0)
    setting = Setting(K, "probabilistic", (PLAIN,))
    plant(planting, bug)
    try:
        rollouts = planting.run(verifier_of(planting, distributions, drafters).generate(setting, 160))
    finally:
        plant(planting, None)
    sizes = []

    def forward(chosen: list[Rollout]) -> list[Draws]:
        sizes.append(len(chosen))
        arguments = PLAIN, None, monitor.logit_tolerance
        return [response_draws(target_model, r.prompt_token_ids, r.token_ids, *arguments) for r in chosen]

    assert monitor.check(1, [replace(rollout, verification_steps=()) for rollout in rollouts], 0.0, forward) is None
    checked = monitor.check(2, rollouts, 0.0, forward)
    assert checked is not None
    verdict, metrics = checked
    assert verdict.passed == (bug is None)
    # Verification steps emit all tokens but the first of each response.
    assert metrics["lossless/speculated_tokens"] == metrics["lossless/tokens"] - sizes[0]
    assert monitor.check(3, rollouts, 1e6, forward) is None
