"""OpenRLHF's arguments of placement, models, data, sampling and output."""

from .openrlhf_rules import estimator, has_agent, is_colocated, is_function, is_remote
from .program import fixed, lost, maps, missing, moot, refused
from .reading import count, finite
from .trackers import BY_VARIABLE, NO_KEY, is_given

ONE_POOL = "every GPU holds a shard of every model, one process per visible GPU; CUDA_VISIBLE_DEVICES selects them"
ALL_ENGINES = "every GPU has an engine, or a shard of one over rollout.tensor_parallel_size GPUs"
TOKENS = "forwards are packed by update.micro_batch_tokens, and the result does not depend on it"
FLASH_ATTENTION_2 = ("flash_attention_2", "kernels-community/flash-attn2")
FLASH_ATTENTION_3 = (
    "flash_attention_3",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
)
NO_IMAGES = "models read text only"
FROZEN = "memory.swap moves frozen models to the host between their phases"
SYNCHRONOUS = (
    "the run is colocated: rollout and training take turns on the same GPUs, and every step trains on responses of the "
    "current weights"
)

PLACEMENT = (
    moot("ref.num_nodes ref_num_nodes", count, ONE_POOL),
    moot("ref.num_gpus_per_node ref_num_gpus_per_node", count, ONE_POOL),
    moot("reward.num_nodes reward_num_nodes", count, ONE_POOL),
    moot("reward.num_gpus_per_node reward_num_gpus_per_node", count, ONE_POOL),
    moot("actor.num_nodes actor_num_nodes", count, ONE_POOL),
    moot("actor.num_gpus_per_node actor_num_gpus_per_node", count, ONE_POOL),
    moot("critic.num_nodes critic_num_nodes", count, ONE_POOL),
    moot("critic.num_gpus_per_node critic_num_gpus_per_node", count, ONE_POOL),
    moot("train.colocate_actor_ref colocate_actor_ref", bool, "all models are always colocated"),
    moot("train.colocate_critic_reward colocate_critic_reward", bool, "all models are always colocated"),
    maps("train.colocate_all colocate_all_models", bool, False, "memory.swap"),
    moot("vllm.num_engines vllm_num_engines", int, ALL_ENGINES),
    maps("vllm.tensor_parallel_size vllm_tensor_parallel_size", count, 1, "rollout.tensor_parallel_size"),
    moot("vllm.sync_backend vllm_sync_backend", str, "weights reach the engine through one shared buffer (CUDA IPC)"),
    moot(
        "vllm.sync_with_ray vllm_sync_with_ray", bool, "weights reach the engine through one shared buffer (CUDA IPC)"
    ),
    maps("vllm.enable_prefix_caching enable_prefix_caching", bool, False, "rollout.prefix_caching"),
    maps("vllm.enforce_eager enforce_eager", bool, False, "rollout.enforce_eager"),
    maps(
        "vllm.enable_sleep vllm_enable_sleep",
        bool,
        False,
        "memory.swap",
        note="one setting here: engine and trainer both release their memory if either of the two is set",
        when=lambda c: c["vllm.enable_sleep"] != c["ds.enable_sleep"],
    ),
    maps(
        "vllm.gpu_memory_utilization vllm_gpu_memory_utilization",
        finite,
        0.95,
        "rollout.gpu_memory_utilization",
        "rollout.kv_cache_memory_bytes",
        note="OpenRLHF gives vLLM its own GPUs; here it runs on the GPUs of training, so that the default here applies",
        when=lambda c: not is_colocated(c),
    ),
    maps("ds.enable_sleep deepspeed_enable_sleep", bool, False, "memory.swap"),
    moot("actor_init_on_gpu", bool, "models are loaded where they fit"),
    lost("train.async_enable async_train", bool, False, SYNCHRONOUS),
    moot("train.async_queue_size async_queue_size", int, SYNCHRONOUS),
    lost("train.partial_rollout_enable partial_rollout", bool, False, SYNCHRONOUS),
    lost(
        "rollout.vllm_generate_batch_size vllm_generate_batch_size",
        count,
        None,
        "the engine gets a step's prompts at once, and no more than these",
        when=lambda c: c["rollout.vllm_generate_batch_size"] not in (None, c["rollout.batch_size"]),
    ),
    moot("local_rank", int, "the launcher sets ranks"),
    moot("perf", bool, "timeline.json and metrics.jsonl always time every phase"),
)

MODELS = (
    maps("actor.model_name_or_path pretrain", str, "", "models.actor"),
    maps(
        "reward.model_name_or_path reward_pretrain",
        str,
        None,
        "models.reward",
        note="OpenRLHF takes any backbone and adds a head; here it is a sequence classifier with one label, the first "
        "of a list separated by commas",
        when=lambda c: c["reward.model_name_or_path"] is not None and not is_remote(c),
    ),
    maps(
        "reward.remote_url remote_rm_url",
        str,
        None,
        "models.reward",
        "reward.functions",
        "reward.remote_urls",
        "run.eval_function",
        note="the file works as it is, one response per call; what it raises ends the run, where OpenRLHF goes on "
        "without a reward",
        when=is_function,
    ),
    maps("critic.model_name_or_path critic_pretrain", str, None, "models.critic"),
    fixed(
        "value head",
        "OpenRLHF starts at random, N(0, 1/(hidden+1)^2), if the critic comes from the actor; here it starts at 0",
        when=lambda c: estimator(c) == "gae" and not c["critic.model_name_or_path"] and is_remote(c),
    ),
    maps(
        "ds.value_head_prefix value_head_prefix",
        str,
        "score",
        "models.critic",
        note="the head is found by its shape and name, whatever config.json or this flag calls it",
        when=lambda c: c["ds.value_head_prefix"] != "score",
    ),
    moot("ref.offload ref_reward_offload", bool, FROZEN),
    moot("reward.offload ref_reward_offload", bool, FROZEN),
    maps("actor.gradient_checkpointing_enable gradient_checkpointing", bool, False, "models.gradient_checkpointing"),
    moot(
        "actor.gradient_checkpointing_reentrant gradient_checkpointing_use_reentrant",
        bool,
        "never reentrant; the result is the same",
    ),
    maps(
        "ds.attn_implementation attn_implementation",
        str,
        "flash_attention_2",
        "models.attention",
        choices=dict.fromkeys(FLASH_ATTENTION_2 + FLASH_ATTENTION_3, "auto") | {"sdpa": "sdpa", "eager": "eager"},
        note="FlashAttention 3 is missing here; auto takes flash-attn 2 where it is installed, else torch's varlen "
        "kernel",
        when=lambda c: c["ds.attn_implementation"] in FLASH_ATTENTION_3,
    ),
    moot("flash_attn", bool, "models.attention = auto takes flash-attn where it is installed"),
    moot("bf16", bool, "models.dtype = auto is bfloat16 on a GPU"),
    maps(
        "ds.param_dtype param_dtype",
        str,
        "bf16",
        "models.dtype",
        choices={"bf16": "auto", "fp16": "auto"},
        note="float16 and its loss scale become bfloat16",
        when=lambda c: c["ds.param_dtype"] == "fp16",
    ),
    lost("ds.load_in_4bit load_in_4bit", bool, False, "weights are never quantised"),
    maps("ds.lora.rank lora_rank", int, 0, "models.lora.rank"),
    maps("ds.lora.alpha lora_alpha", int, 16, "models.lora.alpha"),
    maps("ds.lora.target_modules target_modules", str, ["all-linear"], "models.lora.target_modules", num_values=None),
    lost("ds.lora.dropout lora_dropout", finite, 0, "adapters have no dropout"),
    maps("train.enable_ema enable_ema", bool, False, "models.ema_decay"),
    maps("train.ema_beta ema_beta", finite, 0.992, "models.ema_decay"),
    missing("ds.experts_implementation", str, None, "transformers chooses how experts are computed"),
    maps(
        "actor.aux_loss_coef aux_loss_coef",
        finite,
        0,
        "update.router_aux_loss_coef",
        note="transformers sums over the experts of a token, here is their mean: multiply by their number",
    ),
    maps(
        "train.agent_func_path agent_func_path",
        str,
        None,
        "environment.name",
        "environment.arguments",
        "environment.max_turns",
        "environment.rewritten_history",
        note="the file runs as it is, if its AgentExecutor is made from a class with reset and step; the text of a "
        "turn has no end-of-turn mark, and images or sampling_params from a step end the run",
        when=has_agent,
    ),
    refused("data.max_images_per_prompt max_images_per_prompt", int, 0, NO_IMAGES),
    moot("data.image_key image_key", str, NO_IMAGES),
    moot("actor.freeze_visual_encoder freeze_visual_encoder", bool, NO_IMAGES),
    lost("use_ms", bool, False, "ModelScope is missing here; download models and data first"),
)

DATA = (
    maps(
        "data.prompt_dataset prompt_data",
        str,
        "",
        "prompts.path",
        note="OpenRLHF ends an epoch of a mixture with its first or last data set; here each has epochs of its own",
        when=lambda c: c["data.prompt_probs"] is not None,
    ),
    maps("data.prompt_probs prompt_data_probs", str, None, "prompts.path"),
    maps("data.prompt_split prompt_split", str, "train", "prompts.split"),
    maps("data.max_samples max_samples", count, 10**8, "run.num_steps", "prompts.max_samples"),
    maps("train.num_episodes num_episodes", count, 1, "run.num_steps"),
    fixed(
        "run length",
        "OpenRLHF runs num_episodes passes over the data; run.num_steps counts steps, so set it to num_episodes x "
        "rows / rollout_batch_size (with max_samples as rows if given), and the warm-up accordingly",
    ),
    maps("data.input_key input_key", str, "input", "prompts.prompt_column"),
    maps("data.label_key label_key", str, None, "prompts.answer_column"),
    lost("data.input_template input_template", str, None, "write the template into the data's prompt column"),
    maps("data.apply_chat_template apply_chat_template", bool, False, "prompts.chat"),
    maps(
        "data.max_len max_len",
        int,
        2048,
        "prompts.max_prompt_tokens",
        "rollout.max_response_tokens",
        note="OpenRLHF lets a response fill what its prompt leaves of max_len; here each has a limit, half of max_len: "
        "change the split as the data needs",
        when=lambda c: (
            c["rollout.max_new_tokens"] is None and not {"generate_max_len", "prompt_max_len"} & set(c.given)
        ),
    ),
    maps(
        "rollout.max_new_tokens max_new_tokens", int, None, "rollout.max_response_tokens", "prompts.max_prompt_tokens"
    ),
    maps("generate_max_len", int, 1024, "rollout.max_response_tokens"),
    maps("prompt_max_len", int, 1024, "prompts.max_prompt_tokens"),
    fixed(
        "long prompts", "a prompt above prompts.max_prompt_tokens is dropped and counted", "prompts.overlong_prompts"
    ),
    lost("data.disable_fast_tokenizer disable_fast_tokenizer", bool, False, "the tokenizer is the one the model ships"),
    moot("data.dataloader_num_workers dataloader_num_workers", int, "prompts are tokenised once, at the start"),
    maps("eval.dataset eval_dataset", str, None, "prompts.eval_path", "checkpoint.keep_best", "run.eval_function"),
    maps("eval.split eval_split", str, "train", "prompts.eval_split"),
    maps("eval.steps eval_steps", int, -1, "run.eval_every_steps"),
    maps(
        "eval.n_samples_per_prompt eval_n_samples_per_prompt",
        int,
        4,
        "run.eval_samples",
        note="a sample is correct if run.eval_function gives at least 1; OpenRLHF averages the reward",
        when=lambda c: c["eval.dataset"] is not None,
    ),
    maps("eval.temperature eval_temperature", finite, 0.6, "run.eval_temperature"),
    lost("pretrain_data", str, None, "OpenRLHF had this loss until early 2025; here ptx.path is one file of texts"),
    moot("pretrain_data_probs", str, "there is one data set"),
    moot("pretrain_split", str, "give the split's own file"),
    moot("ptx_coef", finite, "OpenRLHF read it with --pretrain_data only; here it is ptx.coef"),
)

SAMPLING = (
    maps("rollout.batch_size rollout_batch_size", count, 1024, "rollout.rollout_batch_size"),
    maps("rollout.n_samples_per_prompt n_samples_per_prompt", count, 1, "rollout.group_size"),
    maps("rollout.temperature temperature", finite, 1.0, "rollout.temperature"),
    lost("rollout.top_p top_p", finite, 1.0, "all tokens may be sampled, as log-probs assume"),
    maps(
        "algo.dynamic_filtering_enable dynamic_filtering",
        bool,
        False,
        "rollout.dynamic_filtering_reward_range",
        note="OpenRLHF draws prompts until the batch is full or the data ends, here at most "
        "rollout.dynamic_filtering_max_retries batches",
    ),
    maps(
        "algo.dynamic_filtering_range dynamic_filtering_reward_range",
        finite,
        [0.0, 1.0],
        "rollout.dynamic_filtering_reward_range",
        num_values=2,
    ),
    moot("rollout.micro_batch_size micro_rollout_batch_size", int, TOKENS),
    moot("rollout.max_tokens_per_gpu rollout_max_tokens_per_gpu", int, TOKENS),
    maps("train.seed seed", int, 42, "run.seed", note="the same seed draws other samples than in OpenRLHF"),
    maps("train.full_determinism_enable full_determinism", bool, False, "run.deterministic"),
)

OUTPUT = (
    maps("ckpt.output_dir save_path", str, "./ckpt", "run.dir", "run.name"),
    missing("ckpt.path ckpt_path", str, None, "checkpoints lie in <run.dir>/<run.name>/checkpoints"),
    maps("ckpt.save_steps save_steps", int, -1, "checkpoint.every_steps"),
    maps("ckpt.disable_ds disable_ds_ckpt", bool, False, "checkpoint.every_steps"),
    maps("ckpt.max_num max_ckpt_num", int, 3, "checkpoint.keep_last"),
    missing("ckpt.max_mem max_ckpt_mem", str, None, "checkpoint.keep_last counts checkpoints, not bytes"),
    maps("ckpt.save_hf save_hf_ckpt", bool, False, "checkpoint.export_every_steps", "checkpoint.export_keep_last"),
    maps("ckpt.load_enable load_checkpoint", bool, False, "run.resume", choices={False: "never", True: "auto"}),
    maps("ckpt.best_metric_key best_metric_key", str, "", "checkpoint.keep_best"),
    moot("ds.use_universal_ckpt use_ds_universal_ckpt", bool, "a checkpoint loads on any number of ranks"),
    maps("critic.save_value_network save_value_network", bool, False, "checkpoint.export_critic"),
    moot("logger.logging_steps logging_steps", int, "metrics.jsonl always has a row per step"),
    maps(
        "logger.tensorboard_dir use_tensorboard",
        str,
        None,
        "run.trackers",
        note="the files lie in tensorboard/ of the run's folder",
    ),
    maps("logger.wandb.key use_wandb", is_given, None, "run.trackers", note=NO_KEY),
    maps("logger.wandb.project wandb_project", str, "openrlhf_train_ppo", "run.project"),
    missing("logger.wandb.org wandb_org", str, None, BY_VARIABLE.format("WANDB_ENTITY")),
    missing("logger.wandb.group wandb_group", str, None, BY_VARIABLE.format("WANDB_RUN_GROUP")),
    missing("logger.wandb.run_name wandb_run_name", str, None, BY_VARIABLE.format("WANDB_NAME")),
)
