"""Every example of docs/examples trains two steps and resumes to the same bits."""

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minirl.data.sorting import load_sorting
from minirl.files.user_code import find_functions
from support.collecting import CHAT, collected, make_collector, unhurried
from support.models import RAW_CONFIG, make_folder
from support.resuming import resume
from support.scripts import ROOT, patched_fork, read_metrics, reward_of, trained, write_rows
from support.texts import TOKENS, save_tokenizer

EXAMPLES = ROOT / "docs" / "examples"
TURN_REWARDS = ROOT / "docs" / "objectives" / "turn_rewards.diff"
# Stand-ins for packages that are not installed, written next to the example.
STAND_INS = {
    "openenv_client.py": (
        "openenv/core/generic_client.py",
        """
import os, types

os.environ.setdefault("OPENENV_URL", "http://127.0.0.1:1")

class GenericEnvClient:
    def __init__(self, base_url):
        assert base_url.startswith("http")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def reset(self, seed):
        self.said = []
        return self._result(None)

    async def step(self, action):
        self.said.append(action["message"])
        return self._result(0.5)

    def _result(self, reward):
        done = len(self.said) == 2
        return types.SimpleNamespace(observation={"said": len(self.said)}, reward=reward, done=done)
""",
    ),
    "textarena_game.py": (
        "textarena.py",
        """
class Game:
    def reset(self, num_players, seed):
        self.seen = "[GAME] go"

    def get_observation(self):
        return 0, self.seen

    def step(self, action):
        self.seen += f"[Player] {action}[GAME] no"
        return self.seen.count("Player") == 3, {}

    def close(self):
        return {0: 0.5}, {}

def make(game):
    assert game == "GuessTheNumber-v0"
    return Game()
""",
    ),
    "skyrl_env.py": (
        "skyrl_gym.py",
        """
class Env:
    def init(self, prompt):
        self.turns = 0
        return prompt, {}

    def step(self, action):
        self.turns += 1
        observations = [{"role": "user", "content": "Now provide the answer"}]
        return {"observations": observations, "reward": 0.1, "done": self.turns == 3, "metadata": {}}

    def close(self):
        pass

def make(env_class, env_config, extras):
    assert extras["reward_spec"]["ground_truth"] == "7"
    return Env()
""",
    ),
    "reasoning_gym_rows.py": (
        "reasoning_gym/__init__.py",
        """
import sys, types

utils = sys.modules["reasoning_gym.utils"] = types.ModuleType("reasoning_gym.utils")
utils.extract_answer = lambda text: text

def get_score_answer_fn(name):
    assert name == "sums"
    return lambda answer, entry: float(answer == entry["answer"])
""",
    ),
    # A verifiers environment; the package's `null` harness runs without `uv`, which would need the network.
    "verifiers_env.py": (
        "sort_letters.py",
        """
import sys

import verifiers.v1 as vf
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

__all__ = ["Letters", "Asks"]

async def prepare(self, script, *_, **__):
    await self.write("chat.py", script.encode())
    return [sys.executable, "chat.py"]

SubprocessRuntime.prepare_uv_script = prepare

class Data(vf.TaskData):
    answer: str

class Sort(vf.Task[Data]):
    @vf.reward(weight=0.5)
    async def is_sorted(self, trace):
        assert (trace.num_turns, self.data.answer) == (2, "abc")
        return len(trace.assistant_messages[-1].content or "") % 5

class Asks(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("Check it.")

class Letters(vf.Taskset[Sort, vf.TasksetConfig]):
    def load(self):
        return []
""",
    ),
}
# Examples that need a real package.
PACKAGES = {"openai_agent.py": "openai", "verifiers_env.py": "verifiers"}
COLUMNS = {
    "game": "GuessTheNumber-v0",
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"ground_truth": "7"},
    "answer": 7.0,
    "entry": {"answer": "7", "metadata": {"source_dataset": "sums"}},
    "env": {
        "taskset": {"id": "sort-letters"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    },
    "task": {"prompt": "sort cab", "system_prompt": "Be short.", "answer": "abc"},
}
SMALL = "--prompts-per-step 4 --group-size 4"
# Few of the model's first moves are legal.
PLAYING = "--group-size 32 --temperature 1.5 --max-turns 12 --reward episode"
CHATTING = f"--model {{chat}} --chat --data {{rows}} --max-new-tokens 150 {SMALL} --reward {{mine}}"
NINES = f"{EXAMPLES}/no_nines.py"
# Flags of each example.
FLAGS = {
    "sft.py": "",
    "reward_model.py": "--data {pairs} --eval-data {pairs} --frozen-layers 2",
    "safe_ppo.patch": f"{SMALL} --reward {NINES}:right {NINES}:cost --cost-threshold 0.1 --kl-reward-coef 0.1",
    "no_nines.py": f"{SMALL} --reward {NINES}:right",
    "ema_reference.patch": f"{SMALL} --kl-coef 0.1 --ema-decay 0.75",
    "vocabulary_kl.patch": f"{SMALL} --teacher {{teacher}} --temperature 0.7",
    "replay_buffer.patch": f"{SMALL} --replayed-prompts 3",
    "success_replay.patch": f"{CHATTING} --prompts-per-step 8 --success 4",
    "curriculum.patch": f"{SMALL} --first-share 0.05 --master 0",
    "turn_rewards_ppo.patch": f"{PLAYING} --rollout {EXAMPLES}/self_play.py:play",
    "self_play.py": f"{PLAYING} --rollout {{example}}:play",
    "opponent.py": f"{PLAYING} --rollout {{example}}:play",
    "process_rewards.py": f"{CHATTING} --rollout {{example}}:solve",
    "tree_search.py": f"{SMALL} --rollout {{example}}:search --reward episode episode:right --reward-weights 1 0",
    "calculator.py": f"{SMALL} --task calculator --rollout {{example}}:calculator --reward {{mine}}",
    "openai_agent.py": f"{CHATTING} episode --rollout {{example}}:agent",
    "text_game.py": f"{CHATTING} episode --rollout {{example}}:play",
    "openenv_client.py": f"{CHATTING} episode --rollout {{example}}:play",
    "textarena_game.py": f"{CHATTING} episode --rollout {{example}}:play",
    "skyrl_env.py": f"{CHATTING} episode --rollout {{example}}:interact",
    "reasoning_gym_rows.py": f"{CHATTING} {{example}}:score",
    # Each verifiers episode starts two processes.
    "verifiers_env.py": f"{CHATTING} episode --rollout {{example}}:play --prompts-per-step 2 --group-size 2",
}
# Checks of what an example adds, on the metrics of its two steps.
SHOWN = {
    "reward_model.py": lambda first, second: second["policy/loss"] < first["policy/loss"],
    "safe_ppo.patch": lambda first, second: (
        first["reward/cost_multiplier"] == 1 < second["reward/cost_multiplier"]
    ),
    "ema_reference.patch": lambda _, second: second["policy/kl_ref_k3"] > 0,
    "vocabulary_kl.patch": lambda first, second: first["policy/loss"] == pytest.approx(first["teacher/kl"]),
    "success_replay.patch": lambda first, second: first["reward/replayed"] == 0 < second["reward/replayed"],
    "tree_search.py": lambda first, _: first["reward/episode"] == 0 < first["reward/right"],
    "curriculum.patch": lambda first, second: (
        first["reward/share_of_rows"] == 0.05 < second["reward/share_of_rows"]
    ),
}
COMMON = "--num-steps 2 --save-every 1 --keep-checkpoints 0 --eval-every 2 --num-minibatches 1 --lr 1e-3"


@pytest.fixture
def files(tmp_path):
    """Return the rows, models and rewards that FLAGS names."""
    pairs = []
    for row in load_sorting().train_rows[:64]:
        answer = row.columns["answer"]
        pairs.append({"prompt": row.prompt, "chosen": answer, "rejected": answer[::-1]})
    chat = make_folder(
        tmp_path / "chat", {**RAW_CONFIG, "vocab_size": len(TOKENS), "max_position_embeddings": 4096}
    )
    save_tokenizer(chat, CHAT)
    return {
        "pairs": write_rows(tmp_path / "pairs.jsonl", pairs),
        "rows": write_rows(tmp_path / "rows.jsonl", [{"prompt": f"play {i}", **COLUMNS} for i in "abcdefgh"]),
        "chat": chat,
        "mine": reward_of(tmp_path, "float(len(str(c)) % 5)").partition(" ")[2],
    }


def script_of(example, folder):
    """Return the script to run (the example, its patched fork or train_grpo.py) and the example's path."""
    if example.suffix == ".patch":
        return patched_fork(folder, example, name=example.stem), example
    text = example.read_text()
    if "class Config" in text:
        return str(example), example
    if example.name in STAND_INS:
        name, module = STAND_INS[example.name]
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module)
        example = folder / example.name
        example.write_text(text)
    needs_turns = 'turn.extra["reward"]' in text
    return patched_fork(
        folder, TURN_REWARDS, name=f"turns_{example.stem}"
    ) if needs_turns else "train_grpo.py", example


@pytest.mark.slow
@pytest.mark.parametrize("name", FLAGS)
def test_an_example_trains_and_resumes(two_ranks, runs, tmp_path, files, name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    script, example = script_of(EXAMPLES / name, tmp_path)
    flags = FLAGS[name]
    if "{teacher}" in flags:
        files["teacher"] = (
            trained(two_ranks, runs / "teacher", "train_grpo.py", COMMON) / "checkpoints" / "000002"
        )
    # A token classifier without a head gets a random head, which a resume reuses: a file is loaded once per process.
    two_ranks.run(set_variables, {"OPPONENT": f"{runs}/toy-*", "PRM": str(files["chat"]), "STEP_END": "e"})
    flags = f"{COMMON} {flags.format(**files, example=example)}"
    folder = trained(two_ranks, runs / Path(name).stem, script, flags)
    resume(two_ranks, script, folder, flags)
    first, second = read_metrics(folder)
    assert first["optim/grad_norm"] > 0
    assert SHOWN.get(name, lambda *_: True)(first, second)
    assert first.get("policy/logp_gap_max", 0.0) == 0


def set_variables(rank, variables):
    os.environ.update(variables)


def test_an_opponents_answers_depend_on_its_newest_folder_alone(tmp_path, files, monkeypatch):
    """Concurrent episodes do not affect the answers."""
    patterns = f"{files['chat']} {tmp_path}/later*"
    monkeypatch.setenv("OPPONENT", patterns)
    (make_opponent,) = find_functions(f"{EXAMPLES}/opponent.py", "Opponent")
    opponent = make_opponent(patterns)

    async def talk(episode):
        turn = await episode.generate(max_tokens=2 + episode.seed % 5)
        said = await opponent.answer(turn.text or "a", key=f"{episode.seed}", max_tokens=9)
        await episode.generate(after=f"a{said}", max_tokens=2)

    def sampled():
        (step,) = collected(make_collector(rollout=unhurried(talk)), 1)
        return step

    before = sampled()
    assert sampled() == before
    weights = load_file(files["chat"] / "model.safetensors")
    later = shutil.copytree(files["chat"], tmp_path / "later1")
    save_file({name: -weight for name, weight in weights.items()}, later / "model.safetensors")
    assert sampled() != before
    newest = -weights["model.embed_tokens.weight"].float()
    assert torch.equal(opponent.model.embed_tokens.weight, newest)


def test_a_process_reward_scores_each_step_at_its_end(data_folder, monkeypatch):
    monkeypatch.setenv("PRM", str(data_folder / "stories260K"))
    score_steps, prm, tokenizer = find_functions(
        f"{EXAMPLES}/process_rewards.py", "score_steps", "MODEL", "TOKENIZER"
    )
    ids = tokenizer("How?")["input_ids"]
    expected = []
    for step in ("So.", "Then this."):
        ids += tokenizer(step, add_special_tokens=False)["input_ids"]
        expected.append(prm(torch.tensor([ids])).logits[0, -1].softmax(-1)[-1].item())
    assert score_steps("How?", ["So.", "Then this."]) == pytest.approx(expected)


def test_the_page_lists_every_example_and_every_patch_applies(tmp_path):
    """If the script has changed, fix the fork and regenerate the patch: `diff -u` of script and fork."""
    listed = re.findall(r"^- \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".patch")}
    assert set(listed) == FLAGS.keys() == files
    for patch in EXAMPLES.glob("*.patch"):
        compile(Path(patched_fork(tmp_path, patch, name=patch.stem)).read_text(), patch.stem, "exec")
