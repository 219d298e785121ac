"""The order of prompts, and a tokenizer whose own BOS and template's BOS must not meet."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minirl.data import Prompts, Tokenizer
from minirl.tasks import Row

TOKENS = ("<bos>", "<eos>", "<unk>", "<turn>", *"abcdefghijklmnopqrstuvwxyz .,:")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant:{% endif %}"
)
BOS, EOS = 0, 1


def save_tokenizer(folder, template):
    """One token per character; the backend adds a BOS to every text, and so does the template."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<turn>"],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


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


def ids(text):
    """Ids of a text with specials written out."""
    found = []
    while text:
        token = next((t for t in TOKENS[:4] if text.startswith(t)), text[0])
        found.append(TOKENS.index(token))
        text = text[len(token) :]
    return found


class Letters:
    """A tokenizer of one id per letter."""

    def encode(self, row):
        return [ord(letter) for letter in row.prompt]


def make_prompts(texts, *, max_prompt_tokens=100, seed=0):
    return Prompts(
        [Row(t, {}, f"f:{i}") for i, t in enumerate(texts)], Letters(), max_prompt_tokens=max_prompt_tokens, seed=seed
    )


def test_each_epoch_is_another_permutation_of_the_rows():
    """Every row once per epoch, in another order each time, and in another order for another seed."""
    prompts, other = make_prompts(["a"] * 50), make_prompts(["a"] * 50, seed=1)
    epochs = [prompts.batch(50 * epoch, 50) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(50)) not in epochs
    assert other.batch(0, 50) not in epochs


def test_order_does_not_depend_on_what_was_asked_before():
    """A resumed run reads the stream from the middle and gets the same rows; batches may cross epochs."""
    stream = make_prompts(["a"] * 7).batch(0, 40)
    again = make_prompts(["a"] * 7)
    assert again.batch(33, 7) == stream[33:]
    assert again.batch(4, 8) == stream[4:12]
    assert [again.batch(i, 1)[0] for i in range(39, -1, -1)] == stream[::-1]
    assert again.batch(5, 0) == []


def test_order_does_not_depend_on_the_process():
    """Two ranks with different hash seeds draw the same rows."""
    program = (
        "from minirl.data import Prompts\nfrom minirl.tasks import Row\n"
        "class T:\n    def encode(self, row): return [1]\n"
        "print(Prompts([Row('a', {}, 'x')] * 9, T(), max_prompt_tokens=1, seed=3).batch(0, 30))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert json.loads(printed[0]) == make_prompts(["a"] * 9, seed=3).batch(0, 30)


def seconds(action):
    """The least of three."""
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return min(taken)


def test_a_step_of_a_large_task_does_not_shuffle_for_each_prompt():
    """Drawing 128 prompts of 20,000 costs a few shuffles of them, not 128."""
    prompts = make_prompts(["a"] * 20_000)
    one_shuffle = seconds(lambda: random.Random("0 0").shuffle(list(range(20_000))))
    assert seconds(lambda: prompts.batch(128, 128)) < 20 * one_shuffle


def test_epochs_served_are_counted_in_rows_kept():
    """One and a half epochs after nine prompts of six rows."""
    assert make_prompts(["a"] * 6).epoch(9) == 1.5


def test_too_long_prompts_are_skipped_and_counted():
    """A prompt of exactly the limit stays; row and tokens stay aligned; the order covers the rows that are left."""
    prompts = make_prompts(["aa", "bbbb", "ccc", "ddddd"], max_prompt_tokens=3)
    assert [row.prompt for row in prompts.rows] == ["aa", "ccc"]
    assert prompts.tokens == [(97, 97), (99, 99, 99)]
    assert prompts.num_skipped == 2
    assert sorted(prompts.batch(0, 2)) == [0, 1]


def test_no_prompt_that_fits_is_refused_with_the_lengths():
    """The shortest prompt, the room there is and the flag that takes it; no rows at all is not an error."""
    with pytest.raises(ValueError, match=r"shortest has 4 tokens and 3 are left.*--max-new-tokens"):
        make_prompts(["bbbb", "ddddd"], max_prompt_tokens=3)
    assert make_prompts([]).rows == []


def test_text_prompts_get_the_tokenizers_own_bos_once(chat_folder):
    """A text prompt is what the tokenizer makes of a text, special tokens included."""
    assert Tokenizer(chat_folder).encode(Row("abc", {}, "f:1")) == ids("<bos>abc")


def test_chat_prompts_get_the_templates_bos_only(chat_folder):
    """The template writes a BOS and the tokenizer would add one: the prompt has one, and ends ready for an answer."""
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    encoded = Tokenizer(chat_folder).encode(Row(messages, {}, "f:1"))
    assert encoded == ids("<bos><turn>system:be kind<turn>user:hello<turn>assistant:")
    assert encoded.count(BOS) == 1


def test_chat_flag_wraps_text_in_one_user_message(chat_folder):
    """With `chat` a text prompt is encoded as the chat of that one message; a chat prompt is not wrapped again."""
    messages = [{"role": "user", "content": "hello"}]
    with_flag, without = Tokenizer(chat_folder, chat=True), Tokenizer(chat_folder)
    assert with_flag.encode(Row("hello", {}, "f:1")) == ids("<bos><turn>user:hello<turn>assistant:")
    assert with_flag.encode(Row(messages, {}, "f:1")) == without.encode(Row(messages, {}, "f:1"))


def test_a_chat_prompt_without_a_template_is_refused_with_its_row(text_folder):
    """Messages or the chat flag need a template; the error names the row."""
    with pytest.raises(ValueError, match=r"my\.jsonl:7.*no chat template"):
        Tokenizer(text_folder).encode(Row([{"role": "user", "content": "a"}], {}, "my.jsonl:7"))
    with pytest.raises(ValueError, match=r"my\.jsonl:8.*no chat template"):
        Tokenizer(text_folder, chat=True).encode(Row("a", {}, "my.jsonl:8"))
    assert Tokenizer(text_folder).encode(Row("a", {}, "my.jsonl:9")) == ids("<bos>a")


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
def test_stop_ids_are_all_that_the_folder_lists(text_folder, tmp_path, config, generation, expected):
    """Tokenizer, config.json and generation_config.json may each list one id, several or none."""
    for path in Path(text_folder).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps({"model_type": "llama", **content}))
    assert Tokenizer(tmp_path).stop_ids == frozenset(expected)
