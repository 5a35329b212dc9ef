"""A real vLLM engine on the tiny Llama, started once for all engine tests, and a drafter fitted to it."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.cpu import fork_engine_core
from cotrain.engine.engine import RolloutEngine
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.scratch import scratch_folder
from cotrain.records import RolloutBatch, RolloutRequest, SwapReport
from cotrain.weights.payload import write_payload
from drafters.alignment import DraftBatch
from drafters.base import Drafter, SamplingParams, ServingSpec, TargetSpec, TargetWeights
from drafters.build import build_drafter
from drafters.config import DrafterModelConfig, Eagle3Config
from drafters.losses import drafter_loss
from tests.engine.two_nodes import address, two_nodes  # noqa: F401
from tests.native_models import trained_native

pytest.register_assert_rewrite(*(f"tests.engine.{name}" for name in ("mtp_head", "native_runs", "runs", "stream_runs")))

ROOT = Path(__file__).parents[2]
AUX_LAYERS = (2, 4, 5)
DRAFT_VOCABULARY = 128
FIELDS = ("token_ids", "aux_hidden", "final_hidden", "feature_mask", "response_mask", "positions", "document_ids")
STEPS, PARTS = 60, 4
"""Steps in which a drafter learns the tiny target, and into how many its text is parted for them."""
SERVING = ServingSpec("eagle3", AUX_LAYERS)


class LiveEngine:
    """Calls an asynchronous engine from plain tests."""

    def __init__(self, spec: EngineSpec):
        os.environ.update(threads.engine_environment(threads.num_cores(), spec.rollout.tensor_parallel_size))
        fork_engine_core()  # the test process has one OpenMP thread, so there is none that a fork would lose
        self.engine = RolloutEngine(spec)
        self.loop = asyncio.new_event_loop()
        self.run(self.engine.start())
        self.scratch = Path(spec.scratch)
        self.dtype = getattr(torch, spec.rollout.dtype)
        self.sent = 0

    def run(self, coroutine: Any) -> Any:
        return self.loop.run_until_complete(coroutine)

    def generate(self, requests: list[RolloutRequest], **options: Any) -> RolloutBatch:
        return self.run(self.engine.generate(requests, **options))

    def greedy(self, requests: list[RolloutRequest], **options: Any) -> RolloutBatch:
        return self.generate(requests, temperature=0.0, seed=None, **options)

    def payload(self, state: dict[str, torch.Tensor]) -> Any:
        self.sent += 1
        return write_payload(state, self.scratch / f"sent_{self.sent}.safetensors", self.dtype)

    def send_drafter(self, state: dict[str, torch.Tensor]) -> SwapReport:
        version = self.engine.versions.drafter + 1
        return self.run(self.engine.update_drafter(self.payload(state), version))

    def send_policy(self, state: dict[str, torch.Tensor]) -> SwapReport:
        version = self.engine.versions.policy + 1
        return self.run(self.engine.update_policy(self.payload(state), version))

    def counted(self, counter: str) -> float:
        """What this engine has counted. Prometheus' registry has only the engine that has started last in this process."""
        loggers = self.engine._engine.logger_manager.stat_loggers
        return sum(getattr(logger, counter)[0]._value.get() for logger in loggers if hasattr(logger, counter))

    def stop(self) -> None:
        self.run(self.engine.shutdown())
        self.loop.close()


def make_requests(num: int, length: int = 12, seed: int = 0, first: int = 0) -> list[RolloutRequest]:
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(40, 120, (num, length), generator=generator).tolist()
    return [RolloutRequest(f"p{first + i}", 0, prompt, 100 + i) for i, prompt in enumerate(prompts)]


def tokens(batch: RolloutBatch) -> list[list[int]]:
    return [rollout.token_ids for rollout in batch.rollouts]


@pytest.fixture(scope="session")
def qwen3_next_folder() -> Path:
    """A checkpoint of Qwen3-Next's format."""
    return trained_native("qwen3-next")


@pytest.fixture(scope="session")
def target_folder() -> Path:
    return resolve_model("tiny:llama")


@pytest.fixture(scope="session")
def target_model(target_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def target_state(target_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(target_folder / "model.safetensors")


@pytest.fixture(scope="session")
def moved_target_state(target_state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return moved(target_state)


def moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A policy after it moved: noise on every matrix, as large as the matrix itself on the head."""
    generator = torch.Generator().manual_seed(7)

    def moved_tensor(name: str, t: torch.Tensor) -> torch.Tensor:
        scale = 1.0 if name == "lm_head.weight" else 0.25
        return t + scale * t.std() * torch.randn(t.shape, generator=generator) if t.dim() == 2 else t

    return {name: moved_tensor(name, t) for name, t in state.items()}


def features_of(
    model: Any, token_ids: list[int], prompt_length: int, document: int, aux_layers: tuple[int, ...] = AUX_LAYERS
) -> DraftBatch:
    """Features by a plain Hugging Face forward."""
    with torch.no_grad():
        states = model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    n = len(token_ids)
    mask = torch.ones(n, dtype=torch.bool)
    mask[-1] = False
    return DraftBatch(
        token_ids=torch.tensor(token_ids),
        aux_hidden=torch.cat([torch.empty(n, 0), *(states[layer][0] for layer in aux_layers)], -1),
        final_hidden=states[-1][0],
        feature_mask=mask,
        response_mask=torch.arange(n) >= prompt_length,
        positions=torch.arange(n),
        document_ids=torch.full((n,), document),
        policy_version=0,
    )


def joined(batches: list[DraftBatch]) -> DraftBatch:
    return DraftBatch(**{f: torch.cat([getattr(b, f) for b in batches]) for f in FIELDS}, policy_version=0)


@pytest.fixture(scope="session")
def untrained_drafter(target_folder: Path) -> Drafter:
    return build_drafter(eagle3(), TargetSpec.from_pretrained(target_folder), seed=0)


@pytest.fixture(scope="session")
def drafter_folder(untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the untrained drafter, which the engine starts with."""
    folder = tmp_path_factory.mktemp("drafter") / "v0"
    untrained_drafter.save(folder, torch.float32)
    return folder


@pytest.fixture(scope="session")
def sampled_text(target_model: Any) -> DraftBatch:
    return text_of(target_model, AUX_LAYERS)


def text_of(model: Any, aux_layers: tuple[int, ...]) -> DraftBatch:
    """Rollouts sampled from a tiny target, with their features."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(40, 120, (48, 12), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        rollouts = model.generate(prompts, do_sample=True, max_new_tokens=48, eos_token_id=None, pad_token_id=0)
    return joined([features_of(model, row, 12, i, aux_layers) for i, row in enumerate(rollouts.tolist())])


@pytest.fixture(scope="session")
def target_weights(target_state: dict[str, torch.Tensor]) -> TargetWeights:
    return weights_of(target_state)


def weights_of(state: dict[str, torch.Tensor]) -> TargetWeights:
    embedding = state["model.embed_tokens.weight"]
    return TargetWeights(embedding, state.get("lm_head.weight", embedding), 0)


def eagle3(**settings: int) -> Eagle3Config:
    defaults = {"draft_vocab_size": DRAFT_VOCABULARY, "aux_layers": AUX_LAYERS}
    return Eagle3Config.model_validate({"type": "eagle3", **defaults, **settings})


def part_of(data: DraftBatch, turn: int) -> DraftBatch:
    """Every PARTS-th rollout."""
    chosen = data.document_ids % PARTS == turn
    return replace(data, **{name: getattr(data, name)[chosen] for name in FIELDS})


def distilled(
    data: DraftBatch,
    target: TargetWeights,
    target_folder: Path,
    config: DrafterModelConfig | None = None,
) -> Drafter:
    """A drafter (EAGLE-3 unless given) that has learnt from `data` for a few seconds."""
    config = config or eagle3()
    drafter = build_drafter(config, TargetSpec.from_pretrained(target_folder), seed=1)
    drafter.start_from(target_folder)
    return fitted(drafter, data, target)


def fitted(drafter: Drafter, data: DraftBatch, target: TargetWeights) -> Drafter:
    """The same drafter after it has learnt from `data`."""
    drafter.choose_vocabulary(torch.bincount(data.token_ids, minlength=target.head.shape[0]), target)
    drafter.start_training(data, target, is_new=True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    parts = [part_of(data, turn) for turn in range(PARTS)]
    for step in range(STEPS):
        part = parts[step % PARTS]
        loss, _ = drafter_loss(drafter, part, target, SamplingParams(1.0, 1.0, 0, "probabilistic"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter


@pytest.fixture(scope="session")
def fitted_drafter(sampled_text: DraftBatch, target_weights: TargetWeights, target_folder: Path) -> Drafter:
    """A drafter distilled from sampled rollouts of the tiny target."""
    return distilled(sampled_text, target_weights, target_folder)


@pytest.fixture(scope="session")
def rollout_config() -> RolloutConfig:
    return RolloutConfig(
        prompts_per_step=16, samples_per_prompt=1, max_prompt_tokens=300, max_new_tokens=48, dtype="float32",
        ignore_eos=True, num_speculative_tokens=3, vllm={"kv_cache_memory_bytes": 2**30},
    )  # fmt: skip


@pytest.fixture(scope="session")
def engine(
    rollout_config: RolloutConfig, target_folder: Path, drafter_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveEngine]:
    with scratch_folder("test") as scratch:
        live = LiveEngine(EngineSpec(rollout_config, str(target_folder), str(drafter_folder), SERVING, 0, str(scratch)))
        yield live
        live.stop()


@pytest.fixture
def fresh(engine: LiveEngine, untrained_drafter: Drafter, target_state: dict[str, torch.Tensor]) -> LiveEngine:
    """The engine with the first target and the untrained drafter, whatever the test before did to it."""
    engine.send_policy(target_state)
    engine.send_drafter(untrained_drafter.state_for_serving())
    engine.run(engine.engine.set_num_speculative_tokens(3))
    engine.run(engine.engine.set_draft_sample_method("probabilistic"))
    return engine
