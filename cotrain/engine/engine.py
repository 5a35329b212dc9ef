"""One rollout engine: vLLM's asynchronous engine with speculation, feature tap and weight updates.

A plain asynchronous class; `actors/engines.py` makes it a Ray actor. Its process environment comes from
`threads.engine_environment` and must be set before vLLM is imported, which is why vLLM is imported in `start`.
"""

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cotrain.acceptance_stats import counts_of_steps, drafter_starts, total_counts
from cotrain.config.lossless_guard import environment_problems
from cotrain.engine.arguments import EngineSpec, engine_arguments
from cotrain.engine.engine_death import death_in_words
from cotrain.engine.speculation.draft_length import SpeculationController
from cotrain.engine.speculation.measurement import MEASURE_ROUNDS, MEASURE_TRIES, measured_sizes, room_for
from cotrain.engine.tap_admission import TapRequest, choose, first_of_each_prompt, reserved_bytes, row_bytes
from cotrain.engine.worker import EngineWorker
from cotrain.process.failures import RunFailure
from cotrain.records import (
    GainReport,
    Rollout,
    RolloutBatch,
    RolloutRequest,
    Segment,
    StepTotal,
    SwapReport,
    Versions,
    WeightPayload,
    Window,
)
from cotrain.weights.payload import WEIGHTS_UNKNOWN, WeightUpdateRefused
from drafters.base import SamplingParams

T = TypeVar("T")
P = ParamSpec("P")

TIMED_PROMPT_TOKENS = 32
"""Last tokens of each prompt that timed requests begin with. Prefilling more would take most of the time."""

PARTIAL = ".partial"
"""Ending of a shard's name until the worker has answered. If the engine dies before, nobody else knows of the shard."""


class RolloutEngine:
    """Generates rollouts and takes weight updates. Calls may overlap: each has its own requests, tap and counts."""

    def __init__(self, spec: EngineSpec):
        self.spec = spec
        self.versions = spec.versions
        self.decode_seconds = 0.0
        """Seconds of the last `generate` from when every request had its first token to the last token of all."""
        self._engine: Any = None
        self._chooses = False  # is the draft length chosen by the engine's speculation controller?
        self._batches = self._tapped_bytes = 0
        self._salt: dict[str, str] = {}  # keeps requests from reusing cached prefixes of an older policy version
        self._pausing = asyncio.Lock()  # vLLM does not count pauses: a second pause would end with the first resume
        self._hold, self._held_since = AsyncExitStack(), 0.0  # the pause for the policy's weights, and when it began
        self._before = spec.versions  # the versions before the last update of the drafter

    async def start(self) -> None:
        """Load the model. Until `time_draft_lengths`, every step drafts rollout.num_speculative_tokens.

        Raises ValueError that names an environment variable which may change what is generated with speculation.
        """
        Path(self.spec.scratch).mkdir(parents=True, exist_ok=True)
        for left_by_a_dead_engine in Path(self.spec.scratch).glob(f"*{PARTIAL}"):
            left_by_a_dead_engine.unlink()
        if self.spec.speculates:
            _check_environment()

        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(self.spec)))
        history, has_drafter = self.spec.rollout.history, self.spec.drafter_folder is not None
        draws = self.spec.rollout.draft_sample_method == "probabilistic"
        index = None if history is None else (history.max_bytes, draws)
        await self.on_workers(EngineWorker.start, self.spec.scratch, has_drafter, index)
        if history is not None:  # requests that draft from history leave gaps in what the drafter has read
            await self.on_workers(EngineWorker.read_prompts, True)
        await self._stamp(self.versions)

    # -- draft length ------------------------------------------------------------------------------------------------

    async def time_draft_lengths(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Measure engine steps at all draft lengths; from then on the engine uses the draft length that is fastest.

        prompts: token ids of typical requests, at least one. Returns a row for each draft length and batch size that was
        measured, see SpeculationController.end_measuring. There are no rows, and the draft length stays fixed, when the engine
        does not choose it (EngineSpec.chooses_length) or when rollouts are too short to measure any.
        """
        rollout = self.spec.rollout
        if not self.spec.chooses_length:
            return []
        timed = [prompt[-TIMED_PROMPT_TOKENS:] for prompt in prompts]
        room = min(room_for(rollout.num_speculative_tokens), rollout.max_model_len - max(map(len, timed)))
        sampling = {"max_tokens": room, "ignore_eos": True, "stop": None}
        await self.on_workers(EngineWorker.read_prompts, True)
        proposers = ["drafter"] if self.spec.drafter_folder is not None else []
        proposers += ["history"] if rollout.history is not None else []
        tables: list[list[list[float]]] = []
        for proposer in proposers:
            await self.in_scheduler(SpeculationController.begin_measuring, proposer)
            for _ in range(MEASURE_TRIES):
                await self._time_batches(timed, sampling, rollout.speculation.measure_seconds / len(proposers))
                if not await self.in_scheduler(SpeculationController.contradicts):
                    break
            tables.append(await self.in_scheduler(SpeculationController.end_measuring))
        await self.set_num_speculative_tokens(None)
        return tables[0]

    async def _time_batches(self, prompts: list[list[int]], sampling: dict[str, Any], seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        for size in MEASURE_ROUNDS * measured_sizes(self.spec.rollout.max_num_seqs):
            if time.perf_counter() > deadline:
                break
            names = [f"timing{i}" for i in range(size)]
            batch = {name: RolloutRequest(name, 0, prompts[i % len(prompts)], None) for i, name in enumerate(names)}
            await self._run(batch, sampling)

    async def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        """Set the draft length from the next step on, at most rollout.num_speculative_tokens; 0 switches speculation off.

        None lets the controller choose again; without rollout.speculation.adaptive, and before `time_draft_lengths`, it restores
        rollout.num_speculative_tokens. At a fixed 0 the drafter does not read prompts either, so later drafts are poor for
        those requests and for others that share their cached prefix. Raises ValueError for a length out of range.
        """
        most = self.spec.rollout.num_speculative_tokens
        if num_speculative_tokens is not None and not 0 <= num_speculative_tokens <= most:
            raise ValueError(f"draft tokens must be 0..{most}, not {num_speculative_tokens}")
        if not self.spec.speculates:
            return
        fix = SpeculationController.fix_num_speculative_tokens
        self._chooses = await self.in_scheduler(fix, num_speculative_tokens)
        # A request for which the drafter proposes nothing now may be drafted for later.
        has_history = self.spec.rollout.history is not None
        await self.on_workers(EngineWorker.read_prompts, self._chooses or (has_history and num_speculative_tokens != 0))

    async def describe_speculation(self) -> str:
        """The draft lengths in use, and why."""
        if not self.spec.speculates:
            return "off: nothing proposes draft tokens"
        return await self.in_scheduler(SpeculationController.describe)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: list[RolloutRequest], tap: bool = True, **overrides: Any) -> RolloutBatch:
        """Generate one response to each request, in the order given.

        Rollouts carry the versions that generated their tokens, which may change while they run.
        tap: record and return hidden states of as many rollouts as fit into rollout.features.max_bytes at their greatest length.
        overrides: sampling parameters of this call (greedy checks, bench). The speculation controller learns nothing until such
        a call ends, so only calls with overrides may overlap it. The history index learns from it all the same.
        """
        named = self._named(requests)
        tapped: dict[str, TapRequest] = {}
        if tap and self.spec.drafter_folder is not None:
            known = {
                name: TapRequest(r.prompt_id, len(r.prompt_token_ids), self._max_tokens(r, overrides))
                for name, r in named.items()
            }
            tapped = await self._tap(known)
        if overrides:
            await self.in_scheduler(SpeculationController.begin, False)
        started = time.perf_counter()
        try:
            outputs = await self._run(named, overrides, first_of_each_prompt(tapped), learns=True)
        finally:
            seconds = time.perf_counter() - started
            if overrides:
                await self.in_scheduler(SpeculationController.begin)
        times = [output.metrics for output in outputs]
        self.decode_seconds = max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times)
        rollouts = [self._rollout(request, output) for request, output in zip(requests, outputs, strict=True)]
        of_request = dict(zip(named, rollouts, strict=True))
        features, stats = await self._take_features(tapped, {name: of_request[name] for name in tapped})
        return RolloutBatch(
            rollouts=rollouts,
            features=features,
            speculation=total_counts(r.speculation for r in rollouts),
            seconds=seconds,
            num_generated_tokens=sum(len(r.token_ids) for r in rollouts),
            feature_stats=stats,
        )

    async def take_window(self) -> Window:
        """Return what the speculation controller has seen since the last call."""
        report = await self.in_scheduler(SpeculationController.report)
        gain = GainReport(**report["gain"]) if self._chooses else None
        return Window(gain, [StepTotal(*row) for row in report["steps"]])

    async def tap_sequences(self, sequences: list[tuple[list[int], int]]) -> list[str]:
        """Compute the hidden states of given sequences in a prefill. Returns the paths of the shards that hold them, in order.

        sequences: (token ids of prompt and response, prompt length) each. They are run in groups that would fit into the tap
        if all were as long as the longest. Raises ValueError when the longest does not fit by itself.
        """
        longest = max(len(ids) for ids, _ in sequences)
        alike = {str(i): TapRequest(str(i), longest, 0) for i in range(len(sequences))}
        size = len(choose(alike, "", self.spec.rollout.features.max_bytes, self._row_bytes))
        shards: list[str] = []
        for start in range(0, len(sequences), size):
            group = sequences[start : start + size]
            named = self._named([RolloutRequest(str(start + i), 0, ids, None) for i, (ids, _) in enumerate(group)])
            tapped = await self._tap({n: TapRequest(n, len(r.prompt_token_ids), 0) for n, r in named.items()})
            await self._run(named, {"max_tokens": 1}, named)
            given = {}
            for name, (ids, length) in zip(named, group, strict=True):
                given[name] = Rollout(name, 0, ids[:length], ids[length:], [], "", "length", self.versions, None)
            shards += (await self._take_features(tapped, given))[0]
        return shards

    def _named(self, requests: Sequence[RolloutRequest]) -> dict[str, RolloutRequest]:
        """Return the requests of the next call under names that no other call has."""
        self._batches += 1
        return {f"b{self._batches}r{i}": request for i, request in enumerate(requests)}

    @property
    def _row_bytes(self) -> int:
        """Bytes that the tap holds for one token."""
        num_layers = len(self.spec.serving.aux_layers) + 1 if self.spec.serving else 1
        bytes_per_value = {"bfloat16": 2, "float32": 4}[self.spec.rollout.dtype]
        return row_bytes(num_layers * self._engine.model_config.get_hidden_size(), bytes_per_value)

    def _max_tokens(self, request: RolloutRequest, overrides: dict[str, Any]) -> int:
        return overrides.get("max_tokens") or request.max_new_tokens or self.spec.rollout.max_new_tokens

    async def _run(
        self,
        requests: dict[str, RolloutRequest],
        overrides: dict[str, Any],
        computed_whole: Container[str] = (),
        learns: bool = False,
    ) -> list[Any]:
        """Run requests to their end. computed_whole: names of those that compute their prompt even if it is in the prefix cache.
        learns: each response is added to the history as soon as it ends, if the engine drafts from history."""
        engine, queues = self._engine, []

        async def finished(name: str, queue: Any) -> Any:
            output = await queue.get()
            if learns:
                await self.add_history([self._rollout(requests[name], output)])
            return output

        async with death_in_words(engine):
            async with self._paused(False) if self.spec.rollout.synchronous_batches else nullcontext():
                for name, request in requests.items():
                    prompt = {"prompt_token_ids": request.prompt_token_ids} | self._salt
                    own = {"skip_reading_prefix_cache": True} if name in computed_whole else {}
                    queues.append(await engine.add_request(name, prompt, self._sampling(request, overrides | own)))
            return await asyncio.gather(*(finished(name, queue) for name, queue in zip(requests, queues, strict=True)))

    @asynccontextmanager
    async def _paused(self, clear_cache: bool) -> AsyncIterator[None]:
        """Keep the engine from making steps in the body. Requests in flight stay; clear_cache: they are computed again."""
        async with self._pausing:
            await self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                await self._engine.resume_generation()

    def _sampling(self, request: RolloutRequest, overrides: dict[str, Any]) -> Any:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        rollout = self.spec.rollout
        arguments = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k or -1,
            "max_tokens": self._max_tokens(request, overrides),
            "stop": list(rollout.stop) or None,
            "ignore_eos": rollout.ignore_eos,
            "skip_special_tokens": rollout.skip_special_tokens,
            "spaces_between_special_tokens": False,
            "seed": request.seed,
            "logprobs": 0,
        }
        return vllm.SamplingParams(**(arguments | overrides), output_kind=RequestOutputKind.FINAL_ONLY)

    def _rollout(self, request: RolloutRequest, output: Any) -> Rollout:
        completion = output.outputs[0]
        *earlier, last = (Segment(Versions.parse(s.version), s.start, s.end) for s in completion.weight_versions)
        token_ids, drafting = list(completion.token_ids), completion.spec_decode_metrics
        drafted = drafting.per_step_drafted if drafting else []  # negative where history has proposed
        steps = tuple(zip(map(abs, drafted), drafting.per_step_accepted, strict=True)) if drafting else ()
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            log_probs=[step[token].logprob for step, token in zip(completion.logprobs, token_ids, strict=True)],
            text=completion.text,
            finish_reason=completion.finish_reason,
            versions=last.versions,
            speculation=counts_of_steps(steps, drafting.num_spec_tokens) if drafting else None,
            verification_steps=steps,
            earlier=tuple(earlier),
            from_history=() if self.spec.rollout.history is None else tuple(number < 0 for number in drafted),
        )

    async def _tap(self, requests: dict[str, TapRequest]) -> dict[str, TapRequest]:
        """Start to tap those of these requests that fit beside the tapped ones that run, and reserve their room."""
        bound, key = self.spec.rollout.features.max_bytes, f"{self.versions.policy}/{self._batches}"
        tapped = choose(requests, key, bound, self._row_bytes, self._tapped_bytes)
        self._tapped_bytes += reserved_bytes(tapped, self._row_bytes)
        if tapped:
            await self.on_workers(EngineWorker.start_tapping, tapped)
        return tapped

    async def _take_features(
        self, tapped: dict[str, TapRequest], rollouts: dict[str, Rollout]
    ) -> tuple[list[str], dict[str, float]]:
        """Write the features of finished rollouts and free their room. Returns the files written (none or one) and statistics."""
        if not tapped:
            return [], {}
        sequences = {}
        for name, r in rollouts.items():
            drafted = None if self.spec.rollout.history is None else drafter_starts(r, recomputes=not self._salt)
            last = r.versions.policy, r.segments[-1].start, r.versions.drafter, drafted
            sequences[name] = (r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids), *last)
        rollout, serving = self.spec.rollout, self.spec.serving
        sampling = {field.name: getattr(rollout, field.name) for field in fields(SamplingParams)}
        shared = sampling, list(serving.aux_layers) if serving else []
        # The process id keeps an engine that is started again from overwriting the files of the one before.
        path = f"{self.spec.scratch}/features_{os.getpid()}_{next(iter(tapped))}.safetensors"
        stats = await self.on_workers(EngineWorker.take_features, sequences, f"{path}{PARTIAL}", *shared)
        self._tapped_bytes -= reserved_bytes(tapped, self._row_bytes)
        if stats["num_rollouts"]:
            os.replace(f"{path}{PARTIAL}", path)
        return ([path] if stats["num_rollouts"] else []), stats

    # -- weights -----------------------------------------------------------------------------------------------------

    async def hold(self, keep_kv: bool) -> None:
        """Make no step until the next `update_policy`. The learner sends the weights meanwhile. keep_kv: see there."""
        self._held_since = time.perf_counter()
        async with death_in_words(self._engine):
            await self._hold.enter_async_context(self._paused(not keep_kv))

    async def update_policy(
        self, payload: WeightPayload, policy_version: int, keep_kv: bool = False, sent: bool = False
    ) -> SwapReport:
        """Serve new policy weights. Requests in flight are preempted and computed again with the new weights.

        keep_kv: requests in flight continue on the KV cache of the previous policy instead. sent: the learner has sent the weights
        since `hold`, and what is served is only compared with those of the payload. Raises WeightUpdateRefused with the worker's
        reason, and the old weights stay. Raises RunFailure when it is not known which weights are served.
        """
        if policy_version < self.versions.policy:
            raise ValueError(f"policy version {policy_version} is older than the served {self.versions.policy}")
        if not sent:
            await self.hold(keep_kv)
        async with death_in_words(self._engine), self._hold.pop_all():
            call = self.on_workers(EngineWorker.update_policy, payload.path, payload.digests, policy_version, sent)
            await self._weights(call)
            # Still paused, so that the first token after the pause carries the new version.
            await self._stamp(Versions(policy_version, self.versions.drafter))
            self._salt = {"cache_salt": str(policy_version)} if keep_kv else {}
        return SwapReport(time.perf_counter() - self._held_since, payload.num_bytes)

    async def update_drafter(
        self, payload: WeightPayload, drafter_version: int, expected_rates: Sequence[float] | None = None
    ) -> SwapReport:
        """Serve new drafter weights, mid-generation if need be. Caches stay, because they never decide a token.

        expected_rates: by draft position, as far as known, the share of verification steps that are expected to accept it and all
        before it; the speculation controller starts from them. Raises WeightUpdateRefused and RunFailure like `update_policy`.
        """
        if drafter_version < self.versions.drafter:
            raise ValueError(f"drafter version {drafter_version} is older than the served {self.versions.drafter}")
        started = time.perf_counter()
        rates = None if expected_rates is None else list(expected_rates)
        await self._weights(self.on_workers(EngineWorker.update_drafter, payload.path, payload.digests, rates))
        self._before = self.versions
        await self._stamp(Versions(self.versions.policy, drafter_version))
        await self.in_scheduler(SpeculationController.new_drafter, rates)
        return SwapReport(time.perf_counter() - started, payload.num_bytes)

    async def check_drafter(self, payload: WeightPayload) -> None:
        """Raise WeightUpdateRefused if `update_drafter` would refuse these weights. What is served does not change."""
        await self._weights(self.on_workers(EngineWorker.check_drafter, payload.path, payload.digests))

    async def undo_drafter_update(self) -> None:
        """Return to the drafter weights and version from before the last `update_drafter`. Call it once at most per update."""
        await self._weights(self.on_workers(EngineWorker.undo_drafter_update))
        await self._stamp(Versions(self.versions.policy, self._before.drafter))
        await self.in_scheduler(SpeculationController.new_drafter, None)

    async def _stamp(self, versions: Versions) -> None:
        """Stamp tokens, and rows of the tap, with these versions from now on."""
        await self.on_workers(EngineWorker.set_policy_version, versions.policy)
        async with death_in_words(self._engine):
            await self._engine.update_weight_version(str(versions))
        self.versions = versions

    async def _weights(self, call: Coroutine[Any, Any, None]) -> None:
        """Wait for a call of the workers that checks or changes weights."""
        try:
            await call
        except RunFailure:
            raise
        except Exception as error:  # only the text of a worker's exception arrives here
            if WEIGHTS_UNKNOWN in str(error):
                raise RunFailure(f"a weight update failed, and {error}") from error
            raise WeightUpdateRefused(str(error)) from error

    async def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Return checksums of the named tensors, read back whole; empty for a tensor that is not served as it was sent."""
        return await self.on_workers(EngineWorker.served_digests, names, draft)

    # -- history, switches and caches --------------------------------------------------------------------------------

    async def add_history(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished rollouts, of this engine or of others, to the history that this engine drafts from, if it has one."""
        if self.spec.rollout.history is not None:
            rows = [(r.prompt_token_ids, r.token_ids) for r in rollouts]
            await self.on_workers(EngineWorker.add_history, rows)

    async def set_draft_sample_method(self, method: str) -> None:
        """Draft with this method, greedy or probabilistic, from the next step on."""
        await self.on_workers(EngineWorker.set_draft_sample_method, method)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""
        async with death_in_words(self._engine):
            await self._engine.reset_prefix_cache()

    async def clear_drafter_cache(self) -> None:
        """Forget cached prefixes and the drafter's keys and values, after a drafter that may have computed NaN.

        Requests in flight are preempted and computed again.
        """
        async with death_in_words(self._engine), self._paused(True):
            await self.on_workers(EngineWorker.clear_drafter_cache)

    # -- calls into vLLM's processes, the only places where a method becomes a name -----------------------------------

    async def on_workers(
        self, method: Callable[Concatenate[EngineWorker, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method of EngineWorker on all ranks. Returns the result of rank 0; raises RuntimeError if one failed."""
        async with death_in_words(self._engine):
            answers = await self._engine.collective_rpc("cotrain_call", args=(method.__name__, args, options))
        if errors := dict.fromkeys(error for _, error in answers if error is not None):
            raise RuntimeError("; ".join(errors))
        return answers[0][0]

    async def in_scheduler(
        self, method: Callable[Concatenate[SpeculationController, P], T], *args: P.args, **options: P.kwargs
    ) -> T:
        """Call a method of the scheduler's SpeculationController. vLLM can send only plain lists, dictionaries and numbers back."""
        async with death_in_words(self._engine):
            call = "cotrain_speculation", method.__name__, list(args), options
            return await self._engine.engine_core.call_utility_async(*call)

    async def shutdown(self) -> None:
        """Stop vLLM and all its processes."""
        if self._engine is not None:
            # By default vLLM kills its engine core after 5 s, and the core has always used all of them.
            self._engine.shutdown(timeout=1.0)
            self._engine = None


def import_vllm() -> None:
    """Import vLLM, which takes seconds, and on a CPU let its engine cores be forked."""
    import vllm.v1.engine.async_llm  # noqa: F401
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from cotrain.engine.cpu import fork_engine_core

        fork_engine_core()


@functools.cache
def _check_environment() -> None:
    """Raise ValueError naming the first variable that is not allowed. Runs once a process, before vLLM sets its own."""
    for name, reason in environment_problems(os.environ):
        raise ValueError(f"environment variable {name}: {reason}")
