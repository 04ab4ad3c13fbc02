"""Without a connection the Hub's clients answer at once, and afterwards everything is as it was."""

import socket

import pytest
from huggingface_hub import constants

from mxd.common.network import asking_hub


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("mxd.common.network.getproxies", dict)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening


def test_a_hub_that_can_be_reached_is_asked(online):
    with asking_hub():
        assert constants.HF_HUB_OFFLINE is False


def test_one_that_cannot_is_not_asked_again_and_again(online):
    online.close()
    with pytest.raises(KeyError), asking_hub():
        assert constants.HF_HUB_OFFLINE is True
        raise KeyError
    assert constants.HF_HUB_OFFLINE is False


def test_a_proxy_is_left_to_answer(online, monkeypatch):
    online.close()
    monkeypatch.setattr("mxd.common.network.getproxies", lambda: {"https": "http://proxy"})
    with asking_hub():
        assert constants.HF_HUB_OFFLINE is False
