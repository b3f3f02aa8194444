"""Fuzz subjects: folders of models and tokenizers, whole and damaged. A model that loads is the one of the folder."""

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.models.tokenizer import eos_token_ids, load_tokenizer
from tests.conftest import make_rollout, make_tokenizer
from tests.fuzz.cases import Refusal, check_close, check_refused, outcome

CPU = torch.device("cpu")
IDS = [[1, 5, 9, 3, 7], [2, 8, 11]]


@functools.cache
def whole_folder(kind: str) -> Path:
    """Return the folder of a tiny model: llama with tied embeddings, qwen2 with a head, reward, or small.

    small has fewer embeddings than its tokenizer has tokens.
    """
    torch.manual_seed(4)
    shape: dict[str, Any] = {
        "vocab_size": 30 if kind == "small" else 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
    }
    model: Any
    if kind in ("llama", "small"):
        model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1))
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(8)
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{kind}-"))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def expected_outputs(kind: str) -> list[list[float]]:
    """Return what transformers computes with the whole model: log-probs of the last token, or the scores."""
    folder, found = whole_folder(kind), []
    is_reward = kind == "reward"
    model_class: Any = (
        LlamaForSequenceClassification if is_reward else LlamaForCausalLM if kind == "llama" else Qwen2ForCausalLM
    )
    model = model_class.from_pretrained(folder).eval()
    with torch.no_grad():
        for ids in IDS:
            if is_reward:
                hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
                found.append((model.score.weight @ hidden).tolist())
            else:
                logits = model(input_ids=torch.tensor([ids])).logits[0, -2]
                found.append([float(logits.log_softmax(-1)[ids[-1]])])
    return found


def outputs(kind: str, folder: Path) -> list[list[float]]:
    """Return the same numbers by the product's models."""
    batch = make_train_batch([make_rollout(ids[:-1], ids[-1:]) for ids in IDS])
    packed = pack(batch, [0, 1], CPU)
    with torch.no_grad():
        if kind == "reward":
            value_model = load_value_model(str(folder), ModelsConfig(), CPU, field="models.reward")
            return [[value] for value in value_model(**packed_inputs(packed), index=packed.last_index).tolist()]
        actor = load_actor(str(folder), ModelsConfig(), CPU)
        logprobs = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)[
            0
        ]
        return [[value] for value in logprobs.tolist()]


TENSOR_DAMAGES = ["missing", "missing", "extra", "renamed", "prefix", "shape"]
FILE_DAMAGES = ["cut", "header", "empty", "no file", "garbage"]
CONFIG_DAMAGES = ["layers", "vocabulary", "cut config", "no config", "type", "value", "list config"]


def damage(rng: random.Random, folder: Path) -> str:
    """Damage a model's folder so that it no longer holds the model, and return how."""
    how = rng.choice(TENSOR_DAMAGES + FILE_DAMAGES + CONFIG_DAMAGES)
    if how in CONFIG_DAMAGES:
        return f"{how} {_damage_config(rng, folder / 'config.json', how)}"
    path = folder / "model.safetensors"
    if how in TENSOR_DAMAGES:
        return f"{how} {_damage_tensors(rng, path, how)}"
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "header":
        place = rng.randrange(8)
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
    elif how == "no file":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else rng.randbytes(300))
    return how


def _damage_tensors(rng: random.Random, path: Path, how: str) -> str:
    """Change one tensor of the file, or all names, and return its name."""
    tensors = load_file(path)
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    if how == "missing":
        del tensors[name]
    elif how == "renamed":
        del tensors[name]
        tensors[name.replace("layers", "blocks") if "layers" in name else f"{name}_old"] = value
    elif how == "shape":
        tensors[name] = torch.cat([value, value])
    elif how == "extra":
        name = rng.choice(["model.layers.2.mlp.up_proj.weight", "model.extra.weight", "v_head.summary.bias"])
        tensors[name] = torch.zeros(3)
    else:
        tensors = {f"module.{name}": value for name, value in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return name


def _damage_config(rng: random.Random, path: Path, how: str) -> str:
    keys = json.loads(path.read_text())
    if how == "layers":
        keys["num_hidden_layers"] = rng.choice([1, 3])
    elif how == "vocabulary":
        keys["vocab_size"] = rng.choice([39, 41])
    elif how == "type":
        name = rng.choice(["hidden_size", "num_attention_heads", "vocab_size", "model_type", "intermediate_size"])
        keys[name] = rng.choice(["x", None, [1], {"a": 1}, 1.5])
    elif how == "value":
        keys[rng.choice(["hidden_size", "num_attention_heads", "num_hidden_layers"])] = rng.choice([0, -1, 7])
    if how == "no config":
        path.unlink()
    elif how == "cut config":
        path.write_text(path.read_text()[: rng.randrange(100)])
    else:
        path.write_text(json.dumps([keys] if how == "list config" else keys))
    return str(keys)[:300] if how in ("type", "value") else ""


def check_model_folder(rng: random.Random, folder: Path) -> None:
    """A whole folder gives the model of transformers; one that lacks weights, or has others, is refused."""
    kind = rng.choice(["llama", "qwen2", "reward"])
    path = folder / "model"
    shutil.copytree(whole_folder(kind), path)
    how = damage(rng, path) if rng.random() < 0.8 else None
    found = outcome(lambda: outputs(kind, path), "models.actor", "models.reward", str(path))
    if how is None:
        assert not isinstance(found, Refusal), f"refuses a whole {kind}: {found}"
        check_close(found, expected_outputs(kind), kind, tolerance=1e-4)
        return
    check_refused(found, f"{kind} with {how}")
    tensor = how.partition(" ")[2]
    if how.startswith("missing"):
        assert any(tensor in message for message in found.messages), f"does not name {tensor}: {found}"


def check_tokenizer_folder(rng: random.Random, folder: Path) -> None:
    """A damaged tokenizer or generation config is refused; a whole one gives the ids that end a response."""
    path = folder / "model"
    shutil.copytree(whole_folder("llama"), path)
    ids = rng.choice([0, 5, [5, 0], [7]])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    in_config = rng.choice([0, 3, [4, 0]])
    config = json.loads((path / "config.json").read_text()) | {"eos_token_id": in_config}
    (path / "config.json").write_text(json.dumps(config))
    name = rng.choice(["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    how = rng.choice([None, None, "cut", "garbage", "empty", "list", "delete"])
    data = (path / name).read_bytes()
    if how == "cut":
        (path / name).write_bytes(data[: rng.randrange(len(data) - 1)])
    elif how == "garbage":
        (path / name).write_bytes(rng.randbytes(60))
    elif how == "empty":
        (path / name).write_bytes(b"")
    elif how == "list":
        (path / name).write_text("[1]")
    elif how == "delete":
        (path / name).unlink()
    found = outcome(lambda: eos_token_ids(str(path), load_tokenizer(str(path))), str(path))
    if how is None:
        expected = sorted(
            {0, *[i for named in (ids, in_config) for i in (named if isinstance(named, list) else [named])]}
        )
        assert found == expected, f"{found} instead of {expected}"
    elif how != "delete":
        check_refused(found, f"{how} of {name}")
