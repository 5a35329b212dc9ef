"""What the sidecar hooks into, held against the sources of each vLLM that it may join: make test-contracts.

Sources are only read, so that no vLLM has to be installed. VLLM_SOURCES names the folder that tests.contracts.sources
has filled.
"""

import ast
import functools
import os
from pathlib import Path

import pytest

from cotrain.rollout.vllm.interface import (
    PROPOSER,
    RUNNER,
    SCHEDULER,
    SIDECAR,
    SIDECAR_VERSIONS,
    USED,
    WRAPPED_ON_CPU,
    moved_in,
    parameters_in,
)
from cotrain.sidecar.adoption import HOST_HAS_SET

SOURCES = Path(os.environ["VLLM_SOURCES"])

IN_HOSTS_TOO = (
    RUNNER, PROPOSER, SCHEDULER, "vllm.v1.core.sched.output:", "vllm.v1.outputs:", "vllm.v1.attention.backend:",
    "vllm.v1.worker.", "vllm.v1.utils:", "vllm.v1.sample.metadata:", "vllm.model_executor.models.", "vllm.model_executor.layers.",
    "vllm.distributed.parallel_state:", "vllm.model_executor.model_loader.mtp_validation:",
)  # fmt: skip
"""Beginnings of the names in USED that the sidecar uses as well; the others belong to engines of cotrain's own runs."""

READ = {
    "vllm.engine.arg_utils:EngineArgs": " ".join(HOST_HAS_SET) + " model worker_extension_cls",
    "vllm.config.vllm:VllmConfig": "instance_id use_v2_model_runner scheduler_config model_config parallel_config "
    "speculative_config load_config",
    "vllm.config.model:ModelConfig": "quantization runner_type hf_config get_hidden_size",
    "vllm.config.parallel:ParallelConfig": "world_size data_parallel_size",
    "vllm.config.scheduler:SchedulerConfig": "max_num_seqs async_scheduling",
    "vllm.v1.request:Request": "request_id sampling_params all_token_ids num_prompt_tokens num_tokens arrival_time "
    "get_finished_reason",
    "vllm.v1.core.sched.output:NewRequestData": "req_id prompt_token_ids sampling_params",
    "vllm.v1.core.sched.output:SchedulerOutput": "finished_req_ids total_num_scheduled_tokens",
    "vllm.sampling_params:SamplingParams": "temperature top_p top_k max_tokens extra_args",
    "vllm.v1.worker.gpu_worker:Worker": "_weight_update_active",
}
"""What the sidecar alone reads, besides."""


@functools.cache
def identifiers(version: str, path: str) -> set[str]:
    """All names in the module that a path like those of USED begins with."""
    file = SOURCES / version / f"{path.partition(':')[0].replace('.', '/')}.py"
    fields = ("id", "attr", "arg", "name")
    nodes = ast.walk(ast.parse(file.read_bytes()))
    return {value for node in nodes for field in fields if isinstance(value := getattr(node, field, None), str)}


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_hook_has_the_known_signature(version: str) -> None:
    assert moved_in(SOURCES / version, SIDECAR) == []


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_name_that_is_read_is_there(version: str) -> None:
    used = {path: names for path, names in USED.items() if path.startswith(IN_HOSTS_TOO)}
    assert len(used) > 12
    missing = {
        path: names
        for table in (used, READ)
        for path, text in table.items()
        if (names := set(text.split()) - identifiers(version, path))
    }
    assert missing == {}


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_corrections_of_the_cpu_build_replace_what_they_know_or_nothing(version: str) -> None:
    found = {path: parameters_in(SOURCES / version, path) for path in WRAPPED_ON_CPU}
    differing = {path for path, names in found.items() if names is not None and names != WRAPPED_ON_CPU[path]}
    assert differing == set()
    missing = {path.partition(":")[2] for path, names in found.items() if names is None}
    imported = {"empty_exponential_noise_like", "sample_with_exponential_noise"}  # into the module that is corrected
    assert missing - imported <= {"_rebind_kernels"}  # vLLM searches for kernels since 0.31


@pytest.mark.parametrize("version", SIDECAR_VERSIONS)
def test_every_process_of_an_engine_loads_plugins(version: str) -> None:
    for place in ("engine/arg_utils.py", "v1/engine/core.py", "v1/worker/worker_base.py"):
        assert "load_general_plugins()" in (SOURCES / version / "vllm" / place).read_text()
