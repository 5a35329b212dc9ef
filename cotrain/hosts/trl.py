"""For scripts that use TRL: a callback that starts the drafter's trainer and logs what the engines accept.

callback = CotrainCallback("Qwen/Qwen3-0.6B")  # before GRPOTrainer, whose constructor makes the engine
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", callbacks=[callback], ...)
"""

import atexit
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cotrain.sidecar.launch import host_environment, start_trainer, stop_trainer
from cotrain.transport.spool import VARIABLE, Spool, read_json

COUNTS = ("drafts", "drafted_tokens", "accepted_tokens")
COTRAIN = (sys.executable, "-m", "pipelines.cli")


class CotrainCallback(TrainerCallback):
    """Trains a drafter beside a TRL trainer. Under `cotrain run`, which has started one, it only logs."""

    def __init__(self, model: str, drafter: str = "eagle3", *settings: str, cotrain: Sequence[str] = COTRAIN) -> None:
        """Start the drafter's trainer. Every engine that this process makes from now on finds it.

        model, drafter, settings: as for `cotrain run`. cotrain: the command to run cotrain, if it is in another environment.
        Raises RunFailure when the trainer does not start, and ValueError when the script runs in several processes.
        """
        self._ended, self._counted = ExitStack(), (0, 0, 0)
        if VARIABLE not in os.environ:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError("several processes share one trainer: start them with `cotrain run ... -- COMMAND`")
            spool = Path("/dev/shm") / f"cotrain-trl-{uuid.uuid4().hex}"
            options = ["--model", model, "--drafter", drafter, "--spool", str(spool), "--share", "1"]
            options.append(f"--with-parent={os.getpid()}")
            self._ended.callback(shutil.rmtree, spool, ignore_errors=True)  # the engine may outlive the trainer here
            self._ended.callback(stop_trainer, start_trainer([*cotrain, "sidecar", *options, *settings], spool))
            os.environ |= host_environment(spool)
            self._ended.callback(os.environ.pop, VARIABLE)
            atexit.register(self._ended.close)
        self._spool = Spool(os.environ[VARIABLE])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any) -> None:
        numbers = self._numbers()
        if logs is None or not numbers or not state.is_world_process_zero:
            return
        logs.update(numbers)
        state.log_history[-1].update(numbers)
        # transformers' own callback has started the MLflow run, and has sent this log before these numbers were in it.
        if "mlflow" in args.report_to and (mlflow := sys.modules.get("mlflow")) and mlflow.active_run():
            mlflow.set_tag("cotrain.sidecar", str(self._spool.folder))
            mlflow.log_metrics(numbers, step=state.global_step)

    def on_train_end(self, *others: Any, **more: Any) -> None:
        self._ended.close()

    def _numbers(self) -> dict[str, float]:
        """Return the versions, and the lengths since the last call. Lengths are left out when nothing was drafted."""
        states = list[Any]()
        with suppress(ValueError):  # somebody else has written there
            states = [state for engine in self._spool.engines() if (state := read_json(engine.state))]
        counted = tuple(sum(state.get(name, 0) for state in states) for name in COUNTS)
        drafts, drafted, accepted = (now - before for now, before in zip(counted, self._counted, strict=True))
        self._counted = counted
        names = ("policy_version", "drafter_version") if states else ()
        numbers = {f"cotrain/{name}": float(states[0][name]) for name in names}
        if drafts > 0:  # counts fall when an engine ends
            numbers |= {"cotrain/acceptance_length": 1 + accepted / drafts, "cotrain/draft_length": drafted / drafts}
        return numbers
