"""Tokenizers of model folders: token ids of texts, texts of token ids, and the ids that end a response."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, cached_file

from hybrid_rl.config import ConfigError, check
from hybrid_rl.models.folders import CODE, TRUST, reading

PROBE_LENGTH = 64
"""Characters of a text that show which special tokens a tokenizer adds."""
PROBES = (
    "",
    "a",
    " Hello  world,\tit's 12345.67!\r\n\n  ",
    "def f(x):\n    return x != 0x1F  # HTML <b>&amp;</b> snake_case camelCase",
    "\u00c5ngstr\u00f6m A\u030angstro\u0308m \ufb01 \uff21 \u2460",  # composed, decomposed and compatibility characters
    "\u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f469\u200d\U0001f680",
)
"""Texts in which special tokens, normalization and the rules for spaces, digits, case and bytes show."""


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    Args:
        trust_remote_code: run the Python code that the folder names.
    Raises:
        ConfigError: the folder holds none, or one that is damaged, or that needs code which may not run.
    """
    with reading(f"{path}: no tokenizer there"):
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise ConfigError(
                f"{path}: the tokenizer needs Python code of its own ({CODE} in its JSON files): {TRUST}, or use a "
                "tokenizer whose class is part of transformers"
            ) from error


def load_other_tokenizer(
    path: str, tokenizer: PreTrainedTokenizerBase, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model folder if it gives texts other ids than the given tokenizer, else None.

    Raises:
        ConfigError: see load_tokenizer.
    """
    other = load_tokenizer(path, trust_remote_code=trust_remote_code)
    return None if _ids_of_texts(other) == _ids_of_texts(tokenizer) else other


def _ids_of_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """Return what decides the ids of texts: vocabulary, added tokens, and the ids of texts in which rules show."""
    added = {
        i: (t.content, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in tokenizer.added_tokens_decoder.items()
    }
    return tokenizer.get_vocab(), added, [list(tokenizer(text)["input_ids"]) for text in PROBES]


def eos_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every id that ends a response, sorted: the ids that tokenizer, generation_config.json or config.json name.

    Raises:
        ConfigError: none of the sources names one, or a file of the folder cannot be read.
    """
    named = [*_named_eos(path, GENERATION_CONFIG_NAME), *_named_eos(path, CONFIG_NAME), tokenizer.eos_token_id]
    found = sorted({i for i in named if i is not None})
    files = f"{GENERATION_CONFIG_NAME} nor {CONFIG_NAME}"
    check(bool(found), f"models.actor = {path}: neither the tokenizer nor {files} names an EOS token")
    return found


def _named_eos(path: str, file_name: str) -> list[int]:
    """Return the ids under `eos_token_id` in a JSON file of a model; none if there is no such file or key."""
    file = cached_file(
        path,
        file_name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    if file is None:
        return []
    try:
        keys = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {file_name} cannot be read: {error}") from error
    ids = keys.get("eos_token_id") if isinstance(keys, dict) else None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    check(
        isinstance(keys, dict) and all(type(i) is int and i >= 0 for i in ids),
        f"{path}: {file_name} must be a JSON object whose eos_token_id is a token id or a list of them, got {ids}",
    )
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that goes on: with the tokens that the tokenizer puts before a text, such as BOS,
    once, and without those that it puts after one, such as EOS or a separator. A BOS that the text repeats occurs once.

    Raises:
        ConfigError: the tokenizer changes the text's own tokens when it adds special tokens.
    """
    token_ids = _plain(tokenizer, text)
    probe = text[:PROBE_LENGTH]
    added = _added_before(tokenizer, probe, token_ids if probe == text else _plain(tokenizer, probe))
    token_ids = token_ids if token_ids[: len(added)] == added else added + token_ids
    bos = tokenizer.bos_token_id
    while bos is not None and token_ids[:2] == [bos, bos]:
        del token_ids[0]
    return token_ids


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _added_before(tokenizer: PreTrainedTokenizerBase, text: str, plain: list[int]) -> list[int]:
    """Return the special tokens that the tokenizer puts before a text; none if the text has no tokens.

    Args:
        plain: ids of the text alone.
    """
    full = list(tokenizer(text)["input_ids"])
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    raise ConfigError(
        f"the tokenizer {tokenizer.name_or_path!r} gives {text!r} the tokens {plain}, and with special tokens {full}, "
        "which do not contain them: use a tokenizer that adds special tokens before and after a text only"
    )


def decode_after(tokenizer: PreTrainedTokenizerBase, before: list[int], token_ids: list[int]) -> str:
    """Return the text of tokens that follow others; special tokens are part of it.

    Decoded alone, the tokens of a SentencePiece tokenizer would lose the space before the first word.
    """
    start, text = _decode(tokenizer, before), _decode(tokenizer, before + token_ids)
    # An incomplete character of byte tokens also garbles a character of byte tokens directly before it.
    return text[len(start) :] if text.startswith(start) else _decode(tokenizer, token_ids)


def decode_response(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    token_ids: Sequence[int],
    *,
    stop_token_ids: Collection[int],
) -> str:
    """Return the text of sampled tokens without the stop token at their end, if there is one; see decode_after.

    Args:
        before: tokens before them.
        stop_token_ids: none for tokens that a limit has ended.
    """
    ids = list(token_ids)
    if ids and ids[-1] in stop_token_ids:
        del ids[-1]
    return decode_after(tokenizer, list(before), ids)


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> str:
    """Return the text that stands for the ids, neither shortened nor embellished."""
    return tokenizer.decode(
        token_ids,
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
        spaces_between_special_tokens=False,
    )
