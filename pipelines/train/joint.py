"""Joint policy-drafter training: puts the parts together, runs the controller, and cleans up whatever happens."""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from cotrain.config.load import write_config
from cotrain.config.schema import RunConfig
from cotrain.controller import Controller, Prompts, Records, Roles
from cotrain.lossless.greedy_check import GreedyCheck, check_greedy
from cotrain.models.loading import native_head, resolve_model
from cotrain.process.cluster import Cluster, Placement, place
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.process.stop_signal import two_stage_stop
from cotrain.records import RolloutRequest, Versions
from cotrain.roles.drafter import DrafterTraining
from cotrain.roles.engines import PolicyRanks, RolloutEngines, engine_specs
from cotrain.roles.publisher import Publisher
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
from cotrain.run.store_uri import uri_argument
from cotrain.run.tracking import Tracker
from cotrain.tasks.base import build_task
from cotrain.tasks.prompt_order import PromptSampler
from cotrain.tasks.prompts import PromptEncoder
from drafters.base import Serving
from pipelines.preflight import tap_note
from pipelines.train.report import write_run_report

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 32


def train(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    started = time.monotonic()
    console = Console(sys.stdout)
    with ExitStack() as stack:
        stop = stack.enter_context(two_stage_stop(console.say, "step"))
        run_dir = RunDir.open(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        with console.phase("model and task"):
            model_path = resolve_model(config.policy.model)
            task = build_task(config.task, config.seed)
            encoder = _prompt_encoder(config, model_path)
            fingerprints = model_fingerprints(model_path)
        state, checkpoint = _saved_state(config, run_dir, fingerprints) if resume else (None, None)
        if state is None:
            write_config(config, run_dir.config)
        run_dir.start_attempt()
        write_provenance(run_dir)
        order = PromptSampler(len(task), config.rollout.prompts_per_step, config.seed)
        if state is None:
            state = RunState(0, Versions(0, 0), order.state(), config.model_dump(mode="json"), fingerprints)
        order.restore(state.task_position)
        step = state.step
        metrics = stack.enter_context(MetricsWriter(run_dir.metrics, resumed_step=step))
        decisions = stack.enter_context(DecisionLog(run_dir.path / FILE, resumed_step=step))
        with console.phase("MLflow"):
            tracker = stack.enter_context(
                Tracker(
                    config,
                    run_id=state.tracking_run_id,
                    history=read_metrics(run_dir.metrics),
                    say=console.say,
                )
            )
        scratch = stack.enter_context(scratch_folder(config.name))
        cluster = Cluster(config.cluster, run_dir.logs, run_dir.resume, config.cluster.hang_after_s)
        stack.callback(cluster.stop)
        placement = place(config, cluster.num_gpus)
        with console.phase("policy learner, drafter trainer and rollout engine"):
            roles = _start_roles(
                config, cluster, placement, run_dir, model_path, scratch, tracker.uri, state, checkpoint
            )
        if config.drafter is not None and config.rollout.speculation.adaptive:
            with console.phase("timing of draft lengths"):
                timed = [encoder.encode(task.prompt(i)) for i in range(min(len(task), config.rollout.max_num_seqs))]
                roles.engines.time_draft_lengths(timed)
        own_head = native_head(model_path) is not None
        tap = tap_note(config, model_path)
        console.banner(config, run_dir, _devices(config, placement, cluster), tracker.ui_hint(), own_head, tap)
        records = Records(metrics, decisions, tracker, console)
        controller = Controller(config, run_dir, roles, Prompts(task, order, encoder), records, state)
        controller.stop_requested = stop
        finished = _run(controller, run_dir)
        speculation = roles.engines.describe_speculation() if config.drafter else None
        check = _final_check(config, controller, console) if finished else None
        if not finished:
            tracker.finish("KILLED")
        else:
            tracker.finish()
        console.summary(
            config,
            run_dir,
            read_metrics(run_dir.metrics),
            RunSummary(
                seconds=time.monotonic() - started,
                stopped_early=not finished,
                greedy_identical=check.passed if check else None,
                speculation=speculation if controller.mode is None else controller.mode,
                drafter_uri=_drafter_uri(config, tracker, controller),
                next_commands=_next_commands(config, tracker, finished),
                report=_write_report(run_dir, console),
            ),
        )
        return 0 if check is None or check.passed else 1


def _run(controller: Controller, run_dir: RunDir) -> bool:
    """Controller.run; a failure that does not say so itself is told how to go on."""
    try:
        return _run_on_a_disk(controller, run_dir)
    except RunFailure as failure:
        if "--resume" in str(failure):
            raise
        raise RunFailure(
            f"{failure}\n  Look into {run_dir.logs}. What was saved is whole: continue with cotrain train "
            f"{run_dir.resume}"
        ) from failure


def _run_on_a_disk(controller: Controller, run_dir: RunDir) -> bool:
    """Controller.run; raises RunFailure for a disk that is full, whatever library or process has noticed it."""
    try:
        return controller.run()
    except (DiskFullError, RunFailure):
        raise
    except Exception as error:
        full = [folder for folder in (run_dir.path, controller.roles.scratch) if is_disk_full(error, folder)]
        if not full:
            raise
        raise RunFailure(f"disk full in step {controller.step + 1} ({full[0]}): {error}. Make room first") from error


def _prompt_encoder(config: RunConfig, model_path: Path) -> PromptEncoder:
    from transformers import AutoTokenizer

    return PromptEncoder(AutoTokenizer.from_pretrained(model_path), config.rollout.max_prompt_tokens)


def _saved_state(
    config: RunConfig, run_dir: RunDir, fingerprints: dict[str, str]
) -> tuple[RunState | None, Path | None]:
    checkpoint = latest_checkpoint(run_dir)
    if checkpoint is None:
        discard_newer(run_dir, 0, 0)
        return None, None
    state = load_state(checkpoint)
    check_resume(config, fingerprints, state)
    discard_newer(run_dir, state.step, state.versions.drafter)
    return state, checkpoint


def _start_roles(
    config: RunConfig,
    cluster: Cluster,
    placement: Placement,
    run_dir: RunDir,
    model_path: Path,
    scratch: Path,
    tracking_uri: str,
    state: RunState,
    checkpoint: Path | None,
) -> Roles:
    """Start the learners, let the drafter write its first folder, start the engines on it, bring all to one version."""
    policy = PolicyRanks(cluster, config, model_path, placement)
    versions = state.versions
    drafter: DrafterTraining | None = None
    drafter_folder: Path | None = None
    serving: Serving | None = None
    if config.drafter is not None:
        init_folder = first_drafter(tracking_uri, config.drafter.init, model_path, run_dir.path / "drafter_init")
        drafter = DrafterTraining(cluster, config, model_path, init_folder, placement)
        if checkpoint is not None:
            drafter.load(checkpoint / "drafter")
        drafter_folder, serving = run_dir.drafter(versions.drafter), drafter.serving
        # Written anew on a resume too: a run that was killed may have left half of it.
        drafter.save_checkpoint(drafter_folder, versions.drafter)
    specs = engine_specs(config, model_path, drafter_folder, serving, scratch, versions, state.step)
    engines = RolloutEngines(cluster, config, specs, placement)
    policy.wait_until_started()
    if checkpoint is not None:
        policy.load(checkpoint / "policy")
    payload = policy.write_payload(scratch / "policy.safetensors", config.rollout.dtype)
    if drafter is not None:
        drafter.set_target_weights(payload, versions.policy)
    engines.wait_until_started()
    if versions.policy:
        engines.update_policy(payload, versions.policy)
    publisher = None
    if drafter is not None:
        sent = drafter.write_payload(scratch / "drafter.safetensors", versions.drafter)
        publisher = Publisher(config, drafter, engines, scratch, sent, versions)
    return Roles(engines, policy, drafter, publisher, scratch)


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


def _write_report(run_dir: RunDir, console: Console) -> Path | None:
    try:
        return write_run_report(run_dir.path)
    except Exception as error:  # whatever a figure or a disk does, the run behind it is finished and saved
        console.say(f"report not written ({error}); try again with: cotrain report {run_dir.path}")
        return None


def _devices(config: RunConfig, placement: Placement, cluster: Cluster) -> dict[str, str]:
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
