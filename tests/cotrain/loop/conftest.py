"""What the tests of the producer share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cotrain.loop.simulated_stream import Stream


@pytest.fixture
def new(run_config: Any, tmp_path: Path) -> Callable[..., Stream]:
    return lambda **fields: Stream(run_config, tmp_path, **fields)
