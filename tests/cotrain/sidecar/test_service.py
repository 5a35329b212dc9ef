"""The service on real shards, with the real trainer and real MLflow; engines are simulated (tests/engine has real ones)."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from transformers import LlamaForCausalLM

from cotrain.config.errors import ConfigError
from cotrain.config.schema import MIN_PROMPTS
from cotrain.config.sidecar import SidecarConfig, load_sidecar
from cotrain.models.loading import TINY_MODEL, resolve_model
from cotrain.run.rows import read_rows
from cotrain.sidecar.intake import Intake
from cotrain.sidecar.service import serve
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.spool import EngineFolder, Offer, Spool, State, Verdict, read_json, remove_leftovers
from pipelines.cli import main
from tests.cotrain.sidecar.host import Host, living
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
        "drafter.model.trained_depth=2", "num_speculative_tokens=2", "drafter.batch_tokens=380",
        "drafter.updates_per_step=6", "drafter.optimizer.learning_rate=4e-3",
    ]  # fmt: skip
    return load_sidecar([], overrides)


class Service:
    """`serve` in a thread of its own."""

    def __init__(self, config: SidecarConfig, resume: bool = False):
        self.config, self.stop, self.verdicts, self.left_out = config, threading.Event(), None, None
        self.spool, self.folder = Spool(config.spool_folder), config.run_root / config.name
        self._thread = threading.Thread(target=self._serve, args=(resume,), daemon=True)
        self._thread.start()
        self.until(self.spool.is_alive)

    def _serve(self, resume: bool) -> None:
        self.verdicts, self.left_out = serve(self.config, resume, self.stop.is_set)

    def rows(self) -> list[dict]:
        return read_rows(self.folder / "metrics.jsonl")

    def decisions(self) -> list[dict]:
        return read_rows(self.folder / "decisions.jsonl")

    def until(self, condition, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self._thread.is_alive() and time.monotonic() < end
            time.sleep(0.02)

    def says(self, capsys, *texts: str) -> str:
        """Wait until it has printed these texts. Returns all that it has printed since the last time."""
        said = []

        def has_said() -> bool:
            said.append(capsys.readouterr().out)
            return all(text in "".join(said) for text in texts)

        self.until(has_said)
        return "".join(said)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(60)
        assert self.verdicts is not None


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
    service.spool.add_verdict(Verdict(TINY_MODEL, 1))
    lengths = play(service, host, 8)
    service.end()
    assert service.verdicts == [Verdict(TINY_MODEL, 1)]
    print(lengths)
    assert min(lengths[-3:]) > lengths[0] + 0.25
    published = [event for event in service.decisions() if event["kind"] == "published"]
    assert len(published) >= 2 and not any(
        e["kind"] in ("alarm", "rolled back", "refused") for e in service.decisions()
    )
    assert not host.engine.features.exists(), "text does not outlive the trainer"
    host.engine.close()
    remove_leftovers(service.spool.folder.parent)
    assert not service.spool.folder.exists()
    out = capsys.readouterr().out
    assert "engine e0: process" in out and "round 3  " in out and "accept" in out
    rows = service.rows()
    assert rows[-1]["rollout/expected_acceptance_length"] == pytest.approx(
        rows[-1]["rollout/acceptance_length"], rel=0.15
    )
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))

    client = MlflowClient(f"sqlite:///{mlflow_database}", f"sqlite:///{mlflow_database}")
    versions = client.search_model_versions("name LIKE 'tiny_llama-%-drafter'")
    assert {int(v.tags["drafter_version"]) for v in versions} == {event["version"] for event in published}
    assert client.get_run(versions[0].run_id).info.status == "FINISHED"
    assert client.get_model_version_by_alias(versions[0].name, "serving").tags["parent_version"] != "none"
    assert main(["report", str(service.folder)]) == 0
    page = (service.folder / "report" / "report.md").read_text()
    assert "Acceptance length, served and expected" in page and "Reward" not in page


def test_a_refused_drafter_is_taken_back_everywhere_and_a_dead_engine_is_not_waited_for(config, tiny):
    service = Service(config)
    process = living(service.spool, "e1")
    willing, other = Host(service.spool, tiny), Host(service.spool, tiny, "e1", process, refuses=(1,))
    first, seed = willing.drafter.state_dict()["fc.weight"].clone(), 0
    while not willing.has_news:
        play(service, willing, 1, first_seed=seed)
        seed += 1
    willing.follow()
    for host in (other, willing):  # what only the willing one had said would be enough to keep the drafter
        host.follow()
        host.report()
    assert (willing.drafter_version, other.drafter_version) == (1, 0)
    service.until(lambda: willing.has_news)
    willing.follow()
    assert willing.drafter_version == 0 and torch.equal(willing.drafter.state_dict()["fc.weight"], first)
    process.kill()
    process.wait()
    service.until(lambda: not other.engine.state.exists())
    play(service, willing, 3, first_seed=10)
    service.end()
    decisions = service.decisions()
    refused = next(event for event in decisions if event["kind"] == "refused")
    assert refused["version"] == 1 and "fc.weight has non-finite values" in refused["reason"]
    published = [event["version"] for event in decisions if event["kind"] == "published"]
    assert published[0] >= 2 and "alarm" not in [event["kind"] for event in decisions]
    after = next(row for row in service.rows() if row["step"] == refused["step"] + 1)
    assert after["versions/drafter"] == 0


def test_an_engine_that_was_idle_and_refuses_what_others_serve_is_named(config, tiny, capsys):
    service = Service(config)
    willing, idle = Host(service.spool, tiny), Host(service.spool, tiny, "e1", refuses=(1,))
    seed = 0
    while not willing.has_news:
        play(service, willing, 1, first_seed=seed)
        seed += 1
    willing.follow()
    willing.report()
    service.until(lambda: [event for event in service.decisions() if event["kind"] == "published"])
    idle.follow()
    idle.report()
    text = "engine e1 keeps drafter 0 and refuses the new one: fc.weight has non-finite values"
    said = service.says(capsys, text)
    service.end()
    assert (said + capsys.readouterr().out).count(text) == 1
    assert [event["kind"] for event in service.decisions()] == ["published"], "the others keep it"


def test_a_round_begins_when_it_can_be_judged_and_counts_what_is_its_own(config, tiny):
    service = Service(config)
    host = Host(service.spool, tiny)
    host.wave(0, prompts=MIN_PROMPTS - 1, samples=6)  # tokens enough, of too few prompts
    service.until(lambda: not host.engine.shards())
    host.wave(1, prompts=8)
    service.until(service.rows)
    host.seconds_without = 0.4
    host.wave(2)
    service.until(lambda: len(service.rows()) > 1)
    service.end()
    rows = service.rows()
    assert rows[0]["rollout/generated_tokens"] == 20 * (6 * (MIN_PROMPTS - 1) + 8)
    gains = [row["rollout/speedup_vs_no_speculation"] for row in rows[:2]]
    assert gains == [pytest.approx(0.6 / 0.5), pytest.approx(0.4 / 0.5)]


def test_what_is_left_out_is_counted_and_said(config, tiny, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("cotrain.sidecar.service.SILENT_SECONDS", 0.2)
    service = Service(config)
    host = Host(service.spool, tiny, left_out={"repetition_penalty is set": 5}, finished=5)
    said = service.says(capsys, "no round for 0 s; 5 of 5 requests left out: repetition_penalty is set (5)")
    engine, host.engine = host.engine, staging(tmp_path)
    for number, damage in enumerate((truncate, not_json, other_fields)):
        host.wave(number, prompts=4)
        (shard,) = host.engine.shards()
        damage(shard)
        for file in (shard, shard.with_suffix(".json")):  # the shard can be read from the second one on
            file.rename(engine.features / f"{number:09d}{file.suffix}")
    host.engine = engine
    host.wave(3)
    service.until(service.rows)
    service.end()
    (row,) = service.rows()
    assert row["sidecar/dropped"] == 5 + 4 + 1 + 1, "the number of rollouts is unknown where there is no JSON of ours"
    left_out = "33 requests left out: their shard could not be read (6), repetition_penalty is set (5)"
    assert service.left_out == f"11 of {left_out}"
    said += capsys.readouterr().out
    assert said.count("a shard of engine e0 could not be read") == 3
    assert f"11 of {left_out}" in said[said.index("round 1") :]


def staging(folder: Path) -> EngineFolder:
    """An engine's part of a spool that no trainer reads."""
    spool = Spool(folder / "staging")
    spool.hold()
    return spool.join("e0")


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-9])


def not_json(shard: Path) -> None:
    shard.with_suffix(".json").write_text("{")


def other_fields(shard: Path) -> None:
    described = json.loads(shard.with_suffix(".json").read_text())
    shard.with_suffix(".json").write_text(json.dumps([described[0], [1]]))


@pytest.mark.parametrize("content", ["{", "[]", '{"attached": 1}'])
def test_files_of_another_program_are_a_message(content, config, tiny, capsys):
    service = Service(config)
    host = Host(service.spool, tiny)
    stranger = service.spool.join("e9")
    stranger.state.write_text(content)
    host.wave(0)
    service.until(service.rows)
    host.engine.state.write_text(content)
    service.spool._verdicts.mkdir()
    (service.spool._verdicts / "1.json").write_text(content)
    service.says(capsys, "engine e0 is left out", "engine e9 is left out")
    host.wave(1)
    service.until(lambda: len(service.rows()) > 1)
    service.end()


def test_a_restarted_trainer_goes_on_with_the_engines_that_live(config, tiny, capsys):
    service = Service(config)
    host = Host(service.spool, tiny)
    play(service, host, 4)
    service.end()
    served = max(event["version"] for event in service.decisions() if event["kind"] == "published")
    other = config.model_copy(update={"num_speculative_tokens": 1, "name": "shorter"})
    with pytest.raises(ValueError, match=r"spool: engines live in .* draft length"):
        serve(other, False, lambda: True)
    for name, resume in ((config.name, True), ("anew", False)):
        again = Service(config.model_copy(update={"name": name}), resume)
        again.until(lambda: host.has_news)
        rounds = len(again.rows())
        host.follow()
        assert host.drafter_version == (served if resume else 0), "what the trainer goes on with"
        play(again, host, 2, first_seed=30)
        assert len(again.rows()) == rounds + 2
        again.end()
        assert "engine e0: process 1" in capsys.readouterr().out


def test_what_is_known_of_policies_is_bounded(config, tiny, monkeypatch):
    monkeypatch.setattr("cotrain.sidecar.intake.KNOWN_HEADS", 3)
    service = Service(config)
    host = Host(service.spool, tiny)
    for version in range(5):
        host.new_policy(version, moves=version > 0)
        play(service, host, 1, first_seed=version)
    service.end()
    assert [row["versions/policy"] for row in service.rows()] == [0, 1, 2, 3, 4]
    (saved,) = (service.folder / "checkpoints").glob("step_*/state.json")
    assert sorted(json.loads(saved.read_text())["heads"].values()) == [2, 3, 4]


def test_a_head_that_its_engine_removes_meanwhile_is_read_all_the_same(config, tiny, monkeypatch):
    """An engine keeps few heads: with a policy that moves every second, the oldest one may go while the trainer reads it."""
    read, removed = DrafterTrainer.set_target_weights, []

    def remove_first(trainer, path, version):
        if (head := Path(path).resolve()).parent.name == "policy":
            removed.append(head.name)
            head.unlink()
        read(trainer, path, version)

    monkeypatch.setattr(DrafterTrainer, "set_target_weights", remove_first)
    service = Service(config)
    host = Host(service.spool, tiny)
    host.new_policy(1, moves=True)
    play(service, host, 1)
    service.end()
    assert removed and [row["versions/policy"] for row in service.rows()] == [len(removed) - 1]


def test_an_alarm_ends_speculation_and_training_but_neither_host_nor_trainer(config, tiny, mlflow_database, capsys):
    service = Service(config)
    host = Host(service.spool, tiny)
    play(service, host, 4)
    host.is_deaf = True
    for seed in range(4, 12):
        host.wave(seed)
        rounds = len(service.rows())
        if read_json(service.spool.current, Offer).on:
            service.until(
                lambda rounds=rounds: len(service.rows()) > rounds or not read_json(service.spool.current, Offer).on
            )
    kinds = [event["kind"] for event in service.decisions()]
    assert "rolled back" in kinds and kinds[-1] == "alarm"
    host.follow()
    assert not host.on and host.wave(12) == 1.0
    service.until(lambda: not host.engine.shards())
    rounds = len(service.rows())
    service.end()
    assert len(service.rows()) == rounds
    assert "alarm: acceptance_collapsed: no draft token was accepted" in capsys.readouterr().out
    client = MlflowClient(f"sqlite:///{mlflow_database}", f"sqlite:///{mlflow_database}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "FINISHED"


def test_a_stopped_sidecar_goes_on_where_it_was_and_has_kept_no_text(config, tiny):
    service = Service(config)
    lengths = play(service, Host(service.spool, tiny), 5)
    service.end()
    before, rounds = service.decisions(), len(service.rows())
    (saved,) = (service.folder / "checkpoints").glob("step_*/trainer/trainer.pt")
    state = torch.load(saved, weights_only=False)
    assert "buffer" not in state and "target_weights" not in state

    resumed = Service(config, resume=True)
    host = Host(resumed.spool, tiny)
    served = max(event["version"] for event in before if event["kind"] == "published")
    resumed.until(lambda: (read_json(resumed.spool.current, Offer) or Offer()).version == served)
    again = play(resumed, host, 2, first_seed=20)
    host.new_policy(1)  # the same head: still the trainer's first version
    again += play(resumed, host, 1, first_seed=22)
    host.wave(23, prompts=8)
    host.wave(24, prompts=8, top_k=512)  # requests of another sampler, which is of the same law: the vocabulary has 512
    resumed.until(lambda: len(resumed.rows()) > rounds + 3)
    resumed.end()
    assert min(again) > lengths[0] + 0.1
    rows = resumed.rows()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and rows[-1]["versions/policy"] == 0
    assert rows[-1]["drafter/loss"] > 0 and rows[-1]["sidecar/dropped"] == 0
    assert all(
        event["version"] > served for event in resumed.decisions()[len(before) :] if event["kind"] == "published"
    )


def test_everything_that_is_wrong_is_said_before_anything_is_loaded(config):
    with pytest.raises(ConfigError) as raised:
        load_sidecar([], ["name=a b", "modle=x", "drafter.model.type=eagl3", "share=2"])
    text = str(raised.value)
    for line in (
        "name: String should match", "model: missing: The host's policy", "drafter.model.type: 'eagl3' is not one of",
        "modle: unknown field; did you mean model?", "share: must be less than or equal to 1, got 2",
    ):  # fmt: skip
        assert line in text
    with pytest.raises(ConfigError) as raised:
        fields = ["drafter.model.type=eagle3", "drafter.optimizer.schedule=cosine", "num_speculative_tokens=9"]
        load_sidecar([], ["name=a", "model=x", "drafter.init=auto", *fields])
    assert len(raised.value.problems) == 3 and 'drafter.init: "auto" is for `cotrain train`' in str(raised.value)
    assert "a sidecar runs as long as its host" in str(raised.value)

    (config.run_root / config.name).mkdir(parents=True)
    config.spool_folder.mkdir()
    (config.spool_folder / "letter.txt").write_text("mine")
    wrong = config.model_copy(update={"model": "/nowhere/at/all", "device": "cuda"})
    wrong = wrong.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": "ftp://x"})})
    with pytest.raises(ConfigError) as raised:
        serve(wrong, False, lambda: True)
    text = str(raised.value)
    for line in ("name:", "model:", "spool:", "device:", "tracking.uri:"):
        assert f"\n  {line}" in text
    assert (config.spool_folder / "letter.txt").exists()


def test_acceptance_is_counted_by_adapter_and_since_the_last_round(tmp_path):
    def state(**counts: int) -> State:
        return State(1, counts=Counter(counts | {"drafts": 99, "accepted_tokens": 99}))

    intake = Intake(Spool(tmp_path), None, {})
    assert intake.by_adapter() == {}
    intake.engines = {"a": state(**{"drafts/": 10, "accepted/": 5, "drafts/a b": 4}), "b": state(**{"drafts/": 10})}
    assert intake.by_adapter() == {"base": 1.25, "a_b": 1.0}
    intake.engines["a"] = state(**{"drafts/": 10, "accepted/": 5, "drafts/a b": 8, "accepted/a b": 8})
    assert intake.by_adapter() == {"a_b": 3.0}
