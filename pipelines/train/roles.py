"""Starts the roles of a run side by side and brings them to one version. Importing this module takes seconds."""

from collections.abc import Callable
from typing import Any

from cotrain.actors.drafter import start_drafter
from cotrain.actors.engines import RolloutEngines
from cotrain.actors.policy import start_policy
from cotrain.actors.rewards import Rewards
from cotrain.config.schema import RunConfig
from cotrain.loop.controller import HISTORY, POLICY_FILE
from cotrain.loop.reactor import Reactor
from cotrain.loop.roles import Roles
from cotrain.process.cluster import Cluster
from cotrain.publish.publisher import DRAFTER_FILE, Publisher, publisher_spec
from cotrain.run.checkpoint import RunState
from cotrain.run.mlflow_store import tracking_uri
from cotrain.run.registry import first_drafter
from cotrain.run.run_dir import RunDir
from cotrain.tasks.prompts import load_tokenizer
from cotrain.transport.nodes import Nodes
from cotrain.weights.versions import CurrentWeights


def start_roles(
    config: RunConfig, cluster: Cluster, nodes: Nodes, run_dir: RunDir, state: RunState, ready: Callable[[str], None]
) -> tuple[Any, Roles]:
    """Start the roles of a run that continues from `state`. Returns the policy's tokenizer and the roles.

    `ready` is called with the name of each ready part. The drafter starts first, because the engines need its folder.
    """
    versions, drafter, serving = state.versions, None, None
    current = CurrentWeights(versions, config.stream.max_policy_lag)
    model_path = nodes.model_path
    reactor, rewards = Reactor(cluster, config.cluster.hang_after_s), Rewards(cluster, nodes, config)
    engines = RolloutEngines(cluster, nodes, config, current, reactor.add)
    if config.drafter is not None:
        init = first_drafter(tracking_uri(config), config.drafter.init, model_path, run_dir.path / "drafter_init")
        drafter = start_drafter(cluster, nodes, config, init)
        if state.step:
            drafter.load(run_dir.checkpoint(state.step) / "drafter")
        serving = drafter.serving()
        # Written again on a resume too, because a run that was killed may have left half of it.
        drafter.save_checkpoint(run_dir.drafter(versions.drafter), versions.drafter)
        ready("drafter")
    loading = engines.start(serving, state.step, run_dir.drafter(versions.drafter))
    policy = start_policy(cluster, nodes, config)
    engines.receive_from(policy)
    tokenizer = load_tokenizer(model_path)
    ready("tokenizer")
    if state.step:
        policy.load(run_dir.checkpoint(state.step) / "policy")
    payload = policy.write_payload(nodes.scratch[policy.node] / POLICY_FILE)
    ready("policy")
    if drafter is not None:
        drafter.finish(drafter.begin_set_target_weights(nodes.bring(payload.path, drafter.node), versions.policy))
    cluster.get(loading)
    if versions.policy:
        engines.update_policy(payload, versions.policy)
    history = run_dir.checkpoint(state.step) / HISTORY
    if config.rollout.history is not None and state.step and history.is_file():
        engines.load_history(history)
    ready("engine")
    publisher = None
    if drafter is not None:
        scratch = nodes.scratch[drafter.node]
        current.record_drafter(drafter.write_payload(scratch / DRAFTER_FILE, versions.drafter), versions.drafter)
        publisher = Publisher(publisher_spec(config), drafter, engines, scratch, current)
    return tokenizer, Roles(engines, rewards, policy, drafter, publisher, reactor, nodes, current)
