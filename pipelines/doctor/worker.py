"""What `cotrain doctor` adds to the worker of its engine. vLLM imports this module by name, in the engine's process."""

from typing import Any

from safetensors.torch import load_file
from vllm.compilation.counter import compilation_counter

from cotrain.rollout.vllm import weights
from cotrain.rollout.vllm.worker_extension import CotrainWorker


class DoctorWorker(CotrainWorker):
    """A worker that can also test its read-back and record how it uses CUDA graphs."""

    _cotrain_doctor_steps: dict[int, str]

    def cotrain_doctor_read_back(self, path: str, draft: bool) -> tuple[list[str], list[str]]:
        """Compare the served weights with the file they came from, and with that file after changing one element of each tensor.

        Returns the names that differ from the file, and the names whose change was missed; both should be empty.
        """
        model, sent, changed = self._cotrain_weights[draft].model, load_file(path), load_file(path)
        for tensor in changed.values():
            tensor.view(-1)[-1] += 1
        found = weights.differing_tensors(model, changed)
        return weights.differing_tensors(model, sent), sorted(sent.keys() - set(found))

    def cotrain_doctor_watch_steps(self) -> None:
        """Record from now on the CUDA graph mode in which the target runs a step, by the number of rows of the step."""
        dispatcher = self.model_runner.cudagraph_dispatcher  # type: ignore[attr-defined]
        dispatch, self._cotrain_doctor_steps = dispatcher.dispatch, {}

        def watched(num_tokens: int, *args: Any, **options: Any) -> Any:
            mode, batch = dispatch(num_tokens, *args, **options)
            self._cotrain_doctor_steps[num_tokens] = mode.name
            return mode, batch

        dispatcher.dispatch = watched

    def cotrain_doctor_graphs(self) -> dict[str, Any]:
        """Stop recording. Returns device, graph mode, captured sizes, number of captures, and [rows, mode] of steps."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        del runner.cudagraph_dispatcher.dispatch
        config = runner.compilation_config
        return {
            "device": runner.device.type,
            "mode": config.cudagraph_mode.name,
            "sizes": list(config.cudagraph_capture_sizes or ()),
            "captured": compilation_counter.num_cudagraph_captured,
            "steps": [[rows, mode] for rows, mode in self._cotrain_doctor_steps.items()],
        }
