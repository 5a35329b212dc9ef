"""A host's engine with the sidecar in it under vLLM's asynchronous scheduling: a step is scheduled while the one before runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from drafters.base import Drafter
from tests.engine import test_sidecar_engine as synchronous
from tests.engine.sidecar_host import running_host
from tests.engine.test_sidecar_engine import IN_PROCESS, Sidecar
from tests.sidecar_parts import host_environment, make_spool

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def sidecar(
    target_folder: Path, untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    folder = tmp_path_factory.mktemp("asynchronous")
    spool = make_spool(folder / "spool", target_folder, untrained_drafter, max_bytes=2**24)
    environment = host_environment(folder, spool) | IN_PROCESS
    with running_host(target_folder, environment, "asynchronous") as host:
        assert host("schedules_ahead")
        yield Sidecar(host, spool)


# In this order, since they share an engine, and the last one changes its policy.
test_requests_are_tapped_whole_and_described = synchronous.test_requests_are_tapped_whole_and_described
test_drafters_are_swapped_checked_and_counted = synchronous.test_drafters_are_swapped_checked_and_counted_as_vllm_does
test_an_update_in_mid_generation_leaves_no_mixed_rollout = (
    synchronous.test_an_update_in_mid_generation_leaves_no_mixed_rollout
)
