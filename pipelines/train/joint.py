"""Joint policy-drafter training: puts the parts together, runs the controller, and cleans up whatever happens."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from cotrain.config.files import write_json
from cotrain.config.load import write_config
from cotrain.config.schema import RunConfig
from cotrain.controller import Controller, Roles
from cotrain.lossless.greedy_check import GreedyCheck, check_greedy
from cotrain.models.loading import native_head, resolve_model
from cotrain.process.cluster import Cluster, place
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.process.stop_signal import two_stage_stop
from cotrain.publish.loop import DrafterLoop
from cotrain.records import RolloutRequest, Versions
from cotrain.roles.drafter import DrafterTraining
from cotrain.roles.engines import PolicyRanks, RolloutEngines, engine_specs
from cotrain.run.checkpoint import (
    DiskFullError,
    RunState,
    check_resume,
    discard_newer,
    is_disk_full,
    latest_checkpoint,
    load_state,
    model_fingerprints,
)
from cotrain.run.console import Console, RunSummary
from cotrain.run.decisions import FILE, DecisionLog
from cotrain.run.metrics import MetricsWriter, read_metrics
from cotrain.run.provenance import write_provenance
from cotrain.run.registry import first_drafter
from cotrain.run.run_dir import RunDir, resume_arguments
from cotrain.run.store_uri import tracking_uri, uri_argument
from cotrain.run.tracking import Tracker
from cotrain.tasks.base import build_task
from cotrain.tasks.prompt_order import PromptSampler
from cotrain.tasks.prompts import PromptEncoder
from pipelines.preflight import tap_note
from pipelines.train.report import write_run_report

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 32


class StartUp:
    """When each part of the start was ready, in seconds since the process began; parts overlap."""

    def __init__(self) -> None:
        self._began = psutil.Process().create_time()
        self.ready_s: dict[str, float] = {}
        self.note("imports")

    def note(self, part: str) -> None:
        """Note that a part is ready."""
        self.ready_s[part] = round(time.time() - self._began, 1)

    def write(self, logs: Path) -> str:
        """Write startup.json into the logs of the attempt. Returns the same for people."""
        write_json(logs / "startup.json", self.ready_s)
        return "ready after: " + ", ".join(f"{part} {seconds:.1f}s" for part, seconds in self.ready_s.items())


def train(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    started = time.monotonic()
    start_up, console = StartUp(), Console(sys.stdout)
    with ExitStack() as stack:
        stop = stack.enter_context(two_stage_stop(console.say, "step"))
        run_dir = RunDir.open(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        model_path = resolve_model(config.policy.model)
        task = build_task(config.task, config.seed)
        sampler = PromptSampler(len(task), config.rollout.prompts_per_step, config.seed)
        state = _first_state(config, run_dir, sampler, model_fingerprints(model_path), resume)
        metrics = stack.enter_context(MetricsWriter(run_dir.metrics, resumed_step=state.step))
        decisions = stack.enter_context(DecisionLog(run_dir.path / FILE, resumed_step=state.step))
        # A new database takes MLflow some seconds, and Ray and the roles do not need it.
        tracking = _start_tracker(config, state, read_metrics(run_dir.metrics), console, stack)
        scratch = stack.enter_context(scratch_folder(config.name))
        start_up.note("model and task")
        # Not in a thread: Ray's processes are killed when the thread that has started them ends.
        with console.phase("start of all roles"):
            cluster = Cluster(config.cluster, run_dir.logs, run_dir.resume)
            stack.callback(cluster.stop)
            start_up.note("Ray")
            prompts, roles = _start_roles(config, cluster, run_dir, model_path, scratch, state, start_up)
            tracker = tracking.result()
            start_up.note("MLflow")
        if config.drafter is not None and config.rollout.speculation.adaptive:
            with console.phase("timing of draft lengths"):
                timed = [prompts.encode(task.prompt(i)) for i in range(min(len(task), config.rollout.max_num_seqs))]
                roles.engines.time_draft_lengths(timed)
        console.say(start_up.write(run_dir.logs))
        console.banner(
            config,
            run_dir,
            _devices(config, cluster),
            f"cotrain ui{uri_argument(tracker.uri)}",
            _notes(config, model_path),
        )
        controller = Controller(
            config, run_dir, roles, task, prompts, sampler, tracker, metrics, decisions, console, scratch,
            state.versions, state.fingerprints, state.step,
        )  # fmt: skip
        controller.load_state(state)
        controller.stop_requested = stop
        finished = _run(controller, run_dir)
        check = _final_check(config, controller, console) if finished else None
        _finish(config, controller, console, finished, check, time.monotonic() - started)
        return 0 if check is None or check.passed else 1


def _first_state(
    config: RunConfig, run_dir: RunDir, sampler: PromptSampler, fingerprints: dict[str, str], resume: bool
) -> RunState:
    """The state to start from: that of the newest checkpoint, or of a run that has made no step. Begins an attempt."""
    state = RunState(0, Versions(0, 0), sampler.state(), config.model_dump(mode="json"), fingerprints)
    if resume:
        if checkpoint := latest_checkpoint(run_dir):
            state = load_state(checkpoint)
            check_resume(config, fingerprints, state)
        discard_newer(run_dir, state.step, state.versions.drafter)
    if state.step == 0:
        write_config(config, run_dir.config)
    sampler.restore(state.task_position)
    run_dir.start_attempt()
    write_provenance(run_dir)
    return state


def _start_tracker(
    config: RunConfig, state: RunState, history: Sequence[dict[str, Any]], console: Console, stack: ExitStack
) -> "Future[Tracker]":
    """Begin to connect to MLflow in a thread. On leaving the stack the run there is finished."""
    pool = stack.enter_context(ThreadPoolExecutor(1))
    future = pool.submit(Tracker, config, run_id=state.tracking_run_id, history=history, say=console.say)
    stack.push(lambda *exc_info: future.result().__exit__(*exc_info) if future.exception() is None else None)
    return future


def _start_roles(
    config: RunConfig,
    cluster: Cluster,
    run_dir: RunDir,
    model_path: Path,
    scratch: Path,
    state: RunState,
    start_up: StartUp,
) -> tuple[PromptEncoder, Roles]:
    """Start all roles side by side, as far as one does not wait for another, and bring them to one version.

    The engines need the folder of the first drafter, so the drafter comes first, while the engines import vLLM.
    """
    versions, placement = state.versions, place(config, cluster.num_gpus)
    engines = RolloutEngines(cluster, config, placement)
    drafter, served = None, None
    if config.drafter is not None:
        init = first_drafter(tracking_uri(config), config.drafter.init, model_path, run_dir.path / "drafter_init")
        drafter = DrafterTraining(cluster, config, model_path, init, placement)
        if state.step:
            drafter.load(run_dir.checkpoint(state.step) / "drafter")
        served = run_dir.drafter(versions.drafter), drafter.serving()
        # Written anew on a resume too: a run that was killed may have left half of it.
        drafter.save_checkpoint(served[0], config.rollout.dtype, versions.drafter)
        start_up.note("drafter")
    loading = engines.start(engine_specs(config, model_path, served, scratch, versions, state.step))
    policy = PolicyRanks(cluster, config, model_path, placement)
    prompts = _prompt_encoder(config, model_path)
    start_up.note("tokenizer")
    policy.wait_until_started()
    if state.step:
        policy.load(run_dir.checkpoint(state.step) / "policy")
    payload = policy.write_payload(scratch / "policy.safetensors", config.rollout.dtype)
    start_up.note("policy")
    if drafter is not None:
        drafter.set_target_weights(payload, versions.policy)
    engines.wait_until_started(loading)
    if versions.policy:
        engines.update_policy(payload, versions.policy)
    start_up.note("engine")
    drafting = None
    if drafter is not None:
        sent = drafter.write_payload(scratch / "drafter.safetensors", config.rollout.dtype, versions.drafter)
        drafting = DrafterLoop(config, drafter, engines, scratch, sent, versions)
    return prompts, Roles(engines, policy, drafter, drafting)


def _prompt_encoder(config: RunConfig, model_path: Path) -> PromptEncoder:
    from transformers import AutoTokenizer

    return PromptEncoder(AutoTokenizer.from_pretrained(model_path), config.rollout.max_prompt_tokens)


def _run(controller: Controller, run_dir: RunDir) -> bool:
    """Controller.run; a failure that does not say so itself is told how to go on, and a full disk is named as such."""
    try:
        return controller.run()
    except DiskFullError:
        raise
    except Exception as error:
        failure = error
        if not isinstance(error, RunFailure):
            full = [folder for folder in (run_dir.path, controller.scratch) if is_disk_full(error, folder)]
            if not full:
                raise
            step = controller.step + 1
            failure = RunFailure(f"disk full in step {step} ({full[0]}): {error}. Make room first")
        if "--resume" in str(failure):
            raise
        raise RunFailure(
            f"{failure}\n  Look into {run_dir.logs}. What was saved is whole: continue with cotrain train "
            f"{run_dir.resume}"
        ) from error


def _notes(config: RunConfig, model_path: Path) -> dict[str, str]:
    """Lines of the banner on the drafter and the feature tap."""
    notes = {}
    if config.drafter is not None:
        first = config.drafter.init or ("the policy's own head" if native_head(model_path) else "random init")
        notes["drafter"] = f"{config.drafter.model.type} from {first}"
    if tap := tap_note(config, model_path):
        notes["tap"] = tap
    return notes


def _final_check(config: RunConfig, controller: Controller, console: Console) -> GreedyCheck | None:
    if config.drafter is None or controller.last_batch is None or controller.mode is not None:
        return None
    seen = {r.prompt_id: r.prompt_token_ids for r in controller.last_batch.rollouts}
    requests = [RolloutRequest(prompt_id, 0, ids, None) for prompt_id, ids in list(seen.items())[:GREEDY_PROMPTS]]
    with console.phase("greedy output with and without speculation", terminal_only=True):
        check = check_greedy(
            controller.roles.engines,
            requests,
            config.rollout.draft_tokens,
            config.rollout.dtype,
            min(GREEDY_TOKENS, config.rollout.max_new_tokens),
        )
    console.say(f"greedy output with and without speculation: {check}")
    return check


def _finish(
    config: RunConfig,
    controller: Controller,
    console: Console,
    finished: bool,
    check: GreedyCheck | None,
    seconds: float,
) -> None:
    """Close the run in MLflow, write the report, and print the summary."""
    tracker, run_dir = controller.tracker, controller.run_dir
    tracker.finish("FINISHED" if finished else "KILLED")
    speculation = controller.roles.engines.describe_speculation() if config.drafter else None
    summary = RunSummary(
        seconds=seconds,
        stopped_early=not finished,
        greedy_identical=check.passed if check else None,
        speculation=controller.mode or speculation,
        drafter_uri=_drafter_uri(config, tracker, controller),
        next_commands=_next_commands(config, tracker, finished),
        report=_write_report(run_dir, console),
    )
    console.summary(config, run_dir, read_metrics(run_dir.metrics), summary)


def _write_report(run_dir: RunDir, console: Console) -> Path | None:
    try:
        return write_run_report(run_dir.path)
    except Exception as error:  # whatever a figure or a disk does, the run behind it is finished and saved
        console.say(f"report not written ({error}); try again with: cotrain report {run_dir.path}")
        return None


def _devices(config: RunConfig, cluster: Cluster) -> dict[str, str]:
    placement = place(config, cluster.num_gpus)

    def device(num: int, gpus: float, threads: int) -> str:
        kind = f"{gpus:g} GPU each" if gpus else f"CPU, {threads} threads"
        return kind if num == 1 else f"{num} processes, {kind}"

    devices = {
        "rollout": device(config.rollout.num_engines, placement.engine_gpus, cluster.engine_threads()),
        "policy": device(config.policy.num_processes, placement.learner_gpus, cluster.learner_threads()),
    }
    if config.drafter is not None:
        devices["drafter"] = device(1, placement.drafter_gpus, cluster.learner_threads())
    return devices


def _drafter_uri(config: RunConfig, tracker: Tracker, controller: Controller) -> str | None:
    if config.drafter is None or not config.tracking.log_drafters or controller.versions.drafter == 0:
        return None
    return f"models:/{tracker.registered_model}@serving"


def _next_commands(config: RunConfig, tracker: Tracker, finished: bool) -> list[tuple[str, str]]:
    if not finished:
        return [("go on", f"cotrain train {resume_arguments(config.run_root, config.name)}")]
    store = uri_argument(tracker.uri)
    commands = [("look at the curves", f"cotrain ui{store}")]
    if config.drafter is not None and config.tracking.log_drafters:
        name = tracker.registered_model
        commands += [
            ("list drafter versions", f"cotrain drafters list{store}"),
            ("get the drafter for stock vLLM", f"cotrain drafters pull {name}@serving my-drafter{store}"),
            ("measure its speed", f"cotrain bench --model {config.policy.model} --drafter my-drafter"),
            ("test that it changes no output", f"cotrain verify --model {config.policy.model} --drafter my-drafter"),
        ]
    return commands
