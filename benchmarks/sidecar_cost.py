"""What the sidecar costs a host and what it brings: engines of a plain vLLM LLM, with it and without it, in turns.

    python -m benchmarks.sidecar_cost --out runs/sidecar-cost [--parts tiny smollm2 beside served] [--small] [--trainer key=value]

tiny, smollm2: time of a step of engines that draft nothing, over that of the same host without the sidecar. All live at once
and take turns step by step, so that what else the machine does weighs on all alike. "For now": the drafter reads on, since
the length may rise again, as it may by default.

beside: time of a step of one host that uses all cores, while the trainer works beside it with its default priority and threads, over
that while the trainer is stopped; waves of the two take turns (smollm2).

served: acceptance length and tokens a second without the sidecar, with a drafter that is frozen, with the same one where the
engine chooses the draft length, and with one that is trained beside the host, before and after an update of the policy that
teaches it other text (tiny:llama). First the trainer makes the drafter, beside its own host; all arms begin with it. They get
the same prompts in the same order. The trainer is stopped while it is not its arm's turn, so that its work slows that arm and
no other; seconds of an arm are those of its turns.

Prints Markdown tables; --out gets results.json, acceptance.png and trainer.log. Times need a quiet machine.
"""

import argparse
import functools
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.run.provenance import git_state, here_and_now
from cotrain.sidecar.launch import trainer_beside
from cotrain.transport.spool import Offer, Spool, State, read_json, write_json
from tests.engine import sidecar_host

MODELS = {"tiny": "tiny:llama", "smollm2": "bundled:smollm2-135m-instruct"}
PARTS = (*MODELS, "beside", "served")
PLAIN, FROZEN, CHOOSING, TRAINED = "no sidecar", "frozen drafter", "frozen, length chosen", "co-trained"
ENGINES = {
    "length 0": ({"share": 0.0, "adaptive": False}, 0.01),
    "length 0, tap": ({"share": 1.0, "adaptive": False}, 0.02),
    "length 0 for now": ({"share": 0.0, "adaptive": True}, 0.01),
    "length 0 for now, tap": ({"share": 1.0, "adaptive": True}, 0.02),
}
"""Settings of the spool, and how much longer a step may take."""
SIZES = {
    "tiny": (30, 3),
    "smollm2": (8, 1),
    "beside": (6, 2),
    "first": (100, 4),
    "before": (30, 5),
    "after": (120, 10),
}
"""And with --small. Rounds of the models; waves that make the first drafter, and those before the update and after it."""
REQUESTS, TOKENS, THREADS, UPDATES = 16, 64, 1, 160
"""Of a wave, of a response, of an engine and of the trainer, and optimizer steps of the policy."""
TRAINER = (
    "name=trained", "adaptive=false", "drafter.model.draft_vocab_size=128", "drafter.batch_tokens=2048",
    "drafter.updates_per_step=30", "tracking.log_drafters=false",
)  # fmt: skip
WINDOW, RECOVERED = 5, 0.95
"""Waves whose mean acceptance length is looked at, and the share of that before the update which counts as recovered."""
say = functools.partial(print, file=sys.stderr, flush=True)


class TimedHost(sidecar_host.Host):
    """The host of the tests, with a clock."""

    def begin_wave(self, number: int) -> None:
        """Ask for answers to chats of eight letters, which the number decides."""
        from vllm import SamplingParams

        tokenizer, draw = self.llm.get_tokenizer(), random.Random(number)
        chats = [[{"role": "user", "content": "".join(draw.choices("0123456789abcdef", k=8))}] for _ in range(REQUESTS)]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts):
            self.llm.llm_engine.add_request(f"{i}", {"prompt_token_ids": prompt}, params)

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Make so many steps, or as many as there is something to do for. Return seconds of each, by the clock and of the
        processor on all cores."""
        engine, seconds = self.llm.llm_engine, []
        while len(seconds) < number and engine.has_unfinished_requests():
            started, cpu_started = time.perf_counter(), time.process_time()
            engine.step()
            seconds.append((time.perf_counter() - started, time.process_time() - cpu_started))
        return seconds

    def wave(self, number: int) -> float:
        """Answer chats. Return the seconds that it took."""
        started = time.perf_counter()
        self.begin_wave(number)
        self.steps(sys.maxsize)
        return time.perf_counter() - started

    def update(self, folder: str) -> None:
        """Load other weights, as vLLM does it from a folder."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self.llm.reset_prefix_cache()


def started(
    stack: ExitStack, model: Path, scratch: Path, spools: dict[str, Any], threads_each: int = THREADS
) -> dict[str, Any]:
    """A host for each spool; PLAIN may have none. The engine works in the host's own process."""
    from tests.sidecar_parts import host_environment

    hosts = {}
    for name, spool in spools.items():
        environment = host_environment(scratch, spool, threads_each) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        hosts[name] = stack.enter_context(sidecar_host.running_host(model, environment, script=__file__))
        say(f"the host '{name}' is ready")
    return hosts


def overhead(name: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Steps, and the shares of each engine's seconds that its worker has counted for the tap and its files."""
    from drafters.base import TargetSpec
    from drafters.build import build_drafter
    from drafters.config import Eagle3Config
    from tests.sidecar_parts import make_spool

    model = resolve_model(name)
    target = TargetSpec.from_pretrained(model)
    drafter = build_drafter(Eagle3Config(type="eagle3", draft_vocab_size=min(4096, target.vocab_size)), target, seed=0)
    spools = {e: make_spool(scratch / e, model, drafter, **settings) for e, (settings, _) in ENGINES.items()}
    for spool in spools.values():
        write_json(spool.current, Offer(on=False))
    with ExitStack() as stack:
        hosts = started(stack, model, scratch, {PLAIN: None, **spools})
        turns, steps, counted = deque(hosts), list[dict[str, Any]](), dict[str, dict[str, float]]()
        for number in range(-1, rounds):  # the first round warms up
            for host in hosts.values():
                host("begin_wave", number)
            for step in range(TOKENS):
                turns.rotate()  # so that none always follows the same one
                for e in turns:
                    ((clock, processor),) = hosts[e]("steps", 1)
                    steps.append({"engine": e, "wave": number, "step": step, "clock": clock, "processor": processor})
            for e, host in hosts.items():
                assert not host("steps", sys.maxsize)[1:], "all engines make the same number of steps"
                for shard in spools[e].engines()[0].shards() if e in spools else ():  # nobody else takes them away
                    shard.with_suffix(".json").unlink()
                    shard.unlink()
            if (number + 1) % max(1, rounds // 5) == 0:
                say(f"step times of {name}: round {number + 1} of {rounds}")
        for e, spool in spools.items():
            time.sleep(1.1)  # a worker reports once a second, when it makes a step
            hosts[e]("generate", [[40, 41]], {"max_tokens": 1})
            state = read_json(spool.engines()[0].state, State)
            seconds = sum(step["clock"] for step in steps if step["engine"] == e)
            assert state.reason is None and not state.counts["drafts"], state
            counted[e] = {part: state.seconds.get(part, 0.0) / seconds for part in ("tap", "write")}
    return {"steps": [step for step in steps if step["wave"] >= 0], "counted": counted}


def overhead_table(found: dict[str, Any]) -> str:
    """Markdown. An overhead is the ratio of the sums of all steps, or of all but the first of a wave, which computes the prompts,
    or the median ratio of a step to the one of the host without the sidecar beside it; standard errors are those of the waves."""
    import numpy as np
    import pandas as pd

    steps = pd.DataFrame(found["steps"])
    rows = pd.DataFrame({"ms a step": steps.groupby("engine")["clock"].mean().map(lambda s: f"{1e3 * s:.3f}")})
    for kind in ("clock", "processor", "processor, after the prompts", "median"):
        of = "processor" if kind.startswith("processor") else "clock"
        times = steps.pivot(index=["wave", "step"], columns="engine", values=of)
        if kind.endswith("prompts"):
            times = times.drop(index=0, level="step")
        if kind == "median":
            waves = times.div(times[PLAIN], axis=0).groupby("wave").median()
        else:
            waves = times.groupby("wave").sum().pipe(lambda sums: sums.div(sums[PLAIN], axis=0))
        value, error = np.log(waves).mean(), np.log(waves).sem()
        found.setdefault("overhead", {})[kind] = {"mean": value.to_dict(), "standard_error": error.to_dict()}
        rows[f"by {kind}"] = [f"{value[e]:+.2%} ± {error[e]:.2%}" if e in ENGINES else "" for e in rows.index]
    rows["tap, files"] = [", ".join(f"{s:.2%}" for s in found["counted"].get(e, {}).values()) for e in rows.index]
    rows["bar"] = [f"{ENGINES[e][1]:.0%}" if e in ENGINES else "" for e in rows.index]
    return rows.loc[[PLAIN, *ENGINES]].to_markdown()


@contextmanager
def trainer(
    spool: Any, fields: Sequence[str], scratch: Path, log: Path, model: str = MODELS["tiny"]
) -> Iterator[Callable[[], Any]]:
    """`cotrain sidecar`, stopped but inside of the contexts that the yielded function returns, which yield its psutil.Process."""
    command = [sys.executable, "-m", "pipelines.cli", "sidecar", "--model", model, "--share", "1", *fields]
    command += ["--spool", str(spool.folder), f"run_root={scratch}/runs"]
    command = ["sh", "-c", f"exec {shlex.join(command)} >{shlex.quote(str(log))} 2>&1"]
    with trainer_beside(command, spool.folder) as process:

        @contextmanager
        def works() -> Iterator[Any]:
            assert process.poll() is None, f"the trainer has ended; {log} says why"
            process.send_signal(signal.SIGCONT)
            yield psutil.Process(process.pid)
            process.send_signal(signal.SIGSTOP)

        try:
            yield works
        finally:
            process.send_signal(signal.SIGCONT)


def beside(rounds: int, fields: Sequence[str], log: Path, scratch: Path) -> list[dict[str, Any]]:
    """Waves: whether the trainer worked, seconds of a step, and how many cores host and trainer used."""
    waves, model, spool = list[dict[str, Any]](), MODELS["smollm2"], Spool(scratch / "spool")
    with ExitStack() as stack:
        works = stack.enter_context(trainer(spool, fields, scratch, log, model))
        cores = threads.num_cores()
        (host,) = started(stack, resolve_model(model), scratch, {TRAINED: spool}, cores).values()
        for number in range(2 * rounds + 2):
            with works() if number % 2 else nullcontext() as process:
                before = sum(process.cpu_times()[:2]) if process else 0.0
                host("begin_wave", number)
                seconds, computed = zip(*host("steps", sys.maxsize), strict=True)
                used = (sum(process.cpu_times()[:2]) if process else 0.0) - before
            found = {"works": bool(number % 2), "mean_s": sum(seconds) / len(seconds), "median_s": median(seconds)}
            found |= {"longest_s": max(seconds), "host_cores": sum(computed) / sum(seconds)}
            waves.append(found | {"steps": len(seconds), "trainer_cores": used / sum(seconds)})
            say(f"wave {number} beside the trainer: {waves[-1]}")
    return waves[2:]  # the first two fill the trainer's buffer


def beside_table(waves: list[dict[str, Any]]) -> str:
    """Markdown."""
    import numpy as np
    import pandas as pd

    frame, lines = pd.DataFrame(waves), list[str]()
    for kind in ("mean", "median"):
        pairs = frame[f"{kind}_s"].to_numpy().reshape(-1, 2)
        ratio = np.log(pairs[:, 1] / pairs[:, 0])
        error = ratio.std(ddof=1) / len(ratio) ** 0.5
        lines.append(
            f"By the {kind}, a step takes {np.exp(ratio.mean()) - 1:+.1%} ± {error:.1%} beside a working trainer."
        )
    return "\n\n".join([frame.groupby("works").mean().to_markdown(), *lines])


def moved(model: Path, folder: Path) -> Path:
    """The policy after optimizer steps on the text of another Markov chain than the one that it was made with."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cotrain.models import tiny

    tokenizer, tiny.TRAINING_STEPS = AutoTokenizer.from_pretrained(model), UPDATES
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tiny.train_on_chain(policy, tokenizer, torch.Generator().manual_seed(1))
    policy.save_pretrained(folder)
    return folder


def served(size: dict[str, int], fields: Sequence[str], log: Path, scratch: Path) -> dict[str, Any]:
    """Waves of the arms, numbers of the first one of all arms and of the first after the update, and tokens of each."""
    from drafters.base import TargetSpec
    from drafters.build import load_drafter
    from tests.sidecar_parts import make_spool

    spool, waves, model = Spool(scratch / "spool"), list[dict[str, Any]](), resolve_model(MODELS["tiny"])
    other = moved(model, scratch / "moved")
    with ExitStack() as stack:
        works = stack.enter_context(trainer(spool, fields, scratch, log))
        first = load_drafter(spool.initial, TargetSpec.from_pretrained(model))
        spools = {
            FROZEN: make_spool(scratch / "frozen", model, first, share=0.0),
            CHOOSING: make_spool(scratch / "choosing", model, first, share=0.0, adaptive=True),
            TRAINED: spool,
        }
        hosts = started(stack, model, scratch, {PLAIN: None, **spools})

        def wave(arm: str, number: int) -> None:
            before = hosts[arm]("counts")
            with works() if arm == TRAINED else nullcontext():
                seconds = hosts[arm]("wave", number)
            new = {name: count - before[name] for name, count in hosts[arm]("counts").items()}
            length = 1 + new.get("accepted_tokens", 0) / max(1, new.get("drafts", 0))
            version = read_json(spools[arm].engines()[0].state, State).drafter_version if arm in spools else 0
            known = {"arm": arm, "number": number, "length": length, "drafter": version, "seconds": seconds}
            waves.append(known | {"tokens_s": REQUESTS * TOKENS / seconds})
            if number % 10 == 0:
                say(f"wave {number}, {arm}: acceptance length {length:.2f}, drafter version {version}")

        start = 0
        while start < size["first"] or not spool.current.exists():
            wave(TRAINED, start)
            start += 1
        published = read_json(spool.current, Offer)
        copied = shutil.copy(published.path, scratch / "frozen.safetensors")
        for arm in (FROZEN, CHOOSING):
            write_json(spools[arm].current, replace(published, path=str(copied)))
        turns = deque(hosts)
        update = start + size["before"]
        for number in range(start, update + size["after"]):
            turns.rotate()
            for host in hosts.values() if number == update else ():
                host("update", str(other))
            for arm in turns:
                wave(arm, number)
    return {"start": start, "update": update, "tokens": REQUESTS * TOKENS, "recovery": None, "waves": waves}


def served_table(found: dict[str, Any], out: Path) -> str:
    """Markdown, of all waves before the update, of WINDOW after it, and of the last half after it; and acceptance.png."""
    import pandas as pd

    from pipelines.page.page import line_section

    start, update, frame = found["start"], found["update"], pd.DataFrame(found["waves"])
    by_arm, end, cells = frame.pivot(index="number", columns="arm"), frame["number"].max() + 1, {}
    spans = {"before": (start, update), "just after": (update, update + WINDOW), "later": ((update + end) // 2, end)}
    for span, (first, last) in spans.items():
        part = by_arm.loc[first : last - 1]
        figures = {"length": part["length"], "tokens/s": part["tokens_s"]}
        figures["speed over none"] = part["tokens_s"].div(part["tokens_s"][PLAIN], axis=0)
        for name, values in figures.items():
            cells[f"{span}: {name}"] = [f"{m:.4g} ± {e:.2g}" for m, e in zip(values.mean(), values.sem(), strict=True)]
    text = pd.DataFrame(cells, index=by_arm["length"].columns).loc[[PLAIN, FROZEN, CHOOSING, TRAINED]].T.to_markdown()
    trained = frame[frame["arm"] == TRAINED].set_index("number")
    enough = RECOVERED * trained["length"].loc[start : update - 1].mean()
    after = trained.loc[update:]
    is_back = after["length"].rolling(WINDOW).mean() >= enough
    if is_back.any():
        num, seconds = is_back.idxmax() + 1 - update, after["seconds"].loc[: is_back.idxmax()].sum()
        found["recovery"] = {"waves": int(num), "tokens": int(num) * found["tokens"], "seconds": float(seconds)}
    lines = {TRAINED: trained["length"], FROZEN: by_arm["length"][FROZEN].loc[start:]}
    marks = {"policy update": [update], "another drafter": list(trained.index[trained["drafter"].diff() > 0])}
    drawn = line_section("Acceptance by wave", "acceptance length", "", lines, marks=marks, floor="no gain").figure
    assert drawn is not None
    drawn.savefig(out / "acceptance.png")
    return f"{text}\n\nBack at {enough:.2f}, {RECOVERED:.0%} of the length before the update: {found['recovery']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--small", action="store_true", help="a few rounds, which show that it works and nothing else")
    parser.add_argument(
        "--trainer", nargs="+", default=[], metavar="key=value", help="fields of the trainer, for beside and served"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    os.environ.update(threads.engine_environment(THREADS))
    size, git = {n: s[args.small] for n, s in SIZES.items()}, git_state(Path(threads.__file__).parents[1])[0]
    options: dict[str, Any] = {
        "sizes": size,
        "requests": REQUESTS,
        "tokens": TOKENS,
        "threads": THREADS,
        "trainer": [*TRAINER, *args.trainer],
    }
    results: dict[str, Any] = here_and_now() | {"git": git, "options": options, "load_average": os.getloadavg()}
    print(json.dumps(results))
    for part in args.parts:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="cotrain-cost-", dir="/dev/shm") as scratch:
            if part == "served":
                found = served(size, options["trainer"], args.out / "trainer.log", Path(scratch))
                text = served_table(found, args.out)
            elif part == "beside":
                found = {"waves": beside(size[part], args.trainer, args.out / "beside.log", Path(scratch))}
                text = beside_table(found["waves"])
            else:
                found = overhead(MODELS[part], size[part], Path(scratch))
                text = overhead_table(found)
        results[part] = found | {"took_s": time.perf_counter() - began}
        (args.out / "results.json").write_text(json.dumps(results))
        print(f"\n{part}, {results[part]['took_s']:.0f} s\n\n{text}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():
        sidecar_host.Host = TimedHost  # type: ignore[misc]
        with ExitStack() as hosts:
            sidecar_host.main(hosts, int(sys.argv[1]), sys.argv[2])
    else:
        main()
