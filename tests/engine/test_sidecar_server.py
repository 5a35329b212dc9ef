"""vLLM's OpenAI server in a second terminal, whose host claims the extension class and the weight-transfer backend."""

import json
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cotrain.transport.spool import Spool, State, read_json
from tests.sidecar_parts import host_environment

pytestmark = pytest.mark.engine

COTRAIN = (sys.executable, "-m", "pipelines.cli")
LETTERS = "0123456789 \n+-=.abcdefgh"
DRAFTER = (
    "drafter.model.draft_vocab_size=128",
    "drafter.batch_tokens=1024",
    "drafter.updates_per_step=30",
    "adaptive=false",
    "nice=0",  # so that it learns in time where other tests run beside it
)
SECONDS = 200
FEW_DRAFTS = 500
SESSION = (
    ("/pause?mode=keep", {}), ("/init_weight_transfer_engine", {"init_info": {}}), ("/start_weight_update", {}),
    ("/update_weights", {"update_info": {"path": "FILE"}}), ("/finish_weight_update", {}), ("/reset_prefix_cache", {}),
    ("/resume", {}),
)  # fmt: skip
"""The calls of a host's weight update."""


class Server:
    """Requests to a server, and what its engine has left in the spool."""

    def __init__(self, port: int, spool: Spool, model: str):
        self._base, self._spool, self._model, self._draw = f"http://127.0.0.1:{port}", spool, model, random.Random(3)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._base + path, data, headers), timeout=120) as answer:
            return json.loads(answer.read() or "null")

    def is_up(self) -> bool:
        try:
            return urllib.request.urlopen(self._base + "/health", timeout=2).status == 200
        except OSError:
            return False

    def chat(self, text: str, **options: Any) -> str:
        messages = {"model": self._model, "messages": [{"role": "user", "content": text}]}
        answer = self.post("/v1/chat/completions", messages | options)
        return str(answer["choices"][0]["message"]["content"])

    def greedy(self) -> list[str]:
        return [self.chat(f"{i}+{i}=", temperature=0.0, max_tokens=48) for i in range(4)]

    def traffic(self, **options: Any) -> None:
        """Sixteen requests, eight at once."""
        texts = ["".join(self._draw.choice(LETTERS) for _ in range(8)) for _ in range(16)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda text: self.chat(text, temperature=1.0, max_tokens=64, **options), texts))

    def update(self, file: Path) -> None:
        """The host's own weight update."""
        for path, body in SESSION:
            self.post(path, json.loads(json.dumps(body).replace("FILE", str(file))))

    def prometheus(self) -> dict[str, int]:
        text = urllib.request.urlopen(self._base + "/metrics").read().decode()
        names = {"drafts": "num_drafts", "drafted_tokens": "num_draft_tokens", "accepted_tokens": "num_accepted_tokens"}
        return {
            name: sum(int(float(n)) for n in re.findall(rf"^vllm:spec_decode_{metric}_total\S* (\S+)$", text, re.M))
            for name, metric in names.items()
        }

    def state(self) -> State:
        (engine,) = self._spool.engines()
        return read_json(engine.state, State)

    def serve_until(self, is_enough: Callable[[State, float], bool]) -> tuple[State, float]:
        """Traffic until state and acceptance length of the last FEW_DRAFTS are enough, or SECONDS have passed."""
        deadline, seen, length = time.monotonic() + SECONDS, [self.state()], 1.0
        while not is_enough(seen[-1], length) and time.monotonic() < deadline:
            self.traffic()
            seen.append(self.state())
            while seen[-1].counts["drafts"] - seen[1].counts["drafts"] >= FEW_DRAFTS:
                del seen[0]
            drafts, accepted = (seen[-1].counts[name] - seen[0].counts[name] for name in ("drafts", "accepted_tokens"))
            length = 1 + accepted / drafts if drafts >= FEW_DRAFTS else 1.0
        return seen[-1], length


@contextmanager
def process(command: list[str], environment: dict[str, str], folder: Path, log: str) -> Iterator[subprocess.Popen]:
    """A process whose output goes to a file, ended by Ctrl-C."""
    with (folder / log).open("w") as output:
        running = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield running
            running.send_signal(signal.SIGINT)
            running.wait(120)
        finally:
            running.kill()
            running.wait()


def slightly_moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A policy after a large step of training, which still writes such text as before."""
    generator = torch.Generator().manual_seed(7)
    return {
        n: t + 0.15 * t.std() * torch.randn(t.shape, generator=generator) if t.dim() == 2 else t
        for n, t in state.items()
    }


def wait_for(is_so: Callable[[], bool], running: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def trainer(folder: Path, empty_mlflow_database: Path, target_folder: Path) -> Iterator[Spool]:
    """The first terminal: `cotrain sidecar`."""
    (folder / "runs").mkdir()
    (folder / "runs" / "mlflow.db").write_bytes(empty_mlflow_database.read_bytes())
    options = ["--model", str(target_folder), "--spool", f"{folder}/spool", "--share", "1", "name=server"]
    with process(
        [*COTRAIN, "sidecar", *options, *DRAFTER], host_environment(folder, None), folder, "trainer.log"
    ) as running:
        wait_for((spool := Spool(folder / "spool")).is_alive, running)
        wait_for(lambda: "start the engine" in (folder / "trainer.log").read_text(), running)
        yield spool
    assert running.returncode == 0


@pytest.fixture(scope="module")
def server(folder: Path, trainer: Spool, target_folder: Path) -> Iterator[Server]:
    """The second terminal: the host's server, by the line that the first one has printed, and the host's own options."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = (folder / "trainer.log").read_text().splitlines()
    variable, *command = shlex.split(next(line for line in lines if line.strip().startswith("COTRAIN_SIDECAR=")))
    options = ["--port", str(port), "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    options += ["--worker-extension-cls", "tests.engine.foreign_host.Extension", "--max-num-seqs", "16"]
    options += ["--weight-transfer-config", json.dumps({"backend": "foreign_host"})]
    environment = host_environment(folder, None) | {"VLLM_SERVER_DEV_MODE": "1"} | dict([variable.split("=")])
    with process([*command, *options], environment, folder, "server.log") as running:
        server = Server(port, trainer, str(target_folder))
        wait_for(server.is_up, running)
        yield server


def test_it_learns_counts_the_hosts_update_and_changes_no_greedy_text(
    server: Server, folder: Path, target_state: dict[str, torch.Tensor]
) -> None:
    assert server.post("/collective_rpc", {"method": "greet"}) == {"results": ["the host's own extension"]}
    before = server.greedy()
    state, length = server.serve_until(lambda state, length: length >= 2.0)
    assert length >= 2.0 and state.policy_version == 0 and state.drafter_version > 0
    assert server.greedy() == before  # many swaps later

    save_file(slightly_moved(target_state), folder / "update.safetensors")
    server.update(folder / "update.safetensors")
    moved = server.greedy()
    assert moved != before
    swapped = server.state().drafter_version
    state, _ = server.serve_until(lambda state, _: state.policy_version == 1 and state.drafter_version > swapped)
    assert state.policy_version == 1
    assert server.greedy() == moved
    assert state.reason is None and not state.refused


def test_counts_are_those_of_prometheus(server: Server) -> None:
    """Of an idle engine, which reports with its next step."""
    server.traffic()
    time.sleep(1.5)
    counted = server.prometheus()
    server.chat("1", max_tokens=1)  # a step without drafts, in which the engine reports
    state = server.state()
    assert counted["drafts"] > 0 and counted == {name: state.counts[name] for name in counted}


def test_a_request_that_opts_out_is_not_tapped(server: Server) -> None:
    before = server.state()
    server.traffic(vllm_xargs={"cotrain": False})
    time.sleep(1.5)
    server.chat("1", max_tokens=1, vllm_xargs={"cotrain": False})
    state = server.state()
    assert state.counts["tapped"] == before.counts["tapped"]
    assert state.dropped["opted out"] - before.dropped["opted out"] >= 16
