"""Memory that is given back while its content is not needed, at addresses (or views) that stay valid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor


class Region(Protocol):
    """Memory of one flat tensor."""

    @property
    def full_bytes(self) -> int:
        """Bytes held when it is taken."""

    @property
    def resident_bytes(self) -> int:
        """Bytes held now."""

    def take(self) -> None:
        """Hold the memory; its content is undefined."""

    def release(self) -> None:
        """Give the memory back."""


class StorageRegion:
    """The storage under a tensor of torch's own allocator: views stay views, the address may change."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.full_bytes = self._storage.nbytes()

    @property
    def resident_bytes(self) -> int:
        return self._storage.nbytes()

    def take(self) -> None:
        if self._storage.nbytes() != self.full_bytes:
            self._storage.resize_(self.full_bytes)

    def release(self) -> None:
        self._storage.resize_(0)


class MappedRegion:
    """GPU memory whose address stays when its pages are given back, as CUDA graphs need it (vLLM's own mechanism)."""

    def __init__(self, numbers: int, dtype: torch.dtype) -> None:
        from vllm.device_allocator import cumem

        self._cumem: Any = cumem
        allocator = cumem.CuMemAllocator.get_instance()
        with allocator.use_memory_pool(tag="onecopy"):
            self.tensor = torch.empty(numbers, dtype=dtype, device="cuda")
        # Taken out of vLLM's list, so that its sleep and wake_up leave it alone: these pages live by the weights' own times.
        self._handle = allocator.pointer_to_data.pop(self.tensor.data_ptr()).handle
        self.full_bytes: int = self._handle[1]
        self._held = True

    @property
    def resident_bytes(self) -> int:
        return self.full_bytes if self._held else 0

    def take(self) -> None:
        if not self._held:
            self._cumem.create_and_map(self._handle)
            self._held = True

    def release(self) -> None:
        if self._held:
            torch.cuda.synchronize()
            self._cumem.unmap_and_release(self._handle)
            self._held = False


def flat_region(numbers: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Region]:
    """A flat tensor of `numbers` elements and the region that holds it."""
    if device == "cuda":
        mapped = MappedRegion(numbers, dtype)
        return mapped.tensor, mapped
    tensor = torch.empty(numbers, dtype=dtype, device=device)
    return tensor, StorageRegion(tensor)


class HostCopy:
    """Tensors that can be moved to host memory and back; the tensors themselves stay what the optimizer knows.

    The host memory is pinned and kept between moves.
    """

    def __init__(self) -> None:
        self._away: list[tuple[Tensor, Tensor]] = []
        self._kept: dict[int, Tensor] = {}

    @property
    def away_bytes(self) -> int:
        """Bytes that are on the host and not on the device."""
        return sum(copy.nbytes for _, copy in self._away)

    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Copy to host memory and give the device's back. Each tensor must own the whole of its storage."""
        for tensor in tensors:
            copy = self._kept.get(id(tensor))
            if copy is None or copy.shape != tensor.shape:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._kept[id(tensor)] = copy
            copy.copy_(tensor, non_blocking=True)
            self._away.append((tensor, copy))
        self._wait()
        for tensor, _ in self._away:
            tensor.untyped_storage().resize_(0)

    def move_back(self) -> None:
        """Bring everything back to where it was."""
        for tensor, copy in self._away:
            tensor.untyped_storage().resize_(copy.nbytes)
            tensor.copy_(copy, non_blocking=True)
        self._wait()
        self._away = []

    def _wait(self) -> None:
        if any(tensor.is_cuda for tensor, _ in self._away):
            torch.cuda.synchronize()
