"""The service on real shards, with the real trainer and real MLflow; engines are simulated (tests/engine has real ones)."""

import threading
import time
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from transformers import LlamaForCausalLM

from cotrain.config.sidecar import SidecarConfig, load_sidecar
from cotrain.models.loading import TINY_MODEL, resolve_model
from cotrain.run.rows import read_rows
from cotrain.sidecar.service import serve
from cotrain.sidecar.spool import Spool, read_json
from pipelines.cli import main
from tests.cotrain.sidecar.host import Host
from tests.cotrain.trainer.conftest import Target


@pytest.fixture(scope="module")
def tiny() -> Target:
    folder = resolve_model(TINY_MODEL)
    return Target(folder, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.fixture
def config(tmp_path: Path, mlflow_database: Path) -> SidecarConfig:
    overrides = [
        "name=beside", f"model={TINY_MODEL}", f"run_root={tmp_path / 'runs'}", f"spool={tmp_path / 'spool'}",
        "drafter.model.type=eagle3", "drafter.model.draft_vocab_size=256", "drafter.model.aux_layers=[2,4,5]",
        "drafter.batch_tokens=700", "drafter.updates_per_step=8", "drafter.optimizer.learning_rate=3e-3",
    ]  # fmt: skip
    return load_sidecar([], overrides)


class Service:
    """`serve` in a thread of its own."""

    def __init__(self, config: SidecarConfig, resume: bool = False):
        self.config, self.stop, self.status = config, threading.Event(), None
        self.spool, self.folder = Spool(config.spool_folder), config.run_root / config.name
        self._thread = threading.Thread(target=self._serve, args=(resume,), daemon=True)
        self._thread.start()
        self.until(lambda: self.spool.is_alive() and read_json(self.spool.folder / "settings.json") is not None)

    def _serve(self, resume: bool) -> None:
        self.status = serve(self.config, resume, self.stop)

    def rows(self) -> list[dict]:
        return read_rows(self.folder / "metrics.jsonl")

    def decisions(self) -> list[dict]:
        return read_rows(self.folder / "decisions.jsonl")

    def until(self, condition, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self._thread.is_alive() and time.monotonic() < end
            time.sleep(0.02)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert self.status == 0


def play(service: Service, host: Host, waves: int, first_seed: int = 0) -> list[float]:
    """Waves of requests, each as soon as the round before has begun and its publication is there to be taken."""
    lengths = []
    for seed in range(first_seed, first_seed + waves):
        rounds = len(service.rows())
        lengths.append(host.wave(seed))
        service.until(lambda rounds=rounds: len(service.rows()) > rounds)
    return lengths


def test_a_host_gets_better_drafters_and_everything_is_recorded(config, tiny, mlflow_database, capsys):
    service = Service(config)
    host = Host(service.spool, tiny)
    lengths = play(service, host, 10)
    service.end()
    print(lengths)
    assert min(lengths[-3:]) > lengths[0] + 0.25
    published = [event for event in service.decisions() if event["kind"] == "published"]
    assert len(published) >= 2 and not any(
        e["kind"] in ("alarm", "rolled back", "refused") for e in service.decisions()
    )
    assert not service.spool.folder.exists()
    out = capsys.readouterr().out
    assert "engine e0: process" in out and "round 3  " in out and "accept" in out
    rows = service.rows()
    assert rows[-1]["rollout/expected_acceptance_length"] == pytest.approx(
        rows[-1]["rollout/acceptance_length"], rel=0.15
    )
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))

    client = MlflowClient(f"sqlite:///{mlflow_database}", f"sqlite:///{mlflow_database}")
    versions = client.search_model_versions("name = 'tiny_llama-drafter'")
    assert {int(v.tags["drafter_version"]) for v in versions} == {event["version"] for event in published}
    run = client.get_run(versions[0].run_id)
    assert run.info.status == "FINISHED" and run.data.tags["host"] == "e0"
    assert client.get_model_version_by_alias("tiny_llama-drafter", "serving").tags["parent_version"] != "none"
    assert main(["report", str(service.folder)]) == 0
    page = (service.folder / "report" / "report.html").read_text()
    assert "Acceptance length, served and expected" in page and "Reward" not in page
