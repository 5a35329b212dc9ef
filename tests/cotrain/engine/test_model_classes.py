"""vLLM's own classes, held against what cotrain reads of them, and imported without torchvision."""

import inspect
import sys

import pytest

from cotrain.engine import cpu
from cotrain.models.capability import class_in_transformers, interfaces
from cotrain.models.loading import RANDOM_MODELS

FAMILIES = [name for name, table in RANDOM_MODELS.items() if "text_config" not in table]


def test_vllms_classes_are_what_is_read_of_them_and_need_no_torchvision(vllm_process, monkeypatch) -> None:
    """The first part fails when vLLM's qwen3_5 can be imported without torchvision: then `load_without_torchvision` may go."""
    from transformers.utils import is_torchvision_available
    from vllm.model_executor.models.interfaces import has_inner_state, supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry, _LazyRegisteredModel

    as_shipped = inspect.unwrap(_LazyRegisteredModel.load_model_cls)
    monkeypatch.setattr(_LazyRegisteredModel, "load_model_cls", as_shipped)
    monkeypatch.setattr(
        _LazyRegisteredModel, "inspect_model_cls", inspect.unwrap(_LazyRegisteredModel.inspect_model_cls)
    )
    with pytest.raises(ModuleNotFoundError, match="torchvision") as error:
        ModelRegistry.models["Qwen3_5ForCausalLM"].load_model_cls()
    chain = [str(entry.path) for entry in error.traceback]
    assert [path.rpartition("/")[2] for path in chain if "/models/q" in path] == [
        "qwen3_5.py", "qwen3_vl.py", "image_processing_qwen2_vl.py",
    ]  # fmt: skip

    for patch in (cpu.load_without_torchvision, cpu.inspect_here):
        cpu.apply(patch)
    found, read = {}, {}
    for name in FAMILIES:
        architecture = class_in_transformers(RANDOM_MODELS[name]["model_type"])
        loaded = ModelRegistry.models[architecture].load_model_cls()
        found[name] = supports_eagle3(loaded), has_inner_state(loaded)
        read[name] = tuple(wanted in interfaces(architecture) for wanted in ("SupportsEagle3", "HasInnerState"))
    assert found == read
    wrapper = ModelRegistry.models["Qwen3_5ForConditionalGeneration"]
    assert wrapper.inspect_model_cls().supports_multimodal and supports_eagle3(wrapper.load_model_cls())
    assert not is_torchvision_available() and not any(name.startswith("torchvision") for name in sys.modules)
