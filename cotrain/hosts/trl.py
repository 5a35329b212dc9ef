"""For scripts that use TRL: a callback that starts the drafter's trainer and logs what the engines accept.

callback = CotrainCallback("Qwen/Qwen3-0.6B")  # before GRPOTrainer, whose constructor makes the engine
trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", callbacks=[callback], ...)
"""

import atexit
import os
import shutil
import sys
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cotrain.sidecar.launch import start_trainer, stop_trainer
from cotrain.transport.spool import VARIABLE, Spool, State, read_json


class CotrainCallback(TrainerCallback):
    """Trains a drafter beside a TRL trainer. Under `cotrain run`, which has started one, it only logs."""

    def __init__(self, model: str, drafter: str = "eagle3", *settings: str) -> None:
        """Start the drafter's trainer. Every engine that this process makes from now on finds it.

        model, drafter, settings: as for `cotrain run`.
        Raises RunFailure when the trainer does not start, and ValueError when the script runs in several processes.
        """
        self._ended, self._counts = ExitStack(), Counter[str]()
        if VARIABLE not in os.environ:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise ValueError("several processes share one trainer: start them with `cotrain run ... -- COMMAND`")
            spool = Path("/dev/shm") / f"cotrain-trl-{os.getpid()}"
            command = [sys.executable, "-m", "pipelines.cli", "sidecar", "--model", model, "--drafter", drafter]
            command += ["--spool", str(spool), "--share", "1", f"--with-parent={os.getpid()}", *settings]
            self._ended.callback(shutil.rmtree, spool, ignore_errors=True)  # the engine may outlive the trainer here
            self._ended.callback(stop_trainer, start_trainer(command, spool))
            os.environ[VARIABLE] = str(spool)
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
        states = list[State]()
        with suppress(ValueError):  # somebody else has written there
            states = [state for engine in self._spool.engines() if (state := read_json(engine.state, State))]
        counts = sum((state.counts for state in states), Counter[str]())
        since, self._counts = counts - self._counts, counts  # counts fall when an engine ends
        names = ("policy_version", "drafter_version") if states else ()
        numbers = {f"cotrain/{name}": float(getattr(states[0], name)) for name in names}
        if drafts := since["drafts"]:
            numbers["cotrain/acceptance_length"] = 1 + since["accepted_tokens"] / drafts
            numbers["cotrain/draft_length"] = since["drafted_tokens"] / drafts
        return numbers
