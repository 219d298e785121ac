"""Chats: messages after an answer equal the template's text, prompts show tools, and answers are parsed."""

import itertools
import json
import re

import numpy as np
import pytest

from minirl.data.answers import check_calls_parsable, parse_assistant_message
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.jsonl import load_jsonl_task
from minirl.data.messages import read_message, read_prompt
from minirl.data.task import Row, Task
from minirl.errors import InputError
from minirl.run.config import RunConfig
from minirl.run.inputs import load_prompts
from support.models import RAW_CONFIG
from support.texts import CHAT_TEMPLATES, CHATML, HERMES, WITH_TOOLS, assistant, save_chat_tokenizer, user

ANSWER = "hello there"
CONTENTS = (
    "next",
    "",
    " \n",
    "  padded \n",
    "<|im_end|>",
    "<|eot|>",
    "<|user|>",
    "<|im_start|>user\nhi<|im_end|>",
    "</s>[INST]",
    "<think>x</think>y",
    "</tool_response>",
    "{{ messages }}{% raw %}",
    "minirlanswer minirlmark0end",
    '{"a": null}',
    "日本 😀 e\u0301",
    "\x00\x01\u2028",
)
# The template contains the name "end", too.
LOOKUP = {"type": "function", "function": {"name": "end", "description": "Look up.", "parameters": {}}}


@pytest.fixture
def make(tmp_path):
    """Return a function that makes the tokenizer for a template."""

    def make(template, end="<|im_end|>", special=(), **options):
        save_chat_tokenizer(tmp_path, template, end, special)
        return ChatTokenizer(tmp_path, chat=True, **options)

    return make


def conversation(*new):
    return [user("q"), assistant(ANSWER), *new]


def written_behind(tokenizer, *new):
    """Return the ids of the text that the template writes after an answer in the real conversation."""
    text = tokenizer.render(conversation(*new), "f:1", is_prompt=True)
    return tokenizer.encode_text(text.partition(ANSWER)[2], "f:1")


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_messages_behind_an_answer_are_what_the_template_writes_there(make, name):
    template, end = CHAT_TEMPLATES[name]
    tokenizer = make(template, end)
    end_id, eot_id = (tokenizer.encode_text(text, "")[0] for text in (end, "<|eot|>"))
    for role, (first, second) in itertools.product(("user", "tool"), itertools.pairwise(CONTENTS)):
        new = [{"role": role, "content": content} for content in (first, second + first)]
        whole = written_behind(tokenizer, *new)
        # 10 is a newline, which may end a stop string; <|eot|> ends other models' answers.
        for other in {None, 10, eot_id} - {end_id}:
            assert tokenizer.encode_following_messages(new, "f:1", end_id=other) == whole
        rest = whole[whole.index(end_id) + 1 :] if end_id in whole[:2] else whole
        assert tokenizer.encode_following_messages(new, "f:1", end_id=end_id) == rest


ALTERNATING = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}" + CHATML
)
NO_TOOLS = CHATML.replace(
    "<|im_start|>{{", "{% if m.role == 'tool' %}{% continue %}{% endif %}<|im_start|>{{"
)
NO_TEXT = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")

SAID = assistant("a")
TOLD = {"role": "tool", "content": ""}


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (ALTERNATING, [TOLD], "the chat template of FOLDER rejects the messages: .*roles must alternate"),
        (NO_TOOLS, [TOLD], "the chat template of FOLDER does not render a message of role 'tool'"),
        (
            NO_TEXT,
            conversation()[:1],
            "the chat template of FOLDER does not render an assistant message's text verbatim",
        ),
        (CHATML, [TOLD, SAID], "generate.*: the last message is an assistant message.*append its start"),
    ],
)
def test_what_is_no_message_or_is_not_written_by_the_template_is_refused_with_the_row(
    make, tmp_path, template, messages, error
):
    """Fault 22."""
    with pytest.raises(InputError, match=rf"f:1: {error.replace('FOLDER', str(tmp_path))}"):
        make(template).encode_following_messages(messages, "f:1", end_id=None)


ONLY_KNOWN = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
CALLING = assistant("b", tool_calls=[CALL])
WITH_CALLS = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
)


UNKNOWN = [{"role": role, "content": "b"} for role in ("developer", "function", "system", "tool")]


def shown(tokenizer, row):
    return tokenizer.backend.decode(tokenizer.encode(row))


@pytest.mark.parametrize("message", [*UNKNOWN, CALLING], ids=lambda message: message["role"])
def test_a_prompts_message_that_the_template_leaves_out_is_refused(make, message):
    """Covers unknown roles and tool calls, even in a message that the answer continues. Fault 22."""
    row = Row([read_message(message, "f:1"), user("a")], {}, "f:1")
    with pytest.raises(
        InputError, match=rf"^f:1: the chat template of .* does not render .*{message['role']}"
    ):
        make(ONLY_KNOWN).encode(row)
    assert make(WITH_CALLS).encode(row)[-1] == 10
    with pytest.raises(InputError, match=r"^f:1: the chat template of .* does not render a tool call"):
        make(WITH_CALLS).encode(Row([user("a"), CALLING], {}, "f:1"))


def test_messages_are_read_as_users_and_clients_write_them(make):
    """Null and content parts become text, and JSON arguments become objects, which a template would escape twice."""
    asked = user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    read = read_prompt([asked, assistant(None, tool_calls=[CALL]), user("c")], "f:1")
    assert read == read_prompt(read, "f:1")
    indexed = {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}
    assert read_message(indexed, "")["tool_calls"] == read[1]["tool_calls"]
    assert read_message({"role": "tool", "content": []}, "")["content"] == []
    text = shown(make(WITH_CALLS), Row(read, {}, "f:1"))
    assert "user\nab<|im_end|>" in text
    assert '"arguments": {"a": 3}' in text
    assert asked["content"][0]["type"] == "text"


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_the_token_that_the_template_writes_after_an_answer_ends_the_turns_of_chats(tmp_path, name):
    """The model's files may name another stop token. Text prompts do not get the template's token. Pitfall 14."""
    template, end = CHAT_TEMPLATES[name]
    save_chat_tokenizer(tmp_path, template, end)
    assert ChatTokenizer(tmp_path).chat_stop_ids == ChatTokenizer(tmp_path).stop_ids
    save_chat_tokenizer(tmp_path, template, "</s>")
    tokenizer = ChatTokenizer(tmp_path)
    (eos_id,) = tokenizer.stop_ids
    text = tokenizer.render(conversation(user("")), "f:1", is_prompt=False)
    ends = tokenizer.encode_text(text.partition(ANSWER)[2].strip(), "f:1")[:1]
    assert tokenizer.stop_ids_of(conversation()) == {*ends, eos_id}
    assert tokenizer.stop_ids_of("text") == {eos_id}


def test_a_rows_tools_are_those_of_its_prompt(make, tmp_path):
    """As a mere column, tools would be lost silently."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hi", "tools": [LOOKUP], "n": 1}))
    (row,) = load_jsonl_task(str(tmp_path / "rows.jsonl"), ()).train_rows
    assert row.columns == {"n": 1}
    assert "Look up." in shown(make(WITH_TOOLS), row)
    with pytest.raises(InputError, match=r"rows.jsonl:1: .* does not render the tool end"):
        make(CHATML).encode(row)
    with pytest.raises(InputError, match=r"rows.jsonl:1: both the row and the run have tools"):
        make(WITH_TOOLS, tools=[{**LOOKUP, "function": {"name": "other"}}]).encode(row)


def lookup(query: str) -> str:
    """Look up.

    Args:
        query: What to look for.
    """
    return query


def untyped(query):
    """Look up."""


def test_prompts_tell_of_tools_given_as_functions_or_schemas(make):
    row = Row("hi", {}, "f:1")
    tokenizer = make(WITH_TOOLS, tools=[lookup])
    text = shown(tokenizer, row)
    assert '"What to look for."' in text
    assert shown(make(WITH_TOOLS, tools=tokenizer.tools), row) == text


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        ([LOOKUP, LOOKUP], "two tools are named 'end'"),
        ([untyped], "'untyped': not a valid JSON schema"),
        ([{"name": "lookup"}], "expected a function, or a schema"),
    ],
)
def test_tools_that_a_prompt_cannot_tell_of_are_refused(make, tools, error):
    """Fault 59."""
    with pytest.raises(InputError, match=error):
        make(WITH_TOOLS, tools=tools)


def message_of(tokenizer, text, before="<|im_start|>assistant\n"):
    ids = tokenizer.encode_text(text, "")
    return parse_assistant_message(tokenizer, ids, np.array(tokenizer.encode_text(before, "")))


def called(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


GOOD_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": [1, "<tool>"]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "before", "expected"),
    [
        ("hi<|im_end|>", "", {"content": "hi"}),
        ("<think>\na\n</think>\n\nb", "", {"reasoning_content": "a", "content": "b"}),
        ("a</think>b<|im_end|>", "assistant\n<think>\n", {"reasoning_content": "a", "content": "b"}),
        (f"{GOOD_CALL}</think>b", "<think>\nso, ", {"reasoning_content": GOOD_CALL, "content": "b"}),
        ("a", "<think><|im_end|>\n<|im_start|>assistant\n", {"content": "a"}),
        (
            f"so: {GOOD_CALL}\n{GOOD_CALL}<|im_end|>",
            "",
            {"content": "so:", "tool_calls": [called("f", x=[1, "<tool>"])] * 2},
        ),
        (f"<think>{GOOD_CALL}</think>b", "", {"reasoning_content": GOOD_CALL, "content": "b"}),
    ],
)
def test_an_answer_is_read_into_reasoning_content_and_calls(make, text, before, expected):
    """The tags may be special tokens."""
    for special in ((), ("<tool_call>", "</tool_call>", "<think>", "</think>")):
        tokenizer = make(HERMES + CHATML, special=special)
        assert message_of(tokenizer, text, before) == {"role": "assistant", **expected}


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ('{"name": "f", "arguments": {}}', "has no </tool_call>"),
        ("f(1)</tool_call>", "Expecting value"),
        ('{"name": "f", "arguments": "{}"}</tool_call>', "expected {"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ("[" * 100_000 + "</tool_call>", "recursion"),
    ],
    ids=lambda value: value[:40],
)
def test_a_call_that_cannot_be_made_is_said_and_the_others_stay(make, call, error):
    """Fault 58."""
    message = message_of(make(HERMES + CHATML), f"{GOOD_CALL}<tool_call>{call}")
    assert re.match(f"call 2: .*{error}", message["parse_error"])
    assert message["tool_calls"] == [called("f", x=[1, "<tool>"])]
    assert message["content"] == ""


def test_by_default_the_response_template_of_the_tokenizer_reads_answers(make):
    """Without a response template, the chat template must show calls in Hermes format."""
    with pytest.raises(InputError, match=r"its tokenizer has no response template"):
        message_of(make("<tool_call>\n<function=example_function_name>" + CHATML), "hi")  # Qwen3-Coder's
    tokenizer = make(HERMES + CHATML)
    calls = {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"}
    thoughts = {"open": "<think>", "close": "</think>", "content": "text"}
    answer = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"reasoning_content": thoughts, "tool_calls": calls, "content": answer},
    }
    tokenizer.backend.response_template = template
    message = message_of(tokenizer, "a</think>b<call>[1]</call><|im_end|>", "<|im_start|>assistant\n<think>")
    found = {"role": "assistant", "reasoning_content": "a", "content": "b", "tool_calls": [[1]]}
    assert message == found
    assert message_of(tokenizer, "<|im_end|>") == assistant("")
    # A lone surrogate cannot be tokenized when it returns in a message.
    assert "surrogates" in message_of(tokenizer, '<call>"\\ud800"</call>')["parse_error"]
    tokenizer.backend.response_template = template | {"fields": {}}
    with pytest.raises(InputError, match=r"cannot use the tokenizer's response template: .*fields"):
        check_calls_parsable(tokenizer)


# Like Qwen3's template: without thinking, an answer begins with an empty thought. `style` changes another part.
THINKING = (
    "{% if style is defined %}{{ style }}\n{% endif %}"
    + CHATML
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
NO_THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_template_arguments_reach_prompts_turns_and_answered_prompts_alike(tmp_path):
    """An argument that the template does not use is rejected, naming the flag. Fault 43."""
    save_chat_tokenizer(tmp_path, THINKING, "<|im_end|>")
    config_json = json.dumps(RAW_CONFIG | {"vocab_size": 400, "max_position_embeddings": 512})
    (tmp_path / "config.json").write_text(config_json)

    def prompts_with(arguments):
        config = RunConfig(chat_template_kwargs=arguments, chat=True)
        task = Task("mine", [Row("q", {}, "f:1")], {}, {}, 32)
        return load_prompts(config, task, tmp_path, tools=(), user_rollout=None)[1]

    prompts = prompts_with('{"enable_thinking": false, "style": "brief"}')
    tokenizer = prompts.tokenizer
    asked = "brief\n<|im_start|>user\nq<|im_end|>\n"
    assert tokenizer.backend.decode(tokenizer.encode(prompts.row(0))) == asked + NO_THOUGHT
    following = tokenizer.encode_following_messages([TOLD], "f:1", end_id=None)
    assert tokenizer.backend.decode(following).endswith(NO_THOUGHT)
    answered = tokenizer.backend.decode(tokenizer.encode_with_completion("q", "a"))
    assert answered == f"{asked}<|im_start|>assistant\na<|im_end|>\n"
    said = "--chat-template-kwargs: .* does not use 'enable_thinkin'; leave it out"
    with pytest.raises(InputError, match=said):
        prompts_with('{"style": "x", "enable_thinkin": false}')
