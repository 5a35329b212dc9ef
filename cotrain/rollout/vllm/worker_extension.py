"""What cotrain adds to each vLLM worker. vLLM imports this module in every worker before the model loads.

Methods carry the prefix `cotrain_`, since vLLM mixes this class into its own. They are called through `cotrain_call`, on
every tensor-parallel rank.
"""

import operator
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config

from cotrain.process.children import follow_parent
from cotrain.rollout.tap_admission import TapRequest
from cotrain.rollout.vllm import cpu
from cotrain.rollout.vllm.hooks import DraftingHook, sample_plainly_without_drafts
from cotrain.rollout.vllm.interface import wrap
from cotrain.rollout.vllm.weight_transfer import ServedWeights, of_all_ranks
from cotrain.rollout.vllm.weights import differing_tensors
from cotrain.transport.features import write_records
from cotrain.transport.payload import digest
from drafters.base import SamplingParams

if TYPE_CHECKING:
    from cotrain.rollout.vllm.history import HistoryDrafting

cpu.apply_patches()


class CotrainWorker:
    """Mixed into vLLM's worker: the feature tap, switches for drafting, and proof of which weights are served."""

    _cotrain_hook: DraftingHook
    _cotrain_history: "HistoryDrafting | None" = None
    _cotrain_weights: dict[bool, ServedWeights]
    """True holds the drafter's served weights, False the policy's."""

    def cotrain_call(self, method: str, args: list[Any]) -> tuple[Any, str | None]:
        """Call one of the methods below. Returns (result, None), or (None, the exception's text).

        If an exception left one rank, vLLM would stop reading, and take the other ranks' answers for those to its next call.
        """
        try:
            return getattr(self, method)(*args), None
        except Exception as error:
            traceback.print_exc()
            return None, str(error)

    def cotrain_start(self, keep_folder: str, has_drafter: bool, history: tuple[int, bool] | None) -> None:
        """Get ready for updates, and hook into drafting where there is a drafter or a history.

        keep_folder: where the ranks keep the last good weights, on the file system that updates are sent over. history:
        (most bytes of the index of rollouts, whether its drafts are drawn), or None without an index.
        """
        follow_parent()
        worker: Any = self
        runner = worker.model_runner
        if runner.device.type == "cpu" and runner.model_config.enforce_eager:
            # vLLM compiles some small functions of the sampler all the same, in the first step, which takes 3 s.
            torch.compiler.set_stance("force_eager")
        target, kept = worker.get_model(), Path(keep_folder) / f"rank_{worker.rank}"
        self._cotrain_weights = {False: ServedWeights(target, worker.model_config, kept / "target")}
        if worker.speculative_config is not None:
            wrap(runner, "_sample", sample_plainly_without_drafts)
        if has_drafter:
            self._cotrain_hook = DraftingHook(runner)
            config = worker.speculative_config.draft_model_config
            self._cotrain_weights[True] = ServedWeights(worker.get_draft_model(), config, kept / "drafter", target)
        if history is not None:
            # It imports numba, and vLLM's CPU build does not start where numba was imported before.
            from cotrain.rollout.vllm.history import HistoryDrafting
            from drafters.suffix.index import SuffixIndex

            max_bytes, draws = history
            index = SuffixIndex(max_bytes, seed=worker.vllm_config.model_config.seed)
            self._cotrain_history = HistoryDrafting(runner, index, is_alone=not has_drafter, draws=draws)

    def cotrain_weights(self, draft: bool, action: str, *args: Any) -> None:
        """Call a method of ServedWeights: check, update, compare or undo."""
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
            getattr(self._cotrain_weights[draft], action)(*args)

    def cotrain_set_policy_version(self, policy_version: int) -> None:
        """Stamp what the tap records from now on with this policy version."""
        if True in self._cotrain_weights:
            self._cotrain_hook.tap.policy_version = policy_version

    def cotrain_history(self, action: str, *args: Any) -> Any:
        """Call a method of the HistoryDrafting, or of its index as "index.forget", "index.load" and "index.save".

        All ranks have the same index, so rank 0 alone saves it.
        """
        if action != "index.save" or self.rank == 0:  # type: ignore[attr-defined]
            return operator.attrgetter(action)(self._cotrain_history)(*args)

    def cotrain_start_tapping(self, requests: dict[str, tuple[str, int, int]]) -> None:
        """Tap these requests until their features are taken. requests: request id -> fields of its TapRequest.

        Every rank computes the whole hidden states, so rank 0 taps alone.
        """
        if self.rank == 0:  # type: ignore[attr-defined]
            self._cotrain_hook.tap.start({name: TapRequest(*fields) for name, fields in requests.items()})

    def cotrain_take_features(
        self, rollouts: dict[str, tuple[list[int], int, int, int, int]], path: str, shared: dict[str, Any]
    ) -> dict[str, float]:
        """Write the features of finished rollouts as one shard.

        rollouts: request id -> (all token ids, prompt length, policy version, tokens before the last segment, drafter
        version). shared: sampling and aux_layers of their FeatureRecords.
        """
        hook, common = self._cotrain_hook, (SamplingParams(**shared["sampling"]), shared["aux_layers"])
        taken = (hook.take(name, *rollout[:3], *common, *rollout[3:]) for name, rollout in rollouts.items())
        records = [record for record in taken if record is not None]
        seconds, hook.tap_seconds = hook.tap_seconds, 0.0
        if records:
            write_records(path, records)
        return {
            "num_rollouts": len(records),
            "num_tokens": sum(record.num_tokens for record in records),
            "num_holes": sum(int((~record.feature_mask).sum()) - 1 for record in records),  # the last token is no hole
            "num_bytes": Path(path).stat().st_size if records else 0,
            "record_seconds": seconds,
        }

    def cotrain_read_prompts(self, on: bool) -> None:
        """Set whether the drafter reads prompts at draft length 0, to be ready when the length changes."""
        self._cotrain_hook.reads_prompts = on

    def cotrain_clear_drafter_cache(self) -> None:
        """Zero the keys and values of the drafter's attention layers. Call it only while no request is computed.

        NaN that a drafter has written stays there for the next one: even a masked position contributes 0 * NaN = NaN.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        for name in runner.drafter._draft_attn_layer_names:
            runner.compilation_config.static_forward_context[name].kv_cache.zero_()

    def cotrain_set_draft_sample_method(self, method: str) -> None:
        """Draft with this method, greedy or probabilistic, from the next step on."""
        draws = method == "probabilistic"
        if True in self._cotrain_weights:
            self.model_runner.drafter._enable_probabilistic_draft_probs = draws  # type: ignore[attr-defined]
        if self._cotrain_history is not None:
            self._cotrain_history.draws = draws

    def cotrain_served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        """Return checksums of the named tensors of the last update; empty for tensors that a rank does not serve exactly so.

        Tensors that a drafter shares with the policy are compared with the policy's.
        """
        weights = self._cotrain_weights[draft]
        good = self._cotrain_weights[False].last_good() | weights.last_good()
        good = {name: good[name] for name in names}
        differing = differing_tensors(weights.model, good)
        own = {name: "" if name in differing else digest(tensor) for name, tensor in good.items()}
        of_ranks = of_all_ranks(own)
        return {name: known if all(of[name] == known for of in of_ranks) else "" for name, known in own.items()}
