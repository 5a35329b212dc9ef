"""The checks of `cotrain doctor` that start an engine, and what they leave: the same commands as a user's."""

import json
from pathlib import Path

import pytest

from pipelines.doctor import engine
from pipelines.doctor.engine import context, run, sidecar, verify

pytestmark = [pytest.mark.engine, pytest.mark.long]  # `cotrain train` and `cotrain verify` have tests of their own


def test_a_sound_installation_passes_and_is_really_checked(tmp_path: Path) -> None:
    assert run(tmp_path, None) == "tiny:llama in float32, 3 steps, 2 drafters swapped in"
    assert verify(tmp_path).startswith("lossless: ")
    report = json.loads((tmp_path / "verify" / "verify.json").read_text())
    assert report["smallest_adjusted_p"] > report["false_alarm_rate"]
    checks = {row["check"] for row in report["checks"]}
    assert {"identity", "support", "returned log-probs", "uniformity by probability"} < checks
    assert any("swaps in mid-generation" in row["setting"] for row in report["checks"])


def test_an_adopted_engine_gets_drafters_and_keeps_its_text(tmp_path: Path) -> None:
    found = sidecar(tmp_path)
    assert found.startswith("1 adopted, ") and found.endswith(" drafters swapped in, 0 of 16 texts changed")


def test_a_drafter_that_fails_in_long_contexts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert context(tmp_path / "sound").endswith(" after 1900, of 4")
    worse = engine.CONTEXT.replace("llm = LLM(", "drafts['max_model_len'] = 1024\nllm = LLM(")
    monkeypatch.setattr(engine, "CONTEXT", worse)
    with pytest.raises(ValueError, match=r"4\.00 tokens a step after 64 tokens of context, 1\.00 after 1900"):
        context(tmp_path / "short")
