"""The examples: their environments are played by hand, and a policy learns one of them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.data.tool_texts import TextFormat
from hybrid_rl.demo import EOS
from hybrid_rl.environments.protocol import check_reset, check_step
from hybrid_rl.examples.building import FOLDER, build_example, resolve_examples
from hybrid_rl.examples.calculator import Calculator
from hybrid_rl.examples.guessing import Guessing
from hybrid_rl.examples.transcripts import EXAMPLES, NUM_GUESSES, NUM_MOVES
from hybrid_rl.examples.worked_products import EXAMPLES as EXAMPLE_PRODUCTS
from hybrid_rl.examples.worked_products import QUESTION, WorkedProducts
from hybrid_rl.validate import validate
from launch.settings import make_parser, read_settings
from tests.programs import ROOT

NAMES = ["guessing", "calculator", "gridworld"]


def settings_of(name: str) -> Config:
    return read_settings(make_parser("test", None), ["--config", str(ROOT / "launch" / "configs" / f"{name}.yaml")])[0]


def refuse(line: str) -> None:
    raise AssertionError(line)


def call(a: object, b: object) -> dict:
    function = {"name": "multiply", "arguments": f'{{"a": {a}, "b": {b}}}'}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def test_the_guessing_game_says_where_the_secret_number_is():
    game = Guessing()
    assert game.reset({"answer": "7"}) is None
    assert game.step(" 5 ") == ("higher", 0.0, False, {})
    assert game.step("think 12") == ("lower", 0.0, False, {})
    assert game.step("7 ?")[1:3] == (0.0, False)
    assert game.step("7")[1:3] == (1.0, True)


def test_a_product_is_answered_with_the_result_of_the_calculator():
    question = Calculator()
    prompt = [{"role": "user", "content": "12*34"}]
    reset = check_reset(question.reset({"prompt_messages": prompt, "answer": "408"}))
    assert reset.observation == prompt and [tool["function"]["name"] for tool in reset.tools or []] == ["multiply"]
    step = check_step(question.step(call(12, 34)))
    assert [message["content"] for message in step.observation] == ["408"] and not step.done
    assert step.info == {"num_tool_calls": 1, "num_failed_tool_calls": 0}
    last = check_step(question.step({"role": "assistant", "content": "408", "tool_calls": []}))
    assert (last.reward, last.done) == (1.0, True)


def test_a_wrong_product_and_a_call_that_fails_have_no_reward():
    question = Calculator()
    question.reset({"prompt_messages": [{"role": "user", "content": "12*34"}], "answer": "408"})
    step = check_step(question.step(call(12, '"x"')))
    assert step.info["num_failed_tool_calls"] == 1 and step.observation[0]["content"].startswith("error: ")
    assert check_step(question.step({"role": "assistant", "content": "40"})).reward == 0.0


def test_worked_products_stand_before_the_question_in_the_text_protocol():
    question = WorkedProducts()
    prompt = [{"role": "user", "content": QUESTION.format(a=20, b=30)}]
    reset = check_reset(question.reset({"prompt_messages": prompt, "answer": "600"}))
    messages, tools = TextFormat(has_system=True).prompt(list(reset.observation), list(reset.tools or []))
    assert tools is None and messages[-1] == prompt[0] and len(messages) == 2 + 4 * len(EXAMPLE_PRODUCTS)
    first = messages[1:5]
    assert first[1]["content"] == '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'
    assert [message["role"] for message in first] == ["user", "assistant", "user", "assistant"]
    assert first[2]["content"] == "<tool_response>408</tool_response>" and "408" in first[3]["content"]
    assert check_step(question.step(call(20, 30))).observation[0]["content"] == "600"
    last = check_step(question.step({"role": "assistant", "content": "The result of 20 * 30 is 600."}))
    assert (last.reward, last.done) == (1.0, True)


@pytest.mark.parametrize("answer", ["The result is 60.", "600 is 20 * 30", "I cannot say."])
def test_the_last_number_of_a_worked_product_must_be_right(answer):
    question = WorkedProducts()
    question.reset({"prompt_messages": [{"role": "user", "content": "20 * 30"}], "answer": "600"})
    assert check_step(question.step({"role": "assistant", "content": answer})).reward == 0.0


def test_the_grid_world_is_solved_by_the_moves_that_its_text_names():
    pytest.importorskip("gymnasium")
    from hybrid_rl.examples.gridworld import GridWorld

    world = GridWorld(size=5)
    text, _ = world.reset(seed=1)
    words = text.split()
    moves = [move for number, move in zip(words[::2], words[1::2], strict=True) for _ in range(int(number))]
    steps = [world.step(f"think {move}") for move in moves]
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * (len(moves) - 1) + [(1.0, True, False)]
    assert steps[-1][0] == "goal" and "goal" not in [step[0] for step in steps[:-1]]


def test_a_wall_and_a_word_that_is_no_move_leave_the_player_where_it_is():
    pytest.importorskip("gymnasium")
    from hybrid_rl.examples.gridworld import GridWorld

    world = GridWorld(size=2)
    world.reset(seed=0)
    at_the_wall = world.step("up")[0]
    assert [world.step(action)[0] for action in ("up", "fly", "")] == [at_the_wall] * 3


def test_a_seed_always_gives_the_same_grid_world():
    pytest.importorskip("gymnasium")
    from hybrid_rl.examples.gridworld import GridWorld

    texts = [[GridWorld().reset(seed=seed)[0] for seed in range(20)] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 10


def test_gymnasium_takes_the_texts_of_the_grid_world():
    pytest.importorskip("gymnasium")
    from gymnasium.utils.env_checker import check_env

    from hybrid_rl.examples.gridworld import GridWorld

    check_env(GridWorld(), skip_render_check=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_of_an_example_are_valid_and_name_its_environment(name):
    config = validate(settings_of(name))
    assert config.is_judged_by_environment and config.rollout.engine == "vllm"
    plain = replace(
        config, models=replace(config.models, actor="m"), prompts=replace(config.prompts, path="p", eval_path=None)
    )
    environment = resolve_examples(plain, refuse).environment
    file = f"{FOLDER / name}.py:{EXAMPLES[name].class_name}"
    assert file in (environment.name, environment.arguments.get("id")) and Path(file.split(":")[0]).exists()


@pytest.mark.parametrize("name", NAMES)
def test_transcripts_have_the_whole_turns_of_the_policy_and_fit_in_the_settings(name):
    if name == "gridworld":
        pytest.importorskip("gymnasium")
    config, tokenizer, rng = settings_of(name), EXAMPLES[name].make_tokenizer(), random.Random(0)
    for _ in range(50):
        row, (ids, is_sampled) = EXAMPLES[name].make_transcript(tokenizer, rng)
        assert tokenizer.unk_token_id not in [*ids, *tokenizer(row["prompt"])["input_ids"]]
        start = is_sampled.index(True)
        assert start <= config.prompts.max_prompt_tokens and len(ids) - start < config.rollout.max_response_tokens
        ends = [i for i, sampled in enumerate(is_sampled) if sampled and not any(is_sampled[i + 1 : i + 2])]
        assert all(ids[i] == EOS for i in ends) and 1 <= len(ends) <= config.environment.max_turns


def test_other_settings_stay_as_they_are():
    config = Config()
    assert resolve_examples(config, refuse) == config


def test_the_turns_of_a_game_are_as_many_as_the_settings_allow():
    assert settings_of("guessing").environment.max_turns == NUM_GUESSES
    assert settings_of("gridworld").environment.max_turns == NUM_MOVES


def test_the_grid_world_is_refused_without_gymnasium(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="gymnasium"):
        build_example("gridworld", tmp_path, report=refuse)
