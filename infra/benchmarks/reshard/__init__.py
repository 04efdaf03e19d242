"""Transitions between training and generation, beside the ways of others: `python -m infra.benchmarks.reshard --help`."""
