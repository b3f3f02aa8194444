"""verl's overrides of models, data, rollout, rewards and the trainer."""

from .program import Command, fixed, lost, maps, missing, moot, refused
from .reading import count, finite
from .trackers import NO_OTHERS, TRACKERS
from .verl_rules import MODEL, ROLLOUT, has_model_reward, is_guessed

LOGGERS = {"console", "file", *TRACKERS}
NO_CLASS = "rows, order and rewards follow the settings; classes of one's own are missing here"
NO_TURNS = (
    "verl's classes of tools and agent loops do not run here: write the tools as functions and list them in "
    "environment.tools, or write a class with reset and step and name it in environment.name"
)
OWN_ENGINE = "the reward model scores in the trainer's process, packed by update.micro_batch_tokens"
ALWAYS_ROLLOUTS = "rollouts/ always has all responses of training"
ENGINE = "the plan sizes the engine"


def _has_several(c: Command, name: str) -> bool:
    return len(c[name] or []) > 1


MODELS = (
    maps(f"{MODEL}.path", str, "~/models/deepseek-llm-7b-chat", "models.actor"),
    maps(f"{MODEL}.enable_gradient_checkpointing", bool, True, "models.gradient_checkpointing"),
    maps(
        f"{MODEL}.override_config.attn_implementation",
        str,
        "flash_attention_2",
        "models.attention",
        choices={"flash_attention_2": "auto", "flash_attention_3": "auto", "sdpa": "sdpa", "eager": "eager"},
    ),
    maps(
        f"{MODEL}.torch_dtype {MODEL}.dtype",
        str,
        "bfloat16",
        "models.dtype",
        choices={"bfloat16": "auto", "float16": "auto", "float32": "float32", "auto": "auto"},
        note="float16 and its loss scale become bfloat16",
        when=lambda c: c[f"{MODEL}.torch_dtype"] == "float16",
    ),
    lost(f"{MODEL}.override_config.*", str, None, "the model's own config.json counts", num_values=None),
    maps(f"{MODEL}.lora_rank", int, 0, "models.lora.rank"),
    maps(f"{MODEL}.lora_alpha", finite, 16, "models.lora.alpha"),
    maps(f"{MODEL}.target_modules", str, ["all-linear"], "models.lora.target_modules", num_values=None),
    maps(f"{MODEL}.lora.rank", int, 0, "models.lora.rank"),
    maps(f"{MODEL}.lora.alpha", finite, 32, "models.lora.alpha"),
    lost(f"{MODEL}.lora.*", str, None, "Megatron's adapters become plain ones on every linear layer", num_values=None),
    lost(f"{MODEL}.lora_adapter_path", str, None, "adapters start new; merge the old one into the model"),
    lost(f"{MODEL}.exclude_modules", str, None, "set models.lora.target_modules", num_values=None),
    maps(f"{MODEL}.use_liger", bool, False, "models.fused_layers", choices={False: "auto", True: "liger"}),
    moot(f"{MODEL}.use_fused_kernels", bool, "models.fused_layers = auto takes Liger where it is installed"),
    moot(f"{MODEL}.fused_kernel_options.*", str, "models.fused_layers = auto takes Liger where it is installed"),
    moot(f"{MODEL}.use_remove_padding", bool, "sequences are always packed"),
    maps(f"{MODEL}.trust_remote_code data.trust_remote_code", bool, False, "models.trust_remote_code"),
    lost(f"{MODEL}.external_lib", str, None, "no module is imported; a model's own code lies in its folder"),
    lost(f"{MODEL}.tokenizer_path data.tokenizer", str, None, "the tokenizer in the actor's folder serves all models"),
    lost(f"{MODEL}.hf_config_path", str, None, "the model's own config.json counts"),
    lost(f"{MODEL}.custom_chat_template", str, None, "set prompts.template_path"),
    moot(f"{MODEL}.use_shm", bool, "models are read from their folder"),
    missing(f"{MODEL}.enable_activation_offload", bool, False, "activations stay on the GPU or are computed again"),
    missing(f"{MODEL}.tiled_mlp.*", str, None, "layers are computed whole", num_values=None),
    refused(f"{MODEL}.mtp.enable", bool, False, "prediction of several tokens is missing here"),
    moot(f"{MODEL}.mtp.*", str, "only mtp.enable reads it", num_values=None),
)

DATA = (
    maps(
        "data.train_files",
        str,
        ["~/data/rlhf/gsm8k/train.parquet"],
        "prompts.path",
        num_values=None,
    ),
    maps(
        "data.val_files",
        str,
        ["~/data/rlhf/gsm8k/test.parquet"],
        "prompts.eval_path",
        num_values=None,
        note="verl names the metrics by data_source, here by the names of the files",
        when=lambda c: _has_several(c, "data.val_files"),
    ),
    maps("data.train_max_samples", int, -1, "prompts.max_samples"),
    maps(
        "data.val_max_samples",
        int,
        -1,
        "prompts.max_eval_samples",
        note="verl evaluates all rows, here at most prompts.max_eval_samples",
        when=lambda c: c["data.val_max_samples"] <= 0 and bool(c["data.val_files"]) and c["trainer.test_freq"] > 0,
    ),
    maps("data.prompt_key", str, "prompt", "prompts.prompt_column", "prompts.answer_column"),
    moot("data.reward_fn_key", str, "reward.functions score every row"),
    maps("data.max_prompt_length", count, 512, "prompts.max_prompt_tokens"),
    maps("data.max_response_length", count, 512, "rollout.max_response_tokens"),
    maps("data.train_batch_size", count, 1024, "rollout.rollout_batch_size"),
    lost("data.gen_batch_size", count, None, "a step draws rollout.rollout_batch_size prompts at once"),
    moot("data.val_batch_size", int, "the engine gets all held-out prompts at once"),
    maps("data.filter_overlong_prompts", bool, False, "prompts.overlong_prompts"),
    moot("data.filter_overlong_prompts_workers", int, "prompts are tokenised once, at the start"),
    maps(
        "data.truncation",
        str,
        "error",
        "prompts.overlong_prompts",
        choices={"error": "error", "left": "drop", "right": "drop", "middle": "drop"},
        note="verl cuts a prompt that is too long; here it is dropped and counted",
        when=lambda c: c["data.truncation"] != "error" and not c["data.filter_overlong_prompts"],
    ),
    maps("data.shuffle", bool, True, "prompts.shuffle"),
    maps("data.seed", int, None, "run.seed", note="the same seed draws other samples than in verl"),
    lost("data.apply_chat_template_kwargs.*", str, None, "the chat template has no arguments", num_values=None),
    lost("data.custom_cls.*", str, None, NO_CLASS, num_values=None),
    lost("data.sampler.*", str, None, NO_CLASS, num_values=None),
    lost("data.datagen.*", str, None, NO_CLASS, num_values=None),
    lost("data.tool_config_path", str, None, NO_TURNS),
    refused("data.image_key", str, None, "models read text only"),
    moot("data.video_key", str, "models read text only"),
    moot("data.image_patch_size", int, "models read text only"),
    *(
        moot(f"data.{name}", bool, "prompts are tokenised once, at the start")
        for name in (
            "return_raw_chat",
            "return_raw_input_ids",
            "return_full_prompt",
            "return_multi_modal_inputs",
            "validation_shuffle",
            "use_shm",
        )
    ),
    moot("data.dataloader_num_workers", int, "prompts are tokenised once, at the start"),
)

ROLLOUT_ARGUMENTS = (
    maps(
        f"{ROLLOUT}.name",
        str,
        "vllm",
        "rollout.engine",
        choices={"vllm": "vllm", "sglang": "vllm", "trtllm": "vllm", "hf": "hf"},
        note="the engine is vLLM",
        when=lambda c: c[f"{ROLLOUT}.name"] in ("sglang", "trtllm"),
    ),
    moot(f"{ROLLOUT}.mode", str, "the engine gets a step's prompts at once"),
    maps(f"{ROLLOUT}.n", count, 1, "rollout.group_size", "update.mini_batch_size"),
    maps(f"{ROLLOUT}.temperature", finite, 1.0, "rollout.temperature"),
    lost(f"{ROLLOUT}.top_p", finite, 1.0, "all tokens may be sampled, as log-probs assume"),
    lost(f"{ROLLOUT}.top_k", int, -1, "all tokens may be sampled, as log-probs assume"),
    lost(f"{ROLLOUT}.do_sample", bool, True, "responses of training are always sampled"),
    lost(f"{ROLLOUT}.ignore_eos", bool, False, "a response ends at EOS"),
    maps(f"{ROLLOUT}.tensor_model_parallel_size", count, 2, "rollout.tensor_parallel_size"),
    missing(f"{ROLLOUT}.data_parallel_size", count, 1, "every rollout.tensor_parallel_size GPUs have an engine"),
    refused(f"{ROLLOUT}.expert_parallel_size", count, 1, "there is no expert parallelism"),
    maps(
        f"{ROLLOUT}.gpu_memory_utilization",
        finite,
        0.5,
        "rollout.gpu_memory_utilization",
        "rollout.kv_cache_memory_bytes",
    ),
    maps(f"{ROLLOUT}.enforce_eager", bool, False, "rollout.enforce_eager"),
    maps(f"{ROLLOUT}.max_num_seqs", count, 256, "rollout.max_num_seqs"),
    maps(f"{ROLLOUT}.enable_prefix_caching", bool, True, "rollout.prefix_caching"),
    maps(f"{ROLLOUT}.free_cache_engine", bool, True, "memory.swap"),
    maps(f"{ROLLOUT}.val_kwargs.n", count, 1, "run.eval_samples"),
    maps(f"{ROLLOUT}.val_kwargs.do_sample", bool, False, "run.eval_samples", "run.eval_temperature"),
    maps(f"{ROLLOUT}.val_kwargs.temperature", finite, 0.0, "run.eval_temperature"),
    maps(f"{ROLLOUT}.val_kwargs.top_p", finite, 1.0, "run.eval_top_p"),
    lost(f"{ROLLOUT}.val_kwargs.*", str, None, "an evaluation samples by temperature and top_p alone", num_values=None),
    refused(f"{ROLLOUT}.multi_turn.enable", bool, False, NO_TURNS),
    refused(f"{ROLLOUT}.agent.default_agent_loop", str, "single_turn_agent", NO_TURNS),
    lost(f"{ROLLOUT}.multi_turn.*", str, None, NO_TURNS, num_values=None),
    lost(f"{ROLLOUT}.agent.*", str, None, NO_TURNS, num_values=None),
    moot(f"{ROLLOUT}.enable_rollout_routing_replay", bool, "rollout.routing_replay asks the engine for its experts"),
    missing(f"{ROLLOUT}.pipeline_model_parallel_size", count, 1, "there are no pipeline stages"),
    moot(f"{ROLLOUT}.layer_name_map.*", str, "names of tensors follow the model's architecture", num_values=None),
    moot(f"{ROLLOUT}.logprobs_mode", str, "log-probs are taken after rollout.temperature, as in verl by default"),
    lost(
        f"{ROLLOUT}.quantization {ROLLOUT}.quantization_config_file",
        str,
        None,
        "the engine has the trainer's weights, which are never quantised",
    ),
    lost(f"{ROLLOUT}.over_sample_rate", finite, 0.0, "a step draws no prompts that it does not use"),
    moot(f"{ROLLOUT}.calculate_log_probs", bool, "the engine's log-probs are always kept and compared"),
    moot(f"{ROLLOUT}.prompt_length", int, "prompts.max_prompt_tokens holds for the engine, too"),
    moot(f"{ROLLOUT}.response_length", int, "rollout.max_response_tokens holds for the engine, too"),
    moot(f"{ROLLOUT}.load_format", str, "the engine shares or copies the trainer's weights"),
    moot(f"{ROLLOUT}.layered_summon", bool, "the engine shares or copies the trainer's weights"),
    *(
        moot(f"{ROLLOUT}.log_prob_{name}", str, "forwards are packed by update.micro_batch_tokens")
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    ),
    *(
        missing(f"{ROLLOUT}.{name}", str, None, f"{ENGINE}; this option of vLLM is not set", num_values=None)
        for name in (
            "max_num_batched_tokens",
            "max_model_len",
            "enable_chunked_prefill",
            "cudagraph_capture_sizes",
            "scheduling_policy",
            "disable_log_stats",
            "multi_stage_wake_up",
            "skip_tokenizer_init",
            "engine_kwargs.*",
            "checkpoint_engine.*",
        )
    ),
    missing(f"{ROLLOUT}.trace.*", str, None, ALWAYS_ROLLOUTS, num_values=None),
    missing(f"{ROLLOUT}.skip_rollout", bool, False, "a step always generates"),
    moot(f"{ROLLOUT}.skip_dump_dir", str, "a step always generates"),
    missing(f"{ROLLOUT}.profiler.*", str, None, "run.profile_steps profiles whole steps", num_values=None),
    missing(f"{ROLLOUT}.prometheus.*", str, None, "run.prometheus_port has the metrics of training", num_values=None),
    lost(f"{ROLLOUT}.mtp.*", str, None, "prediction of several tokens is missing here", num_values=None),
    moot(f"{ROLLOUT}.dtype", str, "the engine has the trainer's models.dtype"),
)

REWARD = (
    maps("reward_model.enable", bool, False, "models.reward"),
    maps("reward_model.model.path", str, "~/models/FsfairX-LLaMA3-RM-v0.1", "models.reward"),
    fixed(
        "functions beside a reward model",
        "they score evaluations alone",
        when=lambda c: has_model_reward(c) and c["custom_reward_function.path"] is not None,
    ),
    fixed(
        "reward model",
        "verl may apply the reward model's own chat template; here it reads the actor's texts, with its own tokenizer",
        when=has_model_reward,
    ),
    maps(
        "custom_reward_function.path",
        str,
        None,
        "reward.functions",
        note="the file works as it is; special tokens that the model wrote stay in solution_str",
    ),
    maps("custom_reward_function.name", str, "compute_score", "reward.functions"),
    lost("custom_reward_function.*", str, None, "a function gets no further arguments", num_values=None),
    fixed(
        "reward functions",
        "verl chooses a function by data_source of each row; here the names of the files suggest one, or by_source. "
        "verl wants the number after #### in GSM8K, here the last number counts",
        "run.eval_function",
        when=is_guessed,
    ),
    lost(
        "reward_model.reward_manager reward_manager.name",
        str,
        "naive",
        "rewards are computed as by verl's naive manager",
        when=lambda c: c["reward_model.reward_manager"] not in ("naive", "dapo", "batch"),
    ),
    maps("reward_model.reward_kwargs.overlong_buffer_cfg.enable", bool, False, "reward.overlong_buffer"),
    maps("reward_model.reward_kwargs.overlong_buffer_cfg.len", count, 1, "reward.overlong_buffer"),
    maps("reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor", finite, 1.0, "reward.overlong_penalty"),
    moot("reward_model.reward_kwargs.overlong_buffer_cfg.log", bool, "penalties are always a metric"),
    moot("reward_model.reward_kwargs.max_resp_len", int, "it is rollout.max_response_tokens"),
    lost("reward_model.reward_kwargs.*", str, None, "a function gets no further arguments", num_values=None),
    lost("reward_model.sandbox_fusion.*", str, None, "code is not run in a sandbox service", num_values=None),
    moot("reward_model.*", str, OWN_ENGINE, num_values=None),
    lost("reward_manager.*", str, None, NO_CLASS, num_values=None),
)

TRAINER = (
    maps("trainer.project_name", str, "verl_examples", "run.dir", "run.project"),
    maps("trainer.experiment_name", str, "gsm8k", "run.name"),
    maps("trainer.default_local_dir", str, None, "run.dir", "run.name"),
    maps("trainer.total_training_steps", count, None, "run.num_steps"),
    moot("trainer.total_epochs", int, "run.num_steps counts steps"),
    fixed(
        "run length",
        "verl runs total_epochs passes over the data; set run.num_steps to total_epochs x rows / train_batch_size, and "
        "the warm-up accordingly",
        when=lambda c: c["trainer.total_training_steps"] is None,
    ),
    maps("trainer.n_gpus_per_node", count, 8, "update.micro_batch_tokens"),
    maps("trainer.nnodes", count, 1, "update.micro_batch_tokens"),
    maps("trainer.save_freq", int, -1, "checkpoint.every_steps"),
    maps("trainer.test_freq", int, -1, "run.eval_every_steps"),
    missing("trainer.val_before_train", bool, True, "an evaluation always precedes step 1"),
    refused("trainer.val_only", bool, False, "an evaluation alone is missing here"),
    maps("trainer.critic_warmup", int, 0, "update.critic_warmup_steps"),
    maps(
        "trainer.resume_mode",
        str,
        "auto",
        "run.resume",
        choices={"auto": "auto", "disable": "never", "resume_path": "must"},
        note="the run continues from its own newest checkpoint; verl's checkpoints cannot be read here",
        when=lambda c: c["trainer.resume_mode"] == "resume_path",
    ),
    lost("trainer.resume_from_path", str, None, "verl's checkpoints cannot be read here"),
    maps(
        "trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",
        count,
        None,
        "checkpoint.keep_last",
        note="verl keeps all checkpoints, here checkpoint.keep_last of them",
        when=lambda c: c["trainer.max_actor_ckpt_to_keep"] is None and c["trainer.save_freq"] > 0,
    ),
    moot("trainer.max_critic_ckpt_to_keep", int, "a checkpoint holds actor and critic"),
    maps(
        "trainer.logger",
        str,
        None,
        "run.trackers",
        num_values=None,
        note=NO_OTHERS,
        when=lambda c: bool(set(c["trainer.logger"] or []) - LOGGERS),
    ),
    missing("trainer.log_val_generations", int, 0, "responses of an evaluation are not kept"),
    missing("trainer.rollout_data_dir", str, None, ALWAYS_ROLLOUTS),
    missing("trainer.validation_data_dir", str, None, "responses of an evaluation are not kept"),
    missing("trainer.default_hdfs_dir", str, None, "checkpoints lie in the run's folder"),
    missing("trainer.esi_redundant_time", int, 0, "checkpoint.on_sigterm writes one before the machine is taken away"),
    lost("trainer.device", str, "cuda", "GPUs are NVIDIA's; other devices are missing here"),
    moot("trainer.balance_batch", bool, "sequences are always spread over ranks by their length"),
    moot("trainer.del_local_ckpt_after_load", bool, "checkpoint.keep_last deletes old checkpoints"),
    moot("trainer.ray_wait_register_center_timeout", int, "run.stall_timeout_s limits every wait"),
    moot("trainer.use_legacy_worker_impl", str, "there is one implementation"),
    missing("global_profiler.*", str, None, "run.profile_steps profiles whole steps", num_values=None),
    moot("ray_kwargs.*", str, "launch/ray_cluster.py takes its cluster from its own options", num_values=None),
    moot("transfer_queue.*", str, "every rank holds its own responses", num_values=None),
)
