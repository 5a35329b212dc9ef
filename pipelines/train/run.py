"""The parts of a run that take seconds to import: starts its roles, runs its steps, and tells how it ended."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotrain.actors.drafter import start_drafter
from cotrain.actors.engines import HISTORY, RolloutEngines
from cotrain.actors.environments import start_environments
from cotrain.actors.policy import start_policy
from cotrain.actors.rewards import Rewards, start_scorers
from cotrain.config.schema import AUTO, RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.worker import EngineWorker
from cotrain.loop.controller import POLICY_FILE, Controller
from cotrain.loop.controller import Records as Records
from cotrain.loop.producer import Prompts as Prompts
from cotrain.loop.reactor import Reactor
from cotrain.loop.roles import Roles
from cotrain.loop.validation import Validation
from cotrain.lossless.family import GreedyCheck, compare_greedy
from cotrain.policy.learner import PolicyLearner
from cotrain.process.cluster import Cluster
from cotrain.process.failures import RunFailure
from cotrain.publish.publisher import DRAFTER_FILE, Publisher, PublisherSpec
from cotrain.records import Rollout, RolloutRequest
from cotrain.run.checkpoint import RunState, is_disk_full
from cotrain.run.console import Console, aligned
from cotrain.run.mlflow_store import page_of, tracking_uri
from cotrain.run.registry import first_drafter, pull_starts
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.tasks.held_out import HeldOut
from cotrain.tasks.prompts import load_tokenizer
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.nodes import Nodes
from cotrain.weights.versions import CurrentWeights
from pipelines.page.record import read_run
from pipelines.train.report import progress, run_facts, write_run_report

GREEDY_PROMPTS = 8
GREEDY_TOKENS = 32


def open_tracker(config: RunConfig, run_dir: RunDir, state: RunState, console: Console) -> Tracker:
    """Connect to MLflow, which takes seconds if the database is new. Leaving the tracker ends the MLflow run."""
    history, policy = read_rows(run_dir.metrics) if run_dir.resumed else None, state.fingerprints.get("model", "")
    return Tracker(config, policy=policy, history=history, say=console.say)


def start_roles(
    config: RunConfig, cluster: Cluster, nodes: Nodes, run_dir: RunDir, state: RunState, tracker: Callable[[], Tracker]
) -> tuple[Any, Roles, Tracker]:
    """Start the roles of a run that continues from `state`, side by side. Returns the policy's tokenizer, roles and tracker.

    The drafter starts first, because the engines need its folder. `tracker` is called while the engines load.
    """
    versions, drafter, serving, publisher, validation = state.versions, None, None, None, None
    checkpoint = run_dir.checkpoint(state.step)
    current = CurrentWeights(versions, config.stream.max_policy_lag)
    reactor, rewards = Reactor(cluster, config.cluster.hang_after_s), start_scorers(cluster, nodes, config)
    engines = RolloutEngines(cluster, nodes, config, current, reactor.add)
    if config.drafter is not None:
        if config.drafter.init == AUTO and not state.step:
            pull_starts(tracking_uri(config), run_dir.starts)
        init = first_drafter(tracking_uri(config), config.drafter.init, nodes.model_path, run_dir.path / "drafter_init")
        drafter = start_drafter(cluster, nodes, config, init)
        if state.step:
            drafter.call(DrafterTrainer.load, checkpoint / "drafter")
        serving = drafter.call(DrafterTrainer.serving)
        # Written again on a resume too, because a run that was killed may have left half of it.
        drafter.call(DrafterTrainer.save_checkpoint, run_dir.drafter(versions.drafter), versions.drafter)
    engines.tools = start_environments(cluster, nodes, config)
    loading = engines.start(serving, state.step, run_dir.drafter(versions.drafter))
    policy = start_policy(cluster, nodes, config)
    engines.receive_from(policy)
    tokenizer = load_tokenizer(nodes.model_path)
    if (held_out := config.held_out) is not None:
        prompts = HeldOut(config, tokenizer)
        played = start_environments(cluster, nodes, held_out, "validation", prompts.sampling)
        validation = Validation(config, prompts, played or Rewards(cluster, nodes, held_out, "validation"), reactor)
    if state.step:
        policy.call(PolicyLearner.load, checkpoint / "policy")
    # A policy that does not train is in the model's folder.
    payload = policy.write_payload(nodes.scratch[policy.node] / POLICY_FILE) if config.policy.train else None
    if drafter is not None:
        whole = (
            payload if config.policy.lora is None else None
        )  # adapters leave embedding and head as the model has them
        head = nodes.bring(whole.path, drafter.node) if whole else nodes.model_path
        drafter.call(DrafterTrainer.set_target_weights, head, versions.policy)
    opened = tracker()
    cluster.get(loading)
    if payload is not None and versions.policy:
        engines.update_policy(payload, versions.policy)
    if config.rollout.history is not None and state.step and (checkpoint / HISTORY).is_file():
        engines.call_all(RolloutEngine.on_workers, EngineWorker.load_history, str(checkpoint / HISTORY))
    if drafter is not None and config.drafter is not None:
        scratch = nodes.scratch[drafter.node]
        current.record_drafter(drafter.write_payload(scratch / DRAFTER_FILE, versions.drafter), versions.drafter)
        spec = PublisherSpec(config.drafter, config.steps)
        publisher = Publisher(spec, drafter, engines, scratch, current)
    return tokenizer, Roles(engines, rewards, policy, drafter, publisher, reactor, nodes, current, validation), opened


def run_steps(controller: Controller, stop_requested: Callable[[], bool]) -> bool:
    """Run the controller. A failure gets advice on how to continue unless it has some, and a full disk is named as the cause."""
    gc.freeze()  # Python would search all that was imported for garbage again and again, 0.2 s each time
    try:
        return controller.run(stop_requested)
    except Exception as error:
        if "--resume" in str(error):
            raise
        failure, run_dir, nodes = str(error), controller.run_dir, controller.roles.nodes
        if not isinstance(error, RunFailure):
            folders = (run_dir.path, nodes.scratch[nodes.local])
            full = next((folder for folder in folders if is_disk_full(error, folder)), None)
            if full is None:
                raise
            failure = f"disk full in step {controller.step + 1} ({full}): {error}. Make room first"
        advice = f"Look into {run_dir.logs}. What was saved is whole: continue with cotrain train {run_dir.resume}"
        raise RunFailure(f"{failure}\n  {advice}") from error
    finally:
        gc.unfreeze()  # extension modules complain at the end of the process about what is still there


def final_check(controller: Controller) -> GreedyCheck | None:
    """Compare greedy output with and without speculation on prompts of the last step, or of the last turn of a trajectory for each;
    None without speculation."""
    rollout, console, last = controller.config.rollout, controller.records.console, controller.last_rollouts
    if not controller.config.speculates or not last or controller.mode is not None:
        return None
    seen = {scored.rollout.prompt_id: scored.rollout.turns()[-1].prompt_token_ids for scored in last}
    requests = [RolloutRequest(prompt_id, 0, ids, None) for prompt_id, ids in list(seen.items())[:GREEDY_PROMPTS]]
    engines, max_tokens = controller.roles.engines, min(GREEDY_TOKENS, rollout.max_new_tokens)
    with console.phase("greedy output with and without speculation", terminal_only=True):
        plain = greedy_rollouts(engines, requests, 0, max_tokens)
        speculated = greedy_rollouts(engines, requests, rollout.num_speculative_tokens, max_tokens)
        check = compare_greedy(plain, speculated, rollout.dtype)
    console.say(f"greedy output with and without speculation: {check}")
    return check


def greedy_rollouts(
    engines: RolloutEngines, requests: list[RolloutRequest], num_speculative_tokens: int, max_tokens: int
) -> list[Rollout]:
    """Generate greedy responses with this draft length. Afterwards the engines choose their own draft length again."""
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "seed": None, "max_tokens": max_tokens}
    try:
        engines.set_num_speculative_tokens(num_speculative_tokens)
        engines.call_all(RolloutEngine.reset_prefix_cache)
        return engines.generate(requests, **sampling)
    finally:
        engines.set_num_speculative_tokens(None)
        engines.call_all(RolloutEngine.reset_prefix_cache)  # what was cached without speculation has no drafter KV


def finish(controller: Controller, finished: bool, check: GreedyCheck | None) -> None:
    """Close the MLflow run, write the report, and print what the run did and what to do next."""
    config, run_dir, records = controller.config, controller.run_dir, controller.records
    tracker, console = records.tracker, records.console
    tracker.finish("FINISHED" if finished else "KILLED")
    if not controller.step:
        return console.say(f"\nStopped before the first step. Go on with: cotrain train {run_dir.resume}")
    run = read_run(run_dir.path)
    choices = controller.roles.engines.call_all(RolloutEngine.describe_speculation) if config.speculates else {}
    speculation = controller.mode or "; ".join(dict.fromkeys(choices.values()))
    lines = run_facts(run, speculation, check.passed if check else None) | {"": "", "run folder": str(run_dir.path)}
    if page := _write_report(run_dir, console):
        lines["report"] = str(page)
    commands = {} if finished else {"go on": f"cotrain train {run_dir.resume}"}
    if finished and config.drafter is not None and (check is None or check.passed):
        folder = run_dir.end_with_drafter(controller.versions.drafter)
        lines["drafter"] = f"{folder}; serves in stock vLLM as it is"
        if controller.versions.drafter and config.tracking.log_drafters:
            lines["registered"] = f"models:/{tracker.registered_model}@serving in MLflow"
        if not config.policy.train:
            commands["train with it"] = f"cotrain train CONFIG drafter.init={folder}"
        drafter = f"--model {config.policy.model} --drafter {folder}"
        commands["measure its speed"] = f"cotrain bench {drafter}"
        commands["test that it changes no output"] = f"cotrain verify {drafter}"
    commands["look at the curves"] = page_of(tracker.uri)
    head = f"{'Done' if finished else 'Stopped'}: {progress(run, config.steps)}"
    console.say("\n".join(["", head, aligned(lines, wraps=True), "", "Next:", aligned(commands)]))


def _write_report(run_dir: RunDir, console: Console) -> Path | None:
    try:
        return write_run_report(run_dir.path).with_suffix(".html")
    except Exception as error:  # a figure or the disk may fail, but the run is finished and saved
        console.say(f"report not written ({error}); try again with: cotrain report {run_dir.path}")
        return None
