"""The roofline beside steps that were measured on H100, from data sheet and operator tables, with the host's time given."""

import pytest

from benchmarks.simulator_validation import single_step, size, surface_errors


def test_steps_of_llama_8b_and_their_ratio_to_no_speculation() -> None:
    """SpecDecode-Bench's law for vLLM: 1 to 128 requests, k = 0 to 5, contexts of 512 to 2,048 tokens."""
    steps, ratios = surface_errors()
    assert len(steps) == 144 and len(ratios) == 120
    mean, largest = size(steps)
    assert mean < 0.10 and largest < 0.25
    mean, _ = size(ratios)
    assert mean < 0.10 and abs(ratios.mean()) < 0.08


def test_a_step_of_a_larger_model_on_two_gpus() -> None:
    predicted, measured = single_step()
    assert predicted == pytest.approx(measured, rel=0.15)
