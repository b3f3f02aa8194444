"""The data of the loop: prompts, rollouts, and the batches of tensors that are made of them.

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
    """One row of the data set, tokenised once: the engine generates from these ids and the trainer trains on them."""

    prompt_id: int
    """Row number in the data set."""
    text: str
    token_ids: list[int]
    undated_token_ids: list[int] | None = None
    """Token ids of the same prompt on a fixed day; None if its chat template does not ask for the date."""
    prefill: str = ""
    """End of `text` that the chat template writes in the model's name, such as `<think>` and a line break."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages of the row, which functions in TRL's signature get; None for a text prompt."""
    user_text: str | None = None
    """Text of the row that the chat template has wrapped as a message of the user; None for all other prompts."""
    answer: str | list[str] | None = None
    """The right answer; a list of all right ones where the data set has a list."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, which reward functions may read."""

    @property
    def text_without_prefill(self) -> str:
        """Text up to the start of the response that is judged."""
        return self.text.removesuffix(self.prefill)


@dataclass(frozen=True, kw_only=True)
class ConversationStart:
    """A conversation that is to be generated."""

    prompt: Prompt
    sequence_id: int
    """See Rollout."""
    seed: int | None
    """Seed of the samples of the first turn, from which the seeds of the others follow; None draws from the engine's
    own generator."""
    environment_seed: int
    """Seed for the environment, equal within a group."""


SAMPLED_ROLE = "assistant"
"""Role of the turns that the engine sampled."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Consecutive tokens of a response that the engine sampled, or that an environment added as an observation."""

    role: str
    """SAMPLED_ROLE for sampled tokens; every other role, such as `user` or `tool`, is an observation."""
    num_tokens: int
    text: str = ""
    reward: float = 0.0
    """Reward that the environment gave for a sampled turn, paid at the last token of the turn."""

    @property
    def is_sampled(self) -> bool:
        """Whether the tokens were sampled; observations are attended to and take no part in any loss."""
        return self.role == SAMPLED_ROLE


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A response to a prompt: sampled tokens, and in a conversation also the observations between them."""

    prompt: Prompt
    sequence_id: int
    """Number of the response within the step; it does not depend on the number of ranks."""
    response_ids: list[int]
    """Tokens after the prompt, in the order in which the model reads them, including every EOS. May be empty."""
    rollout_logprobs: list[float]
    """The engine's log-probability of each sampled token, at the sampling temperature; empty if it gives none."""
    is_truncated: bool
    """Whether the token limit ended the response, and not an EOS or a stop string."""
    text: str
    """Response as it is judged: the prompt's prefill, the sampled tokens except the stop token that ended the response,
    and in a conversation the observations between them."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of a conversation, which divide `response_ids` from its start to its end; without turns, all tokens are
    one sampled turn."""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """The experts with which the engine computed each token but the last of the sequence, [tokens - 1, layers, K]
    int16; None if it did not return them."""
    counts: dict[str, float] = field(default_factory=dict)
    """Values of a conversation for metrics, such as the number of its tool calls."""

    def __post_init__(self) -> None:
        num_tokens = sum(turn.num_tokens for turn in self.turns)
        if self.turns and num_tokens != len(self.response_ids):
            raise ValueError(
                f"the turns of sequence_id {self.sequence_id} have {num_tokens} tokens, its response "
                f"{len(self.response_ids)}: they must be equal"
            )
        if self.rollout_logprobs and len(self.rollout_logprobs) != self.num_sampled:
            raise ValueError(
                f"sequence_id {self.sequence_id} has {len(self.rollout_logprobs)} log-probs of the engine and "
                f"{self.num_sampled} sampled tokens: they must be equal"
            )

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(t.num_tokens for t in self.turns if t.is_sampled) if self.turns else len(self.response_ids)

    @property
    def turn_rewards(self) -> list[tuple[int, float]]:
        """Position in `response_ids` and amount of each reward of a turn: the last sampled token when it was given."""
        paid, position, end = list[tuple[int, float]](), -1, 0
        for turn in self.turns:
            end += turn.num_tokens
            if turn.is_sampled and turn.num_tokens:
                position = end - 1
            if turn.reward and position >= 0:
                paid.append((position, turn.reward))
        return paid

    @property
    def full_text(self) -> str:
        """Text of the whole sequence; the prefill occurs once."""
        return self.prompt.text_without_prefill + self.text


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """This rank's sequences of one step.

    Column t of a per-token tensor belongs to token t after the prompt. Per-token tensors are padded on the right, and
    read only at the sampled tokens, which `response_mask` marks. Optional fields are None until the stage that computes
    them.
    """

    sequences: list[Tensor]
    """B tensors [prompt + response] int64, on the CPU; in a conversation the response contains observations."""
    prompt_lengths: Tensor
    """[B] int64."""
    response_mask: Tensor
    """[B, T] bool; true for the sampled tokens, between which observations may lie."""
    group_ids: Tensor
    """[B] int64; the prompt's id, equal for the sequences of one group."""
    sequence_ids: Tensor
    """[B] int64; see Rollout.sequence_id."""
    is_truncated: Tensor
    """[B] bool."""
    rollout_logprobs: Tensor
    """[B, T] float32."""
    routed_experts: list[Tensor] | None = None
    """B tensors [prompt + response - 1, layers, K] int16; see Rollout.routed_experts. None replays no experts."""
    turn_ids: Tensor | None = None
    """[B, T] int64; number of the sampled token's turn among the sampled turns of its response, from 0. None if no
    response has more than one turn."""
    rewards: Tensor | None = None
    """[B] float32; the score after penalties, normalisation and clip: all that a response is paid."""
    token_rewards: Tensor | None = None
    """[B, T] float32; the part of `rewards` that is paid at each sampled token. The rest is paid at the last sampled
    token; None pays everything there."""
    baselines: Tensor | None = None
    """[B] float32; the reward of the prompt's greedy response, for ReMax."""
    old_logprobs: Tensor | None = None
    """[B, T] float32; log-probs of the actor before this step's update."""
    ref_logprobs: Tensor | None = None
    """[B, T] float32; log-probs of the reference."""
    values: Tensor | None = None
    """[B, T] float32; the critic's value of the state before token t."""
    advantages: Tensor | None = None
    """[B, T] float32."""
    returns: Tensor | None = None
    """[B, T] float32; targets of the critic."""
    loss_mask: Tensor | None = None
    """[B, T] bool; tokens that count in the losses; None counts `response_mask`."""
    loss_weights: Tensor | None = None
    """[B, T] float32; constant factor on the policy loss of each token; None is 1."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def response_lengths(self) -> Tensor:
        """Number of sampled tokens of each response, [B] int64."""
        return self.response_mask.sum(dim=1)

    @property
    def sequence_lengths(self) -> list[int]:
        """Length of each sequence, prompt and response."""
        return [len(s) for s in self.sequences]

    def with_fields(self, **changes: Any) -> "TrainBatch":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)

    def select(self, rows: list[int]) -> "TrainBatch":
        """Return some rows; T stays the same."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        picked = {name: value[rows] for name, value in found.items() if isinstance(value, Tensor)}
        lists = (self.sequences, self.routed_experts)
        sequences, experts = ([held[row] for row in rows] if held is not None else None for held in lists)
        return self.with_fields(sequences=sequences, routed_experts=experts, **picked)


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Sequences of a batch, concatenated into one row without padding; S of them have N tokens, R of them sampled."""

    input_ids: Tensor
    """[1, N] int64."""
    position_ids: Tensor
    """[1, N] int64; starts at 0 in every sequence."""
    cu_seqlens: Tensor
    """[S + 1] int32; start of each sequence in N, and N itself."""
    max_length: int
    """Length of the longest packed sequence."""
    rows: Tensor
    """[S] int64; row of each packed sequence in the batch."""
    last_index: Tensor
    """[S] int64; position in N of each sequence's last token."""
    response_index: Tensor
    """[R] int64; ascending position in N whose output predicts each sampled token, the one before it."""
    targets: Tensor
    """[R] int64; the sampled tokens."""
    token_rows: Tensor
    """[R] int64; row of each sampled token in the batch."""
    token_columns: Tensor
    """[R] int64; column of each sampled token, in T."""
    routed_experts: Tensor | None = None
    """[N, layers, K] int16; see Rollout.routed_experts. The last token of each sequence has -1."""

    def gather(self, padded: Tensor) -> Tensor:
        """Return the entries of a [B, T] tensor at the sampled tokens, [R]."""
        rows, columns = to_device(self.token_rows, padded.device), to_device(self.token_columns, padded.device)
        return to_device(padded[rows, columns], self.targets.device)

    def scatter(self, values: Tensor, into: Tensor) -> None:
        """Write [R] values to the sampled tokens of a [B, T] tensor."""
        rows, columns = self.token_rows.to(into.device), self.token_columns.to(into.device)
        into[rows, columns] = values.to(into)


def make_train_batch(rollouts: Sequence[Rollout]) -> TrainBatch:
    """Return the batch of some rollouts; only the fields that rollouts hold are filled."""
    lengths = torch.tensor([len(r.response_ids) for r in rollouts], dtype=torch.int64)
    width = max([len(r.response_ids) for r in rollouts], default=1) or 1
    mask = torch.arange(width) < lengths[:, None]
    turn_ids = _mark_turns(rollouts, mask) if any(r.turns for r in rollouts) else None
    logprobs = torch.zeros(len(rollouts), width)
    for row, rollout in enumerate(rollouts):
        if rollout.rollout_logprobs:
            logprobs[row, mask[row]] = torch.tensor(rollout.rollout_logprobs, dtype=torch.float32)
    return TrainBatch(
        sequences=[torch.tensor(r.prompt.token_ids + r.response_ids) for r in rollouts],
        prompt_lengths=torch.tensor([len(r.prompt.token_ids) for r in rollouts], dtype=torch.int64),
        response_mask=mask,
        group_ids=torch.tensor([r.prompt.prompt_id for r in rollouts], dtype=torch.int64),
        sequence_ids=torch.tensor([r.sequence_id for r in rollouts], dtype=torch.int64),
        is_truncated=torch.tensor([r.is_truncated for r in rollouts], dtype=torch.bool),
        rollout_logprobs=logprobs,
        routed_experts=_routed_experts(rollouts),
        turn_ids=turn_ids,
    )


def _routed_experts(rollouts: Sequence[Rollout]) -> list[Tensor] | None:
    """Return the experts of all rollouts, [tokens - 1, layers, K] each; None if the engine returned none.

    Raises:
        ValueError: the engine returned them for some rollouts, or for another number of tokens.
    """
    found = [r.routed_experts for r in rollouts if r.routed_experts is not None]
    if not found:
        return None
    expected = [len(r.prompt.token_ids) + len(r.response_ids) - 1 for r in rollouts]
    if [len(experts) for experts in found] != expected:
        raise ValueError(f"the engine returned experts for {[len(e) for e in found]} tokens, expected {expected}")
    return found


def _mark_turns(rollouts: Sequence[Rollout], mask: Tensor) -> Tensor:
    """Return the turn ids [B, T] of the rollouts, and remove their observations from the mask [B, T] in place."""
    turn_ids = torch.zeros(mask.shape, dtype=torch.int64)
    for row, rollout in enumerate(rollouts):
        start, number = 0, 0
        for turn in rollout.turns:
            tokens = slice(start, start + turn.num_tokens)
            mask[row, tokens] = turn.is_sampled
            turn_ids[row, tokens] = number if turn.is_sampled else 0
            start, number = tokens.stop, number + turn.is_sampled
    return turn_ids


def join(batches: Sequence[TrainBatch]) -> TrainBatch:
    """Return the rows of several batches with the same optional fields, padded to the largest T.

    Turn ids and token rewards are 0 in the rows of batches without them, if another batch has them.
    """
    filled = [batch for batch in batches if len(batch)] or batches[:1]
    width = max(batch.response_mask.shape[1] for batch in filled)

    def concat(name: str) -> Tensor | None:
        values = [getattr(batch, name) for batch in filled]
        like = next((value for value in values if value is not None), None)
        if not isinstance(like, Tensor):
            return None
        if name in ("turn_ids", "token_rewards"):
            shapes = [batch.response_mask.shape for batch in filled]
            values = [like.new_zeros(shape) if v is None else v for v, shape in zip(values, shapes, strict=True)]
        return torch.cat([F.pad(v, (0, width - v.shape[1])) if v.ndim == 2 else v for v in values])

    names = [f.name for f in fields(TrainBatch) if f.name not in ("sequences", "routed_experts")]
    joined = {name: concat(name) for name in names}
    experts = [held for batch in filled for held in batch.routed_experts or ()]
    sequences = [s for batch in filled for s in batch.sequences]
    return filled[0].with_fields(sequences=sequences, routed_experts=experts or None, **joined)


def pack(batch: TrainBatch, rows: Sequence[int], device: torch.device) -> Packed:
    """Return the given rows of the batch, packed, on the device.

    Without rows the result is one dummy token that predicts nothing: a rank without work still joins the collectives.
    """
    sequences = [batch.sequences[row] for row in rows] or [torch.zeros(1, dtype=torch.int64)]
    lengths = torch.tensor([len(s) for s in sequences])
    ends = lengths.cumsum(0)
    prompt_lengths = batch.prompt_lengths[list(rows)] if rows else lengths
    first = ends - lengths + prompt_lengths - 1  # position that predicts the first response token
    place, columns = batch.response_mask[list(rows)].nonzero().unbind(1)  # [R] each, place in rows and column in T
    index, tokens = first[place] + columns, torch.cat(sequences)
    chosen = [] if batch.routed_experts is None else [batch.routed_experts[row] for row in rows]
    experts = [F.pad(each, (0, 0, 0, 0, 0, 1), value=-1) for each in chosen]
    return Packed(
        input_ids=to_device(tokens[None], device),
        position_ids=to_device(torch.cat([torch.arange(n) for n in lengths.tolist()])[None], device),
        cu_seqlens=to_device(torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32), device),
        max_length=int(lengths.max()),
        rows=torch.tensor(list(rows), dtype=torch.int64),
        last_index=to_device((ends - 1)[: len(rows)], device),
        response_index=to_device(index, device),
        targets=to_device(tokens[index + 1], device),
        token_rows=torch.tensor(list(rows), dtype=torch.int64)[place],
        token_columns=columns,
        routed_experts=to_device(torch.cat(experts), device) if experts else None,
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device without waiting for kernels in flight.

    A copy from pageable memory waits for the device, so that the host could not launch kernels ahead of it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def split(lengths: Sequence[int], max_tokens: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Return rows (all by default) in groups whose lengths sum to at most max_tokens.

    First-fit decreasing: rows by length, each into the first group with room. A row longer than max_tokens is alone.
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
    """Return a rank for each item such that the ranks' sums of lengths are close.

    Longest processing time first: items by length, each to the rank with the smallest sum.

    Source: Graham 1969; the largest sum is at most 4/3 of the optimum.
    """
    ranks, sums = [0] * len(lengths), [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        ranks[item] = sums.index(min(sums))
        sums[ranks[item]] += lengths[item]
    return ranks
