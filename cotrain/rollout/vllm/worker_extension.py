"""What cotrain adds to each vLLM worker. vLLM imports this module in every worker before the model loads.

Methods are called through collective_rpc and carry the prefix `cotrain_`, since vLLM mixes this class into its own.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from cotrain.process.orphans import die_with_parent, leave_terminal_group
from cotrain.rollout.tap import FeatureTap
from cotrain.rollout.tap_admission import TapRequest
from cotrain.rollout.vllm import cpu, hooks, weight_transfer, weights
from cotrain.rollout.vllm.unread_rows import StepRows
from cotrain.transport.features import FeatureRecord, write_records
from cotrain.transport.payload import digest
from drafters.base import SamplingParams

APPLIED_PATCHES = cpu.apply_patches()
weight_transfer.register()


class CotrainWorker:
    """Mixed into vLLM's worker: feature tap, drafting switches, proof of what is served."""

    def cotrain_start(self, tap: bool) -> dict[str, Any]:
        """Install the hooks; tap: whether there is a drafter whose features are tapped. Reports the worker."""
        die_with_parent()
        leave_terminal_group()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.device.type == "cpu" and runner.model_config.enforce_eager:
            # vLLM compiles some small functions of the sampler all the same, in the first step, which takes 3 s.
            torch.compiler.set_stance("force_eager")
        self._cotrain_reads_prompts = False
        self._cotrain_tap_seconds = 0.0
        self._cotrain_step_times: list[dict[str, float]] = []
        if tap:
            self._cotrain_tap = FeatureTap()
            hooks.hook_drafting(
                runner,
                self._cotrain_on_verified,
                lambda: self._cotrain_tap.is_recording,
                lambda: self._cotrain_reads_prompts,
            )
        return {"pid": os.getpid(), "patches": APPLIED_PATCHES, "threads": torch.get_num_threads()}

    def _cotrain_on_verified(self, rows_of_step: Callable[[], StepRows]) -> None:
        started = time.perf_counter()
        step = rows_of_step()
        for i, (request_id, position) in enumerate(zip(step.request_ids, step.first_positions, strict=True)):
            rows = slice(step.starts[i], step.starts[i + 1])
            name = hooks.request_id_of(request_id)
            self._cotrain_tap.record(name, position, step.token_ids[rows], step.hidden[rows])
        self._cotrain_tap_seconds += time.perf_counter() - started

    def cotrain_start_tapping(self, requests: dict[str, tuple[int, int, int]]) -> None:
        """Start a step of the tap, until the features are taken. requests: request id -> fields of its TapRequest."""
        self._cotrain_tap_seconds = 0.0
        self._cotrain_tap.start({name: TapRequest(*fields) for name, fields in requests.items()})

    def cotrain_take_features(
        self,
        rollouts: dict[str, tuple[list[int], int]],
        path: str,
        policy_version: int,
        sampling: dict[str, Any],
        aux_layers: list[int],
    ) -> dict[str, float]:
        """Write the features of finished rollouts as one shard. rollouts: request id -> (all token ids, prompt length)."""
        final_size = self.model_runner.model_config.get_hidden_size()  # type: ignore[attr-defined]
        records = []
        for name, (token_ids, prompt_length) in rollouts.items():
            tokens = torch.tensor(token_ids)
            taken = self._cotrain_tap.take(name, tokens)
            if taken is not None:
                hidden, mask = taken
                aux, final = hidden[:, :-final_size], hidden[:, -final_size:]
                shared = (prompt_length, policy_version, SamplingParams(**sampling), tuple(aux_layers))
                records.append(FeatureRecord(tokens, aux, final, mask, *shared))
        self._cotrain_tap.start({})
        if records:
            write_records(path, records)
        return {
            "num_rollouts": len(records),
            "num_tokens": sum(record.num_tokens for record in records),
            "num_holes": sum(int((~record.feature_mask).sum()) - 1 for record in records),  # the last token is none
            "record_seconds": self._cotrain_tap_seconds,
        }

    def cotrain_read_prompts(self, on: bool) -> None:
        """Whether the drafter goes over prompts at draft length 0, to be ready when the length changes."""
        self._cotrain_reads_prompts = on

    def cotrain_clear_drafter_cache(self) -> None:
        """Zero the keys and values of the drafter's attention layers. Valid while no request runs.

        What a drafter wrote that computed NaN stays there for the next one: a masked position counts 0 * NaN = NaN.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        for name in runner.drafter._draft_attn_layer_names:
            runner.compilation_config.static_forward_context[name].kv_cache.zero_()

    def cotrain_set_draft_sample_method(self, method: str) -> None:
        """Greedy or probabilistic drafting from the next step on."""
        self.model_runner.drafter._enable_probabilistic_draft_probs = method == "probabilistic"  # type: ignore[attr-defined]

    def cotrain_time_phases(self) -> None:
        """Time the phases of every step from now on."""
        self._cotrain_step_times = hooks.time_phases(self.model_runner)  # type: ignore[attr-defined]

    def cotrain_take_step_times(self) -> list[dict[str, float]]:
        """Hand over the rows so far, and forget them."""
        rows = list(self._cotrain_step_times)
        self._cotrain_step_times.clear()
        return rows

    def cotrain_served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Checksums of the named tensors exactly as served (packed matrices are read back whole)."""
        model = self.get_draft_model() if draft else self.get_model()  # type: ignore[attr-defined]
        return {name: digest(tensor) for name, tensor in weights.served_tensors(model, names).items()}
