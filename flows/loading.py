"""From a YAML recipe and `--set` overrides to a checked configuration, or to the list of everything wrong with it."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from flows.checks import check
from flows.config import PostTrainConfig, SFTConfig

Config = TypeVar("Config", bound=BaseModel)


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in `violations`."""

    def __init__(self, violations: Sequence[str]) -> None:
        super().__init__("\n".join(violations))
        self.violations = list(violations)


class _Loader(yaml.SafeLoader):
    """YAML as people write it in recipes: `1e-5` is a number, `2024-01-01` is text, a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

_Loader.add_implicit_resolver(  # YAML 1.1 wants a point and a sign in the exponent; people and JSON do not
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: no such file, not YAML, or not a mapping.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"cannot read {path}: {getattr(error, 'strerror', None) or error}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path} is not valid YAML: {' '.join(str(error).split())}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError([f"{path} must hold a mapping (key: value lines), not a {type(content).__name__}"])
    return content


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with each `a.b=c` applied; `c` is read as a YAML scalar, so that `true`, `null`, `3` and `1e-5` have their types.

    Raises:
        ConfigError: an override without `=`, a value that is not YAML, or a path through something that is not a mapping.
    """
    result, problems = copy.deepcopy(values), []
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            problems.append(f"--set {override}: write it as key.subkey=value")
            continue
        try:
            _assign(result, keys, yaml.load(text, Loader=_Loader))
        except yaml.YAMLError:
            problems.append(f"--set {override}: the value is not valid YAML; put it in quotes")
        except TypeError as error:
            problems.append(f"--set {override}: {error}")
    if problems:
        raise ConfigError(problems)
    return result


def _assign(target: dict[str, Any], keys: list[str], value: Any) -> None:
    for depth, key in enumerate(keys[:-1]):
        if target.get(key) is None:
            target[key] = {}
        target = target[key]
        if not isinstance(target, dict):
            raise TypeError(f"{'.'.join(keys[: depth + 1])} is a value, it has no keys")
    target[keys[-1]] = value


def build(model: type[Config], values: dict[str, Any]) -> tuple[Config | None, dict[tuple[str, ...], str]]:
    """Validate `values`; the configuration with every rejected entry replaced by its default, and one message per rejected entry.

    The configuration is None when a rejected entry has no default: then nothing more can be checked.
    """
    problems: dict[tuple[str, ...], str] = {}
    remaining = copy.deepcopy(values)
    while True:
        try:
            return model.model_validate(remaining), problems
        except ValidationError as error:
            fresh = {_location(item["loc"]): _message(model, item) for item in error.errors()}
            if not fresh.keys() - problems.keys():
                return None, problems
            problems = {**fresh, **problems}
            if not all([_remove(remaining, location) for location in fresh]):
                return None, problems


def _location(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    return tuple(str(part) for part in loc)


def _remove(values: dict[str, Any], location: tuple[str, ...]) -> bool:
    target: Any = values
    for key in location[:-1]:
        target = target.get(key) if isinstance(target, dict) else None
    if isinstance(target, dict) and location and location[-1] in target:
        del target[location[-1]]
        return True
    return False


def _message(model: type[BaseModel], item: Any) -> str:
    location = _location(item["loc"])
    where = ".".join(location) or "configuration"
    kind = item["type"]
    if kind == "extra_forbidden":
        owner = _model_at(model, location[:-1])
        close = difflib.get_close_matches(location[-1], list(owner.model_fields) if owner else [], n=1)
        return f"{where}: unknown key" + (f" (did you mean {close[0]}?)" if close else "")
    if kind == "missing":
        return f"{where}: is required"
    message = item["msg"].removeprefix("Value error, ")
    given = item.get("input")
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool | None) and kind != "value_error" else ""
    return f"{where}: {message[:1].lower()}{message[1:]}{shown}"


def _model_at(model: type[BaseModel], location: tuple[str, ...]) -> type[BaseModel] | None:
    for key in location:
        field = model.model_fields.get(key)
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        models = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not models:
            return None
        model = models[0]
    return model


def load_config(model: type[Config], path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A configuration from a recipe (none: an empty one) and overrides.

    Raises:
        ConfigError: every violation: unknown keys, wrong types, and combinations that cannot work.
    """
    values = apply_overrides(read_recipe(path) if path is not None else {}, overrides)
    config, problems = build(model, values)
    violations = list(problems.values())
    if isinstance(config, PostTrainConfig | SFTConfig):
        # What a rejected entry was replaced with is not the user's doing: no complaint about that.
        violations += [
            str(v) for v in check(config)[1] if not any(_touches(key, bad) for key in v.keys for bad in problems)
        ]
    if violations or config is None:
        raise ConfigError(violations)
    return config


def _touches(key: str, location: tuple[str, ...]) -> bool:
    rejected = ".".join(location)
    return key == rejected or key.startswith(f"{rejected}.") or rejected.startswith(f"{key}.")
