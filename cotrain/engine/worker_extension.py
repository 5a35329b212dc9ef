"""What cotrain mixes into each vLLM worker. vLLM imports this module in every worker before the model loads."""

import functools
import traceback
from typing import Any

from vllm.config import set_current_vllm_config

from cotrain.engine import cpu
from cotrain.engine.worker import EngineWorker

cpu.apply_patches()


class CotrainWorker:
    """Mixed into vLLM's worker. Names carry the prefix `cotrain_`, since they must differ from vLLM's."""

    cotrain_worker = functools.cached_property(EngineWorker)

    def cotrain_call(self, method: str, args: list[Any], options: dict[str, Any]) -> tuple[Any, str | None]:
        """Call a method of the EngineWorker, for RolloutEngine.on_workers. Returns (result, None), or (None, the exception's text).

        If an exception left one rank, vLLM would stop reading, and take the other ranks' answers for those to its next call.
        """
        try:
            with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined]
                return getattr(self.cotrain_worker, method)(*args, **options), None
        except Exception as error:
            traceback.print_exc()
            return None, str(error)
