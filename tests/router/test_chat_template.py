import json
from pathlib import Path
from typing import Any

import pytest

from common.model_files import ModelFiles
from common.tokenizer import Tokenizer
from router.chat_template import ChatTemplate, ChatTemplateError
from tests.router.models import CHAT_TEMPLATE, write_model
from tests.router.tool_templates import CHAT, LLAMA3, MISTRAL, QWEN, TOOLS

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}{% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message != false %}
        {% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% else %}
{{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}"""
LOOPS = """{%- set ns = namespace(count=0) -%}
{%- for m in messages -%}{%- if m.role == 'tool' -%}{%- continue -%}{%- endif -%}
{%- set ns.count = ns.count + 1 -%}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{{ ns.count }}
{%- if ns.count > 2 -%}{%- break -%}{%- endif -%}{%- endfor -%}"""
GENERATION = """{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content | trim }}{% endgeneration %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}tools{% endif %}"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "llama2": LLAMA2, "loops": LOOPS, "generation": GENERATION}

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": 'be "brief" <&>'}, {"role": "user", "content": " é你好 \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "It is  "},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "so it is "},
    ],
]


def template(folder: Path, source: str) -> ChatTemplate:
    return ChatTemplate(ModelFiles.read(write_model(folder, chat_template=source)))


def oracle(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(tmp_path: Path, name: str) -> None:
    ours = template(tmp_path, TEMPLATES[name])
    theirs = oracle(tmp_path)
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render(chat, max_bytes=1 << 20) == expected


@pytest.mark.parametrize("name", ["chatml", "llama2", "generation"])
@pytest.mark.parametrize("chat", CHATS)
def test_continues_the_final_message_as_transformers_does(
    tmp_path: Path, name: str, chat: list[dict[str, str]]
) -> None:
    ours = template(tmp_path, TEMPLATES[name])
    expected = oracle(tmp_path).apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert ours.render(chat, max_bytes=1 << 20, continue_final_message=True) == expected


@pytest.mark.parametrize("source", [QWEN, LLAMA3, MISTRAL])
@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("length", range(1, len(CHAT) + 1))
def test_tools_calls_and_results_render_as_transformers_does(
    tmp_path: Path, source: str, tools: list[dict[str, Any]] | None, length: int
) -> None:
    ours = template(tmp_path, source)
    chat = CHAT[:length]
    expected = oracle(tmp_path).apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert ours.render(chat, tools=tools, max_bytes=1 << 20) == expected


def test_arguments_are_variables_of_the_template(tmp_path: Path) -> None:
    ours = template(tmp_path, QWEN)
    text = ours.render(CHATS[0], arguments={"enable_thinking": False, "self": 1}, max_bytes=1 << 20)
    assert text.endswith("<think>\n\n</think>\n\n")


def test_smollm2_template_and_tokens_equal_transformers(smollm2: Any, tmp_path: Path) -> None:
    smollm2.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    files = ModelFiles.read(tmp_path)
    template, tokenizer = ChatTemplate(files), Tokenizer(files)
    for chat in CHATS:
        text = template.render(chat, max_bytes=1 << 20)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert text == smollm2.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ids == smollm2.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(1000) %}{{ 'long enough' }}{% endfor %}", "more than 100 bytes"),
    ],
)
def test_what_a_template_rejects_is_reported_in_its_own_words(
    tmp_path: Path, source: str, message: str
) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        template(tmp_path, source).render(CHATS[0], max_bytes=100)


def test_final_message_that_the_template_drops_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="drops the end of the final message"):
        template(tmp_path, "{{ messages[0].role }}").render(
            CHATS[0], max_bytes=100, continue_final_message=True
        )


def test_strftime_now_is_there(tmp_path: Path) -> None:
    assert template(tmp_path, "{{ strftime_now('%Y') }}").render(CHATS[0], max_bytes=100).isdigit()
