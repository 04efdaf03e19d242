"""Transitions over gloo: every tensor, bit for bit, in random layouts; and with real engines, rollout against actor."""

import pytest

from tests.support.ranks import run_ranks

pytestmark = pytest.mark.integration

PROGRAMS = "tests.integration.engine.reshard_programs"


@pytest.mark.parametrize("world", [2, 4, 6, 8])
def test_every_tensor_bit_for_bit_there_and_back(world):
    bucket = 1 << 15
    ranks = run_ranks(
        f"{PROGRAMS}:transitions", world, dict(count=40, seed=world, bucket_bytes=bucket, ranks_per_node=max(2, world // 2))
    )  # fmt: skip
    assert [rank["wrong"] for rank in ranks] == [[]] * world
    assert sum(rank["moved"] for rank in ranks) > 100_000
    # two halves: a phase, sends and receives together, fits into one of them (but for a row: slices are of whole rows)
    assert max(rank["staging"] for rank in ranks) <= 1.2 * bucket / 2
    assert len({rank["phases"] for rank in ranks}) == 1
