"""Comparison of the tensors in a folder with those that a model takes: no weight starts at random, none is left out.

transformers initializes at random what a folder lacks, and drops what a model does not take, with a warning only.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hybrid_rl.config import check
from hybrid_rl.models.folders import build_on_meta, find_model_class, find_value_head, load_config, reading
from hybrid_rl.models.sharding import WeightSharder
from hybrid_rl.models.value_heads import HeadTensors, find_head, own_bias, promises_head
from hybrid_rl.models.weight_files import FolderTensors, ignored_files, read_tensors, shorten

_logger = logging.getLogger(__name__)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the warnings of transformers in the body, whose findings `check_match` reports as errors."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def check_weights(
    path: str,
    *,
    field: str,
    is_policy: bool,
    new_head: bool = False,
    must_exist: bool = True,
    trust_remote_code: bool = False,
) -> None:
    """Check names, shapes and dtypes in the headers of a folder's files against the model, without loading weights.

    transformers itself assigns tensors without data to a model on the meta device, with the renaming, fusing and
    exceptions of each family.

    Args:
        field: setting that names the folder, for messages.
        is_policy: a causal language model; else a sequence classifier with one label.
        new_head: the head of a sequence classifier may be missing.
        must_exist: a folder without weights is refused; a model of the hub is checked when it loads.
        trust_remote_code: see load_config.
    Raises:
        ConfigError: see check_match; the folder holds no weights, or a damaged file.
    """
    where = f"{field} = {path}"
    config = load_config(path, field=field, trust_remote_code=trust_remote_code)
    if not is_policy:
        config.num_labels = 1
    model_class = find_model_class(config, where, is_policy=is_policy)
    tensors = read_tensors(path, where=where, named_file=getattr(config, "transformers_weights", None))
    if tensors is None:
        check(not must_exist or not Path(path).is_dir(), f"{where}: the folder holds no weights, no model.safetensors")
        return
    with quiet_transformers(), reading(f"{where}: config.json or weights do not describe a {model_class.__name__}"):
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors.floats),
            device_map={"": "meta"},
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_match(model, info, where, is_policy=is_policy, new_head=new_head, tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences between a folder's tensors and a model's that are in order; only a value model can have any."""

    new: list[str]
    """Tensors of the value head, which the folder lacks."""
    head: HeadTensors | None = None
    """Tensors of the folder that are the value head under another name, or with a bias that the model lacks."""
    unused: list[str]
    """Tensors of the head of the language model that the folder holds."""


def check_match(
    model: PreTrainedModel,
    info: Mapping[str, Any],
    where: str,
    *,
    is_policy: bool,
    new_head: bool = False,
    tensors: FolderTensors | None = None,
) -> Difference:
    """Check that every weight of a model comes from its folder, and that the model takes every tensor of the folder.

    Tied weights, buffers that are not saved, and names that transformers lists as ignorable do not count as different.

    Args:
        model: as from_pretrained returns it.
        info: loading info of from_pretrained.
        where: setting and folder, for messages.
        is_policy: see check_weights.
        new_head: see check_weights.
        tensors: tensors of the folder.
    Raises:
        ConfigError: a tensor is missing, has another shape or dtype, or is not one of the model's.
    """
    takes, tensors = model.state_dict(), tensors or FolderTensors()
    missing = sorted(n for n in info["missing_keys"] if n not in takes or takes[n].is_floating_point())
    unexpected = sorted(info["unexpected_keys"])
    difference = Difference(new=[], unused=[])
    if not is_policy:
        difference = _head_difference(model, missing, unexpected, tensors, where)
    used = difference.head.names if difference.head else []
    missing = [n for n in missing if n not in difference.new and not (used and _is_of_head(model, n))]
    unexpected = [n for n in unexpected if n not in difference.unused and n not in used]
    _check_no_difference(model, where, missing, unexpected, info["mismatched_keys"], tensors.others)
    if difference.new:
        name, head = find_value_head(model)
        lacks = f"holds no trained `{name}` head, and no tensor of shape [1, {head.in_features}] under another name"
        check(new_head, f"{where}: the folder {lacks}, so it cannot score responses")
        check(
            not promises_head(model.config),
            f"{where}: config.json describes a value model ({', '.join(model.config.architectures or [])}), but the "
            f"folder {lacks}; give a complete folder, or a policy, with which the head starts at zero",
        )
    return difference


def _head_difference(
    model: Any, missing: Sequence[str], unexpected: Sequence[str], tensors: FolderTensors, where: str
) -> Difference:
    """Return where the head of a value model comes from, and which tensors of a language model's head are not used."""
    new = [n for n in missing if _is_of_head(model, n)]
    unused = _language_model_head(model.config, unexpected) if unexpected else []
    free = [n for n in unexpected if n not in unused]
    name, module = find_value_head(model)
    if new:
        head = find_head(tensors.floats, free, model.config, width=module.in_features, where=where)
    else:
        head = own_bias(name, tensors.floats, free)
    return Difference(new=[] if head else new, head=head, unused=unused)


def _is_of_head(model: Any, name: str) -> bool:
    head, _ = find_value_head(model)
    return bool(head) and name.startswith(f"{head}.")


def _check_no_difference(
    model: PreTrainedModel,
    where: str,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Iterable[tuple[str, Any, Any]],
    others: Mapping[str, str],
) -> None:
    """Check that nothing is left that a folder lacks, or that its model does not take."""
    shapes = [f"{n} is {list(a)} instead of {list(b)}" for n, a, b in sorted(mismatched)]
    findings = []
    if missing:
        findings.append(f"lacks {len(missing)} of its tensors ({shorten(missing)})")
    if missing and others:
        dtypes = [f"{name} in {dtype}" for name, dtype in others.items()]
        findings.append(f"holds {len(others)} that are not in floating point ({shorten(dtypes)})")
    if unexpected:
        findings.append(f"holds {len(unexpected)} that it does not take ({shorten(unexpected)})")
    if shapes:
        findings.append(f"has {len(shapes)} of another shape ({shorten(shapes)})")
    check(
        not findings,
        f"{where}: the folder does not hold the weights of the {type(model).__name__} in its config.json: it "
        f"{', '.join(findings)}; use a complete folder whose config.json belongs to its weights",
    )


def _language_model_head(config: PretrainedConfig, names: Sequence[str]) -> list[str]:
    """Return the names among those given that belong to the output projection of the family's language model."""
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return []
    model, head = build_on_meta(find_model_class(config, "", is_policy=True), config, is_policy=True)
    owner = next((name for name, module in model.named_modules() if module is head), None)
    return [name for name in names if owner and name.rpartition(".")[0].endswith(owner)]


def log_choices(path: str, where: str, difference: Difference) -> None:
    """Name the tensors and files of a folder that are new or not used, once per run."""
    parts = [f"{', '.join(difference.new)} is new and starts at zero"] if difference.new else []
    parts += [f"{' and '.join(difference.head.names)} of the folder is the value head"] if difference.head else []
    parts += [f"{name} of the folder is not used" for name in (*difference.unused, *ignored_files(path))]
    is_main = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if parts and is_main:
        _logger.warning("%s: %s", where, "; ".join(parts))


def check_tied(model: PreTrainedModel, where: str, sharder: WeightSharder | None = None) -> None:
    """Check that weights which the config ties are one tensor; a collective with a sharder.

    Args:
        model: as from_pretrained returns it.
        where: setting and folder, for messages.
        sharder: has sharded the weights; transformers then ties them without comparing their values.
    Raises:
        ConfigError: the folder holds different values for them, with which transformers does not tie whole weights.
    """
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        is_one = model.get_parameter_or_buffer(name) is model.get_parameter_or_buffer(source)
        check(
            is_one and (sharder is None or sharder.are_equal(model, name, source)),
            f"{where}: config.json ties {name} to {source}, and the folder holds different values for the two; set "
            "tie_word_embeddings to false there, or delete one of the tensors",
        )
