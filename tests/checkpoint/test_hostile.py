"""A checkpoint made to do harm: its checksums are right, and what it says is not what any run wrote."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain import CheckpointError, DrivetrainError
from drivetrain.checkpoint import (
    Checkpoint,
    consolidate,
    describe_run_state,
    load_run_state,
    newest_checkpoint,
    remove_checkpoint,
    save_run_state,
)
from tests.checkpoint.states import alone, digest, own_state, reseal, reseal_manifest, run_state, write

MANIFEST = "MANIFEST.json"
INDEX = "tensors/index.json"
FILE = "tensors/rank_0_0.safetensors"
WEIGHT = "state_dict/layer.weight"  # 8 x 4 values

touched: list[str] = []  # what under a folder called "outside" was opened, written, listed or removed
_watching: list[bool] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event.startswith(("open", "os.", "shutil.")):
        for arg in args:
            if isinstance(arg, str | bytes) and f"{os.sep}outside" in os.fsdecode(arg):
                touched.append(f"{event}: {os.fsdecode(arg)}")


sys.addaudithook(_watch)


@contextmanager
def nothing_outside_touched() -> Iterator[None]:
    touched.clear()
    _watching.append(True)
    try:
        yield
    finally:
        _watching.pop()
    assert touched == []


def test_the_watch_sees_what_is_touched(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    with pytest.raises(AssertionError), nothing_outside_touched():
        (tmp_path / "outside" / "file").write_text("x")
    with pytest.raises(AssertionError), nothing_outside_touched():
        shutil.rmtree(tmp_path / "outside")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("written") / "one"
    shared = {**run_state(3), "odd": {"dtype": torch.float16, "tuple": (1, 2), "number": torch.tensor(1.5)}}
    save_run_state(directory, shared, own_state(), alone())
    return directory


@pytest.fixture
def checkpoint(written: Path, tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    (outside / "tensors").mkdir(parents=True)
    for name in ("secret.json", "tensors/index.json"):
        (outside / name).write_text("{}")
    return Path(shutil.copytree(written, tmp_path / "root" / "one"))


def edit(directory: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a JSON file and reseal it; what `change` returns, if anything, takes the place of all."""
    content = json.loads((directory / name).read_bytes())
    changed = change(content)
    reseal(directory, name, json.dumps(content if changed is None else changed).encode())


def chunk_of(index: Any, key: str = WEIGHT) -> Any:
    return index["tensors"][key]["chunks"][0]


def entry(**values: Any) -> Callable[[Any], Any]:
    return lambda index: index["tensors"][WEIGHT].update(values)


def chunk(**values: Any) -> Callable[[Any], Any]:
    return lambda index: chunk_of(index).update(values)


def two_chunks(first: tuple[int, int], second: tuple[int, int]) -> Callable[[Any], Any]:
    """Cut the weight's 8 rows in two parts: (first row, rows)."""

    def change(index: Any) -> None:
        whole = chunk_of(index)
        index["tensors"][WEIGHT]["chunks"] = [
            {
                "offsets": [row, 0],
                "sizes": [rows, 4],
                "file": whole["file"],
                "start": whole["start"] + 64 * number,
                "nbytes": rows * 16,
            }
            for number, (row, rows) in enumerate((first, second))
        ]

    return change


def swapped(index: Any) -> None:
    """Let two tensors of one dtype and shape lie where the other one does."""
    other = "optimizer_states/0/state/layer.weight/exp_avg"
    here, there = chunk_of(index), chunk_of(index, other)
    here["start"], there["start"] = there["start"], here["start"]


def drop_weight(index: Any) -> None:
    del index["tensors"][WEIGHT]


INDEXES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda index: [], "lists no tensors"),
    "no tensors": (lambda index: {"tensors": []}, "lists no tensors"),
    "a tensor that is a number": (lambda index: index["tensors"].update({WEIGHT: 3}), "not described"),
    "no parts": (entry(chunks=[]), "has 32 values, but its parts contain only 0"),
    "parts that are a dict": (entry(chunks={}), "not described"),
    "a part that is text": (entry(chunks=["x"]), "a part without a description"),
    "a larger tensor than its parts": (entry(size=[80, 4]), "has 320 values, but its parts contain only 32"),
    "a hole between parts": (two_chunks((0, 4), (5, 3)), "but its parts contain only 28"),
    "two parts for one row": (two_chunks((0, 4), (3, 4)), "two overlapping parts"),
    "one part twice": (two_chunks((0, 4), (0, 4)), "two overlapping parts"),
    "a part beyond its tensor": (two_chunks((0, 4), (6, 4)), r"of size \[4, 4\] at \[6, 0\], .* its size \[8, 4\]"),
    "fewer dimensions in a part": (chunk(offsets=[0], sizes=[32]), "a part of"),
    "an offset below zero": (chunk(offsets=[-1, 0]), "only non-negative integers"),
    "a fraction": (chunk(sizes=[8.0, 4]), "only non-negative integers"),
    "true as a number": (chunk(offsets=[False, 0]), "only non-negative integers"),
    "a size that is text": (entry(size="84"), "only non-negative integers"),
    "a size of more than there is": (entry(size=[2**62, 2**62]), "which is too large"),
    "a size beyond 64 bits": (entry(size=[2**70]), "only non-negative integers"),
    "an empty size beyond 64 bits": (entry(size=[0, 2**62, 2**62]), "which is too large"),
    "a start below zero": (chunk(start=-8), "only non-negative integers"),
    "a start beyond the file": (chunk(start=10**6), "an invalid position or length"),
    "another length": (chunk(nbytes=64), "an invalid position or length"),
    "the bytes of another tensor": (swapped, "its header does not list .*layer.weight.* with"),
    "the bytes of the header": (chunk(start=0), "its header does not list state_dict/layer.weight with"),
    "the bytes of two tensors": (
        lambda index: chunk_of(index, "state_dict/layer.bias").update(start=chunk_of(index)["start"]),
        "overlaps ",
    ),
    "another dtype of the same length": (entry(dtype="int32"), "its header does not list state_dict/layer.weight"),
    "a function as a dtype": (entry(dtype="load"), "has the dtype 'load'"),
    "a dtype that is no text": (entry(dtype=["float32"]), "has the dtype"),
    "a quantised dtype": (entry(dtype="quint8"), "has the dtype 'quint8'"),
    "a file outside": (chunk(file="../../outside/secret.json"), "position or length in the file ../../outside"),
    "a file that is none": (chunk(file=None), "position or length in the file None"),
    "a file of another kind": (
        chunk(file="state.json", start=0),
        "does not begin with a valid header",
    ),
    "a tensor that is not there": (drop_weight, "does not list the tensor state_dict"),
}


@pytest.mark.parametrize("change", INDEXES)
def test_an_index_that_no_run_wrote_is_refused(change: str, checkpoint: Path) -> None:
    how, message = INDEXES[change]
    edit(checkpoint, INDEX, how)
    with nothing_outside_touched():
        with pytest.raises(CheckpointError, match=message):
            load_run_state(checkpoint, alone())
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(checkpoint).verify()
        assert newest_checkpoint(checkpoint.parent) is None


@pytest.mark.parametrize("change", ["a hole between parts", "the bytes of another tensor", "a function as a dtype"])
def test_weights_are_not_exported_by_such_an_index(change: str, checkpoint: Path, tmp_path: Path) -> None:
    how, message = INDEXES[change]
    edit(checkpoint, INDEX, how)
    with pytest.raises(CheckpointError, match=message):
        consolidate(checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_an_empty_part_does_not_take_the_place_of_a_full_one(checkpoint: Path) -> None:
    def add_empty(index: Any) -> None:
        index["tensors"][WEIGHT]["chunks"].append({**chunk_of(index), "sizes": [0, 4], "nbytes": 0})

    edit(checkpoint, INDEX, add_empty)
    weight = load_run_state(checkpoint)[0]["state_dict"]["layer.weight"]
    assert torch.equal(weight, run_state(3)["state_dict"]["layer.weight"])


def odd(value: Any) -> Callable[[Any], Any]:
    return lambda state: state["odd"].update(value=value)


TREES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a list": (lambda state: [state], "not a JSON object with named entries"),
    "a number": (lambda state: 3, "not a JSON object with named entries"),
    "a tuple": (lambda state: {"__tuple__": []}, "not a JSON object with named entries"),
    "a function as a dtype": (odd({"__dtype__": "load"}), "'__dtype__': 'load'"),
    "a module as a dtype": (odd({"__dtype__": "os"}), "'__dtype__': 'os'"),
    "a quantised dtype": (odd({"__dtype__": "quint8"}), "'__dtype__': 'quint8'"),
    "a list as a dtype": (odd({"__dtype__": ["float32"]}), "'__dtype__': list"),
    "a device that is none": (odd({"__device__": "fridge"}), "'__device__': 'fridge'"),
    "a number as a device": (odd({"__device__": 3}), "'__device__': 3"),
    "a path that is a number": (odd({"__path__": 3}), "'__path__': 3"),
    "a path with a null byte": (odd({"__path__": "a\0b"}), "__path__"),
    "bytes that are no base64": (odd({"__bytes__": "?"}), "'__bytes__': '\\?'"),
    "bytes that are not ASCII": (odd({"__bytes__": "ä"}), "__bytes__"),
    "a float that is a word": (odd({"__float__": "seven"}), "'__float__': 'seven'"),
    "a float that JSON can write": (odd({"__float__": "1.0"}), "'__float__': '1.0'"),
    "half a complex number": (odd({"__complex__": ["1"]}), "__complex__"),
    "a complex number of lists": (odd({"__complex__": [[], []]}), "__complex__"),
    "a tuple that is a number": (odd({"__tuple__": 3}), "'__tuple__': 3"),
    "a tuple that is text": (odd({"__tuple__": "ab"}), "'__tuple__': 'ab'"),
    "a set of lists": (odd({"__set__": [[1]]}), "__set__"),
    "a frozen set of dicts": (odd({"__frozenset__": [{}]}), "__frozenset__"),
    "a deque that is a dict": (odd({"__deque__": {"a": 1}}), "__deque__"),
    "a dict without pairs": (odd({"__dict__": [1]}), "__dict__"),
    "a dict with triples": (odd({"__dict__": [[1, 2, 3]]}), "__dict__"),
    "a dict with a list as key": (odd({"__dict__": [[[1], 2]]}), "__dict__"),
    "a counter of text": (odd({"__counter__": [["a", "b"]]}), "__counter__"),
    "a tensor without a name": (odd({"__tensor__": None}), "'__tensor__': None"),
    "a tensor with a list as name": (odd({"__tensor__": [WEIGHT]}), "'__tensor__': list"),
    "a tensor that is not there": (odd({"__tensor__": "nothing"}), "does not list the tensor nothing"),
    "an array that is not there": (odd({"__ndarray__": "nothing"}), "does not list the tensor nothing"),
}


@pytest.mark.parametrize("name", ["state.json", "process_0.json"])
@pytest.mark.parametrize("change", TREES)
def test_a_state_that_no_run_wrote_is_refused(change: str, name: str, checkpoint: Path) -> None:
    how, message = TREES[change]

    def in_either(content: Any) -> Any:
        content.setdefault("odd", {})
        return how(content)

    edit(checkpoint, name, in_either)
    with nothing_outside_touched():
        with pytest.raises(CheckpointError, match=message) as raised:
            load_run_state(checkpoint, alone())
        assert name in str(raised.value)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(checkpoint).verify()
        if name == "state.json":
            with pytest.raises(CheckpointError, match=message):
                describe_run_state(checkpoint)


@pytest.mark.parametrize("content", [b"[" * 100_000 + b"]" * 100_000, b'{"a": NaN}', b'{"a": Infinity}', b"\xff"])
def test_what_is_no_state_at_all_is_refused(content: bytes, checkpoint: Path) -> None:
    reseal(checkpoint, "state.json", content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load_run_state(checkpoint)


def test_a_state_nested_beyond_pythons_depth_is_refused(checkpoint: Path) -> None:
    deep = b"[" * 900 + b"]" * 900  # which the parser still takes
    reseal(checkpoint, "state.json", b'{"a": ' + deep + b"}")
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: it is nested too deeply"):
        load_run_state(checkpoint)


def listing(name: str) -> Callable[[Any], Any]:
    return lambda manifest: manifest["files"].update({name: digest(b"{}")})


MANIFESTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a file above": (listing("../../outside/secret.json"), r"lists '\.\./\.\./outside/secret\.json'"),
    "a file above, by a detour": (listing("tensors/../../../outside/secret.json"), "lists 'tensors/../../../outside"),
    "an absolute file": (listing("/etc/hostname"), "lists '/etc/hostname'"),
    "a file without a name": (listing(""), "lists ''"),
    "a file with a null byte": (listing("a\0b"), "lists 'a"),
    "data above": (lambda manifest: manifest.update(data="../../outside"), "invalid folder name '../../outside'"),
    "absolute data": (lambda manifest: manifest.update(data="/tmp"), "invalid folder name '/tmp'"),
    "data that is a list": (lambda manifest: manifest.update(data=[]), r"invalid folder name \[\]"),
    "data in a folder above": (lambda manifest: manifest.update(data="data-/../../../outside"), "invalid folder name"),
    "files that are a list": (lambda manifest: manifest.update(files=[]), "is damaged"),
    "a size below zero": (lambda manifest: manifest["files"][FILE].update(size=-1), "without a valid size and SHA-256"),
    "a size that is text": (
        lambda manifest: manifest["files"][FILE].update(size="9"),
        "without a valid size and SHA-256",
    ),
    "a hash that is a number": (
        lambda manifest: manifest["files"][FILE].update(sha256=7),
        "without a valid size and SHA-256",
    ),
    "no processes": (lambda manifest: manifest.update(world_size=0), "world_size=0"),
    "processes that are text": (lambda manifest: manifest.update(world_size="1"), "world_size='1'"),
    "a step that is text": (lambda manifest: manifest.update(step="9"), "step='9'"),
    "a time that is text": (lambda manifest: manifest.update(saved_at="now"), "saved_at='now'"),
    "a time without end": (lambda manifest: manifest.update(saved_at=10**400), "saved_at=1000"),
    "a version that is a list": (lambda manifest: manifest.update(version=[1]), "is damaged"),
}


@pytest.mark.parametrize("change", MANIFESTS)
def test_a_manifest_that_no_run_wrote_is_refused(change: str, checkpoint: Path) -> None:
    how, message = MANIFESTS[change]
    reseal_manifest(checkpoint, how)
    with nothing_outside_touched():
        with pytest.raises(CheckpointError, match=message) as raised:
            load_run_state(checkpoint)
        assert MANIFEST in str(raised.value)
        assert newest_checkpoint(checkpoint.parent) is None


@pytest.mark.parametrize("name", [MANIFEST, "state.json", INDEX, FILE, "tensors"])
def test_a_link_in_the_place_of_a_file_is_refused(name: str, checkpoint: Path, tmp_path: Path) -> None:
    """Even where what it leads to is what the manifest says."""
    (checkpoint / name).rename(tmp_path / "outside" / "moved")
    (checkpoint / name).symlink_to(tmp_path / "outside" / "moved")
    if name not in (MANIFEST, "tensors"):
        length = (checkpoint / name).lstat().st_size
        reseal_manifest(checkpoint, lambda manifest: manifest["files"][name].update(size=length))
    with nothing_outside_touched(), pytest.raises(CheckpointError, match=f"{name} is a link"):
        load_run_state(checkpoint)


# what is removed and replaced


def test_only_a_checkpoint_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "ours")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("mine")
    (tmp_path / "alike").mkdir()
    (tmp_path / "alike" / MANIFEST).write_text('{"format": "webpack"}')
    (tmp_path / "file").write_text("mine")
    remove_checkpoint(tmp_path / "ours")
    remove_checkpoint(tmp_path / "nothing")
    for name in ("theirs", "alike", "file"):
        with pytest.raises(CheckpointError, match=rf"{name} is not removed: it is not a checkpoint"):
            remove_checkpoint(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["alike", "file", "theirs"]
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "mine"


def test_a_damaged_checkpoint_and_a_link_to_one_can_be_removed(tmp_path: Path) -> None:
    for name in ("damaged", "linked"):
        write(tmp_path / name)
    (tmp_path / "damaged" / "state.json").write_text("")
    (tmp_path / "link").symlink_to("linked")
    remove_checkpoint(tmp_path / "damaged")
    remove_checkpoint(tmp_path / "link")
    assert os.listdir(tmp_path) == ["linked"]
    load_run_state(tmp_path / "linked")


@pytest.mark.parametrize("what", ["a directory", "a file"])
def test_a_save_replaces_nothing_but_a_checkpoint(what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    if what == "a directory":
        path.mkdir()
        path /= "thesis.txt"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="mine is not replaced by a checkpoint: it is not a checkpoint"):
        write(tmp_path / "mine")
    assert path.read_text() == "mine"
    assert os.listdir(tmp_path) == ["mine"]


def test_a_save_into_an_empty_directory_takes_its_place(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    write(tmp_path / "one", 4)
    assert load_run_state(tmp_path / "one")[0]["global_step"] == 4


# the message about a damaged checkpoint


@pytest.mark.parametrize("read", [load_run_state, describe_run_state])
def test_the_message_about_a_damaged_checkpoint_names_the_newest_whole_one(
    read: Callable[[Path], Any], tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path / f"step={step}", step)
    for step in (3, 4):
        reseal(tmp_path / f"step={step}", "state.json", b"[]")
    with pytest.raises(
        CheckpointError, match=r"step=4.*The newest whole checkpoint beside it is .*step=2 \(step 2\)\."
    ):
        read(tmp_path / "step=4")
    for step in (1, 2):
        remove_checkpoint(tmp_path / f"step={step}")
    with pytest.raises(CheckpointError, match="No other checkpoint beside it is whole"):
        read(tmp_path / "step=4")


def test_a_checkpoint_of_another_model_is_not_called_damaged(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two")
    with pytest.raises(CheckpointError, match="the state of a different model") as raised:
        load_run_state(tmp_path / "two", into={"state_dict": {"other": torch.ones(1)}})
    assert "whole" not in str(raised.value)


# anything at all

# fmt: off
KEYS = [
    "__tensor__", "__ndarray__", "__dict__", "__counter__", "__tuple__", "__set__", "__frozenset__", "__deque__",
    "__bytes__", "__float__", "__complex__", "__dtype__", "__device__", "__path__", "offsets", "sizes", "size",
    "chunks", "file", "start", "nbytes", "dtype", "tensors", "files", "data",
]
# fmt: on
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "..", "/etc/hostname", "../../outside/secret.json", "float32", "load", WEIGHT, FILE, "1"])
    | st.text(max_size=4),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(
            st.sampled_from(KEYS),
            children,
            max_size=2,
        )
    ),
    max_leaves=6,
)


def places_in(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places_in(value, (*path, key))


@st.composite
def mutations(draw: st.DrawFn, tree: Any) -> Any:
    """A tree with one to three of its parts replaced, dropped, doubled or exchanged."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(places_in(tree), key=repr)))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                tree = draw(JSON)
            continue
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "replace", "nudge", "drop", "exchange"]))
        if how == "replace":
            parent[path[-1]] = draw(JSON)
        elif how == "nudge" and type(parent[path[-1]]) is int:
            parent[path[-1]] += draw(st.sampled_from([-64, -8, -1, 1, 4, 64, 2**40]))
        elif how == "drop":
            del parent[path[-1]]
        elif how == "exchange":
            other = draw(st.sampled_from(list(parent) if isinstance(parent, dict) else range(len(parent))))
            parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
    return tree


SLOWLY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=SLOWLY)
LONG = settings(max_examples=1000, deadline=None, suppress_health_check=SLOWLY)


def check_loads_or_refuses(directory: Path) -> None:
    """Load all, with memory that is not zero; whatever comes is what the files hold."""
    bytes_in_files = b"".join(path.read_bytes() for path in directory.rglob("*.safetensors"))
    fill = torch.utils.deterministic.fill_uninitialized_memory
    with nothing_outside_touched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True)
        try:
            shared, own = load_run_state(directory, alone())
        except DrivetrainError:
            return
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = fill
    assert type(shared) is dict
    assert own is None or type(own) is dict
    for tensor in tensors_in([shared, own]):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert data in bytes_in_files


def tensors_in(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from tensors_in([key, value])
    elif isinstance(tree, list | tuple | set | frozenset):
        for value in tree:
            yield from tensors_in(value)


def check_any_change(directory: Path, name: str, written: Path, data: st.DataObject) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(written, directory)
    content = json.loads((directory / name).read_bytes())
    if name == MANIFEST:
        content.pop("checksum")
        changed = data.draw(mutations(content))

        def replace(manifest: dict[str, Any]) -> None:
            manifest.clear()
            manifest.update(changed if isinstance(changed, dict) else {"format": changed})

        reseal_manifest(directory, replace)
    else:
        changed = data.draw(mutations(content))
        reseal(directory, name, json.dumps(changed).encode())
    check_loads_or_refuses(directory)


@pytest.mark.parametrize("name", [INDEX, "state.json", "process_0.json", MANIFEST])
@QUICK
@given(data=st.data())
def test_any_change_to_a_file_is_refused_or_yields_what_is_written(
    name: str, written: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_any_change(tmp_path / "root" / "one", name, written, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", [INDEX, "state.json", "process_0.json", MANIFEST])
@LONG
@given(data=st.data())
def test_1000_changes_to_a_file_are_refused_or_yield_what_is_written(
    name: str, written: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_any_change(tmp_path / "root" / "one", name, written, data)
