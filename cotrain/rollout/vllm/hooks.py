"""Hooks into vLLM's model runner (0.32, V1): what drafting sees and does, and what it costs.

Like cpu.py and weights.py, it touches vLLM's internals in the worker. All hooks end with the V1 model runner; the V2
runner's place for them is speculator.propose.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cotrain.rollout.vllm.planned_scheduling import computes_prompts
from cotrain.rollout.vllm.unread_rows import StepRows, UnreadRows, UnreadRun, pieces

MOST_UNREAD_BYTES = 64 * 2**20
"""Most bytes of hidden states that wait for the drafter while speculation is off; it then reads them in one pass."""


def hook_drafting(
    model_runner: Any,
    on_verified: Callable[[Callable[[], StepRows]], None],
    is_tapping: Callable[[], bool],
    reads_prompts: Callable[[], bool],
) -> None:
    """Wrap the runner's drafting: offer the target's hidden states to `on_verified`, and make draft length 0 free.

    The rows offered are on the CPU; a row is the aux layers, ascending, and the final hidden state after the norm.

    vLLM runs the drafter's first pass over the step's tokens even for draft length 0, to keep its KV cache complete.
    Here 0 means "speculation is off", and off has to cost nothing: the pass is left out of steps that only decode.
    Where `reads_prompts`, speculation may come back in mid-request. Steps that compute prompts then keep the pass, and
    the rows of the others are put aside and read before the next pass, all at once: a drafter with gaps in what it
    attends to accepts little.
    """
    propose = model_runner.propose_draft_token_ids
    unread = UnreadRows()

    def hooked(scheduler_output: Any, sampled: Any, sampling_metadata: Any, hidden: Tensor, *rest: Any) -> Any:
        _, aux_hidden, _, attention, _ = rest
        if is_tapping():
            on_verified(lambda: _rows(model_runner, attention, [*(aux_hidden or ()), hidden], "cpu"))
        off = scheduler_output.num_spec_tokens_to_schedule == 0 and torch.is_tensor(sampled)
        reading = reads_prompts()
        leave_out = off and not (reading and computes_prompts(scheduler_output))
        if not reading:
            unread.clear()
        elif unread and not (leave_out and unread.num_bytes < MOST_UNREAD_BYTES):
            _read_late(model_runner, unread, attention, sampling_metadata)
        if not leave_out:
            return propose(scheduler_output, sampled, sampling_metadata, hidden, *rest)
        if reading:  # sampled [R, 1 or more] is -1 after a rejection
            rows = _rows(model_runner, attention, aux_hidden or [hidden], hidden.device)
            unread.add(rows, num_valid=(sampled >= 0).sum(1))
        return sampled.new_empty((sampled.shape[0], 0))

    model_runner.propose_draft_token_ids = hooked


def _rows(model_runner: Any, attention: Any, hidden: list[Tensor], device: Any) -> StepRows:
    """The rows of a step in memory of their own, with the tensors of the list side by side."""
    request_ids = list(model_runner.input_batch.req_ids)
    starts = attention.query_start_loc_cpu[: len(request_ids) + 1].tolist()  # there may be padding after them
    total = starts[-1]
    return StepRows(
        request_ids,
        starts,
        model_runner._get_positions(total)[starts[:-1]].tolist(),
        model_runner.input_ids.gpu[:total].to(device, copy=True),
        torch.cat([h[:total] for h in hidden], dim=-1).to(device),
    )


def _read_late(model_runner: Any, unread: UnreadRows, attention: Any, sampling_metadata: Any) -> None:
    """Let the drafter read what waits of the requests of this step, up to the step's own rows.

    A draft length of 0 makes vLLM's propose run the first pass alone, which fills the drafter's KV cache.
    """
    drafter = model_runner.drafter
    request_ids = model_runner.input_batch.req_ids
    *starts, total = attention.query_start_loc_cpu[: len(request_ids) + 1].tolist()
    first_tokens = model_runner.input_ids.gpu[starts]
    runs = unread.take(request_ids, model_runner._get_positions(total)[starts].tolist())
    for group in pieces(runs, drafter.max_num_tokens):
        positions = torch.cat([torch.arange(r.first_position + s.start, r.first_position + s.stop) for r, s in group])
        following = [r.token_ids[s.stop] if s.stop < len(r.token_ids) else first_tokens[r.request] for r, s in group]
        drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=torch.cat([r.token_ids[s] for r, s in group]),
            target_positions=positions.to(first_tokens.device),
            target_hidden_states=torch.cat([r.hidden[s] for r, s in group]),
            next_token_ids=torch.stack(following),
            token_indices_to_sample=None,
            common_attn_metadata=_attention_of(group, positions, attention, drafter.block_size),
            sampling_metadata=sampling_metadata,
        )


def _attention_of(group: list[tuple[UnreadRun, slice]], positions: Tensor, attention: Any, block_size: int) -> Any:
    """vLLM's CommonAttentionMetadata for earlier rows of the requests of a step; positions [N] on the CPU."""
    device = attention.seq_lens.device
    lengths = torch.tensor([s.stop - s.start for _, s in group])
    ends = torch.tensor([r.first_position + s.stop for r, s in group], dtype=torch.int32)
    query_starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    blocks = attention.block_table_tensor[[r.request for r, _ in group]]
    owner = torch.repeat_interleave(torch.arange(len(group)), lengths)
    slots = blocks[owner.to(device), (positions // block_size).to(device)].long() * block_size
    return attention.replace(
        query_start_loc=query_starts.to(device),
        query_start_loc_cpu=query_starts,
        seq_lens=ends.to(device),
        num_reqs=len(group),
        num_actual_tokens=len(positions),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=blocks,
        slot_mapping=slots + (positions % block_size).to(device),
        positions=None,
        is_prefilling=None,
        seq_lens_cpu_upper_bound=ends,
        logits_indices_padded=None,
        num_logits_indices=None,
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


PHASES = ("worker", "verify", "sample", "draft", "draft_model")


def time_phases(model_runner: Any) -> list[dict[str, float]]:
    """Time every step from now on. The list returned grows by one row a step, and may be cleared between steps.

    A row holds the number of requests, whether prompts were prefilled (1.0 or 0.0), the start on the worker's clock,
    and seconds: worker (all of the step inside this process), verify (target forward and head), sample (rejection
    sampling and log-probs), draft (proposing), draft_model (forward passes and heads within draft).
    It is meant for CPUs: GPU kernels run after the call returns.
    """
    rows: list[dict[str, float]] = []

    def timed(owner: Any, name: str, phase: str) -> None:
        call = getattr(owner, name)

        def timed_call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **kwargs)
            if rows:
                rows[-1][phase] += time.perf_counter() - started
            return result

        setattr(owner, name, timed_call)

    draft_model: Any = getattr(getattr(model_runner, "drafter", None), "model", None)
    # With a draft vocabulary of its own, the head is used without compute_logits (see cpu.py).
    own_head = hasattr(draft_model, "draft_id_to_target_id")
    head = (draft_model.logits_processor, "forward") if own_head else (draft_model, "compute_logits")
    for owner, name, phase in (
        (model_runner, "execute_model", "worker"),
        (model_runner, "sample_tokens", "worker"),
        (model_runner, "_model_forward", "verify"),
        (model_runner.model, "compute_logits", "verify"),
        (model_runner, "_sample", "sample"),
        (model_runner, "propose_draft_token_ids", "draft"),
        (draft_model, "forward", "draft_model"),
        (draft_model, "combine_hidden_states", "draft_model"),
        (*head, "draft_model"),
    ):
        if hasattr(owner, name):
            timed(owner, name, phase)

    execute = model_runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        row = {"start": time.perf_counter(), "requests": len(scheduler_output.num_scheduled_tokens)}
        rows.append(row | {"prefill": float(computes_prompts(scheduler_output))} | dict.fromkeys(PHASES, 0.0))
        return execute(scheduler_output, *args, **kwargs)

    model_runner.execute_model = execute_model
    return rows


def request_id_of(internal_id: str) -> str:
    """The caller's request id: vLLM appends -<random> to it."""
    return internal_id.rsplit("-", 1)[0]
