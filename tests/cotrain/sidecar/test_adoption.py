"""Which engines of a host are adopted, with vLLM's own arguments and configuration; no engine starts here."""

import gc
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.engine.arg_utils import EngineArgs

from cotrain.engine.host import adoption
from cotrain.engine.host.adoption import MARK, NotAdopted, check_arguments, check_config, configured
from cotrain.engine.interface import RUNNER, SIDECAR_OF_RUNNER
from cotrain.models.loading import resolve_model
from cotrain.transport.spool import VARIABLE, Spool, SpoolError
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from tests.sidecar_parts import make_spool

CREATE = inspect.unwrap(EngineArgs.create_engine_config)
MODEL = resolve_model("tiny:llama")
PLAIN = {"runner_type": "generate", "tensor_parallel_size": 1} | dict.fromkeys(adoption.DIVIDED_OTHERWISE, 1)
OWN_EXTENSION = "cotrain.engine.worker_extension.CotrainWorker"


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    config = Eagle3Config.model_validate({"type": "eagle3", "draft_vocab_size": 128, "aux_layers": (2, 4, 5)})
    return make_spool(tmp_path / "spool", MODEL, build_drafter(config, TargetSpec.from_pretrained(MODEL), seed=0))


@pytest.fixture(scope="module")
def log_is_set_up() -> None:
    """The first configuration of a process makes vLLM set its loggers up, which takes the handlers of a test away."""
    CREATE(arguments())


@pytest.fixture
def beside_trainer(log_is_set_up: None, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv(VARIABLE, str(spool.folder))


def is_adopted(config: Any) -> bool:
    return bool(getattr(config.scheduler_config, MARK, False))


def arguments(**changes: Any) -> EngineArgs:
    args = EngineArgs(str(MODEL), dtype="float32", max_model_len=256, enforce_eager=True)
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def test_an_engine_of_the_same_model_is_adopted_by_name_or_folder(spool: Spool, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(MODEL)
    for model in (MODEL, tmp_path / "link", "tiny:llama"):
        assert check_arguments(arguments(model=str(model)), spool) == spool.settings()
    for scheduling in (False, True):
        assert check_arguments(arguments(async_scheduling=scheduling, worker_extension_cls="host.Extension"), spool)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Qwen/Qwen3-0.6B"}, r"drafter is for tiny:llama"),
        ({"worker_extension_cls": OWN_EXTENSION}, r"trains its drafter itself"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, r"has set speculative_config, .*leave it out"),
        ({"logits_processors": ["host.Processor"]}, r"has set logits_processors"),
    ],
)  # fmt: skip
def test_what_a_host_has_set_keeps_an_engine_from_being_adopted(
    changes: dict[str, Any], reason: str, spool: Spool
) -> None:
    with pytest.raises(NotAdopted, match=reason):
        check_arguments(arguments(**changes), spool)


def test_without_a_living_trainer_no_engine_is_adopted(spool: Spool) -> None:
    other = Spool(spool.folder)
    spool._held.close()
    with pytest.raises(NotAdopted, match=r"no sign of life: start it again"):
        check_arguments(arguments(), other)
    spool.abandon()
    with pytest.raises(SpoolError, match=r"settings\.json cannot be read.*start the trainer first"):
        check_arguments(arguments(), other)
    spool.folder.chmod(0o755)
    with pytest.raises(SpoolError, match=r"is drwxr-xr-x of user \d+: it must be a folder, drwx------ of user \d+$"):
        check_arguments(arguments(), other)


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "0.3.2", "1.0.0"])
def test_other_versions_of_vllm_are_left_alone(version: str, spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(NotAdopted, match=rf"vLLM {version}: install one of 0\.29 to 0\.33"):
        check_arguments(arguments(), spool)


@pytest.mark.parametrize("name", ["schedule", "gone"])
def test_a_vllm_whose_functions_have_moved_is_left_alone(
    name: str, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(adoption.SIDECAR, f"vllm.v1.core.sched.scheduler:Scheduler.{name}", "self other")
    with pytest.raises(
        NotAdopted, match=rf"not the one that was published: .*Scheduler\.{name} (takes .*\(self other\)|is missing)"
    ):
        check_arguments(arguments(), spool)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"runner_type": "pooling"}, r"is for pooling"),
        ({"data_parallel_size": 3}, r"data_parallel_size is 3: .* tensor_parallel_size alone"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size is 2"),
        ({"decode_context_parallel_size": 2}, r"decode_context_parallel_size is 2"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, r"nnodes is 2"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, r"started by ray: .* to mp"),
    ],
)
def test_what_vllm_makes_of_the_arguments_is_looked_at_too(changes: dict[str, Any], reason: str) -> None:
    everything = SimpleNamespace(**PLAIN)
    config = SimpleNamespace(use_v2_model_runner=False, model_config=everything, parallel_config=everything)
    check_config(config)
    vars(everything).update(tensor_parallel_size=2, distributed_executor_backend="mp")
    check_config(config)
    vars(everything).update(changes)
    with pytest.raises(NotAdopted, match=reason):
        check_config(config)


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_vllm_whose_model_runner_has_moved_is_left_alone(is_v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(**PLAIN)
    config = SimpleNamespace(use_v2_model_runner=is_v2, model_config=found, parallel_config=found)
    runner = "vllm.v1.worker.gpu.model_runner:GPUModelRunner" if is_v2 else RUNNER
    path = f"{runner}.take_draft_token_ids"
    monkeypatch.setitem(SIDECAR_OF_RUNNER[is_v2], path, "self other ...")
    with pytest.raises(
        NotAdopted, match=r"GPUModelRunner\.take_draft_token_ids takes \(self\) .*\(self other \.\.\.\)"
    ):
        check_config(config)
    config.use_v2_model_runner = not is_v2
    check_config(config)


@pytest.mark.usefixtures("beside_trainer")
def test_an_adopted_engine_drafts_and_its_arguments_stay_the_hosts(spool: Spool) -> None:
    args = arguments(load_format="dummy")
    for _ in range(2):  # as a host that makes the configuration twice
        config = configured(CREATE, args)
        assert is_adopted(config) and config.speculative_config.model == str(spool.initial)
        assert config.speculative_config.draft_load_config.load_format == "auto" != config.load_config.load_format
        assert args.speculative_config is None and args.async_scheduling is None
        assert spool.engine(config.instance_id).is_held, "so that the drafter stays that it has yet to load"
    engines = spool.engines()
    del config
    gc.collect()
    assert not any(engine.is_held for engine in engines), "an engine that is deleted does not live"


@pytest.mark.usefixtures("beside_trainer")
@pytest.mark.parametrize("fault", ["variable", "drafter", "refused", "hook", "ended"])
def test_every_other_engine_starts_as_its_host_asked(
    fault: str, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    faults: dict[str, Callable[[], None]] = {
        "variable": lambda: monkeypatch.delenv(VARIABLE),
        "drafter": lambda: (spool.initial / "config.json").unlink(),
        "refused": lambda: spool.abandon(),
        "ended": lambda: monkeypatch.setattr(adoption, "check_config", lambda config: spool.remove()),
        "hook": lambda: monkeypatch.setattr(adoption, "check_config", broken),
    }
    args = arguments()
    caplog.set_level("INFO", adoption.log.name)
    monkeypatch.setattr(adoption.log, "handlers", [caplog.handler])  # vLLM's own logger may not hand lines on
    monkeypatch.setattr(adoption.log, "propagate", False)
    faults[fault]()
    config = configured(CREATE, args)
    assert not is_adopted(config) and config.speculative_config is None and args.speculative_config is None
    lines = [record.message for record in caplog.records if record.message.startswith("cotrain: ")]
    assert len(lines) == (0 if fault == "variable" else 1)


@pytest.mark.usefixtures("beside_trainer")
def test_an_error_of_the_hosts_own_arguments_reaches_the_host(spool: Spool) -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        configured(CREATE, arguments(max_model_len=10**6))


@pytest.mark.usefixtures("beside_trainer")
def test_an_engine_removes_what_killed_trainers_of_its_user_have_left(spool: Spool) -> None:
    killed = Spool(spool.folder.with_name("killed"))
    killed.hold()
    (killed.folder / "initial").mkdir()
    killed._held.close()
    configured(CREATE, arguments())
    assert not killed.folder.exists() and spool.is_alive()
