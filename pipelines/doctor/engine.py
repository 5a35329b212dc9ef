"""Checks of a real engine, on the model tiny:llama with a drafter. It is started once for all of them.

Every check leaves the engine as it was: the first policy, the first drafter.
"""

import statistics
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from torch import Tensor

from cotrain.lossless.family import judge
from cotrain.models.loading import TINY_MODEL, resolve_model, weight_files
from cotrain.process import threads
from cotrain.records import RolloutBatch, RolloutRequest, WeightPayload
from cotrain.rollout.engine import RolloutEngine
from cotrain.run.provenance import machine
from cotrain.trainer.self_check import check_features, check_records
from cotrain.transport.payload import WeightUpdateRefused, write_payload
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from pipelines.doctor.check import NotApplicable, Problem
from pipelines.engines import EngineSetup, one_engine, send
from pipelines.verify import command as verify
from pipelines.verify.checks import Plan, Verifier, load_target, target_laws, two_drafters

K, BATCH, TOKENS = 3, 16, 48
"""Most draft tokens in a step, requests in a batch, tokens of a response."""
DRAFT_VOCABULARY = 32
"""The drafter drafts only the lowest token ids. They include the digits, which the tiny model often writes."""
ALPHA, DISTANCE = 0.001, 0.15
"""False-alarm rate of the short verify, and the total variation distance that it detects."""

TURNS = 7
MOST_STEP_RATIO = 3.0
"""Longest time of a decode step with our hooks and the tap, relative to one without. It was 1.1 on two quiet cores, up to 1.5
while others used them. A step of the tiny model is nearly all host work, which is a far smaller share of a real model's."""

GPU_SHARE = 0.3
"""Share of a GPU's memory that each of two engines may take."""
WORKER = "pipelines.doctor.worker.DoctorWorker"


def prepare(folder: Path) -> tuple[Plan, EngineSetup]:
    """Return what `cotrain verify` would use for the tiny model and an untrained drafter, which is saved to the folder."""
    on_gpu = bool(machine()["gpus"])
    dtype = "bfloat16" if on_gpu else "float32"  # FlashAttention takes no float32
    config = Eagle3Config(type="eagle3", draft_vocab_size=DRAFT_VOCABULARY)
    drafter = build_drafter(config, TargetSpec.from_pretrained(resolve_model(TINY_MODEL)), seed=0)
    drafter.save(folder, getattr(torch, dtype))
    options = f"--model {TINY_MODEL} --drafter {folder} --dtype {dtype} --k {K} --batch {BATCH} --tokens {TOKENS} "
    options += f"--alpha {ALPHA} --distance {DISTANCE}"
    plan, setup = verify.prepare(verify.build_parser().parse_args(options.split()), folder)
    own = {"worker_extension_cls": WORKER} | ({"gpu_memory_utilization": GPU_SHARE} if on_gpu else {})
    rollout = setup.rollout.model_copy(update={"vllm": setup.rollout.vllm | own})
    return plan, replace(setup, rollout=rollout)


def constant_drafts(token_ids: Sequence[int], token: int, k: int) -> list[tuple[int, int]]:
    """Return (drafted, accepted) of each verification step of a greedy response, if each step drafts `token` k times."""
    steps, position = [], 1  # the prompt's step gives the first token, and drafts come after it
    while position < len(token_ids):
        drafted = token_ids[position : position + k]
        accepted = next((i for i, drawn in enumerate(drafted) if drawn != token), len(drafted))
        steps.append((k, accepted))
        position += accepted + 1
    return steps


def graph_problem(mode: str, sizes: Sequence[int], captured: int, steps: Mapping[int, str], rows: int) -> str | None:
    """Return what is wrong with an engine's CUDA graphs, or None if nothing is.

    mode: vLLM's cudagraph_mode. sizes: rows of each graph. captured: number of graphs. steps: mode of each step that was made
    with the tap on, by its number of rows. rows: number in a step of max_num_seqs requests with k draft tokens each.
    """
    if mode == "NONE" or not captured:
        return f"no CUDA graph is captured (cudagraph_mode {mode})"
    if max(sizes, default=0) < rows:
        return f"the largest CUDA graph has {max(sizes, default=0)} rows, a step of all requests and drafts has {rows}"
    if rows not in steps:
        return f"no step of {rows} rows was made with the tap on, only of {sorted(steps)}"
    if steps[rows] == "NONE":
        return f"with the tap on, a step of {rows} rows leaves the CUDA graphs"
    return None


class EngineChecks:
    """A method for each check: it returns what it found, or raises Problem or the error that it met."""

    def __init__(self, engine: RolloutEngine, plan: Plan, setup: EngineSetup):
        assert setup.drafter is not None
        self.about = f"{TINY_MODEL} in {plan.dtype}, {BATCH} requests at once, up to {K} draft tokens"
        self.engine, self.setup = engine, setup
        self.policy = {name: tensor for file in weight_files(setup.model) for name, tensor in load_file(file).items()}
        self.drafter = setup.drafter.state_for_serving()
        self.model = load_target(setup)
        laws = target_laws(self.model, setup.drafter.draft_to_target.tolist(), plan.dtype)
        taking_turns = two_drafters(setup.drafter, plan, Path(engine.spec.scratch))
        self.verifier = Verifier(engine, plan, laws, taking_turns, lambda line: None)

    async def tap(self) -> str:
        """The tap's hidden states are those of a Hugging Face forward pass, and no row is missing."""
        batch = await self._generate(K, tap=True, temperature=1.0)
        if holes := int(batch.feature_stats["num_holes"]):
            raise Problem(f"{holes} rows of {int(batch.feature_stats['num_tokens'])} are missing in what was tapped")
        check_records(batch, ())
        error = check_features(batch, self._hidden_states, self.setup.rollout.dtype)
        return f"{batch.feature_stats['num_tokens']:.0f} rows, largest relative error of a layer {error:.1g}"

    async def drafter_swap(self) -> str:
        """Two drafters that each always propose one token are swapped in, one after the other; all drafts are then that token."""
        plain, accepted, norm = (await self._generate(0)).rollouts, 0, self.drafter["norm.weight"]
        try:
            for token, _ in Counter(token for rollout in plain for token in rollout.token_ids).most_common(2):
                # A final norm of gain 0 makes all logits equal, argmax takes the first, and d2t maps it to the token.
                constant = {"norm.weight": torch.zeros_like(norm), "d2t": torch.full_like(self.drafter["d2t"], token)}
                await self._send(True, self.drafter | constant)
                for rollout in (await self._generate(K)).rollouts:
                    # The last step is cut where the response ends.
                    expected = constant_drafts(rollout.token_ids, token, K)[:-1]
                    if list(rollout.verification_steps)[:-1] != expected:
                        raise Problem("the engine drafts with another drafter than the one that was swapped in")
                    accepted += sum(number for _, number in expected)
        finally:
            await self._send(True, self.drafter)
        if not accepted:
            raise Problem("neither drafter had a token accepted, so it cannot be told which one drafted")
        return f"2 drafters served and used as sent, {accepted} of their tokens accepted"

    async def read_back(self) -> str:
        """The read-back reports a changed element of any tensor, and nothing else."""
        for draft, state in ((True, self.drafter), (False, self.policy)):
            payload = await self._send(draft, state)
            differing, missed = await self.engine._call("cotrain_doctor_read_back", payload.path, draft)
            if differing or missed:
                raise Problem(f"it finds a difference where none is: {differing[:4]}; misses one: {missed[:4]}")
        return f"a changed element was found in each of {len(self.drafter) + len(self.policy)} tensors"

    async def bad_update(self) -> str:
        """Updates that are broken in several ways are refused, and what was served before is served on."""
        norm = self.drafter["norm.weight"]
        other = self._payload({**self.drafter, "norm.weight": norm + 1}, "other")
        payloads = {
            "a value that is not finite": self._payload({**self.drafter, "norm.weight": norm * torch.nan}, "nan"),
            "a tensor too short": self._payload({**self.drafter, "norm.weight": norm[:-1]}, "short"),
            "a tensor too many": self._payload({**self.drafter, "embed_tokens.weight": norm.clone()}, "many"),
            "a wrong checksum": replace(other, digests=other.digests | {"norm.weight": "0"}),
        }
        before = await self.engine.served_digests(list(self.drafter), draft=True)
        for what, payload in payloads.items():
            try:
                await self.engine.update_drafter(payload, self.engine.versions.drafter + 1)
            except WeightUpdateRefused:
                continue
            raise Problem(f"the engine has taken a drafter with {what}")
        if await self.engine.served_digests(list(self.drafter), draft=True) != before:
            raise Problem("a refused update has changed what is served")
        return f"{len(payloads)} broken updates were refused"

    async def draft_length(self) -> str:
        """A draft length that is set at run time holds from the next step on."""
        for k in (*range(K + 1), K):
            rollouts = (await self._generate(k)).rollouts
            drafted = {number for rollout in rollouts for number, _ in rollout.verification_steps}
            if drafted != ({k} if k else set()):
                raise Problem(f"at draft length {k} the engine drafted {sorted(drafted)} tokens in a step")
        return f"0 to {K} and back, each kept in every step"

    async def greedy(self) -> str:
        """Greedy text is the same without speculation, at each draft length, and while drafters take turns."""
        results = await self.verifier.greedy()
        if differing := [result.setting for result in results if result.p == 0]:
            raise Problem(f"other text than without speculation: {'; '.join(differing)}")
        return f"{len(self.setup.prompts)} prompts, {results[-1].setting.removeprefix('greedy, ')}"

    async def verify(self) -> str:
        """A few hundred tokens sampled with each way to draft have the distribution of the policy alone."""
        verdict = judge(await self.verifier.sampled(), ALPHA)
        if not verdict.passed:
            raise Problem(str(verdict))
        tokens = self.verifier.plan.tokens
        return f"{len(verdict.results)} checks, {tokens} tokens a setting, which find a distance of {DISTANCE:g}"

    async def cuda_graphs(self) -> str:
        """Steps of all requests and drafts run in CUDA graphs while the tap records."""
        await self.engine._call("cotrain_doctor_watch_steps")
        await self._generate(K, tap=True)
        facts = await self.engine._call("cotrain_doctor_graphs")
        if facts["device"] == "cpu":
            raise NotApplicable("the engine runs on a CPU")
        mode, sizes, rows = facts["mode"], facts["sizes"], BATCH * (K + 1)
        if problem := graph_problem(mode, sizes, facts["captured"], dict(facts["steps"]), rows):
            raise Problem(problem)
        return f"{mode}, {facts['captured']} captured, up to {max(sizes)} rows; {rows} are needed"

    async def step_time(self) -> str:
        """A decode step with hooks and tap takes at most MOST_STEP_RATIO times one of an engine without a drafter."""
        rollout = self.setup.rollout
        # Speculation needs vLLM's synchronous scheduling, so both engines have it.
        plain = rollout.model_copy(update={"vllm": rollout.vllm | {"async_scheduling": False}})
        setup = replace(self.setup, drafter=None, drafter_folder=None, rollout=plain)
        await self.engine.set_num_speculative_tokens(0)
        async with one_engine(setup, 0, threads.num_cores()) as other:
            seconds: dict[RolloutEngine, list[float]] = {self.engine: [], other: []}
            for turn in range(-1, TURNS):  # turn -1 warms up
                for engine, times in seconds.items():
                    await engine.generate(self._requests(), temperature=0.0)
                    times += [engine.decode_seconds / (TOKENS - 1)] if turn >= 0 else []
        ours, stock = (statistics.median(times) for times in seconds.values())
        text = f"{1e3 * ours:.2f} ms with hooks and tap, {1e3 * stock:.2f} ms without: {ours / stock:.2f} times"
        if ours > MOST_STEP_RATIO * stock:
            raise Problem(f"{text}, allowed are {MOST_STEP_RATIO:g}")
        return text

    def _requests(self) -> list[RolloutRequest]:
        return [RolloutRequest(f"p{i}", 0, prompt, None) for i, prompt in enumerate(self.setup.prompts[:BATCH])]

    async def _generate(self, k: int, tap: bool = False, temperature: float = 0.0) -> RolloutBatch:
        """Generate responses at draft length k, greedily unless a temperature is given."""
        await self.engine.set_num_speculative_tokens(k)
        return await self.engine.generate(self._requests(), tap=tap, temperature=temperature)

    def _payload(self, state: Mapping[str, Tensor], name: str) -> WeightPayload:
        path = Path(self.engine.spec.scratch) / f"doctor-{name}.safetensors"
        return write_payload(dict(state), path, getattr(torch, self.setup.rollout.dtype))

    async def _send(self, draft: bool, state: Mapping[str, Tensor]) -> WeightPayload:
        payload = self._payload(state, "drafter" if draft else "policy")
        await send(self.engine, payload, draft)
        return payload

    def _hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return the hidden states [T, A*H] of these layers and the last one [T, H], from a Hugging Face forward pass."""
        with torch.no_grad():
            states = self.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1), states[-1][0]


@asynccontextmanager
async def started_engine() -> AsyncIterator[EngineChecks]:
    """Start an engine, yield its checks, and stop it at the end."""
    with TemporaryDirectory() as folder:
        plan, setup = prepare(Path(folder) / "drafter")
        async with one_engine(setup, 0, threads.num_cores()) as engine:
            yield EngineChecks(engine, plan, setup)
