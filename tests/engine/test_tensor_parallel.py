"""An engine of two tensor-parallel ranks. Both hold the only head of keys and values of target and drafter."""

import copy
import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.served import of_all_ranks
from cotrain.engine.tap_admission import TapRequest
from cotrain.engine.worker import EngineWorker
from cotrain.engine.worker_extension import CotrainWorker
from cotrain.process.scratch import scratch_folder
from cotrain.weights.payload import WeightUpdateRefused, digest
from drafters.base import Drafter
from tests.engine.conftest import (
    AUX_LAYERS,
    SERVING,
    LiveEngine,
    distilled,
    make_requests,
    moved,
    text_of,
    tokens,
    weights_of,
)
from tests.engine.test_stream_engine import (
    check_features,
    check_log_probs,
    log_probs_of,
    records_of,
    swap_while_generating,
)

pytestmark = pytest.mark.engine

State = dict[str, torch.Tensor]
HEAD = "lm_head.weight"


class Faulty(EngineWorker):
    """A worker whose other ranks tap too, and which gets faults on one rank."""

    def start_tapping(self, requests: dict[str, TapRequest], max_bytes: int) -> None:
        self.hook.tap.start({name: TapRequest(*fields) for name, fields in requests.items()})

    def begin_features(self, rollouts: dict, path: str, *shared: Any) -> None:
        if not self.worker.rank:
            return super().begin_features(rollouts, path, *shared)
        super().begin_features(rollouts, own := f"{path}.{self.worker.rank}", *shared)
        self._shards.pop(own).result()

    def change_row(self, rank: int, draft: bool, module: str) -> None:
        """This rank serves the last row of its part of a matrix with the other sign; a second call takes that back."""
        if self.worker.rank != rank:
            return
        place = self.weights[draft].model.get_submodule(module)
        if place.weight.numel():
            place.weight.data[-1] *= -1
        if (packed := getattr(place, "cpu_linear", None)) is None:
            return

        def changed(*arguments: Any) -> torch.Tensor:
            product = packed(*arguments)
            product[..., -1] *= -1
            return product

        changed.original = packed
        place.cpu_linear = getattr(packed, "original", changed)

    def load_wrongly_once(self, rank: int, draft: bool, name: str) -> None:
        """The next load puts something else into this rank's part of a tensor."""
        model = self.weights[draft].model
        load = model.load_weights

        def load_wrongly(tensors: Any) -> Any:
            del model.load_weights
            return load((n, t + 1 if n == name and self.worker.rank == rank else t) for n, t in tensors)

        model.load_weights = load_wrongly

    def fail(self, rank: int) -> None:
        if self.worker.rank == rank:
            raise OSError(f"no space left on rank {rank}")

    def kept(self) -> list[list[str]]:
        """Names of the files that each rank keeps."""
        folder = self.weights[False]._kept.parent
        return of_all_ranks(sorted(f"{folder.name}/{path.name}" for path in folder.iterdir()))


class FaultyWorker(CotrainWorker):
    cotrain_worker = functools.cached_property(Faulty)


@pytest.fixture(scope="module")
def folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target without the second of its two heads of keys and values."""
    folder = shutil.copytree(target_folder, tmp_path_factory.mktemp("one-head") / "target")
    config = json.loads((target_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1}))
    state = load_file(target_folder / "model.safetensors")
    halved = {n: t[: len(t) // 2].contiguous() if ".k_proj." in n or ".v_proj." in n else t for n, t in state.items()}
    save_file(halved, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def policies(folder: Path) -> list[State]:
    """That of even versions and that of odd ones."""
    first = load_file(folder / "model.safetensors")
    return [first, moved(first)]


@pytest.fixture(scope="module")
def models(folder: Path, policies: list[State]) -> list[Any]:
    first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    second = copy.deepcopy(first)
    second.load_state_dict(policies[1], strict=False)
    return [first, second]


@pytest.fixture(scope="module")
def drafter(models: list[Any], policies: list[State], folder: Path) -> Drafter:
    return distilled(text_of(models[0], AUX_LAYERS), weights_of(policies[0]), folder)


@pytest.fixture(scope="module")
def drafters(drafter: Drafter) -> list[State]:
    """A fitted one, and the same with noise."""
    fitted = drafter.state_for_serving()
    noisy = {n: t + 0.5 * t.std() * torch.randn(t.shape) if t.dim() == 2 else t for n, t in fitted.items()}
    return [fitted, noisy]


@pytest.fixture(scope="module")
def started(
    rollout_config: RolloutConfig, folder: Path, drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    own = {"tensor_parallel_size": 2, "worker_extension_cls": f"{__name__}.{FaultyWorker.__name__}"}
    config = rollout_config.model_copy(update={"vllm": rollout_config.vllm | own})
    checkpoint = tmp_path_factory.mktemp("drafter") / "v0"
    drafter.save(checkpoint, torch.float32)
    with scratch_folder("test") as scratch:
        live = LiveEngine(EngineSpec(config, str(folder), str(checkpoint), SERVING, 0, str(scratch)))
        yield live
        live.stop()


@pytest.fixture
def live(started: LiveEngine, policies: list[State], drafters: list[State]) -> LiveEngine:
    """The engine with the first policy, as an even version, and the fitted drafter."""
    if started.engine.versions.policy % 2 == 0:
        started.send_policy(policies[1])
    started.send_policy(policies[0])
    started.send_drafter(drafters[0])
    started.run(started.engine.set_num_speculative_tokens(3))
    return started


def differing(live: LiveEngine, state: State, draft: bool) -> list[str]:
    """Names of tensors that are not served as in `state`."""
    served = live.run(live.engine.served_digests(list(state), draft))
    return [name for name, tensor in state.items() if served[name] != digest(tensor)]


def test_before_any_update_the_checkpoints_are_served(
    started: LiveEngine, policies: list[State], drafters: list[State]
) -> None:
    assert started.engine.versions.policy == 0
    assert differing(started, policies[0], False) == differing(started, drafters[0], True) == []
    assert differing(started, policies[1], False)


def test_greedy_text_is_that_of_the_target_at_every_draft_length(live: LiveEngine, models: list[Any]) -> None:
    for k in (3, 1, 0):
        live.run(live.engine.set_num_speculative_tokens(k))
        batch = live.greedy(make_requests(8))
        counts = batch.speculation
        for rollout in batch.rollouts:
            assert log_probs_of(rollout, models)[1].tolist() == rollout.token_ids
            assert {drafted for drafted, _ in rollout.verification_steps} <= {k}
        if k:
            emitted = 8 + counts.total() + sum(counts.accepted_per_position)
            assert counts.acceptance_length > 1.3 and 0 <= emitted - batch.num_generated_tokens <= 8 * k
        else:
            assert not counts


def test_both_ranks_have_the_hidden_states_and_log_probs_of_the_target(live: LiveEngine, models: list[Any]) -> None:
    batch = live.generate(make_requests(8))
    for rollout in batch.rollouts:
        check_log_probs(rollout, log_probs_of(rollout, models)[0])
    [shard] = batch.features
    first, second = load_file(shard), load_file(f"{shard}.partial.1")
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)  # prompts have no log-probabilities
    records = records_of(batch)
    assert len(records) == 8 and all(record.feature_mask.sum() == record.num_tokens - 1 for record in records)
    assert max(check_features(record, models[0]) for record in records) < 1e-4


@pytest.mark.long  # test_stream_engine.py has one rank, and the next tests have updates on two
def test_swaps_in_mid_generation_are_stamped_and_change_no_other_token(
    live: LiveEngine, policies: list[State], models: list[Any], drafters: list[State]
) -> None:
    greedy, swaps = swap_while_generating(live, policies, drafters, temperature=0.0, seed=None)
    assert swaps >= 3 and all(
        log_probs_of(rollout, models)[1].tolist() == rollout.token_ids for rollout in greedy.rollouts
    )
    sampled, _ = swap_while_generating(live, policies, drafters)
    for rollout in sampled.rollouts:
        assert len({segment.versions.policy for segment in rollout.segments}) > 1
        check_log_probs(rollout, log_probs_of(rollout, models)[0])


MODULES = {
    "model.embed_tokens": "model.embed_tokens.weight",
    "model.layers.3.self_attn.qkv_proj": "model.layers.3.self_attn.v_proj.weight",
    "model.layers.4.self_attn.o_proj": "model.layers.4.self_attn.o_proj.weight",
    "model.layers.5.mlp.gate_up_proj": "model.layers.5.mlp.up_proj.weight",
    "model.layers.6.mlp.down_proj": "model.layers.6.mlp.down_proj.weight",
    "model.norm": "model.norm.weight",
    "lm_head": HEAD,
}


def test_a_row_that_changes_on_one_rank_is_seen(live: LiveEngine, policies: list[State], drafters: list[State]) -> None:
    of_drafter = {"model.layers.0.self_attn.qkv_proj": "layers.0.self_attn.v_proj.weight", "lm_head": HEAD}
    cases = [(False, *item) for item in MODULES.items()] + [(True, *item) for item in of_drafter.items()]
    for draft, module, name in cases:
        state = (drafters if draft else policies)[0]
        for rank in (1, 0):
            live.run(live.engine.on_workers(Faulty.change_row, rank, draft, module))
            assert differing(live, state, draft) == [name]
            live.run(live.engine.on_workers(Faulty.change_row, rank, draft, module))
    assert differing(live, policies[0], False) == differing(live, drafters[0], True) == []


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.long)])
def test_what_one_rank_refuses_is_served_by_none(
    live: LiveEngine, policies: list[State], drafters: list[State], rank: int
) -> None:
    before = tokens(live.greedy(make_requests(8)))
    for draft, states, name in ((False, policies, "model.layers.2.mlp.down_proj.weight"), (True, drafters, HEAD)):
        live.run(live.engine.on_workers(Faulty.load_wrongly_once, rank, draft, name))
        message = rf"update undone: rank {rank}: served weights differ from those sent: \['{name}'\]$"
        with pytest.raises(WeightUpdateRefused, match=message):
            (live.send_drafter if draft else live.send_policy)(states[1])
        assert differing(live, states[0], draft) == []
    assert tokens(live.greedy(make_requests(8))) == before
    live.send_policy(policies[1])
    assert differing(live, policies[1], False) == differing(live, drafters[0], True) == []


def test_an_update_that_one_rank_cannot_keep_touches_no_model(live: LiveEngine, policies: list[State]) -> None:
    kept = live.scratch / "kept"
    (kept / "rank_1").rename(kept / "away")
    with pytest.raises(WeightUpdateRefused, match=r"^rank 1: \[Errno 2\]"):
        live.send_policy(policies[1])
    (kept / "away").rename(kept / "rank_1")
    assert differing(live, policies[0], False) == []
    with pytest.raises(WeightUpdateRefused, match=r"rank 0: lm_head\.weight has non-finite values; rank 1: lm_head"):
        live.send_policy(policies[0] | {HEAD: policies[0][HEAD] / 0})
    assert differing(live, policies[0], False) == []


def test_a_drafter_is_taken_back_on_both_ranks(live: LiveEngine, drafters: list[State]) -> None:
    live.send_drafter(drafters[1])
    assert differing(live, drafters[1], True) == []
    live.run(live.engine.undo_drafter_update())
    assert differing(live, drafters[0], True) == []
    assert live.greedy(make_requests(8)).speculation.acceptance_length > 1.3
    files = live.run(live.engine.on_workers(Faulty.kept))
    assert files == [[f"rank_{rank}/{name}.safetensors" for name in ("drafter", "target")] for rank in (0, 1)]


def test_a_call_that_fails_on_one_rank_leaves_no_answer_to_the_next(live: LiveEngine, drafters: list[State]) -> None:
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=f"^no space left on rank {rank}$"):
            live.run(live.engine.on_workers(Faulty.fail, rank))
        assert differing(live, drafters[0], True) == []
