"""The head of a value model in the files of a folder, under whatever name its trainer has given it.

A head maps a hidden state to one number, so its weight has shape [1, H]. transformers calls it `score`; OpenRLHF names
it in config.json (value_head_prefix), TRL calls it `v_head.summary`, ColossalChat `value_head`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybrid_rl.config import check
from hybrid_rl.models.weight_files import read_tensor, shorten

KNOWN = (
    "score",
    "value_head",
    "v_head.summary",
    "v_head",
    "classifier",
    "classifier.out_proj",
    "classification_head.out_proj",
    "regression_head",
    "regression_layer",
    "reward_head",
    "rm_head",
)
"""Names of heads in the folders of other trainers; each holds a weight and maybe a bias."""
PREFIX_KEY = "value_head_prefix"
"""Key of config.json by which OpenRLHF names the head."""
VALUE_CLASSES = ("ForSequenceClassification", "ForTokenClassification", "CriticModel", "RewardModel", "ValueModel")
"""Ends of the names of classes, in config.json, whose folders hold a trained head."""


@dataclass(frozen=True, kw_only=True)
class HeadTensors:
    """The tensors of a folder that are the head of its value model."""

    weight: str
    bias: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return [self.weight, *([self.bias] if self.bias else [])]


def find_head(
    tensors: Mapping[str, Tensor], unused: Iterable[str], config: PretrainedConfig, *, width: int, where: str
) -> HeadTensors | None:
    """Return the tensors of a value model's head among those that the model does not take; None if there are none.

    Args:
        tensors: name -> tensor of the folder, which may have no data.
        unused: names of the tensors that the model does not take.
        config: of the model.
        width: size of the hidden states that the head reads.
        where: setting and folder, for messages.
    Raises:
        ConfigError: config.json names a head that is not there; or several tensors could be the head.
    """
    free = {name: tuple(tensors[name].shape) for name in unused if name in tensors}
    heads = {name.removesuffix(".weight"): name for name, shape in free.items() if shape == (1, width)}
    named = getattr(config, PREFIX_KEY, None)
    if named is not None and named != "score":
        check(
            named in heads or not heads,
            f"{where}: config.json names the head {named} ({PREFIX_KEY}), but the folder has {shorten(sorted(heads))}; "
            f"correct {PREFIX_KEY}",
        )
        heads = {name: weight for name, weight in heads.items() if name == named}
    known = [name for name in KNOWN if name in heads]
    check(
        len(heads) < 2 or len(known) == 1,
        f"{where}: several tensors could be the head of the value model ({shorten(sorted(heads.values()))}); name one "
        f"in config.json ({PREFIX_KEY}), or delete the others",
    )
    if not heads:
        return None
    weight = heads[known[0]] if known else next(iter(heads.values()))
    return HeadTensors(weight=weight, bias=_bias(weight, free))


def own_bias(name: str, tensors: Mapping[str, Tensor], unused: Iterable[str]) -> HeadTensors | None:
    """Return the head that a model takes, with a bias in the folder that the model has no place for; None without."""
    bias = _bias(f"{name}.weight", {other: tuple(tensors[other].shape) for other in unused if other in tensors})
    return HeadTensors(weight=f"{name}.weight", bias=bias) if bias else None


def _bias(weight: str, free: Mapping[str, tuple[int, ...]]) -> str | None:
    name = f"{weight.removesuffix('.weight')}.bias"
    return name if free.get(name) == (1,) else None


def promises_head(config: PretrainedConfig) -> bool:
    """Return whether config.json says that the folder holds a trained head."""
    names = getattr(config, "architectures", None) or []
    return getattr(config, PREFIX_KEY, None) is not None or any(name.endswith(VALUE_CLASSES) for name in names)


@torch.no_grad()
def load_head(head: Any, path: str, found: HeadTensors, *, where: str, named_file: str | None = None) -> None:
    """Copy the tensors of a folder into a head, which gets a bias where the folder has one.

    Args:
        head: the linear layer of a model.
        path: folder of the model.
        found: tensors of the folder.
        where: setting and folder, for messages.
        named_file: see read_tensors.
    """
    head.weight.copy_(read_tensor(path, found.weight, where=where, named_file=named_file))
    if found.bias:
        bias = read_tensor(path, found.bias, where=where, named_file=named_file)
        head.bias = nn.Parameter(bias.to(head.weight.dtype))
