"""The arguments with which vLLM is started."""

import base64
import dataclasses
import importlib.util
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_rl.config import ConfigError, LoraConfig, RolloutConfig
from hybrid_rl.engines.passed_on import check_names, merged, sentence_of
from hybrid_rl.engines.vllm.adapters import adapter_arguments
from hybrid_rl.engines.vllm.environment import engine_environment
from hybrid_rl.engines.vllm.scheduler import EngineScheduler
from hybrid_rl.weights.bucket import AliasedWeights

LOAD_FORMAT = "hybrid_rl_alias"
"""Name under which worker.py registers AliasLoader with vLLM."""
_GRAPHS = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
"""Engine arguments beside which vLLM takes no sizes of CUDA graphs in its compilation_config."""
_MAX_DEFAULT_GRAPH = 512
"""Number of sequences of the largest CUDA graph that vLLM captures by default."""
_LEAST_FRACTION, _CONTEXT_FRACTION = 0.01, 0.05
"""Smallest fraction of a GPU that vLLM is given to require, and the part that its context takes before it measures."""


def engine_arguments(
    model: str,
    config: RolloutConfig,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    can_sleep: bool,
    seed: int,
    aliased: AliasedWeights | None,
    gpus: Sequence[str],
    adapters: LoraConfig | None = None,
    is_restart: bool = False,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Return the keyword arguments of vllm.LLM; see VllmEngine for the parameters."""
    has_cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "model": model,
        "trust_remote_code": trust_remote_code,
        "skip_tokenizer_init": not config.stop_strings,
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager or not has_cuda,
        "enable_prefix_caching": config.prefix_caching,
        "enable_sleep_mode": can_sleep,
        "generation_config": "vllm",  # no sampling defaults from the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution that tokens are sampled from
        "worker_extension_cls": "hybrid_rl.engines.vllm.worker.WorkerExtension",
        "scheduler_cls": EngineScheduler,
        "disable_log_stats": True,
        "seed": seed,
    }
    if config.routing_replay:
        arguments["enable_return_routed_experts"] = True
        if importlib.util.find_spec("vllm.config.aux_output"):  # this version returns experts from its new runner alone
            os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")  # until the end of engine_environment
    if config.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = config.kv_cache_memory_bytes
    if not arguments["enforce_eager"] and config.max_num_seqs > _MAX_DEFAULT_GRAPH and not _GRAPHS & config.vllm.keys():
        arguments["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(config.max_num_seqs)}
    if gpus:  # under Ray, vLLM's default executor would request further GPUs from the cluster
        arguments |= {"tensor_parallel_size": len(gpus), "distributed_executor_backend": "mp"}
    if has_cuda:
        arguments["moe_backend"] = "triton"  # other backends rearrange the experts' weights, which a weight sync writes
    else:
        arguments = _cpu_arguments() | arguments
    if aliased:
        arguments |= _alias_arguments(aliased, config)
    if adapters:
        arguments = merged(arguments, adapter_arguments(adapters, _known_arguments()))
    if is_restart and has_cuda:
        free, total = torch.cuda.mem_get_info()
        fraction = arguments["gpu_memory_utilization"]
        arguments["gpu_memory_utilization"] = restart_fraction(fraction, free_bytes=free, total_bytes=total)
    return merged(arguments, config.vllm)


def check_arguments(
    model: str,
    config: RolloutConfig,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    can_sleep: bool,
    trust_remote_code: bool,
    makes_config: bool,
) -> None:
    """Check that vLLM takes the arguments of an engine, as far as it checks them before it loads a model.

    An engine over several GPUs is checked like one over a single GPU, because this process may see only one.

    Args:
        model, config, dtype, max_model_len, can_sleep, trust_remote_code: see VllmEngine.
        makes_config: whether to make vLLM's configuration, which needs the devices of the run.
    Raises:
        ConfigError: vLLM cannot be imported, does not know a name in rollout.vllm, or refuses a value or the model.
    """
    with engine_environment():
        try:
            import vllm
            from vllm.engine.arg_utils import EngineArgs
        except ImportError as error:
            raise ConfigError(f"rollout.engine = vllm: vLLM cannot be imported ({error}); run make install") from error
        library = f"vLLM {vllm.__version__}"
        check_names("rollout.vllm", config.vllm, _known_arguments(), library=library)
        if not makes_config:
            return
        arguments = engine_arguments(
            model,
            config,
            dtype=dtype,
            max_model_len=max_model_len,
            can_sleep=can_sleep,
            seed=0,
            aliased=None,
            gpus=(),
            trust_remote_code=trust_remote_code,
        )
        try:
            EngineArgs(**arguments).create_engine_config()
        except Exception as error:  # vLLM raises types of many libraries here
            fields = "rollout and rollout.vllm" if config.vllm else "rollout"
            raise ConfigError(
                f"rollout.engine = vllm: {library} refuses models.actor = {model} with the settings in {fields}: "
                f"{sentence_of(error)}"
            ) from error


def _known_arguments() -> list[str]:
    """Return the names of the arguments of this version of vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    return [field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")]


def restart_fraction(fraction: float, *, free_bytes: int, total_bytes: int) -> float:
    """Return the fraction of the GPU that vLLM requires to be free where it starts beside the trainer's models.

    With the size of the KV cache set, as every plan does, vLLM uses the fraction for this test alone. The plan has
    compared the memory of ROLLOUT with the GPU, so that here the test must not ask for more than there is.

    Args:
        fraction: of the first start.
        free_bytes: free memory of the GPU before vLLM's processes start.
        total_bytes: memory of the GPU.
    """
    return min(fraction, max(_LEAST_FRACTION, free_bytes / total_bytes - _CONTEXT_FRACTION))


def _alias_arguments(aliased: AliasedWeights, config: RolloutConfig) -> dict[str, Any]:
    """Return the arguments that make vLLM alias the trainer's weights, which are already on the device."""
    message = base64.b64encode(pickle.dumps(aliased)).decode()
    arguments: dict[str, Any] = {"load_format": LOAD_FORMAT, "model_loader_extra_config": {"aliased": message}}
    if torch.cuda.is_available():  # vLLM requests this fraction in addition to the memory in use when it starts
        num_bytes = sum(slot.nbytes for slot in aliased.slots)
        total_bytes = torch.cuda.get_device_properties().total_memory
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization - num_bytes / total_bytes
    return arguments


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture CUDA graphs of: vLLM's own up to 512, then every 64th up to max_num_seqs.

    By default vLLM decodes more than 512 sequences without graphs, which takes up to twice as long per step. Its
    setting max_cudagraph_capture_size would capture every 16th size beyond 512, four times as many.
    """
    default = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_DEFAULT_GRAPH + 1, 16)]
    return [*default, *range(_MAX_DEFAULT_GRAPH + 64, max_num_seqs, 64), max_num_seqs]


def _cpu_arguments() -> dict[str, Any]:
    """Return the arguments that only a CPU needs; an executor chosen for several ranks has precedence."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    return {
        # By default vLLM starts a worker process in addition to the engine's, to pin its threads. Without it, as on a
        # GPU, the engine starts in half the time and generates as fast.
        "distributed_executor_backend": UniProcExecutor,
        # On a CPU vLLM cannot undo what a seeded request draws at the end of a part of its prompt.
        "enable_chunked_prefill": False,
    }
