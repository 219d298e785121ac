"""Reward functions with TRL's interface, reward models, and concurrent reward calls."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from minirl.data.conversation import completion_messages
from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.functions import StepReward, overlong_penalty, rewards_and_weights
from minirl.rewards.reward_model import load_reward_model
from minirl.rewards.reward_queue import RewardQueue
from minirl.rewards.reward_workers import WorkerReward
from minirl.rollouts import EpisodeRecord, RolloutId, TurnRecord, make_token_stream
from support.collecting import letter_tokenizer
from support.jobs import LIMIT_S, wait_for
from support.rollouts import rewards_of_call, rollout_of
from support.texts import TEMPLATE, TOKENS, assistant, ids, letter_prompts, save_tokenizer, user

ROW = Row("one?", {"answer": 1, "messages": "of the file"}, "f.jsonl:1")
CHAT_ROW = Row([user("two?")], {"answer": 2}, "f.jsonl:2")
CPU = torch.device("cpu")
REWARD_TOKENS = (*"0123456789", *reversed(TOKENS))  # the reward model has another, larger vocabulary
POSITIONS = 64


def rewards_of(function, row=ROW, completions=("1", "2")):
    return rewards_of_call(function, row, completions)


def test_a_function_gets_the_arguments_that_it_names_or_all_columns_with_kwargs():
    """As in TRL, arguments are lists passed by keyword, and chat prompts come with chat completions.

    Episode arguments must be named.
    """
    seen = {}

    def everything(prompts, completions, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions)
        return [0.0, 1.0]

    assert rewards_of(everything) == [0.0, 1.0]
    assert seen == {
        "prompts": ["one?"] * 2,
        "completions": ["1", "2"],
        "completion_ids": [[7], [7]],
        "answer": [1, 1],
        "messages": ["of the file"] * 2,
    }
    assert rewards_of(lambda prompts, completions: [float(len(prompts[0][0])), 0], CHAT_ROW) == [2.0, 0.0]
    assert rewards_of(lambda completions: [float(c[0]["content"]) for c in completions], CHAT_ROW) == [1, 2]


def test_a_reward_may_be_in_any_file_or_module(tmp_path, monkeypatch):
    """Modules may be in the working directory, whose path may contain a colon."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "found_here.py").write_text("def score(completions):\n    return [2, 3]\n")
    monkeypatch.chdir(folder)
    for spec in (f"{folder}/found_here.py:score", "found_here:score"):
        assert rewards_of(WorkerReward(spec)) == [2.0, 3.0]


@pytest.fixture(scope="module", params=[None, "<eos>"], ids=["no_pad", "pad_is_eos"])
def reward_folder(request, tmp_path_factory):
    """Return a classifier with its own tokenizer, and transformers' score of a text with written-out special tokens.

    If config.json has a pad token, transformers takes the score at the last other token.
    """
    folder = tmp_path_factory.mktemp("reward_model")
    template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ style or '' }}")
    save_tokenizer(folder, template, tokens=REWARD_TOKENS)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": len(REWARD_TOKENS), "max_position_embeddings": POSITIONS}
    pad = request.param and REWARD_TOKENS.index(request.param)
    config = LlamaConfig(initializer_range=0.5, num_labels=1, pad_token_id=pad, **sizes)
    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_config(config).eval()
    oracle.save_pretrained(folder)

    @torch.no_grad()
    def score(text):
        return oracle(torch.tensor([ids(text, REWARD_TOKENS)])).logits.item()

    return folder, score


def load(folder, *, chat=False, max_tokens=1000, **options):
    options |= {"chat": chat, "max_tokens": max_tokens}
    return load_reward_model(folder, dtype=torch.float32, device=CPU, **options).function


CHAT = [user("hello")]


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("ab,", {"max_tokens": 40}, "<bos>ab,{}<eos>"),
        (
            "ab,",
            {"chat": True, "template_arguments": {"style": "brief"}},
            "<bos>brief<turn>user:ab,<turn>assistant:{}",
        ),
        # The first of several turns continues the prompt's last message.
        (
            [*CHAT, assistant("i")],
            {},
            "<bos><turn>user:hello<turn>assistant:i{}<turn>user:so",
        ),
    ],
    ids=["text", "chat", "messages"],
)
def test_a_reward_model_scores_what_transformers_scores(reward_folder, prompt, options, expected):
    """Text ends in one EOS; messages use the model's own template; the score is at the last token. Pitfall 18.

    Texts in one microbatch do not affect each other's scores.
    """
    folder, oracle = reward_folder
    answers = texts = ["", "a", " so it is.", "a" * 20]
    if prompt != "ab,":
        answers = [[assistant(text), user("so")] for text in texts]
    got = load(folder, **options)([prompt] * 4, answers)
    assert got == pytest.approx([oracle(expected.format(text)) for text in texts], rel=1e-5, abs=1e-5)
    assert max(got) - min(got) > 0.1


def test_a_text_too_long_for_the_reward_model_is_refused(reward_folder):
    """A text at the limit is scored; one more token is an error naming folder, both lengths and the flag to lower."""
    folder, _ = reward_folder
    for options, fits in (({"max_tokens": 30}, 30), ({}, POSITIONS)):
        model = load(folder, **options)
        room = fits - len(ids("<bos><turn>user:hello<turn>assistant:"))
        assert len(model([CHAT], ["b" * room])) == 1
        said = rf"--reward-model {folder}: a text has {fits + 1} tokens, but at most {fits} fit; lower --max-new-tokens"
        with pytest.raises(RewardError, match=said):
            model([CHAT], ["b" * (room + 1)])


def test_overlong_penalty_matches_dapo():
    """With L_max 20 and L_c 8, the penalty is 0 up to 12 tokens, then falls linearly to -1 at 20. Pitfall 27.

    The limit applies to each branch, and the penalties of several branches add up.
    """
    lengths = (0, 12, 13, 16, 20, 100)
    rollouts = [rollout_of(RolloutId(0, 0), [1], make_token_stream([7] * n), "") for n in lengths]
    rollouts.append(replace(rollouts[2], branches=rollouts[3].branches + rollouts[2].branches))
    assert overlong_penalty(limit=20, buffer=8)(rollouts) == [0, 0, -0.125, -0.5, -1, -1, -0.625]


def test_trained_rewards_come_before_logged_ones_and_have_their_weights():
    """Trained rewards keep their order and default to weight 1; logged rewards always have weight 0."""
    rewards, logged = {"b": min, "a": max}, {"seen": sum}
    functions, weights = rewards_and_weights(rewards, (), logged=logged)
    assert list(functions) == ["b", "a", "seen"]
    assert weights.tolist() == [1, 1, 0]
    assert rewards_and_weights(rewards, (0.5, 0.0), logged=logged)[1].tolist() == [0.5, 0, 0]
    with pytest.raises(InputError, match=r"--reward-weights 1.0: give one weight for each reward: b, a$"):
        rewards_and_weights(rewards, (1.0,), logged=logged)


# Concurrent calls.

SOURCE = """
import asyncio, pathlib, random, time
import numpy

FOLDER = pathlib.Path(__file__).parent

def wait_for(pattern, count):
    deadline = time.monotonic() + 60
    while len(list(FOLDER.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{count} {pattern}"
        time.sleep(0.005)

def waits(prompts, completions):
    (FOLDER / f"begun_{prompts[0]}").touch()
    wait_for("open", 1)
    return [1.0] * len(completions)

ALL_HAVE_BEGUN = asyncio.Barrier(8)

async def meets_all(completions):
    await ALL_HAVE_BEGUN.wait()
    return [1.0] * len(completions)

def draws(completions):
    return [random.random() + numpy.random.rand() + len(completions) + i / 10 for i in range(len(completions))]

def raises_beside_a_hang(completions):
    if "bad" in completions:
        wait_for("hangs", 1)
        raise KeyError("bad")
    (FOLDER / "hangs").touch()
    time.sleep(100)
"""


def made_groups(*groups):
    """Return prompts with one row per group, and each group's rollouts with these texts as completions."""
    prompts = letter_prompts("abcdefghijkl"[: len(groups)], tokenizer=letter_tokenizer())
    made = []
    for ordinal, texts in enumerate(groups):
        made.append([])
        for sample, text in enumerate(texts):
            completion = make_token_stream(ids(f"{text}<eos>"))
            made[-1].append(rollout_of(RolloutId(ordinal, sample), [5], completion, "stop"))
    return prompts, made


def add_all(functions, prompts, groups):
    """Return a queue with all groups added."""
    queue = RewardQueue(functions, prompts)
    for group in groups:
        queue.add(group)
    return queue


def rewards_in(rewarded):
    """Return the rewards of each rollout."""
    return [rewards for _, _, rewards in rewarded]


def test_row_23_25_an_in_process_function_that_raises_or_hangs_ends_the_run():
    """The error names function and row; a hanging thread is left behind."""
    prompts, groups = made_groups(("a",))
    is_over = threading.Event()

    def raises(completions):
        raise KeyError("no such answer")

    def hangs(completions):
        is_over.wait()

    for function, said in (
        (raises, r"raised\n(.|\n)*KeyError: 'no such answer'"),
        (hangs, "took more than 0.01 s"),
    ):
        queue = RewardQueue({"mine": function}, prompts, call_timeout=0.01 if function is hangs else None)
        queue.add(groups[0])
        with pytest.raises(RewardError, match=rf"^reward mine for the row at f:\d: {said}") as error:
            queue.finish([0])
        assert error.value.exit_code == 4
    is_over.set()


def test_an_empty_answer_that_continues_the_prompts_last_message_is_a_message():
    """Reward functions may therefore always read the last message of a completion."""
    prompt = [user("a"), assistant("so")]
    _, [[rollout]] = made_groups(("",))
    record = EpisodeRecord([TurnRecord(0, 1, "stop")], prompt=prompt, row=Row(prompt, {}, "f:1"))
    assert completion_messages(replace(rollout, episode=record), letter_tokenizer()) == [assistant("")]


def test_one_call_per_worker_runs_while_groups_are_added(load_reward, tmp_path):
    """With eight groups and four workers, four calls run concurrently and no fifth begins."""
    prompts, groups = made_groups(*[("a", "b")] * 8)
    queue = add_all({"waits": load_reward("waits", num_workers=4)}, prompts, groups)
    wait_for(lambda: len(list(tmp_path.glob("begun_*"))) == 4, "four calls did not begin")
    time.sleep(0.2)
    assert len(list(tmp_path.glob("begun_*"))) == 4
    assert queue.is_busy
    (tmp_path / "open").touch()
    assert rewards_in(queue.finish(range(8))) == [[1.0]] * 16
    assert not queue.is_busy


def test_an_async_function_scores_all_prompts_concurrently(load_reward):
    """In one worker and in this process, eight calls wait for each other before any returns."""
    begun = threading.Barrier(8)

    async def meets_all(completions):
        begun.wait(LIMIT_S)
        return [1.0] * len(completions)

    functions = {"process": load_reward("meets_all"), "script": meets_all}
    queue = add_all(functions, *made_groups(*[("a", "b")] * 8))
    assert rewards_in(queue.finish(range(8))) == [[1.0, 1.0]] * 16


def test_row_27_rewards_do_not_depend_on_the_order_of_groups_or_the_number_of_workers(load_reward):
    """This includes random rewards and rewards that depend on the whole call; rewards come in sample order.

    Rollouts stay as sampled, with their texts (Pitfalls 15 and 16). Empty completions are scored, and a rank may have
    no rollouts (Fault 29).
    """
    prompts, groups = made_groups(*[("a", "", "ab")] * 6)
    functions = {"draws": load_reward("draws")}
    in_order = add_all(functions, prompts, groups).finish(range(6))
    assert len({rewards[0] for _, _, rewards in in_order}) == 18
    mixed = [group[::-1] for group in groups[::-1]]
    picked = [3, 0, 5, 1, 4, 2]
    queue = add_all({"draws": load_reward("draws", num_workers=3)}, prompts, mixed)
    assert queue.finish([]) == []
    found = queue.finish(picked)
    assert found == [one for i in picked for one in in_order[3 * i : 3 * i + 3]]
    assert [one.rollout for one in found] == [rollout for i in picked for rollout in groups[i]]
    assert [one.text for one in found] == ["a", "", "ab"] * 6


def test_a_slow_in_process_function_blocks_nothing_and_gets_one_prompt_at_a_time():
    """The function runs in another thread, and only `finish` waits for the call."""
    prompts, groups = made_groups(("a", "bb"), ("ccc", "dddd"))
    is_open, calls = threading.Event(), []

    def length(completions):
        calls.append(completions)
        assert is_open.wait(LIMIT_S)
        return [len(text) for text in completions]

    queue = add_all({"length": length}, prompts, groups)
    wait_for(lambda: calls, "no call began")
    queue.poll()
    assert (len(calls), queue.is_busy, queue.ready_prompts()) == (1, True, set())
    is_open.set()
    assert rewards_in(queue.finish(range(2))) == [[1], [2], [3], [4]]
    assert calls == [["a", "bb"], ["ccc", "dddd"]]


def test_a_reward_model_is_called_once_for_all_groups_in_the_requested_order():
    """One call scores all of the step's groups; the columns follow the order of the functions.

    A reward that does not apply is NaN, because a 0 would count in its group's mean and std. Pitfall 59.
    """
    prompts, groups = made_groups(("a", "bb"), ("ccc", "dddd"))
    calls = []

    def length(prompts, completions):
        calls.append(completions)
        return [len(text) for text in completions]

    functions = {"length": StepReward(length), "f": lambda completions: [None, 1.0]}
    queue = add_all(functions, prompts, groups[::-1])
    assert queue.finish([]) == calls == []
    rewards = torch.tensor(rewards_in(queue.finish(range(2))))
    assert rewards.nan_to_num(-9).tolist() == [[1, -9], [2, 1], [3, -9], [4, 1]]
    assert calls == [["a", "bb", "ccc", "dddd"]]


def test_row_23_a_failure_is_raised_while_other_calls_are_in_flight(load_reward):
    """The error is raised at once, without waiting for the other calls, and does not become a reward."""
    prompts, groups = made_groups(("ok",), ("bad",))
    queue = add_all({"f": load_reward("raises_beside_a_hang", num_workers=2)}, prompts, groups)
    for wait in (lambda: wait_for(queue.poll, "no call failed"), lambda: queue.finish(range(2))):
        with pytest.raises(RewardError, match=r"row at f:\d: raised(.|\n)*KeyError: 'bad'"):
            wait()
        assert queue.is_busy


def test_row_25_the_time_limit_of_a_call_starts_when_a_worker_gets_it(load_reward, tmp_path, monkeypatch):
    """Each of three calls takes 40 s; the limit is 60 s. One worker runs all calls, so the last call waits for 80 s."""
    prompts, groups = made_groups(*[("a",)] * 3)
    function = load_reward("waits", timeout_s=60.0)
    monkeypatch.setattr(function._loop, "time", lambda: 40.0 * len(list(tmp_path.glob("begun_*"))))
    (tmp_path / "open").touch()
    queue = add_all({"waits": function}, prompts, groups)
    assert rewards_in(queue.finish(range(3))) == [[1.0]] * 3
