"""vLLM's own rejection sampler, called without an engine: planted bugs are caught, and clean runs raise few alarms.

The target is the Markov chain of the simulated sampler. Drafting and the loop over steps are here; what is verified,
and how, is v1/sample/rejection_sampler.py with the kernels of the CPU build.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from cotrain.engine import cpu
from cotrain.lossless.checks import LOGIT_ERROR, setting_checks
from cotrain.lossless.emitted import target_log_probs
from cotrain.lossless.family import Verdict, judge
from cotrain.lossless.setting import Setting
from cotrain.records import Rollout, Versions
from drafters.base import SamplingParams
from pipelines.verify.checks import target_distributions
from tests.cotrain.lossless.conftest import MODEL
from tests.cotrain.lossless.markov_engine import MarkovModel
from tests.cotrain.lossless.simulated_sampler import VOCAB

pytest.importorskip("vllm")

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("the kernels of vLLM's CPU build", allow_module_level=True)
cpu.apply(cpu.leave_llvmlite_out)  # a test file before this one may have imported numba
current_platform.register_triton_kernel_overrides()

import vllm.v1.sample.rejection_sampler as sampler_module

from tests.engine.planted_bugs import BUGS, WHERE, PlantingWorker

ALPHA = 0.01
CHAINS, LENGTH = 160, 50
TARGET = torch.from_numpy(MODEL.target).float()
DRAFT_VOCABULARY = torch.from_numpy(MODEL.draft_vocabulary)
DRAFT = torch.from_numpy(MODEL.draft).float()[:, DRAFT_VOCABULARY]
LAWS = target_distributions(MarkovModel(), DRAFT_VOCABULARY.tolist(), "float32")


@dataclass
class Proposer:
    """As far as bugs are planted in it."""

    probabilistic: bool = True
    model: Any = field(
        default_factory=lambda: SimpleNamespace(
            draft_id_to_target_id=DRAFT_VOCABULARY - torch.arange(len(DRAFT_VOCABULARY))
        )
    )

    def _sample_from_logits(self, logits: Tensor, metadata: Any) -> tuple[Tensor, Tensor | None]:
        if not self.probabilistic:
            return logits.argmax(-1), None
        probs = (logits / metadata.temperature[:, None]).softmax(-1)
        return torch.multinomial(probs, 1).squeeze(1), probs


def sampling_metadata(samplings: list[SamplingParams]) -> Any:
    truncated = any(sampling.top_k for sampling in samplings)
    return SimpleNamespace(
        temperature=torch.tensor([sampling.temperature for sampling in samplings]),
        top_k=torch.tensor([sampling.top_k or VOCAB for sampling in samplings]) if truncated else None,
        top_p=None,
        all_greedy=False,
        all_random=True,
        generators={},
    )


def drawn(context: Tensor, samplings: list[SamplingParams]) -> Tensor:
    """Tokens as the engine draws them from prefill, and as bonus."""
    distributions = torch.cat([target_log_probs(TARGET[c][None], s) for c, s in zip(context, samplings, strict=True)])
    return torch.multinomial(distributions.exp(), 1)


def generate(proposer: Proposer, setting: Setting) -> list[Rollout]:
    k, samplings = setting.num_speculative_tokens, [setting.sampling(i) for i in range(CHAINS)]
    metadata, proposer.probabilistic = sampling_metadata(samplings), setting.method == "probabilistic"
    prompts = torch.randint(VOCAB, (CHAINS,))
    last = drawn(prompts, samplings).squeeze(1)
    texts, steps = [[int(token)] for token in last], [[] for _ in range(CHAINS)]
    ends = torch.arange(1, CHAINS + 1, dtype=torch.int32) * k
    while min(map(len, texts)) < LENGTH:
        context, probs = [last], []
        for _ in range(k):
            ids, own = proposer._sample_from_logits(DRAFT[context[-1]], metadata)
            context.append(DRAFT_VOCABULARY[ids])
            if own is not None:
                probs.append(torch.zeros(CHAINS, VOCAB).index_copy_(1, DRAFT_VOCABULARY, own))
        logits = TARGET[torch.stack(context[:-1], 1).flatten()].clone()
        logits = sampler_module.apply_sampling_constraints(logits, ends, metadata)
        output = sampler_module.rejection_sample(
            torch.stack(context[1:], 1).flatten().to(torch.int32),
            [k] * CHAINS,
            k,
            ends,
            torch.stack(probs, 1).flatten(0, 1) if probs else None,
            logits,
            drawn(context[-1], samplings),
            metadata,
        )
        emitted = [[token for token in row if token >= 0] for row in output.tolist()]
        for text, done, tokens in zip(texts, steps, emitted, strict=True):
            if len(text) < LENGTH:
                done.append((k, len(tokens) - 1))
                text += tokens
        last = torch.tensor([tokens[-1] for tokens in emitted])
    return [
        rollout(int(prompts[i]), texts[i][:LENGTH], samplings[i], tuple(steps[i]))
        for i in range(CHAINS)
    ]  # fmt: skip


def rollout(prompt: int, tokens: list[int], sampling: SamplingParams, steps: tuple[tuple[int, int], ...]) -> Rollout:
    law = target_log_probs(TARGET[[prompt, *tokens[:-1]]], sampling)
    log_probs = law[torch.arange(len(tokens)), tokens].tolist()
    return Rollout("p", 0, [prompt], tokens, log_probs, "", "length", Versions(0, 0), steps)


def verdict(proposer: Proposer, setting: Setting, seed: int = 0) -> Verdict:
    torch.manual_seed(seed)
    rollouts = generate(proposer, setting)
    samplings = [setting.sampling(i) for i in range(CHAINS)]
    draws = [LAWS(r, s) for r, s in zip(rollouts, samplings, strict=True)]
    rng = np.random.default_rng(seed)
    return judge(setting_checks(rollouts, samplings, draws, str(setting), rng, LOGIT_ERROR["float32"]), ALPHA)


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    proposer, worker = Proposer(), PlantingWorker()
    worker.model_runner = SimpleNamespace(drafter=proposer)
    worker.cotrain_plant(bug)
    try:
        assert not verdict(proposer, WHERE[bug]).passed
    finally:
        worker.cotrain_plant(None)
    assert verdict(proposer, WHERE[bug]).passed


def test_clean_runs_raise_no_more_alarms_than_stated() -> None:
    """20 runs; more than 2 alarms have probability 0.001 at 1 %."""
    settings = [*dict.fromkeys(WHERE.values())]
    alarms = sum(not verdict(Proposer(), settings[seed % len(settings)], 100 + seed).passed for seed in range(20))
    assert alarms <= stats.binom.ppf(0.999, 20, ALPHA)
