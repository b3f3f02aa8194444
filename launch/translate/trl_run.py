"""TRL's arguments of models, data and output, the rest of Transformers' TrainingArguments, and Accelerate's."""

from .program import fixed, lost, maps, missing, moot, refused
from .reading import count, finite
from .trackers import BY_VARIABLE, NO_OTHERS, TRACKERS

FLASH_ATTENTION = (
    "flash_attention_2",
    "flash_attention_3",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
)
NO_HUB = "nothing is sent to the hub; export/ holds the final actor"
PREPARED = "prompts are tokenised once, at the start"
GPU_PER_RANK = "the launcher starts one process per GPU"
NOT_QUANTISED = "weights are never quantised"
ALWAYS_LOGGED = "metrics.jsonl has a row per step, and rollouts/ has all responses"
NOT_COMPILED = "training is not compiled as a whole"

MODELS = (
    maps("model_name_or_path", str, "", "models.actor"),
    lost("model_revision", str, "main", "download the revision to a folder"),
    maps(
        "dtype torch_dtype",
        str,
        "float32",
        "models.dtype",
        choices=dict.fromkeys(("auto", "bfloat16", "float16", "float32"), "auto"),
        note="weights have a float32 master, whatever their type in TRL",
    ),
    maps("bf16", bool, None, "models.dtype"),
    maps("fp16", bool, False, "models.dtype", note="float16 and its loss scale become bfloat16"),
    fixed(
        "precision",
        "TRL computes float32 weights in bfloat16 by autocast; here they are bfloat16 with a float32 master in the "
        "optimizer",
        when=lambda c: c["bf16"] is not False and not c["fp16"],
    ),
    maps(
        "attn_implementation",
        str,
        None,
        "models.attention",
        choices={None: "auto", "sdpa": "sdpa", "eager": "eager"} | dict.fromkeys(FLASH_ATTENTION, "auto"),
        note="auto takes flash-attn 2 where it is installed, else torch's varlen kernel",
        when=lambda c: c["attn_implementation"] in FLASH_ATTENTION[1:],
    ),
    maps("gradient_checkpointing", bool, True, "models.gradient_checkpointing"),
    moot("gradient_checkpointing_kwargs", str, "never reentrant; the result is the same"),
    maps("use_liger_kernel", bool, False, "models.fused_layers", choices={False: "auto", True: "liger"}),
    maps("use_peft", bool, False, "models.lora.rank", "models.lora.alpha", "models.lora.target_modules"),
    maps("lora_r", count, 16, "models.lora.rank"),
    maps("lora_alpha", finite, 32, "models.lora.alpha"),
    maps(
        "lora_target_modules",
        str,
        None,
        "models.lora.target_modules",
        num_values=None,
        note="PEFT chooses layers by the architecture, often q_proj and v_proj alone; here every linear layer has one",
        when=lambda c: c["use_peft"] and c["lora_target_modules"] is None,
    ),
    lost(
        "lora_dropout", finite, 0.05, "adapters have no dropout", when=lambda c: c["use_peft"] and c["lora_dropout"] > 0
    ),
    lost("lora_target_parameters", str, None, "adapters are on linear layers alone", num_values=None),
    lost("lora_modules_to_save", str, None, "no layer is trained whole beside adapters", num_values=None),
    moot("lora_task_type", str, "the actor is a causal language model"),
    maps("use_rslora", bool, False, "models.lora.rslora"),
    lost("use_dora", bool, False, "adapters are plain LoRA"),
    lost("load_in_8bit", bool, False, NOT_QUANTISED),
    lost("load_in_4bit", bool, False, NOT_QUANTISED),
    moot("bnb_4bit_quant_type", str, NOT_QUANTISED),
    moot("bnb_4bit_quant_storage", str, NOT_QUANTISED),
    moot("use_bnb_nested_quant", bool, NOT_QUANTISED),
    lost("model_init_kwargs", str, None, "the model's own config.json counts"),
    maps("trust_remote_code", bool, False, "models.trust_remote_code"),
    moot("disable_dropout", bool, "models are always trained without dropout"),
    moot("cast_lm_head_to_fp32", bool, "log-probs are computed in float32"),
    moot("ignore_bias_buffers", bool, "models are not wrapped in DDP"),
)

DATA = (
    maps("dataset_name", str, "", "prompts.path"),
    maps("dataset_config", str, None, "prompts.path"),
    maps("dataset_train_split", str, "train", "prompts.split"),
    maps("dataset_test_split", str, "test", "prompts.eval_split"),
    moot("dataset_streaming", bool, PREPARED),
    moot("streaming", bool, PREPARED),
    refused(
        "datasets",
        str,
        None,
        "a mixture is not translated; give dataset_name, and list the data sets in prompts.path",
        num_values=None,
    ),
    refused("test_split_size", finite, None, "data are not split here; give dataset_test_split"),
    maps("shuffle_dataset", bool, True, "prompts.shuffle"),
    moot("remove_unused_columns", bool, "a row keeps all its columns"),
    *(
        moot(name, str, PREPARED)
        for name in (
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "train_sampling_strategy",
            "length_column_name",
            "label_names",
        )
    ),
)

TRAINING_ARGUMENTS = (
    maps("output_dir", str, "trainer_output", "run.dir", "run.name"),
    maps("seed", int, 42, "run.seed", note="the same seed draws other samples than in TRL"),
    moot("data_seed", int, "run.seed orders the prompts"),
    maps("full_determinism", bool, False, "run.deterministic"),
    maps(
        "save_strategy",
        str,
        "steps",
        "checkpoint.every_steps",
        choices={"steps": 1, "no": 0, "epoch": 0, "best": 0},
        note="checkpoints follow a number of steps; set checkpoint.every_steps, or checkpoint.keep_best",
        when=lambda c: c["save_strategy"] in ("epoch", "best"),
    ),
    maps(
        "save_steps",
        finite,
        500.0,
        "checkpoint.every_steps",
        note="TRL counts optimizer steps, here steps of the loop",
    ),
    maps(
        "save_total_limit",
        count,
        None,
        "checkpoint.keep_last",
        note="TRL keeps all checkpoints, here checkpoint.keep_last of them",
        when=lambda c: c["save_total_limit"] is None and c["save_strategy"] != "no",
    ),
    maps(
        "save_only_model",
        bool,
        False,
        "checkpoint.export_every_steps",
        "checkpoint.export_keep_last",
        "checkpoint.every_steps",
    ),
    moot("save_on_each_node", bool, "the run's folder is shared by all nodes"),
    moot("save_safetensors", bool, "weights are always safetensors"),
    lost("resume_from_checkpoint", str, None, "TRL's checkpoints cannot be read here; run.resume continues own runs"),
    maps("load_best_model_at_end", bool, False, "checkpoint.keep_best"),
    moot("metric_for_best_model", str, "the accuracy of an evaluation counts"),
    moot("greater_is_better", bool, "the accuracy of an evaluation counts"),
    maps(
        "report_to",
        str,
        None,
        "run.trackers",
        num_values=None,
        note=NO_OTHERS,
        when=lambda c: bool(set(c["report_to"] or []) - {"none", *TRACKERS}),
    ),
    maps("project", str, None, "run.project"),
    missing("run_name", str, None, "run.name names the run; " + BY_VARIABLE.format("WANDB_NAME")),
    missing("trackio_space_id", str, None, BY_VARIABLE.format("TRACKIO_SPACE_ID")),
    missing("trackio_bucket_id", str, None, BY_VARIABLE.format("TRACKIO_BUCKET_ID")),
    missing("trackio_static_space_id", str, None, "`trackio sync` makes a static Space"),
    *(
        moot(name, str, ALWAYS_LOGGED)
        for name in (
            "logging_strategy",
            "logging_first_step",
            "logging_dir",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "log_level",
            "log_level_replica",
            "log_completions",
            "log_multimodal",
            "log_unique_prompts",
            "num_completions_to_print",
            "include_num_input_tokens_seen",
            "disable_tqdm",
        )
    ),
    maps("logging_steps", finite, 10.0, "run.eval_every_steps"),
    missing("push_to_hub", bool, False, NO_HUB),
    missing("hub_private_repo", bool, None, NO_HUB),
    missing("hub_always_push", bool, False, NO_HUB),
    *(
        missing(name, str, None, NO_HUB)
        for name in ("hub_token", "hub_model_id", "hub_strategy", "hub_revision", "log_completions_hub_repo")
    ),
    lost("label_smoothing_factor", finite, 0.0, "log-probs are not smoothed"),
    lost("neftune_noise_alpha", finite, None, "embeddings have no noise"),
    lost(
        "deepspeed",
        str,
        None,
        "the file is not read; set update.zero_stage and update.actor.kind",
    ),
    lost("fsdp", str, None, "DeepSpeed shards the models; set update.zero_stage", num_values=None),
    lost("fsdp_config", str, None, "DeepSpeed shards the models; set update.zero_stage"),
    lost("parallelism_config", str, None, "set update.sequence_parallel_size or update.tensor_parallel_size"),
    moot("accelerator_config", str, GPU_PER_RANK),
    moot("average_tokens_across_devices", bool, "losses are averaged over all ranks by update.aggregation"),
    missing("torch_compile", bool, False, NOT_COMPILED),
    moot("torch_compile_backend", str, NOT_COMPILED),
    moot("torch_compile_mode", str, NOT_COMPILED),
    moot("liger_kernel_config", str, "models.fused_layers = liger takes the layers that are verified"),
    *(
        moot(name, str, GPU_PER_RANK)
        for name in (
            "local_rank",
            "use_cpu",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
        )
    ),
    *(
        moot(name, str, "it changes nothing in a run of GRPO")
        for name in (
            "do_train",
            "do_eval",
            "do_predict",
            "tf32",
            "bf16_full_eval",
            "fp16_full_eval",
            "use_cache",
            "torch_empty_cache_steps",
            "auto_find_batch_size",
            "prediction_loss_only",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "include_for_metrics",
            "batch_eval_metrics",
            "enable_jit_checkpoint",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "debug",
            "skip_memory_metrics",
        )
    ),
)

ACCELERATE = (
    maps("num_processes", count, None, "rollout.rollout_batch_size", "update.mini_batch_size"),
    maps(
        "accelerate_config",
        str,
        "zero2",
        "update.zero_stage",
        choices={
            "single_gpu": 1,
            "multi_gpu": 1,
            "zero1": 1,
            "zero2": 2,
            "zero3": 3,
            "fsdp1": 3,
            "fsdp2": 3,
        },
        note="DDP becomes ZeRO 1, and FSDP's full shards become ZeRO 3; the result is the same",
    ),
    lost("config_file", str, None, "Accelerate's file is not read; set update.zero_stage"),
    moot("num_machines", int, "launch/ray_cluster.py takes the nodes from its cluster"),
    moot("machine_rank", int, GPU_PER_RANK),
    moot("main_process_ip", str, GPU_PER_RANK),
    moot("main_process_port", str, GPU_PER_RANK),
    moot("mixed_precision", str, "bf16 and fp16 give the data type"),
    moot("gpu_ids", str, "CUDA_VISIBLE_DEVICES selects GPUs"),
)
