"""Batches, packing and splitting, with numbers worked out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.batch import Rollout, Turn, balance, join, make_train_batch, pack, split
from tests.conftest import make_rollout, make_turns

EOS = PAD = 2
CPU = torch.device("cpu")


def response(prompt_ids: list[int], response_ids: list[int], **fields: int) -> Rollout:
    """Return a response with log-prob -k / 2 of token k; at 5 tokens it is truncated unless it ends with EOS."""
    return make_rollout(
        prompt_ids,
        response_ids,
        rollout_logprobs=[-0.5 * (i + 1) for i in range(len(response_ids))],
        is_truncated=len(response_ids) == 5 and response_ids[-1] != EOS,
        **fields,
    )


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Responses whose EOS is the padding: ended, cut at 5, EOS alone, empty; prompts of 2, 1, 3 and 2 tokens."""
    return [
        response([11, 12], [5, 6, 2], prompt_id=7, sequence_id=14),
        response([13], [5, 6, 7, 8, 9], prompt_id=7, sequence_id=15),
        response([2, 2, 2], [2], prompt_id=9, sequence_id=18),
        response([14, 15], [], prompt_id=9, sequence_id=19),
    ]


def test_masks_come_from_lengths_although_eos_is_the_padding(rollouts):
    batch = make_train_batch(rollouts)
    assert batch.response_mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.response_mask.dtype == torch.bool
    assert batch.response_lengths.tolist() == [3, 5, 1, 0]
    assert batch.prompt_lengths.tolist() == [2, 1, 3, 2]
    assert batch.sequence_lengths == [5, 6, 4, 2]
    assert batch.is_truncated.tolist() == [False, True, False, False]
    assert batch.group_ids.tolist() == [7, 7, 9, 9]
    assert batch.sequence_ids.tolist() == [14, 15, 18, 19]
    assert batch.rollout_logprobs.tolist() == [
        [-0.5, -1.0, -1.5, 0, 0],
        [-0.5, -1.0, -1.5, -2.0, -2.5],
        [-0.5, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]
    assert [s.tolist() for s in batch.sequences] == [r.prompt.token_ids + r.response_ids for r in rollouts]


def test_greedy_rollouts_have_no_logprobs():
    rollout = response([1], [5, 2])
    rollout.rollout_logprobs.clear()
    assert make_train_batch([rollout]).rollout_logprobs.tolist() == [[0, 0]]


@pytest.mark.parametrize("num_empty", [0, 1, 2])
def test_batch_without_response_tokens_keeps_one_masked_column(num_empty):
    batch = make_train_batch([response([1, 3], []) for _ in range(num_empty)])
    assert len(batch) == num_empty
    assert batch.response_mask.shape == batch.rollout_logprobs.shape == (num_empty, 1)
    assert not batch.response_mask.any()


def test_with_fields_returns_a_copy(rollouts):
    batch = make_train_batch(rollouts)
    assert batch.with_fields(rewards=torch.ones(4)).rewards.tolist() == [1, 1, 1, 1]
    assert batch.rewards is None


def test_rows_that_were_sent_apart_are_joined_to_the_same_batch(rollouts):
    whole = make_train_batch(rollouts).with_fields(rewards=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    apart = make_train_batch([rollouts[0]]).with_fields(rewards=torch.tensor([1.0]))  # 3 tokens wide instead of 5
    nothing = make_train_batch([])  # of a rank without sequences, which has no rewards either
    joined = join([nothing, whole.select([3, 1]), apart, whole.select([2]), whole.select([])])
    assert [s.tolist() for s in joined.sequences] == [whole.sequences[row].tolist() for row in (3, 1, 0, 2)]
    for name in ("prompt_lengths", "response_mask", "group_ids", "sequence_ids", "is_truncated", "rewards"):
        assert torch.equal(getattr(joined, name), getattr(whole, name)[[3, 1, 0, 2]]), name
    assert torch.equal(joined.rollout_logprobs, whole.rollout_logprobs[[3, 1, 0, 2]])
    assert joined.advantages is None
    assert len(join([whole.select([]), whole.select([])])) == 0


def test_pack_by_hand(rollouts):
    batch = make_train_batch(rollouts)
    packed = pack(batch, [2, 0, 3], CPU)
    # N:                                  0  1  2  3 | 4   5  6  7  8 | 9   10
    assert packed.input_ids.tolist() == [[2, 2, 2, 2, 11, 12, 5, 6, 2, 14, 15]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]
    assert packed.cu_seqlens.tolist() == [0, 4, 9, 11] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_length == 5
    assert packed.rows.tolist() == [2, 0, 3]
    assert packed.last_index.tolist() == [3, 8, 10]
    assert packed.response_index.tolist() == [2, 5, 6, 7]
    assert packed.targets.tolist() == [2, 5, 6, 2]
    assert packed.token_rows.tolist() == [2, 0, 0, 0]
    assert packed.token_columns.tolist() == [0, 0, 1, 2]


def test_gather_and_scatter_by_hand(rollouts):
    batch = make_train_batch(rollouts)
    packed = pack(batch, [2, 0], CPU)
    padded = torch.arange(20.0).view(4, 5)
    assert packed.gather(padded).tolist() == [10, 0, 1, 2]
    into = torch.full((4, 5), -1.0)
    packed.scatter(torch.tensor([1.0, 2, 3, 4], dtype=torch.float64), into)
    assert into.tolist() == [[2, 3, 4, -1, -1], [-1] * 5, [1, -1, -1, -1, -1], [-1] * 5]


@pytest.mark.parametrize("rows", [[], [3]])
def test_pack_of_nothing_to_predict(rollouts, rows):
    batch = make_train_batch(rollouts)
    packed = pack(batch, rows, CPU)
    assert packed.input_ids.tolist() == ([[14, 15]] if rows else [[0]])
    assert packed.rows.tolist() == rows
    assert len(packed.last_index) == len(rows)
    for tensor in (packed.response_index, packed.targets, packed.token_rows, packed.token_columns):
        assert tensor.shape == (0,) and tensor.dtype == torch.int64
    assert packed.gather(torch.zeros(4, 5)).shape == (0,)


def test_pack_of_a_batch_without_sequences():
    packed = pack(make_train_batch([]), [], CPU)
    assert packed.input_ids.shape == (1, 1) and packed.cu_seqlens.tolist() == [0, 1]


# Conversations


@pytest.fixture
def conversations() -> list[Rollout]:
    """A conversation 5 6 [7 8] 9 with an observation in brackets, one turn 5 6, and one that ends with [4]."""
    return [
        make_rollout([11, 12], [5, 6, 7, 8, 9], rollout_logprobs=[-1, -2, -3], turns=make_turns(2, -2, 1)),
        make_rollout([13], [5, 6], rollout_logprobs=[-4, -5], prompt_id=1),
        make_rollout([14], [3, 2, 4], rollout_logprobs=[-6, -7], prompt_id=2, turns=make_turns(1, 1, -1)),
    ]


def test_a_conversation_is_trained_on_its_sampled_tokens(conversations):
    batch = make_train_batch(conversations)
    assert [r.num_sampled for r in conversations] == [3, 2, 2]
    assert batch.response_mask.int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert batch.turn_ids.tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert batch.rollout_logprobs.tolist() == [[-1, -2, 0, 0, -3], [-4, -5, 0, 0, 0], [-6, -7, 0, 0, 0]]
    assert batch.response_lengths.tolist() == [3, 2, 2]
    assert batch.sequence_lengths == [7, 3, 4]


def test_a_conversation_is_read_whole_and_predicts_its_sampled_tokens(conversations):
    packed = pack(make_train_batch(conversations), [2, 0], CPU)
    # N:                                   0  1  2  3 | 4   5   6  7  8  9  10
    assert packed.input_ids.tolist() == [[14, 3, 2, 4, 11, 12, 5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]
    assert packed.last_index.tolist() == [3, 10]
    assert packed.response_index.tolist() == [0, 1, 5, 6, 9]  # the first token of a turn follows the observation
    assert packed.targets.tolist() == [3, 2, 5, 6, 9]
    assert packed.token_rows.tolist() == [2, 2, 0, 0, 0]
    assert packed.token_columns.tolist() == [0, 1, 0, 1, 4]


def test_a_response_that_is_one_turn_gives_the_batch_of_a_response_without_turns():
    plain = make_train_batch([make_rollout([1, 2], [3, 4, 5])])
    one = make_train_batch([make_rollout([1, 2], [3, 4, 5], turns=make_turns(3))])
    assert plain.turn_ids is None and one.turn_ids.tolist() == [[0, 0, 0]]
    assert torch.equal(plain.response_mask, one.response_mask)
    assert torch.equal(plain.rollout_logprobs, one.rollout_logprobs)
    for name, value in vars(pack(plain, [0], CPU)).items():
        other = getattr(pack(one, [0], CPU), name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_rows_with_and_without_turns_are_joined(conversations):
    talked, plain = make_train_batch(conversations[:1]), make_train_batch(conversations[1:2])
    talked = talked.with_fields(token_rewards=torch.tensor([[0.0, 1, 0, 0, 2]]))
    for parts, rows in (([talked, plain], [0, 1]), ([plain, talked], [1, 0])):
        joined = join(parts)
        assert joined.turn_ids[rows].tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]
        assert joined.token_rewards[rows].tolist() == [[0, 1, 0, 0, 2], [0, 0, 0, 0, 0]]
        assert joined.response_mask[rows].int().tolist() == [[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]


def test_a_reward_of_a_turn_is_paid_at_its_last_sampled_token():
    def turn(num_tokens: int, reward: float, role: str = "assistant") -> Turn:
        return Turn(role=role, num_tokens=num_tokens, reward=reward)

    observation = Turn(role="user", num_tokens=2)
    turns = [turn(0, 7.0), turn(2, 1.0), observation, turn(3, 0.0), observation, turn(0, 5.0), turn(1, -2.0)]
    rollout = make_rollout([1], [9] * 10, turns=turns)
    # The first turn has no token before it; the empty turn behind the second observation is paid before that one.
    assert rollout.turn_rewards == [(1, 1.0), (6, 5.0), (9, -2.0)]
    assert make_rollout([1], [9]).turn_rewards == []


def test_turns_divide_the_whole_response():
    with pytest.raises(ValueError, match=r"the turns of sequence_id 3 have 4 tokens, its response 5"):
        make_rollout([1], [9] * 5, prompt_id=3, turns=make_turns(2, -2))


def test_every_sampled_token_has_a_logprob_and_no_other():
    with pytest.raises(ValueError, match=r"sequence_id 3 has 4 log-probs of the engine and 2 sampled tokens"):
        make_rollout([1], [9] * 4, prompt_id=3, turns=make_turns(2, -2), rollout_logprobs=[-1.0] * 4)


def test_split_by_hand():
    # longest first: 6 | 5 | 4 joins 6 | 3 joins 5 | 2 joins 5, 3
    assert split([5, 6, 4, 2, 3], 10) == [[1, 2], [0, 4, 3]]
    assert split([5, 6, 4, 2, 3], 10, rows=[3, 1]) == [[1, 3]]
    assert split([], 10) == split([5], 10, rows=[]) == []


def test_row_above_the_budget_gets_a_group_of_its_own():
    assert split([2, 11, 3], 10) == [[1], [2, 0]]
    assert split([11, 12], 10) == [[1], [0]]


@given(st.lists(st.integers(1, 20)), st.integers(1, 30))
def test_split_covers_every_row_once_within_the_budget(lengths, max_tokens):
    groups = split(lengths, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert all(sum(lengths[r] for r in group) <= max_tokens or len(group) == 1 for group in groups)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=6), st.randoms())
def test_every_response_token_is_packed_once(lengths, random):
    rollouts = [response([9] * p, [random.randrange(9) for _ in range(n)]) for p, n in lengths]
    batch = make_train_batch(rollouts)
    seen = torch.zeros(batch.response_mask.shape)
    for rows in split(batch.sequence_lengths, 12):
        packed = pack(batch, rows, CPU)
        assert packed.input_ids[0, packed.response_index + 1].tolist() == packed.targets.tolist()
        packed.scatter(packed.gather(seen) + 1, seen)
    assert seen.tolist() == batch.response_mask.float().tolist()


@pytest.mark.parametrize(
    "lengths, num_ranks, ranks",
    [
        ([8, 7, 6, 5, 4], 2, [0, 1, 1, 0, 0]),  # 8 | 7; then 6 to 7, 5 to 8, and 4 to the first of 13 and 13
        ([1, 1, 9, 1], 2, [1, 1, 0, 1]),
        ([3], 4, [0]),
        ([], 2, []),
    ],
)
def test_items_go_to_the_rank_with_the_least(lengths, num_ranks, ranks):
    assert balance(lengths, num_ranks) == ranks
