"""Transforms of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from swath.envs.transforms.base import Apply, Transform
from swath.envs.transforms.rows import Slot
from swath.keys import as_key, show
from swath.specs import NestedKey

#: Weights of red, green and blue.
_GRAY = (0.2989, 0.587, 0.114)


class _OfImages(Transform):
    def __init__(self, in_keys: Sequence[NestedKey] | None = None, out_keys: Sequence[NestedKey] | None = None) -> None:
        super().__init__(["pixels"] if in_keys is None else in_keys, out_keys)

    def transform_specs(self, specs: Any) -> None:
        for key in map(as_key, self.in_keys):
            shape = specs.find(key, self).shape
            if len(shape) - len(specs.batch_size) < 3:
                raise ValueError(f"{type(self).__name__}: {show(key)} is no image: its shape is {tuple(shape)}")
        super().transform_specs(specs)


class ToTensorImage(_OfImages):
    """Images ``[height, width, channels]`` as ``[channels, height, width]``, integers scaled to 0..1.

    Args:
        from_int: scale by 1/255; by default what is not floating point.
        unsqueeze: add a dimension in front of an image that has no other (an env without a batch size).
        dtype: of the result; by default torch's default.
        shape_tolerant: leave the dimensions as they are where the last one is not 3.

    >>> import numpy as np, torch
    >>> image = torch.full((4, 5, 3), 51, dtype=torch.uint8)
    >>> made = ToTensorImage()._apply_transform(image)
    >>> made.shape, float(made[0, 0, 0])
    (torch.Size([3, 4, 5]), 0.20000000298023224)
    """

    _shown = ("from_int", "unsqueeze", "dtype", "shape_tolerant")

    def __init__(
        self,
        from_int: bool | None = None,
        unsqueeze: bool = False,
        dtype: torch.dtype | None = None,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        shape_tolerant: bool = False,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.from_int = from_int
        self.unsqueeze = unsqueeze
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        self.shape_tolerant = shape_tolerant

    def _view(self, image: torch.Tensor) -> torch.Tensor:
        if self.shape_tolerant and image.shape[-1] != 3:
            return image
        return image.permute(*range(image.ndim - 3), -1, -3, -2)

    def _scales(self, image: torch.Tensor) -> bool:
        return not image.is_floating_point() if self.from_int is None else bool(self.from_int)

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        made = self._view(value)
        made = (made.div(255) if self._scales(value) else made).to(self.dtype)
        return made.unsqueeze(0) if self.unsqueeze and made.ndim == 3 else made

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        if not self.dtype.is_floating_point:
            return super()._writing(apply, read, write)
        view = self._view(read.row)
        target = write.row.view(view.shape)
        if self._scales(read.row):
            return lambda: torch.div(view, 255, out=target)
        return lambda: target.copy_(view)


class GrayScale(_OfImages):
    """Images ``[..., 3, height, width]`` as ``[..., 1, height, width]``.

    >>> import torch
    >>> GrayScale()._apply_transform(torch.full((3, 2, 2), 100, dtype=torch.uint8))[0, 0]
    tensor([99, 99], dtype=torch.uint8)
    """

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        self._require_colours(value)
        red, green, blue = value.unbind(-3)
        made = _GRAY[0] * red + _GRAY[1] * green + _GRAY[2] * blue
        return made.to(value.dtype).unsqueeze(-3)

    def _require_colours(self, value: torch.Tensor) -> None:
        if value.shape[-3] != 3:
            raise ValueError(
                f"GrayScale takes images [..., 3, height, width], got {tuple(value.shape)}; ToTensorImage puts the "
                "channels in front"
            )

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        target = write.row.squeeze(-3)
        red, green, blue = read.row.unbind(-3)
        total = _GRAY[0] * red
        more = torch.empty_like(total)

        def gray() -> None:
            torch.mul(red, _GRAY[0], out=total)
            torch.mul(green, _GRAY[1], out=more)
            total.add_(more)
            torch.mul(blue, _GRAY[2], out=more)
            total.add_(more)
            target.copy_(total)

        return gray


class Resize(_OfImages):
    """Images ``[..., channels, *, *]`` as ``[..., channels, w, h]``, interpolated and antialiased, by torch.

    >>> import torch
    >>> Resize(2, 3)._apply_transform(torch.ones(3, 8, 8)).shape
    torch.Size([3, 2, 3])
    """

    _shown = ("w", "h", "interpolation")

    def __init__(
        self,
        w: int | Sequence[int],
        h: int | None = None,
        interpolation: str = "bilinear",
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if isinstance(w, Sequence):
            w, h = w
        interpolation = getattr(interpolation, "value", interpolation)  # also torchvision's own names
        if interpolation not in ("nearest", "nearest-exact", "bilinear", "bicubic"):
            raise ValueError(
                f"Resize: interpolation must be nearest, nearest-exact, bilinear or bicubic, got {interpolation!r}"
            )
        self.w = int(w)
        self.h = self.w if h is None else int(h)
        if self.w < 1 or self.h < 1:
            raise ValueError(f"Resize: a size must be positive, got {self.w} and {self.h}")
        self.interpolation = interpolation

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[-2:] == (self.w, self.h):
            return value
        smooth = self.interpolation in ("bilinear", "bicubic")
        images = value.reshape(-1, *value.shape[-3:])
        if value.dtype not in (torch.float32, torch.float64):
            images = images.to(torch.float32)
        made = torch.nn.functional.interpolate(
            images,
            size=[self.w, self.h],
            mode=self.interpolation,
            align_corners=False if smooth else None,
            antialias=smooth,
        )
        if not value.is_floating_point():
            if self.interpolation == "bicubic" and value.dtype == torch.uint8:
                made = made.clamp(0, 255)
            made = made.round()
        return made.to(value.dtype).reshape(*value.shape[:-2], self.w, self.h)


class CenterCrop(_OfImages):
    """The middle of images ``[..., channels, *, *]``: ``[..., channels, w, h]``; where they are smaller, zeros around.

    >>> import torch
    >>> CenterCrop(2)._apply_transform(torch.arange(16).view(1, 4, 4))
    tensor([[[ 5,  6],
             [ 9, 10]]])
    """

    _shown = ("w", "h")

    def __init__(
        self,
        w: int,
        h: int | None = None,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        self.w = w
        self.h = h if h else w
        if self.w < 1 or self.h < 1:
            raise ValueError(f"CenterCrop: a size must be positive, got {self.w} and {self.h}")

    def _apply_transform(self, value: torch.Tensor) -> torch.Tensor:
        made = value.new_zeros(*value.shape[:-2], self.w, self.h)
        source, target = self._parts(value, made)
        target.copy_(source)
        return made

    def _parts(self, value: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is copied, and where to."""
        for dim, size in ((-2, self.w), (-1, self.h)):
            given = value.shape[dim]
            if given > size:
                value = value.narrow(dim, round((given - size) / 2), size)
            elif given < size:
                made = made.narrow(dim, (size - given) // 2, given)
        return value, made

    def _writing(self, apply: Apply, read: Slot, write: Slot) -> Callable[[], Any]:
        source, target = self._parts(read.row, write.row)
        return lambda: target.copy_(source)
