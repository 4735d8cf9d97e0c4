from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain import CheckpointError, Trainer
from drivetrain.trackers.secrets import HIDDEN, Secrets, is_secret_name
from tests.callbacks.tasks import Scripted, numbers


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


SECRET = "hunter2hunter2"
ADDRESSES = [
    f"https://user:{SECRET}@host/x",
    f"https://user:a@{SECRET}@host",
    f"http://user:a/{SECRET}@host/x",
    f"http://user:a#b?{SECRET}@host/x",
    f"https://{SECRET}@github.com/a/b.git",
    f"git+https://{SECRET}@github.com/a/b",
    f"redis://:{SECRET}@host:6379/0",
    f"s3://AKIA:{SECRET}@bucket/path",
    f"HTTPS://USER:{SECRET}@HOST",
    f"https://host/x?a=1&access_token={SECRET}&b=2",
    f"https://host/x?X-Amz-Signature={SECRET}",
    f"https://host/back#access_token={SECRET}",
    f"https://host?auth={SECRET}",
    f"https://host?AWSAccessKeyId={SECRET}",
    f"abfs://box@account/x?sas={SECRET}",
    f"two: https://a:{SECRET}@h and https://b:{SECRET}@k",
]


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_lose_their_credentials_wherever_they_go(address: str) -> None:
    assert SECRET not in Secrets().in_text(address)
    assert SECRET not in str(CheckpointError(f"{address} cannot be read"))


@pytest.mark.parametrize(
    "text",
    [
        "abfs://box@account.dfs.core.windows.net/x",
        "ssh://git@github.com/a",
        "https://host:8080/path@v1",
        "https://host/x?monkey=1&max_tokens=5",
        "user@host",
    ],
)
def test_addresses_without_credentials_stay(text: str) -> None:
    assert Secrets().in_text(text) == text


def test_credentials_of_a_root_reach_no_file_of_a_run_and_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import fsspec

    monkeypatch.chdir(tmp_path)
    root = f"memory://me:{SECRET}@bucket/root"
    task = Scripted([1.0])
    task.hparams["data"] = f"https://me:{SECRET}@host/data"
    Trainer(max_epochs=1, default_root_dir=root, num_sanity_val_steps=0).fit(task, numbers(8, 4), numbers(8, 4))
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    system = fsspec.filesystem("memory")
    written += [system.cat_file(path) for path in system.find("/") if SECRET in path]
    assert len(written) > 5
    assert not [content for content in written if SECRET.encode() in content]
