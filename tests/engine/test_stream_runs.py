"""A run in which generation is ahead of learning is killed and resumed: the bound of the lag, and every group once."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.engine.runs import TIMEOUT_S, metrics_of, train
from tests.engine.stream_runs import AHEAD, P, check_stream, events_of
from tests.engine.test_stopped_runs import assert_nothing_left, start

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("proposer", ["drafter", pytest.param("history", marks=pytest.mark.long)])
def test_a_run_that_is_killed_resumes_and_trains_on_every_group_once(proposer: str, tmp_path: Path) -> None:
    """Killed in step 5, while groups are generated, scored and waiting; the newest checkpoint is of step 4."""
    root, of_history = tmp_path, proposer == "history"
    arguments = [*AHEAD, "name=killed", "stream.max_policy_lag=1"]
    arguments += ["rollout.history={}", "drafter=none"] if of_history else []
    process = start(root, "killed-run", *arguments)
    deadline = time.monotonic() + TIMEOUT_S
    saved = root / "killed/checkpoints/step_000004/COMPLETE"  # it is written beside step 5
    while not (saved.exists() and any(e["event"] == "taken" and e["step"] == 5 for e in events_of(root, "killed"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert_nothing_left("COTRAIN_TEST_MARKER=killed-run")
    stream = json.loads(saved.with_name("state.json").read_text())["stream"]
    numbers = [row["number"] for row in stream["groups"]]
    assert all(4 * P <= number < 6 * P for number in numbers)
    output = train(root, "--resume", "killed")
    check_stream(root, "killed", lag=1)
    restored = [row["group"] for row in events_of(root, "killed") if row["event"] == "restored"]
    assert restored == sorted(numbers)
    rows = metrics_of(root, "killed")
    if of_history:
        known = [row["history/tokens"] for row in rows]
        assert known == sorted(known) and known[0] > 0, "the resumed run drafts from what the one before it generated"
        assert rows[-1]["rollout/acceptance_length"] > 1
    else:
        assert rows[-1]["drafter/lost_features"] == stream["lost_features"]
    idle = r"p\d+% r\d+%" if of_history else r"d\d+% p\d+% r\d+%"
    assert re.search(rf"step 8/8 .* lag [01]\.\d .* p8 d\d\s+idle {idle}", output)
    assert "prompts identical" in output and "DIFFERS" not in output
    assert (root / "killed/report/idle_time.png").is_file()
    assert (root / "killed/report/policy_lag.png").is_file()
