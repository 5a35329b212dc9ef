"""What holds for every test: few threads, no network, nothing recorded outside the test's own folder."""

import os

# Each of the test processes that run side by side has a core of its own, and so have the processes that it starts.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# Before torch, Ray and MLflow are imported. Tests share the cores with the processes they start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.pop("MLFLOW_TRACKING_URI", None)
