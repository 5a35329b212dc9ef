"""The models tiny:..., for tests and smoke runs: no network, no download, seconds on a CPU.

tiny:llama is trained, the others have random weights. Its eight layers answer every prompt with text from an order-2 Markov chain, which is predictable enough that a drafter's acceptance
length can rise, ends now and then, and writes enough numbers that some arithmetic answers are right by chance.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

NUM_LAYERS = 8
VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID = range(3)
ALPHABET = "0123456789 \n+-=.abcdefgh"
EOS_PROBABILITY = 1 / 50
TRAINING_STEPS, BATCH_SIZE = 160, 16
PROMPT_LENGTH, RESPONSE_LENGTH = 8, 64
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 2048,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
"""vLLM's CPU attention takes heads of multiples of 32."""
IDS = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write config, float32 weights, tokenizer and chat template to folder.

    The same seed gives the same weights on one machine. Random state and thread count of the process stay as they were.
    """
    tokenizer = byte_tokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            shallow = _random_model(num_layers=2)
            train_on_chain(shallow, tokenizer, torch.Generator().manual_seed(seed))
            model = _random_model(NUM_LAYERS)
    finally:
        torch.set_num_threads(threads)
    _deepen(shallow, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _random_model(num_layers: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **SIZES, **IDS))


def build_random_model(folder: Path, table: dict[str, Any]) -> None:
    """Write config, random float32 weights, tokenizer and chat template to folder, which say nothing but differ by token.

    table: a row of tiny.toml, with the fields that make this model_type valid for transformers and for vLLM. One with a text_config
    wraps a language model, which gets the sizes.
    """
    fields = {name: value for name, value in table.items() if name not in ("model_type", "text_config")}
    sizes = SIZES | {"num_hidden_layers": NUM_LAYERS} | IDS
    if "text_config" in table:
        auto, fields = AutoModelForImageTextToText, fields | {"text_config": sizes | table["text_config"]}
    else:
        auto, fields = AutoModelForCausalLM, sizes | fields
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(table["model_type"], **fields))
        for parameter in model.parameters():  # matrices as large as trained ones, and no norm that scales by just 1
            parameter.copy_(2 * parameter if parameter.ndim > 1 else parameter + 0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def _deepen(shallow: LlamaForCausalLM, deep: LlamaForCausalLM) -> None:
    """Copy a trained two-layer model into the first and last layer of deep, which takes a quarter of the time to train. The layers
    between stay random, with outputs small enough to leave the residual stream readable."""
    last = f"layers.{NUM_LAYERS - 1}."
    deep.load_state_dict({k.replace("layers.1.", last): v for k, v in shallow.state_dict().items()}, strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[1:-1]:
            layer.self_attn.o_proj.weight *= 0.5
            layer.mlp.down_proj.weight *= 0.5


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Special tokens first, then one token for each of the 256 bytes; ids above stay unused."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def train_on_chain(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> None:
    """Fit chat-formatted sequences: a random prompt of the alphabet, then a response of the chain."""
    letters = torch.tensor(tokenizer(ALPHABET).input_ids)
    header = torch.tensor(tokenizer("<|im_end|>\n<|im_start|>assistant\n").input_ids)
    count = TRAINING_STEPS * BATCH_SIZE
    prompts = letters[torch.randint(len(letters), (count, PROMPT_LENGTH), generator=generator)]
    responses = _sample_responses(letters, count, generator)
    sequences = torch.cat([prompts, header.expand(count, -1), responses], dim=1)
    labels = sequences.masked_fill(sequences == PAD_ID, -100)
    labels[:, :-RESPONSE_LENGTH] = -100

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=TRAINING_STEPS)
    for batch, targets in zip(sequences.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
        optimizer.zero_grad()
        model(input_ids=batch, labels=targets).loss.backward()
        optimizer.step()
        schedule.step()


def _sample_responses(letters: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Token ids [count, RESPONSE_LENGTH]: chain text, an end-of-sequence token at a random place, padding after it."""
    # Next-symbol logits given the last two of A symbols [A, A, A]; digits and spaces are favoured.
    size = len(ALPHABET)
    logits = 2.5 * torch.randn(size, size, generator=generator)
    logits = logits + 2.0 * torch.randn(size, 1, size, generator=generator)
    logits[..., [ALPHABET.index(digit) for digit in "0123456789"]] += 1.0
    logits[..., ALPHABET.index(" ")] += 3.0
    chain = torch.softmax(logits, dim=-1)
    symbols = torch.zeros(count, 2, dtype=torch.long)
    while symbols.shape[1] < RESPONSE_LENGTH + 2:
        probabilities = chain[symbols[:, -2], symbols[:, -1]]
        symbols = torch.cat([symbols, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    tokens = letters[symbols[:, 2:]]
    ends = torch.rand(tokens.shape, generator=generator) < EOS_PROBABILITY
    num_ends = ends.cumsum(dim=1)
    tokens[ends & (num_ends == 1)] = EOS_ID
    tokens[(num_ends > 1) | ((num_ends == 1) & ~ends)] = PAD_ID
    return tokens
