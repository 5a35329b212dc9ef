"""What a policy update saves when responses to a prompt share a row: python -m benchmarks.shared_prompts [--rounds 5]

SmolLM2-135M-Instruct in float32, whole updates of 4 prompts of random tokens by shape: tokens of a prompt, samples of it, tokens of a
response. Rounds take turns between shared rows and rows of their own. Prints medians of the seconds and their ratio, and the tokens
that the policy reads. A row is shared where that is less work in every layer, so the last shape has none.
"""

import argparse
import random
import statistics
import time

import torch

SHAPES = ((53, 4, 10), (128, 8, 32), (64, 4, 64))
PROMPTS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="updates of each kind (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from cotrain.config.schema import PolicyConfig, RolloutConfig
    from cotrain.models.loading import BUNDLED_MODEL, resolve_model
    from cotrain.policy.learner import PolicyLearner
    from cotrain.policy.shared_prompts import input_tokens, rows_of
    from cotrain.records import Rollout, ScoredRollout, Versions

    policy = PolicyConfig(model=BUNDLED_MODEL, micro_batch_tokens=1024)
    rollout = RolloutConfig(prompts_per_step=PROMPTS, samples_per_prompt=4, max_new_tokens=256)
    learner, rng = PolicyLearner(policy, rollout, str(resolve_model(BUNDLED_MODEL)), 1000), random.Random(0)
    print("| prompt | samples | response | tokens read | alone | shared, s | alone, s | ratio |")
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    for prompt_tokens, samples, response_tokens in SHAPES:
        rollouts = []
        for number in range(PROMPTS):
            prompt = rng.sample(range(1000, 40_000), prompt_tokens)
            for sample in range(samples):
                response = rng.sample(range(1000, 40_000), response_tokens)
                log_probs = [-10.0] * response_tokens
                one = Rollout(f"p{number}", sample, prompt, response, log_probs, "", "stop", Versions(0, 0))
                rollouts.append(ScoredRollout(one, 0.0, rng.gauss(0, 1)))
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(options.rounds + 1):
            for shares in (True, False):
                learner._shares = shares
                started = time.perf_counter()
                learner.update(rollouts)
                seconds[shares].append(time.perf_counter() - started)
        shared, alone = (statistics.median(seconds[shares][1:]) for shares in (True, False))
        read = sum(map(input_tokens, rows_of(rollouts, policy.micro_batch_tokens)))
        cells = (prompt_tokens, samples, response_tokens, read, sum(input_tokens([one]) for one in rollouts))
        print(f"| {' | '.join(map(str, cells))} | {shared:.1f} | {alone:.1f} | {shared / alone:.2f} |", flush=True)


if __name__ == "__main__":
    main()
