"""What an engine refuses before vLLM is there, and what vLLM is started with."""

import asyncio
import dataclasses
import inspect
import pkgutil
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from cotrain.config.schema import RolloutConfig
from cotrain.engine import processes
from cotrain.engine.arguments import EngineSpec, engine_arguments, graph_sizes, scheduler_for
from cotrain.engine.engine import RolloutEngine
from cotrain.engine.speculation.draft_length import DraftLengths, Plan, Step
from cotrain.engine.tap_admission import TapRequest
from cotrain.engine.tools import ToolFailed
from cotrain.engine.trajectories import TrajectoryEngine
from cotrain.engine.worker import EngineWorker
from cotrain.records import GainReport, Rollout, RolloutBatch, RolloutRequest, Versions
from drafters.base import ServingSpec

K = 2


def spec_of(folder: Path, drafter: str | None = "drafter", **rollout: object) -> EngineSpec:
    config = RolloutConfig.model_validate(
        {"num_speculative_tokens": K, "prompts_per_step": 2, "samples_per_prompt": 4, **rollout}
    )
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text("{}")
    return EngineSpec(config, str(folder), drafter, ServingSpec("eagle3", (1, 2, 3)), 0, str(folder))


@pytest.mark.parametrize("drafter", ["drafter", None])
def test_variables_that_may_change_sampling_are_refused_with_speculation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    processes._check_environment.cache_clear()
    engine = RolloutEngine(spec_of(tmp_path, drafter))
    if drafter:
        with pytest.raises(ValueError, match="environment variable VLLM_CPU_INT4_W4A8: '1'"):
            asyncio.run(engine.start())
    assert engine.spec.speculates == (drafter is not None)


def test_a_gpu_takes_vllms_model_runner_and_a_cpu_or_a_history_the_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    name, plain, history = "VLLM_USE_V2_MODEL_RUNNER", spec_of(tmp_path), spec_of(tmp_path, history={})
    monkeypatch.delenv(name, raising=False)
    assert processes.model_runner(plain) == {name: "0"}
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name}: '1': vLLM's CPU build has no Triton"):
        asyncio.run(RolloutEngine(plain).start())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert processes.model_runner(plain) == {}
    with pytest.raises(ValueError, match=f"{name}: '1': only V1 drafts from a history"):
        processes.model_runner(history)
    monkeypatch.delenv(name)
    assert (processes.model_runner(plain), processes.model_runner(history)) == ({}, {name: "0"})
    monkeypatch.setenv(name, "0")
    assert processes.model_runner(history) == {}


def test_an_engine_on_a_cpu_does_not_start_with_a_drafter_that_only_v2_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    spec = dataclasses.replace(spec_of(tmp_path), serving=ServingSpec("dspark", (1, 2, 3)))
    with pytest.raises(ValueError, match="dspark: only vLLM's model runner V2 drafts with it"):
        asyncio.run(RolloutEngine(spec).start())
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert processes.model_runner(spec) == {}


def test_a_wrapper_of_a_language_model_is_served_without_images(tmp_path: Path) -> None:
    assert "limit_mm_per_prompt" not in engine_arguments(spec_of(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {"linear_num_value_heads": 4}}')
    arguments = engine_arguments(spec_of(tmp_path))
    assert arguments["limit_mm_per_prompt"] == {"image": 0, "video": 0}
    assert arguments["enable_prefix_caching"] is False  # of the language model's linear attention


def test_latent_attention_has_a_backend_whose_copies_are_read_back(tmp_path: Path) -> None:
    """On whichever CPU: on one with AMX, vLLM would take another."""
    assert "attention_backend" not in engine_arguments(spec_of(tmp_path))
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 512}')
    assert engine_arguments(spec_of(tmp_path))["attention_backend"] == "CPU_MLA"


def test_the_draft_length_is_the_schedulers(tmp_path: Path) -> None:
    arguments = engine_arguments(spec_of(tmp_path))
    assert arguments["max_num_seqs"] == 8
    assert arguments["speculative_config"]["num_speculative_tokens"] == K
    assert arguments["per_request_spec_decode_metrics"] == "detailed"  # counts are sorted by draft length


def test_drafts_are_verified_unless_an_engine_is_given_rates(tmp_path: Path) -> None:
    verified = engine_arguments(spec_of(tmp_path))["speculative_config"]
    assert not [name for name in verified if "reject" in name or "synthetic" in name]
    speculation = engine_arguments(replace(spec_of(tmp_path), synthetic_rates=(0.5, 0.2)))["speculative_config"]
    added = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.2]}
    assert speculation == verified | added | {"draft_load_config": {"load_format": "auto"}}


def test_vllm_decides_whether_scheduling_is_asynchronous_unless_there_is_a_history(tmp_path: Path) -> None:
    for drafter in (None, "drafter"):
        assert "async_scheduling" not in engine_arguments(spec_of(tmp_path, drafter))
    assert engine_arguments(spec_of(tmp_path, None, history={}))["async_scheduling"] is False
    assert issubclass(pkgutil.resolve_name(scheduler_for(True)), AsyncScheduler)
    assert not issubclass(pkgutil.resolve_name(scheduler_for(False)), AsyncScheduler)


def test_our_classes_are_where_vllm_is_told_to_find_them(tmp_path: Path) -> None:
    arguments = engine_arguments(spec_of(tmp_path))
    for name in ("worker_extension_cls", "distributed_executor_backend"):
        assert inspect.isclass(pkgutil.resolve_name(arguments[name]))


def test_a_gpu_compiles_and_captures_graphs_for_every_step_that_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    assert engine_arguments(spec_of(tmp_path))["enforce_eager"]
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    arguments = engine_arguments(spec_of(tmp_path))
    assert "enforce_eager" not in arguments and "distributed_executor_backend" not in arguments
    assert max(arguments["cudagraph_capture_sizes"]) == 8 * (K + 1)
    assert "cudagraph_capture_sizes" not in engine_arguments(spec_of(tmp_path, None))
    theirs = spec_of(tmp_path, vllm={"max_cudagraph_capture_size": 4})
    assert "cudagraph_capture_sizes" not in engine_arguments(theirs)


def test_ranks_are_processes_of_this_node_and_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    two = spec_of(tmp_path, vllm={"tensor_parallel_size": 2})
    assert engine_arguments(two)["distributed_executor_backend"] == "mp"
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_count", lambda self: 2, raising=False)
    assert engine_arguments(two)["distributed_executor_backend"] == "mp"
    monkeypatch.setattr(type(current_platform), "device_count", lambda self: 1, raising=False)
    with pytest.raises(ValueError, match=r"^rollout\.vllm\.tensor_parallel_size: 2 is above the 1 GPUs here; lower it"):
        engine_arguments(two)


def test_graphs_cover_batches_of_all_sizes_with_and_without_drafts() -> None:
    for most, k in ((1, 3), (3, 1), (100, 5), (256, 4)):
        sizes = graph_sizes(most, k)
        assert sizes[-1] == most * (k + 1) and most in sizes and k + 1 in sizes
        assert sizes == sorted(set(sizes)) and len(sizes) <= 2 * (4 + most // 8)


def test_short_prompts_are_found_in_the_prefix_cache_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is found by whole blocks, and behind an EAGLE-3 or MTP drafter vLLM would not use the last of them."""
    from vllm.platforms import current_platform

    arguments = engine_arguments(spec_of(tmp_path))
    assert arguments["block_size"] == 32 and arguments["speculative_config"]["disable_eagle_block_drop"]
    assert engine_arguments(spec_of(tmp_path, vllm={"block_size": 64}))["block_size"] == 64
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    arguments = engine_arguments(spec_of(tmp_path))
    assert "block_size" not in arguments and "disable_eagle_block_drop" not in arguments["speculative_config"]


def test_states_of_linear_attention_are_not_cached_unless_asked_for(tmp_path: Path) -> None:
    assert engine_arguments(spec_of(tmp_path))["enable_prefix_caching"]
    (tmp_path / "config.json").write_text('{"linear_num_value_heads": 2}')
    assert not engine_arguments(spec_of(tmp_path))["enable_prefix_caching"]
    assert engine_arguments(spec_of(tmp_path, vllm={"enable_prefix_caching": True}))["enable_prefix_caching"]


class Failing(RolloutEngine):
    """An engine that lives, and whose requests fail. It notes its calls of the scheduler."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        self.calls: list[tuple[object, ...]] = []
        self._engine = SimpleNamespace(model_config=SimpleNamespace(get_hidden_size=lambda: 4, dtype=torch.float32))

    async def _begin(self, *_: object) -> tuple[dict[str, TapRequest], dict[str, object]]:
        raise RuntimeError("a request was refused")

    async def in_scheduler(self, method: Callable[..., object], *args: object) -> None:
        self.calls.append((method.__name__, *args))


def test_the_controller_learns_again_after_a_call_that_failed(tmp_path: Path) -> None:
    engine = Failing(spec_of(tmp_path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a request was refused"):
            asyncio.run(engine.generate([RolloutRequest("p", 0, [1, 2], None)], tap=False, temperature=0.0))
    assert engine.calls == [("begin", False), ("begin",)] * 2


class Together(RolloutEngine):
    """An engine that notes which requests enter at once. A response ends when the test says so."""

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        model_config = SimpleNamespace(get_hidden_size=lambda: 4, dtype=torch.float32)
        self._engine = SimpleNamespace(errored=False, model_config=model_config, add_request=self.add_request)
        self.entered: list[list[str]] = []
        self.queues: dict[str, asyncio.Queue[SimpleNamespace]] = {}

    async def on_workers(self, method: object, *args: object) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"num_rollouts": 0}

    async def add_request(self, name: str, *_: object) -> asyncio.Queue[SimpleNamespace]:
        self.queues[name] = asyncio.Queue()
        return self.queues[name]

    async def _begin(
        self, named: dict[str, RolloutRequest], *options: Any
    ) -> tuple[dict[str, TapRequest], dict[str, Any]]:
        begun = await super()._begin(named, *options)
        self.entered.append([request.prompt_id for request in named.values()])
        return begun

    def _rollout(self, request: RolloutRequest, output: object) -> Rollout:
        return Rollout(request.prompt_id, 0, [1, 2], [3], [-1.0], "", "stop", Versions(0, 0))

    def end(self, name: str) -> None:
        self.queues[name].put_nowait(SimpleNamespace(metrics=SimpleNamespace(last_token_ts=1.0, first_token_ts=0.0)))


def test_calls_enter_together_in_the_order_of_their_places_and_end_one_by_one(tmp_path: Path) -> None:
    """As if they were one call, hence with the same choice of what is tapped."""

    async def two_steps() -> None:
        engine = Together(spec_of(tmp_path))
        for step in (1, 2):
            groups = [[RolloutRequest(f"{place}", i, [1, 2], None) for i in range(2)] for place in range(3)]
            calls = {
                place: asyncio.create_task(engine.generate(groups[place], True, (place, 3))) for place in (2, 0, 1)
            }
            while len(engine.entered) < step:
                await asyncio.sleep(0)
            assert engine.entered[-1] == ["0", "0", "1", "1", "2", "2"]
            names = [[f"b{3 * step - 3 + arrived}r{i}" for i in range(2)] for arrived in (2, 3, 1)]
            assert list(engine._admission.tapped) == [name for own in names for name in own]
            for name in names[1]:
                engine.end(name)
            batch = await calls[1]
            assert [rollout.prompt_id for rollout in batch.rollouts] == ["1", "1"] and not calls[0].done()
            for name in names[0] + names[2]:
                engine.end(name)
            ended = [(await calls[place]).rollouts[0].prompt_id for place in (0, 2)]
            assert ended == ["0", "2"] and not engine._admission.tapped

    asyncio.run(two_steps())


class Playing(TrajectoryEngine):
    """An engine whose turns end at once. It notes which requests compute all that they are asked."""

    on_workers = Together.on_workers

    def __init__(self, spec: EngineSpec):
        super().__init__(spec)
        model_config = SimpleNamespace(get_hidden_size=lambda: 4, dtype=torch.float32)
        self._engine = SimpleNamespace(errored=False, model_config=model_config, add_request=self.add_request)
        self.whole: list[tuple[int, str]] = []

    async def add_request(self, name: str, prompt: object, sampling: Any) -> asyncio.Queue[object]:
        if sampling.skip_reading_prefix_cache:
            self.whole.append((self.versions.policy, name.rsplit("-")[-1]))
        outputs = asyncio.Queue[object]()
        outputs.put_nowait(None)
        return outputs

    def _rollout(self, request: RolloutRequest, output: object) -> Rollout:
        return Rollout(request.prompt_id, request.sample_index, [1, 2], [3], [-1.0], "", "stop", Versions(0, 0))


class TwoTurns:
    """Tools of trajectories of two turns, between which the policy may move. Those of sample 0 fail at first, and all begin after the
    first turn of sample 1.
    """

    max_turns, max_turn_tokens, sampling = 3, 8, None

    def __init__(self, engine: Playing, moves: bool):
        self._engine, self._moves, self._answered = engine, moves, asyncio.Event()

    def of(self, name: str, number: int) -> Any:
        async def begin(row: object) -> None:
            if name.endswith("r0-0"):
                raise ToolFailed("it broke")
            if not name.endswith("r1-0"):
                await self._answered.wait()

        async def step(text: str, last_token: int) -> list[int] | None:
            if self._moves:
                self._engine.versions = Versions(1, 0)
            self._answered.set()
            turns.append(last_token)
            return [4] if len(turns) == 1 else None

        async def reward() -> float:
            return 1.0

        turns: list[int] = []
        return SimpleNamespace(begin=begin, step=step, reward=reward, forget=lambda: None, seconds=0.0)


@pytest.mark.parametrize("moves", [False, True])
def test_a_tapped_trajectory_computes_what_no_other_has_computed_with_this_policy(tmp_path: Path, moves: bool) -> None:
    async def play() -> tuple[Playing, RolloutBatch]:
        engine = Playing(spec_of(tmp_path))
        requests = [RolloutRequest("p", i, [1, 2], None) for i in range(3)]
        return engine, await engine.play(requests, 1.0, {}, cast(Any, TwoTurns(engine, moves)))

    engine, batch = asyncio.run(play())
    # Request 0 fails before it computes anything, and is not tapped when it begins again. Request 2 finds all in the cache.
    assert engine.whole == ([(0, "b1r1"), (1, "b1r1")] if moves else [(0, "b1r1")])
    assert batch.failures == ("it broke",) and batch.rewards == [1.0] * 3
    assert [len(rollout.token_ids) for rollout in batch.rollouts] == [3] * 3 and batch.num_generated_tokens == 6
    assert not engine._admission.tapped and engine._admission._lengths == deque([3] * 3)


def test_a_refusal_reaches_all_calls_that_enter_together(tmp_path: Path) -> None:
    async def both() -> list[object]:
        engine, request = Failing(spec_of(tmp_path)), RolloutRequest("p", 0, [1, 2], None)
        calls = [engine.generate([request], False, (place, 2)) for place in range(2)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [str(error) for error in asyncio.run(both())] == ["a request was refused"] * 2


def test_what_a_dead_engine_had_not_handed_over_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has its name once the worker has answered; the others may be waiting for the trainer."""
    engine = Failing(spec_of(tmp_path))
    written: list[Path] = []

    async def on_workers(method: object, *args: object) -> dict[str, float] | None:
        if method is EngineWorker.begin_features:
            written.append(Path(str(args[1])))
            return None
        assert args == (str(written[0]),)
        if written[0].exists():
            return {"num_rollouts": 1}
        written[0].write_text("features")
        return None

    monkeypatch.setattr(engine, "on_workers", on_workers)
    rollout = Rollout("p", 0, [1, 2], [3], [-1.0], "", "stop", Versions(0, 0))
    [shard], _ = asyncio.run(engine._take_features({"b1r0": rollout}))
    assert Path(shard).read_text() == "features" and not written[0].exists()
    written[0].write_text("half of it")

    def stop_here(*_: object) -> None:
        raise RuntimeError("no engine here")

    monkeypatch.setattr("vllm.engine.arg_utils.AsyncEngineArgs.create_engine_config", stop_here)
    with pytest.raises(RuntimeError, match="no engine here"):
        asyncio.run(engine.start())
    assert Path(shard).exists() and not written[0].exists()


def test_the_owner_reaches_the_controller_in_vllms_engine_core(tmp_path: Path) -> None:
    """By vLLM's own dispatch and serialisation, without an engine."""
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    import cotrain.engine.scheduling  # noqa: F401  it adds the call to vLLM's engine core

    core = object.__new__(EngineCoreProc)
    core.shutdown_state, core.output_queue = EngineShutdownState.RUNNING, queue.Queue()
    core.scheduler = SimpleNamespace(draft_lengths=DraftLengths(K, 8))

    async def call_utility_async(method: str, *args: object) -> object:
        core._handle_client_request(EngineCoreRequestType.UTILITY, (0, 1, method, args))
        _, outputs = core.output_queue.get_nowait()
        decoded = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
        assert decoded.utility_output.failure_message is None
        return decoded.utility_output.result.result

    engine = RolloutEngine(spec_of(tmp_path))

    async def collective_rpc(*args: object, **options: object) -> list[tuple[None, None]]:
        return [(None, None)]

    of_core = SimpleNamespace(call_utility_async=call_utility_async)
    engine._engine = SimpleNamespace(errored=False, engine_core=of_core, collective_rpc=collective_rpc)
    assert asyncio.run(engine.in_scheduler(DraftLengths.fix_num_speculative_tokens, 1)) is None
    assert asyncio.run(engine.in_scheduler(DraftLengths.describe)) == "k=1 at every batch size (fixed)"
    core.scheduler.draft_lengths.observe(Step(1, 2, False, [], 2))
    core.scheduler.draft_lengths.idle(0.5)
    report = asyncio.run(engine.in_scheduler(DraftLengths.report))
    assert report["steps"] == [[1, 2, "mixed", 1, 2, 0.5]] and GainReport(**report["gain"]) == GainReport()
    assert asyncio.run(engine.in_scheduler(DraftLengths.new_drafter, [0.5, 0.3])) is None
    assert asyncio.run(engine.in_scheduler(DraftLengths.begin, False)) is None
    assert asyncio.run(engine.set_num_speculative_tokens(None)) is None
    assert "fixed" not in asyncio.run(engine.describe_speculation()) and core.scheduler.draft_lengths.plan(1) == Plan()


WRITTEN = "I think <answer>4</answer><note>so</note> it is"


def text_for_rewards(folder: Path, ends: bool, **rollout: object) -> str:
    """What vLLM makes of WRITTEN, in which tags are special tokens, with the sampling parameters of an engine.

    ends: the policy has also written its end-of-sequence token.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    from cotrain.models.tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>", "<note>", "</note>"]})
    params = RolloutEngine(spec_of(folder, None, **rollout))._sampling(RolloutRequest("p", 0, [60], None), {})
    prompt = {"prompt_token_ids": [60], "prompt_embeds": None}
    request = SimpleNamespace(sampling_params=params, request_id="r", external_req_id="r", **prompt)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    detokenizer.update(tokenizer(WRITTEN).input_ids + [tokenizer.eos_token_id] * ends, ends)
    return detokenizer.output_text


@pytest.mark.parametrize("ends", [False, True], ids=["cut off", "ends"])
def test_rewards_get_the_text_as_written_without_the_end_of_sequence(tmp_path: Path, ends: bool) -> None:
    assert text_for_rewards(tmp_path, ends) == WRITTEN
    assert text_for_rewards(tmp_path, ends, skip_special_tokens=True) == "I think 4so it is"
    assert text_for_rewards(tmp_path, ends, stop=["</answer>"]) == "I think <answer>4"
