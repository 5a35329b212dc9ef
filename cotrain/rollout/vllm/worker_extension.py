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
from cotrain.rollout.vllm import cpu as vllm_compat
from cotrain.rollout.vllm import hooks as vllm_hooks
from cotrain.rollout.vllm import weight_transfer
from cotrain.rollout.vllm import weights as vllm_weights
from cotrain.transport.features import write_shard
from cotrain.transport.payload import digest

APPLIED_PATCHES = vllm_compat.apply_patches()
weight_transfer.register()


class CotrainWorker:
    """Mixed into vLLM's worker: feature tap, drafting switches, proof of what is served."""

    def cotrain_start(self, tap: bool) -> dict[str, Any]:
        """Install the hooks; tap: whether there is a drafter whose features are tapped. Reports the worker."""
        die_with_parent()
        leave_terminal_group()
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._cotrain_reads_prompts = False
        self._cotrain_tap_seconds = 0.0
        self._cotrain_step_times: list[dict[str, float]] = []
        if tap:
            self._cotrain_tap = FeatureTap()
            vllm_hooks.hook_drafting(
                runner,
                self._cotrain_on_verified,
                lambda: self._cotrain_tap.is_recording,
                lambda: self._cotrain_reads_prompts,
            )
        return {"pid": os.getpid(), "patches": APPLIED_PATCHES, "threads": torch.get_num_threads()}

    def _cotrain_on_verified(self, rows_of_step: Callable[[], vllm_hooks.VerifiedRows]) -> None:
        started = time.perf_counter()
        step = rows_of_step()
        for i, request_id in enumerate(step.request_ids):
            rows = slice(step.starts[i], step.starts[i + 1])
            if rows.stop > rows.start:
                name = vllm_hooks.request_id_of(request_id)
                self._cotrain_tap.record(name, step.positions[rows], step.token_ids[rows], step.hidden[rows])
        self._cotrain_tap_seconds += time.perf_counter() - started

    def cotrain_start_tapping(self, requests: dict[str, tuple[int, int, int]]) -> None:
        """Start a step of the tap, until the features are taken. requests: request id -> fields of its TapRequest."""
        self._cotrain_tap_seconds = 0.0
        self._cotrain_tap.start({name: TapRequest(*fields) for name, fields in requests.items()})

    def cotrain_take_features(
        self, rollouts: list[tuple[str, list[int], int]], path: str, metadata: dict[str, str]
    ) -> dict[str, float]:
        """Write the features of finished rollouts, (request id, all token ids, prompt length) each, as one shard."""
        started = time.perf_counter()
        final_size = self.model_runner.model_config.get_hidden_size()  # type: ignore[attr-defined]
        taken = [(r, self._cotrain_tap.take(r[0], r[1], final_size)) for r in rollouts]
        kept = [(r, features) for r, features in taken if features is not None]
        stats = {
            "num_rollouts": len(kept),
            "record_seconds": self._cotrain_tap_seconds,
        }
        self._cotrain_tap.clear()
        if not kept:
            return stats | {"num_tokens": 0, "num_holes": 0, "write_seconds": 0.0}
        lengths = torch.tensor([0, *(len(r[1]) for r, _ in kept)])
        masks = torch.cat([f.mask for _, f in kept])
        write_shard(
            path,
            token_ids=torch.cat([torch.tensor(r[1], dtype=torch.int64) for r, _ in kept]),
            aux_hidden=torch.cat([f.aux_hidden for _, f in kept]),
            final_hidden=torch.cat([f.final_hidden for _, f in kept]),
            feature_mask=masks,
            offsets=lengths.cumsum(0),
            prompt_lengths=torch.tensor([r[2] for r, _ in kept]),
            metadata=metadata,
        )
        holes = int((~masks).sum()) - len(kept)
        return stats | {
            "num_tokens": int(masks.numel()),
            "num_holes": holes,
            "write_seconds": time.perf_counter() - started,
        }

    def cotrain_read_prompts(self, on: bool) -> None:
        """Whether the drafter goes over prompts at draft length 0, to be ready when the length changes."""
        self._cotrain_reads_prompts = on

    def cotrain_clear_drafter_cache(self) -> None:
        """Forget all keys and values of the drafter."""
        vllm_hooks.clear_drafter_cache(self.model_runner)  # type: ignore[attr-defined]

    def cotrain_set_draft_sample_method(self, method: str) -> None:
        """Greedy or probabilistic drafting from the next step on."""
        vllm_hooks.set_draft_sample_method(self.model_runner, method)  # type: ignore[attr-defined]

    def cotrain_time_phases(self) -> None:
        """Time the phases of every step from now on."""
        self._cotrain_step_times = vllm_hooks.time_phases(self.model_runner)  # type: ignore[attr-defined]

    def cotrain_take_step_times(self) -> list[dict[str, float]]:
        """Hand over the rows so far, and forget them."""
        rows = list(self._cotrain_step_times)
        self._cotrain_step_times.clear()
        return rows

    def cotrain_served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Checksums of the named tensors exactly as served (packed matrices are read back whole)."""
        model = self.get_draft_model() if draft else self.get_model()  # type: ignore[attr-defined]
        served = vllm_weights.served_tensors(model, names)
        return {name: digest(tensor) for name, tensor in served.items()}
