"""The MTP heads that policies with linear attention, experts or both bring, on a real engine."""

from collections.abc import Iterator

import pytest

from cotrain.config.schema import RolloutConfig
from cotrain.models.loading import resolve_model
from tests.engine.mtp_head import *  # noqa: F403
from tests.engine.mtp_head import Target, running
from tests.native_models import trained_native

pytestmark = [pytest.mark.engine, pytest.mark.long]  # test_mtp_head.py has another head


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3-5", "glm4-moe"])
def target(
    request: pytest.FixtureRequest, rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    folder = resolve_model(str(trained_native(request.param)))
    with running(folder, rollout_config, tmp_path_factory.mktemp("mtp") / "v0") as target:
        yield target
