"""Prompts and demonstrations as token rows."""

from pathlib import Path

import pytest

from storage.prompts import DataError, Prompt
from tasks.demonstration import demonstration_row
from tasks.prompt import fitting_rows, prompt_row


class CharacterTokenizer:
    """One token a character; `.` ends a turn, and chats read `u:...a:...`."""

    folder = Path("model")
    stop_token_ids = [ord("."), ord("!")]

    def encode(self, text, *, special_tokens=True):
        return ([1] if special_tokens else []) + [ord(character) for character in text]

    def render_text(self, messages, *, generation_prompt=True):
        text = "".join(f"{m['role'][0]}:{m['content']}." for m in messages)
        return text + ("a:" if generation_prompt else "")

    def render(self, messages, *, generation_prompt=True):
        return self.encode(self.render_text(messages, generation_prompt=generation_prompt), special_tokens=False)


def prompt(text=None, answer="42", **fields):
    values = {"prompt_id": "p", "source": "file", "messages": None, "extra": {"k": [1]}} | fields
    return Prompt(text=text, answer=answer, **values)


CHAT = [{"role": "user", "content": "hi"}]


def decoded(tokens):
    return "".join(map(chr, tokens))


def test_text_is_taken_as_it_is_and_messages_are_rendered():
    row = prompt_row(CharacterTokenizer(), prompt("1+1="), "g")
    assert (row["prompt_text"], row["prompt_tokens"][0], row["extra"]) == ("1+1=", 1, '{"k": [1]}')
    row = prompt_row(CharacterTokenizer(), prompt(messages=CHAT), "g")
    assert row["prompt_text"] == "u:hi.a:" == decoded(row["prompt_tokens"])


def test_a_demonstration_ends_with_the_stop_token():
    row = demonstration_row(CharacterTokenizer(), prompt("1+1="), "s")
    assert decoded(row["response_tokens"]) == "42!" or decoded(row["response_tokens"]) == "42."
    row = demonstration_row(CharacterTokenizer(), prompt(messages=CHAT), "s")
    assert decoded(row["response_tokens"]) == "42."
    assert row["length"] == len("u:hi.a:42.")


def test_a_template_that_rewrites_the_turn_still_gives_the_answer():
    class Rewriting(CharacterTokenizer):
        def render_text(self, messages, *, generation_prompt=True):
            return f"[{len(messages)}]" + super().render_text(messages, generation_prompt=generation_prompt)

    assert decoded(demonstration_row(Rewriting(), prompt(messages=CHAT), "s")["response_tokens"]) == "42."


def test_a_demonstration_needs_an_answer_and_a_stop_token():
    with pytest.raises(DataError, match="has no answer to learn from"):
        demonstration_row(CharacterTokenizer(), prompt("x", answer=""), "s")
    endless = CharacterTokenizer()
    endless.stop_token_ids = []
    with pytest.raises(DataError, match="names no token that ends a response"):
        demonstration_row(endless, prompt("x"), "s")


ROWS = [{"prompt_id": str(n), "source": "file", "prompt_tokens": [0] * n} for n in (5, 10, 11, 500)]


def test_overlong_prompts_stop_or_are_left_out_in_order():
    with pytest.raises(DataError, match="prompt 11 of file has 11 tokens, but .* only 10 fit"):
        fitting_rows(ROWS, 10, "error")
    assert [row["prompt_id"] for row in fitting_rows(ROWS, 10, "drop")] == ["5", "10"]
    with pytest.raises(DataError, match="none of the 4 prompts drawn fits into 2 tokens"):
        fitting_rows(ROWS, 2, "drop")
