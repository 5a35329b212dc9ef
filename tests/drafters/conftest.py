"""Tiny targets with grouped-query attention, a drafter of every kind for them, and packed rollouts of random numbers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from drafters.acceptance import StartAcceptance, rollout_acceptance
from drafters.alignment import DraftBatch
from drafters.base import Drafter, Experts, SamplingParams, TargetSpec, TargetWeights
from drafters.build import DRAFTERS, build_drafter
from drafters.config import DFlashConfig, DrafterModelConfig, DraftModelConfig, Eagle3Config, MtpConfig
from drafters.eagle3.model import FLAGS, Eagle3Drafter

TARGET = TargetSpec(
    model_type="llama",
    vocab_size=40,
    hidden_size=16,
    num_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,  # not hidden_size / heads, as in Qwen3
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    max_position_embeddings=512,
    eos_token_ids=(2,),
    unused_token_id=39,
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of drafter, and a target that it is for."""

    name: str
    target: TargetSpec
    config: DrafterModelConfig
    other: tuple[tuple[str, object], ...]  # settings that are not those of `config`
    has_own_matrices: bool = False  # its embedding and head are not the target's

    def configured(self, **changes) -> DrafterModelConfig:
        """`config` with other settings."""
        return type(self.config)(**(self.config.model_dump() | changes))

    def make(self, seed: int = 0, **changes) -> Drafter:
        """A drafter in float64 whose every weight matters: norms and projections are far from their initial values."""
        layout = {name: changes.pop(name) for name in (*FLAGS, "causal", "from_anchor") if name in changes}
        sizes = {name: changes.pop(name) for name in ("sliding_window", "attention_bias") if name in changes}
        shape = build_drafter(self.configured(**changes), self.target, seed).shape
        shape = dataclasses.replace(shape, sizes=dataclasses.replace(shape.sizes, **sizes), **layout)
        drafter = DRAFTERS[self.config.type](shape).double()
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
            for name, buffer in drafter.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=torch.float64) * 0.05)
        return drafter


EAGLE3 = Kind(
    name="eagle3",
    target=TARGET,
    config=Eagle3Config(type="eagle3", draft_vocab_size=20, aux_layers=(2, 4, 5)),
    other=(("trained_depth", 5), ("draft_vocab_size", 40)),
)
DFLASH = Kind(
    name="dflash",
    target=TARGET,
    config=DFlashConfig(type="dflash", draft_vocab_size=20, aux_layers=(2, 4, 5), trained_depth=3),
    other=(("trained_depth", 5), ("draft_vocab_size", 40), ("num_layers", 3)),
)
DSPARK = Kind(
    name="dspark",
    target=TARGET,
    config=DFlashConfig(type="dspark", draft_vocab_size=20, aux_layers=(2, 4, 5), trained_depth=3, markov_rank=5),
    other=(("trained_depth", 5), ("draft_vocab_size", 40), ("num_layers", 3), ("markov_rank", 6)),
)
MIMO = Kind("mtp mimo", TARGET, MtpConfig(type="mtp"), (("trained_depth", 5),))
QWEN3_NEXT = dataclasses.replace(
    MIMO,
    name="mtp qwen3_next",
    target=dataclasses.replace(
        TARGET,
        model_type="qwen3_next",
        head_dim=8,
        rope_parameters=TARGET.rope_parameters | {"partial_rotary_factor": 0.5},
        experts=Experts(number=4, per_token=2, size=12, shared_size=20, normed=True),
    ),
)
QWEN3_5 = dataclasses.replace(
    QWEN3_NEXT,
    name="mtp qwen3_5",
    target=dataclasses.replace(QWEN3_NEXT.target, model_type="qwen3_5_text", experts=None),
)
GLM = dataclasses.replace(
    QWEN3_NEXT,
    name="mtp glm4_moe",
    target=dataclasses.replace(
        QWEN3_NEXT.target,
        model_type="glm4_moe",
        experts=Experts(number=4, per_token=2, size=12, shared_size=20, normed=True, scale=1.5),
        attention_bias=True,
        qk_norm=True,
    ),
)
DRAFT_MODEL = Kind(
    name="draft_model",
    target=TARGET,
    config=DraftModelConfig(type="draft_model"),
    other=(("trained_depth", 5), ("num_layers", 3)),
    has_own_matrices=True,
)
TIED_DRAFT_MODEL = dataclasses.replace(
    DRAFT_MODEL,
    name="draft_model tied",
    target=dataclasses.replace(TARGET, model_type="qwen3", tie_word_embeddings=True),
)
MTP_KINDS = (MIMO, QWEN3_NEXT, QWEN3_5, GLM)
KINDS = (EAGLE3, DFLASH, DSPARK, *MTP_KINDS, DRAFT_MODEL, TIED_DRAFT_MODEL)


def kind_name(kind: Kind) -> str:
    """For pytest."""
    return kind.name


@pytest.fixture(params=KINDS, ids=kind_name)
def kind(request) -> Kind:
    """Every drafter that keeps the contract."""
    return request.param


def make_drafter(seed: int = 0, **config) -> Eagle3Drafter:
    """An EAGLE-3 drafter as `Kind.make` makes it."""
    return EAGLE3.make(seed, **config)


def make_batch(
    *documents: tuple[int, int, int], seed: int = 0, dtype: torch.dtype = torch.float64, num_aux: int = 3
) -> DraftBatch:
    """Documents as (prompt length, response length, rows without features at the beginning).

    The last row of each has no features either. Rows without features are NaN, so that using one is noticed.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [prompt + response for prompt, response, _ in documents]
    num_rows = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    document_ids = torch.arange(len(documents)).repeat_interleave(torch.tensor(lengths))
    prompts, _, holes = (torch.tensor(column)[document_ids] for column in zip(*documents, strict=True))
    features = (positions >= holes) & (positions < torch.tensor(lengths)[document_ids] - 1)

    def hidden(width: int) -> torch.Tensor:
        values = torch.randn(num_rows, width, generator=generator, dtype=dtype)
        return values.masked_fill(~features[:, None], torch.nan)

    return DraftBatch(
        token_ids=torch.randint(TARGET.vocab_size, (num_rows,), generator=generator),
        aux_hidden=hidden(num_aux * TARGET.hidden_size),
        final_hidden=hidden(TARGET.hidden_size),
        feature_mask=features,
        response_mask=positions >= prompts,
        positions=positions,
        document_ids=document_ids,
        policy_version=0,
    )


def acceptance_length(starts: list[StartAcceptance], num_speculative_tokens: int) -> float:
    """What an engine would serve on these rollouts."""
    return 1.0 + sum(rollout_acceptance(starts, num_speculative_tokens).rates())


def edit_config(folder: Path, **changes) -> None:
    """Change config.json of a checkpoint folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def assert_same_state(actual: Drafter, expected: Drafter) -> None:
    """The same tensors to the last bit, under the same names."""
    theirs = expected.state_dict()
    assert actual.state_dict().keys() == theirs.keys()
    for name, tensor in actual.state_dict().items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def unnoticed(drafter: Drafter, value: float) -> list[str]:
    """Parameters one of whose numbers can become `value` without being found to overflow."""
    names = []
    for name, parameter in drafter.named_parameters():
        element = parameter.detach().view(-1)[:4][-1:]
        before = element.clone()
        element.fill_(value)
        if not drafter.overflowing():
            names.append(name)
        element.copy_(before)
    assert drafter.overflowing() == []
    return names


@pytest.fixture
def target_weights() -> TargetWeights:
    generator = torch.Generator().manual_seed(5)
    shape = (TARGET.vocab_size, TARGET.hidden_size)
    return TargetWeights(
        embedding=torch.randn(shape, generator=generator, dtype=torch.float64),
        head=torch.randn(shape, generator=generator, dtype=torch.float64),
        policy_version=0,
    )


@pytest.fixture
def sampling() -> SamplingParams:
    return SamplingParams(temperature=1.0, top_p=1.0, top_k=0, draft_sample_method="probabilistic")
