"""Memory that comes and goes under tensors that stay."""

import pytest
import torch

from engine.megatron.working_memory import MARGIN, WorkingMemory
from engine.reshard.memory import HostCopy, StorageRegion, flat_region


def test_views_survive_their_storage():
    flat = torch.arange(12.0)
    view = flat[4:8].view(2, 2)
    region = StorageRegion(flat)
    assert region.full_bytes == region.resident_bytes == 48
    region.release()
    assert region.resident_bytes == 0 and flat.untyped_storage().nbytes() == 0
    region.take()
    flat.copy_(torch.arange(12.0) * 2)
    assert view.tolist() == [[8.0, 10.0], [12.0, 14.0]]


def test_taking_twice_keeps_the_content():
    flat, region = flat_region(4, torch.float32, "cpu")
    flat.fill_(3.0)
    region.take()
    assert flat.tolist() == [3.0] * 4


def test_an_optimizer_goes_to_the_host_and_comes_back_in_the_same_tensors():
    weight = torch.nn.Parameter(torch.ones(5))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.arange(5.0)
    adam.step()
    state = adam.state[weight]
    tensors = [state["exp_avg"], state["exp_avg_sq"]]
    before = [tensor.clone() for tensor in tensors]
    host = HostCopy()
    for _ in range(3):
        host.move_out(tensors)
        assert host.away_bytes == 40
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        host.move_back()
        assert host.away_bytes == 0
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert state["exp_avg"] is tensors[0]
    adam.step()


def test_working_memory_is_scaled_by_the_tokens_of_the_largest_micro_batch():
    memory = WorkingMemory("cpu")
    assert memory.needed(100) is None  # nothing measured: the KV cache must go
    assert memory.seen_bytes is None
    memory.learn(1000, 10**9)
    assert memory.seen_bytes == 10**9
    assert memory.needed(1000) == pytest.approx(MARGIN * 10**9)
    assert memory.needed(500) == memory.needed(1000)  # never less than what was seen
    assert memory.needed(3000) == pytest.approx(3 * MARGIN * 10**9)
    memory.learn(0, 5)  # an update without a sample on this rank teaches nothing
    assert memory.needed(1000) == pytest.approx(MARGIN * 10**9)
