"""One run in MLflow. metrics.jsonl is the record; MLflow is sent a copy from a thread of its own.

A tracking failure never ends or slows a run: rows and drafters wait in order and are sent again with the next step.
"""

import hashlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from cotrain.config.schema import RunConfig
from cotrain.records import Versions
from cotrain.run.decisions import DrafterEvent
from cotrain.run.mlflow_store import (  # first of MLflow: sets its environment
    MlflowException,
    connect,
    experiment_id,
    first_line,
)
from cotrain.run.provenance import config_hash, flatten
from cotrain.run.registry import Registration, find_version, model_id_of, set_served
from cotrain.run.run_dir import resume_arguments
from cotrain.run.served_drafts import Served, ServedDrafts
from cotrain.run.store_uri import PARENT_RUN_VARIABLE, sqlite_file, tracking_uri

# isort: split
from mlflow.entities import LoggedModelOutput, Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID
from mlflow.utils.validation import (
    MAX_METRICS_PER_BATCH,
    MAX_PARAM_VAL_LENGTH,
    MAX_PARAMS_TAGS_PER_BATCH,
    MAX_TAG_VAL_LENGTH,
)

MARKER = "step"
"""A metric in every batch: a batch is stored whole, so its newest value is the last step that MLflow has."""


class Tracker:
    """The MLflow run of a training run."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run_id: str | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        """Start a run, or go on with `run_id`.

        `history` are the rows of metrics.jsonl kept by a resume; those that MLflow lacks are sent. `say` gets the few
        lines a user must read, from the sending thread too. Raises ValueError naming tracking.uri when the store does
        not answer; everything after that is only reported.
        """
        self.uri = tracking_uri(config)
        self.registered_model = registered_name(config.policy.model)
        self._config, self._say = config, say
        self._client = connect(self.uri)
        self.experiment_id = experiment_id(self._client, self.uri)
        self.run_id = self._start_run(run_id)
        self._last_step = 0
        if run_id == self.run_id:
            self._last_step = max(
                (metric.step for metric in self._client.get_metric_history(run_id, MARKER)), default=0
            )
            self._client.set_tag(run_id, "resumed_from_step", str(history[-1]["step"] if history else 0))
        self._served = ServedDrafts()
        self._rows: deque[list[Metric]] = deque()
        self._uploads: deque[tuple[Callable[[], Any], Future]] = deque()
        self._wake = threading.Condition()
        self._woken = self._down = False
        self._final_status: str | None = None
        self._thread = threading.Thread(target=self._send_until_finished, name="mlflow", daemon=True)
        self._thread.start()
        for row in history:
            self._served.add(int(row.get("versions/drafter") or 0), row)
            self.log_step(row["step"], {name: value for name, value in row.items() if name != "step"})

    @property
    def missing_steps(self) -> int:
        """Steps that MLflow has not got because it is not answering; 0 while all is well."""
        return len(self._rows) if self._down else 0

    def log_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Queue one step. Does nothing for a step that MLflow has, so a replayed step is not recorded twice."""
        if step <= self._last_step:
            return
        self._last_step, now = step, int(time.time() * 1000)
        row = [Metric(name, float(value), now, step) for name, value in metrics.items() if value is not None]
        with self._wake:
            self._rows.append([*row, Metric(MARKER, float(step), now, step)])
            self._wake_up()

    def log_drafter(
        self, folder: Path, versions: Versions, step: int, metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> Future[int | None]:
        """Queue a published drafter: LoggedModel, metrics linked at `step`, registered version, alias `serving`.

        `tags` must hold init and data_fingerprint. The folder must stay until the future is done; its result is the
        registered version (None with tracking.log_drafters off).
        """
        future: Future[int | None] = Future()
        if not self._config.tracking.log_drafters:
            future.set_result(None)
            return future
        all_tags = {
            "policy_version": str(versions.policy),
            "drafter_version": str(versions.drafter),
            "config_hash": config_hash(self._config),
            "run_name": self._config.name,
            "sampling": self._sampling(),
            **tags,
        }
        registration = Registration(
            folder, self.registered_model, self.run_id, self.experiment_id, versions.drafter, all_tags
        )
        self._enqueue(lambda: self._register(registration, step, dict(metrics)), future)
        return future

    def log_decisions(self, path: Path, event: DrafterEvent) -> None:
        """Queue decisions.jsonl as an artifact, and the newest decision as a tag, which the run's page shows."""
        tags = {
            "drafter.last_decision": f"step {event.step}: {event.kind}",
            "drafter.last_reason": event.reason[:MAX_TAG_VAL_LENGTH],
        }
        self._enqueue(lambda: self._send_decisions(path, tags), Future())

    def log_served(self, drafter_version: int, metrics: Mapping[str, Any], step: int) -> Future[None]:
        """Queue what a drafter has reached since it is served, this step included; `best` moves to the best of the run.

        metrics: the step's row, which holds its counts by draft length (served_drafts.metrics_of).
        """
        self._served.add(drafter_version, metrics)
        served, best = self._served.of(drafter_version), self._served.best()
        future: Future[None] = Future()
        if self._config.tracking.log_drafters and served is not None:
            self._enqueue(lambda: self._link_served(drafter_version, served, best, step), future)
        else:
            future.set_result(None)
        return future

    def finish(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """Send what waits, set the status (FINISHED, KILLED or FAILED), and say what could not be sent."""
        with self._wake:
            self._final_status = status
            self._wake_up()
        self._thread.join(timeout_s)
        if self._rows or self._uploads:
            self._say(
                f"MLflow did not take {len(self._rows)} steps and {len(self._uploads)} drafter records. Nothing is "
                f"lost: steps are in metrics.jsonl ({resume_arguments(self._config.run_root, self._config.name)} sends "
                "them), drafters in drafters/"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if self._final_status is None:
            stopped = exc_type is not None and issubclass(exc_type, KeyboardInterrupt | SystemExit)
            self.finish("FINISHED" if exc_type is None else "KILLED" if stopped else "FAILED")

    def ui_hint(self) -> str:
        """How to look at this run in a browser."""
        # Without workflowType the UI opens in its GenAI view, which shows neither charts nor registered models.
        page = f"#/experiments/{self.experiment_id}/runs/{self.run_id}?workflowType=machine_learning"
        if sqlite_file(self.uri) is None:
            return f"{self.uri.rstrip('/')}/{page}" if self.uri.startswith("http") else self.uri
        return f"mlflow server --backend-store-uri {self.uri} --workers 1, then http://127.0.0.1:5000/{page}"

    def _sampling(self) -> str:
        rollout = self._config.rollout
        return (
            f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}, "
            f"{rollout.draft_sample_method} drafts"
        )

    # -- the run -----------------------------------------------------------------------------------------------------

    def _start_run(self, run_id: str | None) -> str:
        # The caller holds the run folder's lock, so whatever still says RUNNING for this folder has died.
        root_hash = hashlib.blake2b(str(self._config.run_root.resolve()).encode(), digest_size=6).hexdigest()
        identity = {"cotrain.run_name": self._config.name, "cotrain.run_root": root_hash}
        query = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        for stale in self._client.search_runs([self.experiment_id], f"{query} AND attributes.status = 'RUNNING'"):
            self._client.set_terminated(stale.info.run_id, "FAILED")
        tags = identity | {"config_hash": config_hash(self._config)}
        if parent_run := os.environ.get(PARENT_RUN_VARIABLE):
            tags[MLFLOW_PARENT_RUN_ID] = parent_run
        known: set[str] = set()
        if run_id is not None and self._run_exists(run_id):
            self._client.update_run(run_id, status="RUNNING")
            known = set(self._client.get_run(run_id).data.params)
        else:
            if run_id is not None:
                self._say(f"MLflow at {self.uri} does not know run {run_id}; a new one is started from metrics.jsonl")
            run_id = self._client.create_run(self.experiment_id, tags=tags, run_name=self._config.name).info.run_id
        fields = flatten(self._config.model_dump(mode="json"))
        # MLflow refuses to change a parameter; the few that a resume may change keep their first value.
        params = [
            Param(re.sub(r"[^\w. :/-]", "_", key), str(value)[:MAX_PARAM_VAL_LENGTH]) for key, value in fields.items()
        ]
        params = [param for param in params if param.key not in known]
        for start in range(0, len(params), MAX_PARAMS_TAGS_PER_BATCH):
            self._client.log_batch(run_id, params=params[start : start + MAX_PARAMS_TAGS_PER_BATCH])
        return run_id

    def _run_exists(self, run_id: str) -> bool:
        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _enqueue(self, job: Callable[[], Any], future: Future) -> None:
        with self._wake:
            self._uploads.append((job, future))
            self._wake_up()

    def _wake_up(self) -> None:
        self._woken = True
        self._wake.notify()

    def _send_until_finished(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._woken)
                self._woken = False
                final_status = self._final_status
            try:
                self._send_rows()
                self._send_uploads()
                if final_status:
                    self._client.set_terminated(self.run_id, final_status)
            except Exception as error:  # Whatever a store or its network raises: the run goes on without it.
                if not self._down:
                    self._down = True
                    self._say(f"MLflow takes no metrics ({first_line(error)}); the run goes on, each step tries again")
            if final_status:
                return

    def _send_rows(self) -> None:
        while self._rows:
            with self._wake:
                batch, count = list(self._rows[0]), 1
                while count < len(self._rows) and len(batch) + len(self._rows[count]) <= MAX_METRICS_PER_BATCH:
                    batch += self._rows[count]
                    count += 1
            # MLflow keeps one of two equal points, so sending again after a lost answer does no harm.
            self._client.log_batch(self.run_id, metrics=batch)
            with self._wake:
                for _ in range(count):
                    self._rows.popleft()
        if self._down:
            self._down = False
            self._say("MLflow takes metrics again; none is missing")

    def _send_uploads(self) -> None:
        while self._uploads:
            job, future = self._uploads[0]
            try:
                result = job()
            except FileNotFoundError as error:
                self._say(f"a drafter was deleted before MLflow took it: {error.filename}")
                future.set_exception(error)
            else:
                future.set_result(result)
            self._uploads.popleft()

    def _register(self, registration: Registration, step: int, metrics: Mapping[str, float]) -> int:
        version = registration.send(self._client)
        if registration.model_id and not registration.was_registered:
            self._client.log_outputs(self.run_id, [LoggedModelOutput(registration.model_id, step=step)])
            self._log_model_metrics(registration.model_id, metrics, step)
        return version

    def _send_decisions(self, path: Path, tags: Mapping[str, str]) -> None:
        for name, value in tags.items():
            self._client.set_tag(self.run_id, name, value)
        self._client.log_artifact(self.run_id, str(path))

    def _link_served(self, drafter_version: int, served: Served, best: int | None, step: int) -> None:
        version = find_version(self._client, self.run_id, drafter_version)
        if version is not None:
            self._log_model_metrics(model_id_of(version), {k: float(v) for k, v in served._asdict().items()}, step)
            set_served(self._client, version, served)
        if best is not None and (version := find_version(self._client, self.run_id, best)) is not None:
            self._client.set_registered_model_alias(version.name, "best", str(version.version))

    def _log_model_metrics(self, model_id: str, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        points = [Metric(name, value, now, step, model_id=model_id) for name, value in metrics.items()]
        self._client.log_batch(self.run_id, metrics=points)


def registered_name(policy_model: str) -> str:
    """`<policy>-drafter`, from a folder, a hub id or a bundled model."""
    name = Path(policy_model.removeprefix("bundled:")).name
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-drafter"
