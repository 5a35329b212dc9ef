"""How far has a run moved its policy? KL divergence of the trained policy from the one that the run started from.

    python benchmarks/policy_drift.py runs/NAME [--prompts 24] [--samples 2]

Responses are sampled from the newest checkpoint's policy, on prompts of the run's task with the run's sampling; at every
response token the divergence KL(now || start) is computed exactly, over the whole vocabulary, at temperature 1.
"""

import argparse
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with a checkpoint")
    parser.add_argument("--prompts", type=int, default=24, help="default %(default)s")
    parser.add_argument("--samples", type=int, default=2, help="responses to each (default %(default)s)")
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cotrain.config.load import read_config
    from cotrain.models.loading import resolve_model
    from cotrain.run.checkpoint import latest_checkpoint
    from cotrain.run.run_dir import RunDir
    from cotrain.tasks.base import build_task
    from cotrain.tasks.prompts import apply_template

    torch.manual_seed(0)
    with RunDir(args.run.parent, args.run.name) as run_dir:
        config, checkpoint = read_config(run_dir.config), latest_checkpoint(run_dir)
        if checkpoint is None:
            parser.error(f"{args.run} has no checkpoint")
        folder = resolve_model(config.policy.model)
        start, now = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for path in (folder, checkpoint / "policy")
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        task = build_task(config.task, config.seed)
        sums = [0.0, 0]
        for index in range(args.prompts):
            prompt = torch.tensor([apply_template(tokenizer, task[index].messages)])
            for value in token_divergences(start, now, prompt, args.samples, config.rollout):
                sums[0], sums[1] = sums[0] + value, sums[1] + 1
    print(f"{checkpoint}: KL(now || start) {sums[0] / sums[1]:.4f} nats a token, mean over {sums[1]:,} response tokens")


def token_divergences(start: Any, now: Any, prompt: Any, samples: int, rollout: Any) -> list[float]:
    """KL at each token of responses of `now` to prompt [1, T]."""
    import torch

    with torch.no_grad():
        texts = now.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, num_return_sequences=samples,
        )  # fmt: skip
        length = prompt.shape[1]
        ours, theirs = (model(texts).logits[:, length - 1 : -1].log_softmax(-1) for model in (now, start))
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
    ends = torch.as_tensor(now.generation_config.eos_token_id).reshape(-1)
    stopped = torch.isin(texts[:, length:], ends).int().cumsum(1)
    stopped = torch.cat([torch.zeros_like(stopped[:, :1]), stopped[:, :-1]], dim=1)  # the end itself counts
    return divergence[stopped == 0].tolist()


if __name__ == "__main__":
    main()
