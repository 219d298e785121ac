"""Data: the order of prompts, BOS and EOS tokens, stop strings, and invalid rows."""

import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.jsonl import load_jsonl_task
from minirl.data.task import Row
from minirl.data.tokenizer import StopStrings
from minirl.errors import InputError
from minirl.rollouts import RolloutId
from support.texts import TEMPLATE, assistant, ids, letter_prompts, save_tokenizer, user

EOS = 1
GOOD = b'{"prompt": "good", "answer": 1}'


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture
def spoilt_folder(chat_folder, tmp_path):
    """Return a copy of the chat template's folder, for the test to corrupt."""
    return Path(shutil.copytree(chat_folder, tmp_path / "folder"))


def order(prompts, first, count):
    return [prompts.row_index(ordinal) for ordinal in range(first, first + count)]


def test_each_epoch_is_another_permutation_of_the_rows_in_any_process_and_order_of_asking():
    """Each epoch has every row once; the order differs between epochs and seeds. Pitfall 57.

    A stream read from the middle, in any order and across epochs, has the same rows. Fault 12.
    """
    prompts = letter_prompts("a" * 50)
    epochs = [order(prompts, 50 * epoch, 50) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert order(letter_prompts("a" * 50, seed=1), 0, 50) not in epochs
    again = letter_prompts("a" * 50)
    assert [again.row_index(i) for i in (199, 60, 7)] == [epochs[3][49], epochs[1][10], epochs[0][7]]
    assert again.row(60).origin == f"f:{again.row_index(60) + 1}"
    # These rows do not depend on the hash seed or the Python version.
    assert order(letter_prompts("a" * 9, seed=3), 0, 12) == [3, 5, 0, 1, 4, 2, 8, 6, 7, 6, 2, 8]


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_shares_of_the_ranks_are_every_group_once(monkeypatch, world_size):
    """Any number of ranks makes the same rollouts; the ranks' group counts differ by at most one.

    Greedy requests follow their group. This test starts prompts one by one.
    """
    prompts = letter_prompts(["a", "bb", "ccc", "dd"])
    monkeypatch.setattr("minirl.data.prompts.world_size", lambda: world_size)
    found, num_groups = [], Counter()
    for rank, ordinal in itertools.product(range(world_size), range(5, 11)):
        monkeypatch.setattr("minirl.data.prompts.rank", lambda rank=rank: rank)
        share = prompts.requests([ordinal], group_size=3, num_greedy=1)
        found += [(request.rollout_id, request.temperature) for request in share]
        num_groups[rank] += bool(share)
    expected = itertools.product(range(5, 11), enumerate([1.0, 1.0, 1.0, 0.0]))
    assert sorted(found) == [(RolloutId(ordinal, sample), t) for ordinal, (sample, t) in expected]
    assert max(num_groups.values()) - min(num_groups.values()) <= 1


def test_keys_of_seeds_purposes_epochs_and_samples_are_distinct():
    """A row gets different noise in later epochs, in evaluations and under other seeds, and so do equal rows.

    Pitfalls 25 and 50.
    """
    several = [letter_prompts("aaa", seed=seed, purpose=p) for seed in (0, 1) for p in ("train", "eval")]
    keys = [request.rng_key for prompts in several for request in prompts.requests(range(9), group_size=4)]
    assert len(set(keys)) == len(keys) == 4 * 9 * 4


CHAT = [{"role": "system", "content": "be kind"}, user("hello")]


CONTINUED = [user("hello"), assistant("one, t")]


def test_prompts_get_the_ids_that_transformers_gives_them(spoilt_folder):
    """Each prompt has one BOS, from tokenizer or template. With `chat`, a text becomes a user message. Pitfall 17.

    As in TRL, an answer continues the assistant's last message. Truncation settings in tokenizer.json have no effect.
    """
    backend = json.loads((spoilt_folder / "tokenizer.json").read_text())
    backend["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (spoilt_folder / "tokenizer.json").write_text(json.dumps(backend))
    tokenizer, peer = ChatTokenizer(spoilt_folder), AutoTokenizer.from_pretrained(spoilt_folder)

    def encoded(prompt):
        return tokenizer.encode(Row(prompt, {}, "f:1"))

    assert encoded("hello.") == peer("hello.")["input_ids"] == ids("<bos>hello.")
    assert encoded(CHAT) == peer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    goes_on = peer.apply_chat_template(CONTINUED, continue_final_message=True, return_dict=False)
    assert encoded(CONTINUED) == goes_on == ids("<bos><turn>user:hello<turn>assistant:one, t")
    assert encoded([*CONTINUED, {"role": "tool", "content": "a"}])[-11:] == ids("<turn>assistant:")
    rows = [Row(prompt, {}, "f:1") for prompt in ("b" * 90, CHAT)]
    assert list(tokenizer.encode_all(rows)) == list(map(tokenizer.encode, rows))
    tokenizer.chat = True
    assert encoded("hello") == ids("<bos><turn>user:hello<turn>assistant:")


def test_text_prompts_have_one_bos_and_no_eos_and_answered_ones_one_end_token(tmp_path):
    """Covers texts that spell out a BOS, and tokenizers that append an EOS. Pitfalls 17 and 18.

    A note reports the appended EOS.
    """
    for single in ("<bos> $A", "<bos> $A <eos>"):
        save_tokenizer(tmp_path, TEMPLATE, single=single)
        tokenizer = ChatTokenizer(tmp_path)
        for text in ("hello.", "<bos>hello."):
            assert tokenizer.encode(Row(text, {}, "f:1")) == ids("<bos>hello.")
            assert tokenizer.encode_with_completion(text, " cd") == ids("<bos>hello. cd<eos>")
    assert any(
        "writes <eos> after texts" in note for note in letter_prompts("a", tokenizer=tokenizer).notes()
    )


def sentencepiece(first_space):
    """Return a tokenizer with single characters and space-prefixed words, like SentencePiece's."""
    merges = [tuple(pair.split("+")) for pair in "t+h th+e the+r ther+e ▁+there w+a wa+s ▁+was ▁+▁".split()]
    tokens = (*"abehrstw.0\n▁", *map("".join, merges))
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if first_space == "prepended":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=first_space, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=first_space)
    return backend


def byte_level(adds_space):
    backend = Backend(models.BPE({name: i for i, name in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def unigram():
    """Return a tokenizer that reads newlines as spaces and collapses runs of spaces."""
    tokens = "▁ ▁was ▁there a h e r s w . t".split()
    backend = Backend(models.Unigram([("<unk>", 0.0), *((token, -1.0) for token in tokens)], 0, False))
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        unigram(),
        byte_level(True),
        byte_level(False),
        *map(sentencepiece, ("prepended", "first", "always", "never")),
    ],
    ids=["unigram", "prefix space", "byte level", "prepended", "first", "always", "never"],
)
def test_appended_text_is_the_same_text_after_tokens_and_so_is_a_completions(tmp_path, backend):
    """No leading space is added or lost. All ids decode to the prompt's text followed by the appended text."""
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    prompt = tokenizer.encode_text("there was", "f:1")
    several = ("    there", "  ", "\nthere", "\n\n a")  # unigram() collapses these
    is_one = tokenizer.backend.decode(tokenizer.encode_text("a  a", "f:1")) == "a a"
    for text in ("there was", " there", "a there", "was. ", *(() if is_one else several)):
        appended = tokenizer.encode_appended(text, "f:1")
        assert tokenizer.decode(appended) == text
        assert tokenizer.backend.decode(prompt + appended) == tokenizer.backend.decode(prompt) + text
        assert StopStrings(tokenizer, [text]).find_stop_string(appended) == text


def test_the_reward_models_template_writes_calls_or_they_are_refused(tmp_path):
    """A template silently drops unknown fields. A tool result that is a list becomes text."""
    call = {"type": "function", "function": {"name": "one", "arguments": {}}}
    completion = [
        assistant("wo", tool_calls=[call]),
        {"role": "tool", "name": "one", "content": ["a"]},
    ]
    save_tokenizer(tmp_path, TEMPLATE)
    with pytest.raises(
        InputError, match=r"the reward model: the chat template of .* does not render a tool call"
    ):
        ChatTokenizer(tmp_path, chat=True).encode_with_completion("hello", completion)
    names = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    of_texts = TEMPLATE.replace("m['content']", "m['content'].strip()")
    save_tokenizer(tmp_path, of_texts.replace("{% endfor %}", f"{names}{{% endfor %}}"))
    encoded = ChatTokenizer(tmp_path).encode_with_completion([user("hello")], completion)
    assert encoded == ids("<bos><turn>user:hello<turn>assistant:woone<turn>tool:<unk><unk>a<unk><unk>")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "a chat prompt, but this tokenizer has no chat template"),
        (
            "{{ raise_exception('no tools') if messages[1].content }}",
            "the chat template of .* rejects the messages: .*no tools",
        ),
        # The template truncates the message that the answer continues.
        (TEMPLATE.replace("m['content']", "m['content'][:2]"), "the chat template of .*: ValueError"),
    ],
)
def test_a_chat_template_that_fails_or_is_missing_is_refused_with_the_row(tmp_path, template, message):
    """A template is code from the model's folder: whatever it raises, the error names row and folder. Fault 22."""
    save_tokenizer(tmp_path, template)
    with pytest.raises(InputError, match=f"^f:1: {message}"):
        ChatTokenizer(tmp_path).encode(Row(CONTINUED, {}, "f:1"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer", "{", "FOLDER: cannot load the tokenizer: "),
        ("generation_config", '{"eos_token_id": [1, null, 2.0]}', "eos_token_id is .1, None, 2.0.; expected"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_refused(spoilt_folder, name, content, said):
    """The error names the folder, or the file and value. Faults 33 and 36."""
    (spoilt_folder / f"{name}.json").write_text(content)
    with pytest.raises(InputError, match=said.replace("FOLDER", str(spoilt_folder))):
        ChatTokenizer(spoilt_folder)


def test_a_text_is_that_of_its_known_parts_around_each_unknown_id_without_special_tokens(spoilt_folder):
    """Covers unknown ids anywhere, no ids, lists and tensors. Spaces before punctuation stay.

    Ids may have gaps: the stop token's id may exceed the number of tokens. Pitfall 6.
    """
    path = spoilt_folder / "tokenizer.json"
    backend = json.loads(path.read_text())
    backend["model"]["vocab"]["z"] = 50
    path.write_text(json.dumps(backend))
    tokenizer = ChatTokenizer(spoilt_folder)
    hole, a = ids("za")
    assert tokenizer.decode([*ids("a , b ."), EOS]) == "a , b ."
    assert tokenizer.decode([]) == ""
    sampled = [51, *ids("<bos>ab"), 2**31, hole, *ids("c<eos>d"), 50, hole]
    for given in (sampled, torch.tensor(sampled)):
        assert tokenizer.decode(given) == "\ufffdab\ufffd\ufffdcdz\ufffd"
    assert StopStrings(tokenizer, ["az"])([[a, 50], [a, hole, 50]]) == [True, False]


def test_stop_ids_are_all_that_the_folder_lists(spoilt_folder):
    """ChatTokenizer, config.json and generation_config.json may each list one id, several or none. Pitfall 14."""
    assert ChatTokenizer(spoilt_folder).stop_ids == {EOS}
    (spoilt_folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": [5, 6]}')
    assert ChatTokenizer(spoilt_folder).stop_ids == {EOS, 5, 6}
    (spoilt_folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert ChatTokenizer(spoilt_folder).stop_ids == {EOS, 5, 6, 7}


def test_a_turn_ends_with_the_token_whose_text_first_has_a_stop_string(tmp_path):
    """Searching a bounded tail finds the same strings as searching the whole turn. Pitfall 15.

    Tokens are single bytes here, and a text's first space is stripped. A run of bytes that form no character is skipped
    and does not hide a later string.
    """
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "ab", "b▁a"]
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    tokenizer, rng = ChatTokenizer(tmp_path), random.Random(0)
    # Each byte of the first string is a token, and decoding strips the string's first space.
    stop = StopStrings(tokenizer, [" \né\n\né\n", "ab a</s>", "é\né"])
    singles = (*b"\n", *range(256, max(tokenizer.known_ids) + 2))
    units = [[256, *"\né\n\né\n".encode()], *([i] for i in singles)]
    num_late = 0
    for _ in range(300):
        turn = list(itertools.chain(*rng.choices(units, k=40)))
        for count in range(1, len(turn) + 1):
            text = tokenizer.decode(turn[:count], skip_special_tokens=False)
            contained = [string for string in stop.strings if string in text]
            assert stop.find_stop_string(turn[:count]) in (contained or [None]), turn[:count]
            if contained:
                num_late += count > stop.max_tokens
                break
    assert num_late > 20
    stray = [0xE3] * 40
    assert stop([stray, [*stray, *"é\né".encode()]]) == [False, True]


# Faults: errors name file, line and field before a model is loaded.


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines to a file and returns its path."""

    def write_file(*lines):
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
        return str(tmp_path / "rows.jsonl")

    return write_file


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", }', "cannot be read as JSON: .*: column 17"),
        (b'{"prompt": "a", "x": {"b": 1, "b": 2}}', r"cannot be read as JSON: a field is repeated: \['b'\]"),
        (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "cannot be read as JSON: .*digits"),
        (b'["a"]', r"expected an object, got \['a'\]"),
        (b'{"question": "a", "n": 1}', r"no field 'prompt' .* among \['n', 'question'\]; rename"),
        (b'{"prompt": null, "q": 1}', "no field 'prompt' with text or messages among"),
        (b'{"prompt": " \\n\\u00a0"}', "field 'prompt' is ' "),
        (b'{"prompt": []}', "field 'prompt'"),
        (b'{"prompt": [{"content": "a"}]}', "field 'prompt', message 1: .*expected a message"),
        (
            b'{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "field 'prompt', message 1: content is .*only text content is supported",
        ),
        (b'{"prompts": "b", "prompt": "a"}', "field 'prompts' clashes with a reward-function argument"),
        (b'{"rollouts": "b", "prompt": "a"}', "field 'rollouts' clashes with a reward-function argument"),
        (b'{"prompt": "caf\xe9"}', "cannot be read as JSON: 'utf-8' codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named(write, line, said):
    """The first bad line stops loading; the error names file, line, and field or column. Faults 15, 16 and 19."""
    with pytest.raises(InputError, match=rf"rows\.jsonl:3: {said}"):
        load_jsonl_task(write(GOOD, b"", line, b"{}"), ())


def test_a_json_array_is_read_over_several_lines(write):
    """The array may follow a BOM. Errors name the file's line or the row's number."""
    path = write(b'\xef\xbb\xbf[{"prompt": "a"},', b' {"prompt":', b'  "b"}]')
    expected = [Row(text, {}, f"{path} row {number}") for number, text in enumerate("ab", 1)]
    assert load_jsonl_task(path, ()).train_rows == expected
    with pytest.raises(InputError, match=r"rows\.jsonl: cannot be read as JSON: .* line 2 column 2"):
        load_jsonl_task(write(b"[{},", b"{]"), ())
    with pytest.raises(InputError, match=r"rows\.jsonl row 1: expected an object"):
        load_jsonl_task(write(b"[3]"), ())


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf", b"[]"])
def test_row_18_an_empty_file_is_refused(write, content):
    """An empty file must not give a run with 0 steps."""
    with pytest.raises(InputError, match=r"rows\.jsonl: no rows"):
        load_jsonl_task(write(content), ())


def test_row_18_few_rows_are_said():
    """Few rows work, and a note gives the numbers. Pitfall 57."""
    said = ["train: a step takes 16 prompts but there are only 4, so some repeat"]
    assert letter_prompts("abaa").notes(per_step=16) == said
    assert letter_prompts("ab").notes(per_step=2) == letter_prompts("ab").notes() == []


def test_row_19_odd_text_is_read_and_rows_stay_aligned(write):
    """Each row keeps its prompt, columns and line number in a file with a BOM, CRLF and blank lines."""
    texts = [
        " \u05e9 \u202eabc\u202c a\x00b ",
        "a\ud800b",
        "x" * 1_000_000,
        "a\u2028b\u0085c\x0bd\x1ce\tf\ng\r",
        [{"role": "system", "content": ""}, user("na\u00efve \U0001f600")],
    ]
    lines = [json.dumps({"prompt": text, "answer": i}, ensure_ascii=False) for i, text in enumerate(texts)]
    # Only a JSON escape can represent a lone surrogate.
    coded = [line.replace("\ud800", r"\ud800").encode() + b"\r\n" for line in lines]
    path = write(b"\xef\xbb\xbf" + b"\r\n".join(coded))
    expected = [Row(text, {"answer": i}, f"{path}:{1 + 2 * i}") for i, text in enumerate(texts)]
    assert load_jsonl_task(path, ()).train_rows == expected


EMBEDDED = {"vocab_size": ord("z")}


@pytest.mark.parametrize(
    ("texts", "options", "said"),
    [
        ("aaaaz", EMBEDDED, "^f:5: token id 122 is out of range: the model has 122 embeddings"),
        ("zaaaz", EMBEDDED, "^f:1: token id 122 is out of range: the model has 122 embeddings"),
        (["a", ""], {}, "^f:2: the prompt has no tokens"),
        (
            ["a" * 7, "b" * 11],
            {},
            "every prompt is too long: .* 7 tokens, but with --max-new-tokens 4, only 6 remain of .*--cache-tokens",
        ),
    ],
)
def test_rows_21_and_36_prompts_with_an_id_too_many_no_tokens_or_too_little_room_are_refused(
    texts, options, said
):
    """The error names the first such row, or the flags that make room. Pitfall 6.

    A tokenizer may have more ids than the model has embeddings; without a BOS, a text may have no tokens.
    """
    with pytest.raises(InputError, match=said):
        letter_prompts(texts, **options)


def test_prompts_without_rows_or_without_the_tokenizers_last_ids_are_no_error():
    assert letter_prompts("aaaa", **EMBEDDED).num_prompts == 4
    assert letter_prompts([]).requests([], group_size=0, num_greedy=1) == []


def test_row_19_a_text_that_cannot_be_tokenized_is_named(tmp_path):
    """Covers a lone surrogate in a text and in a message."""
    save_tokenizer(tmp_path, TEMPLATE)
    for text in ("a\ud800", [user("a\ud800")]):
        with pytest.raises(InputError, match=r"^f:2: the text cannot be tokenized: .*ud800"):
            letter_prompts(["ab", text], tokenizer=ChatTokenizer(tmp_path))


LONG = ("aaaaaa", "b" * 7, "cc", "d" * 9, "e" * 10, "f" * 99)  # six tokens fit


def test_row_20_long_prompts_are_skipped_counted_and_named():
    """A note names the first three skipped prompts. A prompt of exactly the limit stays. Pitfall 55."""
    prompts = letter_prompts(LONG)
    requests = prompts.requests(range(2), group_size=1)
    served = {prompts.row_index(i): (prompts.row(i).prompt, requests[i].prompt_ids) for i in range(2)}
    assert served == {0: ("aaaaaa", (97,) * 6), 1: ("cc", (99, 99))}
    assert prompts.num_prompts == 2
    (said,) = prompts.notes()
    assert said.startswith("train: 4 of 6 prompts have more than 6 tokens, such as f:2, f:4, f:5: skipped")


def test_row_35_a_tokenizer_with_code_of_its_own_is_refused_without_running_it(tmp_path):
    """Nothing is imported."""
    save_tokenizer(tmp_path, TEMPLATE)
    path = tmp_path / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    canary = tmp_path / "canary"
    (tmp_path / "mine.py").write_text(f"open({str(canary)!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(InputError, match=r"cannot load the tokenizer: .*custom code"):
        ChatTokenizer(tmp_path)
    assert not canary.exists()


def test_row_36_a_tokenizer_without_an_end_token_is_said():
    """Such a tokenizer works, but completions end only at the limit. Here, the end token has id 7."""
    (said,) = letter_prompts(["\1"], vocab_size=7).notes()
    assert "completions end only at --max-new-tokens" in said
    assert letter_prompts(["\1"], vocab_size=8).notes() == []
