import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from policy_cases import (
    OPTIMIZER,
    ROLLOUT,
    make_learner,
    make_rollouts,
    served_state,
    token_log_probs,
    update_difference,
    with_advantages,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cotrain.config.schema import OptimizerConfig
from cotrain.optimizer import learning_rate_factor
from cotrain.policy.log_probs import ResponseLogProbs
from cotrain.records import Segment, Versions
from cotrain.weights.digests import file_digest


def weights_after(model: str, updates: int = 1, **policy: Any) -> dict[str, torch.Tensor]:
    learner = make_learner(model, **policy)
    for seed in range(updates):
        learner.update(make_rollouts(model, seed))
    return served_state(learner)


def test_metrics_and_gradient_equal_a_plain_forward_of_every_rollout(tiny_model: str) -> None:
    rollouts = make_rollouts(tiny_model)
    metrics = make_learner(tiny_model, micro_batch_tokens=30).update(rollouts)

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    surrogates, entropies, gaps, kls, ratios = [], [], [], [], []
    for scored in rollouts:
        prompt, response = scored.rollout.prompt_token_ids, scored.rollout.token_ids
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        distribution = (logits / ROLLOUT.temperature).log_softmax(-1)
        log_ratio = distribution[range(len(response)), response] - torch.tensor(scored.rollout.log_probs)
        ratio = log_ratio.exp()
        surrogates.append(torch.minimum(ratio * scored.advantage, ratio.clamp(0.8, 1.28) * scored.advantage))
        entropies.append(-(distribution.exp() * distribution).sum(-1))
        gaps.append(log_ratio.abs())
        kls.append(ratio - 1 - log_ratio)
        ratios.append(ratio)
    loss = -torch.cat(surrogates).mean()
    loss.backward()
    grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["policy/grad_norm"] == pytest.approx(grad_norm.item(), rel=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)
    assert metrics["policy/rollout_log_prob_gap"] == pytest.approx(torch.cat(gaps).mean().item(), rel=1e-4)
    assert metrics["policy/kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(torch.cat(ratios).max().item(), rel=1e-4)
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert metrics["policy/learning_rate"] == pytest.approx(OPTIMIZER.learning_rate / 3)
    assert "policy/kl_reference" not in metrics


@pytest.mark.parametrize(
    "variant",
    [
        {"micro_batch_tokens": 24},
        {"micro_batch_tokens": 60},
        {"micro_batch_tokens": 40},
        {"gradient_checkpointing": True},
    ],
    ids=str,
)
def test_the_way_rollouts_are_batched_never_changes_the_update(tiny_model: str, variant: dict[str, Any]) -> None:
    common = {"loss_aggregation": "seq_mean_token_mean", "minibatches": 2, "kl_coefficient": 0.1}
    one = weights_after(tiny_model, **common)
    other = weights_after(tiny_model, **common, **variant)
    assert update_difference(tiny_model, one, other) < 2e-4


def test_rewarded_tokens_become_likelier_and_punished_ones_less(tiny_model: str, tmp_path: Path) -> None:
    rollouts = with_advantages(make_rollouts(tiny_model, noise=0), -1.0)
    rollouts[3] = replace(rollouts[3], advantage=2.0)

    def log_prob(model: str, index: int) -> float:
        rollout = rollouts[index].rollout
        return float(token_log_probs(model, rollout.prompt_token_ids, rollout.token_ids, 0.8).sum())

    before = [log_prob(tiny_model, index) for index in range(len(rollouts))]
    learner = make_learner(tiny_model)
    learner.update(rollouts)
    learner.save(tmp_path)
    after = [log_prob(str(tmp_path), index) for index in range(len(rollouts))]
    assert after[3] > before[3]
    assert sum(after) - after[3] < sum(before) - before[3]


def test_equal_rewards_leave_a_fresh_policy_alone_but_count_as_a_step(tiny_model: str) -> None:
    learner = make_learner(tiny_model)
    before = served_state(learner)
    metrics = learner.update(with_advantages(make_rollouts(tiny_model), 0.0))
    after = served_state(learner)
    assert metrics["policy/grad_norm"] == 0
    assert learner.policy_version == 1
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_kl_to_the_reference_is_zero_at_first_and_pulls_back_later(tiny_model: str) -> None:
    free, held = make_learner(tiny_model, kl_coefficient=1e-9), make_learner(tiny_model, kl_coefficient=10.0)
    rollouts = make_rollouts(tiny_model, noise=0)
    for learner in (free, held):
        assert learner.update(rollouts)["policy/kl_reference"] == 0
    for _ in range(4):
        loose, tight = free.update(rollouts), held.update(rollouts)
    assert 0 < tight["policy/kl_reference"] < loose["policy/kl_reference"] / 2


def test_kl_to_the_reference_is_zero_at_first_in_bfloat16(tiny_model: str) -> None:
    learner = make_learner(tiny_model, kl_coefficient=0.1, dtype="bfloat16")
    metrics = learner.update(make_rollouts(tiny_model, noise=0))
    assert metrics["policy/kl_reference"] == 0
    assert 0 < metrics["policy/rollout_log_prob_gap"] < 0.05


def test_bfloat16_keeps_updates_too_small_for_bfloat16_weights(tiny_model: str) -> None:
    tiny_step = OptimizerConfig(learning_rate=1e-6)
    learner = make_learner(tiny_model, dtype="bfloat16", optimizer=tiny_step)
    before = served_state(learner)
    learner.update(make_rollouts(tiny_model))
    after = served_state(learner)
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before]).float().mean()
    assert moved > 0.5


def test_recomputed_old_log_probs_ignore_the_engines(tiny_model: str) -> None:
    noisy, exact = make_rollouts(tiny_model, noise=0.5), make_rollouts(tiny_model, noise=0.5)
    for index, scored in enumerate(exact):
        own = token_log_probs(tiny_model, scored.rollout.prompt_token_ids, scored.rollout.token_ids, 0.8)
        exact[index] = replace(scored, rollout=replace(scored.rollout, log_probs=own.tolist()))
    for minibatches in (1, 3):
        recomputing = make_learner(tiny_model, minibatches=minibatches, old_log_probs="recomputed")
        trusting = make_learner(tiny_model, minibatches=minibatches, old_log_probs="rollout")
        metrics = recomputing.update(noisy)
        # The gap is taken before the policy moves, whatever the number of minibatches.
        assert trusting.update(exact)["policy/rollout_log_prob_gap"] < 1e-5
        difference = update_difference(tiny_model, served_state(recomputing), served_state(trusting))
        assert difference < 1e-3
        assert metrics["policy/rollout_log_prob_gap"] > 0.3


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_corrected_update_weighs_each_rollout_by_what_the_engine_got_wrong(
    tiny_model: str, minibatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is off by one factor for all tokens of a rollout, which then weighs as its advantage would."""
    log_factors = [-0.9, -0.2, 0.0, 0.3, 0.5, 0.9]
    rollouts, weighted = make_rollouts(tiny_model, noise=0), make_rollouts(tiny_model, noise=0)
    weights = []
    for index, scored in enumerate(rollouts):
        log_factor = log_factors[index % len(log_factors)]
        log_probs = [log_prob - log_factor for log_prob in scored.rollout.log_probs]
        rollouts[index] = replace(scored, rollout=replace(scored.rollout, log_probs=log_probs))
        weight = min(math.exp(log_factor), 1.5)
        weighted[index] = replace(scored, advantage=weight * scored.advantage)
        weights += [weight] * len(log_probs)
    common = {"minibatches": minibatches, "old_log_probs": "recomputed"}
    corrected = make_learner(tiny_model, behaviour_correction="truncate", behaviour_cap=1.5, **common)
    expected = make_learner(tiny_model, **common)
    forwards = 0
    forward = ResponseLogProbs.forward

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return forward(*arguments, **named)

    monkeypatch.setattr(ResponseLogProbs, "forward", counted)
    metrics = corrected.update(rollouts)
    forwards_corrected, forwards = forwards, 0
    plain = expected.update(weighted)
    assert forwards_corrected == forwards
    difference = update_difference(tiny_model, served_state(corrected), served_state(expected))
    assert difference < 1e-3

    w = torch.tensor(weights, dtype=torch.float64)
    ratios = torch.tensor(
        [math.exp(log_factors[index % 6]) for index, s in enumerate(rollouts) for _ in s.rollout.token_ids]
    )
    assert metrics["policy/loss"] == pytest.approx(plain["policy/loss"], rel=1e-3, abs=1e-5)
    assert metrics["policy/behaviour_ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert metrics["policy/behaviour_weight_mean"] == pytest.approx(w.mean().item(), rel=1e-4)
    assert metrics["policy/behaviour_ess"] == pytest.approx((w.sum() ** 2 / (len(w) * (w**2).sum())).item(), rel=1e-4)
    assert metrics["policy/behaviour_capped"] == pytest.approx((w == 1.5).double().mean().item())
    assert not any(name.startswith("policy/behaviour") for name in plain)


def test_what_engine_and_learner_differ_by_is_told_by_lag(tiny_model: str) -> None:
    """The log-probs of tokens that an older version generated are planted a whole nat off."""
    learner = make_learner(tiny_model, micro_batch_tokens=40)
    learner.policy_version = 3
    rollouts, counts = [], [0, 0, 0]
    for scored in make_rollouts(tiny_model, noise=0.0):
        rollout, length = scored.rollout, len(scored.rollout.token_ids)
        old, log_probs = length // 2, list(rollout.log_probs)
        log_probs[:old] = [value - 1.0 for value in log_probs[:old]]
        earlier = (Segment(Versions(1, 0), 0, old),) if old else ()
        changed = replace(rollout, versions=Versions(3, 0), earlier=earlier, log_probs=log_probs)
        rollouts.append(replace(scored, rollout=changed))
        counts[2], counts[0] = counts[2] + old, counts[0] + length - old
    metrics = learner.update(rollouts)
    assert metrics["policy/rollout_log_prob_gap_lag_0"] < 1e-4 and "policy/rollout_log_prob_gap_lag_1" not in metrics
    assert metrics["policy/rollout_log_prob_gap_lag_2"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["policy/rollout_log_prob_gap"] == pytest.approx(counts[2] / sum(counts), abs=1e-4)
    assert metrics["policy/behaviour_kl_lag_2"] > metrics["policy/behaviour_kl_lag_0"] + 0.3
    fresh = make_learner(tiny_model).update(make_rollouts(tiny_model))
    assert not any("_lag_" in name for name in fresh)


def test_masked_tokens_are_counted_and_a_fully_masked_step_has_no_weight(tiny_model: str) -> None:
    common = {"old_log_probs": "recomputed", "behaviour_correction": "mask"}
    rollouts = make_rollouts(tiny_model, noise=0)
    exact = make_learner(tiny_model, **common).update(rollouts)
    assert exact["policy/behaviour_masked"] == 0
    assert exact["policy/behaviour_ess"] == pytest.approx(1, rel=1e-4)
    for index, scored in enumerate(rollouts):
        log_probs = [log_prob - 1.0 for log_prob in scored.rollout.log_probs]
        rollouts[index] = replace(scored, rollout=replace(scored.rollout, log_probs=log_probs))
    masked = make_learner(tiny_model, **common).update(rollouts)
    assert masked["policy/behaviour_masked"] == 1
    assert masked["policy/behaviour_ess"] == masked["policy/behaviour_weight_mean"] == masked["policy/grad_norm"] == 0
    assert masked["policy/behaviour_ratio_mean"] == pytest.approx(math.e, rel=1e-3)


@pytest.mark.parametrize("broken", ["log_prob", "advantage"])
def test_non_finite_loss_stops_before_the_optimizer_moves(tiny_model: str, broken: str) -> None:
    learner = make_learner(tiny_model, micro_batch_tokens=24)
    before = served_state(learner)
    rollouts = make_rollouts(tiny_model)
    if broken == "log_prob":
        log_probs = [math.nan, *rollouts[5].rollout.log_probs[1:]]
        rollouts[5] = replace(rollouts[5], rollout=replace(rollouts[5].rollout, log_probs=log_probs))
    else:
        rollouts[5] = replace(rollouts[5], advantage=math.inf)
    with pytest.raises(FloatingPointError, match=r"policy step 1: .*not finite: p1/1\. .*has not moved"):
        learner.update(rollouts)
    after = served_state(learner)
    assert learner.policy_version == 0
    assert all(torch.equal(before[name], after[name]) for name in before)

    learner.update(make_rollouts(tiny_model))
    assert update_difference(tiny_model, weights_after(tiny_model), served_state(learner)) < 2e-4


def test_three_updates_a_resume_and_three_more_equal_six(tiny_model: str, tmp_path: Path) -> None:
    common = {"minibatches": 2, "kl_coefficient": 0.1}
    steps = [make_rollouts(tiny_model, seed) for seed in range(6)]
    straight = make_learner(tiny_model, **common)
    expected = [straight.update(rollouts) for rollouts in steps]

    first = make_learner(tiny_model, **common)
    metrics = [first.update(rollouts) for rollouts in steps[:3]]
    first.save(tmp_path)
    resumed = make_learner(tiny_model, **common)
    resumed.load(tmp_path)
    assert resumed.policy_version == 3
    metrics += [resumed.update(rollouts) for rollouts in steps[3:]]

    assert metrics == expected
    one, other = served_state(straight), served_state(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_policy_that_does_not_train_is_not_saved(tiny_model: str, tmp_path: Path) -> None:
    """`cotrain init` of a large policy would else write its float32 weights in each checkpoint, and read them in a resume."""
    learner = make_learner(tiny_model, train=False, kl_coefficient=0.1)
    assert learner._reference is None
    learner.save(tmp_path)
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("*.distcp"))
    resumed = make_learner(tiny_model, train=False)
    resumed.load(tmp_path)
    one, other = served_state(learner), served_state(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_small_files_are_saved_as_they_came_and_without_weights_on_trial(tiny_model: str, tmp_path: Path) -> None:
    """Many published policies come with a generation_config.json that transformers reads and refuses to save."""
    policy = Path(shutil.copytree(tiny_model, tmp_path / "policy"))
    (policy / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": [1, 2]}')
    learner, rollouts = make_learner(str(policy)), make_rollouts(str(policy))
    learner.save(tmp_path / "trial", weights=False)
    assert {path.name for path in (tmp_path / "trial").iterdir()} == {
        "config.json", "generation_config.json", "learner.pt", "learner.pt.xxh3",
    }  # fmt: skip
    learner.update(rollouts)
    learner.save(tmp_path / "saved")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (policy / name).read_bytes()
    files = [
        path for path in (tmp_path / "saved").rglob("*") if path.is_file() and path.suffix not in (".json", ".xxh3")
    ]
    assert {path.name for path in files} == {"learner.pt", "model.safetensors", ".metadata", "__0_0.distcp"}
    for path in files:  # all but the small files are hashed while they are written
        assert path.with_name(f"{path.name}.xxh3").read_text() == file_digest(path)
    resumed = make_learner(str(policy))
    resumed.load(tmp_path / "saved")
    assert resumed.update(rollouts) == learner.update(rollouts)


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_serving_state_has_the_names_of_the_checkpoint_and_shares_no_memory(
    model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    learner = make_learner(path, ROLLOUT.model_copy(update={"dtype": "bfloat16"}))
    state = served_state(learner)
    checkpoint = load_file(Path(path) / "model.safetensors")
    assert state.keys() == checkpoint.keys()
    assert all(torch.equal(state[name], checkpoint[name].bfloat16()) for name in state)
    learner.update(make_rollouts(path))
    assert all(torch.equal(state[name], checkpoint[name].bfloat16()) for name in state)


def test_hidden_states_are_those_of_hugging_face(tiny_model: str) -> None:
    tokens = [5, 9, 100, 3]
    aux, final = make_learner(tiny_model).hidden_states(tokens, (0, 1))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    assert torch.equal(aux, torch.cat(output.hidden_states[:2], dim=-1)[0])
    assert not aux.requires_grad and aux.shape == (4, 128)
    torch.testing.assert_close(final @ model.get_output_embeddings().weight.T, output.logits[0])


def test_a_missing_rank_is_noticed_before_the_model_loads() -> None:
    with pytest.raises(ValueError, match=r"policy\.num_processes is 2, but 1 learner"):
        make_learner("/nonexistent", num_processes=2)


def test_learning_rate_schedule() -> None:
    config = OptimizerConfig(warmup_steps=3, schedule="cosine")
    factors = [learning_rate_factor(step, config, 10) for step in range(10)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)
    assert factors[6] == pytest.approx(0.55)
    constant = OptimizerConfig(warmup_steps=1)
    assert [learning_rate_factor(step, constant, 10) for step in range(3)] == [0.5, 1.0, 1.0]
