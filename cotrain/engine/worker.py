"""What a RolloutEngine can call in each of vLLM's workers. Imports vLLM late, because other processes name the methods."""

import resource
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cotrain.engine.hooks import DraftingHook, sample_plainly_without_drafts
from cotrain.engine.interface import wrap
from cotrain.engine.model_runner_v2 import SpeculatorHook
from cotrain.engine.served import ServedWeights
from cotrain.engine.tap_admission import TapRequest
from cotrain.process.children import follow_parent
from cotrain.transport.features import FeatureRecord, write_records
from drafters.base import SamplingParams

if TYPE_CHECKING:
    from cotrain.engine.history import HistoryDrafting


class EngineWorker:
    """The feature tap, drafting, and updates and proof of the served weights, on one tensor-parallel rank.

    Methods without a docstring call one of ServedWeights, HistoryDrafting, SuffixIndex or vLLM's worker: see there.
    """

    hook: DraftingHook | SpeculatorHook  # where there is a drafter
    history: "HistoryDrafting"  # where there is a history
    weights: dict[bool, ServedWeights]  # True holds the drafter's, False the policy's

    def __init__(self, worker: Any):
        self.worker = worker
        self._writer, self._shards = ThreadPoolExecutor(1, "cotrain-features"), dict[str, Future[dict[str, float]]]()

    def start(self, scratch: str, has_drafter: bool, history: tuple[int, bool] | None, adapters: bool = False) -> None:
        """Get ready for updates, and hook into drafting where there is a drafter or a history.

        scratch: the engine's folder, where the ranks keep the last good weights; on the file system that updates are sent over.
        history: (most bytes of the index of rollouts, whether its drafts are drawn), or None without an index. adapters: the policy
        trains some.
        """
        follow_parent()
        self._has_history = history is not None
        worker, runner = self.worker, self.worker.model_runner
        if runner.device.type == "cpu" and runner.model_config.enforce_eager:
            # vLLM compiles some small functions of the sampler all the same, in the first step, which takes 3 s.
            torch.compiler.set_stance("force_eager")
        target, kept = worker.get_model(), Path(scratch) / "kept" / f"rank_{worker.rank}"
        policy = ServedWeights(target, worker.model_config, kept / "target", adapters=adapters)
        if worker.vllm_config.load_config.load_format != "dummy":  # which has no checkpoint
            policy.check_loading()
        self.weights = {False: policy}
        if worker.speculative_config is not None and not worker.use_v2_model_runner:
            wrap(runner, "_sample", sample_plainly_without_drafts)
        if has_drafter:
            self.hook = (SpeculatorHook if worker.use_v2_model_runner else DraftingHook)(runner)
            config = worker.speculative_config.draft_model_config
            self.weights[True] = ServedWeights(worker.get_draft_model(), config, kept / "drafter", target)
        if history is not None:
            from cotrain.engine.history import HistoryDrafting  # and numba, which takes seconds
            from drafters.suffix.index import SuffixIndex

            max_bytes, draws = history
            index = SuffixIndex(max_bytes, seed=worker.vllm_config.model_config.seed)
            self.history = HistoryDrafting(runner, index, draws)

    def check(self, draft: bool, path: str, digests: dict[str, str]) -> None:
        self.weights[draft].check(path, digests)

    def update(self, draft: bool, path: str, digests: dict[str, str], turn: int) -> None:
        self.weights[draft].update(path, digests, turn)

    def compare(self, draft: bool, path: str, digests: dict[str, str], turn: int) -> None:
        self.weights[draft].compare(path, digests, turn)

    def undo_drafter_update(self) -> None:
        self.weights[True].undo()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.worker.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self.worker.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.worker.update_weights(update_info)

    def finish_weight_update(self) -> None:
        self.worker.finish_weight_update()

    def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Return checksums of the named tensors of the last update; empty for tensors that a rank does not serve exactly so.

        Tensors that a drafter shares with the policy are compared with the policy's.
        """
        good = self.weights[False].last_good() | self.weights[draft].last_good()
        return self.weights[draft].digests({name: good[name] for name in names})

    def add_history(self, rollouts: list[tuple[list[int], list[int]]]) -> None:
        self.history.add(rollouts)

    def history_size(self) -> tuple[int, int]:
        """Return the tokens and bytes of the index."""
        return self.history.index.num_tokens, self.history.index.num_bytes

    def save_history(self, path: str) -> None:
        """Write the index that the engine drafts from."""
        if self.worker.rank == 0:  # all ranks have the same index
            self.history.index.save(path)

    def load_history(self, path: str) -> None:
        """Draft from the index that `save_history` wrote."""
        self.history.index.load(path)

    def forget_history(self) -> None:
        self.history.index.forget()

    def set_policy_version(self, policy_version: int) -> None:
        """Stamp what the tap records from now on with this policy version."""
        if True in self.weights:
            self.hook.tap.policy_version = policy_version

    def start_tapping(self, requests: dict[str, TapRequest], max_bytes: int) -> None:
        """Tap these requests until their features are taken. Every rank computes the whole hidden states, so rank 0 taps alone."""
        if self.worker.rank == 0:  # msgpack made lists
            self.hook.tap.start({name: TapRequest(*fields) for name, fields in requests.items()}, max_bytes)

    def begin_trajectories(self, names: list[str]) -> None:
        """Expect further turns of these requests."""
        self.hook.trajectories.update(names)

    def end_trajectories(self, names: list[str], lost: list[str]) -> None:
        """Expect no turn of these requests any more, and forget what the tap has of those that are lost."""
        self.hook.trajectories.difference_update(names)
        if self.worker.rank == 0 and lost:
            self.hook.ring.beside(partial(self.hook.tap.drop, lost))

    def begin_features(
        self,
        rollouts: dict[str, tuple[list[int], list[float], int, int, int, int, list[tuple[int, int]]]],
        path: str,
        sampling: dict[str, Any],
        aux_layers: list[int],
    ) -> None:
        """Begin to write the features of finished rollouts as one shard, in a thread beside the engine's steps.

        rollouts: request id -> (all token ids, log-probabilities of the response, and of its FeatureRecord: prompt_length,
        policy_version, earlier_tokens, drafter_version, turns). sampling: fields of SamplingParams.
        """
        hook, common = self.hook, (SamplingParams(**sampling), aux_layers)
        stats, hook.tap_seconds = {"record_seconds": hook.tap_seconds}, 0.0

        def take() -> list[FeatureRecord]:
            stats["num_dropped"], hook.tap.dropped = hook.tap.dropped, 0
            hook.tap.share({name: (np.array(of[0]), of[3]) for name, of in rollouts.items() if of[6]})
            taken = (hook.take(n, *of[:4], *common, of[4], of[5], of[6]) for n, of in rollouts.items())
            return [record for record in taken if record is not None]

        self._shards[path] = self._writer.submit(_written, path, hook.ring.beside(take), stats)

    def features_written(self, path: str) -> dict[str, float] | None:
        """Return statistics of a shard that `begin_features` has begun, or None while it is written. Raises what writing raised."""
        done = path in self._shards and self._shards[path].done()
        return self._shards.pop(path).result() if done else None

    def read_prompts(self, on: bool) -> None:
        """Set whether the drafter reads prompts at draft length 0, to be ready when the length changes."""
        if True in self.weights:
            self.hook.reads_prompts = on

    def set_draft_sample_method(self, method: str) -> None:
        """Draft with this method, greedy or probabilistic, from the next step on."""
        draws = method == "probabilistic"
        if True in self.weights:
            self.hook.set_draws(draws)
        if self._has_history:
            self.history.draws = draws

    def peak_memory(self) -> tuple[int, int]:
        """Return the most bytes that this process has held of the host's memory, and of its GPU's in PyTorch's allocator."""
        on_gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, on_gpu

    def clear_drafter_cache(self) -> None:
        """Zero the keys and values of the drafter's attention layers. Call it only while no request is computed.

        NaN that a drafter has written stays there for the next one: even a masked position contributes 0 * NaN = NaN.
        """
        for module in self.worker.get_draft_model().modules():
            if hasattr(module, "kv_cache"):
                module.kv_cache.zero_()


def _written(path: str, taken: Future[list[FeatureRecord]], stats: dict[str, float]) -> dict[str, float]:
    """Write a shard of what is taken from the tap. Returns the statistics with those of the shard."""
    if records := taken.result():
        write_records(path, records)
    return stats | {
        "num_rollouts": len(records),
        "num_tokens": sum(record.num_tokens for record in records),
        "num_holes": sum(int((~record.feature_mask).sum()) - 1 for record in records),  # the last token is no hole
        "num_bytes": Path(path).stat().st_size if records else 0,
    }
