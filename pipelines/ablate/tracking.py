"""The MLflow run of a study: parent of the runs of its arms, and where the table is kept."""

import hashlib
from pathlib import Path

from mlflow import MlflowException

from cotrain.run.mlflow_store import connect, experiment_id, first_line, tracking_uri
from pipelines.ablate.plan import Study

FOLDER_TAG = "cotrain.study_folder"


class StudyRun:
    """The parent run; one for each study folder, however often the study is continued."""

    def __init__(self, study: Study) -> None:
        """Raises ValueError naming tracking.uri when the store does not answer."""
        config, uri = study.shared, tracking_uri(study.shared)
        self._client = connect(uri)
        experiment = experiment_id(self._client, uri)
        folder = hashlib.blake2b(str(study.folder.resolve()).encode(), digest_size=6).hexdigest()
        known = self._client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{folder}'", max_results=1)
        if known:
            self.run_id: str = known[0].info.run_id
            self._client.update_run(self.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags={FOLDER_TAG: folder}, run_name=study.config.name)
            self.run_id = run.info.run_id
        arms = {arm.name: arm.model_dump(exclude={"name", "runs"}) for arm in study.arms}
        self._client.log_dict(self.run_id, {"steps": config.steps, "arms": arms}, "arms.json")

    def finish(self, finished: bool, *files: Path) -> str | None:
        """Store the files and set the status. Returns why it could not; the files stay where they are."""
        try:
            for file in files:
                self._client.log_artifact(self.run_id, str(file))
            self._client.set_terminated(self.run_id, "FINISHED" if finished else "KILLED")
        except (MlflowException, OSError) as error:
            return first_line(error)
        return None
