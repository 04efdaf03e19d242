"""Which errors are answered with a line for each reason, and the exit code that goes with them."""

from __future__ import annotations

from engine.pool.errors import OperationFailed, OperationTimeout, PoolBroken, PoolError
from engine.tokenizer import TokenizerError
from engine.weights.architecture import UnsupportedModel
from engine.weights.sources import ModelNotFound
from flows.loading import ConfigError
from storage.datasets import DatasetError
from storage.filesystem import InvalidName, StorageError
from storage.ledger import LedgerError
from storage.prompts import DataError
from tasks.advantage import NothingToLearn
from tasks.advantages import BadEstimate
from tasks.dynamic_sampling import TooFewGroups
from tasks.plugins import UnknownFunction
from tasks.rewards import ScoringFailed

REFUSED = 2
"""The request, or the place it is made in, has to change first."""

FAILED = 1
"""It was a fair request and something broke; the same command goes on where it stopped."""

_REFUSALS = (
    StorageError,
    InvalidName,
    LedgerError,
    DatasetError,
    DataError,
    ModelNotFound,
    UnsupportedModel,
    TokenizerError,
    UnknownFunction,
    PoolError,
)
_FAILURES = (PoolBroken, OperationFailed, OperationTimeout, ScoringFailed, NothingToLearn, BadEstimate, TooFewGroups)
_PREFECT_UNREACHABLE = ("Failed to reach API", "Timed out while attempting to connect", "Unable to connect to")


def explain(error: Exception) -> tuple[int, list[str]]:
    """Exit code and lines for an error that has a known meaning.

    Raises:
        Exception: `error` itself when it has none; its traceback is then worth more than a line.
    """
    if isinstance(error, ConfigError):
        return REFUSED, error.violations
    if isinstance(error, OperationFailed) and _refused_by_storage(error):
        return REFUSED, [_line(error)]
    if isinstance(error, _FAILURES):
        return FAILED, [_line(error)]
    if isinstance(error, _REFUSALS):
        return REFUSED, [_line(error)]
    if isinstance(error, RuntimeError) and str(error).startswith(_PREFECT_UNREACHABLE):
        return FAILED, [f"Prefect: {_line(error)}; check PREFECT_API_URL, or unset it to use the embedded server"]
    raise error


def _refused_by_storage(error: OperationFailed) -> bool:
    """Whether a rank could not write or read: a full disk is refused alike, whichever process met it."""
    last = error.remote_traceback.strip().splitlines()[-1:]
    return any(line.partition(":")[0].rpartition(".")[2] in ("StorageError", "CorruptFile") for line in last)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
