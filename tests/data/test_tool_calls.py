"""Tool calls in the text of a turn: the text protocol, the choice by the chat template, and vLLM's parsers."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybrid_rl.config import ConfigError
from hybrid_rl.data.tool_calls import TemplateFormat, make_tool_format
from hybrid_rl.data.tool_texts import TextFormat
from hybrid_rl.data.tool_turns import ParsedTurn, with_ids
from hybrid_rl.engines.vllm.tool_parsers import load_tool_parser
from tests.conftest import make_tokenizer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SPECIAL = ("<eos>", "<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>")
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
)
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
"""Part of a chat template that describes tools to the model."""


def with_tools(call: str) -> str:
    """Return a chat template with tools that shows how a call is written."""
    return TOOLS + "{{ " + repr(call) + " }}" + PLAIN


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of bytes with the special tokens of several families of models."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    return tokenizer


def made(tokenizer: PreTrainedTokenizerBase, name: str | None, chat_template: str) -> Any:
    return make_tool_format(name, tokenizer, chat_template, load_parser=load_tool_parser)


def calls_of(turn: ParsedTurn) -> list[tuple[str, Any]]:
    """Return (name, arguments) of each call, with the arguments of named calls as values."""
    functions = [call["function"] for call in turn.tool_calls]
    return [(f["name"], json.loads(f["arguments"]) if f["name"] else f["arguments"]) for f in functions]


def text_call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_template_without_tools_gets_a_system_message_that_describes_them(tokenizer):
    chosen = made(tokenizer, None, PLAIN)
    messages, tools = chosen.prompt([{"role": "user", "content": "2 + 3?"}], [ADD])
    assert isinstance(chosen, TextFormat) and tools is None
    assert [message["role"] for message in messages] == ["system", "user"]
    text = messages[0]["content"]
    assert json.dumps(ADD["function"]) in text and '<tool_call>{"name": "...", "arguments": {...}}</tool_call>' in text
    assert messages[1] == {"role": "user", "content": "2 + 3?"}


def test_the_description_follows_a_system_message_that_is_there(tokenizer):
    first = {"role": "system", "content": "Be brief."}
    messages, _ = made(tokenizer, None, PLAIN).prompt([first, {"role": "user", "content": "2 + 3?"}], [ADD])
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call")


def test_the_description_begins_the_first_message_where_there_is_no_system_role(tokenizer):
    messages, _ = made(tokenizer, None, WITHOUT_SYSTEM).prompt([{"role": "user", "content": "2 + 3?"}], [ADD])
    (message,) = messages
    assert message["role"] == "user"
    assert message["content"].startswith("You can call") and message["content"].endswith("\n\n2 + 3?")


def test_results_of_a_turn_are_one_message_of_the_user():
    results = [{"role": "tool", "tool_call_id": str(i), "name": "add", "content": str(i)} for i in (5, 7)]
    more = {"role": "user", "content": "Go on."}
    assert TextFormat(has_system=True).observation([*results, more]) == [
        {
            "role": "user",
            "content": "<tool_response>5</tool_response>\n<tool_response>7</tool_response>\nGo on.",
        }
    ]


def test_earlier_calls_are_written_as_the_model_writes_them():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    (message,) = TextFormat(has_system=True).observation(
        [{"role": "assistant", "content": "So:", "tool_calls": [call]}]
    )
    assert message == {"role": "assistant", "content": "So:\n" + text_call('{"a": 2, "b": 3}')}
    turn = TextFormat(has_system=True).parse(message["content"], [ADD])
    assert calls_of(turn) == [("add", {"a": 2, "b": 3})] and turn.content == "So:\n"


@pytest.mark.parametrize(
    "text, calls",
    [
        ("It is 5.", []),
        (text_call('{"a": 2, "b": 3}'), [("add", {"a": 2, "b": 3})]),
        (
            "First" + text_call('{"a": 2}') + "\nthen" + text_call("{}", "sub") + "end",
            [("add", {"a": 2}), ("sub", {})],
        ),
        ('<tool_call>\n{"name": "now"}\n</tool_call>', [("now", {})]),
        (text_call('"{\\"a\\": 2}"'), [("add", {"a": 2})]),
        (text_call('{"a": "</tool_call> <"}'), [("add", {"a": "</tool_call> <"})]),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}', [("add", {"a": 2})]),
        ('<tool_call>{"name": "add", "argum', [("", '{"name": "add", "argum')]),
        ("<tool_call></tool_call>", [("", "")]),
        ("<tool_call>add(2, 3)</tool_call>", [("", "add(2, 3)")]),
        ('<tool_call>["add"]</tool_call>', [("", '["add"]')]),
        ('<tool_call>{"name": 3}</tool_call>', [("", '{"name": 3}')]),
        (
            "<tool_call>{oops}</tool_call>" + text_call('{"a": 2}'),
            [("", "{oops}"), ("add", {"a": 2})],
        ),
        ("<tool_call>" + "[" * 100_000, [("", "[" * 100_000)]),
        ("<think>I may write " + text_call("{}") + "</think>It is 5.", []),
        ("<think>" + text_call("{}"), []),
        ("<think>Add.</think>" + text_call('{"a": 2}'), [("add", {"a": 2})]),
    ],
    ids=range(17),
)
def test_calls_of_the_text_protocol(text, calls):
    turn = TextFormat(has_system=True).parse(text, [ADD])
    assert calls_of(turn) == calls
    assert text.startswith(turn.content) and (turn.tool_calls or turn.content == text)


def test_ids_are_the_same_for_the_same_turn_and_differ_within_it():
    text = text_call("{}") * 3
    ids = [[c["id"] for c in TextFormat(has_system=True).parse(text, [ADD]).tool_calls] for _ in range(2)]
    assert ids[0] == ids[1] and len(set(ids[0])) == 3
    assert all(len(one) == 9 and one.isalnum() for one in ids[0])


def test_ids_that_vllm_draws_are_replaced_and_those_that_the_model_writes_stay():
    function = {"name": "add", "arguments": "{}"}
    calls = [{"id": i, "type": "function", "function": function} for i in ("chatcmpl-tool-97addb", "functions.add:1")]
    drawn, written = with_ids(calls, "text")
    assert "add" not in drawn["id"] and len(drawn["id"]) == 9 and written["id"] == "functions.add:1"


@pytest.mark.parametrize(
    "call, parser",
    [
        ('<tool_call>{"name": .., "arguments": ..}</tool_call>', "hermes"),
        ("<tool_call><function=name>", "qwen3_coder"),
        ("<tool_call>name<arg_key>", "glm45"),
        ("<|python_tag|>", "llama3_json"),
        ('<|start_header_id|>{"name": .., "parameters": ..}', "llama3_json"),
        ("[TOOL_CALLS][..]", "mistral"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>name", "deepseek_v31"),
        ("<\uff5ctool\u2581call\u2581begin\uff5c>function ```json", "deepseek_v3"),
    ],
)
def test_the_parser_is_chosen_by_the_calls_of_the_template(tokenizer, call, parser):
    chosen = make_tool_format(None, tokenizer, with_tools(call), load_parser=lambda *_: lambda text, tools: (text, []))
    assert isinstance(chosen, TemplateFormat) and chosen.name == parser
    assert chosen.prompt([{"role": "user", "content": "2 + 3?"}], [ADD]) == (
        [{"role": "user", "content": "2 + 3?"}],
        [ADD],
    )


def test_a_template_may_write_quotes_within_quotes(tokenizer):
    template = TOOLS + r'{{ "<tool_call>{\"name\": .., \"arguments\": ..}</tool_call>" }}' + PLAIN
    chosen = make_tool_format(None, tokenizer, template, load_parser=lambda *_: lambda text, tools: (text, []))
    assert isinstance(chosen, TemplateFormat) and chosen.name == "hermes"


def test_a_template_with_an_unknown_format_is_refused_unless_a_format_is_named(tokenizer):
    with pytest.raises(ConfigError, match=r"^environment\.tool_parser = null: .* not recognised: name the parser"):
        made(tokenizer, None, with_tools("<<call>>"))
    assert isinstance(made(tokenizer, "text", with_tools("<<call>>")), TextFormat)


def test_a_template_that_leaves_out_results_of_sampled_calls_is_refused(tokenizer):
    silent = with_tools("[TOOL_CALLS]").replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    )
    raising = silent + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no call') }}{% endif %}"
    for template in (silent, raising):
        with pytest.raises(
            ConfigError, match=r"tool_parser = mistral: the chat template writes the result of a tool only"
        ):
            made(tokenizer, None, template)


def test_templates_get_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "", "arguments": '{"a'}}
    chosen = TemplateFormat(name="hermes", read=lambda text, tools: (text, []))
    (message,) = chosen.observation([{"role": "assistant", "content": "", "tool_calls": [call, broken]}])
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == [{"a": 2}, '{"a']
    assert call["function"]["arguments"] == '{"a": 2}'


HERMES = with_tools('<tool_call>{"name": .., "arguments": ..}</tool_call>')


@pytest.mark.parametrize(
    "parser, text, content, calls",
    [
        ("hermes", "It is 5.", "It is 5.", []),
        ("hermes", "So: " + text_call('{"a": 2, "b": 3}'), "So: ", [("add", {"a": 2, "b": 3})]),
        ("hermes", text_call('{"a": 2}') + "\n" + text_call('{"a": 3}'), "", [("add", {"a": 2}), ("add", {"a": 3})]),
        ("hermes", text_call('{"a": 2'), "", [("", '{"name": "add", "arguments": {"a": 2}')]),
        ("hermes", "So: <tool_call>{", "So: ", [("", "{")]),
        (
            "hermes",
            text_call('{"a": 2}') + "<tool_call>{oops}</tool_call>" + text_call('{"a": 3}'),
            "",
            [("add", {"a": 2}), ("", "{oops}"), ("add", {"a": 3})],
        ),
        ("hermes", text_call('{"a": "<tool_call>"}'), "", [("add", {"a": "<tool_call>"})]),
        (
            "hermes",
            "<think>" + text_call("{}") + "</think>It is 5.",
            "<think>" + text_call("{}") + "</think>It is 5.",
            [],
        ),
        ("llama3_json", "It is 5.", "It is 5.", []),
        ("llama3_json", '{"name": "add", "parameters": {"a": 2}}', "", [("add", {"a": 2})]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {"a": 2}}; {"name": "add", "parameters": {"a": 3}}',
            "",
            [("add", {"a": 2}), ("add", {"a": 3})],
        ),
        ("llama3_json", '{"name": "add", "parameters": {"a"', "", [("", '{"name": "add", "parameters": {"a"')]),
        ("llama3_json", "<|python_tag|>print(2)", "", [("", "print(2)")]),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}, {"name": "add", "arguments": {"a": 3}}]',
            "",
            [("add", {"a": 2}), ("add", {"a": 3})],
        ),
        ("mistral", 'So: [TOOL_CALLS][{"name": "add", "argum', "So: ", [("", '[{"name": "add", "argum')]),
        ("mistral", "It is 5.", "It is 5.", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            [("add", {"a": 2})],
        ),
        ("pythonic", "[add(a=2), add(a=3)]", "", [("add", {"a": 2}), ("add", {"a": 3})]),
        ("pythonic", "[add(a=2", "", [("", "[add(a=2")]),
    ],
    ids=range(19),
)
def test_vllm_reads_calls_and_none_is_dropped_in_silence(tokenizer, parser, text, content, calls):
    turn = made(tokenizer, parser, HERMES).parse(text, [ADD])
    assert calls_of(turn) == calls and turn.content == content
    ids = [call["id"] for call in turn.tool_calls]
    assert len(set(ids)) == len(calls) and ids == [
        c["id"] for c in made(tokenizer, parser, HERMES).parse(text, [ADD]).tool_calls
    ]


def test_an_unknown_parser_is_refused_with_names_that_are_close(tokenizer):
    with pytest.raises(ConfigError, match=r"^environment\.tool_parser = herms: is unknown; did you mean hermes\?$"):
        made(tokenizer, "herms", HERMES)
    with pytest.raises(ConfigError, match=r"^environment\.tool_parser = zzzzzz: is unknown; there are: text, .*hermes"):
        made(tokenizer, "zzzzzz", HERMES)


def test_a_parser_that_needs_another_template_or_tokenizer_is_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"environment\.tool_parser = hermes: the chat template has no place for tools"
    ):
        made(tokenizer, "hermes", PLAIN)
    with pytest.raises(ConfigError, match=r"llama3_json: the parser cannot be used with this tokenizer: .*python_tag"):
        made(make_tokenizer(), "llama3_json", HERMES)
