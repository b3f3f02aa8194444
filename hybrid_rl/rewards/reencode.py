"""Rollouts in the tokens of another tokenizer, for a reward model that has its own."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Rollout
from hybrid_rl.config import check


def reencode(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, *, actor_tokenizer: PreTrainedTokenizerBase
) -> list[Rollout]:
    """Return the rollouts with the token ids that a reward model with its own tokenizer reads.

    It reads the prompt's text and the response's text in one piece, as text it was trained on: no token boundary is
    forced between them, and a token that spans both counts as the response's, unless it is the first of all.

    - In front is what `tokenizer` itself puts there (its BOS, or nothing), once; a BOS of the actor at the start of the
      prompt's text is left out.
    - At the end is the EOS of `tokenizer` if the response is not truncated, whichever token or string ended it.
    - Within the prompt the actor's chat markup is plain text, except where both tokenizers have the same special token.
    - Special tokens within the response are left out, as in `Rollout.text`.

    Args:
        rollouts: in the actor's tokens.
        tokenizer: the reward model's.
        actor_tokenizer: the actor's.
    Returns:
        Equal rollouts but for `prompt.token_ids` and `response_ids`; `rollout_logprobs` is empty, for the new tokens
        were never sampled. Good for `make_train_batch` and one forward of the reward model.
    Raises:
        ConfigError: `tokenizer` has no EOS.
    """
    name = tokenizer.name_or_path
    check(tokenizer.eos_token_id is not None, f"models.reward: its tokenizer {name!r} has no EOS token")
    return [_reencode_one(rollout, tokenizer, actor_tokenizer.bos_token or "") for rollout in rollouts]


def _reencode_one(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, actor_bos: str) -> Rollout:
    prompt = rollout.prompt.text.removeprefix(actor_bos)
    prompt_ids, token_ids = _encode(tokenizer, prompt), _encode(tokenizer, prompt + rollout.text)
    if not rollout.is_truncated:
        token_ids = [*token_ids, tokenizer.eos_token_id]
    shared = next(
        (i for i, (a, b) in enumerate(zip(prompt_ids, token_ids, strict=False)) if a != b),
        min(len(prompt_ids), len(token_ids)),
    )
    shared = max(shared, 1)  # a token that spans the whole prompt stays its own: something must predict the next
    return replace(
        rollout,
        prompt=replace(rollout.prompt, token_ids=token_ids[:shared]),
        response_ids=token_ids[shared:],
        rollout_logprobs=[],
    )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text behind the tokenizer's BOS, if it adds one, and without an end."""
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    adds_bos = bool(bos) and list(tokenizer("")["input_ids"][:1]) == bos
    return bos + token_ids if adds_bos and token_ids[:1] != bos else token_ids
