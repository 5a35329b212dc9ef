"""`cotrain export`: a run's policy and the drafter it was served with, as folders that stock vLLM serves."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from cotrain.config.load import read_config
from cotrain.config.schema import PolicyConfig, RunConfig
from cotrain.models.loading import copy_tokenizer, native_head, resolve_model
from cotrain.run.checkpoint import find_defect
from cotrain.run.provenance import machine
from drafters.files import CONFIG, INDEX, WEIGHTS, open_to_readers, write_json
from drafters.files import read_config as read_model_config
from pipelines.help import CommandParser
from pipelines.page.record import find
from pipelines.plan import serve_command

MERGED = "--merged"

if TYPE_CHECKING:
    from torch import Tensor


def main(arguments: Sequence[str]) -> int:
    """Write the folders and print how to serve them. Raises ValueError if there is no checkpoint, or if DIR exists."""
    parser = CommandParser("export")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name in the run root")
    parser.add_argument("out", metavar="DIR", type=Path, help="a new folder")
    merged = (
        "merge adapters (policy.lora) into the weights; without it they are written as they are, for the base model"
    )
    parser.add_argument(MERGED, action="store_true", help=merged)
    options = parser.parse_args(arguments)
    out: Path = options.out
    config, checkpoint, versions = export(find(options.run), out, options.merged)
    print(f"policy version {versions['policy']}, {checkpoint}: {out}")
    if config.drafter is not None:
        folder = out / "drafter" if (out / "drafter").exists() else None
        print(f"drafter version {versions['drafter']}: {folder or 'in the same folder'}")
        print(_serving(config, out, folder))
    return 0


def export(run: Path, out: Path, merged: bool) -> tuple[RunConfig, str, dict[str, int]]:
    """Write the folders of a run's newest checkpoint. Returns its configuration, the checkpoint's name and the versions by role.

    merged: merge adapters into the weights. Raises ValueError if there is no checkpoint, if `out` exists, or if the drafter is the
    policy's own MTP head, which adapters alone cannot hold.
    """
    if out.exists():
        raise ValueError(f"DIR: {out} exists; give a new folder")
    config = read_config(run / "config.json")
    whole = (path for path in sorted((run / "checkpoints").glob("step_*"), reverse=True) if not find_defect(path))
    checkpoint = next(whole, None)
    if checkpoint is None:
        raise ValueError(f"RUN: {run} has no whole checkpoint yet; it writes one every checkpoint.every steps")
    versions: dict[str, int] = json.loads((checkpoint / "state.json").read_text())["versions"]
    drafter = run / "drafters" / f"v{versions['drafter']:04d}" if config.drafter else None
    model, policy = resolve_model(config.policy.model), checkpoint / "policy"
    adapters = config.policy.train and config.policy.lora is not None
    if adapters and not merged and drafter is not None and native_head(model) is not None:
        raise ValueError("--merged: the drafter is the policy's own head, which is served in its folder; give --merged")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as parent:
        partial = Path(parent) / out.name
        partial.mkdir()
        if adapters and not merged:
            _write_adapters(config.policy.model, model, policy, drafter, partial)
        else:
            tensors = _merged(config.policy, model, policy) if adapters else None
            _write(policy if config.policy.train else model, model, drafter, config.rollout.dtype, partial, tensors)
        partial.rename(out)
    return config, checkpoint.name, versions


def _write_adapters(name: str, model: Path, policy: Path, drafter: Path | None, out: Path) -> None:
    """Fill `out` as peft does, with the base model named by its folder unless it has a name on a hub."""
    from cotrain.policy.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS

    copy_tokenizer(model, out)
    settings = json.loads((policy / ADAPTER_CONFIG).read_text())
    on_hub = ":" not in name and not Path(name).is_dir()
    write_json(out / ADAPTER_CONFIG, settings | {"base_model_name_or_path": name if on_hub else str(model)})
    shutil.copyfile(policy / ADAPTER_WEIGHTS, out / ADAPTER_WEIGHTS)
    if drafter is not None:
        shutil.copytree(drafter, out / "drafter")


def _merged(policy: PolicyConfig, model: Path, adapters: Path) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the tensors of the base model with adapters merged into it."""
    import torch
    from transformers import AutoModelForCausalLM

    from cotrain.policy.adapters import add_adapters, read_adapters
    from cotrain.policy.sharding import whole_tensors

    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert policy.lora is not None
    add_adapters(whole, policy.lora, policy.model, 0)
    whole.load_state_dict(read_adapters(whole, adapters), strict=False)
    return whole_tensors(whole, torch.float32)


def _write(
    policy: Path,
    model: Path,
    drafter: Path | None,
    dtype: str,
    out: Path,
    tensors: Iterable[tuple[str, "Tensor"]] | None = None,
) -> None:
    """Fill `out`, with weights in the number format that the engines served them in.

    A drafter that is the policy's own MTP head goes back among the policy's tensors, any other into out/drafter. What a wrapper of
    a language model holds besides it, such as an image encoder, is that of `model`. tensors: the policy's, if `policy` has none.
    """
    import torch

    from cotrain.weights.payload import write_payload
    from drafters.base import model_tensors
    from drafters.build import stitched

    copy_tokenizer(model, out)
    small = policy if tensors is None else model
    for file in small.glob("*.json"):
        if file.name != INDEX:
            shutil.copyfile(file, out / file.name)
    config = read_model_config(small)
    others = model_tensors(model) if "text_config" in config else ()
    whole = dict(others) | dict(model_tensors(policy) if tensors is None else tensors)
    if drafter is not None and (head := native_head(model)) is not None:
        config, own = stitched(drafter, head)
        whole |= own
    elif drafter is not None:
        shutil.copytree(drafter, out / "drafter")
    write_payload(whole, out / WEIGHTS, getattr(torch, dtype))
    open_to_readers(out / WEIGHTS)
    config.pop("dtype", None)
    write_json(out / CONFIG, config | {"torch_dtype": dtype})


def _serving(config: RunConfig, out: Path, drafter: Path | None) -> str:
    """The command that serves them with stock vLLM. drafter: None if it is in the files of the policy."""
    from cotrain.policy.adapters import ADAPTER_CONFIG
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    overrides: tuple[tuple[str, object], ...] = ()
    speculation: dict[str, object] = {"method": "mtp", "num_speculative_tokens": config.rollout.num_speculative_tokens}
    model, adapters = out, ""
    if (out / ADAPTER_CONFIG).is_file() and config.policy.lora is not None:
        model = resolve_model(config.policy.model)
        adapters = f" --enable-lora --max-lora-rank {config.policy.lora.rank} --lora-modules policy={out}"
    if drafter is not None:
        serving = load_drafter(drafter, TargetSpec.from_pretrained(model)).serving
        overrides = serving.target_overrides
        speculation |= {"method": serving.method, "model": str(drafter)}
    text = f"{serve_command(model)}{adapters} --speculative-config '{json.dumps(speculation)}'"
    if adapters and not machine()["gpus"]:
        print(
            f"On a CPU, vLLM 0.32 fails with a drafter beside adapters when several requests run: export with {MERGED}."
        )
    return text + (f" --hf-overrides '{json.dumps(dict(overrides))}'" if overrides else "")
