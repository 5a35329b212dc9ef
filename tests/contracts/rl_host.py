"""The rollout engine of verl or of OpenRLHF as a host: python rl_host.py ANSWERS MODEL verl|openrlhf.

Commands and answers are those of tests/engine/sidecar_host.py. The engine is theirs, in their own Ray actor with their own
extension of vLLM's workers, and the options of their recipes as far as a CPU allows. verl's starts without weights ("dummy"), and
gets them in buckets as verl's trainer sends them.
"""

import asyncio
import json
import os
import sys
from typing import Any

import ray

PROMPT, RESPONSE, LENGTH = 64, 128, 256


class Verl:
    """verl's vLLMHttpServer in its hybrid mode, which shares its devices with the learner."""

    def __init__(self, model: str):
        from omegaconf import OmegaConf
        from verl.workers.rollout.replica import RolloutMode
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        rollout = {
            "_target_": "verl.workers.config.RolloutConfig", "name": "vllm", "tensor_model_parallel_size": 1, "dtype": "float32",
            "enforce_eager": True, "max_model_len": LENGTH, "max_num_seqs": 16, "max_num_batched_tokens": 1024,
            "prompt_length": PROMPT, "response_length": RESPONSE, "load_format": "dummy", "enable_sleep_mode": False,
            "gpu_memory_utilization": 0.1, "logprobs_mode": "processed_logprobs", "ignore_eos": True,
        }  # fmt: skip
        self._server = ray.remote(vLLMHttpServer).options(name="vllm_server_0_0", max_concurrency=100).remote(
            config=OmegaConf.create(rollout), rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=0, node_rank=0,
            model_config=OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": model}),
            gpus_per_node=1, nnodes=1, cuda_visible_devices="",
        )  # fmt: skip
        self._call("launch_server")
        self._sent = 0

    def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return ray.get(getattr(self._server, method).remote(*args, **options))

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        self._sent += 1
        names = [f"{self._sent}-{i}" for i in range(len(prompts))]
        generate = self._server.generate.remote
        asked = [generate(p, dict(sampling), request_id=name) for p, name in zip(prompts, names, strict=True)]
        return [list(output.token_ids) for output in ray.get(asked)]

    def send(self, file: str) -> None:
        """New weights of the policy, while no request runs."""
        from safetensors.torch import load_file
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

        received = self._server.collective_rpc.remote("update_weights_from_ipc", kwargs={"use_shm": True})
        handle = f"ipc:///tmp/rl-colocate-zmq-{ray.get_runtime_context().get_job_id()}-replica-0-rank-0.sock"
        sender = BucketedWeightSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True)
        asyncio.run(sender.async_send_weights(iter(load_file(file).items())))
        ray.get(received)
        self._call("clear_kv_cache")

    def sleep_and_wake(self) -> None:
        self._call("sleep")
        self._call("wake_up")

    def pause(self) -> str:
        """What verl does before it sends weights while requests run. Returns its error, or nothing."""
        try:
            self._call("abort_all_requests")
        except Exception as error:
            return str(error)
        return ""


class OpenRLHF:
    """OpenRLHF's RolloutRayActor."""

    def __init__(self, model: str):
        from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

        self._actor = RolloutRayActor.options(num_cpus=0).remote(
            model=model, enforce_eager=True, tensor_parallel_size=1, seed=0, distributed_executor_backend="uni",
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap", max_model_len=LENGTH,
            enable_prefix_caching=True, dtype="float32", trust_remote_code=True, full_determinism=False, num_gpus=1,
            gpu_memory_utilization=0.1, bundle_indices=None, enable_sleep_mode=False, agent_func_path=None,
            remote_rm_url=None, mm_pad_token_ids=set(),
        )  # fmt: skip
        self._call("reset_prefix_cache")

    def _call(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._actor, method).remote(*args))

    def generate(self, prompts: list[list[int]], sampling: dict[str, Any]) -> list[list[int]]:
        from vllm import SamplingParams

        asked = SamplingParams(**sampling, ignore_eos=True)
        outputs = ray.get([self._actor.generate.remote(prompt, asked) for prompt in prompts])
        return [list(output.outputs[0].token_ids) for output in outputs]

    def pause(self) -> str:
        self._call("pause_generation")
        self._call("resume_generation")
        return ""

    def send(self, file: str) -> str:
        """What OpenRLHF does for the first tensor of new weights. Returns its error, or nothing."""
        import torch

        try:
            self._call("update_weight", "model.norm.weight", torch.float32, [1])
        except Exception as error:
            return str(error)
        return ""


def main(descriptor: int, model: str, kind: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        host = {"verl": Verl, "openrlhf": OpenRLHF}[kind](model)
        print("ready", file=answers)
        for line in sys.stdin:
            method, *args = json.loads(line)
            print(json.dumps(getattr(host, method)(*args)), file=answers)
    ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
