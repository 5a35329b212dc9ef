"""One rollout engine: vLLM's asynchronous engine with speculation, feature tap and weight updates.

A plain asynchronous class; `cluster.py` makes it a Ray actor. Its process environment comes from
`threads.engine_environment` and must be set before vLLM is imported, which is why vLLM is imported in `start`.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cotrain.config import RolloutConfig
from cotrain.records import (
    FeatureShard,
    Rollout,
    RolloutBatch,
    RolloutRequest,
    SwapReport,
    Versions,
    WeightPayload,
)
from cotrain.rollout.acceptance_stats import counts_of_request, total_counts
from cotrain.rollout.feature_tap import allocated_rows, row_bytes
from cotrain.rollout.payload import WeightUpdateRefused

POLICY_READBACK_COLUMNS = 32
"""Input columns of each packed policy matrix read back after an update. Drafters are read back whole."""

PROMPT_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""Lengths of the n-grams that n-gram speculation looks up; vLLM's default, 5 exactly, hardly ever finds one."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with."""

    rollout: RolloutConfig
    model_path: str
    drafter_folder: str | None
    """Checkpoint folder of the first serving drafter; None runs without a drafter."""
    aux_layers: tuple[int, ...]
    seed: int
    scratch: str
    """Folder in shared memory for features and weights of this engine."""
    versions: Versions = field(default_factory=lambda: Versions(0, 0))
    speculation: Literal["drafter", "ngram"] = "drafter"
    """What proposes draft tokens: the drafter, if there is one, or a look-up of n-grams in the request's own text."""


class RolloutEngine:
    """Generates rollouts and takes weight updates. Not re-entrant: one generate at a time."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.versions = spec.versions
        self.decode_seconds = 0.0
        """Of the last generate: from when every request had its first token until the last token."""
        self._engine: Any = None
        self._batches = 0

    async def start(self) -> dict[str, Any]:
        """Load the model. Returns what the worker reports of itself."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from cotrain.rollout.scheduling import DraftLength

        Path(self.spec.scratch).mkdir(parents=True, exist_ok=True)
        k = self.spec.rollout.draft_tokens
        self._draft_length = DraftLength(f"{self.spec.scratch}/draft_length", initial=k)
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._engine_arguments()))
        await self._engine.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info={"keep_folder": f"{self.spec.scratch}/kept"})
        )
        tap = self.spec.rollout.features.model_dump() if self.spec.drafter_folder else None
        (report,) = await self._engine.collective_rpc("cotrain_start", args=(tap,))
        return report

    def _engine_arguments(self) -> dict[str, Any]:
        from cotrain.rollout import scheduling, weight_transfer, worker_extension

        rollout, k = self.spec.rollout, self.spec.rollout.draft_tokens
        arguments: dict[str, Any] = {
            "max_num_seqs": max(1, min(256, rollout.rollouts_per_step)),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "async_scheduling": False,  # DraftLengthScheduler is the synchronous one
            "model": self.spec.model_path,
            "dtype": rollout.dtype,
            "seed": self.spec.seed,
            # k+1 spare positions: vLLM stops drafting for the whole batch when one request comes this close to the end
            "max_model_len": rollout.max_model_len + k + 1,
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": False,
            "worker_extension_cls": f"{worker_extension.__name__}.CotrainWorker",
            "weight_transfer_config": {"backend": weight_transfer.BACKEND},
            "scheduler_cls": f"{scheduling.__name__}.DraftLengthScheduler",
            "additional_config": {scheduling.CONFIG_KEY: f"{self.spec.scratch}/draft_length"},
        }
        arguments |= rollout.vllm
        if self.spec.speculation == "ngram":
            arguments["speculative_config"] = {"method": "ngram", "num_speculative_tokens": k, **PROMPT_LOOKUP}
        elif self.spec.drafter_folder is not None:
            arguments["speculative_config"] = {
                "method": "eagle3",
                "model": self.spec.drafter_folder,
                "num_speculative_tokens": k,
                "draft_sample_method": rollout.draft_sample_method,
            }
        if "speculative_config" in arguments:
            arguments["per_request_spec_decode_metrics"] = "summary"
        return arguments

    async def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """Generate one response to each request, in the order given.

        tap: keep and hand over hidden states. overrides: sampling parameters of this call (greedy checks, bench).
        """
        self._batches += 1
        names = [f"b{self._batches}r{i}" for i in range(len(requests))]
        tap = tap and self.spec.drafter_folder is not None
        if tap:
            await self._engine.collective_rpc("cotrain_set_tapping", args=(True,))
        started = time.perf_counter()
        outputs = await self._run(names, requests, overrides)
        seconds = time.perf_counter() - started
        times = [output.metrics for output in outputs]
        self.decode_seconds = max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times)
        rollouts = [self._rollout(request, output) for request, output in zip(requests, outputs, strict=True)]
        sequences = [(r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids)) for r in rollouts]
        features, stats = await self._take_features(names, sequences) if tap else ([], {})
        return RolloutBatch(
            rollouts=rollouts,
            features=features,
            speculation=total_counts(r.speculation for r in rollouts),
            seconds=seconds,
            num_generated_tokens=sum(len(r.token_ids) for r in rollouts),
            feature_stats=stats,
        )

    async def tap_sequences(self, sequences: list[tuple[list[int], int]]) -> list[FeatureShard]:
        """Hidden states of given tokens, (prompt and response, prompt length) each, computed in a prefill.

        The shards hold the sequences in order, in as many groups as the tap's bounds ask for. Raises ValueError when
        one sequence alone is above them.
        """
        shards: list[FeatureShard] = []
        for group in self._within_tap_bounds(sequences):
            self._batches += 1
            names = [f"b{self._batches}r{i}" for i in range(len(group))]
            requests = [RolloutRequest(name, 0, ids, None) for name, (ids, _) in zip(names, group, strict=True)]
            await self._engine.collective_rpc("cotrain_set_tapping", args=(True,))
            # A cached block is not computed again, and so would be a hole.
            await self._run(names, requests, {"max_tokens": 1, "skip_reading_prefix_cache": True})
            taken, stats = await self._take_features(names, group)
            if stats["num_rollouts"] != len(group):
                raise RuntimeError(
                    f"the tap refused {stats['num_refused']} of {len(group)} sequences within its bounds"
                )
            shards += taken
        await self._engine.collective_rpc("cotrain_set_tapping", args=(False,))
        return shards

    def _within_tap_bounds(self, sequences: list[tuple[list[int], int]]) -> Iterator[list[tuple[list[int], int]]]:
        bounds = self.spec.rollout.features
        bytes_per_value = {"bfloat16": 2, "float32": 4}[self.spec.rollout.dtype]
        width = (len(self.spec.aux_layers) + 1) * self._engine.model_config.get_hidden_size()
        group: list[tuple[list[int], int]] = []
        tokens = num_bytes = 0
        for sequence in sequences:
            length = len(sequence[0])
            size = allocated_rows(length, bounds.window) * row_bytes(width, bytes_per_value)
            if length > bounds.max_tokens_per_step or size > bounds.max_bytes:
                raise ValueError(
                    f"rollout.features: a sequence of {length} tokens takes {size} bytes of the tap; raise max_bytes "
                    f"({bounds.max_bytes}) or max_tokens_per_step ({bounds.max_tokens_per_step})"
                )
            if group and (tokens + length > bounds.max_tokens_per_step or num_bytes + size > bounds.max_bytes):
                yield group
                group, tokens, num_bytes = [], 0, 0
            group.append(sequence)
            tokens, num_bytes = tokens + length, num_bytes + size
        if group:
            yield group

    async def _run(self, names: list[str], requests: list[RolloutRequest], overrides: dict[str, Any]) -> list[Any]:
        engine, synchronous = self._engine, self.spec.rollout.synchronous_batches
        if synchronous:
            await engine.pause_generation(mode="keep", clear_cache=False)
        queues = []
        for name, request in zip(names, requests, strict=True):
            prompt = {"prompt_token_ids": request.prompt_token_ids}
            queues.append(await engine.add_request(name, prompt, self._sampling(request, overrides)))
        if synchronous:
            await engine.resume_generation()
        return [await _final_output(queue) for queue in queues]

    def _sampling(self, request: RolloutRequest, overrides: dict[str, Any]) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        rollout = self.spec.rollout
        arguments = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k or -1,
            "max_tokens": rollout.max_new_tokens,
            "stop": list(rollout.stop) or None,
            "ignore_eos": rollout.ignore_eos,
            "seed": request.seed,
            "logprobs": 0,
        }
        return SamplingParams(**(arguments | overrides), output_kind=RequestOutputKind.FINAL_ONLY)

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            log_probs=[step[token].logprob for step, token in zip(completion.logprobs, token_ids, strict=True)],
            text=completion.text,
            finish_reason=completion.finish_reason,
            versions=self.versions,
            speculation=counts_of_request(completion.spec_decode_metrics),
        )

    async def _take_features(
        self, names: list[str], sequences: list[tuple[list[int], int]]
    ) -> tuple[list[FeatureShard], dict[str, float]]:
        rollout = self.spec.rollout
        path = f"{self.spec.scratch}/features_{self._batches}.safetensors"
        metadata = {
            "policy_version": str(self.versions.policy),
            "temperature": repr(rollout.temperature),
            "top_p": repr(rollout.top_p),
            "top_k": str(rollout.top_k),
            "draft_sample_method": rollout.draft_sample_method,
            "aux_layers": ",".join(map(str, self.spec.aux_layers)),
            "final_norm_applied": "true",
        }
        wanted = [(name, *sequence) for name, sequence in zip(names, sequences, strict=True)]
        (stats,) = await self._engine.collective_rpc("cotrain_take_features", args=(wanted, path, metadata))
        if not stats["num_rollouts"]:
            return [], stats
        num_bytes = Path(path).stat().st_size
        shard = FeatureShard(path, stats["num_rollouts"], stats["num_tokens"], num_bytes, self.versions.policy)
        return [shard], stats

    async def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights. Requests in flight are preempted and recomputed under them.

        Raises WeightUpdateRefused with the worker's reason; the old weights stay.
        """
        if policy_version < self.versions.policy:
            raise ValueError(f"policy version {policy_version} is older than the served {self.versions.policy}")
        started = time.perf_counter()
        await self._engine.pause_generation(mode="keep", clear_cache=True)
        try:
            await self._update(payload, Versions(policy_version, self.versions.drafter), draft=False)
        finally:
            await self._engine.resume_generation()
        return SwapReport(time.perf_counter() - started, payload.num_bytes, len(payload.digests))

    async def update_drafter(self, payload: WeightPayload, drafter_version: int) -> SwapReport:
        """Serve new drafter weights, in mid-generation if need be; caches stay (they never decide a token)."""
        if drafter_version < self.versions.drafter:
            raise ValueError(f"drafter version {drafter_version} is older than the served {self.versions.drafter}")
        started = time.perf_counter()
        await self._update(payload, Versions(self.versions.policy, drafter_version), draft=True)
        return SwapReport(time.perf_counter() - started, payload.num_bytes, len(payload.digests))

    async def _update(self, payload: WeightPayload, versions: Versions, draft: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        update = {
            "path": payload.path,
            "digests": payload.digests,
            "readback_columns": None if draft else POLICY_READBACK_COLUMNS,
            "readback_seed": versions.policy,
        }
        engine = self._engine
        await (engine.start_draft_weight_update() if draft else engine.start_weight_update())
        try:
            await engine.update_weights(WeightTransferUpdateRequest(update_info=update))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM sends a worker's exception as text in a bare Exception
            raise WeightUpdateRefused(str(error)) from error
        await engine.finish_weight_update(str(versions))
        self.versions = versions

    async def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Checksums of the named tensors as the worker serves them, read back whole."""
        (digests,) = await self._engine.collective_rpc("cotrain_served_digests", args=(names, draft))
        return digests

    async def weight_version(self) -> str:
        """The version string vLLM puts on outputs: p<policy>-d<drafter>."""
        return await self._engine.get_weight_version()

    async def set_draft_tokens(self, draft_tokens: int) -> None:
        """Draft length from the next step on, at most rollout.draft_tokens; 0 switches speculation off."""
        if not 0 <= draft_tokens <= self.spec.rollout.draft_tokens:
            raise ValueError(f"draft tokens must be 0..{self.spec.rollout.draft_tokens}, not {draft_tokens}")
        self._draft_length.set(draft_tokens)

    async def set_draft_sample_method(self, method: str) -> None:
        """Greedy or probabilistic drafting from the next step on."""
        await self._engine.collective_rpc("cotrain_set_draft_sample_method", args=(method,))

    async def time_phases(self) -> None:
        """Time the phases of every step from now on (see vllm_compat.time_phases)."""
        await self._engine.collective_rpc("cotrain_time_phases")

    async def take_step_times(self) -> list[dict[str, float]]:
        """One row a step since the last call; empty before `time_phases`."""
        (rows,) = await self._engine.collective_rpc("cotrain_take_step_times")
        return rows

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        await self._engine.reset_prefix_cache()

    async def shutdown(self) -> None:
        """Stop vLLM and all its processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


async def _final_output(queue: Any) -> Any:
    while True:
        output = queue.get_nowait() or await queue.get()
        if output.finished:
            return output
        await asyncio.sleep(0)
