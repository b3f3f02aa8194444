"""Re-encoding of rollouts for a reward model whose tokenizer is not the actor's."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Rollout
from hybrid_rl.config import check
from hybrid_rl.models.tokenizer import encode


def reencode(
    rollouts: Sequence[Rollout], tokenizer: PreTrainedTokenizerBase, *, actor_tokenizer: PreTrainedTokenizerBase
) -> list[Rollout]:
    """Return the rollouts with token ids of the reward model's tokenizer.

    The text of prompt and response is tokenized in one piece, like the text that the reward model was trained on: no
    token boundary is forced between them. A token that spans both belongs to the response, unless it is the first one.

    - BOS of `tokenizer`, if it adds one, comes first and once; the actor's BOS at the start of the prompt is removed.
    - EOS of `tokenizer` comes last if the response is not truncated, whichever token or string ended it.
    - The actor's chat markup in the prompt is plain text, except for special tokens that both tokenizers have.
    - The response is `Rollout.text`: the prefill of the chat template belongs to it, and so do special tokens that the
      actor wrote.

    Args:
        rollouts: with token ids of the actor's tokenizer.
        tokenizer: the reward model's.
        actor_tokenizer: the actor's.
    Returns:
        Rollouts with new `prompt.token_ids` and `response_ids`, for `make_train_batch` and a forward of the reward
        model. `rollout_logprobs` and `turns` are empty, because the new tokens were not sampled.
    Raises:
        ConfigError: `tokenizer` has no EOS.
    """
    name = tokenizer.name_or_path
    check(tokenizer.eos_token_id is not None, f"models.reward: its tokenizer {name!r} has no EOS token; add one")
    return [_reencode_one(rollout, tokenizer, actor_tokenizer.bos_token or "") for rollout in rollouts]


def _reencode_one(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, actor_bos: str) -> Rollout:
    prompt, text = (t.removeprefix(actor_bos) for t in (rollout.prompt.text_without_prefill, rollout.full_text))
    prompt_ids, token_ids = encode(tokenizer, prompt), encode(tokenizer, text)
    if not rollout.is_truncated:
        token_ids = [*token_ids, tokenizer.eos_token_id]
    num_prompt = next(
        (i for i, (a, b) in enumerate(zip(prompt_ids, token_ids, strict=False)) if a != b),
        min(len(prompt_ids), len(token_ids)),
    )
    num_prompt = max(num_prompt, 1)  # the first token belongs to the prompt: a batch needs a token before the response
    return replace(
        rollout,
        prompt=replace(rollout.prompt, token_ids=token_ids[:num_prompt]),
        response_ids=token_ids[num_prompt:],
        rollout_logprobs=[],
        turns=[],
    )
