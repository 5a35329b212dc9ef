"""What a run keeps: its folder, metrics, checkpoints, tracking and console."""

import os

# MLflow reads these when it is imported. It retries a failed request for minutes, but a run keeps its rows in
# metrics.jsonl and sends them again with the next step, so a request may fail early.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
