"""The signatures of reward functions: which one a function has, and what it is called with."""

import functools
from types import SimpleNamespace

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.rewards.signatures import (
    FORMS,
    OPENRLHF,
    OWN,
    OWN_BATCH,
    TRL,
    VERL,
    VERL_BATCH,
    Call,
    Sample,
    arguments_for,
    is_async,
    recognise,
)

MESSAGES = [{"role": "user", "content": "2+5="}]


def sample(response="7", *, messages=None, answer="7", prefill="", response_ids=(4,), **metadata):
    """Return a response to the prompt `2+5=`, with further columns of its row."""
    prompt = SimpleNamespace(
        prompt_id=3, text=f"2+5={prefill}", prefill=prefill, messages=messages, answer=answer, metadata=metadata
    )
    return Sample(prompt=prompt, response=response, response_ids=response_ids)


def received(scorer, *samples, answer_column="answer"):
    """Return the form of a function that returns its arguments, and what it returns for a call."""
    form = recognise(scorer, "f")
    by_position, by_name = arguments_for(scorer, form, Call(samples=samples, answer_column=answer_column))
    return form, scorer(*by_position, **by_name)


async def awaited(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


class Judge:
    """An object in TRL's signature, as trl.rewards has them."""

    def __call__(self, completion_ids, **kwargs):
        return [len(ids) for ids in completion_ids]


@pytest.mark.parametrize(
    "scorer, form",
    [
        (lambda prompt, response: 0, OWN),
        (lambda p, text: 0, OWN),
        (lambda a, b, c=0: 0, OWN),
        (lambda *args: 0, OWN),
        (lambda prompt, response, response_ids: 0, OWN),
        (max, OWN),
        (lambda prompts, responses: 0, OWN_BATCH),
        (lambda queries, prompts, labels: 0, OPENRLHF),
        (lambda queries, prompts, labels, **kwargs: 0, OPENRLHF),
        (lambda completions, **kwargs: 0, TRL),
        (lambda prompts, completions, solution: 0, TRL),
        (lambda completions, answer, trainer_state=None: 0, TRL),
        (Judge(), TRL),
        (functools.partial(lambda threshold, completions, **kwargs: 0, 0.5), TRL),
        (lambda data_source, solution_str, ground_truth, extra_info=None: 0, VERL),
        (lambda solution_str, ground_truth, method="strict": 0, VERL),
        (lambda solution_str, **kwargs: 0, VERL),
        (awaited, VERL),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: 0, VERL_BATCH),
    ],
)
def test_a_signature_is_recognised_by_the_names_of_its_parameters(scorer, form):
    assert recognise(scorer, "f") is form


@pytest.mark.parametrize(
    "scorer, kind",
    [
        (lambda **kwargs: 0, "none"),
        (lambda *args, **kwargs: 0, "none"),
        (lambda prompts, answers: 0, "none"),
        (lambda prompt, ground_truth: 0, "none"),
        (lambda response, prompt: 0, "none"),
        (lambda a, b, c: 0, "none"),
        (lambda queries: 0, "none"),
        (lambda prompts, queries, labels: 0, "none"),
        (lambda prompt, responses: 0, "none"),
        (lambda solution_str, ground_truth, judge: 0, "none"),
        (lambda queries, completions: 0, "several"),
        (lambda completions, solution_str: 0, "several"),
    ],
)
def test_a_signature_that_is_none_or_several_is_refused_with_all_that_are_accepted(scorer, kind):
    with pytest.raises(ConfigError, match=rf"its signature is f\(.*\), which is {kind} of: ") as caught:
        recognise(scorer, "f")
    assert all(form.title in str(caught.value) for form in FORMS)


def test_arguments_of_trl_that_a_scorer_process_does_not_have_are_refused():
    with pytest.raises(ConfigError, match="trainer_state cannot be given: a score depends on the prompt and the resp"):
        recognise(lambda completions, trainer_state: 0, "f")


def test_asynchronous_functions_and_objects_are_told_apart():
    class Async:
        async def __call__(self, prompt, response):
            return 1

    assert is_async(awaited) and is_async(Async()) and is_async(functools.partial(awaited, "x"))
    assert not is_async(Judge()) and not is_async(max)


def test_openrlhf_gets_whole_texts_prompts_and_labels_and_the_prefill_belongs_to_the_response():
    one = sample("<think>7", prefill="<think>")
    form, found = received(lambda queries, prompts, labels, **kwargs: (queries, prompts, labels, kwargs), one)
    assert form is OPENRLHF and found == (["2+5=<think>7"], ["2+5="], ["7"], {})
    assert received(lambda queries, prompts, labels: labels, sample(answer=None))[1] == [""]


def test_trl_gets_texts_and_the_columns_of_the_rows():
    rows = [sample("7", solution="7", level=1), sample("8", solution="7")]
    form, found = received(lambda prompts, completions, **columns: (prompts, completions, columns), *rows)
    prompts, completions, columns = found
    assert form is TRL and prompts == ["2+5=", "2+5="] and completions == ["7", "8"]
    assert columns.pop("completion_ids") == [[4], [4]] and {"log_extra", "log_metric"} <= columns.keys()
    expected = {"answer": ["7", "7"], "solution": ["7", "7"], "level": [1, None]}
    assert {name: value for name, value in columns.items() if not name.startswith("log_")} == expected


def test_trl_gets_the_answer_under_the_name_of_its_column():
    assert received(lambda completions, gold: gold, sample(), answer_column="gold")[1] == ["7"]


def test_trl_gets_messages_where_the_prompt_is_a_conversation():
    one = sample("<think>7", messages=MESSAGES, prefill="<think>")
    _, (prompts, completions) = received(lambda prompts, completions: (prompts, completions), one)
    assert prompts == [MESSAGES] and completions == [[{"role": "assistant", "content": "<think>7"}]]


def test_a_parameter_of_trl_that_is_no_column_is_named_with_the_columns():
    with pytest.raises(
        ValueError, match="its parameter 'gold' is no column of the data, whose columns are: answer, le"
    ):
        received(lambda completions, gold: 0, sample(level=1))


def test_what_a_function_of_trl_logs_is_kept_for_each_response():
    def scorer(completions, log_extra, log_metric):
        log_extra("length", [1, 2])
        log_metric("share", 0.5)

    call = Call(samples=[sample(), sample()], extras=[{}, {}])
    by_position, by_name = arguments_for(scorer, TRL, call)
    scorer(*by_position, **by_name)
    assert call.extras == [{"length": 1, "share": 0.5}, {"length": 2, "share": 0.5}]


def test_verl_gets_source_text_answer_and_extra_info():
    row = sample(
        answer="7",
        data_source="openai/gsm8k",
        reward_model={"ground_truth": ["7", "7.0"]},
        extra_info={"split": "test"},
    )
    _, found = received(lambda data_source, solution_str, ground_truth, extra_info: locals(), row)
    assert found == {
        "data_source": "openai/gsm8k",
        "solution_str": "7",
        "ground_truth": ["7", "7.0"],
        "extra_info": {"split": "test"},
    }
    assert received(lambda solution_str, ground_truth, **kwargs: (ground_truth, kwargs), sample())[1] == (
        "7",
        {"data_source": None, "extra_info": {}},
    )


def test_verls_batched_function_gets_lists():
    rows = [sample("7", data_source="a"), sample("8", data_source="b")]
    _, found = received(lambda data_sources, solution_strs, ground_truths, extra_infos: locals(), *rows)
    assert found == {
        "data_sources": ["a", "b"],
        "solution_strs": ["7", "8"],
        "ground_truths": ["7", "7"],
        "extra_infos": [{}, {}],
    }


def test_own_functions_get_prompts_and_responses_and_tokens_where_they_ask_for_them():
    one = sample("7", response_ids=(4, 5))
    assert received(lambda prompt, response: (prompt.answer, response), one)[1] == ("7", "7")
    assert received(lambda p, r, response_ids: response_ids, one)[1] == [4, 5]
    _, (prompts, responses, ids) = received(
        lambda prompts, responses, response_ids: (prompts, responses, response_ids), one
    )
    assert prompts == [one.prompt] and responses == ["7"] and ids == [[4, 5]]
