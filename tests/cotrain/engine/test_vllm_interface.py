"""What is known of vLLM's functions and attributes, held against the vLLM that is installed."""

from pathlib import Path

import pytest
import vllm

from cotrain.engine import cpu, interface

INSTALLED = Path(vllm.__file__).parents[1]


def moved() -> list[str]:
    return interface.moved_in(INSTALLED, interface.WRAPPED)


def test_the_installed_vllm_is_the_one_that_is_known() -> None:
    assert moved() == []


def test_each_entry_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = interface.WRAPPED
    assert entries
    for path, names in entries.items():
        owner, _, last = path.rpartition("." if "." in path.partition(":")[2] else ":")
        monkeypatch.setattr(interface, "WRAPPED", {f"{owner}{path[len(owner)]}no_{last}": names})
        assert moved() == [f"{owner}{path[len(owner)]}no_{last} is missing"]
        monkeypatch.setattr(interface, "WRAPPED", {path: f"{names} no_such_name".strip()})
        (problem,) = moved()
        assert problem.startswith(path) and "no_such_name" in problem


def test_an_engine_whose_vllm_has_moved_refuses_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interface.WRAPPED, f"{interface.RUNNER}._no_sample", "self")
    with pytest.raises(RuntimeError, match=r"not the one that cotrain knows: .*GPUModelRunner._no_sample is miss"):
        cpu.apply_patches()


def test_the_v2_runner_of_own_engines_is_watched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{interface.SPECULATOR}.propose"
    monkeypatch.setitem(interface.WRAPPED, path, interface.WRAPPED[path].replace("temperature", "seeds"))
    (problem,) = moved()
    assert problem.startswith(f"{path} takes (self input_batch")


@pytest.mark.parametrize(
    "table",
    [interface.SIDECAR, *interface.SIDECAR_OF_RUNNER.values(), interface.WRAPPED],
    ids=["both runners", "V1", "V2", "own engines"],
)
def test_each_function_that_the_sidecar_hooks_into_would_be_missed(table: dict[str, str]) -> None:
    assert table and interface.moved_in(INSTALLED, table) == []
    for path, names in table.items():
        for other in (f"other {names}", f"{names} other", f"{names.removesuffix(' ...')}_other ..."):
            (problem,) = interface.moved_in(INSTALLED, {path: other})
            assert problem.startswith(f"{path} takes (")
        assert interface.moved_in(INSTALLED, {f"{path}_gone": names})
