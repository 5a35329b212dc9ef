import sys
from pathlib import Path

import pytest
import torch

# For policy_cases and policy_ddp_rank, which spawned processes import too.
sys.path.insert(0, str(Path(__file__).parent))

from policy_cases import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return save_tiny_model(tmp_path_factory.mktemp("tiny_policy"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny_untied_policy"), "llama")
