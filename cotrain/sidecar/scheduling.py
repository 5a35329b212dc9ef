"""What the sidecar adds to a host's scheduler, which decides for the whole engine and stamps each step for the worker."""

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.rollout.speculation.controller import SpeculationController
from cotrain.rollout.tap_admission import TapRequest, choose, left_out, reserved_bytes, row_bytes
from cotrain.rollout.vllm.scheduling import WatchedScheduler, step_of, verified
from cotrain.sidecar.breaker import Breaker
from cotrain.sidecar.spool import Spool, read_json

REPORT_SECONDS = 1.0


class Finished(NamedTuple):
    """A tapped request that has ended. The worker may have computed tokens after its true end."""

    name: str
    token_ids: list[int]
    prompt_length: int
    sampling: tuple[float, float, int]  # temperature, top-p, top-k
    finish_reason: str
    seconds: float
    verification_steps: list[tuple[int, int]]  # (draft tokens, accepted ones)


@dataclass
class Stamp:
    """What the worker does before a step, and what it reports for the scheduler."""

    tapped: dict[str, TapRequest]
    finished: list[Finished]
    publication: dict[str, Any] | None  # the drafter that serves from this step on
    window: dict[str, Any] | None  # see SpeculationController.report
    counts: dict[str, int]
    dropped: dict[str, int]  # requests, by the reason why they are not tapped
    hooks_off: list[str]


class Decisions:
    """What an engine decides: which requests are tapped, when a drafter is swapped, how much is drafted."""

    def __init__(self, spool: Spool, scheduler: Any):
        config, self._spool, self._settings = scheduler.vllm_config, spool, spool.settings()
        self._controller = SpeculationController(scheduler.num_spec_tokens, scheduler.scheduler_config.max_num_seqs)
        width = (len(self._settings.aux_layers) + 1) * config.model_config.get_hidden_size()
        self._row_size = row_bytes(width, config.model_config.dtype.itemsize)
        self._facts, self._seen = spool.engine(config.instance_id).facts, dict[Path, int]()
        self._attached, self._on, self._drafter, self._reported = False, True, 0, 0.0
        self._random = random.Random(config.instance_id)  # the host's own generator is left alone
        self._tapped: dict[str, TapRequest] = {}
        self._steps: dict[str, list[tuple[int, int]]] = {}  # verification steps of the tapped requests
        self._finished: list[Finished] = []
        self._counts, self._dropped = Counter[str](), Counter[str]()

    def draft_lengths(self) -> list[int] | None:
        """Draft length by batch size; None switches drafting off."""
        lengths = self._controller.draft_lengths(time.perf_counter())
        if (facts := self._news(self._facts)) is not None:
            self._attached = facts["attached"]
            if self._attached and self._settings.adaptive:
                self._controller.begin_measuring(live=True)
        if self._controller.has_measured:
            self._controller.end_measuring()
        return lengths if self._attached and self._on else None

    def stamp(self, output: Any, hooks_off: list[str]) -> None:
        """Stamp a SchedulerOutput."""
        publication, window, now = None, None, time.perf_counter()
        if (current := self._news(self._spool.current)) is not None:
            self._on = current.get("on", True)
            if current["version"] != self._drafter:
                self._drafter, publication = current["version"], current
                self._controller.new_drafter(current.get("expected_rates"))
        if now - self._reported > REPORT_SECONDS:
            self._reported, window = now, self._controller.report()
        tapped, finished = self._admit(output.scheduled_new_reqs), self._finished
        self._finished = []
        counts, dropped = dict(self._counts), dict(self._dropped)
        output.cotrain = Stamp(tapped, finished, publication, window, counts, dropped, hooks_off)

    def observe(self, output: Any, sampled: Any) -> None:
        """Count what became of a step, before the end of a response is looked for, as vLLM's own counts are."""
        step = step_of(output, sampled)
        self._controller.observe(step)
        for name, drafted in verified(output, sampled).items():
            if name in self._steps:
                self._steps[name].append(drafted)
        num_drafted, accepted = map(sum, zip((0, 0), *step.drafts, strict=True))
        counts = {"drafts": len(step.drafts), "drafted_tokens": num_drafted, "accepted_tokens": accepted}
        self._counts.update(counts, generated_tokens=step.num_tokens)

    def pause(self) -> None:
        self._controller.idle(time.perf_counter())

    def finish(self, request: Any) -> None:
        """A request of vLLM's has ended."""
        self._counts["finished"] += 1
        name, law = request.request_id, request.sampling_params
        if self._tapped.pop(name, None) is not None:
            sampling = law.temperature, law.top_p, max(law.top_k, 0)
            end = str(request.get_finished_reason()), time.time() - request.arrival_time, self._steps.pop(name)
            self._finished.append(
                Finished(name, list(request.all_token_ids), request.num_prompt_tokens, sampling, *end)
            )

    def _news(self, path: Path) -> Any:
        """What a JSON file holds if it was replaced since the last call, else None."""
        with suppress(OSError):
            seen = path.stat().st_mtime_ns
            if seen != self._seen.get(path):
                self._seen[path] = seen
                return read_json(path)
        return None

    def _admit(self, requests: list[Any]) -> dict[str, TapRequest]:
        """The requests that are tapped, chosen before they run by nothing that comes out of them."""
        asked, tapped = dict[str, TapRequest](), dict[str, TapRequest]()
        for new in requests:
            if reason := left_out(new) or ("" if self._spool.is_alive() else "no trainer"):
                self._dropped[reason] += 1
            elif self._random.random() < self._settings.share:
                prompt = str(hash(tuple(new.prompt_token_ids)))
                asked[new.req_id] = TapRequest(prompt, len(new.prompt_token_ids), new.sampling_params.max_tokens)
        with suppress(ValueError):  # one of them alone is above the bound
            taken, key = reserved_bytes(self._tapped, self._row_size), str(self._random.random())
            tapped = choose(asked, key, self._settings.max_bytes, self._row_size, taken)
        self._counts["tapped"] += len(tapped)
        self._dropped["no room in the tap"] += len(asked) - len(tapped)
        self._tapped |= tapped
        self._steps |= {name: [] for name in tapped}
        return tapped


class HostScheduling(WatchedScheduler):
    """Mixed into the host's own scheduler class. Nothing that fails here reaches the host; it then drafts nothing."""

    cotrain_spool: Spool

    def cotrain_start(self) -> None:
        self._cotrain_breaker = Breaker()
        self._cotrain = self._cotrain_breaker.call(Decisions, self.cotrain_spool, self)

    def _ask(self, what: str, *args: Any) -> Any:
        return None if self._cotrain is None else self._cotrain_breaker.call(getattr(self._cotrain, what), *args)

    def cotrain_choose_lengths(self) -> None:
        lengths, most = self._ask("draft_lengths"), self.scheduler_config.max_num_seqs  # type: ignore[attr-defined]
        self.dynamic_sd_lookup = [0] * (most + 1) if lengths is None or self._cotrain_breaker.off else lengths

    def cotrain_stamp(self, output: Any) -> None:
        self._ask("stamp", output, self._cotrain_breaker.off)

    def cotrain_observe(self, output: Any, sampled: Any) -> None:
        self._ask("observe", output, sampled)

    def cotrain_pause(self) -> None:
        self._ask("pause")

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._ask("finish", request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
