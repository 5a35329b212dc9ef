"""The MLflow run of a study: parent of the runs of its arms, and where the table is kept."""

import hashlib
from pathlib import Path

from cotrain.run.mlflow_store import (  # first of MLflow: sets its environment
    MlflowClient,
    MlflowException,
    connect,
    experiment_id,
    first_line,
)
from cotrain.run.provenance import flatten
from cotrain.run.store_uri import tracking_uri
from pipelines.ablate.plan import Study

# isort: split
from mlflow.entities import Param
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

FOLDER_TAG = "cotrain.study_folder"


class StudyRun:
    """The parent run; one for each study folder, however often the study is continued."""

    def __init__(self, study: Study) -> None:
        """Raises ValueError naming tracking.uri when the store does not answer."""
        config = study.shared
        uri = tracking_uri(config)
        self._client: MlflowClient = connect(uri)
        experiment = experiment_id(self._client, uri)
        tags = {FOLDER_TAG: hashlib.blake2b(str(study.folder.resolve()).encode(), digest_size=6).hexdigest()}
        query = " AND ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        if known := self._client.search_runs([experiment], query, max_results=1):
            self.run_id: str = known[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = self._client.create_run(experiment, tags=tags, run_name=study.name).info.run_id
        self._log_params(study)

    def finish(self, finished: bool, *files: Path) -> str | None:
        """Store the files that exist and set the status. Returns why it could not; the files stay where they are."""
        try:
            for file in files:
                if file.is_file():
                    self._client.log_artifact(self.run_id, str(file))
            self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")
        except (MlflowException, OSError) as error:
            return first_line(error)
        return None

    def _log_params(self, study: Study) -> None:
        fields = {"name": study.name, "steps": study.shared.steps}
        for arm in study.arms:
            names = ("init", "online", "policy", "draft_tokens", "objective", "speculation")
            fields |= flatten({arm.slug: {name: getattr(arm, name) for name in names}}, "arm.")
        # A parameter cannot be changed; arms that were added are new parameters.
        known = self._client.get_run(self.run_id).data.params
        params = [Param(key, str(value)[:MAX_PARAM_VAL_LENGTH]) for key, value in fields.items() if key not in known]
        for start in range(0, len(params), 100):
            self._client.log_batch(self.run_id, params=params[start : start + 100])
