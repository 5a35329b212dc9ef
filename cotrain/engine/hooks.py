"""A hook into the drafting of vLLM's model runner V1: it feeds the tap, and makes draft length 0 free."""

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cotrain.engine.interface import computes_prompts
from cotrain.engine.tap import FeatureTap
from cotrain.engine.tap_ring import TapRing
from cotrain.transport.features import FeatureRecord
from drafters.base import SamplingParams


class Rows(NamedTuple):
    """What the target computed of one request at n successive positions."""

    request: str
    first_position: int
    token_ids: Tensor  # [n]
    hidden: Tensor  # [n, W]

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.first_position + len(self.hidden)


def leading_up_to(step: Sequence[Rows], waiting: Sequence[Rows]) -> list[Rows]:
    """Return the waiting rows that lead up to the rows of a step without a gap, in one piece for each request.

    The token that follows is added, so that there is one token more than hidden states. A request that is computed again
    after a preemption or an update of the policy needs only what lies before its new first row.
    """
    runs = defaultdict[str, list[Rows]](list)
    for rows in waiting:
        run = runs[rows.request]
        if run and run[-1].end != rows.first_position:
            run.clear()
        run.append(rows)
    found = []
    for rows in step:
        run = runs[rows.request]
        if run and run[0].first_position < rows.first_position <= run[-1].end:
            length = rows.first_position - run[0].first_position
            token_ids = torch.cat([part.token_ids for part in run])[:length]
            hidden = torch.cat([part.hidden for part in run])[:length]
            followed = torch.cat([token_ids, rows.token_ids[:1]])
            found.append(Rows(rows.request, run[0].first_position, followed, hidden))
    return found


def between_turns(unread: Sequence[Rows], trajectories: Collection[str], most: int) -> list[Rows]:
    """Return the rows of these trajectories, which are in no step now, and of them the newest `most` at most."""
    waiting = [rows for rows in unread if rows.request in trajectories]
    left = [*accumulate(len(rows.hidden) for rows in reversed(waiting))]
    return waiting[len(waiting) - bisect_right(left, most) :]


def sample_plainly_without_drafts(sample: Callable[..., Any], logits: Any, drafts: Any) -> Any:
    """Let a step in which no request has draft tokens use the sampler of an engine that does not speculate.

    vLLM's rejection sampler does all its work for such a step too, which takes a quarter of the step for 16 requests of
    SmolLM2-135M on two cores. On a CPU it also fails there with top-k set, which ends the engine.
    """
    return sample(logits, drafts if drafts is not None and drafts.max_spec_len else None)


class TapHook:
    """What the hooks into vLLM's two model runners have in common: the tap, and finding the rows of each request in a step."""

    propose: Any
    no_drafts: Any

    def __init__(
        self, model_runner: Any, name_of: Callable[[str], str] | None = None, guard: Callable[..., Any] | None = None
    ):
        """name_of: maps vLLM's id of a request to its name in the tap; None takes the caller's own id for that.

        guard: calls `record` and `propose`, and returns None where one of them fails; None calls them as they are.
        """
        self.tap = FeatureTap()
        self.tap_seconds = 0.0
        self._name_of = name_of or request_id_of
        self.ring = TapRing(self.tap, self._name_of)
        self._guard = guard or (lambda hook, *args, **options: hook(*args, **options))
        self.reads_prompts = False
        self.trajectories = set[str]()  # names of requests that have further turns
        self.draft_length: int | None = None
        """Most draft tokens of a request after this step, set where the runner is not told; None takes vLLM's own number."""
        self._runner = model_runner

    def draft(self, *args: Any, **options: Any) -> Any:
        """Take the place of vLLM's function: return what `propose` does, or no drafts where the guard returns None."""
        drafts = self._guard(self.propose, *args, **options)
        return self.no_drafts(*args, **options) if drafts is None else drafts

    def take(
        self, name: str, token_ids: list[int], log_probs: Sequence[float], prompt_length: int, version: int,
        sampling: SamplingParams, aux_layers: Sequence[int], earlier_tokens: int, drafter_version: int,
        turns: Sequence[Sequence[int]] = (),
    ) -> FeatureRecord | None:  # fmt: skip
        """Return what the tap has of a request that has ended, or None. For TapRing.beside.

        log_probs: of the response's tokens, or none. version: the policy's. turns: see FeatureRecord. Log-probabilities of earlier segments are left out, because
        the rows of their tokens may have been computed again, by this policy.
        """
        tokens, final_size = torch.tensor(token_ids), self._runner.model_config.get_hidden_size()
        taken = self.tap.take(name, tokens, version)
        if taken is None:
            return None
        hidden, mask = taken
        rows = (tokens, hidden[:, :-final_size], hidden[:, -final_size:], mask)
        unknown, own = [math.nan] * (prompt_length + earlier_tokens), list(log_probs[earlier_tokens:])
        last = earlier_tokens, drafter_version, torch.tensor(unknown + own) if log_probs else None
        parts = tuple((start, end) for start, end in turns)
        record = FeatureRecord(*rows, prompt_length, version, sampling, tuple(aux_layers), *last, turns=parts)
        if record.log_probs is not None:
            record.log_probs[~record.response_mask] = math.nan
        return record

    def record(self, hidden: list[Tensor], batch: Any) -> None:
        """Give the tap the rows of a step, which it gets beside the next steps. batch: what `_layout` reads."""
        started = time.perf_counter()
        self.ring.add(*self._layout(batch), hidden)
        self.tap_seconds += time.perf_counter() - started

    def _layout(self, batch: Any) -> tuple[list[str], np.ndarray, Tensor, Tensor]:
        """Return a step's request ids, the rows where each begins and the last ends, and all rows' positions and token ids."""
        raise NotImplementedError


class DraftingHook(TapHook):
    """Replaces the runner's propose_draft_token_ids.

    vLLM runs the drafter's first pass over the step's tokens even for draft length 0, to keep its KV cache complete. Here 0
    means "speculation is off", and off has to cost nothing, so the pass is left out. With `reads_prompts`, speculation may
    come back in the middle of a request. Steps that compute prompts then keep the pass, and the rows of the other steps are
    put aside and read before the next pass, because few drafts are accepted from a drafter with gaps in what it attends to. They
    are read before as well when no more would fit into one pass. Between two turns a trajectory is in no step, and its rows wait.
    """

    def __init__(self, model_runner: Any, *options: Any):
        super().__init__(model_runner, *options)
        self._unread, self._num_unread = list[Rows](), 0  # rows put aside, and the most rows of a pass that reads them
        self._propose, model_runner.propose_draft_token_ids = model_runner.propose_draft_token_ids, self.draft

    def set_draws(self, draws: bool) -> None:
        """Draw draft tokens from the next step on, or take the likeliest."""
        self._runner.drafter._enable_probabilistic_draft_probs = draws

    def no_drafts(self, scheduler_output: Any, sampled: Any, *rest: Any) -> Any:
        """Return what the runner takes for no drafts: lists, which it does not copy, or [R, 0]. sampled: tokens [R, 1 or more]."""
        runner = self._runner
        if not runner.use_async_scheduling:
            return [[] for _ in range(len(sampled))]
        # The next step takes last tokens and numbers of new tokens from the device, where vLLM's own function leaves them.
        discarded = runner.discard_request_mask.gpu
        last = runner.drafter.prepare_next_token_ids_padded(sampled, runner.requests, runner.input_batch, discarded)
        runner._copy_valid_sampled_token_count(*last)
        return sampled.new_empty((sampled.shape[0], 0))

    def propose(self, scheduler_output: Any, sampled: Any, sampling_metadata: Any, hidden: Tensor, *rest: Any) -> Any:
        """Stand in for vLLM's propose_draft_token_ids."""
        _, aux_hidden, _, attention, _ = rest
        if self.tap.requests:
            self._guard(self.record, [*(aux_hidden or ()), hidden], attention)
        off = scheduler_output.num_spec_tokens_to_schedule == 0 and torch.is_tensor(sampled)
        leave_out = off and not (self.reads_prompts and computes_prompts(scheduler_output))
        drafter, num_rows = self._runner.drafter, scheduler_output.total_num_scheduled_tokens
        num_rows += drafter.net_num_new_slots_per_request * len(scheduler_output.num_scheduled_tokens)
        if not leave_out or self._num_unread + num_rows > drafter.max_num_tokens:
            unread, self._unread, self._num_unread = self._unread, [], 0
            if unread and self.reads_prompts:
                self._read_late(unread, hidden, attention, sampling_metadata)
        if not leave_out:
            return self._propose(scheduler_output, sampled, sampling_metadata, hidden, *rest)
        if self.reads_prompts:
            self._num_unread += num_rows
            rows_of_step = self._rows(attention, aux_hidden or [hidden])
            # sampled [R, 1 or more] is -1 after the last valid token. Only as many of a request's rows belong to its text.
            for rows, num_valid in zip(rows_of_step, (sampled >= 0).sum(1).tolist(), strict=False):
                token_ids, states = rows.token_ids[:num_valid], rows.hidden[:num_valid]
                self._unread.append(Rows(rows.request, rows.first_position, token_ids, states))
        return self.no_drafts(scheduler_output, sampled)

    def _rows(self, batch: Any, hidden: list[Tensor]) -> list[Rows]:
        """Return the rows of each request of a step, as copies, with the tensors of the list side by side.

        Rejected draft tokens are among them. The tensors are the aux layers, ascending, and the final hidden state after the
        norm. CUDA graphs overwrite all of this in the next step, so it is copied on the stream that computes.
        """
        request_ids, bounds, positions, input_ids = self._layout(batch)
        starts = bounds.tolist()
        sizes, total = [end - start for start, end in pairwise(starts)], starts[-1]
        first = positions[starts[:-1]].tolist()
        token_ids = input_ids[:total].clone().split(sizes)
        states = torch.cat([h[:total] for h in hidden], dim=-1).split(sizes)
        names = map(self._name_of, request_ids)
        return [Rows(*row) for row in zip(names, first, token_ids, states, strict=True)]

    def _layout(self, batch: Any) -> tuple[list[str], np.ndarray, Tensor, Tensor]:
        """Read vLLM's CommonAttentionMetadata."""
        request_ids = self._runner.input_batch.req_ids
        starts = batch.query_start_loc_cpu[: len(request_ids) + 1].numpy()  # there may be padding after them
        return request_ids, starts, self._runner._get_positions(int(starts[-1])), self._runner.input_ids.gpu

    def _read_late(self, unread: list[Rows], hidden: Tensor, attention: Any, sampling_metadata: Any) -> None:
        """Let the drafter read the rows that were put aside of the requests of this step, up to the step's own rows.

        A draft length of 0 makes vLLM's propose run the first pass alone, which fills the drafter's KV cache. A small
        draft model reads the token that follows as well, in a row of its own.
        """
        drafter, step = self._runner.drafter, self._rows(attention, [hidden[:, :0]])
        number = {rows.request: i for i, rows in enumerate(step)}
        self._unread = between_turns(unread, self.trajectories - number.keys(), drafter.max_num_tokens // 2)
        self._num_unread = sum(len(rows.hidden) for rows in self._unread)
        if not (runs := leading_up_to(step, unread)):
            return
        blocks = attention.block_table_tensor[[number[run.request] for run in runs]]
        positions = torch.cat([torch.arange(run.first_position, run.end) for run in runs])
        drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=torch.cat([run.token_ids[:-1] for run in runs]),
            target_positions=positions.to(hidden.device),
            target_hidden_states=torch.cat([run.hidden for run in runs]),
            next_token_ids=torch.stack([run.token_ids[-1] for run in runs]),
            token_indices_to_sample=None,
            common_attn_metadata=_attention_of(runs, positions, blocks, drafter.block_size),
            sampling_metadata=sampling_metadata,
        )


def _attention_of(runs: list[Rows], positions: Tensor, blocks: Tensor, block_size: int) -> Any:
    """Return vLLM's CommonAttentionMetadata of the runs. positions [N] on the CPU, blocks [R, most blocks of a request]."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    device = blocks.device
    lengths = torch.tensor([len(run.hidden) for run in runs])
    ends = torch.tensor([run.end for run in runs], dtype=torch.int32)
    query_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    owner = torch.repeat_interleave(torch.arange(len(runs)), lengths)
    slots = blocks[owner.to(device), (positions // block_size).to(device)].long() * block_size
    return CommonAttentionMetadata(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=ends.to(device),
        num_reqs=len(runs),
        num_actual_tokens=len(positions),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=blocks,
        slot_mapping=slots + (positions % block_size).to(device),
        seq_lens_cpu_upper_bound=ends,
    )


def request_id_of(internal_id: str) -> str:
    """Return the caller's request id, to which vLLM has appended -<random>."""
    return internal_id.rsplit("-", 1)[0]
