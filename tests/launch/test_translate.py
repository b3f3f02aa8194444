"""Command lines of OpenRLHF and ColossalChat become settings that load, by values worked out by hand."""

import re
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybrid_rl.config import Config, ConfigError
from launch.translate import coati, coati_grpo, coati_ray, openrlhf, trl, verl
from launch.translate.command import default_of, settings_of, translate
from launch.translate.program import Program
from launch.translate.reading import read_arguments
from launch.translate.shell import commands, up_to_operator
from launch.translate.systems import SYSTEMS
from launch.translate.table import table

DOCS = Path(__file__).parents[2] / "docs" / "seeds.md"
PROGRAMS = [program for programs in SYSTEMS.values() for program in programs]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.names[0])


def settings(program: Program, arguments: str, num_processes: int | None = None) -> dict[str, Any]:
    return settings_of(program, read_arguments(program, arguments.split(), num_processes))


def test_a_command_line_without_paths_says_what_is_missing() -> None:
    assert (
        "NOT COMPLETE, it will not start like this:\n# - models.actor is empty"
        in translate(SYSTEMS["--from-openrlhf"], ["--rollout.batch_size", "64"]).text
    )


def test_shell_variables_that_are_not_expanded_are_listed() -> None:
    text = translate(
        SYSTEMS["--from-openrlhf"], ["--pretrain $MODEL --prompt_data p.jsonl --remote_rm_url http://a"]
    ).text
    assert "# Shell variables, to be replaced:\n# - --pretrain $MODEL\n" in text


SCRIPT = r"""
#!/bin/bash
HOME_DIR=$(cd "$(dirname "$0")" && pwd)   # only a run tells
MODEL="models/my model"                   # a comment
EMPTY=
export SAVE=$HOME_DIR/exp
declare -a shards=(
    a.jsonl
    # b.jsonl
    "c c.jsonl"
)
ARGS=(
   --pretrain "${MODEL}"
   --seed 7
)
CUDA_VISIBLE_DEVICES=0,1 python train.py ${ARGS[@]} \
   --save "${SAVE}/1" --empty $EMPTY --data ${shards[@]} --text '$MODEL'
   --last x   # no comment of a word#1
echo done
"""


def test_variables_and_arrays_of_a_script_are_expanded() -> None:
    command, last = commands(SCRIPT)[-2:]
    words = up_to_operator(command)
    assert words[:7] == [
        "CUDA_VISIBLE_DEVICES=0,1",
        "python",
        "train.py",
        "--pretrain",
        "models/my model",
        "--seed",
        "7",
    ]
    assert words[7:11] == ["--save", "$HOME_DIR/exp/1", "--empty", "$EMPTY"]
    assert words[11:] == ["--data", "a.jsonl", "c c.jsonl", "--text", "$MODEL", "--last", "x"]
    assert last == ["echo", "done"]


@pytest.mark.parametrize(
    "program, arguments, field, value",
    [
        (openrlhf.PROGRAM, "--eps_clip 0.3", "update.clip_low", 0.3),
        (openrlhf.PROGRAM, "--eps_clip 0.3", "update.clip_high", 0.3),
        (openrlhf.PROGRAM, "--eps_clip_low_high 0.1 0.28 --eps_clip 0.3", "update.clip_low", 0.1),
        (openrlhf.PROGRAM, "--reward_clip_range -3 7", "reward.clip", 7.0),
        (openrlhf.PROGRAM, "--max_norm 0.5", "update.actor.max_grad_norm", 0.5),
        (openrlhf.PROGRAM, "--max_norm 0.5", "update.critic.max_grad_norm", 0.5),
        (openrlhf.PROGRAM, "--adam_betas 0.8 0.9", "update.critic.betas", [0.8, 0.9]),
        (openrlhf.PROGRAM, "--use_kl_estimator_k3", "advantage.kl_estimator", "k3"),
        (openrlhf.PROGRAM, "--ds_tensor_parallel_size 2", "update.tensor_parallel_size", 2),
        (openrlhf.PROGRAM, "--ring_attn_size 4", "update.sequence_parallel_size", 4),
        (openrlhf.PROGRAM, "--ring_attn_size 4 --use_dynamic_batch --train_max_tokens_per_gpu 8192",
         "update.micro_batch_tokens", 32768),  # tokens per GPU in OpenRLHF, per group of GPUs here
        (openrlhf.PROGRAM, "--colocate_all_models", "memory.swap", "off"),
        (openrlhf.PROGRAM, "--zero_stage 0 --colocate_all_models --deepspeed_enable_sleep", "memory.swap", "off"),
        (openrlhf.PROGRAM, "--actor.policy_loss_type gspo", "update.aggregation", "sequence_mean"),
        (openrlhf.PROGRAM, "--enable_vllm_is_correction --vllm_is_truncated_threshold 2", "update.correction_low", 0.0),
        (openrlhf.PROGRAM, "--freezing_actor_steps 7", "update.critic_warmup_steps", 7),
        (openrlhf.PROGRAM, "--lora_rank 8 --target_modules q k", "models.lora.target_modules", ["q", "k"]),
        (openrlhf.PROGRAM, "--lora_rank 8", "models.lora.alpha", 16),
        (openrlhf.PROGRAM, "--lr_scheduler constant_with_warmup --max_samples 1024", "update.actor.warmup_steps", 1),
        (openrlhf.PROGRAM, "--max_samples=1025 --num_episodes=3", "run.num_steps", 6),
        (openrlhf.PROGRAM, "--zero_stage 0", "update.zero_stage", 1),
        (openrlhf.PROGRAM, "--full_determinism", "run.deterministic", True),
        (openrlhf.PROGRAM, "--ds.use_liger_kernel", "models.fused_layers", "liger"),
        (openrlhf.PROGRAM, "--actor.loss_agg_mode seq-mean-token-mean", "update.aggregation", "sequence_mean"),
        (openrlhf.PROGRAM, "--algo.kl.use_loss --algo.kl.unbiased_gradient", "advantage.kl_unbiased", True),
        (openrlhf.PROGRAM, "--algo.advantage.is_correction_level token", "update.correction", "icepop"),
        (openrlhf.PROGRAM, "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip",
         "update.correction", "tis"),
        (openrlhf.PROGRAM, "--algo.advantage.is_correction_level seq", "update.correction", "sequence_mask"),
        (openrlhf.PROGRAM, "--algo.advantage.is_correction_level token --algo.advantage.is_correction_threshold 3",
         "update.correction_high", 3.0),
        (openrlhf.PROGRAM, "--data.prompt_split test", "prompts.split", "test"),
        (openrlhf.PROGRAM, "--eval.dataset org/name", "prompts.eval_split", "train"),
        (openrlhf.PROGRAM, "--data.max_samples 100", "prompts.max_samples", 100),
        (coati_grpo.PROGRAM, "--num_collect_steps 8 --experience_batch_size 1 --train_batch_size 4 "
         "--accumulation_steps 4", "update.mini_batch_size", 16),
        (coati_grpo.PROGRAM, "--num_collect_steps 8 --experience_batch_size 1", "rollout.rollout_batch_size", 8),
        (coati_grpo.PROGRAM, "", "advantage.kl_coef", 0.7),
        (coati_grpo.PROGRAM, "--reward_functions gsm8k_reward_fn math_competition_reward_fn", "reward.weights",
         [2.0, 9.0, 9.0]),
        (coati.PROGRAM, "--num_collect_steps 3 --experience_batch_size 4 --train_batch_size 2 --accumulation_steps 4",
         "update.mini_batch_size", 6),  # 8 in ColossalChat, which does not divide the 12 responses of a step
        (coati.PROGRAM, "--plugin gemini", "update.zero_stage", 3),
        (coati.PROGRAM, "--plugin 3d --zero_stage 1", "update.zero_stage", 1),
        (coati.PROGRAM, "--plugin 3d", "memory.swap", "off"),
        (coati.PROGRAM, "--plugin 3d --tp 4", "update.tensor_parallel_size", 4),
        (coati.PROGRAM, "--plugin 3d --sp 4 --enable_sequence_parallelism", "update.sequence_parallel_size", 4),
        (coati.PROGRAM, "--checkpoint_path out/actor/modeling", "models.actor", "out/actor/modeling"),
        (coati_ray.PROGRAM, "--need_optim_ckpt False --max_timesteps 5", "checkpoint.every_steps", 5),
        (coati_ray.PROGRAM, "--strategy ddp", "memory.swap", "off"),
        (coati_ray.PROGRAM, "--strategy ddp", "update.zero_stage", 1),
        (verl.PROGRAM, "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.n=5",
         "update.mini_batch_size", 320),  # prompts in verl, responses here
        (verl.PROGRAM, "actor_rollout_ref.actor.clip_ratio=0.3 actor_rollout_ref.actor.clip_ratio_low=null",
         "update.clip_low", 0.3),  # verl's own bounds are 0.2 and count before clip_ratio
        (verl.PROGRAM, "actor_rollout_ref.actor.clip_ratio_high=0.28", "update.clip_high", 0.28),
        (verl.PROGRAM, "", "update.dual_clip", 3.0),
        (verl.PROGRAM, "", "rollout.tensor_parallel_size", 2),
        (verl.PROGRAM, "", "update.actor.weight_decay", 0.01),
        (verl.PROGRAM, "", "run.dir", "checkpoints/verl_examples"),
        (verl.PROGRAM, "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False",
         "advantage.estimator", "dr_grpo"),
        (verl.PROGRAM, "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=k3+",
         "advantage.kl_estimator", "k2"),
        (verl.PROGRAM, "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.02", "advantage.kl_coef", 0.02),
        (verl.PROGRAM, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "update.aggregation", "sequence_mean"),
        (verl.PROGRAM, "data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=128 "
         "actor_rollout_ref.actor.optim.lr_warmup_steps=10", "update.actor.warmup_steps", 40),
        (verl.PROGRAM, "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
         "=9000 actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "update.micro_batch_tokens", 18000),
        (verl.PROGRAM, "algorithm.rollout_correction.rollout_is=token", "update.correction", "tis"),
        (verl.PROGRAM, "algorithm.rollout_correction.rollout_rs=seq_mean_k1 "
         "algorithm.rollout_correction.rollout_rs_threshold=0.999_1.001", "update.correction_low", 0.999),
        (verl.PROGRAM, "algorithm.rollout_correction.bypass_mode=True", "update.old_logprobs", "rollout"),
        (verl.PROGRAM, "custom_reward_function.path=r.py", "reward.functions", ["r.py:compute_score"]),
        (verl.PROGRAM, "reward_model.enable=True custom_reward_function.path=r.py trainer.test_freq=5",
         "run.eval_function", "r.py:compute_score"),  # with a reward model, functions score evaluations alone
        (verl.PROGRAM, "reward_model.enable=True data.val_files=[gsm8k.parquet] trainer.test_freq=5",
         "run.eval_function", "gsm8k"),
        (verl.PROGRAM, "data.train_files=[x/gsm8k/train.parquet]", "reward.functions", ["gsm8k"]),
        (verl.PROGRAM, "data.train_files=[x/math.parquet,y/aime.parquet]", "reward.functions", ["math"]),
        (verl.PROGRAM, "data.train_files=[x/gsm8k.parquet,x/math.parquet]", "reward.functions", ["by_source"]),
        (verl.PROGRAM, "data.train_files=[x/gsm8k.parquet,x/math.parquet]", "prompts.path",
         ["x/gsm8k.parquet", "x/math.parquet"]),
        (verl.PROGRAM, "data.val_files=[x/gsm8k/test.parquet,x/aime.parquet]", "prompts.eval_path",
         {"gsm8k": "x/gsm8k/test.parquet", "aime": "x/aime.parquet"}),
        (verl.PROGRAM, "actor_rollout_ref.rollout.val_kwargs.do_sample=True "
         "actor_rollout_ref.rollout.val_kwargs.temperature=0.6", "run.eval_temperature", 0.6),
        (verl.PROGRAM, "actor_rollout_ref.rollout.val_kwargs.do_sample=True "
         "actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "run.eval_top_p", 0.7),
        (openrlhf.PROGRAM, "--data.prompt_dataset a,b", "prompts.path", ["a", "b"]),
        (openrlhf.PROGRAM, "--data.prompt_dataset a,b --data.prompt_probs 0.3,0.7", "prompts.path",
         [{"path": "a", "weight": 0.3}, {"path": "b", "weight": 0.7}]),
        (openrlhf.PROGRAM, "--eval.dataset e --eval.temperature 0.8", "run.eval_temperature", 0.8),
        (verl.PROGRAM, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
         "update.tensor_parallel_size", 2),
        (verl.PROGRAM, "reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
         "reward_model.reward_kwargs.overlong_buffer_cfg.len=4096", "reward.overlong_buffer", 4096),
        (verl.PROGRAM, "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10",
         "rollout.dynamic_filtering_max_retries", 9),
        (trl.PROGRAM, "--per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_generations 8",
         "rollout.rollout_batch_size", 4),
        (trl.PROGRAM, "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 8 "
         "--num_processes 4", "update.mini_batch_size", 32),
        (trl.PROGRAM, "--gradient_accumulation_steps 4 --steps_per_generation 2", "rollout.rollout_batch_size", 4),
        (trl.PROGRAM, "--max_tool_calling_iterations 3", "environment.max_turns", 4),
        (trl.PROGRAM, "--max_steps 90 --steps_per_generation 3 --num_iterations 2 --num_generations 2",
         "run.num_steps", 15),  # 3 x 2 optimizer steps for each generation
        (trl.PROGRAM, "--loss_type cispo --epsilon_high 5", "update.clip_high", 4.0),  # a ratio in TRL
        (trl.PROGRAM, "--scale_rewards False", "advantage.estimator", "dr_grpo"),
        (trl.PROGRAM, "--loss_type dr_grpo", "update.aggregation", "sequence_sum_constant"),
        (trl.PROGRAM, "--beta 0.04", "advantage.kl_estimator", "k3"),
        (trl.PROGRAM, "--use_vllm --vllm_importance_sampling_clip_max none", "update.correction_high", 1e9),
        (trl.PROGRAM, "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {'min_lr_rate':0.1}",
         "update.actor.min_lr_ratio", 0.1),
        (trl.PROGRAM, "--warmup_ratio 0.1 --max_steps 50", "update.actor.warmup_steps", 5),
        (trl.PROGRAM, "--dataset_name a/b --dataset_config c", "prompts.path", "a/b:c"),
        (trl.PROGRAM, "--reward_funcs my_lib.rewards.f", "reward.functions", ["my_lib/rewards.py:f"]),
        (trl.PROGRAM, "--reward_funcs my_lib.rewards.f", "prompts.answer_column", None),
        (trl.PROGRAM, "--reward_funcs my_lib.rewards.f accuracy_reward", "prompts.answer_column", "solution"),
        (trl.PROGRAM, "--reward_model_name_or_path r --reward_funcs accuracy_reward --reward_weights 0.5 2",
         "reward.model_weight", 0.5),
        (trl.PROGRAM, "--use_peft --lora_r 8", "models.lora.rank", 8),
        (trl.PROGRAM, "--use_peft --use_rslora", "models.lora.rslora", True),
        (trl.PROGRAM, "--bf16 false", "models.dtype", "float32"),
    ],
)  # fmt: skip
def test_values(program: Program, arguments: str, field: str, value: Any) -> None:
    assert settings(program, arguments)[field] == value


@pytest.mark.parametrize(
    "arguments, changed",
    [
        ("--plugin gemini --tp 4 --sp 2 --enable_sequence_parallelism", set()),
        ("--plugin 3d --sp 4", set()),
        ("--plugin 3d --tp 2 --sp 2 --enable_sequence_parallelism", {"update.tensor_parallel_size"}),
    ],
)
def test_only_parallelism_that_exists_here_is_translated(arguments, changed):
    groups = {"update.tensor_parallel_size", "update.sequence_parallel_size"}
    assert groups & set(settings(coati.PROGRAM, arguments)) == changed


def test_parallelism_inside_a_model_leaves_fewer_batches() -> None:
    arguments = "--plugin 3d --tp 2 --pp 2 --num_collect_steps 1 --experience_batch_size 6"
    assert settings(coati.PROGRAM, arguments, 16)["rollout.rollout_batch_size"] == 24


@pytest.mark.parametrize(
    "option, argument, name, expected",
    [
        ("--from-openrlhf", "--ds.overlap_comm", "update.deepspeed", {"zero_optimization": {"overlap_comm": True}}),
        ("--from-openrlhf", "--ds.zero_stage 2", "update.deepspeed", {}),
        ("--from-verl", "data.trust_remote_code=True", "models.trust_remote_code", True),
        ("--from-trl", "--trust_remote_code", "models.trust_remote_code", True),
    ],
)
def test_what_libraries_are_given_is_translated(option: str, argument: str, name: str, expected: object) -> None:
    text = translate(SYSTEMS[option], argument.split()).text
    section, _, field = name.partition(".")
    assert (yaml.safe_load(text).get(section) or {}).get(field, {}) == expected


@pytest.mark.parametrize(
    "option, argument, paragraph",
    [
        ("--from-openrlhf", "--ckpt.path x", "Missing here"),
        ("--from-openrlhf", "--logger.wandb.org x", "Missing here"),
        ("--from-openrlhf", "--use_wandb 0123456789abcdef", "Differs here"),
        ("--from-openrlhf", "--ds.value_head_prefix value", "Differs here"),
        ("--from-openrlhf", "--actor.optim muon", "Not carried over"),
        ("--from-openrlhf", "--ds.param_dtype fp16", "Differs here"),
        ("--from-openrlhf", "--ds.attn_implementation flash_attention_3", "Differs here"),
        ("--from-verl", "trainer.logger=[console,swanlab]", "Differs here"),
        ("--from-verl", "actor_rollout_ref.rollout.top_p=0.9", "Not carried over"),
        ("--from-verl", "actor_rollout_ref.model.use_remove_padding=True", "Has no meaning here"),
        ("--from-trl", "--report_to clearml", "Differs here"),
        ("--from-trl", "--trackio_space_id me/space", "Missing here"),
        ("--from-trl", "--top_entropy_quantile 0.2", "Not carried over"),
        ("--from-trl", "--log_completions", "Has no meaning here"),
    ],
)
def test_what_is_not_translated_is_listed_by_its_effect(option: str, argument: str, paragraph: str) -> None:
    text = translate(SYSTEMS[option], [argument]).text
    name = re.split("[ =]", argument)[0]
    listed = [part for part in text.split("\n#\n") if re.search(rf"^# - .*{re.escape(name)}\b", part, re.MULTILINE)]
    assert [part.startswith(f"# {paragraph}") for part in listed] == [True]


OPENRLHF_HF = "--save_hf_ckpt --save_steps 20 --max_ckpt_num 5 --save_value_network"
VERL_HF = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model] trainer.save_freq=20"


@pytest.mark.parametrize(
    "program, arguments, expected",
    [
        (openrlhf.PROGRAM, "--use_wandb key --wandb_project p", {"run.trackers": ["wandb"], "run.project": "p"}),
        (openrlhf.PROGRAM, "--use_tensorboard logs --wandb_project p", {}),
        (openrlhf.PROGRAM, "--use_tensorboard logs --use_wandb key", {"run.trackers": ["tensorboard", "wandb"]}),
        (openrlhf.PROGRAM, OPENRLHF_HF, {"export_every_steps": 20, "export_keep_last": 5, "export_critic": True}),
        (openrlhf.PROGRAM, f"{OPENRLHF_HF} --advantage_estimator rloo", {"export_every_steps": 20}),
        (coati.PROGRAM, "--use_wandb", {"run.trackers": ["wandb"]}),
        (coati.PROGRAM, "--log_dir logs --use_wandb", {"run.trackers": ["tensorboard", "wandb"]}),
        (verl.PROGRAM, "trainer.logger=[console,wandb] trainer.project_name=p", {"run.trackers": ["wandb"]}),
        (verl.PROGRAM, "trainer.logger=[console,mlflow,swanlab,tensorboard]", {"run.project": "verl_examples"}),
        (verl.PROGRAM, "trainer.logger=console", {"run.trackers": []}),
        (verl.PROGRAM, f"{VERL_HF} trainer.max_actor_ckpt_to_keep=3", {"export_every_steps": 20}),
        (verl.PROGRAM, f"{VERL_HF} trainer.max_actor_ckpt_to_keep=3", {"export_keep_last": 3}),
        (verl.PROGRAM, f"{VERL_HF} critic.checkpoint.save_contents=[model,hf_model]", {"export_critic": True}),
        (trl.PROGRAM, "--report_to wandb trackio", {"run.trackers": ["wandb", "trackio"]}),
        (trl.PROGRAM, "--report_to trackio --project p", {"run.project": "p"}),
        (trl.PROGRAM, "--report_to none", {"run.trackers": []}),
        (trl.PROGRAM, "--report_to all", {}),
        (trl.PROGRAM, "--save_only_model true --save_steps 8 --save_total_limit 3", {"export_keep_last": 3}),
    ],
)
def test_trackers_and_exports(program: Program, arguments: str, expected: dict[str, Any]) -> None:
    found = settings(program, arguments)
    wanted = {name if "." in name else f"checkpoint.{name}": value for name, value in expected.items()}
    assert {name: found.get(name) for name in wanted} == wanted
    if not expected:
        assert not [name for name in found if name in ("run.trackers", "run.project")]


def test_the_key_of_a_tracker_is_in_no_translation() -> None:
    for arguments in ("--use_wandb 0123456789abcdef", "--logger.wandb.key=0123456789abcdef"):
        text = translate(SYSTEMS["--from-openrlhf"], arguments.split()).text
        assert "wandb" in text and "0123456789abcdef" not in text


def test_settings_of_the_critic_are_omitted_without_one() -> None:
    found = settings(
        openrlhf.PROGRAM, "--advantage_estimator rloo --critic_pretrain c --lambd 0.9 --critic_learning_rate 1"
    )
    assert not [name for name in found if "critic" in name or "lambda" in name]


@pytest.mark.parametrize(
    "option, words, message",
    [
        ("--from-openrlhf", ["--colocate_all --pretrain x"], "has no --colocate_all"),
        (
            "--from-openrlhf",
            ["--pretrian x --nonsense 3 4 --bf16"],
            "--pretrian (did you mean --pretrain?), --nonsense",
        ),
        ("--from-openrlhf", ["--pretrain x ${ARGS[@]}"], "has no ${ARGS[@]}"),
        ("--from-openrlhf", ["--bf16=true"], "--bf16 takes no value, got 1"),
        ("--from-openrlhf", ["--train_batch_size many"], "--train_batch_size many: must be a whole number"),
        ("--from-openrlhf", ["--eps_clip_low_high 0.2"], "--eps_clip_low_high takes 2 values, got 1"),
        ("--from-openrlhf", ["--param_dtype fp8"], "--param_dtype fp8: has no counterpart here"),
        ("--from-openrlhf", ["--pretrain 'x"], "cannot be split into words"),
        ("--from-openrlhf", ["python -m openrlhf.cli.train_sft --pretrain x"], "expected a command line of openrlhf"),
        (
            "--from-coati",
            ["--reward_functions gsm8k_reward_fn mine"],
            "--reward_functions mine: has no counterpart here",
        ),
        ("--from-coati", ["--reward_functions"], "--reward_functions takes one value or more, got 0"),
        ("--from-coati", [], "expected a command line of train_ppo.py or train_grpo.py or train_prompts_on_ray.py"),
    ],
)
def test_what_cannot_be_read_is_an_error(option: str, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        translate(SYSTEMS[option], words)
    assert "\n" not in str(error.value)


def test_arguments_alone_find_their_program() -> None:
    ray = translate(SYSTEMS["--from-coati"], ["--pretrain", "gpt2", "--prompt_csv_url", "p.csv"]).text
    assert "train_prompts_on_ray.py" in ray and yaml.safe_load(ray)["prompts"]["path"] == "p.csv"


@each_program
def test_every_setting_of_a_table_exists_and_has_one_source(program: Program) -> None:
    feeding = {
        field: [argument for argument in program.arguments if field in argument.fields] for field in program.fields
    }
    assert set(program.rules) <= set(feeding)
    for field, arguments in feeding.items():
        default_of(field)
        assert field in program.rules or (len(arguments) == 1 and arguments[0].effect == "maps"), field
    first_names = [argument.names[0] for argument in program.arguments]
    assert len(first_names) == len(set(first_names))
    assert all(argument.fields for argument in program.arguments if argument.effect == "maps")
    assert all(argument.note for argument in program.arguments if argument.effect in ("lost", "moot"))


@each_program
def test_every_choice_is_a_value_of_the_setting(program: Program) -> None:
    for argument in program.arguments:
        for value, setting in (argument.choices or {}).items() if argument.effect == "maps" else ():
            section, _, name = argument.fields[0].rpartition(".")
            owner = Config() if not section else default_of(section)
            kind = typing.get_type_hints(type(owner))[name]
            allowed = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else (True, False)
            is_computed = argument.fields[0] in program.rules
            assert is_computed or setting in allowed, (argument.names[0], value)


def test_docs_have_every_argument_of_the_translators_and_no_other() -> None:
    text = DOCS.read_text()
    for program in PROGRAMS:
        assert table(program) in text, f"outdated, see python -m launch.translate.table ({program.title})"
    spelled = set(re.findall(r"`(--[\w.-]+)`", "".join(line for line in text.splitlines() if line.startswith("|"))))
    assert spelled == {name for program in PROGRAMS for name in program.spellings if name.startswith("--")}


def test_docs_name_fields_that_exist() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if re.match(r"\| [`(sStf]", line)]
    fields = {field for row in rows for field in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", row.split(" | ")[2])}
    assert len(fields) > 60
    for field in fields:
        assert not hasattr(default_of(field), "__dataclass_fields__"), f"{field} is a section"


@pytest.mark.parametrize(
    "heading, names",
    [
        (
            "Seed C",
            "experience_maker_holder_name_list strategy_fn model_fn env_info train_batch_size buffer_limit eps_clip "
            "value_clip dataloader_pin_memory callbacks eval_performance debug update_lora_weights",
        ),
        (
            "Seed D",
            "world_size rank local_rank master_addr master_port args streaming_config vllm_config data_prep_actor_name "
            "tokenizer from_pretrained setup_model_update_group step broadcast_to_vllm update_ref_policy save_model "
            "save_checkpoint_state",
        ),
    ],
)
def test_docs_have_every_argument_of_the_classes(heading: str, names: str) -> None:
    section = DOCS.read_text().partition(f"## {heading}")[2].partition("\n## ")[0]
    cells = " ".join(line.split(" | ")[0] for line in section.splitlines() if line.startswith("|"))
    assert set(names.split()) <= set(re.findall(r"`(\w+)`", cells))
