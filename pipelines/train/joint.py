"""Joint policy-drafter training: puts the parts together, runs the controller, and cleans up whatever happens.

Modules that import torch, MLflow or transformers are imported in functions, while Ray starts.
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from cotrain.config.load import write_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import native_head, resolve_model
from cotrain.process.children import two_stage_stop
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.process.stopping import stop_at_once
from cotrain.process.threads import num_cores
from cotrain.records import Rollout, RolloutRequest
from cotrain.run.checkpoint import RunState, is_disk_full, model_fingerprints, newest_state
from cotrain.run.console import Console, aligned
from cotrain.run.mlflow_store import tracking_uri, uri_argument
from cotrain.run.provenance import write_provenance
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.run_dir import RunDir
from cotrain.tasks.base import Task, build_task, fingerprint
from cotrain.tasks.prompts import PromptOrder, encode_prompt
from drafters.files import write_json
from pipelines.plan import GIB

if TYPE_CHECKING:
    from cotrain.actors.engines import RolloutEngines
    from cotrain.loop.controller import Controller
    from cotrain.lossless.family import GreedyCheck
    from cotrain.run.tracking import Tracker
    from cotrain.transport.nodes import Nodes

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 32


def seconds_since_start() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 1)


def train(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    console = Console(sys.stdout)
    ready_s = {"command line": seconds_since_start()}

    def ready(part: str) -> None:
        ready_s[part] = seconds_since_start()  # parts of the start overlap

    with ExitStack() as stack:
        stack.enter_context(stop_at_once())
        # Roles on other nodes start in other working folders, so they need an absolute path.
        root = config.run_root.absolute() if config.cluster.address else config.run_root
        model_path = resolve_model(config.policy.model)
        task = build_task(config.task, config.seed, model_path, config.rollout.max_prompt_tokens)
        fingerprints = model_fingerprints(model_path) | {"task": fingerprint(task)}
        run_dir = RunDir(root, config.name) if resume else RunDir.create(root, config.name)
        stack.enter_context(run_dir)
        state = newest_state(run_dir, config, fingerprints)
        if state.step == 0:
            write_config(config, run_dir.config)
        run_dir.start_attempt()
        write_provenance(run_dir)
        files = (run_dir.metrics, run_dir.decisions, run_dir.stream, run_dir.steps)
        metrics, decisions, events, steps = (RowFile(file, resumed_step=state.step) for file in files)
        if task.left_out:
            events.write(state.step, {"event": "rows left out", "rows": task.left_out})
        with console.phase("start of all roles"):
            cluster, nodes = _start_cluster(config, run_dir, stack)
            ready("Ray")
            order = PromptOrder(len(task), config.rollout.prompts_per_step, config.seed)
            tracking = _start_tracking(config, run_dir, state, console, stack)
            from cotrain.loop.controller import Controller, Records
            from cotrain.loop.producer import Prompts
            from pipelines.train.roles import start_roles

            tokenizer, roles = start_roles(config, cluster, nodes, run_dir, state, ready)
            tracker = tracking.result()
            tracker.log_dataset(config.task)
            ready("MLflow")
        if config.speculates and config.rollout.speculation.adaptive:
            with console.phase("timing of draft lengths"):
                prompts = (task.prompt(i) for i in range(min(len(task), config.rollout.max_num_seqs)))
                timed = [encode_prompt(tokenizer, prompt, config.rollout.max_prompt_tokens) for prompt in prompts]
                steps.write(state.step, {"measured": roles.engines.time_draft_lengths(timed)})
        write_json(run_dir.logs / "startup.json", ready_s)
        console.say("ready after: " + ", ".join(f"{part} {seconds:.1f}s" for part, seconds in ready_s.items()))
        console.say(aligned(banner(config, run_dir, model_path, cluster.gpus, task)))
        records = Records(metrics, decisions, events, steps, tracker, console)
        controller = Controller(config, run_dir, roles, Prompts(task, order, tokenizer), records, state)
        finished = _run(controller, run_dir, stack.enter_context(two_stage_stop(console.say, "step")))
        check = _final_check(controller) if finished else None
        _finish(controller, finished, check)
        return 0 if check is None or check.passed else 1


def _start_cluster(config: RunConfig, run_dir: RunDir, stack: ExitStack) -> "tuple[Cluster, Nodes]":
    """Start or join Ray and check its nodes. Meanwhile another thread imports modules that take seconds."""
    # Ray is the one that starts in this thread, because its processes are killed when the thread that started them ends.
    importing = Thread(target=import_module, args=("pipelines.train.roles",), daemon=True)
    importing.start()
    cluster = Cluster(config, run_dir.logs, run_dir.resume)
    stack.callback(cluster.stop)
    importing.join()
    from cotrain.transport.nodes import Nodes

    nodes = Nodes(cluster, config.name)
    stack.callback(nodes.close)
    nodes.check(run_dir.config, config.policy.model)
    return cluster, nodes


def _start_tracking(
    config: RunConfig, run_dir: RunDir, state: RunState, console: Console, stack: ExitStack
) -> "Future[Tracker]":
    """Connect to MLflow in a thread, because creating a new database takes seconds. Leaving the stack ends the MLflow run."""
    from cotrain.run.tracking import Tracker

    history, policy = read_rows(run_dir.metrics) if run_dir.resumed else None, state.fingerprints.get("model", "")
    thread = ThreadPoolExecutor(1)
    future = thread.submit(Tracker, config, policy=policy, history=history, say=console.say)

    def end(*exc_info: Any) -> None:
        stopped = isinstance(exc_info[1], KeyboardInterrupt | SystemExit)  # which does not wait for a connection
        if (future.done() or not stopped) and not future.exception():
            future.result().__exit__(*exc_info)

    stack.push(end)
    return future


def _run(controller: "Controller", run_dir: RunDir, stop_requested: Callable[[], bool]) -> bool:
    """Run the controller. A failure gets advice on how to continue unless it has some, and a full disk is named as the cause."""
    try:
        return controller.run(stop_requested)
    except Exception as error:
        if "--resume" in str(error):
            raise
        failure = str(error)
        if not isinstance(error, RunFailure):
            nodes = controller.roles.nodes
            full = [folder for folder in (run_dir.path, nodes.scratch[nodes.local]) if is_disk_full(error, folder)]
            if not full:
                raise
            failure = f"disk full in step {controller.step + 1} ({full[0]}): {error}. Make room first"
        advice = f"Look into {run_dir.logs}. What was saved is whole: continue with cotrain train {run_dir.resume}"
        raise RunFailure(f"{failure}\n  {advice}") from error


def _final_check(controller: "Controller") -> "GreedyCheck | None":
    rollout, console, last = controller.config.rollout, controller.records.console, controller.last_rollouts
    if not controller.config.speculates or not last or controller.mode is not None:
        return None
    from cotrain.lossless.family import compare_greedy

    seen = {scored.rollout.prompt_id: scored.rollout.prompt_token_ids for scored in last}
    requests = [RolloutRequest(prompt_id, 0, ids, None) for prompt_id, ids in list(seen.items())[:GREEDY_PROMPTS]]
    engines, max_tokens = controller.roles.engines, min(GREEDY_TOKENS, rollout.max_new_tokens)
    with console.phase("greedy output with and without speculation", terminal_only=True):
        plain = greedy_rollouts(engines, requests, 0, max_tokens)
        speculated = greedy_rollouts(engines, requests, rollout.num_speculative_tokens, max_tokens)
        check = compare_greedy(plain, speculated, rollout.dtype)
    console.say(f"greedy output with and without speculation: {check}")
    return check


def greedy_rollouts(
    engines: "RolloutEngines", requests: list[RolloutRequest], num_speculative_tokens: int, max_tokens: int
) -> list[Rollout]:
    """Generate greedy responses with this draft length. Afterwards the engines choose their own draft length again."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None, "max_tokens": max_tokens}
    try:
        engines.set_num_speculative_tokens(num_speculative_tokens)
        engines.reset_prefix_cache()
        return engines.generate(requests, **sampling)
    finally:
        engines.set_num_speculative_tokens(None)
        engines.reset_prefix_cache()  # what was cached without speculation has no drafter KV


def _finish(controller: "Controller", finished: bool, check: "GreedyCheck | None") -> None:
    config, run_dir, records = controller.config, controller.run_dir, controller.records
    tracker, console = records.tracker, records.console
    tracker.finish("FINISHED" if finished else "KILLED")
    if not controller.step:
        return console.say(f"\nStopped before the first step. Go on with: cotrain train {run_dir.resume}")
    from pipelines.page.record import read_run
    from pipelines.train.report import progress, run_facts

    run = read_run(run_dir.path)
    choices = controller.roles.engines.describe_speculation() if config.speculates else []
    speculation = controller.mode or "; ".join(dict.fromkeys(choices))
    lines = run_facts(run, speculation, check.passed if check else None)
    total, saved = (
        sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / GIB
        for folder in (run_dir.path, run_dir.checkpoints)
    )
    lines |= {"": "", "run folder": f"{run_dir.path} ({total:.1f} GiB, of them {saved:.1f} of checkpoints)"}
    if page := _write_report(run_dir, console):
        lines["report"] = str(page)
    store, commands = uri_argument(tracker.uri), {}
    if not finished:
        commands["go on"] = f"cotrain train {run_dir.resume}"
    elif controller.versions.drafter and config.tracking.log_drafters:
        registered = f"{tracker.registered_model}@serving"
        lines["drafter"] = f"models:/{registered} in MLflow; serves in stock vLLM as it is"
        drafter = f"--model {config.policy.model} --drafter my-drafter"
        commands["get the drafter for stock vLLM"] = f"cotrain drafters pull {registered} my-drafter{store}"
        commands["measure its speed"] = f"cotrain bench {drafter}"
        commands["test that it changes no output"] = f"cotrain verify {drafter}"
    commands["look at the curves"] = f"cotrain ui{store}"
    head = f"{'Done' if finished else 'Stopped'}: {progress(run, config.steps)}"
    console.say("\n".join(["", head, aligned(lines, wraps=True), "", "Next:", aligned(commands)]))


def _write_report(run_dir: RunDir, console: Console) -> Path | None:
    try:
        from pipelines.train.report import write_run_report

        return write_run_report(run_dir.path).with_suffix(".html")
    except Exception as error:  # a figure or the disk may fail, but the run is finished and saved
        console.say(f"report not written ({error}); try again with: cotrain report {run_dir.path}")
        return None


def banner(
    config: RunConfig, run_dir: RunDir, model_path: Path, gpus: Mapping[str, float], task: Task
) -> dict[str, str]:
    """What starts, where, and how to watch it, by label. gpus: GPUs of each role."""
    rollouts = f"{config.rollout.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples"
    notes = {"run": str(run_dir.path), "policy": config.policy.model, "steps": f"{config.steps} ({rollouts})"}
    if config.drafter is not None:
        model = config.drafter.model
        first = config.drafter.init or ("the policy's own head" if native_head(model_path) else model.first_weights)
        notes["drafter"] = f"{model.type} from {first}"
    if history := config.rollout.history:
        notes["history"] = f"finished rollouts are drafted from, up to {history.max_bytes / 2**20:g} MiB in each engine"
        if config.steps * config.rollout.prompts_per_step <= len(task):
            notes["history"] += f"; none of the {len(task):,} prompts comes twice, so only responses to others help"
    if task.left_out:
        notes["left out"] = task.left_out
    notes["devices"] = f"CPU, {num_cores()} threads for each process"
    if gpus:
        notes["devices"] = f"{sum(gpus.values()):g} GPUs for {len(gpus)} processes"
    notes["mlflow"] = f"cotrain ui{uri_argument(tracking_uri(config))}"
    logs, metrics = shlex.quote(str(run_dir.logs)), shlex.quote(str(run_dir.metrics))
    return notes | {"log": f"tail -f {logs}/*.log", "metrics": f"tail -f {metrics}"}
