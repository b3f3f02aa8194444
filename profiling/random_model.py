"""Write the inputs of a benchmark: random weights in the shape of a Qwen2.5, a tokenizer, a reward model, prompts.

python profiling/random_model.py models/random_1.5b --shape 1.5b --prompt-tokens 256 [--reward-model]

Random logits are nearly flat, so that every response reaches its full length and every run does the same work.
"""

import argparse
import json
import random
from pathlib import Path
from string import ascii_lowercase

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Tokenizer

SHAPES = {
    # layers, width, width of the feed-forward part, heads, heads of keys, vocabulary, whether the head is tied
    "tiny": (2, 128, 96, 4, 2, 128, True),
    "narrow": (28, 128, 96, 4, 2, 128, True),  # as many launches and hooks as 1.5b, and nothing to compute
    "0.5b": (24, 896, 4864, 14, 2, 151936, True),
    "1.5b": (28, 1536, 8960, 12, 2, 151936, True),
    "7b": (28, 3584, 18944, 28, 4, 152064, False),
    "14b": (48, 5120, 13824, 40, 8, 152064, False),
}
NUM_PROMPTS = 2048


def shape_config(shape: str) -> Qwen2Config:
    """Return the configuration of a shape by its name in SHAPES."""
    layers, width, feed_forward, heads, key_heads, words, is_tied = SHAPES[shape]
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=1,
        dtype="bfloat16",
    )


def make_tokenizer(num_words: int) -> Qwen2Tokenizer:
    """Return a tokenizer whose tokens are EOS, letters, and words that occur in responses only."""
    vocabulary = {token: i for i, token in enumerate(["<eos>", *ascii_lowercase])}
    vocabulary |= {f"\u0120w{i}": i for i in range(len(vocabulary), num_words)}  # a space in byte-level BPE
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<eos>")
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], **special)


def write_prompts(path: Path, num_tokens: int) -> None:
    """Write prompts of exactly num_tokens tokens."""
    draw = random.Random(0)
    rows = ("".join(draw.choices(ascii_lowercase, k=num_tokens)) for _ in range(NUM_PROMPTS))
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))


def write_model(folder: Path, shape: str, prompt_tokens: int, *, has_reward: bool) -> None:
    """Write `policy`, `reward` if has_reward, and `prompts_<tokens>.jsonl`; existing models are kept."""
    config = shape_config(shape)
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(folder / f"prompts_{prompt_tokens}.jsonl", prompt_tokens)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parts = {"policy": Qwen2ForCausalLM, "reward": Qwen2ForSequenceClassification}
    torch.set_default_dtype(torch.bfloat16)
    for name in ("policy", "reward") if has_reward else ("policy",):
        if (folder / name / "complete").exists():
            continue
        torch.manual_seed(0)
        with torch.device(device):
            model = parts[name](config)
        model.save_pretrained(folder / name)
        make_tokenizer(config.vocab_size).save_pretrained(folder / name)
        (folder / name / "complete").touch()
        del model


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.5b", choices=SHAPES)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--reward-model", action="store_true", help="a sequence classifier too")
    arguments = parser.parse_args()
    write_model(arguments.folder, arguments.shape, arguments.prompt_tokens, has_reward=arguments.reward_model)


if __name__ == "__main__":
    main()
