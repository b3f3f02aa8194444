"""Identifies the models of a run by the content of their folders. Imports no torch."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.checkpoints.manifest import digest_files
from hybrid_rl.config import Config, check

SUFFIXES = {".safetensors", ".bin", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py"}
"""Endings of the files that hold weights, config or tokenizer of a model."""


def model_paths(config: Config) -> dict[str, str]:
    """Return role -> folder or name on the hub of each model that the run loads."""
    models = config.models
    paths = {"actor": models.actor, "reward": models.reward}
    if config.has_critic:
        paths["critic"] = models.critic or models.reward or models.actor
    if config.has_reference and not config.reference_is_actor:
        paths["reference"] = models.reference or models.actor
    return {role: path for role, path in sorted(paths.items()) if path}


def model_contents(config: Config, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return role -> `path`, `content` and `files` of each model that the run loads, as JSON values.

    `content` is the hash of the names and contents of the folder's files with an ending of SUFFIXES, so a copy of the
    folder has the same one. A file is not read again if `known` has its size, time of change and inode.

    Args:
        config: settings of the run.
        known: what an earlier call returned.
    Raises:
        ConfigError: the local cache of the hub does not hold a model that is given by its name there.
    """
    digests = {_key(file): file["sha256"] for model in (known or {}).values() for file in model.get("files", [])}
    paths, contents = model_paths(config), dict[str, Any]()
    for path in dict.fromkeys(paths.values()):
        files = _files(Path(path), digests) if Path(path).is_dir() else []
        named = [(Path(file["path"]).name, file["sha256"]) for file in files]
        content = hashlib.sha256(json.dumps(named).encode()).hexdigest() if files else _hub_commit(path)
        contents[path] = {"path": path, "content": content, "files": files}
    return {role: contents[path] for role, path in paths.items()}


def _files(folder: Path, digests: dict[tuple[Any, ...], str]) -> list[dict[str, Any]]:
    """Return an entry for every file of a model, in the order of their names; adds what it hashes to the digests."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name[0] != ".")
    entries = []
    for path in paths:
        status = os.stat(path)
        name = str(path.resolve())
        entries.append(
            {"path": name, "bytes": status.st_size, "changed_ns": status.st_mtime_ns, "inode": status.st_ino}
        )
    unknown = {path: entry for path, entry in zip(paths, entries, strict=True) if _key(entry) not in digests}
    found = digest_files(unknown)
    digests.update({_key(entry): found[path] for path, entry in unknown.items()})
    return [
        entry | {"path": str(path), "sha256": digests[_key(entry)]} for path, entry in zip(paths, entries, strict=True)
    ]


def _key(file: Mapping[str, Any]) -> tuple[Any, ...]:
    return str(Path(file["path"]).resolve()), file["bytes"], file["changed_ns"], file["inode"]


def _hub_commit(name: str) -> str:
    """Return the commit of a model on the hub, which its content follows from.

    Raises:
        ConfigError: the local cache of the hub does not hold the model.
    """
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    check(isinstance(config, str), f"{name}: the local cache of the Hugging Face hub holds no config.json of it")
    return f"commit {Path(str(config)).parent.name}"  # a cached file is snapshots/<commit>/<name of the file>


class ModelContents:
    """The contents of a run's models, hashed in a thread while the models load."""

    def __init__(self, config: Config) -> None:
        """Start to hash."""
        self._contents: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._hash, args=(config,), daemon=True)
        self._thread.start()

    def _hash(self, config: Config) -> None:
        try:
            self._contents = model_contents(config)
        except BaseException as error:
            self._error = error

    def wait(self) -> dict[str, Any]:
        """Return what model_contents returns, when it is known.

        Raises:
            OSError: a file cannot be read.
            ConfigError: see model_contents.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._contents
