"""Whole command lines, as the example scripts of OpenRLHF and ColossalChat have them, and the settings they become."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hybrid_rl.config import as_dict
from hybrid_rl.validate import validate
from launch.translate.command import translate
from launch.translate.systems import SYSTEMS

SCRIPT = Path(__file__).parents[2] / "launch" / "colocated.py"

PPO_FLAT = r"""
set -x
# the hybrid engine, spring of 2025
python3 -m openrlhf.cli.train_ppo_ray \
   --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8 \
   --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8 \
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --colocate_all_models --vllm_gpu_memory_utilization 0.6 \
   --pretrain models/sft --reward_pretrain models/rm --save_path out/final/llama --ckpt_path out/ckpt/llama \
   --save_hf_ckpt --micro_train_batch_size 4 --train_batch_size 128 --micro_rollout_batch_size 8 \
   --rollout_batch_size 1024 --n_samples_per_prompt 1 --max_epochs 1 --prompt_max_len 1024 --max_samples 100000 \
   --generate_max_len 1024 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 --critic_learning_rate 8e-6 \
   --init_kl_coef 0.01 --prompt_data prompts.jsonl --input_key context_messages --apply_chat_template \
   --normalize_reward --gradient_checkpointing --packing_samples --vllm_sync_backend nccl --enforce_eager \
   --vllm_enable_sleep --deepspeed_enable_sleep

# --adam_offload \
"""
DAPO_DOTTED = r"""
python3 -m openrlhf.cli.train_ppo_ray \
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.gpu_memory_utilization 0.6 \
   --algo.kl.init_coef 1e-3 --algo.advantage.gamma 1.0 --algo.kl.use_loss --algo.kl.estimator k3 \
   --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 \
   --actor.eps_clip_low_high 0.2 0.27 --actor.model_name_or_path models/sft --reward.remote_url rewards.py \
   --ckpt.output_dir out/llama3 --ckpt.path out/ckpt --ckpt.save_steps 20 --ckpt.save_hf \
   --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 128 \
   --rollout.n_samples_per_prompt 8 --train.max_epochs 1 --data.max_len 2048 --data.max_samples 20000 \
   --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 --data.prompt_dataset prompts.jsonl \
   --data.input_key context_messages --data.apply_chat_template --actor.gradient_checkpointing_enable \
   --ds.packing_samples --vllm.sync_backend nccl --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep \
   --algo.advantage.is_correction_enable 2>&1 | tee dapo.log
"""
REMOTE_DOTTED = r"""
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \
   -- python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path models/sft \
   --reward.remote_url http://a:5000/score,http://b:5000/score --data.prompt_dataset prompts.jsonl \
   --data.label_key label --algo.advantage.estimator reinforce_baseline --rollout.batch_size 512 \
   --rollout.n_samples_per_prompt 16 --train.batch_size 1024 --train.dynamic_batch_enable \
   --train.max_tokens_per_gpu 32768 --data.max_len 9216 --rollout.max_new_tokens 8192 --eval.dataset aime.jsonl \
   --eval.steps 5 --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 5.0 \
   --algo.advantage.is_correction_type icepop --reward.overlong_buffer_len 4096 --train.enable_ema \
   --critic.save_value_network --reward.stop_properly_penalty_coef 0.0
"""
COATI_PPO = r"""
colossalai run --nproc_per_node 8 --hostfile hostfile --master_port 31312 train_ppo.py \
    --pretrain models/sft --rm_pretrain models/base --tokenizer_dir models/sft --rm_checkpoint_path models/rm \
    --prompt_dataset data/part-00000 data/part-00001 --conversation_template_config template.json \
    --ptx_coef 0.2 --ptx_dataset sft.jsonl --plugin "zero2_cpu" --save_interval 500 --save_path out/run-1 \
    --num_episodes 2000 --num_collect_steps 2 --num_update_steps 1 --experience_batch_size 4 --train_batch_size 4 \
    --accumulation_steps 2 --lr 9e-6 --critic_lr 3e-6 --mixed_precision "bf16" --grad_clip 0.1\
    --weight_decay 0.01 --warmup_steps 40 --grad_checkpoint --use_wandb
"""
COATI_RLVR = (
    "torchrun --nproc_per_node=4 train_ppo.py --pretrain llama --rm_pretrain llama --prompt_dataset math.jsonl "
    "--conversation_template_config template.json --no_neural_reward_model --reward_functions gsm8k_reward_fn "
    "--plugin zero2 --num_episodes 100"
)
COATI_RAY = (
    "python train_prompts_on_ray.py --prompt_csv_url prompts.csv --model gpt2 --pretrain gpt2 "
    "--strategy colossalai_zero2 --num_episodes 10 --num_actor_nodes 2 --num_gpus_per_node 4"
)
EXAMPLES = {
    "openrlhf ppo, flat": (
        "--from-openrlhf",
        PPO_FLAT,
        {
            "run": {"name": "llama", "dir": "out/final", "num_steps": 98, "seed": 42, "resume": "never"},
            "models": {"actor": "models/sft", "reward": "models/rm", "gradient_checkpointing": True},
            "prompts": {
                "path": "prompts.jsonl",
                "max_samples": 100000,
                "prompt_column": "context_messages",
                "answer_column": None,
                "chat": True,
                "max_prompt_tokens": 1024,
                "overlong_prompts": "drop",
            },
            "rollout": {
                "tensor_parallel_size": 2,
                "rollout_batch_size": 1024,
                "max_response_tokens": 1024,
                "gpu_memory_utilization": 0.6,
                "enforce_eager": True,
                "prefix_caching": False,
            },
            "reward": {"clip": 10.0, "normalize": True},
            "advantage": {"gae_lambda": 1.0, "kl_coef": 0.01},
            "update": {  # 4 x 2048 tokens is our default; 98 steps of 8 updates, of which 3 % are 23.52
                "zero_stage": 3,
                "actor": {"lr": 5e-7, "warmup_steps": 24, "schedule": "cosine", "min_lr_ratio": 0.1},
                "critic": {"lr": 8e-6, "warmup_steps": 24, "schedule": "cosine", "min_lr_ratio": 0.1},
            },
            "checkpoint": {"every_steps": 0, "keep_last": 3},
        },
    ),
    "openrlhf dapo, dotted": (
        "--from-openrlhf",
        DAPO_DOTTED,
        {
            "run": {"name": "llama3", "dir": "out", "num_steps": 157, "seed": 42, "resume": "never"},
            "models": {"actor": "models/sft", "gradient_checkpointing": True},
            "prompts": {
                "path": "prompts.jsonl",
                "max_samples": 20000,
                "prompt_column": "context_messages",
                "answer_column": None,
                "chat": True,
                "max_prompt_tokens": 1024,
                "overlong_prompts": "drop",
            },
            "rollout": {
                "tensor_parallel_size": 2,
                "group_size": 8,
                "max_response_tokens": 1024,
                "dynamic_filtering_reward_range": [0.0, 1.0],
                "gpu_memory_utilization": 0.6,
                "enforce_eager": True,
                "prefix_caching": False,
            },
            "reward": {"functions": ["rewards.py:reward_func"], "clip": 10.0},
            "advantage": {"estimator": "grpo", "kl_coef": 0.001, "kl_in": "loss", "kl_estimator": "k3"},
            "update": {  # 8 x 2048 tokens; 157 steps of 8 updates, of which 3 % are 37.68
                "micro_batch_tokens": 16384,
                "clip_high": 0.27,
                "correction": "tis",
                "correction_high": 5.0,
                "zero_stage": 3,
                "actor": {"lr": 5e-7, "warmup_steps": 38, "schedule": "cosine", "min_lr_ratio": 0.1},
            },
            "checkpoint": {"every_steps": 20, "keep_last": 3, "export_every_steps": 20, "export_keep_last": 3},
        },
    ),
    "openrlhf remote rewards, dotted": (
        "--from-openrlhf",
        REMOTE_DOTTED,
        {
            "run": {
                "name": "ckpt",
                "dir": ".",
                "seed": 42,
                "resume": "never",
                "eval_every_steps": 5,
                "eval_samples": 4,
                "eval_temperature": 0.6,
            },
            "models": {"actor": "models/sft", "ema_decay": 0.992},
            "prompts": {
                "path": "prompts.jsonl",
                "eval_path": "aime.jsonl",
                "prompt_column": "input",
                "answer_column": "label",
                "max_prompt_tokens": 1024,
                "overlong_prompts": "drop",
            },
            "rollout": {
                "rollout_batch_size": 512,
                "group_size": 16,
                "max_response_tokens": 8192,
                "prefix_caching": False,
            },
            "reward": {
                "remote_urls": ["http://a:5000/score", "http://b:5000/score"],
                "overlong_buffer": 4096,
                "clip": 10.0,
            },
            "advantage": {"estimator": "reinforce_pp_baseline", "kl_coef": 0.01},
            "update": {  # our 100 steps of 8 updates, of which 3 % are 24
                "mini_batch_size": 1024,
                "micro_batch_tokens": 32768,
                "correction": "icepop",
                "correction_high": 5.0,
                "actor": {"warmup_steps": 24, "schedule": "cosine", "min_lr_ratio": 0.1},
            },
            "checkpoint": {"every_steps": 0, "keep_last": 3, "keep_best": True},
        },
    ),
    "coati ppo": (
        "--from-coati",
        COATI_PPO,
        {
            "run": {"name": "run-1", "dir": "out", "num_steps": 2000, "trackers": ["wandb"]},
            "models": {
                "actor": "models/sft",
                "critic": "models/base",
                "reward": "models/rm",
                "gradient_checkpointing": True,
            },
            "prompts": {
                "path": "data/part-00000",
                "prompt_column": "messages",
                "answer_column": None,
                "template_path": "template.json",
                "max_prompt_tokens": 1792,
                "overlong_prompts": "drop",
            },
            "rollout": {"rollout_batch_size": 64, "temperature": 0.7},
            "reward": {"clip": 5.0},
            "advantage": {"kl_coef": 0.1, "whiten": False},
            "update": {  # 4 x 2 responses on 8 processes; the critic's floor is a tenth of the actor's rate
                "mini_batch_size": 64,
                "value_clip": 0.2,
                "aggregation": "sequence_mean",
                "actor": {
                    "kind": "cpu_adam",
                    "lr": 9e-6,
                    "weight_decay": 0.01,
                    "max_grad_norm": 0.1,
                    "warmup_steps": 40,
                    "schedule": "cosine",
                    "min_lr_ratio": 0.1,
                },
                "critic": {
                    "kind": "cpu_adam",
                    "lr": 3e-6,
                    "weight_decay": 0.01,
                    "max_grad_norm": 0.1,
                    "warmup_steps": 40,
                    "schedule": "cosine",
                    "min_lr_ratio": pytest.approx(0.3),
                },
            },
            "ptx": {"path": "sft.jsonl", "coef": 0.2, "batch_size": 64, "max_tokens": 2048},
            "checkpoint": {"every_steps": 500},
        },
    ),
    "coati ppo with reward functions": (
        "--from-coati",
        COATI_RLVR,
        {
            "run": {"name": "actor_checkpoint_prompts", "dir": "."},
            "models": {"actor": "llama", "critic": "llama"},
            "prompts": {
                "path": "math.jsonl",
                "prompt_column": "messages",
                "answer_column": "gt_answer",
                "template_path": "template.json",
                "max_prompt_tokens": 1792,
                "overlong_prompts": "drop",
            },
            "rollout": {"temperature": 0.7},
            "reward": {"functions": ["think_format", "gsm8k"], "weights": [2.0, 18.0], "clip": 5.0},
            "advantage": {"kl_coef": 0.1, "whiten": False},
            "update": {  # 128 responses a step, on 4 processes; ColossalChat steps every 512, across passes
                "num_epochs": 5,
                "micro_batch_tokens": 32768,
                "value_clip": 0.2,
                "aggregation": "sequence_mean",
                "actor": {
                    "lr": 9e-6,
                    "weight_decay": 0.1,
                    "warmup_steps": 2,
                    "schedule": "cosine",
                    "min_lr_ratio": 0.1,
                },
                "critic": {"weight_decay": 0.1, "warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1},
            },
            "checkpoint": {"every_steps": 1000},
        },
    ),
    "coati on ray": (
        "--from-coati",
        COATI_RAY,
        {
            "run": {"name": "actor_checkpoint_prompts.pt", "dir": ".", "num_steps": 10},
            "models": {"actor": "gpt2"},
            "prompts": {
                "path": "prompts.csv",
                "answer_column": None,
                "max_prompt_tokens": 96,
                "overlong_prompts": "drop",
            },
            "rollout": {"rollout_batch_size": 640, "max_response_tokens": 32},
            "reward": {"clip": 5.0},
            "advantage": {"gae_lambda": 1.0, "kl_coef": 0.1, "whiten": False},
            "update": {
                "mini_batch_size": 64,
                "micro_batch_tokens": 1024,
                "value_clip": 0.4,
                "aggregation": "sequence_mean",
                "actor": {"lr": 5e-6, "betas": [0.9, 0.999]},
                "critic": {"lr": 5e-6, "betas": [0.9, 0.999]},
            },
            "checkpoint": {"every_steps": 0},
        },
    ),
}


def launcher() -> ModuleType:
    """Return launch/colocated.py as a module."""
    spec = importlib.util.spec_from_file_location("colocated", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: as_lists(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


OPEN = {"coati on ray": {"models.reward": "trained"}}
"""Example -> settings that its command line leaves open, and values with which it can start."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_real_command_lines_give_settings_that_load(name: str, tmp_path: Path) -> None:
    option, text, expected = EXAMPLES[name]
    translation = translate(SYSTEMS[option], [text])
    assert yaml.safe_load(translation.text) == expected
    given = OPEN.get(name, {})
    assert [setting for setting in given if setting in " ".join(translation.findings)] == list(given)
    assert len(translation.findings) == len(given)
    assert ("NOT COMPLETE" in translation.text) == bool(given)
    path = tmp_path / "translated.yaml"
    path.write_text(translation.text)
    added = [word for setting, value in given.items() for word in (f"--{setting}", value)]
    config, _ = launcher().parse(["--config", str(path), *added])
    validate(config)
    loaded = as_lists(as_dict(config))
    for section, fields in expected.items():
        for field, value in fields.items():
            wanted = value if not isinstance(value, dict) else loaded[section][field] | value
            assert (section == "models" and f"models.{field}" in given) or loaded[section][field] == wanted, field


def test_what_a_translation_leaves_open_ends_with_code_2_after_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        launcher().parse(["--from-coati", COATI_RAY])
    output = capsys.readouterr()
    assert (ending.value.code, yaml.safe_load(output.out)["models"]) == (2, {"actor": "gpt2"})
    assert output.err.startswith("error: models.reward is null") and output.err.count("\n") == 1


def test_comments_group_differences_under_the_given_spelling() -> None:
    comments = " ".join(translate(SYSTEMS["--from-openrlhf"], [PPO_FLAT]).text.partition("\nrun:")[0].split("\n#   "))
    assert "# Differs here:" in comments and "# Has no meaning here:" in comments
    assert "- --ref_num_nodes, --ref_num_gpus_per_node, --reward_num_nodes" in comments
    assert "(KL bound)" in comments and "--adam_offload" not in comments
    assert "the default was 0.95 until early 2025" in comments
    assert "0.95 until" not in translate(SYSTEMS["--from-openrlhf"], [PPO_FLAT + " --lambd 1"]).text
    remote = translate(SYSTEMS["--from-openrlhf"], [REMOTE_DOTTED]).text
    lost = remote.partition("# Not carried over, and it changes the run:\n")[2].partition("\n#\n")[0]
    assert re.findall(r"^# - (--[\w.]+)", lost, re.MULTILINE) == ["--reward.stop_properly_penalty_coef"]


def test_an_unknown_argument_exits_with_code_2_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        launcher().parse(["--from-openrlhf", "--pretrain", "x", "--nonsense", "3"])
    output = capsys.readouterr()
    assert (ending.value.code, output.out) == (2, "")
    assert output.err == "error: OpenRLHF's train_ppo_ray has no --nonsense\n"


def test_the_command_prints_settings_without_loading_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "--from-openrlhf", DAPO_DOTTED],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert yaml.safe_load(done.stdout) == EXAMPLES["openrlhf dapo, dotted"][2]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "hybrid_rl" in imported and not imported & {"torch", "vllm", "transformers", "deepspeed"}
