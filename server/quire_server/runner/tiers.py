"""Carries out a Step's copies of KV blocks: device, host memory, disk. Called by ``model_runner`` before each
forward pass.

Every block gets a checksum when it leaves the device and has to show it again on its way back; one that does
not is not copied. Decides nothing: which slots hold what is the scheduler's business.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire_server.core.step import Copies, CopyOutcome, Step
from quire_server.layers.block_copy import host_pool, load_blocks, save_blocks
from quire_server.runner.disk import Disk, checksum

_IDLE_WAIT_SECONDS = 0.02  # for the disk, in a step that computes nothing


class Tiers:
    """The host's pool, and the disk below it if there is one."""

    def __init__(self, kv_caches: Sequence[Tensor], num_host_slots: int, disk: Disk | None) -> None:
        """``kv_caches``: one [2, num_blocks, kv_heads, block_size, head_size] per layer."""
        self._kv_caches = kv_caches
        self._host = host_pool(kv_caches, num_host_slots)
        self._bytes = self._host.view(torch.uint8).view(num_host_slots, -1).numpy()
        self._host_sums = np.zeros(num_host_slots, np.int64)
        self._disk = disk
        self._disk_sums: dict[int, int] = {}
        self._has_told_off = False

    @property
    def num_bytes(self) -> int:
        """Of the host's pool."""
        return self._host.nbytes

    def copy(self, step: Step) -> CopyOutcome | None:
        """Do what the step says, and tell what came of it and of earlier steps' disk transfers."""
        copies = step.copies
        lost: list[int] = []
        failed: list[int] = []
        if copies is not None:
            lost = self._spill(copies.spills)
            self._save(copies.saves)
            failed = self._load(copies.loads)
            self._fetch(copies)
        arrived, missed = self._collect(0.0 if step.rows else _IDLE_WAIT_SECONDS)
        is_off = self._disk is not None and self._disk.is_off and not self._has_told_off
        self._has_told_off |= is_off
        if not (lost or failed or arrived or missed or is_off):
            return None
        return CopyOutcome(tuple(failed), tuple(arrived), tuple(missed), tuple(lost), is_off)

    def close(self) -> None:
        """Give the disk's space back."""
        if self._disk is not None:
            self._disk.close()

    def _spill(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        lost = []
        for slot, place in pairs:
            assert self._disk is not None
            if self._disk.write(place, self._bytes[slot].tobytes()):
                self._disk_sums[place] = int(self._host_sums[slot])
            else:
                self._disk_sums.pop(place, None)
                lost.append(place)
        return lost

    def _save(self, pairs: Sequence[tuple[int, int]]) -> None:
        save_blocks(self._kv_caches, self._host, pairs)
        for _, slot in pairs:
            self._host_sums[slot] = checksum(self._bytes[slot].data)

    def _load(self, pairs: Sequence[tuple[int, int]]) -> list[int]:
        failed = [block for slot, block in pairs if checksum(self._bytes[slot].data) != self._host_sums[slot]]
        load_blocks(self._host, self._kv_caches, [pair for pair in pairs if pair[1] not in failed])
        return failed

    def _fetch(self, copies: Copies) -> None:
        for place, slot in copies.fetches:
            assert self._disk is not None
            self._disk.read(place, slot, self._disk_sums.get(place, -1))

    def _collect(self, timeout: float) -> tuple[list[int], list[int]]:
        """Host slots that reads have filled, and those that they have not."""
        arrived: list[int] = []
        missed: list[int] = []
        for slot, data, its_sum in self._disk.collect(timeout) if self._disk is not None else ():
            if data is None:
                missed.append(slot)
                continue
            self._bytes[slot] = np.frombuffer(data, np.uint8)
            self._host_sums[slot] = its_sum
            arrived.append(slot)
        return arrived, missed
