"""The keys of `rollout.vllm` and `update.deepspeed` that other settings, or the trainer itself, decide."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from hybrid_rl.config import Config
from hybrid_rl.settings.types import show

WEIGHTS = "the engine gets the trainer's weights in models.dtype by weight sync"
RANKS = "the trainer places one engine per rollout.tensor_parallel_size ranks"
TOKENS = "the trainer sends token ids and reads the log-probs of the sampled tokens"
SUM = "the trainer sums gradients over all ranks and normalises its losses by that"

VLLM: Mapping[str, str] = MappingProxyType(
    {
        "model": "set models.actor",
        "dtype": "set models.dtype",
        "trust_remote_code": "set models.trust_remote_code",
        "max_model_len": "set prompts.max_prompt_tokens and rollout.max_response_tokens, whose sum it is",
        "max_num_seqs": "set rollout.max_num_seqs",
        "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
        "kv_cache_memory_bytes": "set rollout.kv_cache_memory_bytes",
        "num_gpu_blocks_override": "set rollout.kv_cache_memory_bytes",
        "enforce_eager": "set rollout.enforce_eager",
        "enable_prefix_caching": "set rollout.prefix_caching",
        "tensor_parallel_size": "set rollout.tensor_parallel_size",
        "seed": "set run.seed",
        "enable_sleep_mode": "set memory.swap",
        "enable_cumem_allocator": "set memory.swap",
        "cpu_offload_gb": "set memory.swap",
        "enable_return_routed_experts": "set rollout.routing_replay",
        "enable_lora": "set models.lora, and models.lora.sync = adapters for adapters beside the weights",
        **dict.fromkeys(
            (
                "load_format",
                "model_loader_extra_config",
                "model_weights",
                "quantization",
                "quantization_config",
                "weight_transfer_config",
                "hf_overrides",
                "moe_backend",
            ),
            WEIGHTS,
        ),
        **dict.fromkeys(
            (
                "distributed_executor_backend",
                "pipeline_parallel_size",
                "data_parallel_size",
                "decode_context_parallel_size",
                "prefill_context_parallel_size",
                "nnodes",
                "node_rank",
                "worker_cls",
                "worker_extension_cls",
                "scheduler_cls",
            ),
            RANKS,
        ),
        **dict.fromkeys(
            (
                "tokenizer",
                "skip_tokenizer_init",
                "generation_config",
                "override_generation_config",
                "logprobs_mode",
                "max_logprobs",
                "runner",
                "convert",
                "speculative_config",
                "kv_transfer_config",
                "logits_processors",
                "disable_log_stats",
            ),
            TOKENS,
        ),
    }
)
"""Engine argument of vLLM -> the setting, or the reason, that decides it."""

DEEPSPEED: Mapping[str, str] = MappingProxyType(
    {
        "zero_optimization.stage": "set update.zero_stage",
        "zero_optimization.offload_optimizer": "set update.actor.kind and update.critic.kind",
        "zero_optimization.cpu_offload": "set update.actor.kind and update.critic.kind",
        "zero_optimization.offload_param": "set memory.swap",
        "zero_optimization.cpu_offload_params": "set memory.swap",
        "zero_optimization.zenflow": "set update.actor.kind and update.critic.kind",
        "gradient_clipping": "set update.actor.max_grad_norm and update.critic.max_grad_norm",
        "optimizer": "set update.actor and update.critic",
        "scheduler": "set update.actor and update.critic",
        "zero_allow_untested_optimizer": "set update.actor and update.critic",
        "zero_force_ds_cpu_optimizer": "set update.actor and update.critic",
        "bf16": "set models.dtype",
        "bfloat16": "set models.dtype",
        "fp16": "set models.dtype",
        "torch_autocast": "set models.dtype",
        "data_types": "set models.dtype; gradients are summed in float32",
        "tensor_parallel": "set update.tensor_parallel_size",
        "sequence_parallel_size": "set update.sequence_parallel_size",
        "pipeline": "set update.tensor_parallel_size",
        "activation_checkpointing": "set models.gradient_checkpointing",
        "compile": "set models.fused_layers; the packed forward is not compiled",
        "checkpoint": "set the section checkpoint",
        "data_efficiency": "set the section prompts",
        "train_batch_size": "set update.mini_batch_size",
        "train_micro_batch_size_per_gpu": "set update.micro_batch_tokens",
        "gradient_accumulation_steps": "set update.mini_batch_size and update.micro_batch_tokens",
        "managed_gradient_accumulation": "set update.mini_batch_size and update.micro_batch_tokens",
        "tensorboard": "the metrics of a run are in its folder",
        "wandb": "the metrics of a run are in its folder",
        "comet": "the metrics of a run are in its folder",
        "csv_monitor": "the metrics of a run are in its folder",
        "steps_per_print": "the metrics of a run are in its folder",
        "gradient_allreduce_op": SUM,
        "prescale_gradients": SUM,
        "gradient_predivide_factor": SUM,
        "hybrid_engine": "set the section rollout",
        "weight_quantization": WEIGHTS,
    }
)
"""Key of DeepSpeed's configuration, dotted where it is nested -> the setting, or the reason, that decides it."""


def refused_keys(config: Config) -> Iterator[str]:
    """Yield a sentence for every key of the two dictionaries that another setting decides."""
    for field, value, decided in (
        ("rollout.vllm", config.rollout.vllm, VLLM),
        ("update.deepspeed", config.update.deepspeed, DEEPSPEED),
    ):
        for key in decided:
            for given in _given(value, key):
                yield f"{field}.{key} = {show(given)}: cannot be given here; {decided[key]}"


def _given(value: Any, key: str) -> Iterator[Any]:
    """Yield the value of a dotted key of nested dictionaries, if it has one."""
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return
        value = value[name]
    yield value
