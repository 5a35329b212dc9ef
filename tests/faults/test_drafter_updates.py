"""Faults 1, 2, 4 and 6 on a real engine: drafter updates that are wrong, broken, scrambled, or lost later on."""

from typing import Any

import pytest
import torch

from cotrain.config.schema import DrafterConfig
from cotrain.publish.alarms import Alarm, check_step
from cotrain.publish.decision import decide
from cotrain.publish.evidence import Publication
from cotrain.records import RolloutBatch
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import Drafter
from tests.engine.conftest import LiveEngine, make_requests, tokens
from tests.faults.conftest import Fault
from tests.publish_evidence import evidence_of, expected_from

pytestmark = pytest.mark.engine

STEPS = 100
"""Length of the run that false alarms are shared out over."""


def alarms_of(live: LiveEngine, batch: RolloutBatch, good: RolloutBatch, **read_back: Any) -> list[Alarm]:
    """Alarms of one step, where the drafter is expected to do what it did in `good`."""
    expected = expected_from(good.rollouts)
    evidence = evidence_of(batch, live.engine.versions, expected=expected, **read_back)
    return check_step(evidence, DrafterConfig(model={"type": "eagle3"}), total_steps=STEPS)


def served(live: LiveEngine, state: dict[str, torch.Tensor], draft: bool) -> dict[str, str]:
    return live.run(live.engine.served_digests(sorted(state), draft=draft))


def digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("name", ["embed_tokens.weight", "model.embed_tokens.weight"])
def test_1_an_update_that_carries_an_embedding(
    name: str, fresh: LiveEngine, fitted_drafter: Drafter, target_state: dict, fault: Fault
) -> None:
    state, reference = fitted_drafter.state_for_serving(), tokens(fresh.greedy(make_requests(4)))
    with pytest.raises(WeightUpdateRefused, match=f"not expected: .'{name}'"):
        fresh.send_drafter(state | {name: torch.zeros(512, 128)})
    assert served(fresh, target_state, draft=False) == digests(target_state)
    assert tokens(fresh.greedy(make_requests(4))) == reference
    fault("1a", f"drafter update carries {name}", "update refused", steps=0)


def test_2_weights_that_are_no_numbers(fresh: LiveEngine, fitted_drafter: Drafter, fault: Fault) -> None:
    good = fitted_drafter.state_for_serving()
    fresh.send_drafter(good)
    before = fresh.greedy(make_requests(16))
    with pytest.raises(WeightUpdateRefused, match=r"norm.weight has non-finite values"):
        fresh.send_drafter(good | {"norm.weight": good["norm.weight"] * float("nan")})
    after = fresh.greedy(make_requests(16, first=16))
    assert after.speculation.acceptance_length == pytest.approx(before.speculation.acceptance_length, abs=0.05)
    assert tokens(after) == tokens(before)
    fault("2a", "NaN in a drafter update", "update refused", steps=0)


def test_2_finite_weights_that_overflow(fresh: LiveEngine, fitted_drafter: Drafter, fault: Fault) -> None:
    """Past every check of the weights, as they would have to get by trainer, gate and payload."""
    good = fitted_drafter.state_for_serving()
    fresh.send_drafter(good)
    before = fresh.greedy(make_requests(16))
    values = good["layers.0.self_attn.v_proj.weight"]
    fresh.send_drafter(good | {"layers.0.self_attn.v_proj.weight": torch.full_like(values, 3e38)})
    broken = fresh.greedy(make_requests(16))
    (alarm,) = alarms_of(fresh, broken, before)
    assert alarm.name in ("acceptance_collapsed", "acceptance_below_expected")

    fresh.run(fresh.engine.clear_drafter_cache())
    fresh.send_drafter(good)
    after = fresh.greedy(make_requests(16))
    assert after.speculation.acceptance_length == pytest.approx(before.speculation.acceptance_length, abs=0.05)
    assert tokens(broken) == tokens(after) == tokens(before)
    fault("2b", "finite v_proj = 3e38, values overflow on the engine", f"{alarm.name}, rollback", steps=1)


def test_2_the_trainer_knows_it_before_it_publishes(fitted_drafter: Drafter, fault: Fault) -> None:
    assert fitted_drafter.overflowing() == []
    state = fitted_drafter.state_dict()
    weight = state["layers.0.self_attn.v_proj.weight"]
    kept = weight.clone()
    with torch.no_grad():
        weight.fill_(3e38)
    problems = fitted_drafter.overflowing()
    with torch.no_grad():
        weight.copy_(kept)
    assert problems == ["values too large with layers.0.self_attn.v_proj.weight up to 3e+38"]
    fault("2b", "finite v_proj = 3e38 in the trainer", "bound on weights, before publishing", steps=0)


def interleaved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of q, k and v as a fused projection holds them that keeps each key head beside its queries."""
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    query, key, value = (state[name].unflatten(0, (2, -1)) for name in names)  # [key heads, rows of the group, in]
    fused = torch.cat([query, key, value], dim=1).flatten(0, 1)
    parts = fused.split([state[name].shape[0] for name in names])
    return state | {name: part.contiguous() for name, part in zip(names, parts, strict=True)}


def test_4_scrambled_heads(fresh: LiveEngine, fitted_drafter: Drafter, fault: Fault) -> None:
    """As complete, finite and exactly read back as a sound update; only what is served shows it."""
    good = fitted_drafter.state_for_serving()
    fresh.send_drafter(good)
    requests = [*make_requests(16), *make_requests(16, seed=1, first=16)]
    good_version = fresh.engine.versions.drafter
    expected = expected_from(fresh.generate(requests).rollouts)
    fresh.send_drafter(interleaved(good))
    serving = Publication(good_version).published(good_version, fresh.engine.versions.drafter, 0.1, scored=True)
    batch = fresh.generate(requests)
    evidence = evidence_of(batch, fresh.engine.versions, expected=expected, serving=serving)
    decision = decide(evidence, DrafterConfig(model={"type": "eagle3"}), total_steps=STEPS)
    assert decision.events[-1].kind == "rolled back" and decision.metrics["canary/roll_back_to"] == good_version
    fresh.send_drafter(good)
    after = fresh.generate(requests)
    assert after.speculation.acceptance_length > decision.metrics["canary/bound"]
    fault("4", "q, k, v rows in the order of another fused layout", "canary, rolled back", steps=1)


def test_6_weights_lost_by_the_engine(
    fresh: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter, fault: Fault
) -> None:
    """What sleep and wake leave behind: the first drafter again, under the version number of the newest."""
    sent = fresh.payload(fitted_drafter.state_for_serving())
    fresh.run(fresh.engine.update_drafter(sent, fresh.engine.versions.drafter + 1))
    good = fresh.generate(make_requests(16))
    lost = fresh.payload(untrained_drafter.state_for_serving())
    fresh.run(fresh.engine.update_drafter(lost, fresh.engine.versions.drafter))

    batch = fresh.generate(make_requests(16))
    read_back = fresh.run(fresh.engine.served_digests(sorted(sent.digests), draft=True))
    alarms = alarms_of(fresh, batch, good, sent=sent.digests, served=[read_back])
    assert "weights_differ" in [alarm.name for alarm in alarms]
    assert not any(alarm.fatal for alarm in alarms)
    fault("6a", "drafter weights lost, digests read back", "weights_differ", steps=1)


def test_6_weights_lost_and_never_read_back(
    fresh: LiveEngine, fitted_drafter: Drafter, untrained_drafter: Drafter, fault: Fault
) -> None:
    fresh.send_drafter(fitted_drafter.state_for_serving())
    good = fresh.generate(make_requests(16))
    lost = fresh.payload(untrained_drafter.state_for_serving())
    fresh.run(fresh.engine.update_drafter(lost, fresh.engine.versions.drafter))
    alarms = alarms_of(fresh, fresh.generate(make_requests(16)), good)
    assert {alarm.name for alarm in alarms} <= {"acceptance_collapsed", "acceptance_below_expected"} and alarms
    fault("6b", "drafter weights lost, only acceptance shows it", alarms[0].name, steps=1)
