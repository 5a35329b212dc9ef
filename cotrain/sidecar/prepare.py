"""Everything that must be there before a host's engines start: the run folder, the first drafter, and the spool."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from cotrain.config.errors import ConfigError
from cotrain.config.sidecar import SidecarConfig
from cotrain.config.surroundings import cache_problems
from cotrain.models.capability import drafter_problems
from cotrain.models.loading import resolve_model
from cotrain.run.checkpoint import RunState, model_fingerprints, newest_state
from cotrain.run.mlflow_store import check_uri, tracking_uri
from cotrain.run.provenance import begin_attempt, machine
from cotrain.run.registry import first_drafter
from cotrain.run.run_dir import RunDir
from cotrain.trainer.spec import TrainerSpec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.spool import Settings, Spool, read_json, remove_leftovers, write_json
from drafters.files import read_config

FIXED = "fixed.json"  # file beside the first drafter, with what an engine that was started with it cannot change
HEADS_KEPT = 4  # policy versions back of which the trainer keeps heads even without features; see also KEPT_VERSIONS


class Prepared(NamedTuple):
    config: SidecarConfig
    run_dir: RunDir
    state: RunState
    trainer: DrafterTrainer
    spool: Spool
    inherits: bool  # whether engines live that were started beside an earlier trainer of the spool


def prepare(config: SidecarConfig, resume: bool, stack: ExitStack) -> Prepared:
    """Create the run folder, the trainer and the spool. Then a host may start; closing `stack` removes the spool.

    Raises ConfigError listing all problems before anything is loaded, and ValueError for a drafter or a checkpoint that
    does not fit.
    """
    spool = Spool(config.spool_folder)
    stack.callback(spool.remove)
    model = _checked_model(config, resume, spool)
    remove_leftovers(spool.folder.parent, Path("/dev/shm"))
    run_dir = stack.enter_context(RunDir(config.run_root, config.name, resume))
    state = newest_state(run_dir, config, model_fingerprints(model))
    begin_attempt(run_dir, config, state.step)
    init = first_drafter(tracking_uri(config), config.drafter.init, model, run_dir.path / "drafter_init")
    spec = TrainerSpec(
        drafter=config.drafter,
        serving_dtype="float32",  # which engines convert to their own, until one has reported that
        num_speculative_tokens=config.num_speculative_tokens,
        num_positions=None,
        total_updates=1,  # the schedule is constant
        seed=config.seed,
        max_buffer_bytes=(config.drafter.buffer.max_age + 1) * config.features.max_bytes,
        max_policy_lag=HEADS_KEPT,
    )
    trainer = DrafterTrainer(spec, model, init, config.device)
    if state.step:
        trainer.load(run_dir.checkpoint(state.step) / "trainer")
    serving, inherits = trainer.serving(), spool.initial.exists()
    if serving.target_overrides:
        raise ValueError(f"drafter.model.type: a host must change its policy for {serving.method!r}; use eagle3")
    speculation = {"method": serving.method, "model": str(spool.initial)}
    speculation |= config.model_dump(include={"num_speculative_tokens", "draft_sample_method"})
    fixed = repr((model, speculation, config.adaptive, trainer.drafter.shape))
    if not inherits:
        trainer.save_checkpoint(spool.initial, state.versions.drafter)
        write_json(spool.initial / FIXED, fixed)
    elif read_json(spool.initial / FIXED, str) != fixed:
        what = "another policy, shape of drafter, draft length or adaptive"
        raise ValueError(f"spool: engines live in {spool.folder} that were started with {what}; end them first")
    layers, room = serving.aux_layers, config.features.max_bytes
    settings = Settings(
        config.model, str(model), speculation, layers, config.share, room, config.adaptive, config.adapter
    )
    spool.create(settings)
    return Prepared(config, run_dir, state, trainer, spool, inherits)


def _checked_model(config: SidecarConfig, resume: bool, spool: Spool) -> Path:
    """Return the model's folder, and hold the spool. Raises ConfigError listing all problems."""
    problems = cache_problems()

    def checked(check: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return check(*arguments)
        except ValueError as error:
            problems.append(str(error).replace("policy.model", "model"))

    folder = config.run_root / config.name
    if not resume and folder.exists():
        problems.append(f"name: {folder} is already there; continue it with --resume {config.name}, or set name")
    if config.device == "cuda" and not machine()["gpus"]:
        problems.append('device: there is no GPU here; set "cpu"')
    checked(spool.hold)
    checked(check_uri, tracking_uri(config))
    model = checked(resolve_model, config.model)
    if model is not None:
        problems += drafter_problems(read_config(model), model, config.drafter.model, not machine()["gpus"])
    if problems:
        raise ConfigError(problems)
    return Path(model)
