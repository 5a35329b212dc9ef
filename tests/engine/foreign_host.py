"""Stands for a host that claims vLLM's worker_extension_cls and its weight-transfer backend, as verl and prime-rl do.

The server loads it as an extension of its workers, and vLLM's own session of a weight update runs through it.
"""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "foreign_host"


@dataclass
class Init(WeightTransferInitInfo):
    """The backend needs no set-up."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """An update is the path of a safetensors file."""

    path: str = ""


class Transfer(WeightTransferEngine[Init, Update]):
    """Loads a file layer by layer, as vLLM's own backends do."""

    init_info_cls, update_info_cls = Init, Update

    def init_transfer_engine(self, init_info: Init) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, info: Update) -> None:
        from safetensors.torch import load_file

        self.model.load_weights(iter(load_file(info.path).items()))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


class Extension:
    """Methods that the host adds to each worker."""

    def greet(self) -> str:
        return "the host's own extension"


def register() -> None:
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Transfer)


register()
