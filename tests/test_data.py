"""The order of prompts, and a tokenizer whose own BOS and template's BOS must not meet."""

import copy
import functools
import itertools
import json
import random
import shutil
import signal
import time
import timeit
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minirl.data.stop_strings import StopStrings
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.generation.sampling import request_key
from minirl.rollouts import RolloutId
from support.jobs import SLACK
from support.marks import slow
from support.texts import (
    DECODERS,
    TEMPLATE,
    Letters,
    ids,
    letter_prompts,
    save_decoding_tokenizer,
    save_tokenizer,
)

EOS = 1
WORDS = ["a", "bb", "ccc", "dd"]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    save_tokenizer(folder, None)
    return folder


@pytest.fixture
def spoilt_folder(chat_folder, tmp_path):
    """A copy of the folder with a chat template, to be spoilt."""
    return Path(shutil.copytree(chat_folder, tmp_path / "folder"))


def order(prompts, first, count):
    return [prompts.index(ordinal) for ordinal in range(first, first + count)]


def test_each_epoch_is_another_permutation_of_the_rows():
    """Every row once per epoch, in another order each time, and in another order for another seed. Pitfall 57."""
    prompts, other = letter_prompts("a" * 50), letter_prompts("a" * 50, seed=1)
    epochs = [order(prompts, 50 * epoch, 50) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(50)) not in epochs
    assert order(other, 0, 50) not in epochs
    assert prompts.epoch(75) == 1.5


def test_order_does_not_depend_on_what_was_asked_before():
    """A stream read from the middle has the same rows, in any order, over any epochs' border. Pitfall 57. Fault 12."""
    stream = order(letter_prompts("a" * 7), 0, 40)
    again = letter_prompts("a" * 7)
    for asked in (range(33, 40), range(39, -1, -1), [6, 7] * 3, random.Random(0).sample(range(40), 40)):
        assert [again.index(i) for i in asked] == [stream[i] for i in asked]
        assert [again.row(i).place for i in asked] == [f"f:{stream[i] + 1}" for i in asked]


def test_order_does_not_depend_on_the_process():
    """Every hash seed and every version of Python draws these rows."""
    assert order(letter_prompts("a" * 9, seed=3), 0, 12) == [3, 5, 0, 1, 4, 2, 8, 6, 7, 6, 2, 8]


def test_a_request_is_its_row_its_key_and_the_limits():
    """Tokens of the row that the order gives, the id and key of the run's ordinal, a group side by side."""
    prompts = letter_prompts(["aa", "bbb", "c"], seed=4)
    requests = prompts.requests(2, 3, group_size=2, temperature=0.7)
    assert [r.rollout_id for r in requests] == [RolloutId(o, s) for o in (2, 3, 4) for s in (0, 1)]
    for request in requests:
        ordinal, sample = request.rollout_id.prompt_ordinal, request.rollout_id.sample
        assert request.prompt_ids == prompts.prompt_ids(ordinal)
        assert request.prompt_ids == tuple(map(ord, prompts.row(ordinal).prompt))
        assert request.key == request_key(4, purpose="train", prompt_ordinal=ordinal, sample=sample)
        assert (request.max_new_tokens, request.temperature, request.stop_ids) == (4, 0.7, frozenset({7}))
    assert prompts.requests(5, 0, group_size=2) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
def test_shares_of_the_ranks_are_every_group_once(monkeypatch, world_size):
    """Any number of ranks makes the same rollouts with the same noise; the shares differ by at most one group.

    Prompts that are begun one at a time go to the ranks in turn.
    """
    wanted = dict(count=6, group_size=3, num_greedy=1)
    whole = letter_prompts(WORDS).requests(5, **wanted)
    assert len(whole) == 24
    prompts = letter_prompts(WORDS)
    monkeypatch.setattr("minirl.data.prompts.world_size", lambda: world_size)
    shares, num_alone = [], []
    for rank in range(world_size):
        monkeypatch.setattr("minirl.data.prompts.rank", lambda rank=rank: rank)
        shares.append(prompts.requests(5, **wanted))
        num_alone.append(sum(len(prompts.requests(i, 1, group_size=2)) for i in range(4 * world_size)))
    assert sorted(itertools.chain(*shares), key=lambda request: request.rollout_id) == whole
    groups = [{request.rollout_id.prompt_ordinal for request in share} for share in shares]
    assert sum(map(len, groups)) == 6, "a group is split"
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert num_alone == [8] * world_size
    notes = prompts.notes(per_step=6)
    assert any("--prompts-per-step" in note for note in notes) == (world_size > 6)


def test_greedy_requests_come_after_the_group():
    """Each prompt's group samples at the temperature, then its greedy ones at 0, with numbers that go on counting."""
    served = functools.partial(letter_prompts("ab").requests, 0, 2, temperature=1.3)
    requests = served(group_size=2, num_greedy=1)
    assert [(r.rollout_id.sample, r.temperature) for r in requests] == [(0, 1.3), (1, 1.3), (2, 0.0)] * 2
    assert served(group_size=2) == [request for request in requests if request.temperature]
    only = served(group_size=0, num_greedy=1)
    assert [(r.rollout_id.sample, r.temperature) for r in only] == [(0, 0.0)] * 2


def test_keys_of_seeds_purposes_epochs_and_samples_are_distinct():
    """The same row in a later epoch, in evaluation or under another seed gets other noise, as do equal rows.

    Pitfalls 25 and 50.
    """
    several = [letter_prompts("aaa", seed=seed, purpose=p) for seed in (0, 1) for p in ("train", "eval")]
    keys = [request.key for prompts in several for request in prompts.requests(0, 9, group_size=4)]
    assert len(set(keys)) == len(keys) == 4 * 9 * 4


def seconds(action):
    """The least of three."""
    return min(timeit.repeat(action, number=1, repeat=3))


def test_a_step_of_a_large_task_does_not_shuffle_for_each_prompt():
    """Drawing 128 prompts of 20,000 costs a few shuffles of them, not 128, also when an epoch ends in between."""
    prompts = letter_prompts("a" * 20_000)
    one_shuffle = seconds(lambda: random.Random("0 0").shuffle(list(range(20_000))))
    for first in (128, 20_000 - 64):
        assert seconds(lambda first=first: prompts.requests(first, 128, group_size=1)) < 20 * one_shuffle
    assert seconds(lambda: [prompts.row(i) for i in [19_999, 20_000] * 64]) < 20 * one_shuffle


CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("chat", "prompt", "expected"),
    [
        (False, "abc", "<bos>abc"),
        (False, CHAT, "<bos><turn>system:be kind<turn>user:hello<turn>assistant:"),
        (True, CHAT, "<bos><turn>system:be kind<turn>user:hello<turn>assistant:"),
        (True, "hello", "<bos><turn>user:hello<turn>assistant:"),
    ],
)
def test_a_text_gets_the_tokenizers_bos_and_a_chat_only_the_templates(chat_folder, chat, prompt, expected):
    """Each has one BOS. With `chat` a text is one user message, and a chat is not wrapped again. Pitfall 17."""
    assert Tokenizer(chat_folder, chat=chat).encode(Row(prompt, {}, "f:1")) == ids(expected)


@pytest.mark.parametrize("chat", [False, True])
def test_rows_tokenized_together_get_the_ids_of_each_alone(chat_folder, chat):
    """Texts and chats in turns, long and short, one that continues a message; none at all."""
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so, "}
    prompts = ["a", "b" * 90, [user], [user, assistant], "c", [user], "", "<eos>.", "\x00\u2028 "]
    rows = [Row(prompt, {}, "f:1") for prompt in prompts]
    tokenizer = Tokenizer(chat_folder, chat=chat)
    assert tokenizer.encode_all(rows) == [tokenizer.encode(row) for row in rows]
    assert tokenizer.encode_all([]) == []


class UpperCaseTokenizer(PreTrainedTokenizerFast):
    """A tokenizer whose class changes texts before the Rust tokenizer gets them, as CodeLlama's does."""

    def _encode_plus(self, text, **options):
        return super()._encode_plus(text.upper(), **options)


@pytest.mark.parametrize("tokenizer_class", [PreTrainedTokenizerFast, UpperCaseTokenizer])
def test_texts_get_the_ids_that_transformers_gives_them(spoilt_folder, monkeypatch, tokenizer_class):
    """Also where tokenizer.json asks for truncation and padding."""
    backend = json.loads((spoilt_folder / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0}
    backend["padding"] |= {"pad_to_multiple_of": None, "pad_token": "<eos>"}
    (spoilt_folder / "tokenizer.json").write_text(json.dumps(backend))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer_class.from_pretrained)
    tokenizer = Tokenizer(spoilt_folder)
    peer = tokenizer_class.from_pretrained(spoilt_folder)
    for text in ("a", "hello, long text", "<eos>."):
        assert tokenizer.encode_text(text, "f:1") == peer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(Row(text, {}, "f:1")) == peer(text)["input_ids"]


def test_a_prompt_that_has_grown_since_the_check_keeps_its_end():
    """A chat template may write the date; served prompts leave room for the completion on every day."""
    tokenizer = Letters()
    prompts = letter_prompts(["abc"], tokenizer=tokenizer, max_tokens=8, max_new_tokens=5)
    tokenizer.encode = lambda row: [1, 2, 3, 4]
    (request,) = prompts.requests(0, 1, group_size=1)
    assert (request.prompt_ids, request.max_new_tokens) == ((2, 3, 4), 5)


def test_a_chat_prompt_without_a_template_is_refused_with_its_row(text_folder):
    """Messages or the chat flag need a template; the error names the row. Fault 22."""
    with pytest.raises(ValueError, match=r"my\.jsonl:7.*no chat template"):
        Tokenizer(text_folder).encode(Row([{"role": "user", "content": "a"}], {}, "my.jsonl:7"))
    with pytest.raises(ValueError, match=r"my\.jsonl:8.*no chat template"):
        Tokenizer(text_folder, chat=True).encode(Row("a", {}, "my.jsonl:8"))
    assert Tokenizer(text_folder).encode(Row("a", {}, "my.jsonl:9")) == ids("<bos>a")


CONTINUED = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one, t"}]


@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
@pytest.mark.parametrize("end", ["", "<eos>"])
def test_a_prompt_that_ends_with_the_assistants_message_is_continued(tmp_path, role, end):
    """As in TRL: no second header, nor the end that the template gives a message; all other roles are answered."""
    save_tokenizer(tmp_path, TEMPLATE.replace("{% endfor %}", f"{end}{{% endfor %}}"))
    messages = [CONTINUED[0], {"role": role, "content": "one, t"}]
    expected = f"<bos><turn>user:hello{end}<turn>{role}:one, t"
    if role != "assistant":
        expected += f"{end}<turn>assistant:"
    assert Tokenizer(tmp_path).encode(Row(messages, {}, "f:1")) == ids(expected)
    assert messages[1]["content"] == "one, t"


def test_a_template_that_drops_the_message_to_be_continued_is_refused(tmp_path):
    """The prompt would differ from the row's."""
    save_tokenizer(tmp_path, TEMPLATE.replace("m['content']", "m['content'][:2]"))
    with pytest.raises(InputError, match=r"f:1: the chat template of .* refuses the messages: ValueError"):
        Tokenizer(tmp_path).encode(Row(CONTINUED, {}, "f:1"))


def test_the_reward_models_template_writes_calls_or_they_are_refused(tmp_path):
    """The template silently leaves out unknown fields. A result that is a list becomes its text."""
    call = {"type": "function", "function": {"name": "one", "arguments": {}}}
    completion = [
        {"role": "assistant", "content": "wo", "tool_calls": [call]},
        {"role": "tool", "name": "one", "content": ["a"]},
    ]
    save_tokenizer(tmp_path, TEMPLATE)
    with pytest.raises(
        InputError, match=r"the reward model: the chat template of .* does not show calls of tools"
    ):
        Tokenizer(tmp_path, chat=True).encode_answered("hello", completion)
    names = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    save_tokenizer(tmp_path, TEMPLATE.replace("{% endfor %}", f"{names}{{% endfor %}}"))
    encoded = Tokenizer(tmp_path).encode_answered([{"role": "user", "content": "hello"}], completion)
    assert encoded == ids("<bos><turn>user:hello<turn>assistant:woone<turn>tool:<unk><unk>a<unk><unk>")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ nothing.here }}", "UndefinedError"),
        ("{{ messages['a']['b'] }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ raise_exception('no tools') }}", "TemplateError: no tools"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "OverflowError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        (LOOPS, "TimeoutError: it takes longer than 1 s"),
        ("{{ 'x' * 2 * 10 ** 6 }}", "adds 1999995 characters to the messages"),
    ],
)
def test_a_chat_template_that_fails_hangs_or_never_ends_is_refused_with_the_row(
    tmp_path, monkeypatch, template, message
):
    """It is a program of the model's folder: whatever it does, the row and the folder are named. Faults 22 and 36."""
    monkeypatch.setattr("minirl.data.tokenizer._TEMPLATE_SECONDS", 1.0)
    save_tokenizer(tmp_path, template)
    began = time.monotonic()
    with pytest.raises(InputError, match=f"f:1: the chat template of {tmp_path} .*{message}"):
        Tokenizer(tmp_path, chat=True).encode(Row("hello", {}, "f:1"))
    assert time.monotonic() - began < 5 * SLACK
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


EMPTY = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}, "added_tokens": []}
NO_TEMPLATES = (7, [], [1], {"a": 1}, [{"name": "a"}])
LOADED = "FOLDER: its tokenizer cannot be loaded: "


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *(("tokenizer", text, LOADED) for text in ("", "{", "{}", "[]", "7", "null", '{"version": 1}')),
        ("tokenizer", EMPTY, r"f:1: the text cannot be tokenized: 'hello': .*UNK"),
        *(("tokenizer_config", {"chat_template": it}, "FOLDER") for it in NO_TEMPLATES),
        ("generation_config", "{", "generation_config.json: not JSON"),
        ("generation_config", "[1]", "generation_config.json: expected a JSON object"),
        ("generation_config", {"eos_token_id": "2"}, "config.json: eos_token_id is '2'; expected a token id"),
        ("generation_config", {"eos_token_id": -1}, "eos_token_id is -1; expected a token id"),
        ("generation_config", {"eos_token_id": True}, "eos_token_id is True; expected a token id"),
        ("generation_config", {"eos_token_id": [[1]]}, r"eos_token_id is \[\[1\]\]; expected a token id"),
        ("generation_config", {"eos_token_id": {"a": 1}}, "expected a token id"),
        (
            "generation_config",
            {"eos_token_id": [1, None, 2.0]},
            "eos_token_id is .1, None, 2.0.; expected a token id",
        ),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_refused(spoilt_folder, name, content, said):
    """By its folder, its file and value, or the row. content: the whole file, or fields to change. Faults 33 and 36."""
    path = spoilt_folder / f"{name}.json"
    if not isinstance(content, str):
        fields = json.loads(path.read_text()) if path.exists() else {}
        content = json.dumps(fields | content)
    path.write_text(content)
    (spoilt_folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=said.replace("FOLDER", str(spoilt_folder))):
        Tokenizer(spoilt_folder, chat="chat_template" in content).encode(Row("hello", {}, "f:1"))


@pytest.mark.parametrize("content", ["", "{", "[]", "7", "null", '{"version": 1}'])
def test_a_damaged_tokenizer_config_is_refused_or_not_needed(spoilt_folder, content):
    """Never another error than the one that names the folder. Fault 36."""
    (spoilt_folder / "tokenizer_config.json").write_text(content)
    try:
        Tokenizer(spoilt_folder).encode(Row("hello", {}, "f:1"))
    except InputError as error:
        assert str(spoilt_folder) in str(error)  # noqa: PT017 - refusing is one of two right answers


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "<bos>ab, cd<eos>"),
        ({"single": "<bos> $A <eos>"}, "<bos>ab, cd<eos>"),
        ({"eos_token": None}, "<bos>ab, cd"),
    ],
    ids=["appended", "tokenizers_own", "no_eos"],
)
def test_an_answered_text_ends_with_one_end_token(tmp_path, options, expected):
    """Prompt and completion are one text with the tokenizer's own BOS and, if it has one, one EOS. Pitfall 18."""
    save_tokenizer(tmp_path, TEMPLATE, **options)
    assert Tokenizer(tmp_path).encode_answered("ab,", " cd") == ids(expected)


@pytest.mark.parametrize("prompt", ["hello", CHAT, CONTINUED], ids=["text", "chat", "continued"])
def test_an_answered_chat_goes_through_the_template_alone(chat_folder, text_folder, prompt):
    """Messages, or a text with `chat`, then the answer: one BOS, no generation prompt, nothing after it.

    An answer that continues a message is under one header with it.
    """
    before = copy.deepcopy(prompt)
    tokenizer = Tokenizer(chat_folder, chat=True)
    assert tokenizer.encode_answered(prompt, "bye") == [
        *tokenizer.encode(Row(prompt, {}, "f:1")),
        *ids("bye"),
    ]
    assert prompt == before, "the row's own messages were changed"
    with pytest.raises(ValueError, match=r"reward model.*no chat template"):
        Tokenizer(text_folder, chat=True).encode_answered(prompt, "bye")


@pytest.mark.parametrize("share_unknown", [0.0, 0.05, 0.5, 1.0])
def test_a_text_is_that_of_its_known_parts_around_each_unknown_id(chat_folder, share_unknown):
    """Unknown ids first, last and side by side, specials among them, none at all; a list or a tensor."""
    tokenizer, rng = Tokenizer(chat_folder), random.Random(0)
    known, unknown = range(len(tokenizer.backend)), (len(tokenizer.backend), 200_000, 2**31)
    for length in (0, 1, 2, *[60] * 8):
        sampled = [rng.choice(unknown if rng.random() < share_unknown else known) for _ in range(length)]
        text = ""
        for is_unknown, group in itertools.groupby(sampled, key=lambda i: i in unknown):
            part = list(group)
            known_text = tokenizer.backend.decode(part, skip_special_tokens=True)
            text += "\ufffd" * len(part) if is_unknown else known_text
        assert tokenizer.decode(sampled) == text
        assert tokenizer.decode(torch.tensor(sampled, dtype=torch.int64)) == text


def test_decode_drops_special_tokens_and_nothing_else(chat_folder):
    """The reward sees the text as sampled, its spaces before punctuation too, without the stop token."""
    assert Tokenizer(chat_folder).decode([*ids("a , b ."), EOS]) == "a , b ."


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {1}),
        ({"eos_token_id": 5}, None, {1, 5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {1, 5, 6, 7}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 3]}, {1, 3}),
        ({}, {}, {1}),
    ],
)
def test_stop_ids_are_all_that_the_folder_lists(spoilt_folder, config, generation, expected):
    """Tokenizer, config.json and generation_config.json may each list one id, several or none. Pitfall 14."""
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (spoilt_folder / name).write_text(json.dumps({"model_type": "llama", **content}))
    assert Tokenizer(spoilt_folder).stop_ids == frozenset(expected)


# Stop strings.


def whole_text(tokenizer, sampled):
    """The text of a turn from its first token, with special tokens; an id that the tokenizer lacks is U+FFFD."""
    text = ""
    for is_known, part in itertools.groupby(sampled, key=lambda token: token < tokenizer.num_ids):
        part = list(part)
        text += tokenizer.backend.decode(part) if is_known else "\ufffd" * len(part)
    return text


@pytest.mark.parametrize("kind", [*DECODERS[:2], *map(slow, DECODERS[2:])])
def test_a_turn_ends_with_the_token_whose_text_first_has_a_stop_string(tmp_path, kind):
    """A bounded tail finds the strings that the whole turn's text has, anywhere in 1,000 random turns.

    Pitfall 15.
    """
    units, rng = save_decoding_tokenizer(tmp_path, kind), random.Random(kind)
    tokenizer = Tokenizer(tmp_path)
    num_stops = num_late = 0
    for _ in range(1000):
        chosen = rng.choices([*units, [tokenizer.num_ids + 3]], k=rng.randint(1, 6))
        turn, other = (list(itertools.chain(*rng.choices(chosen, k=rng.randint(1, 40)))) for _ in range(2))
        text = whole_text(tokenizer, rng.choice([turn, other]))
        starts = [rng.randint(0, len(text)) for _ in range(rng.randint(1, 3))]
        parts = [text[start : start + rng.randint(1, 9)].replace("\ufffd", "") for start in starts]
        strings = [part for part in [*parts, rng.choice(["", "##"])] if part] or ["a"]
        stop = StopStrings(tokenizer, strings)
        for count in range(1, len(turn) + 1):
            sampled = turn[:count]
            found = stop.found(sampled[-stop.max_tokens :])
            contained = [string for string in strings if string in whole_text(tokenizer, sampled)]
            assert (found in contained) if contained else (found is None), (strings, sampled)
            if found is not None:
                num_stops += 1
                num_late += count > stop.max_tokens
                break
    assert num_stops > 100
    assert num_late > 5


def test_a_stop_string_is_found_behind_bytes_that_are_no_character(tmp_path):
    """A decoder that gives up a whole run of byte tokens for one stray byte does not hide it."""
    save_decoding_tokenizer(tmp_path, "sentencepiece")
    stop = StopStrings(Tokenizer(tmp_path), ["\n\n", "é\n"])
    stray, newline = 0xE3, 10
    assert stop([[stray, newline], [newline, stray, newline]]) == [False, False]
    assert stop.found([stray, newline, newline]) == "\n\n"
    assert stop.found([stray] * 40 + [*"é\n".encode()]) == "é\n"
