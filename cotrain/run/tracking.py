"""One run in MLflow. metrics.jsonl is the record; outbox.py sends a copy to MLflow (docs/guide/tracking.md)."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, LoggedModelOutput, Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking.context.registry import resolve_tags
from mlflow.utils.mlflow_tags import MLFLOW_GIT_COMMIT, MLFLOW_GIT_DIRTY

from cotrain.config.schema import RunConfig
from cotrain.config.sidecar import SidecarConfig
from cotrain.publish.decision import DrafterEvent
from cotrain.records import Versions
from cotrain.run.checkpoint import file_digest
from cotrain.run.mlflow_store import connect, experiment_id, tracking_uri
from cotrain.run.outbox import Outbox
from cotrain.run.provenance import config_hash, flatten, git_state
from cotrain.run.registry import DIGEST_TAG, FILES, POLICY_TAG
from cotrain.run.run_dir import resume_arguments
from cotrain.run.step_metrics import ServedDrafts
from drafters.config import Section

FOLDER_TAG = "cotrain.run_folder"
"""Tag of a run with a digest of its folder's path."""
MARKER = "step"
"""A metric that is sent with every row. MLflow stores rows whole, so its newest value is the last step that MLflow has."""


class Tracker(AbstractContextManager["Tracker"]):
    """The MLflow run of a training run, or of a sidecar."""

    def __init__(
        self,
        config: RunConfig | SidecarConfig,
        *,
        policy: str = "",
        history: Sequence[Mapping[str, Any]] | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        """Start an MLflow run or, with a `history`, continue the newest one of this run folder.

        `policy` is the fingerprint of the policy's weights. `history` holds the rows of metrics.jsonl that a resume has kept,
        perhaps none; those that MLflow lacks are sent. `say` prints the few lines that a user must read, also from the
        sending thread. Raises ValueError when the store does not answer; later failures are only reported.
        """
        self.uri = tracking_uri(config)
        self._config, self._policy, self._say = config, policy, say
        self._client = connect(self.uri)
        self._experiment = experiment_id(self._client, self.uri)
        self.registered_model = self._own_registered_model()
        self.run_id = self._start_run(history)
        self._last_step = self._sent_step = int(self._client.get_run(self.run_id).data.metrics.get(MARKER, 0))
        self._served = ServedDrafts()
        found = self._client.search_model_versions(f"run_id = '{self.run_id}' AND tags.drafter_version LIKE '%'")
        found = sorted(found, key=lambda row: int(row.version))
        # By drafter version; if one was registered twice, the newest registration counts.
        self._registered = {int(row.tags["drafter_version"]): row for row in found}
        self._outbox = Outbox(lambda text: self._client.set_tag(self.run_id, "cotrain.failures", text), say)
        self._newest_drafter, self._finished = 0, False
        for row in history or ():
            self.log_step(row["step"], row)

    @property
    def behind(self) -> str:
        """Text for a step line that says how many steps MLflow lacks because it does not answer; empty while all is well."""
        missing = self._last_step - self._sent_step if self._outbox.is_down else 0
        return f"mlflow {missing} behind" if missing else ""

    def log_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Queue one step, unless MLflow has it already: a replayed step is not recorded twice.

        Drafters that drafted are tagged with their acceptance so far, and the alias `best` moves to the best of the run.
        """
        version = int(metrics.get("versions/drafter") or 0)
        drafted = self._served.add(version, metrics)
        if step <= self._last_step:
            return
        self._last_step = step
        reached, best = {v: self._served.of(v) for v in drafted}, self._served.best()
        points = _points({name: value for name, value in metrics.items() if value is not None}, step)

        def send() -> None:
            # After a gap the marker stays where it is, so that a resume fills the gap.
            marker = [] if self._outbox.dropped else _points({MARKER: step}, step)
            # MLflow keeps one of two equal points, so sending again after a lost answer does no harm.
            self._client.log_batch(self.run_id, metrics=points + marker)
            self._sent_step = step if marker else self._sent_step

        self._outbox.add(f"step {step}", send)
        for served, acceptance in reached.items():
            sends = partial(self._send_served, served, acceptance, best, step)
            self._outbox.add(f"the acceptance of drafter {served}", sends)

    def log_drafter(
        self, folder: Path, versions: Versions, step: int, metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> Future[int | None]:
        """Queue a published drafter: LoggedModel, metrics linked at `step`, registered version, alias `serving`.

        `tags` must hold init and data_fingerprint. The folder must stay until the future is done; its result is the
        registered version, or None with tracking.log_drafters off. If MLflow never takes it, the future is never done.
        """
        all_tags = {
            "policy_version": str(versions.policy),
            "drafter_version": str(versions.drafter),
            "config_hash": config_hash(self._config),
            "run_name": self._config.name,
            "sampling": self._config.sampling,
            "policy": self._config.model,
            **({POLICY_TAG: self._policy} if self._policy else {}),
            **tags,
        }
        logged, self._newest_drafter = self._config.tracking.log_drafters, versions.drafter
        send = partial(self._send_drafter, folder, all_tags, dict(metrics), step)
        return self._outbox.add(f"drafter {versions.drafter}", send if logged else lambda: None)

    def log_dataset(self, task: Section) -> None:
        """Queue what the run's prompts come from, by the section of its configuration."""
        fields = task.model_dump(mode="json")
        name = fields.get("path") or fields["name"]
        used = DatasetInput(Dataset(name, config_hash(task), fields["type"], json.dumps(fields)), tags=[])
        self._outbox.add("the dataset", lambda: self._client.log_inputs(self.run_id, [used]))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Queue tags of the run."""
        for name, value in tags.items():
            self._outbox.add(f"the tag {name}", partial(self._client.set_tag, self.run_id, name, value))

    def log_decisions(self, path: Path, event: DrafterEvent) -> None:
        """Queue decisions.jsonl as an artifact, and the newest decision as a tag, which the run's page shows."""

        def send() -> None:
            self._client.set_tag(self.run_id, "drafter.last_decision", f"step {event.step}: {event.kind}")
            self._client.set_tag(self.run_id, "drafter.last_reason", event.reason)
            self._client.log_artifact(self.run_id, str(path))

        self._outbox.add(path.name, send)

    def finish(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """Send what waits, set the status (FINISHED, KILLED or FAILED), and say what could not be sent."""
        self._finished, ends = True, partial(self._client.set_terminated, self.run_id, status)
        left = self._outbox.close(f"the status {status}", ends, timeout_s)
        if left or self._outbox.dropped:
            again = resume_arguments(self._config.run_root, self._config.name)
            lacks = f"{', '.join(left[:3])}{f' and {len(left) - 3} more' if left[3:] else ''}"
            self._say(
                f"MLflow did not take everything after step {self._sent_step}: it lacks {lacks or 'steps'}. Nothing is lost: "
                f"steps are in metrics.jsonl ({again} sends them once MLflow takes them), drafters in drafters/"
            )

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if not self._finished:
            stopped = exc_type is not None and issubclass(exc_type, KeyboardInterrupt | SystemExit)
            self.finish("FINISHED" if exc_type is None else "KILLED" if stopped else "FAILED")

    def _own_registered_model(self) -> str:
        """Return the registered model of this policy: another policy with the same name may have taken the plain name."""
        name = registered_name(self._config.model)
        found = self._client.search_registered_models(f"name = '{name}'")
        if not (self._policy and found) or found[0].tags.get(POLICY_TAG, self._policy) == self._policy:
            return name
        own = f"{name.removesuffix('drafter')}{self._policy[:8]}-drafter"
        self._say(f"MLflow has drafters of another policy as {name}; those of this run become {own}")
        return own

    def _start_run(self, history: Sequence[Mapping[str, Any]] | None) -> str:
        """Continue the newest run of this folder or create one, with its parameters. Returns the run's id."""
        config, client, experiments = self._config, self._client, [self._experiment]
        # The caller holds the run folder's lock, so whatever still says RUNNING for this folder has died.
        folder = hashlib.blake2b(str((config.run_root / config.name).resolve()).encode(), digest_size=6).hexdigest()
        of_this_folder = f"tags.`{FOLDER_TAG}` = '{folder}'"
        for stale in client.search_runs(experiments, f"{of_this_folder} AND attributes.status = 'RUNNING'"):
            client.set_terminated(stale.info.run_id, "FAILED")
        if history is not None:
            # Parameters cannot be changed, so a run that begins again with other settings is another one.
            same = of_this_folder if history else f"{of_this_folder} AND tags.config_hash = '{config_hash(config)}'"
            if newest := client.search_runs(experiments, same, max_results=1):  # the newest comes first
                client.update_run(newest[0].info.run_id, status="RUNNING")
                return newest[0].info.run_id
            self._say(f"MLflow at {self.uri} has no run of this folder; a new one is started from metrics.jsonl")
        tags = resolve_tags() | {FOLDER_TAG: folder, "config_hash": config_hash(config)}
        if git := git_state(Path(__file__).parent)[0]:
            tags |= {MLFLOW_GIT_COMMIT: git["commit"], MLFLOW_GIT_DIRTY: str(git["dirty"])}
        run_id = client.create_run(self._experiment, tags=tags, run_name=config.name).info.run_id
        # MLflow refuses to change a parameter; the few that a resume may change keep their first value.
        fields = flatten(config.model_dump(mode="json")).items()
        params = [Param(re.sub(r"[^\w. :/-]", "_", name), str(value)) for name, value in fields]
        client.log_batch(run_id, params=params)
        return run_id

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _send_drafter(self, folder: Path, tags: dict[str, str], metrics: Mapping[str, float], step: int) -> int:
        """Register a drafter, unless a resumed run has registered it before, and move the alias `serving` to it."""
        number = int(tags["drafter_version"])
        parent = self._registered.get(max((older for older in self._registered if older < number), default=-1))
        tags = tags | {"parent_version": str(parent.version) if parent else "none"}
        tags |= {DIGEST_TAG + file: file_digest(folder / file) for file in FILES}
        version = self._registered.get(number)
        if version is None or not version.tags.items() >= tags.items():
            version = self._registered[number] = self._register(folder, tags)
            model_id = model_id_of(version)
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step=step)])
            self._client.log_batch(self.run_id, metrics=_points(metrics, step, model_id))
        if number == self._newest_drafter:  # an older one that was set aside may come after it
            self._client.set_registered_model_alias(self.registered_model, "serving", str(version.version))
        return int(version.version)

    def _register(self, folder: Path, tags: dict[str, str]) -> ModelVersion:
        client, name = self._client, f"drafter-d{tags['drafter_version']}"
        model_id = client.create_logged_model(
            self._experiment, name, source_run_id=self.run_id, tags=tags, model_type="drafter"
        ).model_id
        client.log_model_artifacts(model_id, str(folder))
        client.finalize_logged_model(model_id, "READY")
        policy, registered = tags["policy"], self.registered_model
        if not client.search_registered_models(f"name = '{registered}'"):
            own = {POLICY_TAG: tags[POLICY_TAG]} if POLICY_TAG in tags else None
            client.create_registered_model(registered, own, f"Drafters for the policy {policy}, by cotrain.")
        about = f"Drafter {tags['drafter_version']} of run {tags['run_name']}, for {policy} after {tags['policy_version']} updates"
        about, source = f"{about}. {tags.get('decision', '')}", f"models:/{model_id}"
        return client.create_model_version(registered, source, self.run_id, tags, description=about, model_id=model_id)

    def _send_served(self, drafter_version: int, reached: Mapping[str, float], best: int | None, step: int) -> None:
        """Log and tag a drafter's acceptance, and move the alias `best`. Drafters that are not registered are skipped."""
        version, best_version = self._registered.get(drafter_version), self._registered.get(best or 0)
        if version is not None and reached:
            self._client.log_batch(self.run_id, metrics=_points(reached, step, model_id_of(version)))
            for name, value in reached.items():
                self._client.set_model_version_tag(version.name, str(version.version), name, str(value))
        if best_version is not None:
            self._client.set_registered_model_alias(self.registered_model, "best", str(best_version.version))


def registered_name(policy_model: str) -> str:
    """Return `<policy>-drafter` for a policy given as a folder, a hub id or a bundled model."""
    name = Path(policy_model.removeprefix("bundled:")).name
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-drafter"


def model_id_of(version: ModelVersion) -> str:
    """The LoggedModel that a version was made from; version.model_id is empty in database stores."""
    return (version.source or "").removeprefix("models:/")


def _points(metrics: Mapping[str, float], step: int, model_id: str | None = None) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, float(value), now, step, model_id=model_id) for name, value in metrics.items()]
