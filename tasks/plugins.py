"""Functions given by name: registered ones, and a user's own as `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class UnknownFunction(ValueError):
    """The name is not registered, or the user's function cannot be imported; the message says which and why."""


class Registry(Generic[Function]):
    """Named functions of one kind.

    >>> rewards = Registry("reward")
    >>> @rewards.register("length")
    ... def length(response: str) -> float: ...
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: dict[str, Function] = {}

    def register(self, name: str) -> Callable[[Function], Function]:
        """Decorator that makes a function selectable by `name` in a configuration."""

        def add(function: Function) -> Function:
            if name in self._functions:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._functions[name] = function
            return function

        return add

    def names(self) -> list[str]:
        return sorted(self._functions)

    def find(self, name: str) -> Function:
        """The registered function, or the user's when `name` holds a colon.

        Raises:
            UnknownFunction: neither.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return load_function(name, self.kind)
        close = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(self.names())}, or module:function"
        raise UnknownFunction(f"unknown {self.kind} {name!r} ({hint})")


def load_function(reference: str, kind: str = "function") -> Any:
    """Import `module:function`, or `path/to/file.py:function` (relative to the working directory).

    Raises:
        UnknownFunction: the module, file or attribute is missing, is not callable, or fails while it is imported.
    """
    source, _, attribute = reference.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except Exception as error:  # a user's module may raise anything at import, and the user wants to know what
        raise UnknownFunction(
            f"{kind} {reference!r}: cannot import {source}: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UnknownFunction(f"{kind} {reference!r}: {source} has no function {attribute!r}")
    return function


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    name = f"onecopy_user:{path}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
