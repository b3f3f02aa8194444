"""Places of tokens in the text of a response, for rewards of its steps."""

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Rollout
from hybrid_rl.models.tokenizer import decode_after

NUM_BEFORE = 4
"""Tokens before a piece that are decoded with it, because its spaces depend on them."""
MAX_PIECE = 16
"""Tokens after which a piece ends, even if its text ends within a character."""
INCOMPLETE = "\ufffd"
"""Character that stands for the bytes of an incomplete one."""


def token_ends(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[int]:
    """Return for each token of a response the number of characters of `Rollout.text` up to the end of the token.

    A token that ends within a character ends before it.

    Args:
        tokenizer: the actor's.
    """
    before, ids = rollout.prompt.token_ids, rollout.response_ids
    ends, done, start = list[int](), len(rollout.prompt.prefill), 0
    for position in range(len(ids)):
        context = [*before, *ids[:start]][-NUM_BEFORE:] if start < NUM_BEFORE else ids[start - NUM_BEFORE : start]
        text = decode_after(tokenizer, context, ids[start : position + 1])
        ends.append(done + len(text.rstrip(INCOMPLETE)))
        if not text.endswith(INCOMPLETE) or position + 1 - start >= MAX_PIECE:
            done, start = done + len(text), position + 1
    return ends
