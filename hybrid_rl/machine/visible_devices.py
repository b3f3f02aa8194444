"""The forms of CUDA_VISIBLE_DEVICES, and the device of each rank. Imports no torch.

CUDA does not report what it cannot use: it stops at the first name that it does not know, and sees no GPU at all if a
name occurs twice. A run would then have fewer GPUs than its user meant, or train on the CPU.
"""

from collections.abc import Mapping, Sequence

from hybrid_rl.config import ConfigError, check

VARIABLE = "CUDA_VISIBLE_DEVICES"
HIDDEN = ("", "-1", "NoDevFiles")
"""Values that hide all GPUs."""


def visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the visible GPUs: indices or UUIDs, without spaces; None if the variable is not set.

    The list is empty if the variable hides all GPUs.
    """
    value = environment.get(VARIABLE)
    if value is None:
        return None
    if value.strip() in HIDDEN:
        return []
    return [name.strip() for name in value.rstrip(", ").split(",")]


def without_spaces(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable as CUDA reads it, which takes spaces and a comma at the end for the end of the list.

    Empty if the variable is not set, or hides all GPUs.
    """
    names = visible_names(environment)
    return {VARIABLE: ",".join(names)} if names else {}


def name_of_rank(environment: Mapping[str, str], local_rank: int) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a rank sees its own GPU, or none if all are hidden."""
    names = visible_names(environment)
    if names is None:
        return str(local_rank)
    return names[local_rank] if names else environment[VARIABLE]


def check_names(environment: Mapping[str, str], uuids: Sequence[str] | None = None) -> None:
    """Check that CUDA sees a GPU for every name in CUDA_VISIBLE_DEVICES.

    Args:
        uuids: UUIDs of all GPUs of the machine, in the driver's order; None if they are not known.

    Raises:
        ConfigError: a name is malformed, negative or repeated, or names no GPU; or names of several kinds are mixed.
    """
    names = visible_names(environment)
    if not names:
        return
    field = f"{VARIABLE} = {environment[VARIABLE]}"
    kinds = {_kind(name, field) for name in names}
    check(len(kinds) == 1, f"{field}: mixes {' and '.join(sorted(kinds))}, of which CUDA reads one kind only; use one")
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    check(not repeated, f"{field}: {', '.join(repeated)} occurs twice, so that CUDA sees no GPU; name each once")
    check(
        kinds != {"MIG UUIDs"} or len(names) == 1,
        f"{field}: several MIG devices, which NCCL cannot join; name one of them, or GPUs without MIG",
    )
    if uuids is not None and kinds == {"indices"}:
        absent = [name for name in names if int(name) >= len(uuids)]
        numbers = f"number {len(uuids)}, from 0 on" if uuids else "are missing: the driver lists none"
        check(not absent, f"{field}: there is no GPU {', '.join(absent)}; the GPUs of this machine {numbers}")
    if uuids is not None and kinds == {"UUIDs"}:
        _check_uuids(field, names, uuids)


def _check_uuids(field: str, names: Sequence[str], uuids: Sequence[str]) -> None:
    """Check that every name is the beginning of exactly one UUID, and of another one than the other names."""
    found = {name: [uuid for uuid in uuids if uuid.startswith(name)] for name in names}
    for name, matches in found.items():
        check(len(matches) > 0, f"{field}: there is no GPU {name}; this machine has {', '.join(uuids) or 'none'}")
        check(len(matches) == 1, f"{field}: {name} begins the UUIDs of {len(matches)} GPUs; write more of it")
    firsts = [matches[0] for matches in found.values()]
    check(len(set(firsts)) == len(firsts), f"{field}: two names mean the same GPU; name each once")


def _kind(name: str, field: str) -> str:
    if name.startswith("GPU-"):
        return "UUIDs"
    if name.startswith("MIG-"):
        return "MIG UUIDs"
    if name.startswith("-") and name[1:].isdigit():
        raise ConfigError(f"{field}: CUDA ignores {name} and what follows; remove it, or set -1 alone to hide all GPUs")
    check(
        name.isascii() and name.isdigit(),
        f"{field}: {name!r} is neither an index nor a UUID; give numbers or names such as GPU-8932f937, with commas",
    )
    return "indices"
