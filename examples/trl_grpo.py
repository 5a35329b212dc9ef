"""GRPO with TRL and its own vLLM engine, on a task that needs no data: answer with digits.

    cotrain run --model MODEL -- python examples/trl_grpo.py MODEL STEPS OUT

The script knows nothing of a drafter. MODEL is a folder or a hub id, OUT a folder for TRL. The last line of the output has
the rows of TRL's log as JSON.
"""

import json
import random
import sys

LETTERS = "0123456789 \n+-=.abcdefgh"


def share_of_digits(completions: list, **columns: object) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in texts]


def train(model: str, steps: int, out: str) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    draw = random.Random(0)
    texts = ["".join(draw.choice(LETTERS) for _ in range(8)) for _ in range(256)]
    config = GRPOConfig(
        output_dir=out, use_vllm=True, vllm_mode="colocate", use_cpu=True, bf16=False, fp16=False,
        per_device_train_batch_size=16, num_generations=8, max_completion_length=64, vllm_max_model_length=256,
        max_steps=steps, logging_steps=1, save_strategy="no", report_to="none", learning_rate=1e-3,
        temperature=1.0, beta=0.0, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=share_of_digits,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    print("LOG", json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), sys.argv[3])
