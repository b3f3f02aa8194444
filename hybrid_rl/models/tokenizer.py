"""Tokenizers of model folders, and the token ids that end a response."""

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, check


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    Raises:
        ConfigError: the folder holds none.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no tokenizer there ({str(error).splitlines()[0]})") from error


def load_other_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder if its vocabulary differs from the given tokenizer's, else None.

    Raises:
        ConfigError: the folder holds no tokenizer.
    """
    other = load_tokenizer(path)
    return None if other.get_vocab() == tokenizer.get_vocab() else other


def eos_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response, sorted: the tokenizer's EOS and those of the folder's generation config.

    Raises:
        ConfigError: neither names one.
    """
    try:
        from_folder = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        from_folder = None
    ids = from_folder if isinstance(from_folder, list) else [from_folder]
    found = sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})
    check(bool(found), f"models.actor = {path}: neither tokenizer nor generation config names an EOS token")
    return found
