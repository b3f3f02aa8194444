"""Responses as text, by hand."""

from hybrid_rl.monitoring.transcript import transcript

ROW = {
    "prompt_id": 17,
    "prompt": "Guess a number.",
    "response": "5",
    "answer": "7",
    "reward": 0.25,
    "num_tokens": 3,
    "is_truncated": False,
}
TURNS = [
    {"role": "assistant", "text": "5", "num_tokens": 1, "reward": 0.0},
    {"role": "user", "text": "higher\nplease", "num_tokens": 4},
    {"role": "assistant", "text": "7", "num_tokens": 2, "reward": 1.0},
]


def test_a_conversation_has_its_turns_with_roles_token_counts_and_rewards():
    assert transcript({**ROW, "turns": TURNS}) == (
        "prompt 17: reward 0.25, 2 turns of the model, 3 of 7 tokens sampled\n"
        "[prompt]\nGuess a number.\n"
        "[assistant: 1 token, reward 0]\n5\n"
        "[user: 4 tokens]\nhigher\nplease\n"
        "[assistant: 2 tokens, reward 1]\n7\n"
        "[right answer]\n7"
    )


def test_a_response_of_one_turn_has_its_tokens():
    assert transcript({**ROW, "answer": None, "is_truncated": True}) == (
        "prompt 17: reward 0.25, truncated\n[prompt]\nGuess a number.\n[response: 3 tokens]\n5"
    )


def test_long_texts_are_cut_in_the_middle():
    text = transcript({**ROW, "response": "a" * 50 + "b" * 50}, max_characters=20)
    assert "[response: 3 tokens]\n" + "a" * 10 + "\n... 80 characters ...\n" + "b" * 10 + "\n" in text
    assert "Guess a number." in text


def test_a_terminal_finds_nothing_to_obey_in_a_response():
    assert "\x1b" not in transcript({**ROW, "response": "\x1b[2J"})
