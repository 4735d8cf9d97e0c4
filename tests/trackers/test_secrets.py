from __future__ import annotations

from typing import Any

import pytest

from drivetrain.trackers.secrets import HIDDEN, Secrets, is_secret_name


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "hf_token",
        "token",
        "clientSecret",
        "secret",
        "password",
        "aws_secret_key",
    ],
)
def test_names_of_secrets_are_found(name: str) -> None:
    assert is_secret_name(name)
    assert Secrets().hide({name: "s3cret"}) == {name: HIDDEN}


@pytest.mark.parametrize(
    "name", ["max_tokens", "pad_token", "eos_token", "tokenizer", "key", "num_keys", "PWD", "secretary", "token_type"]
)
def test_names_of_other_things_are_left_alone(name: str) -> None:
    assert Secrets().hide({name: "<pad>"}) == {name: "<pad>"}


@pytest.mark.parametrize("value", [None, True, 3, 0.5, ""])
def test_what_is_no_text_is_no_secret(value: Any) -> None:
    assert Secrets().hide({"token": value}) == {"token": value}


def test_known_secrets_are_hidden_wherever_they_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_API_KEY", "environment-value")
    secrets = Secrets(["given-value"])
    given = {"url": "https://u:given-value@host", "nested": [{"note": "environment-value!"}, ("given-value", 3)]}
    assert secrets.hide(given) == {
        "url": f"https://u:{HIDDEN}@host",
        "nested": [{"note": f"{HIDDEN}!"}, (HIDDEN, 3)],
    }
    assert secrets.in_text("failed for environment-value") == f"failed for {HIDDEN}"


def test_short_values_of_the_environment_are_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USE_TOKEN", "1")
    assert Secrets().hide({"layers": "1"}) == {"layers": "1"}


def test_a_checkpoint_leaves_out_what_is_secret_so_that_a_constructor_takes_its_default() -> None:
    given = {"lr": 0.1, "api_key": "s3cret", "auth": {"token": "s3cret", "user": "me"}, "token": None}
    assert Secrets().drop(given) == {"lr": 0.1, "auth": {"user": "me"}, "token": None}
