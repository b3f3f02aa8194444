"""Rule functions."""

from dataclasses import replace

import pytest

from hybrid_rl.rewards import FUNCTIONS
from tests.conftest import make_rollout

TAGS = {"think_start": "<think>", "think_end": "</think>", "answer_start": "<answer>", "answer_end": "</answer>"}


def make_rollouts(num=1, text="7", answer="7", **metadata):
    """Return responses with the same text to prompts 0, 1, ..., whose sequence ids start at 10."""
    metadata = {"k": 1, **metadata}
    rollouts = [make_rollout(prompt_id=n, sequence_id=10 + n, text=text, answer=answer) for n in range(num)]
    return [replace(rollout, prompt=replace(rollout.prompt, metadata=metadata)) for rollout in rollouts]


@pytest.mark.parametrize(
    "name, answers, right, wrong",
    [
        ("exact_match", ["Paris", "the capital"], [" Paris", "the capital\n"], ["paris", "Paris the capital"]),
        ("last_number", ["1,000", "7"], ["1000", "it is 7"], ["8", "none"]),
        ("gsm8k", ["#### 18", "19"], [r"\boxed{18}", "<answer>19</answer>"], [r"18 \boxed{20}"]),
        ("math", [r"\frac{1}{2}", "x + 1"], [r"\boxed{0.5}", r"\boxed{1 + x}"], [r"\boxed{2}", r"\boxed{x}"]),
        ("exact_match", ["7"], ["7"], ["8"]),
    ],
)
def test_a_response_with_any_of_several_right_answers_is_right(name, answers, right, wrong):
    for responses, expected in ((right, 1.0), (wrong, 0.0)):
        for response in responses:
            (rollout,) = make_rollouts(text=response, answer=answers)
            assert FUNCTIONS[name](rollout.prompt, rollout.text) == expected, response


def test_one_of_several_answers_that_cannot_be_read_is_named():
    (rollout,) = make_rollouts(text="7", answer=["7", "seven"])
    with pytest.raises(ValueError, match="the answer 'seven' is not a number"):
        FUNCTIONS["last_number"](rollout.prompt, rollout.text)


@pytest.mark.parametrize(
    "name, answer, response, expected",
    [
        ("exact_match", "7", " 7\n", 1),
        ("exact_match", " 7", "7", 1),
        ("exact_match", "7", "7.0", 0),
        ("last_number", "18", "3 + 15 = 18.", 1),
        ("last_number", "18", "18 is not 19", 0),
        ("last_number", "18.0", "$18", 1),
        ("last_number", "1000", "so 1,000 in all", 1),
        ("last_number", "$1,000.50", "1000.5", 1),
        ("last_number", "1000", "1,0000", 0),
        ("last_number", "3", "1, 2,3", 1),
        ("last_number", "-4", "x = -4", 1),
        ("last_number", "-4", "x = \u22124", 1),
        ("last_number", "4", "x = -4", 0),
        ("last_number", "3", "5-3", 1),
        ("last_number", ".5", "0.50", 1),
        ("last_number", "1/2", "it is 0.5", 1),
        ("last_number", "0.5", r"\boxed{1/2}", 1),
        ("last_number", "1/3", "1/2", 0),
        ("last_number", "1", "1/0", 0),
        ("last_number", "7", "none at all", 0),
        ("last_number", "7", "7 x2", 1),
        ("last_number", "7", "9" * 5000, 0),
        ("last_number", "two plus 16\n#### 18", "18", 1),
        ("gsm8k", "two plus 16\n#### 18", "16 + 2 = 18", 1),
        ("gsm8k", "#### 1,800", "<answer>$1800</answer>", 1),
        ("gsm8k", "#### 18", "18 <answer>17</answer> 18", 0),
        ("gsm8k", "#### 18", "<answer>17</answer> no, <answer>it is\n18</answer>", 1),
        ("gsm8k", "#### 18", "18 <answer>eighteen</answer>", 0),
        ("gsm8k", "#### 18", "<answer>18", 1),
        ("gsm8k", "#### 18", r"so \boxed{18}, checked in 2 ways", 1),
        ("gsm8k", "#### 18", r"18 is \boxed{17}", 0),
        ("gsm8k", "#### 18", r"\boxed{17} \boxed{\text{18}} done", 1),
        ("gsm8k", "#### 18", r"\boxed{18 and on, 19", 0),
        ("gsm8k", "#### 5", r"\boxed {5} of 6", 1),
        ("gsm8k", "#### 12", r"\boxed {9518.0} not 12", 0),
        ("gsm8k", "#### 5", r"\fbox{5} of 6", 1),
        ("gsm8k", "#### 5", r"\boxed5 of 6", 1),
        ("gsm8k", "#### 5", r"\(\boxed 5\) of 6", 1),
        ("gsm8k", "#### 5", r"\boxed{\text{5 {a}}} of 6", 1),
        ("gsm8k", "#### 5", r"\boxed{\left\{5\right.} of 6", 1),
        ("gsm8k", "#### 6", r"\boxedsomething{5} of 6", 1),
        ("math", "455479282", r"\boxed {455479282}.", 1),
        ("math", "5", r"$\boxed5$ or 6", 1),
        ("math", "1/2", r"\fbox{\frac{1}{2}}", 1),
        ("math", "1/2", r"so \boxed{\frac{1}{2}}", 1),
        ("math", r"$\frac{1}{2}$", "The answer is 0.5", 1),
        ("math", r"\frac{1}{3}", r"\boxed{0.3}", 0),
        ("math", "x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1),
        ("math", r"the root is \boxed{2\sqrt{3}}", r"$\sqrt{12}$", 1),
        ("math", r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        ("math", "(1, 2]", r"\boxed{(1, 2]}", 1),
        ("math", "(1, 2]", r"\boxed{[1, 2]}", 0),
        ("math", "7", r"first \boxed{3}, at last \boxed{7}", 1),
        ("math", "3", r"first \boxed{3}, at last \boxed{7}", 0),
        ("math", "7", "7 is not 8", 0),
        ("math", "16 + 2\n#### 18", "16 and 2 make 18.", 1),
        ("math", "7", "no number at all", 0),
        ("math", "7", "", 0),
        ("math", "7", r"\boxed{" + "9" * 5000 + "}", 0),
        ("think_format", "7", " <think>a\nb</think>\n<answer>7</answer>\n", 1),
        ("think_format", "7", "<think></think><answer></answer>", 1),
        ("think_format", "7", "<think>a</think><answer>7</answer> and more", 0),
        ("think_format", "7", "well, <think>a</think><answer>7</answer>", 0),
        ("think_format", "7", "<think>a</think> so <answer>7</answer>", 0),
        ("think_format", "7", "<answer>7</answer><think>a</think>", 0),
        ("think_format", "7", "<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("think_format", "7", "<think><think>a</think><answer>7</answer>", 0),
        ("think_format", "7", "<think>a<answer>7</think></answer>", 0),
        ("think_format", "7", "a</think><answer>7</answer>", 0),
        ("think_format", "7", "7", 0),
    ],
)
def test_rules(name, answer, response, expected):
    prompt = make_rollouts(answer=answer)[0].prompt
    assert FUNCTIONS[name](prompt, response) == expected


@pytest.mark.parametrize("answer", ["", "E", "x = 7", "7 or 8", "9" * 5000])
def test_an_answer_that_is_not_a_number_is_an_error_even_if_the_response_equals_it(answer):
    with pytest.raises(ValueError, match="is not a number"):
        FUNCTIONS["last_number"](make_rollouts(answer=answer)[0].prompt, answer)


@pytest.mark.parametrize("answer", ["", "$$", r"\boxed{}", "16 + 2\n####"])
def test_an_answer_that_is_not_an_expression_is_an_error(answer):
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        FUNCTIONS["math"](make_rollouts(answer=answer)[0].prompt, "7")


def test_format_tags_come_from_the_conversation_template():
    texts = {"think_start": "[", "think_end": "]", "answer_start": "(", "answer_end": ")"}
    tags = {name: {"text": text, "num_occur": int(name != "think_start")} for name, text in texts.items()}
    prompt = make_rollouts(response_format_tags=tags)[0].prompt
    responses = ["a.*] (7)", "](7)", "[a](7)", "a(7)", "a]b(7)", "a](7).", "<think>a</think><answer>7</answer>"]
    assert [FUNCTIONS["think_format"](prompt, response) for response in responses] == [1, 1, 0, 0, 0, 0, 0]


def test_tags_of_the_prefill_count_on_top_of_those_that_the_model_writes():
    tags = {name: {"text": text, "num_occur": int(text != "<think>")} for name, text in TAGS.items()}
    prompt = replace(make_rollouts(response_format_tags=tags)[0].prompt, text="q<think>\n", prefill="<think>\n")
    score = FUNCTIONS["think_format"]
    assert score(prompt, "<think>\n2+2\n</think>\n<answer>4</answer>") == 1
    assert score(prompt, "<think>\n<think>2+2\n</think>\n<answer>4</answer>") == 0
    assert score(prompt, "2+2\n</think>\n<answer>4</answer>") == 0
    assert score(replace(prompt, text="q", prefill=""), "2+2\n</think>\n<answer>4</answer>") == 1


def test_an_exact_match_leaves_out_what_the_template_wrote():
    prompt = replace(make_rollouts(answer="7")[0].prompt, text="q<think></think>", prefill="<think></think>")
    assert FUNCTIONS["exact_match"](prompt, "<think></think>\n7") == 1


@pytest.mark.parametrize("name", ["exact_match", "last_number", "gsm8k", "math"])
def test_a_missing_answer_is_an_error(name):
    with pytest.raises(ValueError, match=r"no answer: set prompts\.answer_column"):
        FUNCTIONS[name](make_rollouts(answer=None)[0].prompt, "7")


def test_reasoning_gym_scores_the_last_answer_tag_or_the_whole_text():
    entry = {"question": "3 + 4", "answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    prompt = make_rollouts(entry=entry)[0].prompt
    score = FUNCTIONS["reasoning_gym"]
    assert score(prompt, " 7\n") == 1
    assert score(prompt, "<answer>6</answer> no, <answer>\n7 </answer> done") == 1
    assert score(prompt, "7 <answer>6</answer>") < 0.5
    with pytest.raises(ValueError, match="no metadata 'entry'"):
        score(make_rollouts()[0].prompt, "7")
