"""The MLflow run of a study: parent of its runs, and where the table is kept."""

import hashlib

from cotrain.run import mlflow_store  # first of MLflow: sets its environment
from cotrain.run.store_uri import tracking_uri
from pipelines.ablate.plan import Study, runs_of
from pipelines.page.folders import STUDY

FOLDER_TAG = "cotrain.study_folder"


def open_study_run(study: Study) -> tuple[mlflow_store.MlflowClient, str]:
    """A client and the id of the run; there is one for each study folder, however often the study is continued.

    Raises ValueError naming tracking.uri when the store does not answer.
    """
    uri = tracking_uri(study.shared)
    client = mlflow_store.connect(uri)
    experiment = mlflow_store.experiment_id(client, uri)
    folder = hashlib.blake2b(str(study.folder.resolve()).encode(), digest_size=6).hexdigest()
    if known := client.search_runs([experiment], f"tags.`{FOLDER_TAG}` = '{folder}'", max_results=1):
        client.update_run(known[0].info.run_id, status="RUNNING")
        return client, known[0].info.run_id
    run = client.create_run(experiment, tags={FOLDER_TAG: folder}, run_name=study.config.name)
    return client, run.info.run_id


def close_study_run(client: mlflow_store.MlflowClient, run_id: str, study: Study) -> None:
    """Store study.json and the report, and set the status. The files stay in the study's folder if that fails."""
    finished = all(run.status == "finished" for run in runs_of(study.arms))
    try:
        for file in (STUDY, "report/table.md", "report/report.html"):
            client.log_artifact(run_id, str(study.folder / file))
        client.set_terminated(run_id, "FINISHED" if finished else "KILLED")
    except (mlflow_store.MlflowException, OSError) as error:
        print(f"MLflow did not take the table ({mlflow_store.first_line(error)}); it is in {study.folder}/report")
