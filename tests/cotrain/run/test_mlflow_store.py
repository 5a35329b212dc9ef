"""The sqlite file that MLflow records into, when its creation is cut off."""

import subprocess
import sys
import time
from pathlib import Path

from cotrain.run.mlflow_store import connect

CREATE = "import sys; from cotrain.run.mlflow_store import connect; connect(f'sqlite:///{sys.argv[1]}')"


def test_a_database_whose_creation_was_killed_is_created_again(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    process = subprocess.Popen([sys.executable, "-c", CREATE, str(database)])
    deadline = time.monotonic() + 60
    while not any(file.stat().st_size > 2**15 for file in tmp_path.rglob("mlflow.db")) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert not database.exists()  # MLflow opens one that was cut off in the wrong moment never again
    connect(f"sqlite:///{database}").search_experiments()
    assert [file.name for file in tmp_path.iterdir()] == ["mlflow.db"]
