"""What flows through the loop: prompts, rollouts, and the tensors made of them.

Shape letters: P prompts, G group, B = P * G sequences, T response tokens (padded), N packed tokens, R response tokens (packed).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data set, tokenised once; the engine receives and the trainer trains on exactly these ids."""

    prompt_id: int
    """Row number in the data set."""
    text: str
    token_ids: list[int]
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, and what a task's own scorer needs."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A sampled response to a prompt, as the engine returned it."""

    prompt: Prompt
    response_ids: list[int]
    """Sampled tokens, the ending EOS included. May be empty."""
    rollout_logprobs: list[float]
    """Engine's log-probability of each response token, at the rollout's temperature."""
    is_truncated: bool
    """Whether the response ended at the token limit and not with EOS."""
    text: str
    """Decoded response without special tokens."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """This rank's sequences of one step. Per-token tensors are padded on the right and zero outside `response_mask`.

    A field that a later step fills is None before it.
    """

    sequences: list[Tensor]
    """B tensors [prompt + response] int64, on the CPU."""
    prompt_lengths: Tensor
    """[B] int64."""
    response_mask: Tensor
    """[B, T] bool; made from lengths, one run of ones from the left per row."""
    group_ids: Tensor
    """[B] int64; sequences of one prompt in one step share it."""
    is_truncated: Tensor
    """[B] bool."""
    rollout_logprobs: Tensor
    """[B, T] float32."""
    rewards: Tensor | None = None
    """[B] float32; the score of the response."""
    old_logprobs: Tensor | None = None
    """[B, T] float32; the actor before this step's update."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32."""
    values: Tensor | None = None
    """[B, T] float32; critic's estimate before token t is emitted."""
    advantages: Tensor | None = None
    """[B, T] float32."""
    returns: Tensor | None = None
    """[B, T] float32; value targets."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_lengths(self) -> Tensor:
        """[B] int64."""
        return self.response_mask.sum(dim=1)

    @property
    def sequence_lengths(self) -> list[int]:
        """B lengths, prompt and response."""
        return [len(s) for s in self.sequences]

    def with_fields(self, **changes: Any) -> "TrainBatch":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Some sequences of a batch laid end to end in one row, without padding."""

    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64; restart at 0 with every sequence."""
    rows: Tensor
    """[S] int64; the batch row of each packed sequence."""
    last_index: Tensor
    """[S] int64; position in N of each sequence's last token."""
    response_index: Tensor
    """[R] int64; position in N whose output predicts a response token (one before it)."""
    targets: Tensor
    """[R] int64; the response tokens."""
    token_rows: Tensor
    """[R] int64; batch row of each response token."""
    token_columns: Tensor
    """[R] int64; its place in T."""

    def gather(self, padded: Tensor) -> Tensor:
        """Return the response tokens' entries of a [B, T] tensor, [R]."""
        rows, columns = self.token_rows.to(padded.device), self.token_columns.to(padded.device)
        return padded[rows, columns].to(self.targets.device)

    def scatter(self, values: Tensor, into: Tensor) -> None:
        """Write [R] values to their places in a [B, T] tensor."""
        rows, columns = self.token_rows.to(into.device), self.token_columns.to(into.device)
        into[rows, columns] = values.to(into)


def make_train_batch(rollouts: Sequence[Rollout], group_ids: Sequence[int]) -> TrainBatch:
    """Return the batch of some rollouts, with only what the engine knows filled in."""
    lengths = torch.tensor([len(r.response_ids) for r in rollouts])
    width = max(int(lengths.max()), 1) if len(rollouts) else 1
    logprobs = torch.zeros(len(rollouts), width)
    for row, rollout in enumerate(rollouts):
        logprobs[row, : len(rollout.rollout_logprobs)] = torch.tensor(rollout.rollout_logprobs)
    return TrainBatch(
        sequences=[torch.tensor(r.prompt.token_ids + r.response_ids) for r in rollouts],
        prompt_lengths=torch.tensor([len(r.prompt.token_ids) for r in rollouts]),
        response_mask=torch.arange(width) < lengths[:, None],
        group_ids=torch.tensor(group_ids),
        is_truncated=torch.tensor([r.is_truncated for r in rollouts]),
        rollout_logprobs=logprobs,
    )


def pack(batch: TrainBatch, rows: Sequence[int], device: torch.device) -> Packed:
    """Return the given rows of the batch laid end to end on the device.

    Padding never enters: what predicts response token t is the output one position before it.
    """
    ids, positions, last, index, targets, token_rows, token_columns = [], [], [], [], [], [], []
    offset = 0
    for row in rows:
        sequence, prompt_length = batch.sequences[row], int(batch.prompt_lengths[row])
        num_response = len(sequence) - prompt_length
        ids.append(sequence)
        positions.append(torch.arange(len(sequence)))
        last.append(offset + len(sequence) - 1)
        index.append(offset + prompt_length - 1 + torch.arange(num_response))
        targets.append(sequence[prompt_length:])
        token_rows.append(torch.full((num_response,), row))
        token_columns.append(torch.arange(num_response))
        offset += len(sequence)
    return Packed(
        input_ids=torch.cat(ids)[None].to(device),
        position_ids=torch.cat(positions)[None].to(device),
        rows=torch.tensor(list(rows)),
        last_index=torch.tensor(last).to(device),
        response_index=torch.cat(index).to(device),
        targets=torch.cat(targets).to(device),
        token_rows=torch.cat(token_rows),
        token_columns=torch.cat(token_columns),
    )


def split(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return rows grouped so that each group's lengths sum to at most max_tokens, longest first into the first group with room.

    A row longer than max_tokens gets a group of its own.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        place = next((i for i, free in enumerate(room) if lengths[row] <= free), None)
        if place is None:
            groups.append([])
            room.append(max_tokens)
            place = len(groups) - 1
        groups[place].append(row)
        room[place] -= lengths[row]
    return groups
