"""What a policy can do, as the sources of vLLM and transformers say, for each family of the tiny models."""

import pytest

from cotrain.models.capability import (
    class_in_transformers,
    class_in_vllm,
    drafter_problems,
    drafting_refusal,
    refusal,
)
from cotrain.models.loading import RANDOM_MODELS, built
from drafters.config import DFlashConfig
from drafters.files import read_config

WITHOUT_AUX_STATES = {"glm4_moe", "glm4_moe_lite", "glm4", "gemma3", "granitemoe", "exaone4"}
REFUSED = {"nemotron_h": "vLLM pull 48284", "lfm2": "log-probs differ by 0.5"}


def config_of(name: str) -> dict:
    table = RANDOM_MODELS[name]
    trained = class_in_transformers(table["model_type"]) or ""
    wrapped = trained.replace("ForCausalLM", "ForConditionalGeneration") if "text_config" in table else trained
    return table | {"architectures": [wrapped]}


@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_a_family_is_accepted_or_refused_with_a_reason(name: str) -> None:
    reason = refusal(config_of(name))
    assert reason is None if name not in REFUSED else REFUSED[name] in str(reason)


@pytest.mark.parametrize("name", sorted(RANDOM_MODELS.keys() - REFUSED.keys()))
def test_eagle3_needs_a_class_with_aux_hidden_states(name: str) -> None:
    reason = drafting_refusal(config_of(name), "eagle3", on_cpu=False)
    assert (reason is None) == (name not in WITHOUT_AUX_STATES)
    assert drafting_refusal(config_of(name), "mtp", on_cpu=True) is None


def test_latent_attention_takes_no_drafter_with_plain_attention_on_a_cpu() -> None:
    for kind, refused in (("eagle3", True), ("draft_model", True), ("mtp", False)):
        assert (drafting_refusal(config_of("deepseek_v3"), kind, on_cpu=True) is not None) == refused


@pytest.mark.parametrize(
    ("windows", "whole", "layers", "refused"),
    [(4, 4, 2, True), (4, 4, 1, False), (12, 12, 5, False), (12, 12, 6, True), (40, 8, 5, False), (0, 8, 5, False)],
)
def test_layers_that_vllm_would_part_into_groups_are_refused_before_an_engine_starts(
    windows: int, whole: int, layers: int, refused: bool
) -> None:
    types = ["sliding_attention"] * windows + ["full_attention"] * whole
    config = read_config(folder := built("tiny:gpt_oss")) | {"num_hidden_layers": len(types), "layer_types": types}
    found = drafter_problems(config, folder, DFlashConfig(type="dflash", num_layers=layers), on_cpu=True)
    assert [problem.partition(";")[0] for problem in found] == (
        [
            f"drafter.model.num_layers: {layers} layers cannot be served: vLLM would part them into several groups of the KV cache, "
            "beside this policy's layers with sliding windows"
        ]
        if refused
        else []
    )


def test_layers_with_another_state_than_gated_delta_nets_are_refused_in_every_family() -> None:
    reason = refusal({"architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"})
    assert reason is not None and "vLLM pull 48284" in reason


def test_a_model_that_is_trained_only_with_its_images_is_refused() -> None:
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {}}
    assert refusal(wrapper) == "transformers trains gemma3 only with its image encoder; save its language model alone"


def test_vllms_class_may_be_one_of_its_transformers_backend() -> None:
    assert class_in_vllm("Olmo3ForCausalLM") == ("vllm.model_executor.models.transformers", "TransformersForCausalLM")
