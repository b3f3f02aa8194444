"""Command lines with the arguments and values of the example scripts of OpenRLHF, ColossalChat, verl and TRL."""

OPENRLHF_DAPO = """
python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 \\
  --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \\
  --vllm.gpu_memory_utilization 0.6 --algo.kl.init_coef 1e-3 --algo.advantage.gamma 1.0 --algo.kl.use_loss \\
  --algo.kl.estimator k3 --algo.advantage.estimator group_norm --algo.dynamic_filtering_enable \\
  --algo.dynamic_filtering_range 0 1 --actor.eps_clip_low_high 0.2 0.27 \\
  --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --reward.remote_url /openrlhf/reward_func.py \\
  --ckpt.output_dir runs/llama3-8b-rlhf --ckpt.path runs/ckpt --ckpt.save_steps 20 --ckpt.save_hf \\
  --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 128 \\
  --rollout.n_samples_per_prompt 8 --train.max_epochs 1 --data.max_len 2048 --data.max_samples 20000 \\
  --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 \\
  --data.input_key context_messages --data.apply_chat_template --actor.gradient_checkpointing_enable \\
  --ds.packing_samples --vllm.sync_backend nccl --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep \\
  --algo.advantage.is_correction_enable
"""
OPENRLHF_PPO = """
python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 8 --reward.num_nodes 1 \\
  --reward.num_gpus_per_node 8 --critic.num_nodes 1 --critic.num_gpus_per_node 8 --actor.num_nodes 1 \\
  --actor.num_gpus_per_node 8 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all \\
  --vllm.gpu_memory_utilization 0.5 --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \\
  --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-700k --ckpt.output_dir runs/llama3-8b-rlhf --ckpt.save_hf \\
  --train.batch_size 128 --rollout.batch_size 1024 --rollout.n_samples_per_prompt 1 --train.max_epochs 1 \\
  --data.max_len 2048 --data.max_samples 100000 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 \\
  --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 \\
  --data.input_key context_messages --data.apply_chat_template --reward.normalize_enable \\
  --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.sync_backend nccl --vllm.enforce_eager \\
  --vllm.enable_sleep --ds.enable_sleep --train.dynamic_batch_enable --train.max_tokens_per_gpu 16384 \\
  --algo.advantage.is_correction_enable
"""
OPENRLHF_SLURM = r"""
#SBATCH -N 2    # nodes
JOBLOG="$(realpath .)/train-$SLURM_JOB_ID.log"
nodes_array=( $nodes )
for ((i = 1; i < worker_num; i++)); do
srun -w "$node_i" bash -c "ray start --address $ip_head --block" &>> ${JOBLOG} &
done
srun --overlap -w "$node_1" bash -c \
"ray job submit --address=http://localhost:8265 --runtime-env-json='{\"working_dir\": \"/openrlhf\"}' \
    -- python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 4 --reward.num_nodes 1 \
    --reward.num_gpus_per_node 4 --critic.num_nodes 1 --critic.num_gpus_per_node 4 --actor.num_nodes 1 \
    --actor.num_gpus_per_node 4 --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_critic_reward \
    --train.colocate_actor_ref --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture \
    --reward.model_name_or_path OpenRLHF/Llama-3-8b-rm-mixture --ckpt.output_dir runs/llama3-8b-rlhf \
    --train.micro_batch_size 8 --train.batch_size 128 --rollout.micro_batch_size 16 --rollout.batch_size 1024 \
    --data.max_samples 100000 --train.max_epochs 1 --data.max_len 2048 --ds.zero_stage 3 --ds.param_dtype bf16 \
    --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 --algo.kl.init_coef 0.01 \
    --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 --data.input_key context_messages \
    --data.apply_chat_template --reward.normalize_enable --ds.adam_offload --ds.packing_samples \
    --vllm.sync_backend nccl --actor.gradient_checkpointing_enable --logger.wandb.key {wandb_token}" &>> ${JOBLOG}
"""
OPENRLHF_REWARD_FUNCTION = """
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/openrlhf"}' \\
  -- python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 2 --critic.num_nodes 1 \\
  --critic.num_gpus_per_node 2 --actor.num_nodes 1 --actor.num_gpus_per_node 2 --vllm.num_engines 2 \\
  --vllm.tensor_parallel_size 2 --train.colocate_actor_ref \\
  --actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --reward.remote_url /openrlhf/reward_func.py \\
  --ckpt.output_dir runs/llama3-8b-rlhf --train.micro_batch_size 8 --train.batch_size 128 \\
  --rollout.micro_batch_size 16 --rollout.batch_size 1024 --data.max_samples 100000 --train.max_epochs 1 \\
  --data.max_len 2048 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \\
  --algo.kl.init_coef 0.01 --data.prompt_dataset OpenRLHF/prompt-collection-v0.1 \\
  --data.input_key context_messages --data.apply_chat_template --reward.normalize_enable --ds.packing_samples \\
  --ds.adam_offload --ds.attn_implementation flash_attention_2 --actor.gradient_checkpointing_enable \\
  --logger.wandb.key {wandb_token}
"""
OPENRLHF_PRORL = """
SCRIPT_DIR="$(dirname "$0")"
WORK_DIR=$(cd "$SCRIPT_DIR/../.." && pwd)
MODEL_PATH="deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
DATASET_PATH="OpenRLHF/dapo-math-17k"
SAVE_PATH="runs/prorl"
REWARD_FUNC_PATH="/openrlhf/reward_func.py"
python3 -m openrlhf.cli.train_ppo_ray --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 \\
  --actor.num_gpus_per_node 8 --vllm.num_engines 8 --vllm.tensor_parallel_size 1 --train.colocate_all \\
  --vllm.gpu_memory_utilization 0.75 --algo.kl.init_coef 1e-4 --algo.advantage.gamma 1.0 --algo.kl.use_loss \\
  --algo.kl.estimator k2 --algo.advantage.estimator reinforce_baseline --algo.dynamic_filtering_enable \\
  --algo.dynamic_filtering_range 0 1 --actor.eps_clip_low_high 0.2 0.27 --actor.model_name_or_path ${MODEL_PATH} \\
  --reward.remote_url ${REWARD_FUNC_PATH} --ckpt.output_dir ${SAVE_PATH} --ckpt.path "${SAVE_PATH}/ckpt" \\
  --ckpt.save_steps 5 --ckpt.save_hf --train.batch_size 1024 --rollout.batch_size 512 \\
  --rollout.n_samples_per_prompt 16 --train.dynamic_batch_enable --train.num_episodes 100 --data.max_len 9216 \\
  --rollout.max_new_tokens 8192 --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 1e-6 \\
  --data.prompt_dataset ${DATASET_PATH} --data.input_key prompt --data.label_key label \\
  --eval.dataset OpenRLHF/aime-2024 --eval.steps 5 --eval.temperature 1.0 --eval.n_samples_per_prompt 4 \\
  --data.apply_chat_template --actor.gradient_checkpointing_enable --ds.packing_samples --vllm.sync_backend nccl \\
  --vllm.enforce_eager --vllm.enable_sleep --ds.enable_sleep --algo.advantage.is_correction_enable \\
  --algo.advantage.is_correction_threshold 0.5 5.0 --algo.advantage.is_correction_type icepop \\
  --train.max_tokens_per_gpu 32768 --reward.stop_properly_penalty_coef 0.0
"""
OPENRLHF_AGENT = """
MODEL_PATH="Qwen/Qwen3-4B-Thinking-2507"
CKPT_ARGS=(
   --actor.model_name_or_path ${MODEL_PATH}
   # --reward.model_name_or_path ${REWARD_MODEL}
   --ckpt.load_enable
)
ROLLOUT_ARGS=(
   --train.agent_func_path examples/python/agent_func.py
   --data.prompt_dataset zhuzilin/dapo-math-17k
   --data.max_len 74240
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${CKPT_ARGS[@]} \\
   ${ROLLOUT_ARGS[@]}
"""
OPENRLHF_IMAGES = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3.5-2B --data.image_key images \\
  --data.max_images_per_prompt 1 --actor.freeze_visual_encoder
"""
COATI_PPO = """
PROJECT_NAME="PPO"
declare -a prompt_dataset=(
    YOUR/PROMPT/DATA/part-00000
    YOUR/PROMPT/DATA/part-00001
)
declare -a ptx_dataset=(
    YOUR/SFT/DATA/part-00000
)
SAVE_DIR="runs/${PROJECT_NAME}"
colossalai run --nproc_per_node 8 --hostfile hostfile --master_port 31312 train_ppo.py --pretrain MY/SFT \\
    --rm_pretrain MY/SFT --tokenizer_dir MY/SFT --rm_checkpoint_path MY/RM --prompt_dataset ${prompt_dataset[@]} \\
    --conversation_template_config MY/template.json --ptx_coef 0.0 --plugin "zero2" --save_interval 500 \\
    --save_path $SAVE_DIR --num_episodes 2000 --num_collect_steps 2 --num_update_steps 1 \\
    --experience_batch_size 4 --train_batch_size 4 --accumulation_steps 2 --lr 9e-6 --mixed_precision "bf16" \\
    --grad_clip 0.1\\
    --weight_decay 0.01 --warmup_steps 40 --grad_checkpoint --use_wandb
"""
COATI_GRPO = """
declare -a prompt_dataset=(
    YOUR/PROMPT/DATA/part-00000
    YOUR/PROMPT/DATA/part-00001
)
LOGDIR="runs/log"
colossalai run --nproc_per_node 8 --num_nodes 1 --hostfile ./hostfile train_grpo.py --pretrain MY/SFT \\
    --tokenizer_dir MY/SFT --prompt_dataset ${prompt_dataset[@]} --conversation_template_config MY/template.json \\
    --ptx_coef 0.0 --plugin "zero2_cpu" --reward_functions math_competition_reward_fn --save_interval 250 \\
    --save_path runs/PPO-RLVR --num_episodes 100 --num_collect_steps 8 --num_update_steps 1 \\
    --experience_batch_size 1 --train_batch_size 4 --inference_batch_size 8 --logits_forward_batch_size 2 \\
    --accumulation_steps 4 --lr 1e-6 --mixed_precision "bf16" --grad_clip 0.1\\
    --weight_decay 0.01 --kl_coef 0.01 --warmup_steps 40 --max_length 2000 --max_seq_len 1700 \\
    --log_dir $LOGDIR --use_flash_attn --grad_checkpoint
"""
VERL_GRPO = r"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet \
    data.val_files=$HOME/data/gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512 \
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0 \
    trainer.logger='["console","wandb"]' trainer.project_name='runs' trainer.experiment_name='qwen3_8b_function_rm' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
VERL_PPO = r"""
gsm8k_train_path=$HOME/data/gsm8k/train.parquet
math_train_path=$HOME/data/math/train.parquet
train_files="['$gsm8k_train_path', '$math_train_path']"
test_files="['$HOME/data/gsm8k/test.parquet']"
huggingface-cli download Qwen/Qwen2-7B-Instruct --local-dir $HOME/models/Qwen2-7B-Instruct &
wait
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_files="$train_files" \
    data.val_files="$test_files" data.train_batch_size=1024 data.max_prompt_length=1024 \
    data.max_response_length=512 data.filter_overlong_prompts=True data.truncation='error' \
    data.return_raw_chat=True actor_rollout_ref.model.path="$HOME/models/Qwen2-7B-Instruct" \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    critic.optim.lr=1e-5 critic.model.use_remove_padding=True critic.optim.lr_warmup_steps_ratio=0.05 \
    critic.model.path="$HOME/models/Qwen2-7B-Instruct" critic.model.enable_gradient_checkpointing=True \
    critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False reward_model.enable=True \
    reward_model.model.path="$HOME/models/FsfairX-LLaMA3-RM-v0.1" reward_model.use_reward_loop=True \
    reward_model.rollout.name=vllm reward_model.rollout.prompt_length=2048 reward_model.num_workers=8 \
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' \
    trainer.project_name='runs' trainer.val_before_train=False trainer.experiment_name='hybrid_rm' \
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
VERL_GSPO = r"""
set -xeuo pipefail
export GPUS_PER_NODE=8
loss_mode=gspo
MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
offload=true # moved between phases
train_batch_size=512
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length) * 2))
train_files="['/data/gsm8k/train.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.policy_loss.loss_mode=${loss_mode} data.train_files="${train_files}" \
    data.val_files="['/data/gsm8k/test.parquet']" data.shuffle=true data.prompt_key=prompt data.truncation='error' \
    data.filter_overlong_prompts=true data.train_batch_size=${train_batch_size} \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \
    actor_rollout_ref.rollout.n=16 algorithm.use_kl_in_reward=false actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.model.path="${MODEL_PATH}" actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.fsdp_config.param_offload=${offload} \
    actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.val_kwargs.n=1 \
    reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=false \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node="${GPUS_PER_NODE}" trainer.nnodes=1 trainer.total_training_steps=500 \
    trainer.default_local_dir=runs/gspo trainer.resume_mode=auto trainer.save_freq=10 trainer.test_freq=10
"""
TRL_GRPO = """
accelerate launch --num_processes 8 trl/scripts/grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
    --dataset_name trl-lib/DeepMath-103K --output_dir runs/grpo --learning_rate 1e-5 --bf16 \\
    --reward_funcs accuracy_reward think_format_reward --use_vllm --vllm_mode colocate --num_generations 8 \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --steps_per_generation 8 --beta 0.001 \\
    --max_completion_length 1024 --lr_scheduler_type cosine --eval_strategy steps --eval_steps 64 --report_to wandb
"""
TRL_YAML = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
output_dir: runs/grpo
reward_funcs:
  - accuracy_reward
num_processes: 4
accelerate_config: zero3
learning_rate: 1.0e-6
scale_rewards: none
loss_type: dr_grpo
max_completion_length: 512
gradient_checkpointing: false
"""
COATI_RAY = ("--from-coati", "python train_prompts_on_ray.py --prompt_csv_url MY/prompts.csv --pretrain MY/SFT")
"""The default command of train_prompts_on_ray.py, which leaves the reward model open."""
SCRIPTS = {
    "openrlhf dapo": ("--from-openrlhf", OPENRLHF_DAPO, 8, 1),
    "openrlhf ppo": ("--from-openrlhf", OPENRLHF_PPO, 8, 1),
    "openrlhf ppo on slurm": ("--from-openrlhf", OPENRLHF_SLURM, 8, 2),
    "openrlhf reward function": ("--from-openrlhf", OPENRLHF_REWARD_FUNCTION, 8, 1),
    "openrlhf prorl": ("--from-openrlhf", OPENRLHF_PRORL, 8, 1),
    "openrlhf asynchronous": ("--from-openrlhf", f"{OPENRLHF_PRORL.strip()} --train.async_enable", 8, 2),
    "coati ppo": ("--from-coati", COATI_PPO, 8, 1),
    "coati grpo": ("--from-coati", COATI_GRPO, 8, 1),
    "verl grpo": ("--from-verl", VERL_GRPO, 8, 1),
    "verl ppo with a reward model": ("--from-verl", VERL_PPO, 8, 1),
    "verl gspo": ("--from-verl", VERL_GSPO, 8, 1),
    "trl grpo": ("--from-trl", TRL_GRPO, 8, 1),
    "trl yaml": ("--from-trl", TRL_YAML, 4, 1),
}
"""Script -> option, text, GPUs per node and nodes."""
POLICIES = (
    "OpenRLHF/Llama-3-8b-sft-mixture",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "MY/SFT",
    "Qwen/Qwen3-8B",
    "$HOME/models/Qwen2-7B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
)
REWARD_MODELS = (
    "OpenRLHF/Llama-3-8b-rm-700k",
    "OpenRLHF/Llama-3-8b-rm-mixture",
    "MY/RM",
    "$HOME/models/FsfairX-LLaMA3-RM-v0.1",
)
OTHERS = {
    "OpenRLHF/prompt-collection-v0.1": "chats.jsonl",
    "OpenRLHF/dapo-math-17k": "labels.jsonl",
    "OpenRLHF/aime-2024": "labels.jsonl",
    "/openrlhf/reward_func.py": "reward_func.py",
    "YOUR/PROMPT/DATA/part-00000": "messages.jsonl",
    "MY/template.json": "template.json",
    "MY/prompts.csv": "prompts.csv",
    "$HOME/data/gsm8k/train.parquet": "gsm8k.parquet",
    "$HOME/data/gsm8k/test.parquet": "gsm8k.parquet",
    "$HOME/data/math/train.parquet": "maths.parquet",
    "/data/gsm8k/train.parquet": "gsm8k.parquet",
    "/data/gsm8k/test.parquet": "gsm8k.parquet",
    "trl-lib/DeepMath-103K": "solutions.jsonl",
}
"""Name in a script -> the file of the folder `stand_ins` that stands for it."""
