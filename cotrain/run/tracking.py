"""One run in MLflow. metrics.jsonl is the record; an outbox sends a copy to MLflow (docs/guide/tracking.md)."""

import hashlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import LoggedModelOutput, Metric, Param
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking.context.registry import resolve_tags

from cotrain.config.schema import RunConfig
from cotrain.config.sidecar import SidecarConfig
from cotrain.records import Versions
from cotrain.run.mlflow_store import connect, experiment_id, in_short, tracking_uri
from cotrain.run.provenance import config_hash, flatten
from cotrain.run.registry import DIGEST_TAG, EXPECTED_TAG, FILES
from cotrain.run.run_dir import resume_arguments
from cotrain.weights.digests import file_digest

FOLDER_TAG = "cotrain.run_folder"  # tag of a run with a digest of its folder's path
EXPECTED = "drafter/expected_acceptance_length"
"""Metric of a published drafter with the most draft tokens, on held-out rollouts."""
MARKER = "step"
"""A metric that is sent with every row. MLflow stores rows whole, so its history tells which steps MLflow has."""
MOST_WAITING = 1000  # most entries that wait for a store that is down; the oldest are dropped

Rows = Sequence[Mapping[str, Any]]
Say = Callable[[str], None]
Entry = tuple[str, Callable[[], None]]  # what messages call it, and what sends it


class Outbox:
    """Entries on their way to one MLflow run, sent in order by a thread. What cannot be sent delays neither run nor entries.

    If an entry fails, the outbox writes a tag. If that fails too, the store is down: all entries wait, and each new one starts
    another try. Otherwise the entry is sent once more, since the store may have come back in between. If that fails, the store
    refuses this entry alone, and the entries after it are sent.
    """

    def __init__(self, write_tag: Callable[[str], Any], say: Say):
        """write_tag: writes a tag of the MLflow run with this text. say: prints the few lines that a user must read."""
        self.say, self.is_down = say, False
        self._write_tag, self._failures = write_tag, 0
        self._waiting, self._refused = deque[Entry](), dict[str, None]()
        self._thread, self._scheduled = ThreadPoolExecutor(1, "mlflow"), False

    def add(self, what: str, send: Callable[[], None]) -> None:
        """Queue an entry, which messages call `what`."""
        self._waiting.append((what, send))
        if not self._scheduled:
            self._scheduled = True
            self._thread.submit(self._send_waiting)

    def close(self, what: str, send: Callable[[], None], timeout_s: float) -> list[str]:
        """Send what waits and a last entry. Returns the names of entries that MLflow does not have."""
        self._waiting.append((what, send))
        wait([self._thread.submit(self._send_waiting)], timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)
        return [*self._refused, *(what for what, _ in self._waiting)]

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting:
            what, send = entry = self._waiting.popleft()
            try:
                send()
            except Exception as error:  # whatever a store or its network raises, the run continues without it
                if self._is_store_down(what, error):
                    self._waiting.appendleft(entry)
                    while len(self._waiting) > MOST_WAITING:
                        self._waiting.popleft()
                    return
                self._send_again(what, send)
            if self.is_down:
                self.is_down = False
                self.say("MLflow takes metrics again, and gets those that it has missed")

    def _send_again(self, what: str, send: Callable[[], None]) -> None:
        """Send an entry that failed; if it fails again, say that MLflow does not take it, once if names differ in numbers only."""
        try:
            send()
        except Exception as error:
            if re.sub(r"\d+", "", what) not in (re.sub(r"\d+", "", refused) for refused in self._refused):
                self.say(f"MLflow does not take {what} ({in_short(error)}); the run goes on without it")
            self._refused[what] = None

    def _is_store_down(self, what: str, error: Exception) -> bool:
        """Return whether the store takes no tag either, and say so once."""
        try:
            # The number makes the text a new one: a database that only reads would accept an old one.
            self._write_tag(f"{self._failures + 1} failures, the last one of {what}: {in_short(error)}")
        except Exception:
            if not self.is_down:
                self.say(f"MLflow takes no metrics ({in_short(error)}); the run goes on, each step tries again")
            self.is_down = True
            return True
        self._failures += 1
        return False


class Tracker(AbstractContextManager["Tracker"]):
    """The MLflow run of a training run, or of a sidecar."""

    def __init__(
        self, config: RunConfig | SidecarConfig, *, policy: str = "", history: Rows | None = None, say: Say = print
    ) -> None:
        """Start an MLflow run or, with a `history`, continue the newest one of this run folder.

        `policy` is the fingerprint of the policy's weights. `history` holds the rows of metrics.jsonl before a resume, perhaps
        none; those that MLflow lacks are sent. `say` prints the few lines that a user must read, also from the sending thread.
        Raises ValueError when the store does not answer; later failures are only reported.
        """
        self.uri = tracking_uri(config)
        self._config, self._policy, self._client = config, policy, connect(self.uri)
        self._outbox = Outbox(lambda text: self._client.set_tag(self.run_id, "cotrain.failures", text), say)
        self.registered_model, self.run_id = registered_name(config.model, policy), self._start_run(history)
        self._has = {point.step: True for point in self._client.get_metric_history(self.run_id, MARKER)}
        """Whether MLflow has a step."""
        rows = self._client.search_model_versions(f"run_id = '{self.run_id}' AND tags.drafter_version LIKE '%'")
        rows.sort(key=lambda row: int(row.version))  # if a drafter was registered twice, the newest registration counts
        self._registered = {int(row.tags["drafter_version"]): row for row in rows}
        self._finished = False
        for row in history or ():
            self.log_step(row["step"], row)

    @property
    def behind(self) -> str:
        """Text for a step line that says how many steps MLflow lacks because it does not answer; empty while all is well."""
        return f"mlflow {len(self._missing())} behind" if self._outbox.is_down and self._missing() else ""

    def log_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Queue one step, unless MLflow has it already: a replayed step is not recorded twice."""
        if step in self._has:
            return
        self._has[step] = False
        points = _points({name: value for name, value in metrics.items() if value is not None} | {MARKER: step}, step)

        def send() -> None:
            # MLflow keeps one of two equal points, so sending again after a lost answer does no harm.
            self._client.log_batch(self.run_id, metrics=points)
            self._has[step] = True

        self._outbox.add(f"step {step}", send)

    def log_drafter(
        self, folder: Path, versions: Versions, step: int, metrics: Mapping[str, float], tags: Mapping[str, str]
    ) -> None:
        """Queue a published drafter: LoggedModel, metrics linked at `step`, registered version, aliases `serving` and `best`.

        `tags` must hold data_fingerprint. The folder must stay. Nothing is registered with tracking.log_drafters off.
        """
        config = self._config
        if not config.tracking.log_drafters:
            return
        lineage = {"policy_version": str(versions.policy), "drafter_version": str(versions.drafter)}
        lineage |= {"config_hash": config_hash(config), "run_name": config.name, "sampling": config.sampling}
        lineage |= {"init": (config.drafter.init if config.drafter else None) or "random"}
        lineage |= {"policy": config.model, "policy_fingerprint": self._policy} | dict(tags)
        send = partial(self._send_drafter, folder, lineage, dict(metrics), step)
        self._outbox.add(f"drafter {versions.drafter}", send)

    def finish(self, status: str = "FINISHED", timeout_s: float = 60.0) -> None:
        """Send what waits, set the status (FINISHED, KILLED or FAILED), and say what could not be sent."""
        self._finished, ends = True, partial(self._client.set_terminated, self.run_id, status)
        waiting = self._outbox.close(f"the status {status}", ends, timeout_s)
        if lacks := list(dict.fromkeys([*(f"step {step}" for step in self._missing()), *waiting])):
            again = resume_arguments(self._config.run_root, self._config.name)
            more = f" and {len(lacks) - 3} more" if lacks[3:] else ""
            self._outbox.say(
                f"MLflow did not take everything: it lacks {', '.join(lacks[:3])}{more}. Nothing is lost: steps are in "
                f"metrics.jsonl ({again} sends them once MLflow takes them), drafters in drafters/"
            )

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if not self._finished:
            stopped = exc_type is not None and issubclass(exc_type, KeyboardInterrupt | SystemExit)
            self.finish("FINISHED" if exc_type is None else "KILLED" if stopped else "FAILED")

    def _missing(self) -> list[int]:
        return [step for step, has in self._has.items() if not has]

    def _start_run(self, history: Rows | None) -> str:
        """Continue the newest run of this folder or create one, with its parameters. Returns the run's id."""
        config, client, experiment = self._config, self._client, experiment_id(self._client, self.uri)
        # The caller holds the run folder's lock, so whatever still says RUNNING for this folder has died.
        folder = hashlib.blake2b(str((config.run_root / config.name).resolve()).encode(), digest_size=6).hexdigest()
        of_this_folder = f"tags.`{FOLDER_TAG}` = '{folder}'"
        for stale in client.search_runs([experiment], f"{of_this_folder} AND attributes.status = 'RUNNING'"):
            client.set_terminated(stale.info.run_id, "FAILED")
        if history is not None:
            # Parameters cannot be changed, so a run that begins again with other settings is another one.
            same = of_this_folder if history else f"{of_this_folder} AND tags.config_hash = '{config_hash(config)}'"
            if newest := client.search_runs([experiment], same, max_results=1):  # the newest comes first
                client.update_run(newest[0].info.run_id, status="RUNNING")
                return newest[0].info.run_id
            self._outbox.say("MLflow has no run of this folder; a new one is started from metrics.jsonl")
        tags = resolve_tags() | {FOLDER_TAG: folder, "config_hash": config_hash(config)}
        run_id = client.create_run(experiment, tags=tags, run_name=config.name).info.run_id
        # MLflow refuses to change a parameter; the few that a resume may change keep their first value.
        fields = flatten(config.model_dump(mode="json")).items()
        params = [Param(re.sub(r"[^\w. :/-]", "_", name), str(value)) for name, value in fields]
        client.log_batch(run_id, params=params)
        return run_id

    # -- the sending thread ------------------------------------------------------------------------------------------

    def _send_drafter(self, folder: Path, tags: dict[str, str], metrics: Mapping[str, float], step: int) -> None:
        """Register a drafter, unless a resumed run has registered it before, and move the alias `serving` to it."""
        number = int(tags["drafter_version"])
        earlier = [row for older, row in sorted(self._registered.items()) if older < number]
        tags = tags | {"parent_version": str(earlier[-1].version) if earlier else "none"}
        tags |= {DIGEST_TAG + file: file_digest(folder / file) for file in FILES}
        if EXPECTED in metrics:
            tags[EXPECTED_TAG] = f"{metrics[EXPECTED]:.4f}"
        version = self._registered.get(number)
        if version is None or not version.tags.items() >= tags.items():
            version = self._registered[number] = self._register(folder, tags)
            model_id = (version.source or "").removeprefix("models:/")  # model_id is empty in database stores
            self._client.log_outputs(self.run_id, [LoggedModelOutput(model_id, step=step)])
            self._client.log_batch(self.run_id, metrics=_points(metrics, step, model_id))
        for alias, row in (("serving", version), ("best", best_of([*earlier, version]))):
            self._client.set_registered_model_alias(self.registered_model, alias, str(row.version))

    def _register(self, folder: Path, tags: dict[str, str]) -> ModelVersion:
        client, registered, run_id, number = self._client, self.registered_model, self.run_id, tags["drafter_version"]
        experiment = client.get_run(run_id).info.experiment_id
        model_id = client.create_logged_model(
            experiment, f"drafter-d{number}", run_id, tags, model_type="drafter"
        ).model_id
        client.log_model_artifacts(model_id, str(folder))
        client.finalize_logged_model(model_id, "READY")
        if not client.search_registered_models(f"name = '{registered}'"):
            client.create_registered_model(registered)
        return client.create_model_version(registered, f"models:/{model_id}", run_id, tags, model_id=model_id)


def registered_name(policy_model: str, fingerprint: str) -> str:
    """Return `<policy>-<8 digits of its fingerprint>-drafter` for a folder, a hub id or a bundled model."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(policy_model.removeprefix("bundled:")).name)
    return "-".join(filter(None, [name, fingerprint[:8], "drafter"]))


def best_of(rows: Sequence[ModelVersion]) -> ModelVersion:
    """Return the drafter with the longest expected acceptance length, of versions in the order of their publication.

    What serves again after a roll back has no expectation; only that and later versions count.
    """
    best = rows[0]
    for row in rows[1:]:
        expected = row.tags.get(EXPECTED_TAG)
        if expected is None or float(expected) >= float(best.tags.get(EXPECTED_TAG, 0.0)):
            best = row
    return best


def _points(metrics: Mapping[str, float], step: int, model_id: str | None = None) -> list[Metric]:
    now = int(time.time() * 1000)
    return [Metric(name, float(value), now, step, model_id=model_id) for name, value in metrics.items()]
