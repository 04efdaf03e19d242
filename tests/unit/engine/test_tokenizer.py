"""Our light tokenizer gives the ids that transformers gives, and never a token twice."""

import json

import pytest

from engine.tokenizer import Tokenizer, TokenizerError
from tests.support.tiny_models import write_byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    return folder


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Is 1 < 2 & "x"? ü'}]


def test_chat_equals_transformers(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert Tokenizer(folder).render(CHAT) == expected
    assert Tokenizer(folder).encode("plain ü") == theirs("plain ü")["input_ids"]


def test_round_trip_and_ids_beyond_the_vocabulary(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("12 ü"), 0, 300]) == "12 ü"


def test_every_stop_token_counts(folder):
    assert Tokenizer(folder).stop_token_ids == [0, 3]


def test_a_bos_in_the_template_is_not_doubled(tmp_path):
    write_byte_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["bos_token"] = "<pad>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    fast = json.loads((tmp_path / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<pad>", "type_id": 0}}
    fast["post_processor"] = {
        "type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<pad>": {"id": "<pad>", "ids": [1], "tokens": ["<pad>"]}},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(fast))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.render([{"role": "user", "content": "7"}]).count(1) == 1
    assert tokenizer.encode("7").count(1) == 1


def test_a_refused_conversation_and_a_missing_template_say_so(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        Tokenizer(tmp_path).render(CHAT)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(tmp_path).render(CHAT)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        Tokenizer(tmp_path / "nowhere")


def test_a_template_cannot_leave_its_sandbox(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TokenizerError):
        Tokenizer(tmp_path).render(CHAT)
