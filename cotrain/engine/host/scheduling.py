"""What the sidecar adds to a host's scheduler: it decides for the whole engine, and stamps each step for the worker."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.engine.host.breaker import Breaker
from cotrain.engine.scheduling import WatchedScheduler, draft_lengths_of, generated_of, step_of, verified
from cotrain.engine.tap_admission import Admission, TapRequest, adapter_of, row_bytes
from cotrain.records import GainReport
from cotrain.transport.spool import Finished, Offer, Record, Settings, Spool, State, read_json

REPORT_SECONDS = 1.0

MOST_COUNTS = 128
"""Counts of an engine after which no further adapter gets its own: a host may give each version of its policy a new name."""


class Stamp(NamedTuple):
    """What the scheduler tells the worker with a step: what to do before it, and what to report."""

    number: int  # of the step
    tapped: dict[str, TapRequest]
    before: list[tuple[int, dict[str, int]]]
    """Numbers of steps whose output has come since the last stamp, and the response tokens before them of each tapped request."""
    finished: list[tuple[list[int], tuple[float, float, int], Finished]]
    """Tapped requests that have ended: token ids up to the true end, (temperature, top-p, top-k), facts for the trainer."""
    offer: Offer | None  # the drafter that serves from this step on, if it is another one
    gain: GainReport | None  # since the last one, about once a second
    counts: Counter[str]
    dropped: Counter[str]  # number of requests by the reason why they are not tapped
    hooks_off: list[str]


class Decisions:
    """Decides for one engine which requests are tapped, when a drafter is swapped in, and how many tokens are drafted.

    Its 18 attributes are what these decisions and the stamp's reports need from step to step.
    """

    def __init__(self, spool: Spool, scheduler: Any):
        config, settings = scheduler.vllm_config, spool.settings()
        self._spool, self._requests, self._adaptive = spool, scheduler.requests, settings.adaptive
        self._draft_lengths = draft_lengths_of(scheduler)
        width = (len(settings.aux_layers) + 1) * config.model_config.get_hidden_size()
        row_size = row_bytes(width, config.model_config.dtype.itemsize)
        self._admission, self._asked = Admission(settings.max_bytes, row_size, config.instance_id), settings
        self._has_adapters = config.lora_config is not None
        self._state, self._seen = spool.engine(config.instance_id).state, dict[Path, tuple[int, int]]()
        self._attached, self._offer, self._is_new, self._reported = False, Offer(), False, 0.0
        self._number, self._before = 0, list[tuple[int, dict[str, int]]]()
        self._steps: dict[str, list[tuple[int, int]]] = {}  # verification steps of the tapped requests
        self._finished, self._counts = list[Any](), Counter[str]()

    def draft_lengths(self) -> list[int] | None:
        """Look for news in the spool, and return the draft length by batch size, or None to draft nothing."""
        lengths = self._draft_lengths.choose(time.perf_counter())
        if (state := self._news(self._state, State)) is not None:
            if self._adaptive and not self._attached and state.reason is None:
                self._draft_lengths.adapt()
            self._attached = state.reason is None
        if (settings := self._news(self._spool.settings_file, Settings)) is not None:
            self._asked = settings  # a trainer that was restarted may ask for less
        if (offer := self._news(self._spool.current, Offer)) is not None:
            # Digests too, since a trainer that was restarted may use a version again.
            if (offer.version, offer.digests) != (self._offer.version, self._offer.digests):
                self._is_new = True
                self._draft_lengths.new_drafter(offer.expected_rates)
            self._offer = offer
        return lengths if self._attached and self._offer.on else None

    def stamp(self, output: Any, hooks_off: list[str]) -> Stamp:
        """Return what a SchedulerOutput carries to the worker."""
        offer, self._is_new = self._offer if self._is_new else None, False
        gain, now = None, time.perf_counter()
        if now - self._reported > REPORT_SECONDS:
            self._reported, gain = now, GainReport(**self._draft_lengths.report()["gain"])
        new = output.scheduled_new_reqs
        asked = self._asked.share, self._asked.adapter
        tapped = self._admission.admit(new, *asked) if new and self._spool.is_alive() else {}
        self._counts["tapped"] += len(tapped)
        self._steps |= {name: [] for name in tapped}
        finished, self._finished = self._finished, []
        before, self._before = self._before, []
        self._number += 1
        counts, dropped = self._counts.copy(), self._admission.dropped.copy()
        return Stamp(self._number, tapped, before, finished, offer, gain, counts, dropped, hooks_off)

    def observe(self, number: int, output: Any, sampled: Any) -> None:
        """Count what a step drafted and accepted. Like vLLM's own counts, this comes before responses are cut at their end.

        number: of the step's stamp. With asynchronous scheduling the next step has its stamp already.
        """
        tapped = self._admission.tapped.keys() & self._requests.keys()
        self._before.append((number, {name: self._requests[name].num_output_tokens for name in tapped}))
        if not (generated := generated_of(self._requests, output, sampled)):
            return
        step = step_of(output, generated)
        self._draft_lengths.observe(step)
        drafts = verified(output, generated)
        for name in drafts.keys() & self._steps.keys():
            self._steps[name].append(drafts[name])
        if self._has_adapters:
            for name, (_, taken) in drafts.items():
                adapter = adapter_of(self._requests[name])
                if f"drafts/{adapter}" not in self._counts and len(self._counts) > MOST_COUNTS:
                    adapter = "others"
                self._counts.update({f"drafts/{adapter}": 1, f"accepted/{adapter}": taken})
        drafted, accepted = map(sum, zip((0, 0), *step.drafts, strict=True))
        counts = {"drafts": len(drafts), "drafted_tokens": drafted, "accepted_tokens": accepted}
        self._counts.update(counts, generated_tokens=step.num_tokens)

    def pause(self) -> None:
        self._draft_lengths.idle(time.perf_counter())

    def finish(self, request: Any) -> None:
        """Note that a request of vLLM's has ended; a tapped one goes into the next stamp."""
        self._counts["finished"] += 1
        name, asked = request.request_id, request.sampling_params
        self._admission.observe({name: request.num_output_tokens})
        if (steps := self._steps.pop(name, None)) is not None:
            reason = str(request.get_finished_reason())
            finished = Finished(name, request.num_prompt_tokens, reason, tuple(steps))
            sampling = asked.temperature, asked.top_p, max(asked.top_k, 0)
            self._finished.append((list(request.all_token_ids), sampling, finished))

    def _news(self, path: Path, kind: type[Record]) -> Record | None:
        """Return what a file of the spool holds if it was replaced since the last call, else None."""
        with suppress(OSError, ValueError):  # the spool is gone, and somebody else may have taken its place
            self._spool.check()
            before, file = self._seen.get(path), path.stat()
            self._seen[path] = file.st_mtime_ns, file.st_ino  # the clock of a file system is coarse
            if self._seen[path] != before:
                return read_json(path, kind)
        return None


class HostScheduling(WatchedScheduler):
    """Mixed into the host's own scheduler class. No failure in here reaches the host; the engine then drafts nothing."""

    cotrain_spool: Spool

    def cotrain_start(self) -> None:
        self._cotrain_breaker = Breaker()
        self._cotrain = self._cotrain_breaker.call(Decisions, self.cotrain_spool, self)

    def _ask(self, decide: Callable[..., Any], *args: Any) -> Any:
        return None if self._cotrain is None else self._cotrain_breaker.call(decide, self._cotrain, *args)

    def cotrain_choose_lengths(self) -> None:
        lengths, most = self._ask(Decisions.draft_lengths), self.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
        self.dynamic_sd_lookup = [0] * (most + 1) if lengths is None or self._cotrain_breaker.off else lengths

    def cotrain_stamp(self, output: Any) -> Stamp | None:
        self._cotrain_length = output.num_spec_tokens_to_schedule
        return self._ask(Decisions.stamp, output, self._cotrain_breaker.off)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Cut drafts to the length of the step. Model runner V2 drafts the most before vLLM 0.32, or if it cannot be watched."""
        draft_token_ids.draft_token_ids = [ids[: self._cotrain_length] for ids in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def cotrain_observe(self, output: Any, sampled: Any) -> None:
        if (stamp := getattr(output, "cotrain", None)) is not None:
            self._ask(Decisions.observe, stamp.number, output, sampled)

    def cotrain_pause(self) -> None:
        self._ask(Decisions.pause)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._ask(Decisions.finish, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
