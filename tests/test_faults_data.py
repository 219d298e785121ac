"""Faults of data files, prompts and tokenizers: named by file, line and field before a model is loaded."""

import json

import pytest

from minirl.data.jsonl import read_rows
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from support.texts import TEMPLATE, letter_prompts, save_tokenizer

GOOD = b'{"prompt": "good", "answer": 1}'


@pytest.fixture
def write(tmp_path):
    """A file of these lines, by path."""

    def write_file(*lines):
        (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
        return str(tmp_path / "rows.jsonl")

    return write_file


@pytest.fixture
def tokenizer_folder(tmp_path):
    """A tokenizer with a chat template, to be spoilt."""
    save_tokenizer(tmp_path / "model", TEMPLATE)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", }', "not JSON: .* at column 17"),
        (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", "cannot be read: .*digits"),
        (b'{"prompt": "a", "answer": 1, "answer": 2}', "cannot be read: key 'answer' is there twice"),
        (b'["a"]', r"expected an object, got \['a'\]"),
        (b'{"question": "a", "n": 1}', r"no field 'prompt', only \['n', 'question'\]; rename"),
        (b'{"prompt": " \\n\\u00a0"}', "field 'prompt' is ' "),
        (b'{"prompt": [{"role": "user", "content": null}]}', "field 'prompt'"),
        (b'{"prompts": "b", "prompt": "a"}', "field 'prompts' has the name of an argument"),
        (b'{"prompt": "caf\xe9"}', "cannot be read: 'utf-8' codec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_line_is_named(write, line, said):
    """The first one stops the load: file, line, and field or column. Faults 15, 16 and 19."""
    with pytest.raises(InputError, match=rf"rows\.jsonl:3: {said}"):
        read_rows(write(GOOD, b"", line, b"{}"))


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n", b"\xef\xbb\xbf"])
def test_row_18_an_empty_file_is_refused(write, content):
    """Not a run of 0 steps."""
    with pytest.raises(InputError, match=r"rows\.jsonl: no rows"):
        read_rows(write(content))


@pytest.mark.parametrize(
    "text",
    [
        " \u05e9 \u202eabc\u202c a\x00b a\u2028b\u0085c\x0bd\x1ce\tf\ng\r",
        "a\ud800b",
        "x" * 1_000_000,
        [{"role": "system", "content": ""}, {"role": "user", "content": "na\u00efve \U0001f600"}],
    ],
    ids=["control characters", "surrogate", "megabyte", "messages"],
)
def test_row_19_odd_text_is_read_and_rows_stay_aligned(write, text):
    """Between a BOM and CRLF, blank lines counted: prompt, columns and place of each row are its own."""
    texts = [json.dumps({"prompt": text, "answer": i}, ensure_ascii=False) for i in range(3)]
    # JSON's own escape is all that can write half a surrogate pair.
    first, second, third = (line.replace("\ud800", r"\ud800").encode() + b"\r" for line in texts)
    path = write(b"\xef\xbb\xbf" + first, b"\r", second, b"", third)
    places = enumerate((1, 3, 5))
    assert list(read_rows(path)) == [Row(text, {"answer": i}, f"{path}:{n}") for i, n in places]


def test_row_36_a_prompt_without_a_token_or_an_id_that_the_model_has_is_named(tokenizer_folder):
    """A larger tokenizer would read outside of the embeddings; rows that do not use the rest are fine. Pitfall 6.

    A tokenizer without a BOS may find nothing in a text, and none has a token for half a surrogate pair (row 19).
    """
    assert letter_prompts("aaaa", vocab_size=ord("z")).num_prompts == 4
    message = [{"role": "user", "content": "a\ud800"}]
    for text, options, said in (
        ("z", {"vocab_size": ord("z")}, "the prompt has token id 122, the model 122 embeddings"),
        ("", {}, "the prompt has no tokens"),
        ("a\ud800", {"tokenizer": Tokenizer(tokenizer_folder)}, "the text cannot be tokenized: .*ud800"),
        (message, {"tokenizer": Tokenizer(tokenizer_folder)}, "the text cannot be tokenized: .*ud800"),
    ):
        with pytest.raises(InputError, match=f"^f:2: {said}"):
            letter_prompts(["a", text], **options)


def test_rows_18_and_20_few_rows_and_long_prompts_are_said():
    """Those that leave too little room are skipped, counted and named; one of exactly the limit stays.

    Rows keep their tokens. Pitfalls 55 and 57.
    """
    prompts = letter_prompts(("aaaaaa", "b" * 7, "cc", "d" * 9, "e" * 10, "f" * 99))  # six tokens fit
    served = {prompts.index(i): (prompts.row(i).prompt, prompts.prompt_ids(i)) for i in range(2)}
    assert served == {0: ("aaaaaa", (97,) * 6), 1: ("cc", (99, 99))}
    left_out, repeated = prompts.notes(per_step=16)
    assert left_out.startswith("train: 4 of 6 prompts have more than 6 tokens (f:2, f:4, f:5, ...): left out")
    assert repeated == "train: a step takes 16 prompts and there are 2: it repeats them"
    assert len(prompts.requests(0, 16, group_size=1)) == 16
    assert letter_prompts("ab").notes(per_step=2) == []


def test_row_21_prompts_that_all_leave_too_little_are_refused():
    """The flags that give room are named."""
    said = "every prompt is too long: the shortest has 7 tokens, and --max-new-tokens 4 leaves 6 of .*--cache-tokens"
    with pytest.raises(InputError, match=said):
        letter_prompts(["a" * 7, "b" * 11])


def test_row_35_a_tokenizer_with_code_of_its_own_is_refused_without_running_it(tokenizer_folder, monkeypatch):
    """No question on the terminal, no import."""
    path = tokenizer_folder / "tokenizer_config.json"
    code = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"}
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    canary = tokenizer_folder / "canary"
    (tokenizer_folder / "mine.py").write_text(f"open({str(canary)!r}, 'w')\nclass Mine: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    with pytest.raises(InputError, match=r"its tokenizer cannot be loaded: .*custom code"):
        Tokenizer(tokenizer_folder)
    assert not canary.exists()
