"""The hub where it answers, and where it does not."""

import os
import socket

import pytest
from huggingface_hub import constants

from hybrid_rl.machine.hub import use_cache_if_unreachable
from tests.data.hub import running_hub


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def test_the_cache_alone_is_used_where_the_hub_does_not_answer(online, monkeypatch, tmp_path, caplog):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    use_cache_if_unreachable([str(tmp_path)])
    assert not constants.is_offline_mode() and not caplog.messages
    use_cache_if_unreachable([str(tmp_path), "me/model"])
    assert constants.is_offline_mode() and os.environ["HF_HUB_OFFLINE"] == "1"
    (message,) = caplog.messages
    assert f"127.0.0.1:{port} does not answer: me/model can be read from the local cache alone" in message


def test_a_hub_that_answers_is_used_whatever_it_says(online, monkeypatch):
    with running_hub({}) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        use_cache_if_unreachable(["me/model"])
        assert not constants.is_offline_mode() and len(hub.paths) == 1


def test_a_run_that_is_offline_already_does_not_ask(monkeypatch, caplog):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://no.such.host")
    use_cache_if_unreachable(["me/model"])
    assert not caplog.messages
