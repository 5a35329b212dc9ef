"""A host that knows nothing of cotrain: python sidecar_host.py ANSWERS MODEL [OPTION [FAULT]].

It makes vLLM's LLM, reads one command per line, [method of Host, arguments ...] in JSON, and answers each with a line of JSON
to the file descriptor ANSWERS. With an option "two ranks", tensor parallel ones, the engine's worker is two processes. OPTION is "without corrections", "dummy" (the policy has no weights before
`fill`), "reports often" (an engine in this very process, every REPORT_SECONDS) or "interpreted" (so does Triton's interpreter, with a
function FAULT that raises), or "asynchronous" (as "reports often", with vLLM's asynchronous scheduling, which it uses on GPUs). With an option "adapter=FOLDER" the engine takes
requests for the LoRA adapter in it.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import patch

import psutil

MODEL_LEN = 256
REPORT_SECONDS = 0.1


class Host:
    """An engine and what hosts do with it. What touches weights needs an engine in this very process."""

    def __init__(self, model: str, load_format: str = "auto", adapter: str | None = None, num_ranks: int = 1):
        from vllm import LLM

        self._adapter = adapter
        lora = {"enable_lora": True, "max_lora_rank": 8} if adapter else {}
        self.llm = LLM(
            model, dtype="float32", max_model_len=MODEL_LEN, enforce_eager=True, kv_cache_memory_bytes=2**28, seed=0,
            disable_log_stats=False, load_format=load_format,
            tensor_parallel_size=num_ranks, **lora,
        )  # fmt: skip

    def generate(
        self, prompts: list[list[int]], sampling: dict[str, Any], adapter: str | None = None
    ) -> list[list[int]]:
        """adapter: name under which the host's adapter serves these requests; None for the base."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        lora = None if adapter is None or self._adapter is None else LoRARequest(adapter, 1, self._adapter)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(**sampling, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(requests, params, use_tqdm=False, lora_request=lora)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def begin(self, prompts: list[list[int]], num_tokens: int, num_steps: int, temperature: float = 1.0) -> None:
        """Requests that are left in the middle."""
        from vllm import SamplingParams

        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            self.llm.llm_engine.add_request(f"left{i}", {"prompt_token_ids": prompt}, params)
        for _ in range(num_steps):
            self.llm.llm_engine.step()

    def end(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()

    def schedules_ahead(self) -> bool:
        """Does vLLM schedule a step while the one before runs?"""
        return self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling

    def counts(self) -> dict[str, int]:
        """vLLM's own counts."""
        names = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_draft_tokens": "drafted_tokens"}
        names["vllm:spec_decode_num_accepted_tokens"] = "accepted_tokens"
        return {names[m.name]: int(m.value) for m in self.llm.get_metrics() if m.name in names}

    def load(self, file: str) -> None:
        """What TRL does: one parameter at a time into the model, without any session of vLLM's.

        As in verl, whose weights come in buckets, the memory of a tensor is used again after the call.
        """
        from safetensors.torch import load_file

        for name, tensor in load_file(file).items():
            self._model.load_weights([(name, tensor)])
            tensor.fill_(float("nan"))
        self.llm.reset_prefix_cache()

    def fill(self, folder: str) -> None:
        """Give weights to an engine that was loaded without any, whatever its processes are."""
        self.llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()

    def report_often(self) -> None:
        """In the workers, wherever they run."""
        self.llm.collective_rpc(_report_often)

    def write_into_a_parameter_of(self, rank: int) -> None:
        self.llm.collective_rpc(_write_into_a_parameter, args=(rank,))
        self.llm.reset_prefix_cache()

    def break_a_hook_of(self, rank: int, name: str) -> None:
        """From now on, a function of this rank's WorkerSidecar raises."""
        self.llm.collective_rpc(_break_a_hook, args=(rank, name))

    def write_into_a_parameter(self) -> None:
        self._model.model.norm.weight.data.mul_(1.01)
        self.llm.reset_prefix_cache()

    def lose_the_drafter(self) -> None:
        """What waking up from level 2 does on a GPU: https://github.com/vllm-project/vllm/issues/52479."""
        import torch
        from vllm.config import set_current_vllm_config

        from cotrain.engine.loading import reload_weights

        worker = self._worker
        sidecar = worker.model_runner.execute_model.cotrain_hook.__self__
        lost = {name: torch.zeros_like(t) for name, t in sidecar._weights.last_good().items()}
        with set_current_vllm_config(worker.vllm_config):
            reload_weights(worker.get_draft_model(), worker.speculative_config.draft_model_config, lost)

    def hold_the_disk(self) -> None:
        """Let no shard be written before `free_the_disk`, for a minute at most."""
        from cotrain.engine.host import worker

        self.is_free, write = threading.Event(), worker.write_records

        def wait_and_write(*args: Any, **options: Any) -> Any:
            if not self.is_free.wait(60):
                self.is_free.set()  # a step that waits does so once
            return write(*args, **options)

        worker.write_records = wait_and_write

    def free_the_disk(self) -> None:
        self.is_free.set()

    def wake_up(self) -> None:
        self.llm.collective_rpc("wake_up")

    @property
    def _worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.model


def _report_often(worker: Any) -> None:
    from cotrain.engine.host import worker as sidecar

    sidecar.REPORT_SECONDS = REPORT_SECONDS


def _write_into_a_parameter(worker: Any, rank: int) -> None:
    if worker.rank == rank:
        worker.model_runner.model.lm_head.weight.data.mul_(1.01)


def _break_a_hook(worker: Any, rank: int, name: str) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    if worker.rank == rank:
        setattr(worker.model_runner.execute_model.cotrain_hook.__self__, name, broken)


class RunningHost:
    """The other end of it, in the test."""

    def __init__(self, process: Popen, answers: Any):
        self.process, self._answers = process, answers

    def __call__(self, method: str, *args: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *args]) + "\n")
        self.process.stdin.flush()
        answer = self._answers.readline()
        assert answer, "the host has ended"
        return json.loads(answer)


@contextmanager
def running_host(
    model: Path, environment: dict[str, str], *options: str, script: str = __file__
) -> Iterator[RunningHost]:
    """A host; it must end by itself, without an error, when nothing is asked of it any more.

    script: what is run, where a host does more than this one; it takes the same arguments.
    """
    ours, theirs = os.pipe()
    command = [sys.executable, script, str(theirs), str(model), *options]
    process = Popen(command, env=environment, stdin=PIPE, pass_fds=[theirs], text=True)
    os.close(theirs)
    try:
        with os.fdopen(ours) as answers:
            assert answers.readline() == "ready\n", "the host did not start"
            yield RunningHost(process, answers)
            process.stdin.close()
            assert process.wait(60) == 0
    finally:
        # Where a test fails, the engine's processes would outlive the host, and slow all tests that follow.
        with suppress(psutil.NoSuchProcess):
            for started in psutil.Process(process.pid).children(recursive=True):
                started.kill()
        process.kill()
        process.wait()


def main(stack: ExitStack, descriptor: int, model: str, *options: str) -> None:
    if "interpreted" in options:
        from tests.engine.interpreted_triton import interpret

        interpret()
        for fault in options[1:]:
            patch(fault, side_effect=RuntimeError("planted"), __name__=fault.rpartition(".")[2]).start()
    elif "asynchronous" in options:
        from tests.engine.async_on_cpu import scheduling_is_asynchronous

        stack.enter_context(scheduling_is_asynchronous())
    elif "without corrections" in options:
        import cotrain.engine.cpu

        cotrain.engine.cpu.PATCHES.clear()
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        [adapter] = [option.removeprefix("adapter=") for option in options if option.startswith("adapter=")] or [None]
        num_ranks = 2 if "two ranks" in options else 1
        host = Host(model, "dummy" if "dummy" in options else "auto", adapter, num_ranks)
        if {"reports often", "interpreted", "asynchronous"}.intersection(options):
            from cotrain.engine.host import scheduling, worker

            scheduling.REPORT_SECONDS = worker.REPORT_SECONDS = REPORT_SECONDS
        print("ready", file=answers)
        for line in sys.stdin:
            method, *args = json.loads(line)
            print(json.dumps(getattr(host, method)(*args)), file=answers)


if __name__ == "__main__":
    with ExitStack() as stack:
        main(stack, int(sys.argv[1]), *sys.argv[2:])
