"""An MTP head made from scratch, beside a dense target, on a real engine."""

from collections.abc import Iterator

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from tests.engine.mtp_head import *  # noqa: F403
from tests.engine.mtp_head import Target, running

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def target(rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(resolve_model("tiny:llama"), rollout_config, tmp_path_factory.mktemp("mtp") / "v0") as target:
        yield target
