"""Several data sets of a run: their rows, ids, mixture, named evaluations, and the functions that score their rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    ModelsConfig,
    PromptsConfig,
    PtxConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.data.prompts import PromptSet
from hybrid_rl.data.source_functions import KNOWN, choose_functions
from hybrid_rl.distributed import World
from hybrid_rl.rewards import FUNCTIONS
from tests.conftest import make_rollout

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
PLAIN = [{"prompt": f"{n}+0=", "answer": n} for n in range(6)]
GSM8K = [{"question": f"{n}+1=", "answer": f"so\n#### {n + 1}"} for n in range(4)]
VERL = [
    {
        "data_source": "openai/gsm8k" if n % 2 else "lighteval/MATH",
        "prompt": f"{n}+2=",
        "reward_model": {"style": "rule", "ground_truth": [str(n + 2), f"{n + 2}.0"]},
    }
    for n in range(4)
]
Load = Callable[..., Data]


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Return name -> path of a file of rows."""
    found = {}
    for name, rows in {"plain": PLAIN, "gsm8k": GSM8K, "verl": VERL}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found[name] = str(tmp_path / f"{name}.jsonl")
    return found


@pytest.fixture
def load(tiny: Path) -> Load:
    """Return a function that loads the data of the tiny policy; arguments replace fields of sections."""

    def make(**sections: Any) -> Data:
        config = Config(
            models=ModelsConfig(actor=str(tiny / "policy"), reward=str(tiny / "reward")),
            prompts=PromptsConfig(max_prompt_tokens=8, shuffle=False),
            rollout=RolloutConfig(max_response_tokens=24, rollout_batch_size=4),
            advantage=AdvantageConfig(estimator="grpo"),
            reward=RewardConfig(timeout_s=60.0),
            run=RunConfig(eval_every_steps=1),
        )
        config = replace(config, **{name: replace(getattr(config, name), **more) for name, more in sections.items()})
        data = load_data(config, ALONE)
        data.close()
        return data

    return make


def test_data_sets_without_weights_are_joined_each_in_its_own_format(load, paths):
    data = load(prompts={"path": [paths["plain"], {"path": paths["gsm8k"], "max_samples": 3}, paths["verl"]]})
    prompts = data.loader.prompts
    assert [prompt.prompt_id for prompt in prompts] == list(range(6 + 3 + 4))
    assert [prompt.answer for prompt in prompts[5:10]] == ["5", "1", "2", "3", ["2", "2.0"]]
    assert data.loader.batch_sizes(5) == [4, 4, 4, 1, 4]


def test_a_run_shows_format_and_number_of_rows_of_every_data_set(load, paths, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1"}\n{"text": "2+2"}\n')
    data = load(
        prompts={
            "path": [{"path": paths["plain"], "weight": 3}, {"path": paths["gsm8k"], "weight": 1}],
            "eval_path": {"verl": {"path": paths["verl"], "max_samples": 2}, "gsm8k": paths["gsm8k"]},
        },
        ptx={"path": str(tmp_path / "texts.jsonl")},
    )
    assert data.lines == [
        f"prompts.path = {paths['plain']}: 6 prompts in the format plain, 75.0% of the mixture",
        f"prompts.path = {paths['gsm8k']}: 4 prompts in the format gsm8k, 25.0% of the mixture",
        f"prompts.eval_path = {paths['verl']}: 2 prompts in the format verl, evaluation verl",
        f"prompts.eval_path = {paths['gsm8k']}: 4 prompts in the format gsm8k, evaluation gsm8k",
        f"ptx.path = {tmp_path / 'texts.jsonl'}: 2 texts",
    ]


def test_dropped_prompts_are_counted(load, tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1+1=", "answer": "5"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(prompts={"path": str(tmp_path / "rows.jsonl"), "overlong_prompts": "drop"})
    assert data.lines[0].endswith(": 1 prompts in the format plain, 1 longer ones dropped")


def test_a_mixture_draws_its_share_of_every_data_set_in_each_step(load, paths):
    sets = [{"path": paths["plain"], "weight": 3}, {"path": paths["gsm8k"], "weight": 1}]
    data = load(prompts={"path": sets})
    steps = [[prompt.prompt_id for prompt in data.loader.next_batch()] for _ in range(8)]
    assert [sum(number >= 6 for number in step) for step in steps] == [1] * 8
    assert sorted(number for step in steps[:4] for number in step if number >= 6) == [6, 7, 8, 9]


def test_a_weight_that_asks_for_more_prompts_than_there_are_is_refused(load, paths):
    sets = [{"path": paths["plain"], "weight": 1}, {"path": paths["gsm8k"], "weight": 3}]
    with pytest.raises(ConfigError, match=r"gsm8k.jsonl: weight = 3 takes up to 7 of the 8 prompts of a step"):
        load(prompts={"path": sets}, rollout={"rollout_batch_size": 8})


def test_everything_that_is_wrong_with_several_data_sets_is_reported_at_once(load, paths):
    with pytest.raises(ConfigError) as error:
        load(prompts={"path": ["absent.jsonl", paths["plain"]], "eval_path": {"x": "missing.jsonl"}})
    assert [message.partition(":")[0] for message in error.value.messages] == [
        "prompts.path = absent.jsonl",
        "prompts.eval_path = missing.jsonl",
    ]


def test_held_out_sets_are_divided_over_the_ranks_each(tiny, paths):
    config = Config(
        models=ModelsConfig(actor=str(tiny / "policy"), reward=str(tiny / "reward")),
        prompts=PromptsConfig(
            path=paths["plain"], eval_path={"a": paths["plain"], "b": paths["gsm8k"]}, max_prompt_tokens=8
        ),
        rollout=RolloutConfig(max_response_tokens=24),
        run=RunConfig(eval_function="last_number"),
    )
    ranks = []
    for rank in range(2):
        data = load_data(config, replace(ALONE, rank=rank, size=2))
        data.close()
        ranks.append({name: [p.prompt_id for p in prompts] for name, prompts in data.eval_sets.items()})
    assert ranks == [{"a": [0, 2, 4], "b": [6, 8]}, {"a": [1, 3, 5], "b": [7, 9]}]


# --- functions by data set


def test_by_source_scores_each_row_with_the_function_of_its_data_set(load, paths):
    data = load(prompts={"path": paths["verl"]}, reward={"functions": ["by_source", "think_format"], "weights": [2, 1]})
    scorer, prompts = data.scorer, data.loader.prompts
    with scorer:
        result = scorer.score(
            [replace(make_rollout(sequence_id=n, text="2"), prompt=prompt) for n, prompt in enumerate(prompts[:2])]
        )
    assert list(result.per_function) == ["math", "gsm8k", "think_format"]
    assert result.scores == [2.0, 0.0]  # the answers are 2 and 3
    assert result.per_function["math"][0] == 1.0 and result.per_function["math"][1] != result.per_function["math"][1]


def test_an_evaluation_by_source_judges_every_set_by_its_function(load, paths):
    sets = {"a": {"path": paths["gsm8k"], "data_source": "openai/gsm8k"}, "b": {"path": paths["plain"]}}
    sets["b"]["data_source"] = "mine"
    settings = {"by_source": {"mine": ["exact_match", "think_format"]}}
    data = load(
        prompts={"path": paths["plain"], "eval_path": sets}, reward=settings, run={"eval_function": "by_source"}
    )
    with data.eval_scorer as scorer:
        result = scorer.score([replace(make_rollout(text="1 "), prompt=p) for p in data.eval_prompts])
    assert list(result.per_function) == ["gsm8k", "exact_match"]  # the first function of each judges
    assert result.scores == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"data_source": "who/knows"}, r"row 1: no rule function is known for its data_source 'who/knows' \(reward."),
        ({}, r"row 1: has no column data_source with the name of its data set"),
    ],
)
def test_a_row_without_a_known_data_set_is_refused_before_training(load, tmp_path, row, message):
    rows = [{"prompt": "1+1=", "answer": "2", "data_source": "math"}, {"prompt": "1+2=", "answer": "3", **row}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=message):
        load(prompts={"path": str(tmp_path / "rows.jsonl")}, reward={"functions": ["by_source"]})


def test_a_function_that_would_score_a_row_twice_is_refused():
    prompt = make_rollout().prompt
    rows = _set([replace(prompt, metadata={"data_source": "gsm8k"})])
    with pytest.raises(ConfigError, match="'gsm8k' scores every row, and by_source chooses it once more"):
        choose_functions(["gsm8k", "by_source"], None, {}, [rows], setting="reward.functions")


def test_names_of_data_sets_ignore_the_case_and_settings_count_before_known_ones():
    prompt = make_rollout().prompt
    prompts = [replace(prompt, metadata={"data_source": name}) for name in ("OpenAI/GSM8K", "Mine")]
    choice = choose_functions(
        ["by_source"], [3.0], {"openai/gsm8k": "math", "mine": ["math", "a.py:f"]}, [_set(prompts)], setting="x"
    )
    assert choice.names == ["math", "a.py:f"] and choice.weights == [3.0, 3.0]
    assert [sorted(choice.applies(prompt)) for prompt in prompts] == [["math"], ["a.py:f", "math"]]
    assert set(KNOWN.values()) <= FUNCTIONS.keys() and all(name == name.casefold() for name in KNOWN)


def _set(prompts: list[Any]) -> PromptSet:
    return PromptSet(source="prompts.path = x", prompts=prompts, format="plain", num_rows=len(prompts))


# --- texts


def test_texts_of_several_data_sets_have_their_weights(load, paths, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "1+1"}\n{"text": "2+2"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "3+3"}\n')
    sets = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 1, "max_samples": 1},
        {"path": str(tmp_path / "b.jsonl"), "weight": 2, "column": "body"},
    ]
    data = load(prompts={"path": paths["plain"]}, ptx={"path": sets})
    assert [(len(each.texts), each.weight) for each in data.text_sets] == [(1, 1), (1, 2)]
    assert PtxConfig(path=sets).sources[1].column == "body"
