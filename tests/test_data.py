"""The order of prompts, and a tokenizer whose own BOS and template's BOS must not meet."""

import copy
import itertools
import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from minirl.data.stop_strings import StopStrings
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.generation.sampling import request_key
from minirl.rollouts import RolloutId
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


def test_each_epoch_is_another_permutation_of_the_rows_in_any_process_and_order_of_asking():
    """Every row once per epoch, in another order each time and for another seed. Pitfall 57.

    A stream read from the middle has the same rows, in any order, over any epochs' border. Fault 12.
    """
    prompts = letter_prompts("a" * 50)
    epochs = [order(prompts, 50 * epoch, 50) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order(letter_prompts("a" * 50, seed=1), 0, 50) not in epochs
    assert prompts.epoch(75) == 1.5
    again = letter_prompts("a" * 50)
    for i in (60, 199, *random.Random(0).sample(range(200), 40)):
        assert again.index(i) == epochs[i // 50][i % 50]
        assert again.row(i).place == f"f:{again.index(i) + 1}"
    # Every hash seed and every version of Python draws these rows.
    assert order(letter_prompts("a" * 9, seed=3), 0, 12) == [3, 5, 0, 1, 4, 2, 8, 6, 7, 6, 2, 8]


def test_a_request_is_its_row_its_key_and_the_limits():
    """Tokens of the row that the order gives, the id and key of the run's ordinal; greedy ones after their group."""
    prompts = letter_prompts(["aa", "bbb", "c"], seed=4)
    requests = prompts.requests(2, 3, group_size=2, num_greedy=1, temperature=0.7)
    assert [r.rollout_id for r in requests] == [RolloutId(o, s) for o in (2, 3, 4) for s in (0, 1, 2)]
    assert [r.temperature for r in requests] == [0.7, 0.7, 0.0] * 3
    for request in requests:
        ordinal, sample = request.rollout_id.prompt_ordinal, request.rollout_id.sample
        assert request.prompt_ids == tuple(map(ord, prompts.row(ordinal).prompt))
        assert request.key == request_key(4, purpose="train", prompt_ordinal=ordinal, sample=sample)
        assert (request.max_new_tokens, request.stop_ids) == (4, frozenset({7}))


@pytest.mark.parametrize("world_size", [1, 2, 7])
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


def test_keys_of_seeds_purposes_epochs_and_samples_are_distinct():
    """The same row in a later epoch, in evaluation or under another seed gets other noise, as do equal rows.

    Pitfalls 25 and 50.
    """
    several = [letter_prompts("aaa", seed=seed, purpose=p) for seed in (0, 1) for p in ("train", "eval")]
    keys = [request.key for prompts in several for request in prompts.requests(0, 9, group_size=4)]
    assert len(set(keys)) == len(keys) == 4 * 9 * 4


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


def test_texts_and_chats_get_the_ids_that_transformers_gives_them(spoilt_folder):
    """Also where tokenizer.json asks for truncation and padding."""
    backend = json.loads((spoilt_folder / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    backend["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_id": 0, "pad_type_id": 0}
    backend["padding"] |= {"pad_to_multiple_of": None, "pad_token": "<eos>"}
    (spoilt_folder / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer = Tokenizer(spoilt_folder)
    peer = AutoTokenizer.from_pretrained(spoilt_folder)
    for text in ("a", "hello, long text", "<eos>."):
        assert tokenizer.encode(Row(text, {}, "f:1")) == peer(text)["input_ids"]
        assert tokenizer.encode_text(text, "f:1") == peer(text, add_special_tokens=False)["input_ids"]
        chat = [*CHAT, {"role": "user", "content": text}]
        expected = peer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode(Row(chat, {}, "f:1")) == expected


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


@pytest.mark.parametrize("role", ["tool", "assistant"])
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


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no tools') if messages[1].content }}", "TemplateError: no tools"),
        # What is to be continued is dropped.
        (TEMPLATE.replace("m['content']", "m['content'][:2]"), "ValueError"),
    ],
)
def test_a_chat_template_that_fails_is_refused_with_the_row(tmp_path, template, message):
    """It is a program of the model's folder: whatever it raises, the row and the folder are named. Fault 22."""
    save_tokenizer(tmp_path, template)
    said = f"f:1: the chat template of {tmp_path} refuses the messages: {message}"
    with pytest.raises(InputError, match=said):
        Tokenizer(tmp_path).encode(Row(CONTINUED, {}, "f:1"))


EMPTY = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}, "added_tokens": []}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer", "{", "FOLDER: its tokenizer cannot be loaded: "),
        ("tokenizer", '{"version": 1}', "FOLDER: its tokenizer cannot be loaded: "),
        ("tokenizer", EMPTY, r"f:1: the text cannot be tokenized: 'hello': .*UNK"),
        ("tokenizer_config", {"chat_template": [1]}, "FOLDER"),
        ("generation_config", "{", "generation_config.json: not JSON"),
        ("generation_config", {"eos_token_id": True}, "eos_token_id is True; expected a token id"),
        ("generation_config", {"eos_token_id": [1, None, 2.0]}, "eos_token_id is .1, None, 2.0.; expected"),
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


def test_a_text_is_that_of_its_known_parts_around_each_unknown_id_without_special_tokens(chat_folder):
    """Unknown ids first, last and side by side, none at all; a list or a tensor; spaces before punctuation stay."""
    tokenizer = Tokenizer(chat_folder)
    unknown = len(tokenizer.backend)
    assert tokenizer.decode([*ids("a , b ."), EOS]) == "a , b ."
    assert tokenizer.decode([]) == ""
    sampled = [unknown, *ids("<bos>ab"), 2**31, unknown, *ids("c<eos>d"), unknown]
    for given in (sampled, torch.tensor(sampled)):
        assert tokenizer.decode(given) == "\ufffdab\ufffd\ufffdcd\ufffd"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, {1}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {1, 5, 6, 7}),
        ({"eos_token_id": None}, {"eos_token_id": [1, 3]}, {1, 3}),
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
