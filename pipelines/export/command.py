"""`cotrain export`: a run's policy and the drafter it was served with, as folders that stock vLLM serves."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from cotrain.config.load import read_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import copy_tokenizer, native_head, resolve_model
from cotrain.run.checkpoint import find_defect
from drafters.files import CONFIG, INDEX, safetensors_header, weight_files, write_json
from drafters.files import read_config as read_model_config
from pipelines.help import CommandParser
from pipelines.page.record import find
from pipelines.plan import serve_command


def main(arguments: Sequence[str]) -> int:
    """Write the folders and print how to serve them. Raises ValueError if there is no checkpoint, or if DIR exists."""
    parser = CommandParser("export")
    parser.add_argument("run", metavar="RUN", help="a run's folder, or its name in the run root")
    parser.add_argument("out", metavar="DIR", type=Path, help="a new folder")
    options = parser.parse_args(arguments)
    out: Path = options.out
    config, checkpoint, versions = export(find(options.run), out)
    print(f"policy version {versions['policy']}, {checkpoint}: {out}")
    if config.drafter is not None:
        folder = out / "drafter" if (out / "drafter").exists() else None
        print(f"drafter version {versions['drafter']}: {folder or 'in the same folder'}")
        print(_serving(out, folder, config.rollout.num_speculative_tokens))
    return 0


def export(run: Path, out: Path) -> tuple[RunConfig, str, dict[str, int]]:
    """Write the folders of a run's newest checkpoint. Returns its configuration, the checkpoint's name and the versions by role.

    Raises ValueError if there is no checkpoint, or if `out` exists.
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
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as parent:
        partial = Path(parent) / out.name
        partial.mkdir()
        model = resolve_model(config.policy.model)
        _write(checkpoint / "policy" if config.policy.train else model, model, drafter, partial)
        _cast(partial, config.rollout.dtype)
        partial.rename(out)
    return config, checkpoint.name, versions


def _write(policy: Path, model: Path, drafter: Path | None, out: Path) -> None:
    """Fill `out`. A drafter that is the policy's own MTP head goes back into the policy's files, any other into out/drafter."""
    from drafters.build import stitch

    copy_tokenizer(model, out)
    if drafter is not None and (head := native_head(model)) is not None:
        stitch(policy, drafter, head, out)
    else:
        for file in policy.iterdir():
            if file.suffix in (".json", ".safetensors"):
                shutil.copyfile(file, out / file.name)
        if drafter is not None:
            shutil.copytree(drafter, out / "drafter")
    if "text_config" in read_model_config(model):
        _add_other_tensors(model, out)


def _add_other_tensors(model: Path, out: Path) -> None:
    """Add what a wrapper of a language model holds besides it, such as an image encoder, to the trained tensors in `out`."""
    from safetensors.torch import load_file, save_file

    trained = weight_files(out)
    weight_map = {name: file.name for file in trained for name in safetensors_header(file)}
    for number, file in enumerate(weight_files(model)):
        others = {name: tensor for name, tensor in load_file(file).items() if name not in weight_map}
        if others:
            save_file(others, out / f"other-{number}.safetensors", metadata={"format": "pt"})
            weight_map |= dict.fromkeys(others, f"other-{number}.safetensors")
    write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map})


def _cast(folder: Path, dtype: str) -> None:
    """Write a model's weights in the number format that the engines served them in."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in weight_files(folder):
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}
        save_file(tensors, cast := file.with_suffix(".cast"), metadata={"format": "pt"})
        cast.replace(file)  # not written in place, because tensors may still be read from the file
    config = {name: value for name, value in read_model_config(folder).items() if name != "dtype"}
    write_json(folder / CONFIG, config | {"torch_dtype": dtype})


def _serving(model: Path, drafter: Path | None, num_speculative_tokens: int) -> str:
    """The command that serves them with stock vLLM. drafter: None if it is in the files of `model`."""
    from drafters.base import TargetSpec
    from drafters.build import load_drafter

    overrides: tuple[tuple[str, object], ...] = ()
    speculation: dict[str, object] = {"method": "mtp", "num_speculative_tokens": num_speculative_tokens}
    if drafter is not None:
        serving = load_drafter(drafter, TargetSpec.from_pretrained(model)).serving
        overrides = serving.target_overrides
        speculation |= {"method": serving.method, "model": str(drafter)}
    text = f"{serve_command(model)} --speculative-config '{json.dumps(speculation)}'"
    return text + (f" --hf-overrides '{json.dumps(dict(overrides))}'" if overrides else "")
