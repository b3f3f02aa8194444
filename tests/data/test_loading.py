"""The data of a run: stop ids of every source, prompts of this rank, scorers and texts as the settings say."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

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
from hybrid_rl.data.loading import load_data
from hybrid_rl.distributed import World
from tests.conftest import make_rollout

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tiny: Path) -> MakeConfig:
    """Return a function that makes settings of the tiny models and prompts; arguments replace fields of sections."""

    def make(**sections: Any) -> Config:
        config = Config(
            models=ModelsConfig(actor=str(tiny / "policy")),
            prompts=PromptsConfig(
                path=str(tiny / "prompts.jsonl"),
                eval_path=str(tiny / "heldout.jsonl"),
                max_prompt_tokens=8,
                shuffle=False,
            ),
            rollout=RolloutConfig(max_response_tokens=24, rollout_batch_size=4),
            advantage=AdvantageConfig(estimator="grpo"),
            reward=RewardConfig(functions=["exact_match"], num_workers=1, timeout_s=60.0),
            run=RunConfig(eval_every_steps=1),
        )
        return replace(config, **{name: replace(getattr(config, name), **fields) for name, fields in sections.items()})

    return make


def test_stop_ids_are_those_of_tokenizer_generation_config_settings_and_template(
    make_config: MakeConfig, tiny: Path, tmp_path: Path
) -> None:
    actor, template = tmp_path / "actor", tmp_path / "template.json"
    shutil.copytree(tiny / "policy", actor)
    (actor / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0]}))
    template.write_text(json.dumps({"stop_ids": [5]}))
    plain = make_config()
    assert load_data(plain, ALONE).stop_token_ids == [0]
    config = make_config(
        models={"actor": str(actor)}, prompts={"template_path": str(template)}, rollout={"stop_token_ids": [9, 3, 7]}
    )
    assert load_data(config, ALONE).stop_token_ids == [0, 3, 5, 7, 9]


def test_the_chat_template_of_a_conversation_template_is_the_tokenizers(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The exported tokenizer and chats of ptx then follow it too."""
    template, texts = tmp_path / "template.json", tmp_path / "texts.jsonl"
    template.write_text(json.dumps({"chat_template": "{% for m in messages %}{{ m['content'] }}={% endfor %}"}))
    texts.write_text(json.dumps({"text": [{"role": "user", "content": "1+2"}]}) + "\n")
    config = make_config(prompts={"template_path": str(template), "chat": True})
    data = load_data(replace(config, ptx=PtxConfig(path=str(texts))), ALONE)
    ids = data.tokenizer("1+2=")["input_ids"]
    assert [text.token_ids for text in data.text_sets[0].texts] == [[*ids, data.tokenizer.eos_token_id]]
    assert data.loader.next_batch()[0].text == "0+0=="


def test_each_rank_has_every_nth_prompt_of_training_and_evaluation(make_config: MakeConfig) -> None:
    config = make_config(prompts={"max_eval_samples": 5})
    ranks = [load_data(config, replace(ALONE, rank=rank, size=2)) for rank in range(2)]
    assert [[p.text for p in data.eval_prompts] for data in ranks] == [["10+1=", "12+0=", "14+2="], ["11+2=", "13+1="]]
    batches = [[[p.prompt_id for p in data.loader.next_batch()] for _ in range(3)] for data in ranks]
    assert batches == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]


@pytest.mark.parametrize("off", [{"run": {"eval_every_steps": 0}}, {"prompts": {"eval_path": None}}])
def test_a_run_without_evaluation_reads_no_held_out_prompts(make_config: MakeConfig, off: dict[str, Any]) -> None:
    data = load_data(make_config(**off), ALONE)
    assert data.eval_prompts == [] and data.eval_scorer is None


def test_generated_tasks_have_other_rows_in_evaluation(make_config: MakeConfig, tiny: Path, tmp_path: Path) -> None:
    task, digits = "reasoning_gym:chain_sum", {"min_digits": 6, "max_digits": 6, "min_terms": 2, "max_terms": 2}
    prompts = {"path": task, "eval_path": task, "task_options": digits, "num_generated": 30, "max_eval_samples": 20}
    config = make_config(prompts={**prompts, "max_prompt_tokens": 200}, rollout={"max_response_tokens": 1})
    with pytest.raises(ConfigError, match=r"200 .* 1 = 201: models.actor = .* takes at most 64 tokens"):
        load_data(config, ALONE)
    longer = tmp_path / "longer"
    shutil.copytree(tiny / "policy", longer)
    settings = json.loads((longer / "config.json").read_text()) | {"max_position_embeddings": 201}
    (longer / "config.json").write_text(json.dumps(settings))
    data = load_data(replace(config, models=replace(config.models, actor=str(longer))), ALONE)
    train = {p.text for _ in range(8) for p in data.loader.next_batch()}
    assert len(train) == 30 and len(data.eval_prompts) == 20
    assert not train & {p.text for p in data.eval_prompts}


def test_scorers_have_the_functions_weights_and_error_handling_of_the_settings(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def two(prompt, response): return 2.0\n")
    reward = {"functions": ["exact_match", "own.py:two"], "weights": [3.0, 0.5], "on_error": "raise"}
    data = load_data(make_config(reward=reward, run={"eval_function": "last_number"}), ALONE)
    right, unknown = make_rollout(text="7", answer="7"), make_rollout(text="7")
    assert data.scorer is not None and data.eval_scorer is not None
    with data.scorer as scorer, data.eval_scorer as eval_scorer:
        assert scorer.score([right]).scores == [3.0 + 0.5 * 2.0]
        with pytest.raises(ConfigError, match=r"reward\.functions: .*exact_match: .* no answer"):
            scorer.score([unknown])
        assert eval_scorer.score([right]).per_function == {"last_number": [1.0]}
        with pytest.raises(ConfigError, match=r"run\.eval_function: .*last_number: .* no answer"):
            eval_scorer.score([right, unknown])


def test_wrong_functions_and_services_are_all_reported_before_a_model_loads(make_config: MakeConfig) -> None:
    reward = {"functions": ["exact"], "remote_urls": ["http://ok/", "ftp://h", "http://"]}
    with pytest.raises(ConfigError) as caught:
        load_data(make_config(reward=reward, run={"eval_function": "absent.py:f"}), ALONE)
    assert [message.split(" ")[:2] for message in caught.value.messages] == [
        ["reward.functions:", "'exact'"],
        ["run.eval_function:", "'absent.py:f':"],
        ["reward.remote_urls:", "'ftp://h'"],
        ["reward.remote_urls:", "'http://'"],
    ]


def test_what_the_settings_leave_out_is_none(make_config: MakeConfig, tiny: Path) -> None:
    data = load_data(make_config(reward={"functions": []}, models={"reward": str(tiny / "reward")}), ALONE)
    assert data.scorer is None and data.reward_tokenizer is None and data.text_sets == []


def copy_with_token(model: Path, folder: Path) -> int:
    """Copy a model's folder, add the token `abc` to its tokenizer, and return the token's id."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["abc"])
    tokenizer.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids("abc")


def test_a_reward_model_with_another_vocabulary_brings_its_tokenizer(
    make_config: MakeConfig, tiny: Path, tmp_path: Path
) -> None:
    other = tmp_path / "reward"
    copy_with_token(tiny / "reward", other)
    data = load_data(make_config(models={"reward": str(other)}), ALONE)
    assert data.reward_tokenizer is not None and len(data.reward_tokenizer) == len(data.tokenizer) + 1


def test_all_that_is_wrong_with_the_data_is_reported_at_once(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text('{"title": "no text"}\n')
    config = make_config(
        rollout={"max_response_tokens": 61},
        prompts={"path": str(tmp_path / "absent.jsonl"), "max_prompt_tokens": 4},
        reward={"functions": ["exact_mach"]},
        run={"eval_function": "nothing"},
        ptx={"path": str(tmp_path / "texts.jsonl")},
    )
    with pytest.raises(ConfigError) as error:
        load_data(config, ALONE)
    for sentence, found in zip(
        (
            "prompts.max_prompt_tokens 4 + rollout.max_response_tokens 61 = 65",
            "exact_mach",
            "nothing",
            "absent.jsonl",
            "6 of 6 prompts are longer",
            "texts.jsonl",
        ),
        error.value.messages,
        strict=True,
    ):
        assert sentence in found


def test_without_a_tokenizer_what_needs_one_adds_no_further_finding(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_data(make_config(models={"actor": str(tmp_path)}, reward={"functions": ["exact_mach"]}), ALONE)
    assert [m.partition(":")[0] for m in error.value.messages] == [f"models.actor = {tmp_path}", "reward.functions"]


def test_without_a_template_rows_of_prompts_and_texts_are_checked_all_the_same(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "texts.jsonl").write_text('{"title": "no text"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1="}\n')
    config = make_config(
        prompts={"template_path": "absent.json", "eval_path": str(tmp_path / "held.jsonl")},
        ptx={"path": str(tmp_path / "texts.jsonl")},
    )
    with pytest.raises(ConfigError) as error:
        load_data(config, ALONE)
    assert [message.split(" = ")[0] for message in error.value.messages] == [
        "prompts.template_path",
        "prompts.eval_path",
        "ptx.path",
    ]


def test_ids_above_a_models_vocabulary_are_refused(make_config: MakeConfig, tiny: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(tiny / "reward", small)
    settings = json.loads((small / "config.json").read_text()) | {"vocab_size": 13}  # ids 0 to 12; "=" is 13
    (small / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"row 0: id 13 is not in the vocabulary of models.reward = .* has 13 ids"):
        load_data(make_config(models={"reward": str(small)}), ALONE)
    with pytest.raises(ConfigError, match=r"stop_ids: id \[9999\] is not in the vocabulary of models.actor"):
        load_data(make_config(rollout={"stop_token_ids": [9999]}), ALONE)


@pytest.mark.parametrize(
    "functions, weights, given, expected",
    [
        (["think_format", "gsm8k"], None, None, "gsm8k"),
        (["think_format", "gsm8k", "math"], [9.0, 1.0, 1.0], None, "gsm8k"),
        (["gsm8k", "math"], [1.0, 2.0], None, "math"),
        (["think_format"], None, None, "think_format"),
        ([], None, None, "exact_match"),
        (["gsm8k"], None, "math", "math"),
    ],
)
def test_evaluation_takes_the_rewards_own_function(functions, weights, given, expected):
    config = Config(reward=RewardConfig(functions=functions, weights=weights), run=RunConfig(eval_function=given))
    assert config.eval_function == expected


def test_ids_of_ptx_texts_above_the_actors_vocabulary_are_refused(
    make_config: MakeConfig, tiny: Path, tmp_path: Path
) -> None:
    actor = tmp_path / "actor"
    new = copy_with_token(tiny / "policy", actor)
    (tmp_path / "texts.jsonl").write_text('{"text": "1+1"}\n{"text": "1abc"}\n')
    with pytest.raises(ConfigError) as error:
        load_data(
            make_config(models={"actor": str(actor)}, ptx={"path": str(tmp_path / "texts.jsonl"), "coef": 0.1}), ALONE
        )
    size = json.loads((actor / "config.json").read_text())["vocab_size"]
    (message,) = error.value.messages
    assert (
        f"texts.jsonl: row 1: id {new} is not in the vocabulary of models.actor = {actor}, which has {size}" in message
    )
