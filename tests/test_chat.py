"""Chat templates: rendered as transformers renders them, in a sandbox and within a budget."""

import pytest

from hostile_formats import make_tokenizer
from regard.checkpoints.chat import render
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer


def chatting(template):
    return Tokenizer(Tokenizer.from_vocabulary(["[UNK]", "a"])._inner, {"bos": "a"}, template)


def test_chat_templates_have_what_transformers_offers():
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "    {% generation %}{{ m | tojson }}{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert chatting(template).chat([{"role": "skip"}, {"role": "é"}]) == 'a{"role": "é"}4'


# What the templates of Llama 3, Qwen, Mistral and DeepSeek are made of: their ways to walk through a conversation.
IDIOMS = {
    "header": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start|>' + "
    "message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}",
    "tools": "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0].role == 'system' %}\n"
    "        {{- messages[0].content + '\\n\\n' }}\n    {%- endif %}\n    {%- for tool in tools %}\n"
    '        {{- "\\n" }}\n        {{- tool | tojson }}\n        {{- tool | tojson(indent=4) }}\n    {%- endfor %}\n'
    "{%- endif %}\n{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
    "message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}\n"
    "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- for message in messages %}\n    {%- set content = message.content %}\n"
    "    {%- if '</think>' in content %}\n"
    "        {%- set content = content.split('</think>')[-1].lstrip('\\n').rstrip() %}\n    {%- endif %}\n"
    "    {{- message.role ~ ':' ~ ns.last_query_index ~ content ~ loop.last ~ loop.previtem }}\n{%- endfor %}",
    "alternating": "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set turns = messages %}{%- endif %}"
    "{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}{%- set ns = namespace() %}"
    "{%- set ns.index = 0 %}{%- for message in turns %}{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- set ns.index = ns.index + 1 %}{%- endfor %}"
    "{%- for message in turns %}{%- if message == users[-1] and system is defined %}[INST]{{ system }} {% endif %}"
    "{{- message['content'] if message['role'] == 'user' else ' ' + message['content'] | string + eos_token }}"
    "{%- endfor %}",
    "macros": "{% macro show(message, names=[]) %}{%- for key, value in message | dictsort %}{{ key | upper }}="
    "{{ value | replace('\\n', ' ') | default('-', true) }}{{ ', ' if not loop.last }}{% endfor %}"
    "{{ names | join('/') | indent(2) }}{% endmacro %}{% for message in messages if message.content is not none %}"
    "{% generation %}{{ show(message, names=messages | map(attribute='role') | unique | list) }}{% endgeneration %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% else %}nothing{% endfor %}"
    "{% set text %}{{ '%s of %05.2f' % (messages | length, 2) }}{% endset %}{{ text ~ [1, 'é', {'a': none}] }}",
}


@pytest.mark.parametrize("template", IDIOMS.values(), ids=list(IDIOMS))
def test_chat_templates_render_as_transformers_renders_them(template, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    system, user = {"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": " Wer?\n é "}
    answer = {"role": "assistant", "content": "<think>\nhm</think>\n\nI."}
    tool = {"type": "function", "function": {"name": "get", "parameters": {"x": [1, 2.5, None, True, "é"]}}}
    texts = 0
    for messages in ([user], [system, user], [user, answer, user], [system, *[user, answer] * 30], [user, user], []):
        for tools in (None, [tool]):
            options = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": bool(tools)}
            try:
                expected = utilities.render_jinja_template([messages], tools, chat_template=template, **options)[0][0]
                texts += 1
            except Exception:
                expected = None
            try:
                text = render(template, {"messages": messages, "tools": tools, "documents": None, **options})
            except CheckpointError:
                text = None
            assert text == expected
    assert texts >= 8


def test_what_a_template_may_need_grows_with_the_messages():
    template = "{% for m in messages %}{% for n in messages %}{{ m.content ~ n.content }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 100_000}] * 20
    assert len(render(template, {"messages": messages})) == 2 * 20 * 20 * 100_000
    with pytest.raises(CheckpointError, match="expected a template that needs at most"):
        render("{{ 'x' * 10000000 }}", {"messages": messages[:1]})
    assert len(render("{{ 'x' * 10000000 }}", {"messages": messages})) == 10_000_000
    with pytest.raises(CheckpointError, match="expected at most 32,768 characters, got 40,000"):
        render("x" * 40_000, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ [[0]*9999]*9999 }}",
        "{{ 'x' | center(1000000000) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' * 10000000000 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{{ undefined.x }}",
    ],
)
def test_chat_templates_run_in_a_sandbox(template):
    with pytest.raises(CheckpointError, match="chat_template"):
        chatting(template).chat([{"role": "user", "content": "hi"}])


def test_chat_templates_are_found(tmp_path):
    make_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "d"
    config.write_text('{"chat_template": "c", "bos_token": {"content": "<s>"}}')
    assert Tokenizer.from_folder(tmp_path).chat_template == "c"
    assert Tokenizer.from_folder(tmp_path).bos == 4
    (tmp_path / "chat_template.jinja").write_text("j")
    assert Tokenizer.from_folder(tmp_path).chat_template == "j"
