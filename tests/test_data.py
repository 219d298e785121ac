"""The order of prompts, and a tokenizer whose own BOS and template's BOS must not meet."""

import functools
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
from minirl.rollouts import RolloutId
from support.marks import slow
from support.texts import DECODERS, TEMPLATE, ids, letter_prompts, save_decoding_tokenizer, save_tokenizer

EOS = 1
WORDS = ["a", "bb", "ccc", "dd"]


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder, TEMPLATE)
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


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_shares_of_the_ranks_are_every_group_once(monkeypatch, world_size):
    """Any number of ranks makes the same rollouts with the same noise; the shares differ by at most one group.

    Greedy requests follow their group. Prompts that are begun one at a time go to the ranks in turn.
    """
    wanted = dict(count=6, group_size=3, num_greedy=1)
    whole = letter_prompts(WORDS).requests(5, **wanted)
    assert [r.rollout_id for r in whole] == [RolloutId(5 + o, s) for o in range(6) for s in range(4)]
    assert [r.temperature for r in whole] == [1.0, 1.0, 1.0, 0.0] * 6
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


def test_keys_of_seeds_purposes_epochs_and_samples_are_distinct():
    """The same row in a later epoch, in evaluation or under another seed gets other noise, as do equal rows.

    Pitfalls 25 and 50.
    """
    several = [letter_prompts("aaa", seed=seed, purpose=p) for seed in (0, 1) for p in ("train", "eval")]
    keys = [request.key for prompts in several for request in prompts.requests(0, 9, group_size=4)]
    assert len(set(keys)) == len(keys) == 4 * 9 * 4


CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


CONTINUED = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one, t"}]


def test_prompts_get_the_ids_that_transformers_gives_them(spoilt_folder):
    """Each has one BOS, the tokenizer's or the template's. With `chat` a text is one user message. Pitfall 17.

    As in TRL, an answer continues the assistant's last message. tokenizer.json may ask for truncation and padding.
    """
    backend = json.loads((spoilt_folder / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (spoilt_folder / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer, peer = Tokenizer(spoilt_folder), AutoTokenizer.from_pretrained(spoilt_folder)

    def encoded(prompt):
        return tokenizer.encode(Row(prompt, {}, "f:1"))

    assert encoded("hello.") == peer("hello.")["input_ids"] == ids("<bos>hello.")
    assert encoded(CHAT) == peer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    goes_on = peer.apply_chat_template(CONTINUED, continue_final_message=True, return_dict=False)
    assert encoded(CONTINUED) == goes_on == ids("<bos><turn>user:hello<turn>assistant:one, t")
    assert encoded([*CONTINUED, {"role": "tool", "content": "a"}])[-11:] == ids("<turn>assistant:")
    rows = [Row(prompt, {}, "f:1") for prompt in ("a", CHAT, CONTINUED, "b" * 90, "", "<eos>.")]
    assert tokenizer.encode_all(rows) == [tokenizer.encode(row) for row in rows]
    tokenizer.chat = True
    assert encoded("hello") == ids("<bos><turn>user:hello<turn>assistant:")


def test_a_prompt_that_has_grown_since_the_check_keeps_its_end():
    """A chat template may write the date; served prompts leave room for the completion on every day."""
    prompts = letter_prompts(["abc"], max_tokens=8, max_new_tokens=5)
    prompts.tokenizer.encode = lambda row: [1, 2, 3, 4]
    (request,) = prompts.requests(0, 1, group_size=1)
    assert (request.prompt_ids, request.max_new_tokens) == ((2, 3, 4), 5)


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
        (None, "a chat prompt, but this tokenizer has no chat template"),
        (
            "{{ raise_exception('no tools') if messages[1].content }}",
            "the chat template of .* refuses the messages: .*no tools",
        ),
        # What is to be continued is dropped.
        (TEMPLATE.replace("m['content']", "m['content'][:2]"), "the chat template of .*: ValueError"),
    ],
)
def test_a_chat_template_that_fails_or_is_missing_is_refused_with_the_row(tmp_path, template, message):
    """It is a program of the model's folder: whatever it raises, the row and the folder are named. Fault 22."""
    save_tokenizer(tmp_path, template)
    with pytest.raises(InputError, match=f"^f:1: {message}"):
        Tokenizer(tmp_path).encode(Row(CONTINUED, {}, "f:1"))


EMPTY = {"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}, "added_tokens": []}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer", "{", "FOLDER: its tokenizer cannot be loaded: "),
        ("tokenizer", EMPTY, r"f:1: the text cannot be tokenized: 'hello': .*UNK"),
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
    with pytest.raises(InputError, match=said.replace("FOLDER", str(spoilt_folder))):
        Tokenizer(spoilt_folder).encode(Row("hello", {}, "f:1"))


def test_an_answered_text_ends_with_one_end_token(tmp_path):
    """Also where the tokenizer's own template of a text has one. Pitfall 18."""
    for single in ("<bos> $A", "<bos> $A <eos>"):
        save_tokenizer(tmp_path, TEMPLATE, single=single)
        assert Tokenizer(tmp_path).encode_answered("ab,", " cd") == ids("<bos>ab, cd<eos>")


def test_a_text_is_that_of_its_known_parts_around_each_unknown_id_without_special_tokens(chat_folder):
    """Unknown ids first, last and side by side, none at all; a list or a tensor; spaces before punctuation stay."""
    tokenizer = Tokenizer(chat_folder)
    unknown = len(tokenizer.backend)
    assert tokenizer.decode([*ids("a , b ."), EOS]) == "a , b ."
    assert tokenizer.decode([]) == ""
    sampled = [unknown, *ids("<bos>ab"), 2**31, unknown, *ids("c<eos>d"), unknown]
    for given in (sampled, torch.tensor(sampled)):
        assert tokenizer.decode(given) == "\ufffdab\ufffd\ufffdcd\ufffd"


def test_stop_ids_are_all_that_the_folder_lists(spoilt_folder):
    """Tokenizer, config.json and generation_config.json may each list one id, several or none. Pitfall 14."""
    assert Tokenizer(spoilt_folder).stop_ids == {EOS}
    (spoilt_folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": [5, 6]}')
    assert Tokenizer(spoilt_folder).stop_ids == {EOS, 5, 6}
    (spoilt_folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(spoilt_folder).stop_ids == {EOS, 5, 6, 7}


@pytest.mark.parametrize("kind", [*DECODERS[:2], slow(DECODERS[2])])
def test_a_turn_ends_with_the_token_whose_text_first_has_a_stop_string(tmp_path, kind):
    """A bounded tail finds the strings that the whole turn's text has, anywhere in 1,000 random turns.

    Pitfall 15.
    """
    units, rng = save_decoding_tokenizer(tmp_path, kind), random.Random(kind)
    tokenizer = Tokenizer(tmp_path)
    whole_text = functools.partial(tokenizer.decode, skip_special_tokens=False)
    num_stops = num_late = 0
    for _ in range(1000):
        chosen = rng.choices([*units, [tokenizer.num_ids + 3]], k=rng.randint(1, 6))
        turn, other = (list(itertools.chain(*rng.choices(chosen, k=rng.randint(1, 40)))) for _ in range(2))
        text = whole_text(rng.choice([turn, other]))
        starts = [rng.randint(0, len(text)) for _ in range(rng.randint(1, 3))]
        parts = [text[start : start + rng.randint(1, 9)].replace("\ufffd", "") for start in starts]
        strings = [part for part in [*parts, rng.choice(["", "##"])] if part] or ["a"]
        stop = StopStrings(tokenizer, strings)
        for count in range(1, len(turn) + 1):
            sampled = turn[:count]
            found = stop.found(sampled[-stop.max_tokens :])
            contained = [string for string in strings if string in whole_text(sampled)]
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
    assert stop([[newline, stray, newline], [stray, newline, newline]]) == [False, True]
    assert stop.found([stray] * 40 + [*"é\n".encode()]) == "é\n"
