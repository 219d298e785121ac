"""A real step on the CPU: seconds of its phases and memory of each rank, with a random model of 25M parameters.

    python benchmarks/real_step.py TOKENIZER [--prompts 64] [--group-size 16] [--max-new-tokens 1000] [--num-steps 3]

TOKENIZER is a Hugging Face folder. With random weights over its vocabulary of V, completions have about V tokens if the
limit allows. The reward is a share of letters, so that most groups have something to learn. Linux only.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from long_run import count_steps, resident_mib
from safetensors.torch import save_file
from workload import print_result, prompt_texts, start_script

from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
REWARD = """
def letters(prompts, completions, **kwargs):
    return [text.count("e") / max(1, len(text)) for text in completions]
"""


def make_model(tokenizer: Path, folder: Path, **shape: int) -> int:
    """Write a random model with this tokenizer and SHAPE updated by `shape`; returns its number of parameters."""
    folder.mkdir()
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    stored = json.loads((tokenizer / "config.json").read_text())
    config = {name: stored[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in stored}
    config |= SHAPE | shape
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = Transformer(config_from_dict(config))
    tensors = {}
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and name.endswith("norm.weight")
        tensors[name] = torch.ones(parameter.shape) if is_norm else 0.02 * torch.randn(parameter.shape)
    save_file(tensors, folder / "model.safetensors")
    return sum(tensor.numel() for tensor in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=1000)
    parser.add_argument("--num-steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        num_parameters = make_model(args.tokenizer, root / "model")
        rows = [json.dumps({"prompt": text, "answer": ""}) for text in prompt_texts(256)]
        (root / "data.jsonl").write_text("\n".join(rows))
        (root / "reward.py").write_text(REWARD)
        job = start_script(
            "train_grpo.py",
            *("--run-name", "real"),
            *("--model", str(root / "model")),
            *("--data", str(root / "data.jsonl")),
            *("--reward", f"{root / 'reward.py'}:letters"),
            *("--prompts-per-step", str(args.prompts)),
            *("--group-size", str(args.group_size)),
            *("--max-new-tokens", str(args.max_new_tokens)),
            *("--num-steps", str(args.num_steps)),
            runs=root,
        )
        show(job, root / "real", num_parameters)


def show(job: subprocess.Popen, folder: Path, num_parameters: int) -> None:
    """Watch the ranks until the job ends: the largest resident memory of a rank within each step."""
    peaks: list[float] = []
    while job.poll() is None:
        time.sleep(0.5)
        step = count_steps(folder)
        peaks += [0.0] * (step + 1 - len(peaks))
        peaks[step] = max([peaks[step], *resident_mib_of_ranks(job.pid)])
    assert job.returncode == 0, "the run failed"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step, peak in zip(steps, peaks, strict=False):
        seconds = {name: round(value, 1) for name, value in step.items() if name.startswith("time/")}
        print(f"{seconds}  tokens {step['count/tokens']:.0f}  peak of a rank {peak:.0f} MiB", flush=True)
    print_result(what="real step", parameters=num_parameters, peaks=peaks, steps=steps)


def resident_mib_of_ranks(agent: int) -> list[float]:
    """Resident memory of the processes that torchrun started; empty while they start or end."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text()
        return [resident_mib(int(pid)) for pid in children.split()]
    except (OSError, IndexError):
        return []


if __name__ == "__main__":
    main()
