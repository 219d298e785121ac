"""Reward functions in TRL's shape: arguments, sources, results; reward models."""

import functools
import json
import runpy

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig

from minirl.data.task import Row
from minirl.errors import InputError, RewardError
from minirl.rewards.functions import OverlongPenalty, arguments_of, functions_and_weights
from minirl.rewards.reward_model import load_reward_model
from minirl.rewards.reward_workers import RewardWorkers
from minirl.rollouts import RolloutId, appended, rollout_of, token_tensor
from support.rollouts import make_prompts, make_rollout, reward_rollouts, rewards_of_call
from support.texts import TEMPLATE, TOKENS, ids, save_tokenizer

ROW = Row("one?", {"answer": 1, "level": "easy", "messages": "of the file"}, "f.jsonl:1")
CHAT_ROW = Row([{"role": "user", "content": "two?"}], {"answer": 2}, "f.jsonl:2")


CPU = torch.device("cpu")
REWARD_TOKENS = (*"0123456789", *reversed(TOKENS))  # the reward model's: other ids, and more of them
POSITIONS = 64


def rewards_of(function, row=ROW, completions=("1", "2")):
    return rewards_of_call(function, row, completions)


def test_a_function_gets_the_arguments_that_it_names_or_with_kwargs_every_column():
    """TRL's shape: lists by keyword; chat in, chat out."""
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
        "level": ["easy"] * 2,
        "messages": ["of the file"] * 2,
    }
    assert rewards_of(lambda prompts, completions: [float(len(prompts[0][0])), 0], CHAT_ROW) == [2.0, 0.0]
    assert rewards_of(lambda completions: [float(c[0]["content"]) for c in completions], CHAT_ROW) == [1, 2]
    # What episodes give must be named.
    assert arguments_of(everything, {"messages": [3], "answer": [1]}, ["answer"]) == {"answer": [1]}
    scaled = functools.partial(lambda scale, answer, *, level="unused": [scale * a for a in answer], 10)
    assert rewards_of(scaled) == [10.0, 10.0]
    with pytest.raises(ZeroDivisionError):  # the user needs their own traceback
        rewards_of(lambda completions: [1 / 0])


def test_a_reward_may_be_in_any_file_or_module_and_import_what_lies_beside_it(tmp_path, monkeypatch):
    """Colons in the folder's name do no harm, nor does a module of the user's that is called like one of ours.

    Modules are found in the working directory and among installed packages.
    """
    folder = tmp_path / "a:b"
    package = folder / "in_parts"
    package.mkdir(parents=True)
    (folder / "batch.py").write_text("BONUS = 2\n")
    (folder / "mine.py").write_text(
        "import batch\ndef score(completions):\n    return [batch.BONUS for _ in completions]\n"
    )
    (package / "bonus.py").write_text("BONUS = 3\n")
    (package / "scores.py").write_text(
        "from in_parts.bonus import BONUS\ndef score(completions):\n    return [BONUS] * len(completions)\n"
    )
    assert rewards_of(RewardWorkers(f"{folder}/mine.py:score")) == [2.0, 2.0]
    monkeypatch.chdir(folder)
    assert rewards_of(RewardWorkers("in_parts.scores:score")) == [3.0, 3.0]
    installed = RewardWorkers("minirl.data.gsm8k:strict_score")
    assert rewards_of(installed, Row("q", {"answer": 4.0}, "f:1"), ["#### 4", "#### 5"]) == [1.0, 0.0]


ASYNC_REWARD = """
import asyncio

async def score(completions):
    all_have_begun = asyncio.Barrier(len(completions))

    async def score_one(completion):
        await all_have_begun.wait()
        return None if completion == "b" else float(len(completion))

    return await asyncio.gather(*map(score_one, completions))
"""


def test_an_async_function_is_waited_for_and_its_completions_run_side_by_side(tmp_path):
    """Ten completions of which none ends before all have begun, in a process and here."""
    (tmp_path / "mine.py").write_text(ASYNC_REWARD)
    for score in (RewardWorkers(f"{tmp_path}/mine.py:score"), runpy.run_path(f"{tmp_path}/mine.py")["score"]):
        assert rewards_of(score, ROW, ["aaa", "b"] * 5) == [3.0, None] * 5


def save_model(folder, auto_class, **keys):
    """A random transformers model whose scores differ clearly, over the reward model's vocabulary."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    keys |= {"vocab_size": len(REWARD_TOKENS), "max_position_embeddings": POSITIONS}
    torch.manual_seed(0)
    model = auto_class.from_config(LlamaConfig(initializer_range=0.5, **sizes, **keys))
    model.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module", params=[None, "<eos>"], ids=["no_pad", "pad_is_eos"])
def reward_folder(request, tmp_path_factory):
    """A classifier with its own tokenizer, and how transformers scores a text with its special tokens written out.

    Where config.json has a pad token, transformers reads the score at the last token that is another.
    """
    folder = tmp_path_factory.mktemp("reward_model")
    template = TEMPLATE.replace("{{ bos_token }}", "{{ bos_token }}{{ style or '' }}")
    save_tokenizer(folder, template, tokens=REWARD_TOKENS)
    pad = request.param and REWARD_TOKENS.index(request.param)
    oracle = save_model(folder, AutoModelForSequenceClassification, num_labels=1, pad_token_id=pad)

    @torch.no_grad()
    def score(text):
        return oracle(torch.tensor([ids(text, REWARD_TOKENS)])).logits.item()

    return folder, score


def load(folder, *, chat=False, max_tokens=1000, **options):
    options |= {"chat": chat, "max_tokens": max_tokens}
    return load_reward_model(folder, dtype=torch.float32, device=CPU, **options)


close_to = functools.partial(pytest.approx, rel=1e-5, abs=1e-5)


CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("ab,", {}, "<bos>ab,{}<eos>"),
        (CHAT, {}, "<bos><turn>system:be kind<turn>user:hello<turn>assistant:{}"),
        ("ab,", {"chat": True}, "<bos><turn>user:ab,<turn>assistant:{}"),
        (CHAT, {"chat": True}, "<bos><turn>system:be kind<turn>user:hello<turn>assistant:{}"),
        # Those of --chat-template-kwargs.
        (
            "ab,",
            {"chat": True, "template_arguments": {"style": "brief"}},
            "<bos>brief<turn>user:ab,<turn>assistant:{}",
        ),
    ],
    ids=["text", "messages", "chat", "chat_messages", "template_arguments"],
)
def test_a_reward_model_scores_what_transformers_scores(reward_folder, prompt, options, expected):
    """Text ends in one EOS, messages go through its own template; the score is that of the last token."""
    folder, oracle = reward_folder
    completions = ["", "a", " so it is.", "a" * 20]
    got = rewards_of(load(folder, **options), Row(prompt, {}, "f:1"), completions)
    assert got == close_to([oracle(expected.format(text)) for text in completions])
    assert max(got) - min(got) > 0.1


def test_a_reward_model_scores_the_whole_conversation_of_several_turns(reward_folder):
    """Also where the first answer continues the prompt's last message. Pitfall 18."""
    folder, oracle = reward_folder
    prompt = [*CHAT, {"role": "assistant", "content": "i"}]
    answers = [
        {"role": "assistant", "content": "is."},
        {"role": "user", "content": "so"},
        {"role": "assistant", "content": "a b"},
    ]
    text = "<bos><turn>system:be kind<turn>user:hello<turn>assistant:iis.<turn>user:so<turn>assistant:a b"
    assert load(folder)([prompt], [answers]) == close_to([oracle(text)])


def test_reward_model_scores_depend_on_neither_budget_nor_neighbours(reward_folder):
    """Any number of texts in a forward, in any order: each text keeps its score. Pitfall 18."""
    folder, _ = reward_folder
    prompts = ["ab", "c,d ", "e" * 20, "f", "g g"]
    completions = ["x" * n for n in (1, 30, 7, 0, 3)]
    whole = load(folder)(prompts, completions)
    assert torch.tensor(whole).std() > 0.1
    places = [3, 1, 4, 0]
    some = load(folder, max_tokens=40)([prompts[i] for i in places], [completions[i] for i in places])
    assert some == pytest.approx([whole[i] for i in places], abs=2e-6)


@pytest.mark.parametrize(
    ("max_tokens", "fits"), [(20, 20), (1000, POSITIONS)], ids=["microbatch", "positions"]
)
def test_a_text_too_long_for_the_reward_model_is_refused(reward_folder, max_tokens, fits):
    """One of exactly the limit is scored; one more token names the flag, the folder, both numbers and a way out."""
    folder, _ = reward_folder
    is_eos_read = json.loads((folder / "config.json").read_text())["pad_token_id"] is None
    model, others = load(folder, max_tokens=max_tokens), 1 + is_eos_read  # <bos>, <eos>
    assert len(model(["a", "a"], ["b", "b" * (fits - 1 - others)])) == 2
    said = rf"--reward-model {folder}: a text of {fits + 1} tokens, {fits} fit; see --max-new-tokens"
    with pytest.raises(RewardError, match=said):
        model(["a", "a"], ["b", "b" * (fits - others)])


def test_overlong_penalty_is_the_reference_row():
    """L_max 20, L_c 8: nothing up to 12 tokens, then linearly to -1 at 20, and never beyond. Pitfall 27."""
    lengths = [0, 8, 12, 13, 16, 18, 20, 21, 100]
    rollouts = [rollout_of(RolloutId(0, 0), token_tensor([1]), appended([7] * n), "") for n in lengths]
    penalties = OverlongPenalty(limit=20, buffer=8)(rollouts)
    assert penalties == [0, 0, 0, -0.125, -0.5, -0.75, -1, -1, -1]


def test_rewards_come_before_what_is_only_logged_and_have_their_weights():
    """In their own order, 1 each unless weighted; logged-only ones weigh exactly 0 and take no weight."""
    rewards, logged = {"b": min, "a": max}, {"seen": sum}
    functions, weights = functions_and_weights(rewards, (), logged=logged)
    assert list(functions.items()) == [("b", min), ("a", max), ("seen", sum)]
    assert (weights.dtype, weights.tolist()) == (torch.float64, [1, 1, 0])
    assert functions_and_weights(rewards, (0.5, 0.0), logged=logged)[1].tolist() == [0.5, 0, 0]
    with pytest.raises(InputError, match=r"--reward-weights 1.0: the rewards are b, a$"):
        functions_and_weights(rewards, (1.0,), logged=logged)


def test_rollouts_rows_texts_and_rewards_stay_aligned_judged_in_parts_joined_and_selected(tmp_path):
    """Rows go by ordinals, not by texts, rewards [N, K] by functions; the sampled ids stay. Pitfalls 15 and 16.

    Where a rank has no rollouts, no function is called. An empty completion is judged: fault 29.
    """
    prompts = make_prompts(tmp_path, [Row("same", {"answer": i}, f"f:{i}") for i in (1, 2)])
    rollouts = [make_rollout(prompts, o, s, f"{'a' * s}<eos>") for s, o in enumerate((3, 0, 0, 1, 2))]
    functions = {"answer": lambda answer: answer, "letters": lambda completions: list(map(len, completions))}
    none = reward_rollouts(dict.fromkeys(functions, lambda: pytest.fail("called")), prompts, [])
    first, rest = (reward_rollouts(functions, prompts, part) for part in (rollouts[:1], rollouts[1:]))
    for places, judged in ((range(5), first + none + rest), ([3, 0], (first + rest).select([3, 0]))):
        assert judged.rollouts == [rollouts[i] for i in places]
        assert judged.rows == [prompts.row(rollouts[i].rollout_id.prompt_ordinal) for i in places]
        assert judged.texts == ["a" * i for i in places]
        expected = [[row.columns["answer"], i] for row, i in zip(judged.rows, places, strict=True)]
        assert judged.rewards.tolist() == expected
    for empty in (none, first.select([])):
        assert (empty.rewards.shape, empty.rewards.dtype) == ((0, 2), torch.float64)
