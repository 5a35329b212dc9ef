"""One rollout engine: vLLM's asynchronous engine with speculation, feature tap and weight updates.

A plain asynchronous class; `cluster.py` makes it a Ray actor. Its process environment comes from
`threads.engine_environment` and must be set before vLLM is imported, which is why vLLM is imported in `start`.
"""

import asyncio
import functools
import os
import time
from collections.abc import Container, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from cotrain.config.lossless_guard import environment_problems
from cotrain.process.failures import RunFailure
from cotrain.records import (
    FeatureShard,
    GainReport,
    Rollout,
    RolloutBatch,
    RolloutRequest,
    SwapReport,
    Versions,
    WeightPayload,
)
from cotrain.rollout.acceptance_stats import counts_of_request, total_counts, verification_steps
from cotrain.rollout.spec import EngineSpec
from cotrain.rollout.speculation.measurement import measured_sizes, next_size, room_for
from cotrain.rollout.tap_admission import (
    TapRequest,
    choose,
    first_of_each_prompt,
    row_bytes,
    tap_requests,
    within_bounds,
)
from cotrain.rollout.vllm.arguments import engine_arguments
from cotrain.rollout.vllm.engine_death import death_in_words
from cotrain.transport.payload import WEIGHTS_UNKNOWN, WeightUpdateRefused

POLICY_READBACK_COLUMNS = 32
"""Input columns of each packed policy matrix read back after an update, others each time. Drafters are read back whole.

An error that stays in one of n columns is found within ceil(n / 32) updates; an error in a share s of the columns is
found at once with probability 1 - (1 - s)^32. Reading all columns takes several times as long."""

TIMED_PROMPT_TOKENS = 32
"""Last tokens of each prompt that engine steps are measured after. Prefilling more would take most of the time."""


class RolloutEngine:
    """Generates rollouts and takes weight updates. Not re-entrant, but for updates and untapped generation."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.versions = spec.versions
        self.decode_seconds = 0.0
        """Of the last generate: from when every request had its first token until the last token."""
        self.decoded: dict[int, tuple[int, float]] = {}
        """Of the last generate, by number of requests in an engine step: tokens and seconds of the steps that computed
        no prompt. Empty where nothing proposes draft tokens."""
        self._engine: Any = None
        self._chooses = False  # is the draft length chosen by the engine's speculation controller?
        self._batches = 0
        self._drafter_before = spec.versions.drafter

    async def start(self) -> dict[str, Any]:
        """Load the model. Returns what the worker reports of itself.

        Drafts rollout.draft_tokens in every step until `time_draft_lengths`. Raises ValueError naming an environment
        variable that may change what speculation generates.
        """
        Path(self.spec.scratch).mkdir(parents=True, exist_ok=True)
        if self.speculates:
            _check_environment()

        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.spec)))
        await self._engine.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info={"keep_folder": f"{self.spec.scratch}/kept"})
        )
        return await self._call("cotrain_start", self.spec.drafter_folder is not None)

    @property
    def _aux_layers(self) -> tuple[int, ...]:
        return self.spec.serving.aux_layers if self.spec.serving else ()

    @property
    def speculates(self) -> bool:
        """Is there anything that proposes draft tokens?"""
        return self.spec.speculation == "ngram" or self.spec.drafter_folder is not None

    # -- draft length ------------------------------------------------------------------------------------------------

    async def time_draft_lengths(self, prompts: Sequence[list[int]]) -> int:
        """Measure engine steps at all draft lengths; from then on the length follows what is fastest.

        prompts: token ids of requests such as will come, at least one. Returns the number of pairs of draft length and
        batch size that were measured: 0 without rollout.speculation.adaptive, or when rollouts are too short to measure
        any; the length then stays fixed.
        """
        rollout = self.spec.rollout
        if self.spec.drafter_folder is None or not rollout.speculation.adaptive:
            return 0
        timed = [prompt[-TIMED_PROMPT_TOKENS:] for prompt in prompts]
        room = min(room_for(rollout.draft_tokens), rollout.max_model_len - max(map(len, timed)))
        sampling = {"max_tokens": room, "ignore_eos": True, "stop": None}
        await self._call("cotrain_read_prompts", True)
        await self._speculation("begin_measuring")
        deadline = time.perf_counter() + rollout.speculation.measure_seconds
        rounds: dict[int, list[float]] = {size: [] for size in measured_sizes(rollout.max_num_seqs)}
        while (size := next_size(rounds, deadline - time.perf_counter())) is not None:
            started = time.perf_counter()
            names = [f"timing{size}n{len(rounds[size])}r{i}" for i in range(size)]
            requests = [RolloutRequest(name, 0, timed[i % len(timed)], None) for i, name in enumerate(names)]
            await self._run(names, requests, sampling)
            rounds[size].append(time.perf_counter() - started)
        num_measured: int = await self._speculation("end_measuring")
        await self.set_draft_tokens(None)
        return num_measured

    async def set_draft_tokens(self, draft_tokens: int | None) -> None:
        """Draft length from the next step on, at most rollout.draft_tokens; 0 switches speculation off.

        None gives the choice back: the controller's, or rollout.draft_tokens before `time_draft_lengths` and without
        rollout.speculation.adaptive. At a fixed 0 the drafter does not read prompts either, so that drafts for those
        requests, and for others with the same prefix in the cache, are poor afterwards.
        """
        most = self.spec.rollout.draft_tokens
        if draft_tokens is not None and not 0 <= draft_tokens <= most:
            raise ValueError(f"draft tokens must be 0..{most}, not {draft_tokens}")
        if not self.speculates:
            return
        self._chooses = await self._speculation("fix_draft_tokens", draft_tokens)
        if self.spec.drafter_folder is not None:
            # A request that drafts nothing now may be drafted for later, as its batch drains.
            await self._call("cotrain_read_prompts", self._chooses)

    async def describe_speculation(self) -> str:
        """The draft lengths in use, and why."""
        return await self._speculation("describe") if self.speculates else "off: nothing proposes draft tokens"

    async def _speculation(self, method: str, *args: Any) -> Any:
        """Call a method of the speculation controller, which lives in vLLM's scheduler."""
        from cotrain.rollout.vllm.scheduling import call_controller

        async with death_in_words(self._engine):
            return await call_controller(self._engine, method, *args)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """Generate one response to each request, in the order given.

        Rollouts carry the versions served at the beginning, whatever is sent meanwhile. Calls may overlap with tap off.
        tap: keep and hand over hidden states, of as many rollouts as fit into rollout.features at their greatest length.
        overrides: sampling parameters of this call (greedy checks, bench); the speculation controller learns nothing
        from it then.
        """
        self._batches += 1
        names = [f"b{self._batches}r{i}" for i in range(len(requests))]
        versions = self.versions
        tapped = self._tapped(names, requests, overrides) if tap and self.spec.drafter_folder is not None else {}
        if tapped:
            await self._start_tapping(tapped)
        chosen = self._chooses and not overrides
        if self.speculates:
            await self._speculation("begin", not overrides)
        started = time.perf_counter()
        outputs = await self._run(names, requests, overrides, first_of_each_prompt(tapped))
        seconds = time.perf_counter() - started
        report = await self._speculation("report") if self.speculates else {"gain": {}, "decoded": []}
        self.decoded = {batch: (tokens, elapsed) for batch, tokens, elapsed in report["decoded"]}
        times = [output.metrics for output in outputs]
        self.decode_seconds = max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times)
        rollouts = [self._rollout(request, output, versions) for request, output in zip(requests, outputs, strict=True)]
        sequences = {
            name: (r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids))
            for name, r in zip(names, rollouts, strict=True)
            if name in tapped
        }
        features, stats = await self._take_features(sequences) if sequences else ([], {})
        return RolloutBatch(
            rollouts=rollouts,
            features=features,
            speculation=total_counts(r.speculation for r in rollouts),
            seconds=seconds,
            num_generated_tokens=sum(len(r.token_ids) for r in rollouts),
            feature_stats=stats,
            gain=GainReport(**report["gain"]) if chosen else None,
        )

    async def tap_sequences(self, sequences: list[tuple[list[int], int]]) -> list[FeatureShard]:
        """Hidden states of given tokens, (prompt and response, prompt length) each, computed in a prefill.

        The shards hold the sequences in order, in as many groups as the tap's bounds ask for. Raises ValueError when
        one sequence alone is above them.
        """
        shards: list[FeatureShard] = []
        for group in within_bounds(sequences, self.spec.rollout.features, self._row_bytes):
            self._batches += 1
            named = {f"b{self._batches}r{i}": sequence for i, sequence in enumerate(group)}
            requests = [RolloutRequest(name, 0, ids, None) for name, (ids, _) in named.items()]
            sampling = {"max_tokens": 1}
            await self._start_tapping(
                dict(zip(named, tap_requests(requests, self.spec.rollout, sampling), strict=True))
            )
            await self._run(list(named), requests, sampling, named)
            taken, stats = await self._take_features(named)
            if stats["num_rollouts"] != len(group):
                raise RuntimeError(f"the tap has {stats['num_rollouts']} of {len(group)} sequences within its bounds")
            shards += taken
        return shards

    @property
    def _row_bytes(self) -> int:
        """Bytes that the tap holds of one token."""
        width = (len(self._aux_layers) + 1) * self._engine.model_config.get_hidden_size()
        return row_bytes(width, {"bfloat16": 2, "float32": 4}[self.spec.rollout.dtype])

    def _tapped(
        self, names: list[str], requests: list[RolloutRequest], overrides: dict[str, Any]
    ) -> dict[str, TapRequest]:
        """The requests of a call that are tapped. Others in the next call, and under the next policy."""
        rollout = self.spec.rollout
        known = tap_requests(requests, rollout, overrides)
        call = f"{self.versions.policy}/{self._batches}"
        keys = [f"{call}/{request.prompt_id}/{request.sample_index}" for request in requests]
        return {names[i]: known[i] for i in choose(known, keys, rollout.features, self._row_bytes)}

    async def _start_tapping(self, tapped: dict[str, TapRequest]) -> None:
        await self._call("cotrain_start_tapping", {name: astuple(request) for name, request in tapped.items()})

    async def _run(
        self,
        names: list[str],
        requests: list[RolloutRequest],
        overrides: dict[str, Any],
        computed_whole: Container[str] = (),
    ) -> list[Any]:
        """computed_whole: names of requests that compute their prompt although it may be in the prefix cache."""
        engine, synchronous = self._engine, self.spec.rollout.synchronous_batches
        async with death_in_words(engine):
            if synchronous:
                await engine.pause_generation(mode="keep", clear_cache=False)
            queues = []
            for name, request in zip(names, requests, strict=True):
                prompt = {"prompt_token_ids": request.prompt_token_ids}
                own = {"skip_reading_prefix_cache": True} if name in computed_whole else {}
                queues.append(await engine.add_request(name, prompt, self._sampling(request, overrides | own)))
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
            "max_tokens": request.max_new_tokens or rollout.max_new_tokens,
            "stop": list(rollout.stop) or None,
            "ignore_eos": rollout.ignore_eos,
            "seed": request.seed,
            "logprobs": 0,
        }
        return SamplingParams(**(arguments | overrides), output_kind=RequestOutputKind.FINAL_ONLY)

    def _rollout(self, request: RolloutRequest, output: Any, versions: Versions) -> Rollout:
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
            versions=versions,
            speculation=counts_of_request(completion.spec_decode_metrics),
            verification_steps=verification_steps(completion.spec_decode_metrics),
        )

    async def _take_features(
        self, sequences: dict[str, tuple[list[int], int]]
    ) -> tuple[list[FeatureShard], dict[str, float]]:
        """sequences: name of a tapped request -> (prompt and response, prompt length)."""
        rollout = self.spec.rollout
        path = f"{self.spec.scratch}/features_{self._batches}.safetensors"
        metadata = {
            "policy_version": str(self.versions.policy),
            "temperature": repr(rollout.temperature),
            "top_p": repr(rollout.top_p),
            "top_k": str(rollout.top_k),
            "draft_sample_method": rollout.draft_sample_method,
            "aux_layers": ",".join(map(str, self._aux_layers)),
            "final_norm_applied": "true",
        }
        wanted = [(name, *sequence) for name, sequence in sequences.items()]
        stats = await self._call("cotrain_take_features", wanted, path, metadata)
        if not stats["num_rollouts"]:
            return [], stats
        num_bytes = Path(path).stat().st_size
        shard = FeatureShard(path, stats["num_rollouts"], stats["num_tokens"], num_bytes, self.versions.policy)
        return [shard], stats

    # -- weights -----------------------------------------------------------------------------------------------------

    async def update_policy(self, payload: WeightPayload, policy_version: int) -> SwapReport:
        """Serve new policy weights. Requests in flight are preempted and recomputed under them.

        Raises WeightUpdateRefused with the worker's reason; the old weights stay. Raises RunFailure when they could not
        be served again.
        """
        if policy_version < self.versions.policy:
            raise ValueError(f"policy version {policy_version} is older than the served {self.versions.policy}")
        started = time.perf_counter()
        async with death_in_words(self._engine):
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            try:
                await self._update(payload, Versions(policy_version, self.versions.drafter), draft=False)
            finally:
                await self._engine.resume_generation()
        return SwapReport(time.perf_counter() - started, payload.num_bytes, len(payload.digests))

    async def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights, in mid-generation if need be; caches stay (they never decide a token).

        expected_rates: by draft position, share of verification steps that are expected to accept it and all before
        it, as far as they are known; the speculation controller starts from them. Raises WeightUpdateRefused as
        `update_policy` does.
        """
        if drafter_version < self.versions.drafter:
            raise ValueError(f"drafter version {drafter_version} is older than the served {self.versions.drafter}")
        k = self.spec.rollout.draft_tokens
        if expected_rates is not None and not 1 <= len(expected_rates) <= k:
            raise ValueError(f"{len(expected_rates)} expected rates for {k} draft tokens; give one a position")
        started = time.perf_counter()
        before = self.versions.drafter
        async with death_in_words(self._engine):
            await self._update(payload, Versions(self.versions.policy, drafter_version), draft=True)
        self._drafter_before = before
        await self._speculation("new_drafter", None if expected_rates is None else list(expected_rates))
        return SwapReport(time.perf_counter() - started, payload.num_bytes, len(payload.digests))

    async def check_drafter(self, payload: WeightPayload) -> None:
        """Would `update_drafter` take these weights? Raises WeightUpdateRefused if not; serves what it did."""
        update = {"path": payload.path, "digests": payload.digests, "action": "check"}
        async with death_in_words(self._engine):
            await self._update_session(update, self.versions, draft=True)

    async def undo_drafter_update(self) -> None:
        """Serve the drafter weights and version from before the last `update_drafter`; once after each."""
        versions = Versions(self.versions.policy, self._drafter_before)
        async with death_in_words(self._engine):
            await self._update_session({"action": "undo"}, versions, draft=True)
        await self._speculation("new_drafter")

    async def _update(self, payload: WeightPayload, versions: Versions, draft: bool) -> None:
        update = {
            "path": payload.path,
            "digests": payload.digests,
            "readback_columns": None if draft else POLICY_READBACK_COLUMNS,
            "readback_turn": versions.policy,
        }
        await self._update_session(update, versions, draft)

    async def _update_session(self, update: dict[str, Any], versions: Versions, draft: bool) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.v1.engine.exceptions import EngineDeadError

        engine = self._engine
        await (engine.start_draft_weight_update() if draft else engine.start_weight_update())
        try:
            await engine.update_weights(WeightTransferUpdateRequest(update_info=update))
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM sends a worker's exception as text in a bare Exception
            if WEIGHTS_UNKNOWN in str(error):
                raise RunFailure(f"a weight update failed, and {error}") from error
            raise WeightUpdateRefused(str(error)) from error
        await engine.finish_weight_update(str(versions))
        self.versions = versions

    async def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Checksums of the named tensors as the worker serves them, read back whole."""
        return await self._call("cotrain_served_digests", names, draft)

    async def weight_version(self) -> str:
        """The version string vLLM puts on outputs: p<policy>-d<drafter>."""
        return await self._engine.get_weight_version()

    async def set_draft_sample_method(self, method: str) -> None:
        """Greedy or probabilistic drafting from the next step on."""
        await self._call("cotrain_set_draft_sample_method", method)

    async def time_phases(self) -> None:
        """Time the phases of every step from now on (see vllm_hooks.time_phases)."""
        await self._call("cotrain_time_phases")

    async def take_step_times(self) -> list[dict[str, float]]:
        """One row a step since the last call; empty before `time_phases`."""
        return await self._call("cotrain_take_step_times")

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        async with death_in_words(self._engine):
            await self._engine.reset_prefix_cache()

    async def clear_drafter_cache(self) -> None:
        """Forget cached prefixes and the drafter's keys and values: after one that may have computed NaN.

        Between two calls of generate.
        """
        await self.reset_prefix_cache()
        await self._call("cotrain_clear_drafter_cache")

    async def _call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker."""
        async with death_in_words(self._engine):
            (result,) = await self._engine.collective_rpc(method, args=args)
        return result

    async def shutdown(self) -> None:
        """Stop vLLM and all its processes."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


@functools.cache
def _check_environment() -> None:
    """Once a process, before vLLM sets variables of its own. Raises ValueError naming the first that is not allowed."""
    for name, reason in environment_problems(os.environ):
        raise ValueError(f"environment variable {name}: {reason}")


async def _final_output(queue: Any) -> Any:
    while True:
        output = queue.get_nowait() or await queue.get()
        if output.finished:
            return output
        await asyncio.sleep(0)
