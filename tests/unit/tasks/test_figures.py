"""Figures of several ranks in one."""

from tasks.figures import largest_of_ranks


def test_the_largest_of_all_ranks_counts_and_other_metrics_are_left_to_the_stage():
    ranks = [
        {"metrics": {"reshard/into_generation/move_seconds": 0.5, "memory/kv_cache_bytes": 1.0, "tokens": 7.0}},
        {"metrics": {"reshard/into_generation/move_seconds": 0.2, "memory/kv_cache_bytes": 3.0}},
        {},
    ]
    assert largest_of_ranks({"ranks": ranks}) == {
        "reshard/into_generation/move_seconds": 0.5,
        "memory/kv_cache_bytes": 3.0,
    }
