"""The MTP head that a policy with linear attention and experts brings, on a real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from tests.engine.mtp_head import *  # noqa: F403
from tests.engine.mtp_head import Target, running

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
]  # test_mtp_head.py and test_mimo_run.py have the other kinds of heads


@pytest.fixture(scope="module")
def target(
    qwen3_next_folder: Path, rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with running(
        resolve_model(str(qwen3_next_folder)), rollout_config, tmp_path_factory.mktemp("mtp") / "v0"
    ) as target:
        yield target
