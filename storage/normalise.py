"""One prompt, made from a user's row: checked, normalised to native Python and JSON, with an id that stays."""

import base64
import datetime
import decimal
import json
import uuid
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.data_config import DataConfig
from storage.manifest import fingerprint
from storage.rows import DataError


@dataclass(frozen=True)
class Prompt:
    """One prompt: either a conversation (`messages`, each with role and content) or ready `text`.

    `prompt_id` is a hash of source and content: the same prompt twice in a file has one id. `answer` is the ground
    truth as it is if it is a string, "" if there is none, and otherwise JSON. `extra` holds the row's other columns as
    values that JSON can hold.
    """

    prompt_id: str
    source: str
    messages: list[dict[str, Any]] | None
    text: str | None
    answer: str
    extra: dict[str, Any]


def prompt_from_row(config: DataConfig, source: str, row: dict[str, Any], place: str) -> Prompt:
    """The prompt in a row of a file or of a user's task. Raises DataError, beginning with `place`."""
    answer = None if config.answer_column is None else read_field(row, config.answer_column, place)
    used = {config.prompt_column, config.answer_column}
    extra = {name: value for name, value in row.items() if name not in used}
    return make_prompt(config, source, read_field(row, config.prompt_column, place), answer, extra, place)


def make_prompt(config: DataConfig, source: str, content: Any, answer: Any, extra: Any, place: str) -> Prompt:
    """Check and normalise the parts of a prompt. Raises DataError, beginning with `place`."""
    try:
        text, messages = _content(content, config.system_prompt)
        extra = json_value(extra)
        answer_text = _answer(answer)
    except (ValueError, TypeError) as error:
        raise DataError(f"{place}: {error}") from error
    prompt_id = fingerprint(source, messages if text is None else text, answer_text)
    return Prompt(prompt_id, source, messages, text, answer_text, extra)


def read_field(row: dict[str, Any], column: str, place: str) -> Any:
    """A column's value, None if it is null or absent; `a.b` reaches into column `a` unless a column has that name.

    Raises DataError for a nested name that is not there, since a mistyped one would otherwise read as "no value".
    """
    if column in row or "." not in column:
        return row.get(column)
    value: Any = row
    for name in column.split("."):
        if value is None:
            return None
        if not isinstance(value, dict) or name not in value:
            has = f"has {sorted(value)}" if isinstance(value, dict) else f"is a {type(value).__name__}"
            raise DataError(f"{place}: there is no {name!r} on the way to {column!r}, that place {has}")
        value = value[name]
    return value


def json_value(value: Any) -> Any:
    """`value` in the types JSON has: dates as ISO 8601, decimals and UUIDs as text, bytes as base64, tuples as lists.

    Raises ValueError for what has no JSON form (NaN, infinity, other types).
    """
    return json.loads(json.dumps(value, allow_nan=False, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, decimal.Decimal | uuid.UUID | datetime.timedelta):
        return str(value)
    raise ValueError(f"a value of type {type(value).__name__} cannot be kept in JSON; convert it to text or numbers")


def _answer(answer: Any) -> str:
    if answer is None:
        return ""
    return _checked_text(answer, "the answer") if isinstance(answer, str) else json.dumps(json_value(answer))


def _content(content: Any, system_prompt: str | None) -> tuple[str | None, list[dict[str, Any]] | None]:
    """(text, None) or (None, messages). A string with a system prompt becomes a conversation."""
    if isinstance(content, str):
        _checked_text(content, "the prompt")
        if not content.strip():
            raise ValueError("the prompt is empty; fill it or remove the row")
        if system_prompt is None:
            return content, None
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list | tuple) or not content:
        raise ValueError(
            f"the prompt must be a string or a list of {{role, content}}, not {_kind(content)}; "
            "set prompt_column to the column that holds one"
        )
    messages = [_message(number, message) for number, message in enumerate(content)]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return None, messages


def _message(number: int, message: Any) -> dict[str, Any]:
    """The message without keys that are None: Parquet adds to each message the keys that any other one has."""
    message = json_value(_pruned(message))
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {number} must have a role and a content, it is {_kind(message)}")
    parts = message.get("content")
    if isinstance(parts, list):
        message["content"] = "".join(_part_text(number, part) for part in parts)
    elif not isinstance(parts, str) and not (parts is None and message.get("tool_calls")):
        raise ValueError(f"the content of message {number} must be text, it is {_kind(parts)}")
    _checked_text(message.get("content", ""), f"message {number}")
    return message


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f"message {number} has a part that is not text ({_kind(part)}); only text models are trained")


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    return [_pruned(item) for item in value] if isinstance(value, list | tuple) else value


def _checked_text(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has half of a surrogate pair at character {error.start}; remove it") from error
    return text


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {sorted(value)}"
    return "null" if value is None else f"a {type(value).__name__}" if value else f"an empty {type(value).__name__}"
