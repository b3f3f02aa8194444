"""The models as the trainer sees them: packed tokens in, log-probs or values of the response tokens out."""

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from hybrid_rl.batch import Packed
from hybrid_rl.config import Config, ConfigError, ModelsConfig, check
from hybrid_rl_kernels import fused_logprobs

# Logits that are scaled or capped after the head; the log-prob head does not apply these yet.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


class LogprobHead(nn.Linear):
    """A model's output projection that can also return log-probs without keeping logits.

    It lives inside the model, so that ZeRO-3's hooks and tied embeddings see an ordinary call of the module.
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0) -> Any:
        """Return logits [..., V]; with targets [R] and hidden [R, H] return (log-probs [R], entropy [R]) in float32."""
        if targets is None:
            return super().forward(hidden)
        return fused_logprobs(hidden, self.weight, targets, temperature, self.bias)


class ValueHead(nn.Linear):
    """A scalar head in float32: bfloat16 would leave a value three significant digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [...] float32 of hidden [..., H]."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class PackedModel(nn.Module):
    """A Hugging Face model that runs on packed sequences, each as if it were alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int) -> Tensor:
        """Return the last hidden states, [N, H]."""
        lengths: dict[str, Any] = {}
        if self.model.config._attn_implementation in ("varlen", "flash_attention_2"):
            lengths = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            lengths |= {"max_length_q": max_length, "max_length_k": max_length}
        elif getattr(self.model.config, "sliding_window", None) is None:
            # Not every model makes its mask from position_ids: OPT's sequences would see their neighbours.
            lengths = {"attention_mask": _block_causal_mask(cu_seqlens, input_ids.shape[1])}
        output = self.model.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **lengths)
        return output.last_hidden_state[0]


def _block_causal_mask(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return [1, 1, N, N] bool: each token sees itself and what stands before it in its own sequence."""
    place = torch.arange(num_tokens, device=cu_seqlens.device)
    sequence = torch.bucketize(place, cu_seqlens, right=True)
    return ((sequence[:, None] == sequence) & (place[:, None] >= place))[None, None]


class Actor(PackedModel):
    """A causal language model; forward returns what the loss needs of the response tokens."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        index: Tensor,
        targets: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, both [R] float32, of targets [R] predicted at positions index [R] of N."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        return self.model.get_output_embeddings()(hidden[index], targets, temperature)


class ValueModel(PackedModel):
    """A sequence classifier with one label: the critic, read at every token, or the reward model, read at the last."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, index: Tensor
    ) -> Tensor:
        """Return the head's output at positions index [R] of N, [R] float32."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        return self.model.score(hidden[index])


def packed_inputs(packed: Packed) -> dict[str, Any]:
    """Return the arguments that Actor and ValueModel share."""
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "cu_seqlens": packed.cu_seqlens,
        "max_length": packed.max_length,
    }


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence through torch's own varlen kernel; query is [1, heads, N, D]."""
    from torch.nn.attention.varlen import varlen_attn

    if cu_seq_lens_q is None or max_length_q is None:
        raise ValueError("varlen attention needs the lengths of the packed sequences; this model drops them on the way")
    groups = query.shape[1] // key.shape[1]
    query, key, value = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    output: Any = varlen_attn(
        query, key, value, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window
    )
    return output[None], None


AttentionInterface.register("varlen", varlen_attention)
AttentionMaskInterface.register("varlen", flash_attention_mask)


def choose_dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype of parameters: as set, or bfloat16 on a GPU and float32 on a CPU."""
    if setting == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, setting)


def choose_attention(setting: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the attention implementation: as set, or flash-attn where it is installed, varlen on a GPU, else SDPA."""
    if setting != "auto":
        return setting
    if device.type != "cuda" or dtype == torch.float32:
        return "sdpa"
    return "flash_attention_2" if importlib.util.find_spec("flash_attn") else "varlen"


def load_config(path: str, *, field: str) -> PretrainedConfig:
    """Return a model's config with every dropout at 0.

    Raises:
        ConfigError: names the field when the folder holds no model, or one whose logits are transformed after the head.
    """
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: no Hugging Face model there ({str(error).splitlines()[0]})") from error
    for name in _LOGIT_TRANSFORMS:
        check(
            getattr(config, name, None) in (None, 1.0),
            f"{field} = {path}: config.{name} = {getattr(config, name, None)} transforms the logits, not supported yet",
        )
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def check_models(config: Config) -> None:
    """Check what the models' folders can tell before anything is loaded.

    Raises:
        ConfigError: a folder holds no model; a sequence would be longer than a model allows; a model has another
            tokenizer than the actor.
    """
    paths = {name: getattr(config.models, name) for name in ("actor", "critic", "reference", "reward")}
    paths = {f"models.{name}": path for name, path in paths.items() if path is not None}
    prompt, response = config.prompts.max_prompt_tokens, config.rollout.max_response_tokens
    configs = {field: load_config(path, field=field) for field, path in paths.items()}
    vocabulary = load_tokenizer(config.models.actor).get_vocab()
    for field, path in paths.items():
        limit = getattr(configs[field], "max_position_embeddings", None)
        check(
            limit is None or prompt + response <= limit,
            f"prompts.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} = {prompt + response}: "
            f"{field} = {path} takes at most {limit} tokens",
        )
        check(
            load_tokenizer(path).get_vocab() == vocabulary,
            f"{field} = {path}: its tokenizer is not the actor's, so it would read other tokens than were sampled",
        )


def _prepare(model: PreTrainedModel, path: str, config: ModelsConfig) -> PreTrainedModel:
    parameters = inspect.signature(model.base_model.forward).parameters
    check("position_ids" in parameters, f"{path}: {type(model).__name__} takes no position_ids and cannot be packed")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _load(auto_class: Any, path: str, config: ModelsConfig, device: torch.device, *, field: str, **extra: Any) -> Any:
    dtype = choose_dtype(config.dtype, device)
    model_config = load_config(path, field=field)
    for name, value in extra.items():
        setattr(model_config, name, value)
    try:
        model, info = auto_class.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            attn_implementation=choose_attention(config.attention, device, dtype),
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{field} = {path}: cannot be loaded ({str(error).splitlines()[0]})") from error
    # from_pretrained leaves evaluation mode, in which transformers ignores gradient checkpointing.
    return _prepare(model.to(device).train(), path, config), set(info["missing_keys"])


def load_actor(path: str, config: ModelsConfig, device: torch.device, *, field: str = "models.actor") -> Actor:
    """Return the causal language model of a folder, in training mode without dropout, on the device."""
    model, _ = _load(AutoModelForCausalLM, path, config, device, field=field)
    model.get_output_embeddings().__class__ = LogprobHead
    return Actor(model)


def load_value_model(
    path: str, config: ModelsConfig, device: torch.device, *, field: str, new_head: bool = False
) -> ValueModel:
    """Return the sequence classifier of a folder; with new_head, a folder without a head gets one of zeros.

    Raises:
        ConfigError: the folder has no trained head and new_head is false.
    """
    model, missing = _load(AutoModelForSequenceClassification, path, config, device, field=field, num_labels=1)
    check(hasattr(model, "score"), f"{field} = {path}: {type(model).__name__} has no `score` head")
    if any(name.startswith("score.") for name in missing):
        check(new_head, f"{field} = {path}: the folder holds no trained `score` head, so it cannot judge responses")
        nn.init.zeros_(model.score.weight)
    model.score.__class__ = ValueHead
    return ValueModel(model)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    Raises:
        ConfigError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no tokenizer there ({str(error).splitlines()[0]})") from error


def eos_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response: the tokenizer's EOS and those of the folder's generation config.

    Raises:
        ConfigError: there is none.
    """
    try:
        from_folder = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        from_folder = None
    ids = from_folder if isinstance(from_folder, list) else [from_folder]
    found = sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
    check(bool(found), f"models.actor = {path}: neither tokenizer nor generation config names an EOS token")
    return found
