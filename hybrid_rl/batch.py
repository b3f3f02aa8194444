"""What flows through the loop: prompts, rollouts, and the tensors made of them.

Shape letters: P prompts, G group, B = P * G sequences, T response tokens (padded), N packed tokens, R response tokens
(packed).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
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
    sequence_id: int
    """Number of the response within the step over all ranks, the same for any number of ranks."""
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
    """[B] int64; the prompt's id, which the sequences of one group share."""
    sequence_ids: Tensor
    """[B] int64; see Rollout.sequence_id."""
    is_truncated: Tensor
    """[B] bool."""
    rollout_logprobs: Tensor
    """[B, T] float32."""
    rewards: Tensor | None = None
    """[B] float32; the score of the response, shaped."""
    baselines: Tensor | None = None
    """[B] float32; the reward of the prompt's greedy response, for ReMax."""
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
    loss_mask: Tensor | None = None
    """[B, T] bool; the tokens that the losses see, `response_mask` when None."""
    loss_weights: Tensor | None = None
    """[B, T] float32; constant factor on each token's policy loss, 1 when None."""

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

    def select(self, rows: list[int]) -> "TrainBatch":
        """Return some rows, as wide as before."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {name: value[rows] for name, value in found.items() if isinstance(value, Tensor)}
        return self.with_fields(sequences=[self.sequences[row] for row in rows], **picked)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Some sequences of a batch laid end to end in one row, without padding."""

    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64; restart at 0 with every sequence."""
    cu_seqlens: Tensor
    """[S + 1] int32; where each sequence starts in N, and N."""
    max_length: int
    """Of the longest packed sequence."""
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
        rows, columns = to_device(self.token_rows, padded.device), to_device(self.token_columns, padded.device)
        return to_device(padded[rows, columns], self.targets.device)

    def scatter(self, values: Tensor, into: Tensor) -> None:
        """Write [R] values to their places in a [B, T] tensor."""
        rows, columns = self.token_rows.to(into.device), self.token_columns.to(into.device)
        into[rows, columns] = values.to(into)


def make_train_batch(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Return the batch of some rollouts, with only what the engine knows filled in."""
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], dtype=torch.int64)
    width = max([len(r.response_ids) for r in rollouts], default=1) or 1
    logprobs = torch.zeros(len(rollouts), width)
    for row, rollout in enumerate(rollouts):
        logprobs[row, : len(rollout.rollout_logprobs)] = torch.tensor(rollout.rollout_logprobs)
    return TrainBatch(
        sequences=[torch.tensor(r.prompt.token_ids + r.response_ids) for r in rollouts],
        prompt_lengths=torch.tensor([len(r.prompt.token_ids) for r in rollouts], dtype=torch.int64),
        response_mask=torch.arange(width) < lengths[:, None],
        group_ids=torch.tensor([r.prompt.prompt_id for r in rollouts], dtype=torch.int64),
        sequence_ids=torch.tensor([r.sequence_id for r in rollouts], dtype=torch.int64),
        is_truncated=torch.tensor([r.is_truncated for r in rollouts], dtype=torch.bool),
        rollout_logprobs=logprobs,
    )


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Return the rows of some batches, filled in equally far, one after the other and as wide as the widest."""
    filled = [batch for batch in batches if len(batch)] or batches[:1]
    width = max(batch.response_mask.shape[1] for batch in filled)

    def lay(values: list[Tensor]) -> Tensor:
        return torch.cat([F.pad(v, (0, width - v.shape[1])) if v.ndim == 2 else v for v in values])

    found = {f.name: [getattr(batch, f.name) for batch in filled] for f in fields(TrainBatch)}
    laid = {name: lay(values) for name, values in found.items() if isinstance(values[0], Tensor)}
    return filled[0].with_fields(sequences=[s for batch in filled for s in batch.sequences], **laid)


def pack(batch: TrainBatch, rows: Sequence[int], device: torch.device) -> Packed:
    """Return the given rows of the batch laid end to end on the device.

    Padding never enters: what predicts response token t is the output one position before it. No rows give a single
    dummy token that predicts nothing, for a rank that must join the others' collectives with nothing to do.
    """
    sequences = [batch.sequences[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    lengths = torch.tensor([len(s) for s in sequences])
    ends = lengths.cumsum(0)
    prompt_lengths = batch.prompt_lengths[list(rows)] if rows else lengths
    first = ends - lengths + prompt_lengths - 1  # output that predicts the first response token
    num_response = (lengths - prompt_lengths).tolist()
    columns = [torch.arange(n) for n in num_response]
    targets = [s[p:] for s, p in zip(sequences, prompt_lengths.tolist(), strict=True)]
    return Packed(
        input_ids=to_device(torch.cat(sequences)[None], device),
        position_ids=to_device(torch.cat([torch.arange(n) for n in lengths.tolist()])[None], device),
        cu_seqlens=to_device(torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32), device),
        max_length=int(lengths.max()),
        rows=torch.tensor(list(rows), dtype=torch.int64),
        last_index=to_device((ends - 1)[: len(rows)], device),
        response_index=to_device(torch.cat([f + c for f, c in zip(first, columns, strict=True)]), device),
        targets=to_device(torch.cat(targets), device),
        token_rows=torch.repeat_interleave(torch.tensor(list(rows) or [0]), torch.tensor(num_response)),
        token_columns=torch.cat(columns),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device without waiting for what the device still has to do.

    A copy from memory that is not pinned waits, and the host, which is slower than the GPU in small micro-batches,
    could never launch ahead of it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def split(lengths: Sequence[int], max_tokens: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Return rows (all, unless given) grouped so that each group's lengths sum to at most max_tokens.

    Longest first into the first group with room. A row longer than max_tokens gets a group of its own.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)) if rows is None else rows, key=lambda r: -lengths[r]):
        place = next((i for i, free in enumerate(room) if lengths[row] <= free), None)
        if place is None:
            groups.append([])
            room.append(max_tokens)
            place = len(groups) - 1
        groups[place].append(row)
        room[place] -= lengths[row]
    return groups


def balance(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank of each item: the longest first, each to the rank that has the least by then.

    Source: Graham 1969, longest processing time: at most 4/3 of the best possible maximum.
    """
    ranks, held = [0] * len(lengths), [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        ranks[item] = held.index(min(held))
        held[ranks[item]] += lengths[item]
    return ranks
