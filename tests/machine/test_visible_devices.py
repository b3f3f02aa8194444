"""CUDA_VISIBLE_DEVICES in all its forms."""

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.machine.visible_devices import VARIABLE, check_names, name_of_rank, visible_names, without_spaces

UUIDS = ["GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-11111111-2222"]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, None),
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("1,0", ["1", "0"]),
        (" 1 , 0 ", ["1", "0"]),
        ("0,", ["0"]),
        ("GPU-8932f937-d72c, GPU-11111111", ["GPU-8932f937-d72c", "GPU-11111111"]),
    ],
)
def test_names_are_read_without_spaces(value, names):
    environment = {} if value is None else {VARIABLE: value}
    assert visible_names(environment) == names
    check_names(environment, UUIDS)


def test_spaces_are_removed_for_cuda():
    assert without_spaces({VARIABLE: " GPU-a , GPU-b,"}) == {VARIABLE: "GPU-a,GPU-b"}
    for hidden in ({}, {VARIABLE: ""}, {VARIABLE: "-1"}):
        assert without_spaces(hidden) == {}


def test_each_rank_gets_its_own_name_and_none_if_all_are_hidden():
    assert [name_of_rank({}, rank) for rank in (0, 1)] == ["0", "1"]
    assert [name_of_rank({VARIABLE: " 3, 1"}, rank) for rank in (0, 1)] == ["3", "1"]
    assert name_of_rank({VARIABLE: "GPU-a, GPU-b"}, 1) == "GPU-b"
    for hidden in ("", "-1"):
        assert [name_of_rank({VARIABLE: hidden}, rank) for rank in (0, 1)] == [hidden, hidden]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("0,0", "0 occurs twice, so that CUDA sees no GPU; name each once"),
        ("0,-1,1", "CUDA ignores -1 and what follows; remove it, or set -1 alone to hide all GPUs"),
        ("-2", "CUDA ignores -2 and what follows; remove it, or set -1 alone to hide all GPUs"),
        ("0;1", "'0;1' is neither an index nor a UUID; give numbers or names such as GPU-8932f937, with commas"),
        ("0 1", "'0 1' is neither an index nor a UUID; give numbers or names such as GPU-8932f937, with commas"),
        (",0", "'' is neither an index nor a UUID; give numbers or names such as GPU-8932f937, with commas"),
        ("all", "'all' is neither an index nor a UUID; give numbers or names such as GPU-8932f937, with commas"),
        ("0,GPU-1111", "mixes UUIDs and indices, of which CUDA reads one kind only; use one"),
        ("0,3", "there is no GPU 3; the GPUs of this machine number 3, from 0 on"),
        ("GPU-7", f"there is no GPU GPU-7; this machine has {', '.join(UUIDS)}"),
        ("GPU-8932", "GPU-8932 begins the UUIDs of 2 GPUs; write more of it"),
        ("GPU-1,GPU-11", "two names mean the same GPU; name each once"),
        ("MIG-1,MIG-2", "several MIG devices, which NCCL cannot join; name one of them, or GPUs without MIG"),
    ],
)
def test_what_cuda_would_ignore_is_refused(value, sentence):
    with pytest.raises(ConfigError) as error:
        check_names({VARIABLE: value}, UUIDS)
    assert error.value.messages == (f"{VARIABLE} = {value}: {sentence}",)


def test_forms_are_checked_without_a_driver():
    check_names({VARIABLE: "0,7"})
    with pytest.raises(ConfigError, match="occurs twice"):
        check_names({VARIABLE: "7,7"})
