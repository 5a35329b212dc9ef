"""Everything that must be there before a host's engines start: the run folder, the first drafter, and the spool."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.config.errors import ConfigError
from cotrain.config.load import write_config
from cotrain.config.sidecar import SidecarConfig
from cotrain.config.surroundings import cache_problems
from cotrain.models.loading import resolve_model
from cotrain.run.checkpoint import RunState, model_fingerprints, newest_state
from cotrain.run.mlflow_store import check_uri, tracking_uri
from cotrain.run.provenance import machine, write_provenance
from cotrain.run.registry import first_drafter
from cotrain.run.run_dir import RunDir
from cotrain.sidecar.spool import Settings, Spool
from cotrain.trainer.spec import TrainerSpec
from cotrain.trainer.trainer import DrafterTrainer
from drafters.base import TargetSpec
from drafters.build import shape_problems
from drafters.files import read_config

HEADS_KEPT = 4
"""How many policy versions back the trainer keeps heads even if it holds no features of them; see also KEPT_VERSIONS."""


class Prepared(NamedTuple):
    """What the service starts with."""

    config: SidecarConfig
    run_dir: RunDir
    state: RunState
    trainer: DrafterTrainer
    spool: Spool


def prepare(config: SidecarConfig, resume: bool, stack: ExitStack) -> Prepared:
    """Create the run folder, the trainer and the spool. Then a host may start; closing `stack` removes the spool.

    Raises ConfigError listing all problems before anything is loaded, and ValueError for a drafter or a checkpoint that
    does not fit.
    """
    model = _checked_model(config, resume)
    run_dir = RunDir(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
    stack.enter_context(run_dir)
    state = newest_state(run_dir, config, model_fingerprints(model))
    if state.step == 0:
        write_config(config, run_dir.config)
    run_dir.start_attempt()
    write_provenance(run_dir)
    trainer = _trainer(config, model, run_dir)
    if state.step:
        trainer.load(run_dir.checkpoint(state.step) / "trainer")
    serving = trainer.serving()
    if serving.target_overrides:
        raise ValueError(f"drafter.model.type: a host must change its policy for {serving.method!r}; use eagle3")
    spool = Spool(config.spool_folder)
    stack.callback(shutil.rmtree, spool.folder, ignore_errors=True)
    shutil.rmtree(spool.folder, ignore_errors=True)
    spool.folder.mkdir(mode=0o700, parents=True)
    trainer.save_checkpoint(spool.initial, state.drafting["serving"]["version"] if state.drafting else 0)
    speculation: dict[str, Any] = {"method": serving.method, "model": str(spool.initial)}
    for name in ("num_speculative_tokens", "draft_sample_method"):
        speculation[name] = getattr(config, name)
    bounds = config.share, config.features.max_bytes, config.adaptive, config.replicas
    spool.create(Settings(config.model, str(model), speculation, serving.aux_layers, *bounds))
    return Prepared(config, run_dir, state, trainer, spool)


def _trainer(config: SidecarConfig, model: Path, run_dir: RunDir) -> DrafterTrainer:
    init = first_drafter(tracking_uri(config), config.drafter.init, model, run_dir.path / "drafter_init")
    dtype = read_config(model).get("dtype") or read_config(model).get("torch_dtype")
    spec = TrainerSpec(
        drafter=config.drafter,
        serving_dtype=dtype if dtype in ("float32", "float16") else "bfloat16",  # until an engine reports its own
        num_speculative_tokens=config.num_speculative_tokens,
        num_positions=None,
        total_updates=1,  # the schedule is constant
        seed=config.seed,
        max_buffer_bytes=(config.drafter.buffer.max_age + 1) * config.features.max_bytes,
        max_policy_lag=HEADS_KEPT,
    )
    return DrafterTrainer(spec, model, init, config.device)


def _checked_model(config: SidecarConfig, resume: bool) -> Path:
    """The model's folder. Raises ConfigError listing all problems."""
    problems = cache_problems()

    def checked(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except ValueError as error:
            problems.append(str(error).replace("policy.model", "model"))

    folder, spool = config.run_root / config.name, config.spool_folder
    if not resume and folder.exists():
        problems.append(f"name: {folder} is already there; continue it with --resume {config.name}, or set name")
    if spool.exists() and Spool(spool).is_alive():
        problems.append(f"spool: another trainer uses {spool}; stop it, or choose another folder or name")
    elif spool.exists() and any(spool.iterdir()) and not (spool / "settings.json").exists():
        problems.append(f"spool: {spool} holds other files; choose a folder that is empty or not there")
    if config.device == "cuda" and not machine()["gpus"]:
        problems.append('device: there is no GPU here; set "cpu"')
    checked(check_uri, tracking_uri(config))
    model = checked(resolve_model, config.model)
    if model is not None:
        problems += shape_problems(config.drafter.model, TargetSpec.from_pretrained(model))
    if problems:
        raise ConfigError(problems)
    return Path(model)
