"""The comparison of tapped hidden states with the learner's own, on made-up states of a six-layer policy."""

import dataclasses

import pytest
import torch

from cotrain.process.failures import SelfCheckFailed
from cotrain.records import Rollout, RolloutBatch, Versions
from cotrain.trainer.self_check import TOLERANCE, check_features, check_log_probs, check_records, relative_error
from cotrain.transport.features import FeatureRecord, write_records
from drafters.base import SamplingParams

WIDTH, LENGTH, LAYERS = 8, 20, (2, 3, 5)


class Policy:
    """Hidden states as a learner returns them; index 6 is the last layer."""

    def __init__(self):
        self.states = torch.randn(7, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def hidden_states(self, token_ids, layers):
        assert len(token_ids) == LENGTH
        none = torch.empty(LENGTH, 0)
        return torch.cat([none, *(self.states[layer] for layer in layers)], dim=1), self.states[6] * 2


def tapped(tmp_path, layers=LAYERS, noise=0.0, holes=slice(0, 0), policy=None, said=LAYERS) -> RolloutBatch:
    """A batch whose shard holds the states of `layers`, said to be those of `said`."""
    aux, final = (policy or Policy()).hidden_states(range(LENGTH), layers)
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(LENGTH, dtype=torch.bool)
    mask[-1] = mask[holes] = False
    record = FeatureRecord(
        token_ids=torch.arange(LENGTH),
        aux_hidden=torch.where(mask[:, None], aux * (1 + noise * torch.randn(aux.shape, generator=generator)), 0),
        final_hidden=torch.where(mask[:, None], final, 0),
        feature_mask=mask,
        prompt_length=5,
        policy_version=0,
        sampling=SamplingParams(1.0, 1.0, 0, "greedy"),
        aux_layers=said,
    )
    path = tmp_path / "features.safetensors"
    write_records(path, [record])
    return RolloutBatch([], [str(path)], 1.0, 1)


def test_the_same_states_pass(tmp_path):
    assert check_features(tapped(tmp_path), Policy().hidden_states, "float32") < 1e-6


def test_a_head_that_reads_no_aux_layer_passes(tmp_path):
    assert check_features(tapped(tmp_path, layers=(), said=()), Policy().hidden_states, "float32") < 1e-6


def test_only_rollouts_of_the_learners_own_policy_are_compared(tmp_path):
    """After a resume with lag, other policies have generated some rollouts, and the learner no longer has them."""
    batch = tapped(tmp_path, layers=(2, 4, 5))
    assert check_features(batch, Policy().hidden_states, "float32", 1) is None
    with pytest.raises(SelfCheckFailed):
        check_features(batch, Policy().hidden_states, "float32", 0)


def test_holes_are_not_compared(tmp_path):
    assert check_features(tapped(tmp_path, holes=slice(0, 9)), Policy().hidden_states, "float32") < 1e-6


def test_rounding_passes_in_bfloat16_alone(tmp_path):
    batch = tapped(tmp_path, noise=0.01)
    assert 1e-3 < check_features(batch, Policy().hidden_states, "bfloat16") < TOLERANCE["bfloat16"]
    with pytest.raises(SelfCheckFailed, match="not the policy's"):
        check_features(batch, Policy().hidden_states, "float32")


@pytest.mark.parametrize(("shift", "found"), [(1, r"3, 4, \d"), (-1, "1, 2, 4")])
def test_layer_ids_off_by_one_are_named(tmp_path, shift, found):
    batch = tapped(tmp_path, layers=tuple(layer + shift for layer in LAYERS))
    with pytest.raises(
        RuntimeError, match=rf"configured \[2, 3, 5\], they look like layers \[{found}\]; check drafter"
    ):
        check_features(batch, Policy().hidden_states, "float32")


def test_one_wrong_layer_is_named(tmp_path):
    batch = tapped(tmp_path, layers=(2, 4, 5))
    with pytest.raises(SelfCheckFailed, match=r"configured \[2, 3, 5\], they look like layers \[2, 4, 5\]"):
        check_features(batch, Policy().hidden_states, "bfloat16")


def test_an_off_by_one_below_the_tolerance_is_found(tmp_path):
    class Slow(Policy):
        """Each layer changes little."""

        def __init__(self):
            super().__init__()
            self.states = self.states[:1] + 0.01 * self.states

    aux, _ = Slow().hidden_states(range(LENGTH), (2, 3, 4))
    expected, _ = Slow().hidden_states(range(LENGTH), LAYERS)
    assert relative_error(aux, expected) < TOLERANCE["bfloat16"]
    with pytest.raises(SelfCheckFailed, match=r"they look like layers \[2, 3, 4\]"):
        check_features(tapped(tmp_path, layers=(2, 3, 4), policy=Slow()), Slow().hidden_states, "bfloat16")


def test_a_wrong_final_state_is_named(tmp_path):
    class WithoutNorm(Policy):
        def hidden_states(self, token_ids, layers):
            aux, final = super().hidden_states(token_ids, layers)
            return aux, final / 2

    with pytest.raises(SelfCheckFailed, match="final norm differs"):
        check_features(tapped(tmp_path), WithoutNorm().hidden_states, "float32")


def test_states_that_are_no_numbers_do_not_pass(tmp_path):
    class Broken(Policy):
        def __init__(self):
            super().__init__()
            self.states[3, 4] = float("nan")

    with pytest.raises(SelfCheckFailed, match="hidden states are not"):
        check_features(tapped(tmp_path), Broken().hidden_states, "float32")


def test_nothing_but_holes_does_not_pass(tmp_path):
    with pytest.raises(SelfCheckFailed, match="hidden states are not"):
        check_features(tapped(tmp_path, holes=slice(0, LENGTH)), Policy().hidden_states, "float32")


def test_a_first_step_without_features_is_an_error():
    with pytest.raises(SelfCheckFailed, match=r"raise rollout\.features\.max_bytes"):
        check_features(RolloutBatch([], [], 1.0, 1), Policy().hidden_states, "float32")


def test_the_relative_error_is_one_of_norms():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])
    assert relative_error(a, b) == pytest.approx(1 / 34**0.5)


def with_rollout(batch: RolloutBatch, prompt_length: int = 5, tokens: list[int] | None = None) -> RolloutBatch:
    """The batch, with the rollout that its one record came from, parted after prompt_length tokens."""
    tokens = list(range(LENGTH)) if tokens is None else tokens
    prompt, response = tokens[:prompt_length], tokens[prompt_length:]
    rollout = Rollout("p", 0, prompt, response, [-1.0] * len(response), "", "stop", Versions(0, 0))
    return dataclasses.replace(batch, rollouts=[rollout])


def test_records_of_their_rollouts_pass(tmp_path):
    check_records(with_rollout(tapped(tmp_path)), end_token_ids=[LENGTH - 1])


@pytest.mark.parametrize("prompt_length", [4, 6])
def test_a_prompt_boundary_off_by_one_is_named(tmp_path, prompt_length):
    with pytest.raises(SelfCheckFailed, match=f"a prompt of 5, the engine was given one of {prompt_length}"):
        check_records(with_rollout(tapped(tmp_path), prompt_length), end_token_ids=())


def test_a_record_of_other_tokens_is_named(tmp_path):
    with pytest.raises(SelfCheckFailed, match="other tokens than every rollout"):
        check_records(with_rollout(tapped(tmp_path), tokens=[7] * LENGTH), end_token_ids=())


def test_tokens_behind_the_end_are_named(tmp_path):
    batch = with_rollout(tapped(tmp_path))
    with pytest.raises(SelfCheckFailed, match=r"rollout p/0 has 2 tokens behind the end-of-sequence token 17"):
        check_records(batch, end_token_ids=[LENGTH + 1, LENGTH - 3])
    check_records(batch, end_token_ids=())
    check_records(batch, end_token_ids=[3])  # in the prompt, where templates put it


@pytest.mark.parametrize(("dtype", "rounding", "shift"), [("float32", 1e-4, 0.2), ("bfloat16", 0.05, 1.0)])
def test_log_probs_of_other_tokens_are_named(dtype, rounding, shift):
    check_log_probs(rounding, dtype)
    for gap in (shift, float("nan")):
        with pytest.raises(SelfCheckFailed, match="belong to other tokens"):
            check_log_probs(gap, dtype)
