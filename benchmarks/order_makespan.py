"""What is it worth to begin with the prompts whose responses were the longest? Makespan against the order drawn.

    python -m benchmarks.order_makespan [--steps 40] [--epochs 4]

Log-normal lengths (mean 2000, at most 16,384) of 64 prompts with 8 samples each, of whose log-variance a share is between
prompts. LengthHistory learns the lengths of the epochs before, truncated ones as such. Steps take the same time whatever they
compute. Means over independent steps and their standard errors of makespan drawn / makespan longest first. Prints a Markdown
table.
"""

import argparse

import numpy as np

from cotrain.stream.lengths import LengthHistory, makespan

PROMPTS, SAMPLES, MEAN, CAP, SPREAD = 64, 8, 2000.0, 16_384, 0.9
ENGINES = ((1, 128), (2, 64), (4, 32), (4, 128))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="independent steps of each cell (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="epochs before that are known (default %(default)s)")
    args = parser.parse_args()
    print("| share between prompts | " + " | ".join(f"{e} x {s} slots" for e, s in ENGINES) + " | length error |")
    print("|---|" + "---|" * (len(ENGINES) + 1))
    for share in (0.8, 0.5, 0.3, 0.0):
        cells = [simulated(share, seed, args.epochs) for seed in range(args.steps)]
        means, errors = np.mean(cells, axis=0), np.std(cells, axis=0, ddof=1) / len(cells) ** 0.5
        row = " | ".join(f"{mean:.2f} ± {error:.2f}" for mean, error in zip(means, errors, strict=True))
        print(f"| {share} | {row} |")


def simulated(share: float, seed: int, epochs: int) -> list[float]:
    """The ratio for each of ENGINES, and the median absolute log error of the expected lengths."""
    generator = np.random.default_rng(seed)
    of_prompt = generator.normal(0.0, SPREAD * share**0.5, PROMPTS)
    history = LengthHistory()
    lengths = np.zeros((PROMPTS, SAMPLES), int)
    expected = np.zeros(PROMPTS)
    for _ in range(epochs + 1):
        own = generator.normal(0.0, SPREAD * (1 - share) ** 0.5, (PROMPTS, SAMPLES))
        free = MEAN * np.exp(of_prompt[:, None] + own - SPREAD**2 / 2)
        lengths = np.clip(free, 1, CAP).astype(int)
        expected = np.array([history.expected(str(prompt)) for prompt in range(PROMPTS)])
        for prompt, row in enumerate(lengths):
            history.observe(str(prompt), row.tolist(), (row == CAP).tolist())
    chosen = np.argsort(-expected, kind="stable")
    ratios = [makespan(lengths.tolist(), *size) / makespan(lengths[chosen].tolist(), *size) for size in ENGINES]
    assert history.error is not None
    return [*ratios, history.error]


if __name__ == "__main__":
    main()
