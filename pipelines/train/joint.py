"""Joint policy-drafter training: puts the parts together, runs the controller, and cleans up whatever happens."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread

from cotrain.config.schema import RunConfig
from cotrain.models.loading import native_head, resolve_model
from cotrain.process.children import two_stage_stop
from cotrain.process.cluster import Cluster
from cotrain.process.stopping import stop_at_once
from cotrain.process.threads import num_cores
from cotrain.run.checkpoint import model_fingerprints, newest_state
from cotrain.run.console import Console, aligned
from cotrain.run.mlflow_store import page_of, tracking_uri
from cotrain.run.provenance import begin_attempt
from cotrain.run.rows import RowFile
from cotrain.run.run_dir import RunDir
from cotrain.tasks.base import build_task, fingerprint
from cotrain.tasks.prompts import PromptOrder
from pipelines.preflight import read_command_line


def main(arguments: Sequence[str], command: str = "train") -> int:
    """Run `cotrain train`, or `cotrain init`, to its end or until asked to stop. Returns the exit status."""
    if (checked := read_command_line(command, arguments)) is None:
        return 0
    config, resume = checked
    console = Console(sys.stdout)
    with ExitStack() as stack:
        last_lines = stack.enter_context(stop_at_once())
        # Roles on other nodes start in other working folders, so they need an absolute path.
        root = config.run_root.absolute() if config.cluster.address else config.run_root
        model_path = resolve_model(config.policy.model)
        task = build_task(config.task, config.seed, model_path, config.rollout.max_prompt_tokens)
        fingerprints = model_fingerprints(model_path) | {"task": fingerprint(task)}
        run_dir = stack.enter_context(RunDir(root, config.name, resume))
        last_lines.append(run_dir.stopped)
        state = newest_state(run_dir, config, fingerprints)
        begin_attempt(run_dir, config, state.step)
        files = (run_dir.metrics, run_dir.decisions, run_dir.stream, run_dir.steps)
        metrics, decisions, events, steps = (RowFile(file, resumed_step=state.step) for file in files)
        with console.phase("start of all roles"):
            # Importing torch, MLflow and transformers takes seconds. Ray starts in this thread meanwhile, because its processes
            # are killed when the thread that started them ends.
            importing = Thread(target=import_module, args=("pipelines.train.run",), daemon=True)
            importing.start()
            cluster = Cluster(config, run_dir.logs, run_dir.resume)
            stack.callback(cluster.stop)
            policy = config.policy.model_copy(update={"weight_transfer": cluster.weight_transfer})
            config = config.model_copy(update={"policy": policy})
            importing.join()
            from pipelines.train import run

            nodes = run.Nodes(cluster, config.name)
            stack.callback(nodes.close)
            nodes.check(run_dir.config, config.policy.model)
            opened = lambda: stack.enter_context(run.open_tracker(config, run_dir, state, console))
            tokenizer, roles, tracker = run.start_roles(config, cluster, nodes, run_dir, state, opened)
        roles.engines.set_num_speculative_tokens(None)  # the engines choose, if they may
        console.say(aligned(banner(config, run_dir, model_path, cluster.gpus)))
        order = PromptOrder(len(task), config.rollout.prompts_per_step, config.seed)
        records = run.Records(metrics, decisions, events, steps, tracker, console)
        controller = run.Controller(config, run_dir, roles, run.Prompts(task, order, tokenizer), records, state)
        finished = run.run_steps(controller, stack.enter_context(two_stage_stop(console.say, "step")))
        check = run.final_check(controller) if finished else None
        run.finish(controller, finished, check)
        return 0 if check is None or check.passed else 1


init = partial(main, command="init")


def banner(config: RunConfig, run_dir: RunDir, model_path: Path, gpus: Mapping[str, float]) -> dict[str, str]:
    """What starts, where, and how to watch it, by label. gpus: GPUs of each role."""
    rollouts = f"{config.rollout.prompts_per_step} prompts x {config.rollout.samples_per_prompt} samples"
    notes = {"run": str(run_dir.path), "policy": config.policy.model, "steps": f"{config.steps} ({rollouts})"}
    if config.drafter is not None:
        model = config.drafter.model
        new = "layers of the policy" if model.type == "draft_model" else "random init"
        first = config.drafter.init or ("the policy's own head" if native_head(model_path) else new)
        notes["drafter"] = f"{model.type} from {first}"
    if history := config.rollout.history:
        notes["history"] = f"finished rollouts are drafted from, up to {history.max_bytes / 2**20:g} MiB in each engine"
    notes["devices"] = f"CPU, {num_cores()} threads for each process"
    if gpus:
        notes["devices"] = f"{sum(gpus.values()):g} GPUs for {len(gpus)} processes"
        notes["policy updates"] = config.policy.weight_transfer
    notes["mlflow"] = page_of(tracking_uri(config))
    logs, metrics = shlex.quote(str(run_dir.logs)), shlex.quote(str(run_dir.metrics))
    return notes | {"log": f"tail -f {logs}/*.log", "metrics": f"tail -f {metrics}"}
