"""Losses as pure functions of ragged token rows."""
