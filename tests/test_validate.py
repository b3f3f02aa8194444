"""Every rule that needs no file: the values that it refuses, its sentence, and the boundaries that it allows."""

from typing import Any

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.validate import validate
from tests.conftest import VALID_CONFIG, change

POSITIVE = [
    "run.num_steps",
    "prompts.max_prompt_tokens",
    "prompts.num_generated",
    "prompts.max_eval_samples",
    "rollout.tensor_parallel_size",
    "rollout.rollout_batch_size",
    "rollout.group_size",
    "rollout.max_response_tokens",
    "rollout.max_num_seqs",
    "reward.timeout_s",
    "reward.num_workers",
    "update.num_epochs",
    "update.mini_batch_size",
    "update.micro_batch_tokens",
    "sync.bucket_bytes",
    "checkpoint.keep_last",
    "run.eval_samples",
    "reward.remote_timeout_s",
    "reward.clip",
    "update.value_clip",
    "models.lora.alpha",
    "rollout.kv_cache_memory_bytes",
    "rollout.max_logprob_gap",
    "update.actor.eps",
    "advantage.length_adaptive_alpha",
    "advantage.kl_target",
    "advantage.kl_horizon",
    "update.sequence_parallel_size",
    "update.tensor_parallel_size",
    "ptx.batch_size",
]
NOT_NEGATIVE = [
    "run.eval_every_steps",
    "reward.truncation_penalty",
    "advantage.kl_coef",
    "update.clip_high",
    "update.actor.weight_decay",
    "update.actor.max_grad_norm",
    "update.critic.warmup_steps",
    "sync.num_verified",
    "checkpoint.every_steps",
    "reward.overlong_buffer",
    "reward.overlong_penalty",
    "reward.remote_retries",
    "models.reference_sync_steps",
    "models.lora.rank",
    "rollout.dynamic_filtering_max_retries",
    "update.critic_warmup_steps",
]
RULES: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, f"{name} = {value}: must be greater than 0") for name in POSITIVE for value in (0, -3)],
    *[({"rollout.temperature": x}, f"rollout.temperature = {x}: must be at least 0.01") for x in (0, 0.0099, -3)],
    ({"rollout.temperature": float("nan")}, "rollout.temperature = nan: must be finite"),
    (
        {"run.profile_steps": (4, 3)},
        "run.profile_steps = [4, 3]: must be a first and a last step, which is not before it",
    ),
    ({"run.profile_steps": (0, 3)}, "run.profile_steps = [0, 3]: must be greater than 0"),
    *[({"update.dual_clip": x}, f"update.dual_clip = {x}: must be greater than 1") for x in (0, -3, 1.0)],
    *[({"models.ema_decay": x}, f"models.ema_decay = {x}: must lie in (0, 1)") for x in (0.0, 1.0, 1.5)],
    *[({"ptx.max_tokens": x}, f"ptx.max_tokens = {x}: must be at least 2") for x in (1, 0, -3)],
    *[({"ptx.coef": x}, f"ptx.coef = {x}: must lie in (0, 1)") for x in (0.0, 1.0)],
    ({"rollout.gpu_memory_utilization": 5.0}, "rollout.gpu_memory_utilization = 5.0: must lie in (0, 1]"),
    ({"run.stop_at_accuracy": 90.0}, "run.stop_at_accuracy = 90.0: must lie in (0, 1]"),
    ({"run.seed": -1}, "run.seed = -1: must not be negative"),
    ({"run.seed": 2**32}, "run.seed = 4294967296: must be at most 4294967295"),
    ({"update.actor.lr": 5.0}, "update.actor.lr = 5.0: must lie in [0, 1]"),
    ({"update.actor.lr": float("inf")}, "update.actor.lr = inf: must be finite"),
    ({"update.actor.betas": (0.9, 1.0)}, "update.actor.betas = [0.9, 1.0]: must lie in [0, 1)"),
    ({"reward.weights": [float("nan")]}, "reward.weights = [nan]: must be finite"),
    ({"models.critic": ""}, "models.critic is empty: give a value, or null"),
    ({"prompts.prompt_column": " "}, "prompts.prompt_column is empty: give a value"),
    (
        {"models.lora.target_modules": []},
        "models.lora.target_modules is an empty list: give at least one item, or null",
    ),
    (
        {"reward.functions": ["math", "math"]},
        "reward.functions = [math, math]: holds math twice",
    ),
    ({"rollout.stop_token_ids": [7, 8, 7]}, "rollout.stop_token_ids = [7, 8, 7]: holds 7 twice"),
    (
        {"models.actor": "a\0b"},
        "models.actor = a\\u0000b: must hold no line end and no control character",
    ),
    *[
        ({"run.name": name}, f"run.name = {name}: must name a folder in run.dir, so not hold a / or be . or ..")
        for name in (".", "..", "a/b", "/", "~/x", "../x")
    ],
    ({"run.name": ""}, "run.name is empty: give a value"),
    ({"run.name": "\ud83d"}, "run.name = \\ud83d: must hold no line end and no control character"),
    ({"run.name": "e" * 256}, "run.name has 256 bytes: must have at most 255"),
    *[({name: -1}, f"{name} = -1: must not be negative") for name in NOT_NEGATIVE],
    (
        {"checkpoint.phase_log": True, "checkpoint.every_steps": 0},
        "checkpoint.phase_log = true: needs checkpoint.every_steps > 0, or the log would grow without end",
    ),
    ({"models.actor": ""}, "models.actor is empty: give a Hugging Face folder"),
    (
        {"prompts.path": ""},
        "prompts.path is empty: give a file, a dataset folder, a name on the hub or reasoning_gym:<task>",
    ),
    (
        {"reward.functions": []},
        "models.reward is null, reward.functions and reward.remote_urls are empty: one must score the responses, or "
        "environment.name",
    ),
    ({"reward.weights": [1.0, 2.0]}, "reward.weights has 2 values, reward.functions 1: one each"),
    ({"reward.weights": []}, "reward.weights has 0 values, reward.functions 1: one each"),
    (
        {"reward.gates": ["think_format"]},
        "reward.gates = ['think_format']: ['think_format'] must be a function of reward.functions",
    ),
    *[
        ({"advantage.estimator": e}, f"rollout.group_size = 1: advantage.estimator = {e} needs 2 or more")
        for e in ("grpo", "rloo", "dr_grpo", "opo", "reinforce_pp_baseline")
    ],
    (
        {"advantage.estimator": "ppo"},
        "advantage.estimator = ppo: must be one of gae, grpo, rloo, dr_grpo, opo, reinforce_pp, reinforce_pp_baseline, "
        "remax",
    ),
    ({"update.policy_loss": "ppo"}, "update.policy_loss = ppo: must be one of clip, gspo, cispo, pg"),
    *[
        (
            {"advantage.estimator": "reinforce_pp", f"advantage.{name}": 0.5},
            f"advantage.{name} = 0.5: needs advantage.estimator = gae",
        )
        for name in ("critic_lambda", "length_adaptive_alpha")
    ],
    (
        {"advantage.estimator": "reinforce_pp", "advantage.credit": "turn"},
        "advantage.credit = turn: needs advantage.estimator = grpo or rloo or dr_grpo or opo or reinforce_pp_baseline",
    ),
    *[
        (
            {"update.dual_clip": 3.0, "update.policy_loss": loss},
            f"update.dual_clip = 3.0: needs update.policy_loss = clip or gspo, not {loss}",
        )
        for loss in ("cispo", "pg")
    ],
    (
        {"advantage.kl_unbiased": True},
        "advantage.kl_unbiased = true: needs advantage.kl_in = loss; a KL in the reward has no gradient of its own",
    ),
    (
        {"advantage.kl_target": 1.0, "advantage.kl_coef": 0.1, "advantage.kl_horizon": 25},
        "advantage.kl_horizon = 25: must be above a fifth of the 128 responses of a step, or one step could take "
        "kl_coef to 0",
    ),
    ({"advantage.kl_target": 1.0}, "advantage.kl_target = 1.0: needs advantage.kl_coef > 0 to start from"),
    (
        {"models.reference_sync_steps": 4},
        "models.reference_sync_steps = 4: needs a reference of its own; set advantage.kl_coef above 0 and, with "
        "models.lora, models.reference",
    ),
    ({"models.reference_mixup_alpha": 0.0}, "models.reference_mixup_alpha = 0.0: must lie in (0, 1]"),
    ({"rollout.stop_strings": ["a", ""]}, "rollout.stop_strings holds an empty text: remove it"),
    (
        {"rollout.dynamic_filtering_reward_range": (1.0, 1.0), "rollout.group_size": 2},
        "rollout.dynamic_filtering_reward_range = [1.0, 1.0]: the first must be below the second",
    ),
    (
        {"rollout.dynamic_filtering_reward_range": (0.0, 1.0)},
        "rollout.group_size = 1: rollout.dynamic_filtering_reward_range needs 2 or more",
    ),
    (
        {"update.correction_low": 1.5},
        "update.correction_low = 1.5: must lie in [0, 1]",
    ),
    (
        {"update.old_logprobs": "rollout", "update.correction": "tis"},
        "update.correction = tis: update.old_logprobs = rollout leaves no ratio between the engines",
    ),
    (
        {"update.zero_stage": 0, "update.critic.kind": "cpu_adam"},
        "update.critic.kind = cpu_adam: needs update.zero_stage 1 to 3",
    ),
    (
        {"ptx.path": "t", "ptx.max_tokens": 8193},
        "ptx.max_tokens = 8193: must not exceed update.micro_batch_tokens = 8192",
    ),
    (
        {"reward.overlong_buffer": 257},
        "reward.overlong_buffer = 257: must not exceed rollout.max_response_tokens = 256",
    ),
    *[
        ({f"advantage.{name}": value}, f"advantage.{name} = {value}: must lie in [0, 1]")
        for name in ("gamma", "gae_lambda")
        for value in (-0.1, 1.01)
    ],
    (
        {"update.mini_batch_size": 48, "rollout.rollout_batch_size": 10, "rollout.group_size": 4},
        "update.mini_batch_size = 48: must divide the 40 responses of a step "
        "(rollout.rollout_batch_size 10 x rollout.group_size 4)",
    ),
    (
        {"update.micro_batch_tokens": 767},
        "update.micro_batch_tokens = 767: must hold one sequence, prompts.max_prompt_tokens 512 + "
        "rollout.max_response_tokens 256 = 768",
    ),
    (
        {"rollout.tensor_parallel_size": 2, "rollout.engine": "hf"},
        "rollout.tensor_parallel_size = 2: needs rollout.engine = vllm, not hf",
    ),
    (
        {"rollout.routing_replay": True, "update.sequence_parallel_size": 2},
        "rollout.routing_replay = true: needs update.sequence_parallel_size = 1"
        ", not 2, with which no rank routes whole sequences",
    ),
    (
        {"update.router_aux_loss_coef": 0.5, "update.sequence_parallel_size": 2},
        "update.router_aux_loss_coef = 0.5: needs update.sequence_parallel_size = 1"
        ", not 2, with which no rank routes whole sequences",
    ),
    (
        {"update.tensor_parallel_size": 2, "update.zero_stage": 3},
        "update.tensor_parallel_size = 2: needs update.zero_stage 0 to 2, not 3",
    ),
    (
        {"update.tensor_parallel_size": 2, "update.sequence_parallel_size": 4},
        "update.tensor_parallel_size = 2: needs update.sequence_parallel_size = 1, not 4",
    ),
    (
        {"update.tensor_parallel_size": 2, "models.lora.rank": 8},
        "update.tensor_parallel_size = 2: needs models.lora.rank = 0, not 8; DeepSpeed shards no layer with adapters",
    ),
    ({"update.clip_low": -0.1}, "update.clip_low = -0.1: must lie in [0, 1]"),
    (
        {"reward.remote_urls": ["http://h/score?token=t1"]},
        "reward.remote_urls holds a URL with the parameter token, which config.yaml, messages and trackers would show: "
        "put it into ~/.netrc, or name an environment variable in reward.remote_headers",
    ),
    (
        {"prompts.path": "https://me:pw@h/rows.jsonl"},
        "prompts.path holds a URL with a user name or password, which config.yaml, messages and trackers would show: "
        "give a URL without it, or the path of a file",
    ),
    ({"update.clip_low": 1.0}, "update.clip_low = 1.0: must be below 1 unless update.policy_loss = cispo"),
    (
        {"run.eval_temperature": 0.005},
        "run.eval_temperature = 0.005: must be 0, which is greedy, or at least 0.01",
    ),
    (
        {"run.eval_samples": 4, "run.eval_temperature": 0.0},
        "run.eval_samples = 4: run.eval_temperature = 0 gives equal responses to a prompt; set one of them otherwise",
    ),
    (
        {"run.eval_top_p": 0.9},
        "run.eval_top_p = 0.9: has no effect on greedy decoding (run.eval_temperature = null); set "
        "run.eval_temperature",
    ),
    (
        {"run.eval_samples": 4, "run.eval_pass_at": [1, 8]},
        "run.eval_pass_at = [1, 8]: pass@[8] needs as many responses per prompt, and run.eval_samples = 4",
    ),
    (
        {"run.eval_target": "x", "prompts.eval_path": "a"},
        "run.eval_target = x: must be a name in prompts.eval_path, which has no names",
    ),
    (
        {"run.eval_target": "x", "prompts.eval_path": {"y": "a", "z": "b"}},
        "run.eval_target = x: must be a name in prompts.eval_path, which has y, z",
    ),
    (
        {"reward.by_source": {"mine": "math"}},
        "reward.by_source has no effect: add by_source to reward.functions, or remove it",
    ),
    (
        {"reward.by_source": {"mine": [3]}, "reward.functions": ["by_source"]},
        "reward.by_source: mine = [3]: must be a rule function, or a list of them",
    ),
    (
        {"update.zero_stage": 0, "memory.swap": "deepspeed"},
        "memory.swap = deepspeed: DeepSpeed cannot offload update.zero_stage = 0; use 1 to 3, or swap = vmm or off",
    ),
]


@pytest.mark.parametrize("changes, sentence", RULES, ids=lambda x: str(x)[:40])
def test_a_broken_rule_is_named_in_one_sentence(changes, sentence):
    with pytest.raises(ConfigError) as error:
        validate(change(VALID_CONFIG, changes))
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward.functions": [], "models.reward": "r"},
        {"reward.weights": [0.0]},
        {"advantage.estimator": "grpo", "rollout.group_size": 2},
        {"advantage.gamma": 0.0, "advantage.gae_lambda": 1.0},
        {"update.micro_batch_tokens": 768},
        {"update.clip_low": 0.0},
        {"update.clip_low": 1.0, "update.policy_loss": "cispo"},
        {"update.dual_clip": 1.5},
        {"update.dual_clip": 1.5, "update.policy_loss": "gspo"},
        {"advantage.critic_lambda": 1.0, "advantage.length_adaptive_alpha": 0.05},
        {"advantage.estimator": "reinforce_pp"},
        {"advantage.estimator": "remax"},
        {"advantage.kl_target": 1.0, "advantage.kl_coef": 0.1, "advantage.kl_horizon": 26},
        {"advantage.kl_unbiased": True, "advantage.kl_in": "loss"},
        {"models.reference_sync_steps": 4, "models.reference_mixup_alpha": 1.0, "advantage.kl_coef": 0.1},
        {"rollout.dynamic_filtering_reward_range": (0.0, 1.0), "rollout.group_size": 2},
        {"update.correction": "tis", "update.correction_low": 0.0, "update.correction_high": 1.0},
        {"reward.overlong_buffer": 256},
        {"ptx.path": "t", "ptx.coef": 0.5, "ptx.max_tokens": 8192},
        {"update.zero_stage": 0, "memory.swap": "off"},
        {"update.tensor_parallel_size": 1, "update.zero_stage": 3, "update.sequence_parallel_size": 4},
        {"rollout.rollout_batch_size": 16, "rollout.group_size": 8},
        {"run.eval_temperature": 0.01, "run.eval_top_p": 0.5},
        {"run.eval_samples": 4, "run.eval_pass_at": [1, 4], "run.eval_top_p": 0.9},
        {"run.eval_target": "y", "prompts.eval_path": {"y": "a", "z": "b"}},
        {"reward.by_source": {"mine": ["math", "think_format"]}, "run.eval_function": "by_source"},
    ],
    ids=str,
)
def test_values_on_the_boundary_are_allowed(changes):
    config = change(VALID_CONFIG, changes)
    assert validate(config) is config
