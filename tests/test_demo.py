"""The demo: the content of its files, and the accuracies of its models, measured independently."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from hybrid_rl import demo
from hybrid_rl.config import Config, ModelsConfig, PromptsConfig
from hybrid_rl.demo import DemoPaths, DemoSettings, Example, build_demo, resolve_demo
from hybrid_rl.scratch import scratch_folder


def refuse(line: str) -> None:
    """Raise if a line of progress shows that something is built."""
    raise AssertionError(line)


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    return demo.cache_dir()


@pytest.fixture(scope="session")
def paths(cache_dir: Path) -> DemoPaths:
    """The real demo, which is built once per version of its code."""
    return build_demo(cache_dir)


@pytest.fixture(scope="session")
def tokenizer(paths: DemoPaths) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(paths.policy)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def heldout(paths: DemoPaths, tokenizer: PreTrainedTokenizerBase) -> list[Example]:
    """Held-out examples, encoded from their text."""
    examples = []
    for row in read(paths.heldout):
        answer_ids = [*tokenizer(row["answer"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        examples.append(Example(row["prompt"], row["answer"], tokenizer(row["prompt"]).input_ids, answer_ids, []))
    return examples


def test_a_second_call_builds_nothing(cache_dir, paths):
    assert build_demo(cache_dir, report=refuse) == paths


def test_a_failed_build_restores_the_random_state_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "write_demo", lambda folder, *_: torch.rand(3) and None)
    state = torch.random.get_rng_state()
    with pytest.raises(RuntimeError):  # a tensor of three numbers has no truth value
        build_demo(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not list(tmp_path.iterdir())


def test_a_build_deletes_the_folders_of_killed_ones_and_leaves_those_of_others_alone(tmp_path):
    def start() -> tuple[int, Path]:
        """Return a process that builds in a folder and does not end, and its folder."""
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            with scratch_folder(tmp_path) as folder:
                os.write(sender, str(folder).encode())
                signal.pause()
        return pid, Path(os.read(receiver, 4096).decode())

    killed, left = start()
    building, kept = start()
    assert {left, kept} == set(tmp_path.iterdir())
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    with scratch_folder(tmp_path) as mine:
        assert {kept, mine} == set(tmp_path.iterdir())
    os.kill(building, signal.SIGKILL)
    os.waitpid(building, 0)
    with scratch_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_each_seed_has_its_folder(tmp_path, monkeypatch):
    accuracies = json.dumps({"initial_accuracy": 0.4, "pairwise_accuracy": 1.0})
    monkeypatch.setattr(demo, "write_demo", lambda folder, *_: (folder / "accuracy.json").write_text(accuracies))
    assert build_demo(tmp_path, seed=0).policy != build_demo(tmp_path, seed=1).policy
    assert build_demo(tmp_path, seed=1, report=refuse).initial_accuracy == 0.4


def test_splits_are_disjoint_and_answers_are_sorted(paths):
    train, heldout = read(paths.train), read(paths.heldout)
    assert (len(train), len(heldout)) == (DemoSettings().num_train, DemoSettings().num_heldout)
    assert len({row["prompt"] for row in train + heldout}) == len(train) + len(heldout)
    for row in train + heldout:
        assert row["answer"].split() == sorted(row["prompt"].removeprefix("sort ").removesuffix(" :").split())


def test_text_survives_encoding_and_decoding(heldout, tokenizer):
    for example in heldout:
        assert tokenizer.decode(example.prompt_ids, skip_special_tokens=True).strip() == example.prompt
        assert tokenizer.decode(example.answer_ids, skip_special_tokens=True).strip() == example.answer
        assert tokenizer.unk_token_id not in example.prompt_ids + example.answer_ids
        assert (len(example.prompt_ids) <= 10) and (len(example.answer_ids) <= 8)


def test_examples_have_the_ids_of_the_tokenizer(tokenizer):
    settings = DemoSettings(num_train=50, num_heldout=0)
    for example in demo.make_examples(settings, demo.make_tokenizer(), random.Random(0)):
        assert example.prompt_ids == tokenizer(example.prompt).input_ids
        assert example.demonstration_ids[-1] == example.answer_ids[-1] == tokenizer.eos_token_id


def test_corrupted_answers_are_wrong_and_varied(heldout, tokenizer):
    wrong = [demo.corrupt(e.answer_ids, random.Random(i)) for i, e in enumerate(heldout)]
    assert all(
        w and w != e.answer_ids and len(w) <= demo.MAX_RESPONSE_TOKENS for w, e in zip(wrong, heldout, strict=True)
    )
    assert any(w == [tokenizer.eos_token_id] for w in wrong)
    assert any(tokenizer.eos_token_id not in w for w in wrong)


def test_the_policy_answers_some_prompts(paths, heldout, tokenizer):
    """By generation and as text, independently of the single forward of `greedy_accuracy`."""
    policy = AutoModelForCausalLM.from_pretrained(paths.policy)
    assert policy.num_parameters() < 3_000_000
    assert policy.dtype == torch.float32
    assert policy.generation_config.eos_token_id == tokenizer.eos_token_id
    prompts = tokenizer([e.prompt for e in heldout], padding=True, padding_side="left", return_tensors="pt")
    prompts.pop("token_type_ids", None)
    tokens = policy.generate(**prompts, do_sample=False, max_new_tokens=10)[:, prompts.input_ids.shape[1] :]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    accuracy = sum(t.strip() == e.answer for t, e in zip(texts, heldout, strict=True)) / len(heldout)
    assert 0.3 <= accuracy <= 0.6
    assert accuracy == pytest.approx(paths.initial_accuracy, abs=0.005)


def test_the_reward_model_prefers_right_responses(paths, heldout):
    """On new pairs, and by the classifier's forward, which finds the last token of each sequence."""
    policy = AutoModelForCausalLM.from_pretrained(paths.policy)
    reward = AutoModelForSequenceClassification.from_pretrained(paths.reward)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        pairs = demo.make_pairs(policy, heldout, len(heldout), random.Random(1))
        chosen = reward(demo.padded([e.prompt_ids + e.answer_ids for e, _ in pairs])).logits[:, 0]
        rejected = reward(demo.padded([e.prompt_ids + r for e, r in pairs])).logits[:, 0]
        (chosen_by_token, rejected_by_token), _ = demo.pair_scores(reward, pairs)
    assert (chosen > rejected).float().mean() >= 0.97
    torch.testing.assert_close(chosen_by_token[:, -1], chosen, atol=1e-4, rtol=0)
    torch.testing.assert_close(rejected_by_token[:, -1], rejected, atol=1e-4, rtol=0)


def test_only_the_placeholders_of_the_demo_are_resolved(cache_dir, paths, monkeypatch):
    monkeypatch.setenv("HYBRID_RL_CACHE", str(cache_dir))
    plain = Config(models=ModelsConfig(actor="some/folder"), prompts=PromptsConfig(path="rows.jsonl"))
    assert resolve_demo(plain, refuse) is plain

    models = ModelsConfig(actor="demo:policy", reward="demo:reward", critic="some/folder")
    config = resolve_demo(Config(models=models, prompts=PromptsConfig(path="demo:train", eval_path=None)), refuse)
    assert (config.models.actor, config.models.reward) == (str(paths.policy), str(paths.reward))
    assert config.models.critic == "some/folder"
    assert (config.prompts.path, config.prompts.eval_path) == (str(paths.train), None)
