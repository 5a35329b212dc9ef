"""Training throughput of a drafter against the policy's own forward pass of the same tokens, on CPU.

    python benchmarks/drafter_throughput.py [--model bundled:smollm2-135m-instruct] [--threads 1] [--rounds 5] [--type mtp]

All take turns on the same packed rollouts. The drafter's step is loss, backward and AdamW, once with the target's logits of all
tokens and once with the log-probabilities of the rollouts in their place; the policy's forward is what a learner needs for
log-probs: hidden states and logits of the response tokens, no gradient.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="default %(default)s")
    parser.add_argument("--type", choices=["eagle3", "mtp", "draft_model"], default="eagle3", help="kind of drafter")
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of either (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default %(default)s)")
    parser.add_argument("--rollouts", type=int, default=16, help="rollouts in a step (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=48, help="prompt tokens of each (default %(default)s)")
    parser.add_argument("--response", type=int, default=80, help="response tokens of each (default %(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary (eagle3)")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 3, 5], help="trained depths (default 1 3 5)")
    args = parser.parse_args()

    import torch
    from pydantic import TypeAdapter
    from transformers import AutoModelForCausalLM

    from cotrain.models.loading import resolve_model
    from cotrain.trainer.trainer import read_target_weights
    from drafters.alignment import DraftBatch
    from drafters.base import SamplingParams, TargetSpec
    from drafters.build import build_drafter
    from drafters.config import DrafterModelConfig
    from drafters.losses import drafter_loss

    torch.set_num_threads(args.threads)
    folder = resolve_model(args.model)
    spec = TargetSpec.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = read_target_weights(folder, 0, spec, "cpu")
    weights = type(weights)(weights.embedding.float(), weights.head.float(), 0)
    length = args.prompt + args.response
    tokens = torch.randint(spec.vocab_size, (args.rollouts, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = policy(tokens, output_hidden_states=True, logits_to_keep=1).hidden_states
    fields = {"type": args.type} | ({"draft_vocab_size": args.draft_vocab} if args.type == "eagle3" else {})
    models = TypeAdapter(DrafterModelConfig)
    aux_layers = build_drafter(models.validate_python(fields), spec, seed=0).serving.aux_layers
    rows = torch.arange(tokens.numel())
    batch = DraftBatch(
        token_ids=tokens.flatten(),
        aux_hidden=torch.cat([torch.empty(*tokens.shape, 0), *(states[layer] for layer in aux_layers)], -1).flatten(
            0, 1
        ),
        final_hidden=states[-1].flatten(0, 1),
        feature_mask=rows % length != length - 1,
        response_mask=rows % length >= args.prompt,
        positions=rows % length,
        document_ids=rows // length,
        policy_version=0,
    )

    @torch.no_grad()
    def policy_forward() -> None:
        policy(tokens, logits_to_keep=args.response)

    def drafter_step(depth: int, batch: DraftBatch) -> Callable[[], None]:
        drafter = build_drafter(models.validate_python(fields | {"trained_depth": depth}), spec, seed=0)
        drafter.choose_vocabulary(torch.bincount(batch.token_ids, minlength=spec.vocab_size).double(), weights)
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            loss, _ = drafter_loss(drafter, batch, weights, SamplingParams(1.0, 1.0, 0, "probabilistic"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    known = dataclasses.replace(batch, log_probs=torch.full(batch.token_ids.shape, -1.0))
    arms = {"policy forward": policy_forward}
    arms |= {f"all logits, depth {d}": drafter_step(d, batch) for d in args.depth}
    arms |= {f"log-probs, depth {d}": drafter_step(d, known) for d in args.depth}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(args.rounds + 1):
        for name, run in arms.items():
            started = time.perf_counter()
            run()
            if round_:  # the first turn warms up
                seconds[name].append(time.perf_counter() - started)
    forward = median(seconds["policy forward"])
    print(f"{args.rollouts} rollouts of {args.prompt} + {args.response} tokens, {args.threads} threads, float32, "
          f"{args.type}, median of {args.rounds} turns")  # fmt: skip
    for name, times in seconds.items():
        rate = tokens.numel() / median(times)
        print(f"{name:<24} {rate:7.0f} tokens/s   {median(times) / forward:5.2f} x the policy's forward")


if __name__ == "__main__":
    main()
