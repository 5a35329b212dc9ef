"""Hooks into the model runner, with a runner that has what they read of it; the engine tests run them in vLLM."""

import time
from collections import UserList
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cotrain.engine import hooks as vllm_hooks
from cotrain.engine import tap_ring
from cotrain.engine.hooks import Rows, TapHook
from cotrain.engine.interface import wrap
from cotrain.engine.tap_admission import TapRequest
from cotrain.engine.tap_ring import TapRing
from cotrain.engine.worker import EngineWorker
from cotrain.transport.features import read_shard

AUX = [torch.randn(6, 4), torch.randn(6, 4)]  # one row of padding
HIDDEN = torch.randn(6, 4)


class Runner:
    """What the hook reads of vLLM's model runner: two requests with 3 and 2 scheduled tokens."""

    use_async_scheduling = False

    def __init__(self):
        self.input_batch = SimpleNamespace(req_ids=["b1r0-0a1b2c3d", "b1r1-4e5f6a7b"])
        self.input_ids = SimpleNamespace(gpu=torch.tensor([11, 12, 13, 21, 22, 0], dtype=torch.int32))
        self.drafted, self.drafter = [], Drafter()

    def _get_positions(self, num_tokens):
        return torch.tensor([7, 8, 9, 3, 4, 0])[:num_tokens]

    def propose_draft_token_ids(self, *arguments):
        self.drafted.append(arguments)
        return torch.tensor([[1, 2], [3, 4]])


def draft(runner: Runner, num_speculative_tokens: int, aux_hidden=AUX, verified=(2, 1), new=(), sampled=((5,), (6,))):
    """verified: draft tokens among the scheduled tokens of the two requests."""
    names = runner.input_batch.req_ids
    step = SimpleNamespace(
        total_num_scheduled_tokens=5,
        num_scheduled_tokens=dict(zip(names, (3, 2), strict=True)),
        scheduled_spec_decode_tokens={r: [0] * n for r, n in zip(names, verified, strict=True) if n},
        scheduled_new_reqs=list(new),
        num_spec_tokens_to_schedule=num_speculative_tokens,
    )
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    attention = Attention(starts, torch.zeros(2, 4, dtype=torch.int32))
    arguments = (
        step,
        torch.tensor(sampled, dtype=torch.int32),
        None,
        HIDDEN,
        HIDDEN[:2],
        aux_hidden,
        None,
        attention,
        None,
    )
    return runner.propose_draft_token_ids(*arguments), arguments


def hooked(is_tapping: bool, reads_prompts: bool = False) -> tuple[Runner, list]:
    """The runner, and the rows that the tap was given."""
    runner = Runner()
    hook = vllm_hooks.DraftingHook(runner)
    hook.reads_prompts = reads_prompts
    return runner, tapping(hook, [NAMES[i] for i in range(2 * is_tapping)])


NAMES = ("b1r0", "b1r1")
LAW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "draft_sample_method": "greedy"}


def tapping(hook: TapHook, names: Sequence[str]) -> "Tapped":
    """Let the hook tap these requests, and return the rows that the tap is given."""
    hook.tap.start({name: TapRequest(name, 10, 10) for name in names})
    rows = Tapped(hook)

    def keep(name, first, token_ids, hidden, dtype, version) -> None:
        states = torch.cat([torch.from_numpy(part.copy()).view(dtype) for part in hidden], 1)
        rows.data.append(Rows(name, first, torch.from_numpy(token_ids.copy()), states))

    hook.tap.record = keep
    return rows


def settle(ring: TapRing) -> None:
    """Wait until the tap has all rows of earlier steps. Raises what the thread has raised."""
    ring.beside(lambda: None).result()
    for waiting, _ in ring._waiting:
        waiting.result()


class Tapped(UserList):
    """Rows that the tap was given, complete whenever they are looked at."""

    def __init__(self, hook: TapHook):
        super().__init__()
        self.hook = hook

    def __len__(self) -> int:
        settle(self.hook.ring)
        return len(self.data)

    def __getitem__(self, index):
        settle(self.hook.ring)
        return self.data[index]


PROMPTS = {
    "the second request computes its prompt": {"verified": (2, 0)},
    "a new request whose prompt is in the cache but for one token": {"new": ["b1r1-4e5f6a7b"]},
}


@pytest.mark.parametrize("is_tapping", [True, False])
@pytest.mark.parametrize("step", [{}, *PROMPTS.values()], ids=["decoding", *PROMPTS])
def test_draft_length_0_runs_no_drafter(is_tapping, step):
    runner, tapped = hooked(is_tapping)
    proposed, _ = draft(runner, 0, **step)
    assert proposed == [[], []]
    assert runner.drafted == []
    assert len(tapped) == 2 * is_tapping


@pytest.mark.parametrize("step", PROMPTS.values(), ids=PROMPTS)
def test_a_drafter_that_may_be_switched_on_reads_prompts_all_the_same(step):
    runner, _ = hooked(is_tapping=False, reads_prompts=True)
    draft(runner, 0, **step)
    assert len(runner.drafted) == 1
    proposed, _ = draft(runner, 0)
    assert proposed == [[], []] and len(runner.drafted) == 1, "decoding costs nothing"


class Drafter:
    """Keeps what it was asked to read."""

    block_size, max_num_tokens = 4, 8

    def __init__(self, added_rows: int = 0):
        self.read = []
        self.net_num_new_slots_per_request = added_rows

    def propose(self, **arguments):
        self.read.append(arguments)


@dataclass
class Attention:
    """The fields of vLLM's CommonAttentionMetadata that the hook reads."""

    query_start_loc_cpu: torch.Tensor
    block_table_tensor: torch.Tensor


def decode(runner: Runner, num_speculative_tokens: int, position: int, behind: int = 3) -> None:
    """One engine step in which both requests have one row, the second some positions behind the first."""
    names = runner.input_batch.req_ids
    step = SimpleNamespace(
        total_num_scheduled_tokens=2,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[],
        num_spec_tokens_to_schedule=num_speculative_tokens,
    )
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    blocks = torch.tensor([[9, 5, 7], [4, 8, 6]], dtype=torch.int32)
    attention = Attention(starts, blocks)
    runner._get_positions = lambda n: torch.tensor([position, position - behind])[:n]
    runner.input_ids.gpu = torch.tensor([100 + position, 200 + position - behind, 0], dtype=torch.int32)
    aux = [torch.full((3, 4), float(position)), torch.full((3, 4), -float(position))]
    sampled = torch.tensor([[1], [2]], dtype=torch.int32)
    runner.propose_draft_token_ids(step, sampled, None, HIDDEN, HIDDEN[:2], aux, None, attention, None)


def test_what_was_left_out_is_read_before_the_next_draft():
    runner, _ = hooked(is_tapping=False, reads_prompts=True)
    for position in (5, 6, 7):
        decode(runner, 0, position)
    assert runner.drafter.read == [] and runner.drafted == []
    decode(runner, 3, 8)
    (late,) = runner.drafter.read
    assert late["num_speculative_tokens"] == 0
    assert late["target_token_ids"].tolist() == [105, 106, 107, 202, 203, 204]
    assert late["target_positions"].tolist() == [5, 6, 7, 2, 3, 4]
    assert late["next_token_ids"].tolist() == [108, 205]
    assert late["target_hidden_states"][:, [0, 4]].tolist() == [[p, -p] for p in (5, 6, 7, 5, 6, 7)]
    attention = late["common_attn_metadata"]
    assert attention.query_start_loc.tolist() == [0, 3, 6] and attention.seq_lens.tolist() == [8, 5]
    assert attention.slot_mapping.tolist() == [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 4 * 4 + 2, 4 * 4 + 3, 8 * 4 + 0]
    assert attention.block_table_tensor.tolist() == [[9, 5, 7], [4, 8, 6]]
    assert (attention.num_reqs, attention.num_actual_tokens, attention.max_query_len, attention.max_seq_len) == (
        2,
        6,
        3,
        8,
    )
    assert len(runner.drafted) == 1
    decode(runner, 3, 9)
    assert len(runner.drafter.read) == 1, "read once"


def test_no_more_waits_than_fits_into_one_pass():
    runner, _ = hooked(is_tapping=False, reads_prompts=True)
    for position in range(3, 9):
        decode(runner, 0, position)
    assert runner.drafted == []
    decode(runner, 1, 9)
    first, second = runner.drafter.read
    assert first["target_token_ids"].tolist() == [103, 104, 105, 106, 200, 201, 202, 203]
    assert first["next_token_ids"].tolist() == [107, 204]
    assert second["target_token_ids"].tolist() == [107, 108, 204, 205]
    assert second["next_token_ids"].tolist() == [109, 206]
    assert second["common_attn_metadata"].seq_lens.tolist() == [9, 6]


def test_room_is_left_for_the_row_that_a_draft_model_adds_to_each_request():
    runner, _ = hooked(is_tapping=False, reads_prompts=True)
    runner.drafter = Drafter(added_rows=1)
    for position in range(3, 9):
        decode(runner, 0, position)
    decode(runner, 1, 9)
    assert [len(late["target_token_ids"]) for late in runner.drafter.read] == [4, 4, 4]


def test_what_was_rejected_is_not_read():
    """Both requests verify drafts when speculation goes off: one accepts one of two, the other none of one."""
    runner, _ = hooked(is_tapping=False, reads_prompts=True)
    draft(runner, 0, sampled=[[13, 14, -1], [22, -1, -1]])
    decode(runner, 3, 9, behind=5)
    (late,) = runner.drafter.read
    assert late["target_token_ids"].tolist() == [11, 12, 21]
    assert late["target_positions"].tolist() == [7, 8, 3]


def test_nothing_waits_where_speculation_does_not_come_back():
    runner, _ = hooked(is_tapping=False, reads_prompts=False)
    decode(runner, 0, 5)
    decode(runner, 3, 6)
    assert runner.drafter.read == [] and len(runner.drafted) == 1


def test_drafting_goes_on_as_before():
    runner, _ = hooked(is_tapping=True)
    proposed, arguments = draft(runner, 2)
    assert proposed.tolist() == [[1, 2], [3, 4]]
    assert runner.drafted == [arguments]


def test_the_tap_sees_every_scheduled_row():
    runner, tapped = hooked(is_tapping=True)
    draft(runner, 2)
    one, two = tapped
    assert (one.request, one.first_position, one.token_ids.tolist()) == ("b1r0", 7, [11, 12, 13])
    assert (two.request, two.first_position, two.token_ids.tolist()) == ("b1r1", 3, [21, 22])
    assert torch.equal(torch.cat([one.hidden, two.hidden]), torch.cat([*AUX, HIDDEN], dim=1)[:5])


def test_a_drafter_without_aux_layers_is_fed_the_final_hidden_state_alone():
    runner, tapped = hooked(is_tapping=True)
    draft(runner, 2, aux_hidden=None)
    assert torch.equal(tapped[0].hidden, HIDDEN[:3])


def test_rows_do_not_change_with_the_runners_buffers():
    runner, tapped = hooked(is_tapping=True)
    gate, positions = Event(), torch.tensor([7, 8, 9, 3, 4, 0])
    runner._get_positions = lambda num_tokens: positions[:num_tokens]
    tapped.hook.ring.beside(lambda: gate.wait(10))
    _, arguments = draft(runner, 2)
    runner.input_ids.gpu.zero_()
    positions.zero_()
    arguments[-2].query_start_loc_cpu.zero_()
    gate.set()
    assert [(rows.first_position, rows.token_ids.tolist()) for rows in tapped] == [(7, [11, 12, 13]), (3, [21, 22])]


def test_rows_of_untapped_requests_are_left_out_and_a_batch_may_change():
    runner = Runner()
    hook = vllm_hooks.DraftingHook(runner)
    tapped = tapping(hook, ["b1r1"])
    draft(runner, 2)
    runner.input_batch.req_ids = runner.input_batch.req_ids[::-1]
    draft(runner, 2)
    runner.input_batch.req_ids = ["other-0", "another-1"]
    draft(runner, 2)
    assert [(rows.request, rows.first_position, rows.token_ids.tolist()) for rows in tapped] == [
        ("b1r1", 3, [21, 22]),
        ("b1r1", 7, [11, 12, 13]),
    ]


def test_a_gpu_gathers_the_rows_of_tapped_requests_in_their_order():
    hook = vllm_hooks.DraftingHook(Runner())
    hook.tap.start({name: TapRequest(name, 10, 10) for name in ("b", "d", "a")})
    hook.ring._find(["a-0", "b-0", "c-0", "d-0"])
    assert hook.ring._names == ["a", "b", "d"]
    assert hook.ring._rows(np.array([0, 3, 4, 9, 11], np.int32)).tolist() == [0, 1, 2, 3, 9, 10]


def test_a_shard_is_written_beside_the_steps_once_the_tap_has_all_rows(tmp_path):
    runner = Runner()
    worker = EngineWorker(SimpleNamespace(rank=0))
    worker.hook = hook = vllm_hooks.DraftingHook(runner)
    runner.model_config = SimpleNamespace(get_hidden_size=lambda: 4)
    gate, path = Event(), str(tmp_path / "shard")
    worker.start_tapping({name: (name, 8 - 4 * i, 9, 0.0) for i, name in enumerate(NAMES)}, 10**9)
    hook.ring.beside(lambda: gate.wait(10))
    draft(runner, 2)
    hook.tap_seconds = 0.25
    log_probs = [-0.5, -1.5, -2.5]
    finished = {"b1r0": ([*range(7), 11, 12, 13, 5], log_probs, 8, 0, 1, 0, [])}
    finished["untapped"] = [1, 2], [-1.0], 1, 0, 0, 0, []
    worker.begin_features(finished, path, LAW, [1, 2])
    for _ in range(20):
        assert worker.features_written(path) is None and not Path(path).exists(), "the step does not wait"
        time.sleep(0.01)
    gate.set()
    while (stats := worker.features_written(path)) is None:
        time.sleep(0.001)
    [one] = read_shard(path)
    assert one.token_ids.tolist() == finished["b1r0"][0] and one.feature_mask.tolist() == 7 * [False] + [True] * 3 + [
        False
    ]
    assert torch.equal(torch.cat([one.aux_hidden, one.final_hidden], 1)[7:10], torch.cat([*AUX, HIDDEN], 1)[:3])
    assert one.log_probs is not None and one.log_probs[9:].tolist() == log_probs[1:]
    assert one.log_probs[:9].isnan().all(), (
        "the first token is of an earlier segment, and its row may be of another policy"
    )
    assert stats["num_rollouts"] == 1 and stats["num_holes"] == 7 and stats["record_seconds"] == 0.25
    assert hook.tap.requests.keys() == {"b1r1"}, "it goes on"


def test_what_fails_while_a_shard_is_written_is_raised(tmp_path):
    worker = EngineWorker(SimpleNamespace(rank=0))
    worker.hook = vllm_hooks.DraftingHook(Runner())
    worker.hook.take = lambda *known: 1 / 0
    worker.begin_features({"b1r0": ([1, 2], [-1.0], 1, 0, 0, 0, [])}, "path", LAW, [1])
    with pytest.raises(ZeroDivisionError):
        while worker.features_written("path") is None:
            time.sleep(0.001)


def test_rows_carry_the_policy_version_of_their_step():
    runner = Runner()
    hook = vllm_hooks.DraftingHook(runner)
    versions, gate = [], Event()
    hook.tap.start({"b1r0": TapRequest("p", 10, 10)})
    hook.tap.record = lambda *row: (gate.wait(10), versions.append(row[-1]))
    for hook.tap.policy_version in (4, 5):
        draft(runner, 2)
    gate.set()
    settle(hook.ring)
    assert versions == [4, 5]


def test_a_tap_that_cannot_keep_up_drops_whole_rollouts(monkeypatch):
    runner = Runner()
    hook = vllm_hooks.DraftingHook(runner)
    hook.tap.start({name: TapRequest(name, 10, 10) for name in NAMES})
    gate, record = Event(), hook.tap.record
    hook.tap.record = lambda *row: (gate.wait(10), record(*row))
    monkeypatch.setattr(tap_ring, "MOST_WAITING_BYTES", 2 * 3 * 6 * 4 * 4)
    draft(runner, 2)
    draft(runner, 2)
    runner.input_batch.req_ids = ["b1r0-0a1b2c3d", "untapped-0"]
    draft(runner, 2)
    gate.set()
    settle(hook.ring)
    assert hook.tap.dropped == 1 and hook.tap.requests.keys() == {"b1r1"}
    assert hook.tap.take("b1r0", torch.arange(10), 0) is None
    assert hook.tap.take("b1r1", torch.arange(10), 0) is not None


def test_what_the_thread_raises_is_raised_in_a_later_call():
    runner = Runner()
    hook = vllm_hooks.DraftingHook(runner)
    hook.tap.start({"b1r0": TapRequest("p", 10, 10)})
    hook.tap.record = lambda *row: 1 / 0
    draft(runner, 2)
    with pytest.raises(ZeroDivisionError):
        settle(hook.ring)


def test_vllm_puts_its_own_suffix_on_request_ids():
    from vllm.v1.engine.input_processor import InputProcessor

    request = SimpleNamespace(request_id="b12r3", external_req_id=None)
    InputProcessor.assign_request_id(request)
    assert request.request_id != "b12r3"
    assert vllm_hooks.request_id_of(request.request_id) == "b12r3"


def test_a_step_without_drafts_is_sampled_as_without_speculation():
    runner = SimpleNamespace(_sample=lambda logits, drafts: drafts)
    wrap(runner, "_sample", vllm_hooks.sample_plainly_without_drafts)
    none, some = SimpleNamespace(max_spec_len=0), SimpleNamespace(max_spec_len=2)
    assert [runner._sample("logits", drafts) for drafts in (None, none, some)] == [None, None, some]
