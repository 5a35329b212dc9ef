"""Hidden states of the text that a `cotrain init` has collected, for benchmarks that train drafters on it."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cotrain.config.load import parse_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import resolve_model
from cotrain.run.rows import read_rows
from cotrain.transport.features import FeatureRecord
from drafters.base import SamplingParams, TargetSpec
from drafters.build import build_drafter
from pipelines.initialise.sources import FILE, StoredRollout, split


@dataclass(frozen=True)
class StoredText:
    """The rollouts of a run of `cotrain init`, parted as the run parts them."""

    config: RunConfig
    model: Path
    training: list[FeatureRecord]
    held_out: list[FeatureRecord]

    def response_tokens(self, vocab_size: int) -> Tensor:
        """Count of each token [V] in the rollouts to train on."""
        tokens = torch.cat([record.token_ids[record.prompt_length :] for record in self.training])
        return torch.bincount(tokens, minlength=vocab_size)


def read_rollouts(run: Path) -> tuple[Path, list[StoredRollout], list[StoredRollout]]:
    """Return the folder of a run's policy, and its rollouts to train on and held out. run: a folder of `cotrain init`."""
    config = parse_config(json.loads((run / "config.json").read_text()))
    _, *parts = read_rows(run / FILE)  # a Corpus could be appended to, and writes its file anew
    rollouts = [StoredRollout(**rollout) for part in parts for rollout in part["rollouts"]]
    training, held_out = split(rollouts, config.rollout.samples_per_prompt)
    return resolve_model(config.policy.model), training, held_out


@torch.no_grad()
def read_text(run: Path) -> StoredText:
    """Compute hidden states as the engine's tap has them, with transformers in float32, for the run's own drafter. run: a folder of `cotrain init`."""
    config = parse_config(json.loads((run / "config.json").read_text()))
    rollout, (folder, *parts) = config.rollout, read_rollouts(run)
    assert config.drafter is not None
    aux_layers = build_drafter(config.drafter.model, TargetSpec.from_pretrained(folder), 0).serving.aux_layers
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)

    def features(stored: StoredRollout) -> FeatureRecord:
        sequence, prompt_length = stored.sequence
        tokens = torch.tensor(sequence)
        states = model(tokens[None], output_hidden_states=True, logits_to_keep=1).hidden_states
        aux = torch.cat([tokens.new_empty(len(tokens), 0), *(states[layer][0] for layer in aux_layers)], -1)
        mask = torch.arange(len(tokens)) < len(tokens) - 1
        return FeatureRecord(tokens, aux, states[-1][0], mask, prompt_length, 0, sampling, aux_layers)

    training, held_out = ([record for record in map(features, part) if record.is_trainable] for part in parts)
    return StoredText(config, folder, training, held_out)
