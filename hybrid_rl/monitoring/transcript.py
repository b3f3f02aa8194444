"""A response of a file of rollouts as text to read: its turns with their roles, token counts and rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_rl.printable import printable


def transcript(row: Mapping[str, Any], *, max_characters: int | None = None) -> str:
    """Return a response as text: a line about it, its prompt and its turns, each under a line with its role.

    Args:
        row: of rollouts/step_*.jsonl.
        max_characters: largest length of the prompt and of the text of a turn, from whose middle the rest is left out;
            None has all.
    """
    turns = row.get("turns") or [{"role": "response", "num_tokens": row["num_tokens"], "text": row["response"]}]
    blocks = [_heading(row), _block("prompt", row["prompt"], max_characters), turn_blocks(turns, max_characters)]
    if row.get("answer") is not None:
        blocks.append(_block("right answer", str(row["answer"]), max_characters))
    return printable("\n".join(blocks))


def turn_blocks(turns: Sequence[Mapping[str, Any]], max_characters: int | None = None) -> str:
    """Return turns as text, each under a line with its role, its tokens, and the reward of a sampled turn.

    Args:
        turns: the column of rollouts/step_*.jsonl.
        max_characters: see `transcript`.
    """
    return "\n".join(_block(_title(turn), turn["text"], max_characters) for turn in turns)


def _title(turn: Mapping[str, Any]) -> str:
    reward = f", reward {turn['reward']:.4g}" if "reward" in turn else ""
    return f"{turn['role']}: {_tokens(turn['num_tokens'])}{reward}"


def _block(title: str, text: str, max_characters: int | None) -> str:
    if max_characters is not None and len(text) > max_characters:
        half = max_characters // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return f"[{title}]\n{text}"


def _heading(row: Mapping[str, Any]) -> str:
    parts = [f"prompt {row['prompt_id']}: reward {row['reward']:.4g}"]
    if turns := row.get("turns"):
        number = sum("reward" in turn for turn in turns)
        parts.append(f"{number} {'turn' if number == 1 else 'turns'} of the model")
        parts.append(f"{row['num_tokens']} of {_tokens(sum(turn['num_tokens'] for turn in turns))} sampled")
    return ", ".join([*parts, *(["truncated"] if row["is_truncated"] else [])])


def _tokens(number: int) -> str:
    return f"{number} {'token' if number == 1 else 'tokens'}"
