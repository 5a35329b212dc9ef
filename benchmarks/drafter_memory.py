"""Peak memory of one drafter step: forward, backward and AdamW, in a fresh process.

    python benchmarks/drafter_memory.py [--tokens 8192] [--draft-vocab 32000] [--depth 7] [--type mtp]

The peak is VmHWM of the process minus its size after the imports, so it includes the drafter, its gradients and
AdamW's moments, the target's embedding and head, and the features. Linux only.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

MIB = 2**20


def status_bytes(field: str) -> int:
    """A memory field of this process, such as VmHWM or VmRSS."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def measure(args: argparse.Namespace) -> None:
    """Take one step in this process and print its memory by what it is for."""
    import torch
    from pydantic import TypeAdapter

    from drafters.alignment import DraftBatch
    from drafters.base import SamplingParams, TargetSpec, TargetWeights
    from drafters.build import build_drafter
    from drafters.config import DrafterModelConfig
    from drafters.losses import drafter_loss

    baseline = status_bytes("VmRSS")
    target = TargetSpec(
        model_type="llama",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_layers=28,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(args.hidden // 128, 1),
        head_dim=64,
        intermediate_size=3 * args.hidden,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=32_768,
    )
    fields = {"type": args.type, "trained_depth": args.depth}
    fields |= {"draft_vocab_size": args.draft_vocab} if args.type == "eagle3" else {}
    drafter = build_drafter(TypeAdapter(DrafterModelConfig).validate_python(fields), target, seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    embedding = torch.randn(args.vocab, args.hidden) * 0.1
    weights = TargetWeights(embedding, embedding, policy_version=0)
    rows = torch.arange(args.tokens)
    batch = DraftBatch(
        token_ids=torch.randint(args.vocab, (args.tokens,)),
        aux_hidden=torch.randn(args.tokens, len(drafter.serving.aux_layers) * args.hidden),
        final_hidden=torch.randn(args.tokens, args.hidden),
        feature_mask=(rows + 1) % args.document != 0,
        response_mask=rows % args.document >= 32,
        positions=rows % args.document,
        document_ids=rows // args.document,
        policy_version=0,
    )
    before = status_bytes("VmRSS")
    started = time.perf_counter()
    loss, _ = drafter_loss(drafter, batch, weights, SamplingParams(1.0, 1.0, 0, "probabilistic"))
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - started

    trained = sum(parameter.nbytes for parameter in drafter.parameters())
    borrowed = embedding.nbytes
    features = batch.aux_hidden.nbytes + batch.final_hidden.nbytes
    peak = status_bytes("VmHWM") - baseline
    print(f"{args.tokens} tokens in rollouts of {args.document}, depth {args.depth}, {seconds:.1f} s")
    print(f"before the step        {(before - baseline) / MIB:7.0f} MiB")
    print(f"peak of the step       {peak / MIB:7.0f} MiB, of which")
    print(f"  drafter, gradients, AdamW {4 * trained / MIB:5.0f} MiB")
    print(f"  target embedding and head {borrowed / MIB:5.0f} MiB")
    print(f"  features                  {features / MIB:5.0f} MiB")
    print(f"  activations and logits    {(peak - 4 * trained - borrowed - features) / MIB:5.0f} MiB")
    draft_vocab = len(drafter.draft_to_target)
    whole = args.tokens * draft_vocab * args.depth * 4 / MIB
    print(f"one [tokens, {draft_vocab}] matrix of logits for each depth would be {whole:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=["eagle3", "mtp", "draft_model"], default="eagle3", help="kind of drafter")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens in the step")
    parser.add_argument("--document", type=int, default=1024, help="tokens in one rollout")
    parser.add_argument("--draft-vocab", type=int, default=32_000, help="size of the draft vocabulary (eagle3)")
    parser.add_argument("--vocab", type=int, default=64_000, help="size of the target's vocabulary")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the target")
    parser.add_argument("--depth", type=int, default=7, help="draft positions unrolled")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_this_process:
        measure(args)
    else:
        from cotrain.actors.drafter import RETURN_FREED  # as in a run

        step = [sys.executable, __file__, *sys.argv[1:], "--in-this-process"]
        subprocess.run(step, check=True, env=os.environ | RETURN_FREED)


if __name__ == "__main__":
    main()
