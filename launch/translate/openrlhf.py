"""OpenRLHF's `openrlhf.cli.train_ppo_ray`: the dotted arguments of 2026 and the older flat ones.

Read in version 0.11.2 and at commit 3c3be623 (August 2026); flat spellings and removed arguments at c1ba971c (April
2026), 066228f9 (October 2025) and bfa85f6f (February 2025). If a default changed, the newest one counts.
"""

from .openrlhf_rules import RULES, estimator, has_kl, is_corrected, is_old, num_gpus
from .openrlhf_run import DATA, MODELS, OUTPUT, PLACEMENT, SAMPLING
from .program import Program, fixed, lost, maps, missing, moot
from .reading import count, finite

GROUP = ("rloo", "group_norm", "dr_grpo", "reinforce_baseline")
SCHEDULES = {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
TOKENS = "forwards are packed by update.micro_batch_tokens, and the result does not depend on it"
MUON = "Muon is missing here: AdamW trains all weights, with the arguments of adam"

REWARD = (
    maps(
        "reward.normalize_enable normalize_reward",
        bool,
        False,
        "reward.normalize",
        note="OpenRLHF uses mean and std of the reward model's config.json and does not normalise remote rewards; here "
        "both are running statistics of all rewards",
    ),
    maps(
        "reward.clip_range reward_clip_range",
        finite,
        [-10.0, 10.0],
        "reward.clip",
        num_values=2,
        note="the bounds are symmetric here, so that the wider one counts",
        when=lambda c: c["reward.clip_range"][0] != -c["reward.clip_range"][1],
    ),
    fixed(
        "reward clip",
        "OpenRLHF clips after it subtracts the group's baseline, here rewards are clipped before",
        when=lambda c: estimator(c) in GROUP,
    ),
    maps("reward.overlong_buffer_len overlong_buffer_len", finite, None, "reward.overlong_buffer"),
    maps("reward.overlong_penalty_factor overlong_penalty_factor", finite, 1.0, "reward.overlong_penalty"),
    lost(
        "reward.stop_properly_penalty_coef stop_properly_penalty_coef",
        finite,
        None,
        "OpenRLHF scales or replaces a truncated response's reward; reward.truncation_penalty subtracts a constant",
    ),
)

ADVANTAGE = (
    maps(
        "algo.advantage.estimator advantage_estimator",
        str,
        "gae",
        "advantage.estimator",
        choices={
            "gae": "gae",
            "reinforce": "reinforce_pp",
            "rloo": "rloo",
            "reinforce_baseline": "reinforce_pp_baseline",
            "group_norm": "grpo",
            "dr_grpo": "dr_grpo",
        },
    ),
    fixed(
        "group std",
        "OpenRLHF adds 1e-9 to the group's standard deviation, here it is 1e-6",
        when=lambda c: estimator(c) == "group_norm",
    ),
    fixed(
        "dr_grpo loss",
        "OpenRLHF omits the std but keeps the token mean, as here; Dr. GRPO's constant loss normaliser is "
        "update.aggregation = sequence_sum_constant",
        when=lambda c: estimator(c) == "dr_grpo",
    ),
    fixed(
        "group KL",
        "OpenRLHF subtracts the KL of all later tokens from a token's advantage, here that token's KL alone",
        when=lambda c: estimator(c) in GROUP and has_kl(c) and not c["algo.kl.use_loss"],
    ),
    maps("algo.advantage.gamma gamma", finite, 1.0, "advantage.gamma"),
    maps(
        "algo.advantage.lambd lambd",
        finite,
        1.0,
        "advantage.gae_lambda",
        note="the default was 0.95 until early 2025",
        when=lambda c: is_old(c, "algo.advantage.lambd"),
    ),
    maps(
        "algo.advantage.no_std_norm no_advantage_std_norm",
        bool,
        False,
        "advantage.whiten",
        choices={False: True, True: False},
        note="OpenRLHF still subtracts the mean, here advantages are unchanged",
    ),
    maps("algo.kl.init_coef init_kl_coef", finite, 0.01, "advantage.kl_coef"),
    fixed(
        "KL bound",
        "OpenRLHF clips every KL estimate to [-10, 10]; here only k3's exponent is bounded, by 20",
        when=has_kl,
    ),
    maps("algo.kl.target kl_target", finite, None, "advantage.kl_target"),
    maps("algo.kl.horizon kl_horizon", int, 10_000, "advantage.kl_horizon"),
    maps("algo.kl.use_loss use_kl_loss", bool, False, "advantage.kl_in", choices={False: "reward", True: "loss"}),
    maps(
        "algo.kl.unbiased_gradient",
        bool,
        False,
        "advantage.kl_unbiased",
        note="OpenRLHF keeps the estimate as it is and corrects its gradient; here the estimate is weighted by the "
        "ratio, too, and both have the gradient of the KL",
    ),
    maps(
        "algo.kl.estimator kl_estimator",
        str,
        "k1",
        "advantage.kl_estimator",
        choices={k: k for k in ("k1", "k2", "k3")},
    ),
    maps("use_kl_estimator_k3", bool, False, "advantage.kl_estimator"),
)

UPDATE = (
    maps("train.batch_size train_batch_size", count, 128, "update.mini_batch_size"),
    maps("train.max_epochs max_epochs", count, 1, "update.num_epochs"),
    maps(
        "train.micro_batch_size micro_train_batch_size",
        count,
        1,
        "update.micro_batch_tokens",
        note=f"counted in tokens here, this many sequences of full length; {TOKENS}",
        when=lambda c: "train.micro_batch_size" in c.given and not c["train.dynamic_batch_enable"],
    ),
    maps("train.dynamic_batch_enable use_dynamic_batch", bool, False, "update.micro_batch_tokens"),
    maps("train.max_tokens_per_gpu train_max_tokens_per_gpu", int, 16192, "update.micro_batch_tokens"),
    moot("ds.packing_samples packing_samples", bool, "sequences are always packed"),
    maps(
        "actor.policy_loss_type policy_loss_type",
        str,
        "ppo",
        "update.policy_loss",
        "update.aggregation",
        choices={"ppo": "clip", "gspo": "gspo"},
        note="in OpenRLHF the policy loss alone is a mean over sequences; here value loss and KL are, too, and a "
        "token's gradient flows through its own log-prob",
        when=lambda c: c["actor.policy_loss_type"] == "gspo",
    ),
    maps(
        "actor.loss_agg_mode",
        str,
        "token-mean",
        "update.aggregation",
        choices={"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
        note="in OpenRLHF value loss and KL keep the mean over tokens; here all losses are averaged over sequences",
        when=lambda c: c["actor.loss_agg_mode"] != "token-mean",
    ),
    maps("actor.eps_clip eps_clip", finite, 0.2, "update.clip_low", "update.clip_high"),
    maps(
        "actor.eps_clip_low_high eps_clip_low_high", finite, None, "update.clip_low", "update.clip_high", num_values=2
    ),
    maps("actor.dual_clip dual_clip", finite, None, "update.dual_clip"),
    maps(
        "critic.value_clip value_clip",
        finite,
        0.5,
        "update.value_clip",
        note="the default was 0.2 until May 2025",
        when=lambda c: is_old(c, "critic.value_clip"),
    ),
    maps("actor.entropy_coef entropy_loss_coef", finite, None, "update.entropy_coef"),
    maps("critic.freezing_steps freezing_actor_steps", int, -1, "update.critic_warmup_steps"),
    maps(
        "algo.advantage.is_correction_level",
        str,
        "off",
        "update.correction",
        choices={"off": "none", "token": "tis", "seq": "sequence_mask"},
        note="OpenRLHF then takes gspo's ratio to the engine's log-probs; here gspo's loss is weighted as clip's",
        when=lambda c: is_corrected(c) and c["actor.policy_loss_type"] == "gspo",
    ),
    maps(
        "algo.advantage.is_correction_mode",
        str,
        "mask",
        "update.correction",
        choices={"mask": "icepop", "clip": "tis"},
    ),
    maps(
        "algo.advantage.is_correction_gating",
        str,
        "ratio",
        "update.correction",
        choices={"ratio": "icepop"},
    ),
    maps("algo.advantage.is_correction_enable enable_vllm_is_correction", bool, False, "update.correction"),
    maps(
        "algo.advantage.is_correction_type vllm_is_correction_type",
        str,
        "tis",
        "update.correction",
        choices={"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"},
    ),
    maps(
        "algo.advantage.is_correction_threshold vllm_is_truncated_threshold",
        finite,
        [0.5, 5.0],
        "update.correction_low",
        "update.correction_high",
        num_values=None,
    ),
    maps(
        "ds.zero_stage zero_stage",
        int,
        2,
        "update.zero_stage",
        "memory.swap",
        choices={0: 1, 1: 1, 2: 2, 3: 3},
        note="stage 0 keeps no float32 weights beside bfloat16; stage 1 gives the same result with less memory",
        when=lambda c: c["ds.zero_stage"] == 0,
    ),
    maps("ds.adam_offload adam_offload", bool, False, "update.actor.kind", "update.critic.kind"),
)

OPTIMIZERS = tuple(
    argument
    for role, lr in (("actor", 1e-6), ("critic", 9e-6))
    for argument in (
        lost(f"{role}.optim", str, "adam", MUON, choices=("adam", "muon")),
        *(
            lost(f"{role}.muon.{name}", parse, default, MUON)
            for name, parse, default in (
                ("lr", finite, 0.02),
                ("momentum", finite, 0.95),
                ("ns_steps", int, 5),
                ("no_nesterov", bool, False),
            )
        ),
        moot(f"{role}.muon.nesterov", bool, "it is the default of Muon, which is missing here"),
        maps(f"{role}.adam.lr {role}_learning_rate", finite, lr, f"update.{role}.lr"),
        maps(f"{role}.adam.betas adam_betas", finite, [0.9, 0.95], f"update.{role}.betas", num_values=2),
        maps(f"{role}.adam.eps", finite, 1e-8, f"update.{role}.eps"),
        maps(f"{role}.adam.weight_decay l2", finite, 0.0, f"update.{role}.weight_decay"),
        maps(
            f"{role}.lr_scheduler lr_scheduler",
            str,
            "cosine_with_min_lr",
            f"update.{role}.schedule",
            f"update.{role}.min_lr_ratio",
            choices=SCHEDULES,
        ),
        maps(f"{role}.lr_warmup_ratio lr_warmup_ratio", finite, 0.03, f"update.{role}.warmup_steps"),
        maps(f"{role}.min_lr_ratio", finite, 0.1, f"update.{role}.min_lr_ratio"),
        maps(f"{role}.max_norm max_norm", finite, 1.0, f"update.{role}.max_grad_norm"),
    )
)

DEEPSPEED = (
    missing("ds.deepcompile deepcompile", bool, False, "training is not compiled as a whole"),
    missing("ds.zpg zpg", int, 1, "ZeRO++'s shards within a node are missing; they are faster with several nodes"),
    maps(
        "ds.use_liger_kernel use_liger_kernel",
        bool,
        False,
        "models.fused_layers",
        choices={False: "auto", True: "liger"},
    ),
    lost(
        "ds.grad_accum_dtype grad_accum_dtype",
        str,
        None,
        "gradients accumulate in float32",
        when=lambda c: c["ds.grad_accum_dtype"] not in (None, "fp32"),
    ),
    maps("ds.overlap_comm overlap_comm", bool, False, "update.deepspeed"),
    maps("disable_trace_cache", bool, False, "update.deepspeed"),
    maps("ds.tensor_parallel_size ds_tensor_parallel_size", count, 1, "update.tensor_parallel_size"),
    maps(
        "ds.ring_attn_size ring_attn_size",
        count,
        1,
        "update.sequence_parallel_size",
        "update.micro_batch_tokens",
        note="GPUs of a sequence exchange heads here, keys and values in OpenRLHF",
    ),
    moot("ds.ring_attn_head_stride ring_head_stride", int, "GPUs of a sequence exchange heads, without a ring"),
)

PROGRAM = Program(
    title="OpenRLHF's train_ppo_ray",
    names=("openrlhf.cli.train_ppo_ray", "train_ppo_ray.py"),
    arguments=PLACEMENT + MODELS + DATA + SAMPLING + OUTPUT + REWARD + ADVANTAGE + UPDATE + OPTIMIZERS + DEEPSPEED,
    rules=RULES,
    num_gpus=num_gpus,
)
