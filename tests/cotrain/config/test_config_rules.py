"""Each combination of fields that cannot work is refused, naming the field and the fix; its neighbour is accepted."""

import pytest

from cotrain.config.load import ConfigError, load_config

BASE = [
    "name=first",
    "steps=4",
    "policy.model=bundled:smollm2-135m-instruct",
    "task.type=reasoning_gym",
    "task.name=chain_sum",
    "drafter.model.type=eagle3",
]

REFUSED = [
    (
        "rollout.num_speculative_tokens=4",
        "rollout.num_speculative_tokens: 4 is above drafter.model.trained_depth = 3; lower it",
    ),
    (
        'drafter={model={type="draft_model", trained_depth=1}}',
        "rollout.num_speculative_tokens: 3 is above drafter.model.trained_depth = 1; lower it",
    ),
    ('drafter={model={type="draft_model", num_layers=5}}', "drafter.model.num_layers: must be less than or equal to 4"),
    ('drafter={model={type="draft_model", draft_vocab_size=64}}', "drafter.model.draft_vocab_size: "),
    (
        "rollout.history.max_bytes=100000000000",
        "rollout.history.max_bytes: must be less than or equal to 34359738352, got 100000000000",
    ),
    ("rollout.temperature=0", "rollout.temperature: 0 makes all samples of a prompt equal"),
    ("rollout.samples_per_prompt=1", "rollout.samples_per_prompt: 1 leaves policy.advantage=group_mean_std nothing"),
    (
        "rollout.top_p=0.9",
        "policy.old_log_probs: 'rollout' does not go with truncated sampling (rollout.top_p=0.9, rollout.top_k=0)",
    ),
    (
        "rollout.top_k=50",
        "policy.old_log_probs: 'rollout' does not go with truncated sampling (rollout.top_p=1, rollout.top_k=50)",
    ),
    (
        "policy.behaviour_correction=truncate",
        "policy.behaviour_correction: 'truncate' corrects the learner's own log-probs; set policy.old_log_probs = "
        '"recomputed"',
    ),
    ("policy={behaviour_cap=3.0}", "policy.behaviour_cap: 3 has no effect without policy.behaviour_correction"),
    ("policy.behaviour_cap=0.9", "policy.behaviour_cap: "),
    ("policy.num_processes=3", "64 rollouts cannot be divided by policy.minibatches x policy.num_processes = 1 x 3"),
    (
        "policy={num_processes=128, sharding='fsdp2'}",
        "64 rollouts cannot be divided by policy.minibatches x policy.num_",
    ),
    ("policy.sharding=fsdp1", "policy.sharding: "),
    ("policy.minibatches=5", "64 rollouts cannot be divided by policy.minibatches x policy.num_processes = 5 x 1"),
    ("policy.micro_batch_tokens=1023", "policy.micro_batch_tokens: 1023 is less than one rollout of full length"),
    ("rollout.max_new_tokens=8000", "or lower one of these two, which must fit the context of the model too"),
    ("policy.clip_low=1.0", "policy.clip_low: must be less than 1"),
    ("policy.model=''", "policy.model: String should have at least 1 character"),
    (
        'task={type="dataset", path="rows.jsonl", reward=["exact", "numeric"], reward_weights=[1.0]}',
        "task.reward_weights: 1 do not fit the 2 of task.reward; set one for each",
    ),
    (
        'task={type="dataset", path="rows.jsonl", reward_weights=[1.0, 2.0]}',
        "task.reward_weights: 2 do not fit the 1 of task.reward; set one for each",
    ),
    (
        'validation={task={type="dataset", path="rows.jsonl", reward_weights=[1.0, 2.0]}}',
        "validation.task.reward_weights: 2 do not fit the 1 of validation.task.reward",
    ),
    (
        'task={type="dataset", path="rows.jsonl", reward=["exact"], reward_weights=[inf]}',
        "task.reward_weights: must be a finite number, got inf",
    ),
    ('task={type="dataset", path="rows.jsonl", reward=[]}', "task.reward: "),
    ('task={type="dataset", path="rows.jsonl", reward=5}', "task.reward: must be a valid list, got 5"),
    (
        "rollout.prompts_per_step=2",
        "rollout.prompts_per_step: drafters are scored on the 2 prompts x 8 samples",
    ),
    (
        "rollout={prompts_per_step=4, samples_per_prompt=3}",
        "rollout.prompts_per_step: drafters are scored on the 4 prompts x 3 samples",
    ),
    (
        "drafter={model={type='eagle3'}, init='auto', train=false}",
        'drafter.init: "auto" chooses what training starts from',
    ),
    ("drafter.alarms.tolerance=1", "drafter.alarms.tolerance"),
    (
        "rollout.history={}",
        "rollout.history: an engine drafts from a history or from a drafter, as both together were no faster",
    ),
    ("drafter.on_drafter_failure=ignore", "drafter.on_drafter_failure"),
    ("rollout.vllm.quantization=fp8", "rollout.vllm.quantization: quantises the target"),
    ("rollout.vllm.logits_processors=['a.b']", "rollout.vllm.logits_processors: changes which tokens can be drawn"),
    ("rollout.vllm.tensor_parallel_size=0", "rollout.vllm.tensor_parallel_size: 0 is no whole number from 1 on"),
    ("rollout.vllm.tensor_parallel_size=2.0", "rollout.vllm.tensor_parallel_size: 2.0 is no whole number from 1 on"),
    ("rollout.vllm.nnodes=2", "rollout.vllm.nnodes: divides an engine in another way than tensor_parallel_size"),
    ("rollout.vllm.distributed_executor_backend=ray", "rollout.vllm.distributed_executor_backend: divides an engine"),
    ("rollout.vllm.enable_hc_sp=true", "rollout.vllm.enable_hc_sp: is sequence parallelism"),
    ("rollout.vllm.seed=3", "rollout.vllm.seed: is set by cotrain: set seed"),
    ("rollout.stop=['']", "rollout.stop: String should have at least 1 character, got ''"),
    ("name=a/b", "name: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', got 'a/b'"),
    ("name=../b", "name: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', got '../b'"),
    ("name=.b", "name: String should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$', got '.b'"),
]

ACCEPTED = [
    ["rollout.history={}", "drafter=none"],
    ["rollout.num_speculative_tokens=4", "drafter.model.trained_depth=4"],
    ["rollout.num_speculative_tokens=9", "drafter=none"],
    ["rollout.top_p=0.9", "rollout.top_k=50", "policy.old_log_probs=recomputed"],
    ["policy.old_log_probs=recomputed", "policy.behaviour_correction=truncate", "policy.behaviour_cap=1.5"],
    ["policy.old_log_probs=recomputed", "policy.behaviour_correction=mask", "policy.behaviour_cap=10"],
    ["policy.old_log_probs=recomputed", "policy.importance_ratio=sequence"],
    ["policy.num_processes=4", "policy.minibatches=16"],
    ["policy.num_processes=1", "policy.sharding=fsdp2"],
    ["policy.micro_batch_tokens=1024"],
    ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=4"],
    ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "drafter.gate.publish_when=always"],
    ["rollout.prompts_per_step=2", "drafter.gate.publish_when=always"],
    ["rollout.vllm.swap_space=4", "drafter=none"],
    ["rollout.vllm.tensor_parallel_size=2", "rollout.vllm.data_parallel_size=1"],
    ["name=run-2_b.1"],
    ['task={type="dataset", path="rows.jsonl", reward="my.rewards:score", reward_weights=[0.5]}'],
    ['task={type="dataset", path="rows.jsonl", reward=["exact", "numeric"], reward_weights=[1, -0.5]}'],
    ['task={type="dataset", path="rows.jsonl", reward=["exact", "numeric"]}'],
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[override for override, _ in REFUSED])
def test_impossible_combination_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, override])
    [problem] = error.value.problems
    assert message in problem


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_neighbouring_combination_is_accepted(overrides: list[str]) -> None:
    load_config([], [*BASE, *overrides])


def test_an_index_that_cannot_hold_a_step_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, "drafter=none", "rollout.history.max_bytes=1000000"])
    [problem] = error.value.problems
    assert "rollout.history.max_bytes: 1000000 cannot hold a step of rollouts of full length" in problem


def test_other_divisions_of_an_engine_are_refused_without_speculation_too() -> None:
    sequence_parallel = "rollout.vllm.compilation_config={pass_config={enable_sp=true}}"
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, "drafter=none", "rollout.vllm.data_parallel_size=2", sequence_parallel])
    assert [problem.partition(": ")[0] for problem in error.value.problems] == [
        "rollout.vllm.data_parallel_size",
        "rollout.vllm.compilation_config.pass_config.enable_sp",
    ]


def test_all_broken_rules_of_a_section_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            [], [*BASE, "rollout.num_speculative_tokens=4", "rollout.temperature=0", "rollout.samples_per_prompt=1"]
        )
    assert len(error.value.problems) == 3


def test_rules_between_fields_wait_until_every_field_is_right() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, "policy.minibatches=1000", "policy.clip_low=2"])
    assert [line.partition(":")[0] for line in error.value.problems] == ["policy.clip_low"]


@pytest.mark.parametrize("correction", ["truncate", "mask"])
def test_a_correction_that_cannot_work_is_refused(correction: str) -> None:
    corrected = ["policy.old_log_probs=recomputed", f"policy.behaviour_correction={correction}"]
    for truncated in ("rollout.top_p=0.9", "rollout.top_k=50"):
        with pytest.raises(ConfigError) as error:
            load_config([], [*BASE, *corrected, truncated])
        [problem] = error.value.problems
        assert f"policy.behaviour_correction: '{correction}' does not go with truncated sampling" in problem
        assert "leave it out, or set top_p = 1 and top_k = 0" in problem
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, *corrected, "policy.importance_ratio=sequence"])
    [problem] = error.value.problems
    assert 'policy.importance_ratio: "sequence" does not go with policy.behaviour_correction' in problem


LAG = "stream.max_policy_lag=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([LAG, "rollout.synchronous_batches=true"], "rollout.synchronous_batches: true makes batches the same"),
        (
            ["task=none", "task.type=environment", "task.factory=a:B", "rollout.synchronous_batches=true"],
            "rollout.synchronous_batches: true makes batches the same in every run, which environments do not",
        ),
        (
            [LAG, "rollout.top_k=9", "policy.old_log_probs=recomputed", "policy.behaviour_correction=mask"],
            "rollout.top_k",
        ),
        ([LAG, "policy.old_log_probs=recomputed"], 'policy.old_log_probs: "recomputed" without a correction ignores'),
        (["stream.max_policy_lag=4"], "stream.max_policy_lag: 4 is not below steps = 4; lower it"),
        (["stream.max_policy_lag=-1"], "stream.max_policy_lag: "),
        (["stream.reward_timeout_s=0"], "stream.reward_timeout_s: "),
    ],
)
def test_what_does_not_go_with_lag_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], [*BASE, *overrides])
    assert any(message in problem for problem in error.value.problems)


@pytest.mark.parametrize(
    "overrides",
    [
        [LAG],
        ["stream.max_policy_lag=3"],
        [LAG, "policy.old_log_probs=recomputed", "policy.behaviour_correction=truncate"],
        [LAG, "policy.importance_ratio=sequence"],
    ],
    ids=" ".join,
)
def test_what_goes_with_lag_is_accepted(overrides: list[str]) -> None:
    load_config([], [*BASE, *overrides])
