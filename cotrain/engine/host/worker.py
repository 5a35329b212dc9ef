"""The sidecar in a worker of a host's engine: it writes out features of requests, swaps drafters in, and reports on both.

It shares the tap, the weight swap and the corrections for the CPU build with cotrain's own engines.
"""

import functools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

from vllm.config import set_current_vllm_config

from cotrain.engine import cpu
from cotrain.engine.hooks import DraftingHook, sample_plainly_without_drafts
from cotrain.engine.host.breaker import Breaker
from cotrain.engine.host.policy_watch import PolicyWatch
from cotrain.engine.host.scheduling import REPORT_SECONDS, Stamp
from cotrain.engine.interface import attached, wrap
from cotrain.engine.loading import ModelWeights
from cotrain.engine.model_runner_v2 import SpeculatorHook
from cotrain.records import Versions
from cotrain.transport.features import FeatureRecord, write_records
from cotrain.transport.spool import EngineFolder, Settings, write_json
from cotrain.weights.payload import WeightUpdateRefused
from drafters.base import SamplingParams

SHARD_ROLLOUTS = 32
"""Shards are written when this many rollouts have finished. Fewer suffice after REPORT_SECONDS, or when the engine is idle."""


class WorkerSidecar:
    """Serves one engine: it knows the engine's part of the spool, and the state of its tapped requests."""

    def __init__(self, worker: Any, engine: EngineFolder, settings: Settings):
        self._worker, self._engine, self._settings = worker, engine, settings
        self._breaker, self._corrections = Breaker(), cpu.correct()
        self._policy, self._drafter = PolicyWatch(worker, engine.policies), 0
        self._knows_policy = self._lacks_head = False  # is the head of what serves written, or yet to be written?
        self._versions, self._refused = str(Versions(0, 0)), dict[int, str]()
        self._live: dict[str, list[tuple[str, int]]] = {}  # segments of tapped requests: (versions, tokens before)
        self._finished: dict[SamplingParams, list[tuple[FeatureRecord, dict[str, Any]]]] = defaultdict(list)
        self._dropped, self._seconds, self._windows = Counter[str](), defaultdict[str, float](float), list[Any]()
        self._written = self._reported = 0.0
        self._off = list[str]()  # hooks that were reported to have failed

    def hook_in(self) -> None:
        """Hook into the worker. What can fail comes first, before anything in the engine is changed."""
        worker, runner = self._worker, self._worker.model_runner
        draft, kept = worker.speculative_config.draft_model_config, self._engine.facts.parent / "kept" / "drafter"
        self._weights = ModelWeights(worker.get_draft_model(), draft, kept, worker.get_model())
        self._policy.write()
        self._knows_policy = worker.vllm_config.load_config.load_format != "dummy"
        self._write_facts()
        if not worker.use_v2_model_runner:
            wrap(runner, "_sample", sample_plainly_without_drafts)
        kind = SpeculatorHook if worker.use_v2_model_runner else DraftingHook
        self._hook: SpeculatorHook | DraftingHook = kind(runner, name_of=str)
        self._hook.reads_prompts = self._settings.adaptive
        self._hook.record = functools.partial(self._breaker.call, self._hook.record)  # type: ignore[method-assign]
        self._hook.let_propose(self._propose)
        self._execute, runner.execute_model = runner.execute_model, self._execute_model
        self._policy.hook_in()

    def _write_facts(self, reason: str | None = None) -> None:
        from vllm import __version__

        dtype = str(self._worker.model_config.dtype).removeprefix("torch.")
        facts = {"pid": os.getpid(), "vllm": __version__, "dtype": dtype, "corrections": self._corrections}
        facts |= {"host": self._engine.host, "attached": reason is None, "reason": reason}
        write_json(self._engine.facts, facts)

    def _propose(self, *args: Any, **options: Any) -> Any:
        drafts = None if self._breaker.off else self._breaker.call(self._hook.propose, *args, **options)
        return self._hook.no_drafts(*args, **options) if drafts is None else drafts

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._policy.finish()  # part of the host's own load of weights, so its errors are the host's
        stamp: Stamp | None = attached(scheduler_output)
        self._hook.draft_length = None if stamp is None else scheduler_output.num_spec_tokens_to_schedule
        if stamp is not None:
            self._breaker.call(self._take, stamp, scheduler_output)
            self._breaker.call(self._follow_policy, stamp, scheduler_output)
            if stamp.publication is not None:
                self._breaker.call(self._swap, stamp, stamp.publication)
            if self._lacks_head and (stamp.tapped or self._live):
                self._breaker.call(self._write_head)
            if self._knows_policy and not self._breaker.off:
                self._live |= {name: [(self._versions, 0)] for name in stamp.tapped}
                self._hook.tap.start(stamp.tapped)
            self._breaker.call(self._report, stamp)
        return self._execute(scheduler_output, *args, **kwargs)

    def _take(self, stamp: Stamp, scheduler_output: Any) -> None:
        """Take the features of finished requests. This comes before updates, since their last tokens are of the old versions."""
        for done in stamp.finished:
            self._take_one(*done)
        if stamp.window is not None:
            self._windows = [*self._windows[-60:], stamp.window]  # there may be no trainer that reads them
        num, late = sum(map(len, self._finished.values())), time.perf_counter() - self._written > REPORT_SECONDS
        idle = not scheduler_output.total_num_scheduled_tokens
        if num >= SHARD_ROLLOUTS or (num and (idle or late or self._policy.is_dirty)):
            self._write_shards()

    def _take_one(self, token_ids: list[int], sampling: tuple[float, float, int], told: dict[str, Any]) -> None:
        if (segments := self._live.pop(told["name"], None)) is None:
            return
        version, start = segments[-1]
        law = SamplingParams(*sampling, self._settings.speculative_config["draft_sample_method"])
        known = told["name"], token_ids, told["prompt_tokens"], self._policy.version, law, self._settings.aux_layers
        record = self._hook.take(*known, start, self._drafter)
        if record is None or not record.is_trainable or not self._knows_policy:
            self._dropped["no features"] += 1
            return
        earlier = [(before, first, end) for (before, first), (_, end) in pairwise(segments)]
        self._finished[law].append((record, {**told, "versions": version, "earlier": earlier}))

    def _write_shards(self) -> None:
        self._written = started = time.perf_counter()
        for group in self._finished.values():
            records, told = zip(*group, strict=True)
            described = {"rollouts": told, "windows": self._windows}
            size, write = sum(r.num_bytes for r in records), functools.partial(write_records, records=list(records))
            if (dropped := self._engine.add_shard(write, described, size, self._settings.max_bytes)) is None:
                self._windows = []
            else:
                self._dropped[dropped] += len(records)
        self._finished.clear()
        self._seconds["write"] += time.perf_counter() - started

    def _follow_policy(self, stamp: Stamp, scheduler_output: Any) -> None:
        """If the policy's weights changed, count a new version and load the drafter again, which the update may have touched."""
        starts = scheduler_output.total_num_scheduled_tokens and not scheduler_output.scheduled_cached_reqs.req_ids
        if not self._policy.is_dirty and not (starts and self._policy.has_moved()):
            return
        self._policy.is_dirty, self._knows_policy, self._lacks_head = False, False, True
        self._policy.version += 1
        self._hook.tap.policy_version = self._policy.version
        self._begin_segments(stamp)
        if self._engine.facts.exists():  # else the trainer is gone, and with it the files to load the drafter from
            self._serve(self._weights.restore)

    def _write_head(self) -> None:
        started, self._lacks_head = time.perf_counter(), False
        with suppress(OSError):  # the disk is full: nothing is tapped until the next version
            self._policy.write()
            self._knows_policy = True
        self._seconds["head"] += time.perf_counter() - started

    def _swap(self, stamp: Stamp, publication: dict[str, Any]) -> None:
        try:
            self._serve(self._weights.update, publication["path"], publication["digests"])
            self._drafter = publication["version"]
            self._begin_segments(stamp)
        except (WeightUpdateRefused, RuntimeError) as error:
            self._refused = {publication["version"]: str(error)}

    def _serve(self, action: Callable[..., None], *args: Any) -> None:
        started = time.perf_counter()
        self._reported = 0.0
        with set_current_vllm_config(self._worker.vllm_config):
            action(*args)
        self._seconds["swap"] += time.perf_counter() - started

    def _begin_segments(self, stamp: Stamp) -> None:
        """Begin a new segment of each tapped request that is running: its next tokens come from other versions."""
        self._versions = str(Versions(self._policy.version, self._drafter))
        for name, segments in self._live.items():
            start = stamp.generated.get(name, 0)
            if segments[-1][1] == start:
                segments.pop()
            segments.append((self._versions, start))

    def _report(self, stamp: Stamp) -> None:
        """Write state.json once a second, and at once when versions have changed or a hook has failed for good."""
        now, off = time.perf_counter(), sorted({*stamp.hooks_off, *self._breaker.off})
        if off == self._off and now - self._reported < REPORT_SECONDS:
            return
        self._reported, self._off = now, off
        self._seconds["tap"] = self._hook.tap_seconds
        state = {"policy_version": self._policy.version, "drafter_version": self._drafter, "refused": self._refused}
        state |= {"dropped": Counter(stamp.dropped) + self._dropped, "hooks_off": off, "seconds": self._seconds}
        with suppress(OSError):  # the disk is full, or the spool is gone
            write_json(self._engine.state, state | stamp.counts)
            if self._breaker.off:
                self._write_facts(f"these hooks have failed: {', '.join(self._breaker.off)}")
