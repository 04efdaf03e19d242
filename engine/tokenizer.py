"""Tokens in and out, with the model's own chat template, on the `tokenizers` library alone (no torch, no transformers)."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer

Message = dict[str, Any]


class TokenizerError(ValueError):
    """The folder has no usable tokenizer, or a conversation cannot be rendered with its template."""


class Tokenizer:
    """The tokenizer of a Hugging Face folder: `tokenizer.json`, and its chat template when it has one.

    Raises:
        TokenizerError: the folder has no tokenizer.json.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{self.folder} has no tokenizer.json; load the tokenizer once with transformers and save_pretrained() it there"
            )
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        self._fast.no_padding()
        self._fast.no_truncation()
        self._settings = self._read("tokenizer_config.json")

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of plain text; `special_tokens` adds what the tokenizer adds by itself (a leading BOS, for some)."""
        return list(self._fast.encode(text, add_special_tokens=special_tokens).ids)

    def decode(self, tokens: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of token ids; ids beyond the tokenizer's vocabulary (padding of the model's) are left out."""
        size = self._fast.get_vocab_size(with_added_tokens=True)
        return self._fast.decode([t for t in tokens if t < size], skip_special_tokens=not special_tokens)

    def render_text(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The conversation as the model's chat template writes it.

        Raises:
            TokenizerError: no chat template, or the template refuses this conversation.
        """
        if self.chat_template is None:
            raise TokenizerError(
                f"{self.folder} has no chat template: give prompts as plain text instead of messages, or add chat_template.jinja"
            )
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in self._settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generation_prompt, tools=None, documents=None, **special
            )
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.folder} refused the conversation: {error}") from error

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation. Nothing is added to what the template wrote (a second BOS, for one)."""
        return self.encode(self.render_text(messages, generation_prompt=generation_prompt), special_tokens=False)

    @cached_property
    def stop_token_ids(self) -> list[int]:
        """Every token that ends a response: of generation_config.json, config.json and the tokenizer's own settings."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = self._read(name).get("eos_token_id")
            found += value if isinstance(value, list) else [] if value is None else [value]
        eos = self._settings.get("eos_token")
        token = self._fast.token_to_id(eos["content"] if isinstance(eos, dict) else eos) if eos else None
        return sorted({*found, *([] if token is None else [token])})

    @cached_property
    def chat_template(self) -> str | None:
        """Source of the chat template: its own file, or inside tokenizer_config.json (the one named `default` of several)."""
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self._settings.get("chat_template")
        if isinstance(template, list):
            return next((t["template"] for t in template if t["name"] == "default"), None)
        return template

    @cached_property
    def _template(self) -> jinja2.Template:
        # The sandbox and these settings are what chat templates are written for; a template is data from a model file.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Plain JSON: jinja2's own filter escapes HTML characters, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
