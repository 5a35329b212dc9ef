"""Says in words why a process of a run does not answer any more. Ray has a class of error for each cause, some with pages of text."""

import re

from ray import exceptions

MEMORY = (
    "lower policy.micro_batch_tokens, rollout.features.max_bytes or, on a CPU, rollout.vllm.kv_cache_memory_bytes, "
    "or end what else runs there"
)
NODE_GONE = re.compile(r"node (was terminated|has died|has crashed)|NodeAffinitySchedulingStrategy")


def in_words(error: exceptions.RayError) -> str:
    """Return what became of the process that was to answer, in one line, with the remedy where there is one."""
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
