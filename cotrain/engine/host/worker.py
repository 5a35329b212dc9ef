"""The sidecar in a worker of a host's engine: it writes out features of requests, swaps drafters in, and reports on both.

It shares the tap, the weight swap and the corrections for the CPU build with cotrain's own engines.
"""

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn
from vllm import __version__
from vllm.config import set_current_vllm_config

from cotrain.engine import cpu
from cotrain.engine.hooks import DraftingHook, sample_plainly_without_drafts
from cotrain.engine.host.breaker import Breaker
from cotrain.engine.host.policy_watch import PolicyWatch
from cotrain.engine.host.scheduling import REPORT_SECONDS, Stamp
from cotrain.engine.interface import wrap
from cotrain.engine.model_runner_v2 import SpeculatorHook
from cotrain.engine.served import ServedWeights, of_all_ranks
from cotrain.records import GainReport, Segment, Versions
from cotrain.transport.features import FeatureRecord, write_records
from cotrain.transport.spool import Description, EngineFolder, Finished, Settings, State, write_json
from cotrain.weights.payload import WeightUpdateRefused
from drafters.base import SamplingParams

SHARD_ROLLOUTS = 32  # rollouts of a shard; fewer suffice after REPORT_SECONDS, or when the engine is idle
MEETING_STEPS = 64  # ranks of a busy engine agree each so many steps, and pass nothing to each other in the others


class Shards:
    """Features of finished requests, on their way to the trainer. All of it is done by a thread, beside the engine's steps."""

    def __init__(self, engine: EngineFolder, max_bytes: int):
        self.engine, self._max_bytes, self._written, self._gains = engine, max_bytes, 0.0, list[GainReport]()
        self._waiting: list[tuple[FeatureRecord, Finished]] = []
        self.dropped, self.seconds = Counter[str](), 0.0  # requests that are not passed on, by reason; time of writing

    def add(self, taken: Future[FeatureRecord | None], finished: Finished, is_usable: bool) -> None:
        """Add what the tap's thread takes of a request. is_usable: does the trainer have the policy's head?"""
        record = taken.result()
        if record is None or not is_usable or not record.is_trainable:
            self.dropped["no features"] += 1
        else:
            self._waiting.append((record, finished))

    def write(self, gain: GainReport | None, at_once: bool) -> None:
        """Write what waits if there is enough of it, or it has waited for long. gain: see Stamp."""
        if gain is not None:
            self._gains = [*self._gains[-60:], gain]  # there may be no trainer that reads them
        num, started = len(self._waiting), time.perf_counter()
        if num < SHARD_ROLLOUTS and not (num and (at_once or started - self._written > REPORT_SECONDS)):
            return
        records, finished = map(list, zip(*self._waiting, strict=True))
        size, write = sum(r.num_bytes for r in records), functools.partial(write_records, records=records)
        if (why := self.engine.add_shard(write, Description(finished, self._gains), size, self._max_bytes)) is None:
            self._gains = []
        else:
            self.dropped[why] += num
        self._waiting, self._written = [], time.perf_counter()
        self.seconds += self._written - started


def _draft_without_adapters(drafter: nn.Module) -> None:
    """Let a drafter use the policy's embedding without its LoRA layer, which knows of the tokens of the policy's pass alone."""
    from vllm.lora.layers import BaseLayerWithLoRA

    for module in list(drafter.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BaseLayerWithLoRA):
                setattr(module, name, child.base_layer)


class WorkerSidecar:
    """Serves one worker of an engine: it knows the engine's part of the spool, and the state of its tapped requests.

    Each tensor-parallel rank of an engine has one. All of them serve the same drafter; rank 0 alone taps and reports, since it has
    the whole hidden states. Ranks wait for each other only in steps that all of them know for such: where the scheduler's output
    says so, and never because of what one of them has noticed.
    """

    def __init__(self, worker: Any, engine: EngineFolder, settings: Settings):
        """Get ready, without waiting for other ranks. `begin` and `hook_in` follow, once this has worked on all of them."""
        self._worker, self._settings = worker, settings
        self._breaker = Breaker({"propose"} if worker.parallel_config.world_size > 1 else ())
        self._shards, self._writer = Shards(engine, settings.max_bytes), ThreadPoolExecutor(1, "cotrain-features")
        self._live: dict[str, list[tuple[Versions, int]]] = {}  # segments of tapped requests: versions, tokens before
        self._changed: dict[int, Versions] = {}  # versions that serve from a step on, until its output has come
        self._reported = 0.0
        cpu.correct()
        if worker.vllm_config.lora_config is not None:
            _draft_without_adapters(worker.get_draft_model())
        draft, kept = worker.speculative_config.draft_model_config, engine.folder / "kept" / f"drafter_{worker.rank}"
        self._weights = ServedWeights(worker.get_draft_model(), draft, kept, worker.get_model())
        self._policy = PolicyWatch(worker, engine.policies)
        self._state = State(os.getpid(), None, __version__, str(worker.model_config.dtype).removeprefix("torch."))

    def begin(self) -> None:
        """Write what the trainer needs to begin. All ranks call it together."""
        self._policy.write()
        if self._is_first:
            write_json(self._shards.engine.state, self._state)

    def hook_in(self) -> None:
        """Hook into the worker's steps, and notice what they load, from now on."""
        worker, runner = self._worker, self._worker.model_runner
        if not worker.use_v2_model_runner:
            wrap(runner, "_sample", sample_plainly_without_drafts)
        kind: Any = SpeculatorHook if worker.use_v2_model_runner else DraftingHook
        self._hook: SpeculatorHook | DraftingHook = kind(runner, str, self._guard)
        self._hook.reads_prompts = self._settings.adaptive
        wrap(runner, "execute_model", self._execute_model)
        self._policy.hook_in()

    def _guard(self, hook: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return None if self._breaker.stopped else self._breaker.call(hook, *args, **options)

    def _execute_model(self, execute: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._policy.finish()  # part of the host's own load of weights, so its errors are the host's
        stamp: Stamp | None = getattr(scheduler_output, "cotrain", None)  # vLLM warms up with steps of its own
        self._hook.draft_length = None if stamp is None else scheduler_output.num_spec_tokens_to_schedule
        if stamp is not None:
            num_tokens, ran_before = scheduler_output.total_num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
            starts = num_tokens > 0 and not ran_before.req_ids
            for prepare in (self._begin_segments, self._take):
                self._breaker.call(prepare, stamp, scheduler_output)
            self._breaker.call(self._watch, stamp, starts)
            if starts or self._is_alone or stamp.offer is not None or stamp.number % MEETING_STEPS == 0:
                self._agree(stamp)
                for serve in (self._follow_policy, self._swap, self._write_policy):
                    self._breaker.call(serve, stamp)
            if self._is_first:
                self._breaker.call(self._tap, stamp)
                self._breaker.call(self._report, stamp)
        return execute(scheduler_output, *args, **kwargs)

    @property
    def _is_first(self) -> bool:
        return self._worker.rank == 0

    @property
    def _is_alone(self) -> bool:
        return self._worker.parallel_config.world_size == 1

    def _take(self, stamp: Stamp, scheduler_output: Any) -> None:
        """Take the features of finished requests. This comes before updates, since their last tokens are of the old versions."""
        if not self._is_first:
            return
        method, layers = self._settings.speculative_config["draft_sample_method"], self._settings.aux_layers
        for token_ids, sampling, finished in stamp.finished:
            if (segments := self._live.pop(finished.name, None)) is None:
                self._shards.dropped["no features"] += 1  # the policy's head was not written when it began
            else:
                earlier = tuple(Segment(before, first, end) for (before, first), (_, end) in pairwise(segments))
                (versions, start), asked = segments[-1], SamplingParams(*sampling, method)
                known = finished.name, token_ids, (), finished.prompt_length, versions.policy, asked, layers
                take = functools.partial(self._hook.take, *known, start, versions.drafter)
                record, finished = self._hook.ring.beside(take), replace(finished, earlier=earlier)
                self._writer.submit(self._breaker.call, self._shards.add, record, finished, self._policy.is_written)
        at_once = self._policy.is_dirty or not scheduler_output.total_num_scheduled_tokens
        if stamp.finished or stamp.gain is not None or at_once:
            self._writer.submit(self._breaker.call, self._shards.write, stamp.gain, at_once)

    def _watch(self, stamp: Stamp, starts: bool) -> None:
        """If the policy's weights changed on this rank, count a new version. starts: no request ran in the step before."""
        if self._policy.is_dirty or (starts and self._policy.has_moved()):
            self._count(stamp)

    def _count(self, stamp: Stamp) -> None:
        self._policy.count()
        self._hook.tap.policy_version = self._policy.version
        self._changed[stamp.number] = self._versions

    def _agree(self, stamp: Stamp) -> None:
        """Let all ranks know what one has noticed: that hooks have failed, that weights have changed, that the trainer is gone."""
        has_trainer = os.path.exists(self._shards.engine.state)
        news = of_all_ranks((self._breaker.failures.copy(), self._policy.is_followed, has_trainer))
        failures, followed, has_trainers = zip(*news, strict=True)
        self._breaker.agree(failures)
        if self._policy.is_followed and not all(followed):
            self._breaker.call(self._count, stamp)
        self._policy.is_followed |= not all(has_trainers)  # the drafter's files are gone with the trainer

    def _follow_policy(self, stamp: Stamp) -> None:
        """Load the drafter again beside a new version of the policy, whose update may have touched it."""
        if not self._policy.is_followed:
            self._policy.is_followed = True
            self._serve(self._weights.restore)

    def _swap(self, stamp: Stamp) -> None:
        if (offer := stamp.offer) is not None:
            try:
                self._serve(self._weights.update, offer.path, offer.digests)
                self._state = replace(self._state, drafter_version=offer.version)
                self._changed[stamp.number] = self._versions
            except (WeightUpdateRefused, RuntimeError) as error:
                self._state = replace(self._state, refused={offer.version: str(error)})

    def _serve(self, action: Callable[..., None], *args: Any) -> None:
        self._reported = 0.0
        with set_current_vllm_config(self._worker.vllm_config):
            action(*args)

    def _write_policy(self, stamp: Stamp) -> None:
        """Write the head of the policy that serves, which the trainer needs for the requests that are tapped."""
        if stamp.tapped or any(tapped for _, tapped in stamp.before):
            self._policy.write()

    def _tap(self, stamp: Stamp) -> None:
        if self._policy.is_written and not self._breaker.off:
            self._live |= {name: [(self._versions, 0)] for name in stamp.tapped}
            self._hook.tap.start(stamp.tapped, self._settings.max_bytes)

    @property
    def _versions(self) -> Versions:
        return Versions(self._policy.version, self._state.drafter_version)

    def _begin_segments(self, stamp: Stamp, scheduler_output: Any) -> None:
        """Begin a new segment of each tapped request that ran in a step from which on other versions served.

        How many tokens came before that step is known when its output has come, which may be a step later.
        """
        for number, before in stamp.before:
            if (versions := self._changed.pop(number, None)) is None:
                continue
            for name in before.keys() & self._live.keys():
                segments = self._live[name]
                if segments[-1][1] == before[name]:
                    segments.pop()
                segments.append((versions, before[name]))

    def _report(self, stamp: Stamp) -> None:
        """Write state.json once a second, and at once when versions have changed or a hook has failed for good."""
        now, off = time.perf_counter(), sorted({*stamp.hooks_off, *self._breaker.off})
        reason = f"these hooks have failed: {', '.join(off)}" if off else None
        if reason == self._state.reason and now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        self._state = replace(
            self._state,
            reason=reason,
            policy_version=self._policy.version,
            dropped=stamp.dropped + self._shards.dropped.copy(),
            seconds={"tap": self._hook.tap_seconds, "write": self._shards.seconds},
            counts=stamp.counts,
        )
        with suppress(OSError):  # the disk is full, or the spool is gone
            write_json(self._shards.engine.state, self._state)
