"""Plain safetensors out of a checkpoint or a model, as `safetensors` and `transformers` open them."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm.auto import tqdm

from drivetrain.checkpoint.lightning_format import is_lightning_checkpoint, read_lightning_state
from drivetrain.checkpoint.load import Checkpoint
from drivetrain.checkpoint.manifest import encoded
from drivetrain.checkpoint.schema import in_schema
from drivetrain.checkpoint.storage import LocalStorage
from drivetrain.checkpoint.stream import read_ranges
from drivetrain.checkpoint.tensor_file import BLOCK, Entry, aligned, bytes_of, layout, write_file
from drivetrain.checkpoint.torch_shards import TorchShards, bare_name
from drivetrain.checkpoint.tree import pack
from drivetrain.runtime.byte_sizes import parse_bytes
from drivetrain.runtime.errors import CheckpointError, ConfigurationError, nearest

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}

Take = Callable[[memoryview], None]
T = TypeVar("T")


@dataclass(frozen=True)
class _Source:
    """One tensor to be written, and what gives its bytes, a block at a time."""

    entry: Entry
    stream: Callable[[Take], None]


def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    *,
    model: int | None = None,
    module: str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: bool = False,
) -> list[str]:
    """Write the weights in a checkpoint as plain safetensors. Runs on one process and holds no whole model.

    Small models become one `model.safetensors`, larger ones `model-00001-of-0000N.safetensors` with a
    `model.safetensors.index.json`, as on Hugging Face's hub. Tied weights are written once.

    Args:
        checkpoint: The checkpoint's directory or URL, of any strategy and number of processes; or a `.ckpt` file in
            Lightning's format, which is read whole.
        output: The directory to write to.
        max_shard_size: Bytes in a file at most, as a number or such as `"5GB"`; a single larger tensor has a file of
            its own.
        dtype: What floating-point weights are converted to, such as `"bfloat16"`; unchanged if None.
        model: Which one, where `save_state` saved several, from 0.
        module: Write the weights of this module of it alone, under the names that they have in it: the attribute of
            the task that is to be opened elsewhere, such as `"net"`.
        overwrite: Whether to write into a directory that holds something already.
        verify: Whether the checkpoint's files are checked against its manifest first.
        progress: Whether to show a progress bar.

    Returns:
        The paths of the safetensors files.

    Raises:
        CheckpointError: There is no complete checkpoint, it has no such model or module, or the output cannot be
            written.
        ConfigurationError: `max_shard_size` is no size.

    Example:
        ```python
        import torch
        from drivetrain import Accelerator, consolidate

        accelerator = Accelerator()
        accelerator.prepare(torch.nn.Linear(4, 1))
        accelerator.save_state("checkpoints/step_7")
        consolidate("checkpoints/step_7", "exported", dtype="bfloat16")
        ```
    """
    if is_lightning_checkpoint(checkpoint):
        found = weights_below(_weights_in_file(checkpoint, model, parse_dtype(dtype)), module, os.fspath(checkpoint))
        return save_safetensors(found, output, max_shard_size, overwrite=overwrite, progress=progress)
    opened = Checkpoint(checkpoint)
    names = weights_below(model_keys(opened, model), module, opened.directory)
    target = parse_dtype(dtype)
    files = sorted({place.file for key in names.values() for place in _places(opened, key)})
    opened.tensors.check_headers(files)
    if verify:
        opened.verify(files)
    sources, aliases = [], {}
    first: dict[str, str] = {}
    for name, key in names.items():
        if key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        sources.append(_stored(opened, name, key, target))
    return _write(sources, aliases, output, max_shard_size, overwrite, progress)


def consolidate_shards(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    *,
    module: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> list[str]:
    """Write the weights that Accelerate's FSDP saved in shards as plain safetensors, reading one tensor at a time.

    Args:
        directory: The folder that `torch.distributed.checkpoint` wrote, such as `pytorch_model_fsdp_0`.
        output: The directory to write to.
        max_shard_size: As for `consolidate`.
        dtype: As for `consolidate`.
        module: As for `consolidate`.
        overwrite: Whether to write into a directory that holds something already.
        progress: Whether to show a progress bar.

    Returns:
        The paths of the safetensors files.

    Raises:
        CheckpointError: It is no such folder, holds no model or no such module, or the output cannot be written.
    """
    shards = TorchShards(directory)
    keys = {bare_name(name): key for key, name in shards.names_below("model").items()}
    if not keys:
        raise CheckpointError(f"{shards.directory} holds no model. Its names begin with 'model.' in one that does.")
    target, sources = parse_dtype(dtype), []
    for name, key in weights_below(keys, module, os.fspath(directory)).items():
        described = shards.tensors[key]
        own = described.properties.dtype
        written = target if target is not None and own.is_floating_point else own
        stream = partial(_give_shards, shards, key, written)
        sources.append(_Source(Entry(name, written, tuple(described.size)), stream))
    return _write(sources, {}, output, max_shard_size, overwrite, progress)


def save_safetensors(
    state_dict: Mapping[str, Tensor],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = True,
    progress: bool = False,
) -> list[str]:
    """Write a state dict as plain safetensors, in the files that `consolidate` writes.

    Args:
        state_dict: Whole tensors by name; those that share their memory are written once.
        output: The directory to write to.
        max_shard_size: Bytes in a file at most.
        overwrite: Whether to write into a directory that holds something already.
        progress: Whether to show a progress bar.

    Returns:
        The paths of the safetensors files.
    """
    packed, tensors = pack(dict(state_dict))
    sources, aliases = [], {}
    first: dict[str, str] = {}
    for name in state_dict:
        key = packed[name]["__tensor__"]
        if key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensor = tensors[key]
        sources.append(_Source(Entry(name, tensor.dtype, tuple(tensor.shape)), partial(_give, tensor)))
    return _write(sources, aliases, output, max_shard_size, overwrite, progress)


def write_safetensors(
    sources: Iterable[tuple[Entry, Callable[[], Iterable[Tensor]]]],
    aliases: Mapping[str, str],
    output: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    overwrite: bool = True,
    progress: bool = False,
) -> list[str]:
    """Write tensors that are computed as they are written, in the files that `consolidate` writes.

    Args:
        sources: What describes each tensor, and a function that gives its values in order, in tensors of any size.
        aliases: Further names of tensors, and the names that these are written under.
        output: The directory to write to.
        max_shard_size: Bytes in a file at most.
        overwrite: Whether to write into a directory that holds something already.
        progress: Whether to show a progress bar.

    Returns:
        The paths of the safetensors files.
    """
    found = [_Source(entry, partial(_give_blocks, blocks)) for entry, blocks in sources]
    return _write(found, dict(aliases), output, max_shard_size, overwrite, progress)


def weights_below(weights: Mapping[str, T], module: str | None, source: str) -> dict[str, T]:
    """The weights of one module, under the names that they have in it.

    Args:
        weights: Anything by the names of weights.
        module: The module's name; all weights as they are if None.
        source: Where they come from, for the message.

    Raises:
        CheckpointError: No weight is in a module of that name.
    """
    if module is None:
        return dict(weights)
    prefix = f"{module}."
    found = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        holders = sorted({name.split(".")[0] for name in weights if "." in name})
        raise CheckpointError(
            f"{source} holds no weights of a module {module!r}. Its outermost modules: {', '.join(holders) or 'none'}."
            f"{nearest(module, holders)}"
        )
    return found


def model_keys(checkpoint: Checkpoint, model: int | None = None) -> dict[str, str]:
    """The keys of a model's tensors by name.

    Args:
        checkpoint: The checkpoint.
        model: Which of its models, from 0; it has only one if None.

    Raises:
        CheckpointError: It has no such model, or several and none is chosen.
    """
    models = in_schema(checkpoint.packed())["engine"].get("models")
    if not isinstance(models, list):
        raise CheckpointError(f"{checkpoint.directory} holds no model: it is not the state of a run.")
    if not models or (model is None and len(models) != 1) or (model or 0) >= len(models):
        raise CheckpointError(
            f"{checkpoint.directory} holds {len(models)} models; say which one is meant, from 0: model=0, or --model 0."
        )
    state = models[model or 0]
    found = {
        name: str(value["__tensor__"])
        for name, value in state.items()
        if isinstance(value, dict) and "__tensor__" in value
    }
    if not found:
        raise CheckpointError(f"{checkpoint.directory} holds a model without weights.")
    return found


def _weights_in_file(path: str | os.PathLike[str], model: int | None, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The weights in a file of Lightning's, which holds one model. Tied ones stay one tensor."""
    if model:
        raise CheckpointError(f"{os.fspath(path)} holds 1 model, so there is no model {model}. Leave that out.")
    [state] = read_lightning_state(path)[0]["engine"]["models"]
    made: dict[tuple[Any, ...], Tensor] = {}
    found = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            identity = (value.data_ptr(), value.dtype, value.shape, value.stride())
            converted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            found[name] = made.setdefault(identity, converted)
    return found


def _places(checkpoint: Checkpoint, key: str) -> Iterator[Any]:
    described = checkpoint.tensors.tensors()
    if key not in described:
        raise CheckpointError(f"{checkpoint.directory} is damaged: its index does not have the tensor {key}.")
    for chunk in described[key].chunks:
        yield checkpoint.tensors.place_of(key, chunk.offsets)


def _stored(checkpoint: Checkpoint, name: str, key: str, dtype: torch.dtype | None) -> _Source:
    """A tensor of a checkpoint, read only when it is written."""
    described = checkpoint.tensors.tensors()[key]
    own = described.properties.dtype
    target = dtype if dtype is not None and own.is_floating_point else own
    stream = partial(_read_whole, checkpoint, key, described)
    converted = stream if target == own else partial(_convert, stream, own, target)
    return _Source(Entry(name, target, tuple(described.size)), converted)


def _read_whole(checkpoint: Checkpoint, key: str, described: TensorStorageMetadata, take: Take) -> None:
    """Give a stored tensor's bytes in order, by blocks where its parts follow each other."""
    chunks = sorted(described.chunks, key=lambda chunk: tuple(chunk.offsets))
    if not all(chunk.sizes[1:] == described.size[1:] for chunk in chunks):
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        checkpoint.read_tensors({key: whole})
        _give(whole, take)
        return
    for chunk in chunks:
        place = checkpoint.tensors.place_of(key, chunk.offsets)
        listed = checkpoint.manifest.files[place.file]
        path = checkpoint.tensors.path_of(place.file)
        read_ranges(checkpoint.storage, path, listed, [(place.start, place.nbytes)], take)


def _convert(stream: Callable[[Take], None], own: torch.dtype, target: torch.dtype, take: Take) -> None:
    stream(lambda block: take(bytes_of(torch.frombuffer(block, dtype=own).to(target))))


def _give_shards(shards: TorchShards, key: str, dtype: torch.dtype, take: Take) -> None:
    _give(shards.tensor(key).to(dtype), take)


def _give(tensor: Tensor, take: Take) -> None:
    data = bytes_of(tensor)
    for start in range(0, len(data), BLOCK):
        take(data[start : start + BLOCK])


def _give_blocks(blocks: Callable[[], Iterable[Tensor]], take: Take) -> None:
    for block in blocks():
        _give(block, take)


def _write(
    sources: Sequence[_Source],
    aliases: dict[str, str],
    output: str | os.PathLike[str],
    max_shard_size: int | str,
    overwrite: bool,
    progress: bool,
) -> list[str]:
    """Write files under other names first, and give them theirs when all are whole."""
    limit = shard_limit(max_shard_size)
    directory = os.path.abspath(os.fspath(output))
    if os.path.isdir(directory) and os.listdir(directory) and not overwrite:
        raise CheckpointError(
            f"{directory} is not empty. Name another directory, or say overwrite=True (--overwrite) to write into it."
        )
    shards = _shards(sources, limit)
    names = [_shard_name(number, len(shards)) for number in range(len(shards))]
    metadata = {**aliases, "format": "pt"}
    total = sum(source.entry.nbytes for source in sources)
    token = uuid.uuid4().hex[:12]
    storage = LocalStorage()
    written: dict[str, str] = {}
    try:
        os.makedirs(directory, exist_ok=True)
        with tqdm(total=total, unit="B", unit_scale=True, desc="Writing", disable=not progress) as bar:
            for name, shard in zip(names, shards, strict=True):
                written[name] = os.path.join(directory, f".{name}.{token}")
                _write_shard(storage, written[name], shard, metadata, bar)
        index = _index(names, shards, aliases, total)
        if index is not None:
            written[_INDEX] = os.path.join(directory, f".{_INDEX}.{token}")
            write_file(storage.create(written[_INDEX]), [memoryview(index)])
        for name, path in written.items():
            os.replace(path, os.path.join(directory, name))
        _remove_others(directory, set(written))
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory} could not be written: {error.strerror or error}."
        ) from error
    finally:
        for path in written.values():
            if os.path.exists(path):
                os.unlink(path)
    return [os.path.join(directory, name) for name in names]


_INDEX = "model.safetensors.index.json"
_OURS = re.compile(r"^model(-\d{5}-of-\d{5})?\.safetensors$|^model\.safetensors\.index\.json$")


def _write_shard(
    storage: LocalStorage, path: str, shard: Sequence[_Source], metadata: dict[str, str], bar: tqdm[Any]
) -> None:
    ordered = [shard[position] for position in aligned(source.entry for source in shard)]
    header, _ = layout([source.entry for source in ordered], metadata)
    sink = storage.create(path)

    def take(block: memoryview) -> None:
        sink.write(block)
        bar.update(len(block))

    try:
        sink.write(memoryview(header))
        for source in ordered:
            source.stream(take)
        sink.finish()
    finally:
        sink.abandon()


def _shards(sources: Sequence[_Source], limit: int) -> list[list[_Source]]:
    shards: list[list[_Source]] = [[]]
    room = limit
    for source in sources:
        if shards[-1] and source.entry.nbytes > room:
            shards.append([])
            room = limit
        shards[-1].append(source)
        room -= source.entry.nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _index(names: list[str], shards: list[list[_Source]], aliases: dict[str, str], total: int) -> bytes | None:
    """Which file has which tensor; None where there is one file only. A tied name is where its tensor is."""
    if len(shards) == 1:
        return None
    where = {source.entry.name: name for name, shard in zip(names, shards, strict=True) for source in shard}
    return encoded({"metadata": {"total_size": total}, "weight_map": where})


def _remove_others(directory: str, names: set[str]) -> None:
    """Remove the files of an earlier export, which would be read along with these."""
    for name in os.listdir(directory):
        if _OURS.match(name) and name not in names:
            os.unlink(os.path.join(directory, name))


def shard_limit(max_shard_size: int | str) -> int:
    """Bytes in a file at most, from a number or text such as `"5GB"` or `"500 MiB"`.

    Raises:
        ConfigurationError: It is neither, or not positive.
    """
    limit = parse_bytes(max_shard_size)
    if limit <= 0:
        raise ConfigurationError(
            f"max_shard_size={max_shard_size!r}: a file has to be larger than nothing.", code="DT-002"
        )
    return limit


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A floating-point type, from its name; None stays None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"dtype={dtype!r} is not a floating-point type.{nearest(dtype, _DTYPES)} Allowed: {', '.join(_DTYPES)}."
        )
    return _DTYPES[dtype]
