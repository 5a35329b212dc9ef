"""Hidden states of text of a policy's own (own_text.py), for benchmarks that train drafters on it."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.own_text import TEXT
from cotrain.config.load import parse_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import resolve_model
from cotrain.run.rows import read_rows
from cotrain.transport.features import FeatureRecord
from drafters.base import SamplingParams, TargetSpec
from drafters.build import build_drafter

Sequence = tuple[list[int], int]
"""All tokens of a rollout, and how many of them are the prompt's."""

MOST_HELD_OUT = 128
FEATURES = "features.pt"


@dataclass(frozen=True)
class StoredText:
    """The rollouts in a folder of own_text.py, the last tenth of them held out."""

    config: RunConfig
    model: Path
    training: list[FeatureRecord]
    held_out: list[FeatureRecord]

    def response_tokens(self, vocab_size: int) -> Tensor:
        """Count of each token [V] in the rollouts to train on."""
        tokens = torch.cat([record.token_ids[record.prompt_length :] for record in self.training])
        return torch.bincount(tokens, minlength=vocab_size)


def read_config(run: Path) -> RunConfig:
    """Return a run's configuration, also that of an earlier version, which had a section `init`."""
    fields = json.loads((run / "config.json").read_text())
    return parse_config({name: value for name, value in fields.items() if name != "init"})


def read_rollouts(run: Path) -> tuple[Path, list[Sequence], list[Sequence]]:
    """Return the folder of a policy, and its rollouts to train on and held out, as whole prompts. run: a folder of own_text.py."""
    config = read_config(run)
    stored = [rollout for row in read_rows(run / TEXT) for rollout in row.get("rollouts", ())]
    rollouts = [(r["prompt_token_ids"] + r["token_ids"], len(r["prompt_token_ids"])) for r in stored]
    samples = config.rollout.samples_per_prompt
    held = max(1, min(MOST_HELD_OUT, len(rollouts) // 10) // samples) * samples
    return resolve_model(config.policy.model), rollouts[:-held], rollouts[-held:]


@torch.no_grad()
def read_text(run: Path) -> StoredText:
    """Compute hidden states as the engine's tap has them, with transformers in float32, for the drafter of its configuration.

    run: a folder of own_text.py.

    They are kept in the run's folder for the next call.
    """
    config, known = read_config(run), run / FEATURES
    rollout, (folder, *parts) = config.rollout, read_rollouts(run)
    assert config.drafter is not None
    aux_layers = build_drafter(config.drafter.model, TargetSpec.from_pretrained(folder), 0).serving.aux_layers
    if known.exists():
        return StoredText(config, folder, *torch.load(known, weights_only=False))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sampling = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.draft_sample_method)

    def features(stored: Sequence) -> FeatureRecord:
        sequence, prompt_length = stored
        tokens = torch.tensor(sequence)
        out = model(tokens[None], output_hidden_states=True)
        states, log_probs = out.hidden_states, torch.zeros(len(tokens))
        of_next = (out.logits[0, :-1] / (rollout.temperature or 1.0)).log_softmax(-1)
        log_probs[1:] = of_next.gather(1, tokens[1:, None]).squeeze(1)
        aux = torch.cat([tokens.new_empty(len(tokens), 0), *(states[layer][0] for layer in aux_layers)], -1)
        mask = torch.arange(len(tokens)) < len(tokens) - 1
        known = (tokens, aux, states[-1][0], mask, prompt_length, 0, sampling, aux_layers)
        return FeatureRecord(*known, log_probs=log_probs)

    training, held_out = ([record for record in map(features, part) if record.is_trainable] for part in parts)
    torch.save((training, held_out), known)
    return StoredText(config, folder, training, held_out)
