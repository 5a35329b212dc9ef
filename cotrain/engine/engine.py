"""One rollout engine: vLLM's asynchronous engine with speculation, feature tap and weight updates.

`processes.py` has the start, the updates of weights and the calls into vLLM.
"""

import asyncio
import os
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import fields
from functools import cached_property
from itertools import starmap
from typing import Any

from cotrain.acceptance_stats import counts_of
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.processes import PARTIAL, VllmEngine, death_in_words
from cotrain.engine.speculation.draft_length import DraftLengths
from cotrain.engine.tap_admission import Admission, TapRequest, first_of_each_prompt, row_bytes
from cotrain.engine.worker import EngineWorker
from cotrain.records import GainReport, Rollout, RolloutBatch, RolloutRequest, Segment, StepTotal, Versions, Window
from drafters.base import SamplingParams


class RolloutEngine(VllmEngine):
    """Generates rollouts and takes weight updates. Calls may overlap: each has its own requests, tap and counts."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.decode_seconds = 0.0
        """Seconds of the last `generate` from when every request had its first token to the last token of all."""
        self._chooses = False  # does DraftLengths choose the draft length?
        self._batches = 0
        self._entering: dict[int, dict[str, RolloutRequest]] = {}
        """Requests of calls that wait for those of other calls, by place; see `generate`. `_entered` is what they wait for."""
        self._entered: asyncio.Future[asyncio.Task[tuple[dict[str, TapRequest], dict[str, Any]]]] | None = None

    async def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        """Set the draft length from the next step on, at most rollout.num_speculative_tokens; 0 switches speculation off.

        None lets the engine choose from then on, by what it learns from its own steps; without rollout.speculation.adaptive it
        restores rollout.num_speculative_tokens. At a fixed 0 the drafter does not read prompts either, so later drafts are poor for
        those requests and for others that share their cached prefix. Raises ValueError for a length out of range.
        """
        most = self.spec.rollout.num_speculative_tokens
        if num_speculative_tokens is not None and not 0 <= num_speculative_tokens <= most:
            raise ValueError(f"draft tokens must be 0..{most}, not {num_speculative_tokens}")
        if not self.spec.speculates:
            return
        self._chooses = num_speculative_tokens is None and self.spec.rollout.speculation.adaptive
        if self._chooses:
            await self.in_scheduler(DraftLengths.adapt, self.spec.rollout.history is not None)
        else:
            fixed = most if num_speculative_tokens is None else num_speculative_tokens
            await self.in_scheduler(DraftLengths.fix_num_speculative_tokens, fixed)
        # A request for which the drafter proposes nothing now may be drafted for later.
        await self.on_workers(EngineWorker.read_prompts, self._chooses)

    async def describe_speculation(self) -> str:
        """The draft lengths in use, and why."""
        if not self.spec.speculates:
            return "off: nothing proposes draft tokens"
        return await self.in_scheduler(DraftLengths.describe)

    async def generate(
        self, requests: list[RolloutRequest], tap: float = 1.0, together: tuple[int, int] = (0, 1), **overrides: Any
    ) -> RolloutBatch:
        """Generate one response to each request, in the order given.

        together: place of this call among that many. Their requests enter the engine at once, in the order of the places, as
        if they were of one call; each call returns when its own requests have ended.

        Rollouts carry the versions that generated their tokens, which may change while they run.
        tap: share of the rollouts whose hidden states are recorded and returned, as far as rollout.features.max_bytes has room.
        overrides: sampling parameters of this call (greedy checks, bench). Nothing about acceptance is learnt until such a call
        ends, so only calls with overrides may overlap it. The history index learns from it all the same.
        """
        if overrides:
            await self.in_scheduler(DraftLengths.begin, False)
        self._batches += 1
        started, named = time.perf_counter(), {f"b{self._batches}r{i}": request for i, request in enumerate(requests)}
        try:
            tapped, queues = await self._enter(named, tap, together, overrides)
            rollouts, times = await self._ended(named, queues)
        finally:
            seconds = time.perf_counter() - started
            if overrides:
                await self.in_scheduler(DraftLengths.begin)
        self.decode_seconds = max(t.last_token_ts for t in times) - max(t.first_token_ts for t in times)
        return await self._batch(rollouts, tapped, seconds)

    async def _batch(
        self, rollouts: dict[str, Rollout], tapped: Collection[str], seconds: float, **others: Any
    ) -> RolloutBatch:
        """Return rollouts that have ended, with the features of those tapped. others: further fields of the batch."""
        features, stats = await self._take_features({name: r for name, r in rollouts.items() if name in tapped})
        self._admission.observe({name: len(rollout.token_ids) for name, rollout in rollouts.items()})
        return RolloutBatch(
            rollouts=list(rollouts.values()),
            features=features,
            seconds=seconds,
            num_generated_tokens=sum(rollout.num_generated for rollout in rollouts.values()),
            feature_stats=stats,
            speculation=counts_of(rollouts.values()),
            **others,
        )

    async def _enter(
        self, named: dict[str, RolloutRequest], tap: float, together: tuple[int, int], overrides: dict[str, Any]
    ) -> tuple[dict[str, TapRequest], dict[str, Any]]:
        """Let requests enter, with those of the other calls. Returns what `_begin` does, of all of them."""
        place, number = together
        self._entering[place] = named
        entered = self._entered = self._entered or asyncio.get_running_loop().create_future()
        if len(self._entering) == number:
            calls, self._entering, self._entered = self._entering, {}, None
            together_named = {name: request for i in range(number) for name, request in calls[i].items()}
            entered.set_result(asyncio.create_task(self._begin(together_named, tap, overrides)))
        return await (await entered)  # each of the calls raises what `_begin` does

    async def _begin(
        self, named: dict[str, RolloutRequest], tap: float, overrides: dict[str, Any]
    ) -> tuple[dict[str, TapRequest], dict[str, Any]]:
        """Choose which requests are tapped, and let all enter. Returns the tapped ones, and the queue of each one's output."""
        tapped = await self._start_tapping(named, tap, overrides)
        engine, queues, computed_whole = self._engine, dict[str, Any](), first_of_each_prompt(tapped)
        paused = self._paused(False) if self.spec.rollout.synchronous_batches else nullcontext()
        async with death_in_words(engine), paused:
            for name, request in named.items():
                own = {"skip_reading_prefix_cache": True} if name in computed_whole else {}
                sampling = self._sampling(request, overrides | own)
                queues[name] = await engine.add_request(name, {"prompt_token_ids": request.prompt_token_ids}, sampling)
        return tapped, queues

    async def _start_tapping(
        self, named: dict[str, RolloutRequest], tap: float, overrides: dict[str, Any]
    ) -> dict[str, TapRequest]:
        """Choose which requests are tapped, and tap them from now on."""
        tapped: dict[str, TapRequest] = {}
        if tap and self.spec.drafter_folder is not None:
            known = {
                name: TapRequest(r.prompt_id, len(r.prompt_token_ids), self._max_tokens(r, overrides))
                for name, r in named.items()
            }
            tapped = self._admission.choose(known, tap)
        if tapped:
            await self.on_workers(EngineWorker.start_tapping, tapped, self.spec.rollout.features.max_bytes)
        return tapped

    async def take_window(self) -> Window:
        """Return what the engine steps since the last call did, and what speculation gained."""
        report = await self.in_scheduler(DraftLengths.report)
        gain = GainReport(**report["gain"]) if self._chooses else None
        return Window(gain, [StepTotal(*row) for row in report["steps"]])

    @cached_property
    def _admission(self) -> Admission:
        num_layers, config = len(self._aux_layers) + 1, self._engine.model_config
        row_size = row_bytes(num_layers * config.get_hidden_size(), config.dtype.itemsize)
        return Admission(self.spec.rollout.features.max_bytes, row_size, str(self.spec.seed))

    @property
    def _aux_layers(self) -> list[int]:
        return list(self.spec.serving.aux_layers) if self.spec.serving else []

    def _max_tokens(self, request: RolloutRequest, overrides: dict[str, Any]) -> int:
        return overrides.get("max_tokens") or request.max_new_tokens or self.spec.rollout.max_new_tokens

    async def _ended(
        self, requests: dict[str, RolloutRequest], queues: dict[str, Any]
    ) -> tuple[dict[str, Rollout], list[Any]]:
        """Wait for rollouts, each of which is added to the history as it ends. Returns them, and vLLM's times of each."""

        async def ended(name: str, request: RolloutRequest) -> tuple[Rollout, Any]:
            output = await queues[name].get()
            rollout = self._rollout(request, output)
            await self.add_history([rollout])
            return rollout, output.metrics

        async with death_in_words(self._engine):
            rollouts, times = zip(*await asyncio.gather(*starmap(ended, requests.items())), strict=True)
        return dict(zip(requests, rollouts, strict=True)), list(times)

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
        steps = tuple(zip(drafting.per_step_drafted, drafting.per_step_accepted, strict=True)) if drafting else ()
        return Rollout(
            prompt_id=request.prompt_id,
            sample_index=request.sample_index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            log_probs=[step[token].logprob for step, token in zip(completion.logprobs, token_ids, strict=True)],
            text=completion.text,
            finish_reason=completion.finish_reason,
            versions=last.versions,
            verification_steps=steps,
            earlier=tuple(earlier),
        )

    async def _take_features(self, rollouts: dict[str, Rollout]) -> tuple[list[str], dict[str, float]]:
        """Write and free the features of tapped rollouts that have ended. Returns files (none or one) and statistics."""
        if not rollouts:
            return [], {}
        sequences = {}
        for name, r in rollouts.items():
            first, last = len(r.prompt_token_ids), (r.versions.policy, r.segments[-1].start, r.versions.drafter)
            turns = [(first + turn.start, first + turn.end) for turn in r.parts]
            sequences[name] = (r.prompt_token_ids + r.token_ids, r.log_probs, first, *last, turns)
        sampling = {field.name: getattr(self.spec.rollout, field.name) for field in fields(SamplingParams)}
        # The process id keeps an engine that is started again from overwriting the files of the one before.
        path = f"{self.spec.scratch}/features_{os.getpid()}_{next(iter(rollouts))}.safetensors"
        await self.on_workers(EngineWorker.begin_features, sequences, f"{path}{PARTIAL}", sampling, self._aux_layers)
        while (stats := await self.on_workers(EngineWorker.features_written, f"{path}{PARTIAL}")) is None:
            await asyncio.sleep(0.01)
        if stats["num_rollouts"]:
            os.replace(f"{path}{PARTIAL}", path)
        return ([path] if stats["num_rollouts"] else []), stats

    async def add_history(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished rollouts to the history that this engine drafts from, if it has one."""
        if self.spec.rollout.history is not None:
            rows = [(r.prompt_token_ids, r.token_ids) for r in rollouts]
            await self.on_workers(EngineWorker.add_history, rows)

    async def learn_from(self, batch: RolloutBatch) -> None:
        """Add the rollouts of another engine's call to the history that this engine drafts from."""
        await self.add_history(batch.rollouts)

    async def set_draft_sample_method(self, method: str) -> None:
        """Draft with this method, greedy or probabilistic, from the next step on."""
        await self.on_workers(EngineWorker.set_draft_sample_method, method)
