"""Program: for each family, an engine that aliases a trainer's weights beside one with copies, on tiny random models.

The engines are real vLLM ones in this process, one after another. Arguments: a folder, the device, names of families.
The last line of the output is JSON: for each family what `compare` returns.
"""

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybrid_rl.config import Config, LoraConfig, ModelsConfig, RolloutConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.vllm.arguments import engine_arguments
from hybrid_rl.engines.vllm.environment import engine_environment
from hybrid_rl.engines.vllm.sampling import sampling_params, to_generation
from hybrid_rl.models.loading import choose_dtype, load_actor
from hybrid_rl.models.packed import Actor
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.bucket import AliasedWeights, IpcBucket, bucket_bytes, open_ipc_bucket, plan_buckets
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.weights.layout import why_not_alias
from hybrid_rl.weights.routes import Routes

SHAPE = {
    "vocab_size": 199,  # vLLM pads it to 256
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
_LONG_ROPE = {
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,  # 24 of 32 dimensions, in 12 pairs
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + i / 20 for i in range(12)],
        "long_factor": [1.0 + i / 2 for i in range(12)],
        "partial_rotary_factor": 0.75,
    },
}
_DEEPSEEK = SHAPE | {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma": lambda: GemmaConfig(**SHAPE),
    "gemma2": lambda: Gemma2Config(**SHAPE, **_WINDOWS),
    "gemma3": lambda: Gemma3TextConfig(**SHAPE, **_WINDOWS),
    "phi3": lambda: Phi3Config(**_NO_HEAD_DIM, tie_word_embeddings=False),
    "phi4-mini": lambda: Phi3Config(**_NO_HEAD_DIM | _LONG_ROPE, tie_word_embeddings=True),
    "olmo2": lambda: Olmo2Config(**_NO_HEAD_DIM),
    "glm": lambda: GlmConfig(**SHAPE, partial_rotary_factor=0.5, attention_bias=True),
    "glm4": lambda: Glm4Config(**SHAPE, partial_rotary_factor=0.5, attention_bias=True),
    "llama": lambda: LlamaConfig(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**_NO_HEAD_DIM),
    "qwen3": lambda: Qwen3Config(**SHAPE),
    "deepseek2": lambda: DeepseekV2Config(**_DEEPSEEK, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SHAPE, **_EXPERTS, moe_intermediate_size=64, norm_topk_prob=True),
    "olmoe": lambda: OlmoeConfig(**_NO_HEAD_DIM | {"intermediate_size": 64}, **_EXPERTS),
}
SAMPLED = Sampling(temperature=1.0, max_tokens=16, stop_token_ids=())
PROMPTS = [[(7 * row + 11 * k) % 190 + 2 for k in range(6 + 5 * row)] for row in range(4)]


def save_random(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    """Save a random model whose logits are far from uniform, with biases and norms that are not all alike."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        scale = 4 if parameter.ndim >= 2 else 1
        parameter.data.mul_(scale).add_(torch.randn_like(parameter), alpha=0.05)
    model.to(dtype).save_pretrained(folder)


@contextmanager
def engine(
    folder: Path, dtype: torch.dtype, aliased: AliasedWeights | None, adapters: LoraConfig | None = None
) -> Iterator[Any]:
    """Yield a vllm.LLM with the arguments of a run, in this process; its memory is free afterwards."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    config = RolloutConfig(
        kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.3, max_num_seqs=8, enforce_eager=True
    )
    with engine_environment():
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        start: dict[str, Any] = {"max_model_len": 96, "can_sleep": False, "seed": 0, "gpus": (), "adapters": adapters}
        arguments = engine_arguments(str(folder), config, dtype=dtype, aliased=aliased, **start)
        llm = vllm.LLM(**arguments)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    torch.accelerator.empty_cache = torch.accelerator.empty_cache if torch.cuda.is_available() else lambda: None
    cleanup_dist_env_and_memory()


def model_of(llm: Any) -> Any:
    """Return the vLLM model of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def generate(llm: Any) -> list[Generation]:
    """Return a response to each prompt, one at a time: rounding depends on the batch."""
    llm.reset_prefix_cache()
    found = []
    for row, ids in enumerate(PROMPTS):
        (output,) = llm.generate(
            [{"prompt_token_ids": ids}], [sampling_params(SAMPLED, row, num_requests=1)], use_tqdm=False
        )
        found.append(to_generation(output, SAMPLED))
    return found


def copy_weights(llm: Any, actor: Actor, device: torch.device) -> None:
    """Copy a trainer's weights into an engine, as CopySync does, through one bucket."""
    tensors = dict(actor.model.named_parameters())
    plan = plan_buckets([(name, tuple(p.shape), p.dtype) for name, p in tensors.items()], 1 << 30)
    bucket = IpcBucket(bucket_bytes(plan), device)
    routes = Routes(model_of(llm), open_ipc_bucket(bucket.handle(), device))
    for slot in plan[0]:
        slot.view(bucket.tensor).copy_(tensors[slot.name])
    with torch.no_grad():
        for slot in plan[0]:
            routes.record(slot, copies=True)
    routes.check_complete()


@torch.no_grad()
def train(actor: Actor) -> None:
    """Change every weight of a trainer in place, as an optimizer step does."""
    torch.manual_seed(1)
    for parameter in actor.model.parameters():
        parameter.mul_(1 + 0.1 * torch.randn_like(parameter))


def is_held(routes: Routes, buffer: AliasBuffer) -> bool:
    """Return whether the engine's checksums of all slices of all tensors are the trainer's."""
    held = routes.checksums([slot.name for slot in buffer.slots])
    for slot, parameter in zip(buffer.slots, buffer.ordered(), strict=True):
        flat: Tensor = parameter.detach().flatten()
        for (size, stride, offset), found in held[slot.name]:
            if checksum(flat.as_strided(size, stride, flat.storage_offset() + offset)) != found:
                return False
    return True


def compare(config: PretrainedConfig, folder: Path, world: World) -> dict[str, Any]:
    """Return how an engine with aliases compares with one with copies, before and after the weights change.

    The trainer's models before and after the change stay in the folders `0` and `1`.
    """
    device, dtype = world.device, choose_dtype("auto", world.device)
    save_random(config, folder / "0", dtype)
    actor = load_actor(str(folder / "0"), ModelsConfig(), device)
    buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    shapes = [(slot.name, slot.shape, slot.dtype) for slot in buffer.slots]
    with engine(folder / "0", dtype, buffer.export()) as llm:
        aliased = [generate(llm)]
        train(actor)
        aliased.append(generate(llm))
        held = is_held(model_of(llm).hybrid_routes, buffer)
        model_of(llm).hybrid_routes.close()
    with engine(folder / "0", dtype, None) as llm:
        copy_weights(llm, actor, device)
        copied = generate(llm)
    actor.model.save_pretrained(folder / "1")
    architecture = type(actor.model).__name__
    return {
        "architecture": architecture,
        "reason": why_not_alias(Config(), architecture=architecture, tensors=shapes),
        "aliased": [[dataclasses.asdict(found) for found in step] for step in aliased],
        "copied": [dataclasses.asdict(found) for found in copied],
        "held": held,
        "tensors": len(shapes),
    }


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    world = join_world()
    print(json.dumps({name: compare(FAMILIES[name](), folder / name, world) for name in names}))


if __name__ == "__main__":
    main()
