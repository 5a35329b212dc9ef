"""The DSpark drafter: DFlash's block, in which a draft token also knows the one before it.

The maths are those of vLLM's qwen3_dspark.py, which only its model runner V2 serves. Draft token j has the logits
head h_j + W2 W1[token before], a bias of low rank (the Markov head); in training the token before is the rollout's. The confidence
head estimates from [h_j, W1[token before]] the probability that the draft token is accepted, with which vLLM's adaptive verification
chooses how many to verify. It learns from the acceptances that the objective computes anyway, and no gradient of it gets further.

In a checkpoint with `sample_from_anchor`, the row of the newest token proposes the first draft token, and mask j the one after its
own position. A new drafter has DFlash's rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.alignment import Alignment, DraftBatch
from drafters.base import ServingSpec, TargetSpec, TargetWeights
from drafters.block.model import DFlashDrafter, DFlashShape
from drafters.files import read_config
from drafters.target import other_values

RANK = 64
"""Rank of a new drafter's Markov head, unless it is configured."""

CONFIDENCE = "confidence_head.proj.weight"

SUPPORTED: dict[str, object] = {"model_type": "qwen3", "markov_head_type": "vanilla", "dspark_draft_topk": None}
"""Fields that vLLM reads of a DSpark config.json beside DFlash's, with the only value that this drafter implements."""


@dataclass(frozen=True)
class DSparkShape(DFlashShape):
    """Shape of a DSpark drafter. confidence: width of the confidence head's input, 0 without that head."""

    markov_rank: int = 1
    confidence: int = 0


class DSparkDrafter(DFlashDrafter):
    """DFlash with a Markov head and a confidence head.

    The product of the Markov head's two matrices is the bias of each draft token [V_draft] for each token before it [V].
    """

    shape: DSparkShape

    def __init__(self, shape: DSparkShape) -> None:
        super().__init__(shape)
        self.serving = ServingSpec("dspark", shape.aux_layers)
        w1 = nn.Embedding(shape.sizes.vocab_size, shape.markov_rank)
        w2 = nn.Linear(shape.markov_rank, shape.draft_vocab_size, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": w1, "markov_w2": w2})
        if shape.confidence:
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(shape.confidence, 1)})

    @staticmethod
    def shape_of(config: Any, target: TargetSpec) -> DSparkShape:
        block = vars(DFlashDrafter.shape_of(config, target))
        rank = config.markov_rank or RANK
        return DSparkShape(**block, markov_rank=rank, confidence=block["sizes"].hidden_size + rank)

    @staticmethod
    def read(
        folder: str | Path, target: TargetSpec, depth_if_unstated: int | None
    ) -> tuple[DSparkShape, dict[str, Tensor]]:
        block, tensors = DFlashDrafter.read(folder, target, depth_if_unstated)
        config = read_config(folder)
        if problems := "; ".join(problems_of(config)):
            raise ValueError(f"{folder}/config.json: {problems}")
        rank, confidence = config["markov_rank"], 0
        if config.get("enable_confidence_head") and CONFIDENCE in tensors:
            confidence = block.sizes.hidden_size + rank * bool(config.get("confidence_head_with_markov"))
        if not confidence:  # vLLM leaves it out too
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
        depth, from_anchor = config.get("block_size") or block.trained_depth, config.get("sample_from_anchor", True)
        block = replace(block, trained_depth=depth, from_anchor=from_anchor)
        return DSparkShape(**vars(block), markov_rank=rank, confidence=confidence), tensors

    @staticmethod
    def to_config(shape: Any) -> dict[str, object]:
        return DFlashDrafter.to_config(shape) | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": shape.trained_depth,
            "markov_rank": shape.markov_rank,
            "sample_from_anchor": shape.from_anchor,
            "enable_confidence_head": shape.confidence > 0,
            "confidence_head_with_markov": shape.confidence > shape.sizes.hidden_size,
        }

    def drafts(self, batch: DraftBatch, alignment: Alignment, target: TargetWeights) -> tuple[list[Tensor], Tensor]:
        hidden, head = super().drafts(batch, alignment, target)
        w1, w2 = self.markov_head["markov_w1"], self.get_parameter("markov_head.markov_w2.weight")
        before = [w1(batch.token_ids[alignment.input_rows(position)]) for position in range(len(hidden))]
        states = [torch.cat(pair, -1) for pair in zip(hidden, before, strict=True)]
        return states, torch.cat([head.to(w2.dtype), w2], -1)

    def own_loss(self, states: Sequence[Tensor], accepted: Tensor) -> Tensor | None:
        """Return the mean cross-entropy between estimated and actual acceptance; None without a confidence head or an acceptance."""
        known = accepted.isfinite()
        if not self.shape.confidence or not known.any():
            return None
        read = torch.stack([state.detach()[:, : self.shape.confidence] for state in states])[known]
        estimated = self.confidence_head["proj"](read).squeeze(-1).to(accepted.dtype)
        return F.binary_cross_entropy_with_logits(estimated, accepted[known])

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Begin as DFlash does, without a bias."""
        super().initialise(generator)
        self.get_parameter("markov_head.markov_w2.weight").zero_()


def problems_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield each reason, beside those of DFlash, why this drafter would not compute what an engine computes with this config.json."""
    for field in other_values(config, SUPPORTED):
        yield f"this is a DSpark variant with {field}, which is not supported"
    if not config.get("markov_rank"):
        yield "it has no markov_rank, the number of columns of markov_head.markov_w1"
        if "markov_rank" in (config.get("dflash_config") or {}):
            yield "vLLM does not read that of dflash_config: move it, and what else its heads need, out of there"
