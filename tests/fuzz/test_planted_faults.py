"""A fault that is planted into one function of the product is found by the cases of the tests."""

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from hybrid_rl import batch
from hybrid_rl.algorithms import advantage, correction, kl, loss, policy_loss
from hybrid_rl.checkpoints import manifest
from hybrid_rl.data import prompts
from hybrid_rl.models import tokenizer, weight_match
from hybrid_rl.rewards import rules, scoring
from hybrid_rl.steps import advantages as steps_advantages
from hybrid_rl.steps import rollout
from launch import yaml_nodes
from tests.fuzz.cases import failures, run_case
from tests.fuzz.subjects import SUBJECTS

Function = Callable[..., Any]


def plant(
    patch: pytest.MonkeyPatch, module: ModuleType, name: str, make_faulty: Callable[[Function], Function]
) -> None:
    """Replace a function in every module of the product and of the fuzz tests that has imported it."""
    original = getattr(module, name)
    faulty = make_faulty(original)
    for found in list(sys.modules.values()):
        is_ours = getattr(found, "__name__", "").split(".")[0] in ("hybrid_rl", "hybrid_rl_kernels", "launch", "tests")
        if is_ours and getattr(found, name, None) is original:
            patch.setattr(found, name, faulty)


def bos_twice(encode_prompt: Function) -> Function:
    """A BOS that template and tokenizer both add stays twice."""

    def faulty(tokenizer: Any, *arguments: Any, **named: Any) -> Any:
        prompt = encode_prompt(tokenizer, *arguments, **named)
        bos = tokenizer.bos_token_id
        ids = [bos, *prompt.token_ids] if bos is not None and prompt.token_ids[:1] == [bos] else prompt.token_ids
        return dataclasses.replace(prompt, token_ids=ids)

    return faulty


def with_eos(encode_prompt: Function) -> Function:
    """The EOS of a tokenizer that appends one stays at the end of a prompt."""

    def faulty(tokenizer: Any, *arguments: Any, **named: Any) -> Any:
        prompt = encode_prompt(tokenizer, *arguments, **named)
        eos = tokenizer.eos_token_id
        ends = eos is not None and tokenizer("a")["input_ids"][-1] == eos
        return dataclasses.replace(prompt, token_ids=[*prompt.token_ids, *([eos] if ends else [])])

    return faulty


def answers_off_by_one_row(load: Function) -> Function:
    """A row has the answer of the row before it."""

    def faulty(*arguments: Any, **named: Any) -> Any:
        rows, name = load(*arguments, **named)
        return [{**row, "answer": rows[number - 1]["answer"]} for number, row in enumerate(rows)], name

    return faulty


def without_special_tokens(judged_text: Function) -> Function:
    """Tags that are special tokens are not judged."""

    def faulty(prompt: Any, generation: Any, tokenizer: Any, stop_token_ids: Any) -> str:
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        kept = [i for i in generation.token_ids if i not in special]
        return judged_text(prompt, dataclasses.replace(generation, token_ids=kept), tokenizer, stop_token_ids)

    return faulty


def without_prefill(judged_text: Function) -> Function:
    """The text that the template writes in the model's name is not judged."""

    def faulty(prompt: Any, *arguments: Any) -> str:
        return judged_text(prompt, *arguments).removeprefix(prompt.prefill)

    return faulty


def overlong_kept(load_prompts: Function) -> Function:
    """Prompts longer than the limit are kept."""

    def faulty(path: str, tokenizer: Any, config: Any, **named: Any) -> Any:
        return load_prompts(path, tokenizer, dataclasses.replace(config, max_prompt_tokens=10**6), **named)

    return faulty


def swapped_kl(kl_estimate: Function) -> Function:
    """The KL has the other sign."""
    return lambda logprobs, reference, estimator: kl_estimate(reference, logprobs, estimator)


def values_one_token_late(gae_with_moments: Function) -> Function:
    """GAE takes the value of the next token as that of the present one."""

    def faulty(values: Any, mask: Any, **named: Any) -> Any:
        return gae_with_moments(None if values is None else values.roll(-1, dims=1), mask, **named)

    return faulty


def without_turn_discounts(gae_with_moments: Function) -> Function:
    """The discount from turn to turn is left out."""
    return lambda *arguments, **named: gae_with_moments(*arguments, **{**named, "turn_gamma": 1.0})


def paid_twice(final_rewards: Function) -> Function:
    """Rewards of turns are paid at their turns and again at the end of the response."""
    return lambda batch: batch.rewards


def trained_on_observations(mark_turns: Function) -> Function:
    """The tokens of observations count as sampled."""
    return lambda rollouts, mask: mark_turns(rollouts, mask.clone())


def mean_per_sequence(token_weights: Function) -> Function:
    """A mean over tokens is taken as a mean of the sequences' means."""
    return lambda mask, mode, **named: token_weights(mask, "sequence_mean" if mode == "token_mean" else mode, **named)


def no_weights(importance_weights: Function) -> Function:
    """The weights of the correction are left out."""

    def faulty(*arguments: Any, **named: Any) -> Any:
        weights, is_out = importance_weights(*arguments, **named)
        return torch.ones_like(weights), is_out

    return faulty


def one_bound(policy_loss: Function) -> Function:
    """The ratio is clipped by the lower range on both sides."""
    return lambda *arguments, **named: policy_loss(*arguments, **{**named, "clip_high": named["clip_low"]})


def accepts(check: Function) -> Function:
    """Nothing is found wrong."""
    return lambda *arguments, **named: None


def finds_nothing(wrong_keys: Function) -> Function:
    """No key counts as wrong."""
    return lambda *arguments, **named: iter(())


def matches(check_match: Function) -> Function:
    """Every folder holds its model."""
    return lambda *arguments, **named: weight_match.Difference(new=[], unused=[])


def compared_as_text(ends_in: Function) -> Function:
    """Numbers are equal only in the same notation."""

    def faulty(text: str, gold: str) -> float:
        return float(text.rstrip(".").endswith(gold))

    return faulty


def of_generation_config_alone(named_eos: Function) -> Function:
    """The EOS ids that config.json names are left out."""
    return lambda path, file_name: [] if file_name == "config.json" else named_eos(path, file_name)


def without_penalties(penalize: Function) -> Function:
    """Penalties are left out."""
    return lambda scores, *arguments, **named: scores


FAULTS: dict[str, tuple[ModuleType, str, Callable[[Function], Function], str]] = {
    "BOS twice in a text": (prompts, "encode_prompt", bos_twice, "text prompts"),
    "BOS twice in a chat": (prompts, "encode_prompt", bos_twice, "chat prompts"),
    "EOS at the end of a prompt": (prompts, "encode_prompt", with_eos, "text prompts"),
    "answers off by one row": (prompts, "_load", answers_off_by_one_row, "data sets"),
    "overlong prompts kept": (prompts, "load_prompts", overlong_kept, "data sets"),
    "special tokens not judged": (rollout, "judged_text", without_special_tokens, "judged text"),
    "prefill not judged": (rollout, "judged_text", without_prefill, "judged text"),
    "numbers compared as text": (rules, "_ends_in", compared_as_text, "numbers"),
    "penalties left out": (scoring, "penalize", without_penalties, "rewards"),
    "KL with the other sign": (kl, "kl_estimate", swapped_kl, "kl"),
    "KL with the other sign in the reward": (kl, "kl_estimate", swapped_kl, "advantages"),
    "GAE off by one token": (advantage, "gae_with_moments", values_one_token_late, "advantages"),
    "no discount from turn to turn": (advantage, "gae_with_moments", without_turn_discounts, "advantages"),
    "rewards of turns paid twice": (steps_advantages, "final_rewards", paid_twice, "advantages"),
    "observations packed as targets": (batch, "_mark_turns", trained_on_observations, "packing"),
    "loss weights per sequence": (loss, "token_weights", mean_per_sequence, "losses"),
    "loss weights per sequence in an update": (loss, "token_weights", mean_per_sequence, "updates"),
    "no importance weights": (correction, "importance_weights", no_weights, "losses"),
    "one clip range for both sides": (policy_loss, "policy_loss", one_bound, "policy losses"),
    "damaged checkpoint accepted": (manifest, "find_damage", accepts, "checkpoints"),
    "weights that do not match accepted": (weight_match, "check_match", matches, "model folders"),
    "EOS ids of config.json left out": (tokenizer, "_named_eos", of_generation_config_alone, "tokenizer folders"),
    "duplicate key accepted": (yaml_nodes, "_wrong_keys", finds_nothing, "settings files"),
}
"""Fault -> module and function that have it, the faulty function, and the subject whose cases find it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    module, name, make_faulty, subject = FAULTS[fault]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, module, name, make_faulty)
        found = next(failures(SUBJECTS[subject]), None)
    assert found is not None, f"{SUBJECTS[subject].num_cases} cases pass"
    assert run_case(SUBJECTS[subject], found.case) is None, "the case fails without the fault, too"
