"""Payloads: a batch, or a model's weights, as one contiguous piece of bytes.

What a batch has in it is agreed on once (``Field``s); then only its shape travels with the bytes. Weights bring a
table of contents along, as text. Neither is ever unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from swath.keys import Key, nested
from swath.rollout.layout import Field
from swath.rollout.placement import aligned, offsets_of, views_of

Bytes = np.ndarray


def pack_batch(fields: tuple[Field, ...], batch: TensorDictBase) -> Bytes:
    """A batch ``[*lead, steps]`` as bytes.

    >>> from tensordict import TensorDict
    >>> fields = (Field(("x",), torch.Size([2]), torch.float32),)
    >>> data = pack_batch(fields, TensorDict({"x": torch.ones(3, 5, 2)}, [3, 5]))
    >>> join_batches(fields, [data], 15)[("x",)].shape
    torch.Size([15, 2])
    """
    num_frames = batch.batch_size.numel()
    offsets = offsets_of(fields, num_frames)
    data = np.empty(offsets[-1], np.uint8)
    for key, room in views_of(torch.from_numpy(data), fields, offsets, num_frames).items():
        room.copy_(batch.get(key).reshape(room.shape))
    return data


def join_batches(fields: tuple[Field, ...], payloads: Sequence[Bytes], num_frames: int) -> dict[Key, torch.Tensor]:
    """Payloads of ``num_frames`` each, behind each other: ``[all frames, *shape]`` a key, in memory of its own."""
    offsets = offsets_of(fields, num_frames)
    leaves = {}
    for field, offset in zip(fields, offsets, strict=False):
        end = offset + num_frames * field.num_bytes
        parts = [payload[offset:end] for payload in payloads]
        joined = parts[0].copy() if len(parts) == 1 else np.concatenate(parts)
        leaves[field.key] = torch.from_numpy(joined).view(field.dtype).view(-1, *field.shape)
    return leaves


def pack_tensors(tensors: Mapping[str, torch.Tensor]) -> Bytes:
    """Named tensors as bytes: how long the table of contents is, the table, and the tensors.

    >>> {name: x.tolist() for name, x in unpack_tensors(pack_tensors({"w": torch.arange(3)})).items()}
    {'w': [0, 1, 2]}
    """
    table, offset = [], 0
    for name, tensor in tensors.items():
        table.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        offset = aligned(offset + tensor.numel() * tensor.element_size())
    text = json.dumps(table).encode()
    start = aligned(8 + len(text))
    data = np.empty(start + offset, np.uint8)
    data[:8].view(np.int64)[0] = len(text)
    data[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    memory = torch.from_numpy(data)
    for (_, _, shape, begin), tensor in zip(table, tensors.values(), strict=True):
        end = start + begin + tensor.numel() * tensor.element_size()
        memory[start + begin : end].view(tensor.dtype).view(shape).copy_(tensor.detach())
    return data


def unpack_tensors(data: Bytes) -> dict[str, torch.Tensor]:
    """The tensors, in the memory of ``data`` where it may be written to."""
    length = int(data[:8].view(np.int64)[0])
    table = json.loads(data[8 : 8 + length].tobytes())
    start = aligned(8 + length)
    if not data.flags.writeable:  # torch knows no read-only tensors
        data = data.copy()
    memory = torch.from_numpy(data)
    tensors = {}
    for name, dtype_name, shape, begin in table:
        dtype = getattr(torch, dtype_name)
        end = start + begin + torch.Size(shape).numel() * dtype.itemsize
        tensors[name] = memory[start + begin : end].view(dtype).view(shape)
    return tensors


_BATCH_SIZE = "batch_size"


def pack_tensordict(data: TensorDictBase) -> Bytes:
    """Any TensorDict of tensors.

    >>> unpack_tensordict(pack_tensordict(TensorDict({"a": {"b": torch.ones(2, 3)}}, [2])))["a", "b"].shape
    torch.Size([2, 3])
    """
    named: dict[str, torch.Tensor] = {_BATCH_SIZE: torch.tensor(data.batch_size, dtype=torch.int64)}
    for key, leaf in data.items(True, True):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{key!r} is no tensor ({type(leaf).__name__}), and cannot be sent to another machine")
        named[json.dumps([key] if isinstance(key, str) else list(key))] = leaf.contiguous()
    return pack_tensors(named)


def unpack_tensordict(data: Bytes) -> TensorDict:
    named = unpack_tensors(data)
    size = torch.Size(named.pop(_BATCH_SIZE).tolist())
    return TensorDict(nested({tuple(json.loads(name)): leaf for name, leaf in named.items()}), size)
