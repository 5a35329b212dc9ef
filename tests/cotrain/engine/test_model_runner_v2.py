"""The hook into model runner V2, with vLLM's input batch and a speculator that has what it reads of it.

tests/engine/test_sidecar_v2.py runs it in vLLM.
"""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from cotrain.engine.model_runner_v2 import SpeculatorHook
from tests.cotrain.engine.test_vllm_hooks import tapping

MOST = 3
AUX, HIDDEN = [torch.randn(7, 4), torch.randn(7, 4)], torch.randn(7, 4)  # two rows of padding


class Speculator:
    """That of vLLM 0.31, which drafts as much as is configured. Keeps how much each call was to draft."""

    def __init__(self) -> None:
        self.num_speculative_steps, self.drafted = MOST, []

    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
        last_sampled, dp_sync=None, dummy_run=False,
    ):  # fmt: skip
        self.drafted.append(self.num_speculative_steps)
        return torch.ones(input_batch.num_reqs, self.num_speculative_steps, dtype=torch.long)


class Speculator032(Speculator):
    """It is told the draft length of each step."""

    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected,
        last_sampled, dummy_run=False, num_speculative_tokens=None,
    ):  # fmt: skip
        assert self.num_speculative_steps == MOST
        self.drafted.append(num_speculative_tokens)
        return torch.ones(input_batch.num_reqs, MOST, dtype=torch.long)


def runner_with(speculator: Any, model: Any = None) -> Any:
    def take_draft_token_ids() -> DraftTokenIds:
        return DraftTokenIds(["a", "b"], [[-1] * MOST] * 2)

    return SimpleNamespace(
        speculator=speculator, get_model=lambda: model or object(), take_draft_token_ids=take_draft_token_ids
    )


def batch() -> InputBatch:
    """vLLM's own, with two requests of 2 and 3 tokens."""
    made = InputBatch.make_dummy(2, 5, InputBuffers(4, 16, torch.device("cpu")))
    made.req_ids = ["a", "b"]
    made.positions.copy_(torch.tensor([7, 8, 3, 4, 5]))
    made.input_ids.copy_(torch.tensor([11, 12, 21, 22, 23]))
    return made


def propose(runner: Any, **options: Any) -> Any:
    sampled, rejected = torch.tensor([1, 1]), torch.tensor([0, 0])
    return runner.speculator.propose(
        batch(), None, None, HIDDEN, AUX, sampled, rejected, torch.tensor([5, 6]), **options
    )


def hooked(speculator: Any, length: int | None, reads_prompts: bool = False) -> tuple[Any, Any, list]:
    """The runner, the hook, and the rows that the tap was given."""
    runner = runner_with(speculator)
    hook = SpeculatorHook(runner, str)
    hook.draft_length, hook.reads_prompts = length, reads_prompts
    return runner, hook, tapping(hook, ["a", "b"])


def test_the_tap_gets_each_requests_rows() -> None:
    runner, _, tapped = hooked(Speculator032(), 2)
    propose(runner, num_speculative_tokens=2)
    assert [(r.request, r.first_position, r.token_ids.tolist()) for r in tapped] == [
        ("a", 7, [11, 12]),
        ("b", 3, [21, 22, 23]),
    ]
    expected = torch.cat([*AUX, HIDDEN], 1)[:5]
    assert torch.equal(torch.cat([r.hidden for r in tapped]), expected)


@pytest.mark.parametrize(("length", "drafted"), [(3, 3), (2, 2), (1, 1), (0, 1), (None, 3)])
def test_a_speculator_that_is_not_told_the_length_drafts_no_more(length: int | None, drafted: int) -> None:
    speculator = Speculator()
    runner, _, _ = hooked(speculator, length, reads_prompts=True)
    assert propose(runner).shape == (2, drafted)
    assert speculator.drafted == [drafted] and speculator.num_speculative_steps == MOST


@pytest.mark.parametrize("kind", [Speculator, Speculator032])
def test_length_0_leaves_the_drafter_out_where_it_does_not_come_back(kind: type[Speculator]) -> None:
    options = {"num_speculative_tokens": 0} if kind is Speculator032 else {}
    runner, _, tapped = hooked(kind(), 0)
    assert propose(runner, **options).tolist() == [[0] * MOST] * 2
    assert len(tapped) == 2 and runner.take_draft_token_ids().draft_token_ids == [[], []]
    runner, hook, _ = hooked(speculator := kind(), 0, reads_prompts=True)
    propose(runner, **options)
    assert len(speculator.drafted) == 1
    hook.draft_length = None  # a step that the scheduler has not stamped
    propose(runner, **options)
    assert len(speculator.drafted) == 2 and runner.take_draft_token_ids().draft_token_ids == [[-1] * MOST] * 2


def test_drafts_are_verified_by_the_distribution_they_were_drawn_from_when_the_method_changes() -> None:
    """vLLM's runner verifies a step's drafts with `draft_logits` before it asks for the next ones."""
    speculator: Any = Speculator032()
    logits = speculator.draft_logits = torch.ones(4, MOST, 9)
    temperature, seen = torch.tensor([0.7, 1.0, 0.0, 0.0]), list[tuple[Any, list[float]]]()
    own = speculator.propose

    def remembering(*args: Any, **options: Any) -> Any:
        seen.append((speculator.draft_logits, args[9].tolist()))
        return own(*args[:8], **options)

    speculator.propose = functools.wraps(own)(remembering)
    runner, hook, _ = hooked(speculator, None)
    rest = torch.tensor([1, 1]), torch.tensor([0, 0]), torch.tensor([5, 6]), torch.tensor([0, 0]), temperature, None
    for draws in (False, True):
        before = speculator.draft_logits
        hook.set_draws(draws)
        assert speculator.draft_logits is before, "the drafts that wait were drawn by it"
        runner.speculator.propose(batch(), None, None, HIDDEN, AUX, *rest, num_speculative_tokens=2)
    assert seen == [(None, [0.0] * 4), (logits, temperature.tolist())]
    with pytest.raises(ValueError, match=r"rollout\.draft_sample_method: V2 draws drafts only if"):
        SpeculatorHook(runner_with(Speculator032())).set_draws(True)


def test_dummy_runs_are_vllms_alone() -> None:
    runner, hook, tapped = hooked(speculator := Speculator032(), 0)
    hook.propose = lambda *args, **options: pytest.fail("it is called in a dummy run")
    names = ("attn_metadata", "slot_mappings", "last_hidden_states", "aux_hidden_states", "num_sampled", "num_rejected")
    options = dict.fromkeys((*names, "last_sampled"))
    runner.speculator.propose(input_batch=batch(), **options, dummy_run=True)
    assert speculator.drafted == [None] and not tapped


def test_an_unknown_runner_is_left_as_it_was() -> None:
    def propose(attn_metadata, input_batch, *rest):
        pass

    other = runner_with(SimpleNamespace(propose=propose))
    with pytest.raises(ValueError, match=r"SimpleNamespace\.propose takes \(attn_metadata input_batch rest\)"):
        SpeculatorHook(other)
    of_its_own = runner_with(Speculator032(), SimpleNamespace(get_mtp_target_hidden_states=lambda: HIDDEN))
    with pytest.raises(ValueError, match="other hidden states than its head"):
        SpeculatorHook(of_its_own)
    assert other.speculator.propose is propose and "propose" not in vars(of_its_own.speculator)
    SpeculatorHook(runner_with(Speculator032(), SimpleNamespace(get_mtp_target_hidden_states=lambda: None)))


def test_the_installed_speculator_is_known() -> None:
    speculator: Any = object.__new__(EagleSpeculator)
    SpeculatorHook(runner_with(speculator))
    assert "propose" in vars(speculator)
