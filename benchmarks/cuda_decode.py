"""Decode, prefill and update of real shapes with random weights on one GPU, beside what the device could do.

    python benchmarks/cuda_decode.py qwen3-0.6b [--bandwidth 3.35e12] [--flops 989e12]

Groups of 8 share prompts of 512 tokens. The roofline: a step reads the weights and each row's keys and values once.
MFU counts 2 (prefill) and 6 (update) x parameters x tokens. `tiny` on the CPU checks the program.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from workload import PhaseClock, print_result

from minirl.generation.engine import Engine, Request
from minirl.generation.sampling import request_key
from minirl.model.attention import PackedLayout
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import write_folder
from minirl.ranks import process_group
from minirl.rollouts import Rollout, RolloutId
from minirl.training.scoring import score
from minirl.training.sharded_model import ShardedModel

QWEN = dict(
    rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", max_position_embeddings=32768, vocab_size=151936
)
KEYS = "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim"
SHAPES = {
    "qwen3-0.6b": ("qwen3", 28, 1024, 3072, 16, 8, 128),
    "qwen2.5-1.5b": ("qwen2", 28, 1536, 8960, 12, 2, 128),
    "qwen3-4b": ("qwen3", 36, 2560, 9728, 32, 8, 128),
    "tiny": ("qwen3", 2, 64, 96, 4, 2, 16),
}
GROUP, PROMPT, MODES = 8, 512, {"plain": (False, False), "late": (True, False), "graphs": (True, True)}


def timed(run: Callable[[], object], device: torch.device) -> float:
    """The least seconds of three runs, after one that does not count."""
    clock, seconds = PhaseClock(device), []
    for _ in range(4):
        with clock.phase("run"):
            run()
        seconds.append(clock.take()["run"])
    return min(seconds[1:])


def peak_gib(device: torch.device) -> float:
    """The most device memory since the last call."""
    if device.type == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def decode(
    policy: ShardedModel, rows: int, steps: int, mode: str, device: torch.device
) -> tuple[float, list[Rollout]]:
    """Tokens per second of `steps` decode steps with all rows running, and some rollouts."""
    new, (late, graphs), requests = 2 * steps, MODES[mode], []
    prompts = torch.randint(0, policy.decoder.config.vocab_size, (-(-rows // GROUP), PROMPT)).tolist()
    for i, sample in (divmod(row, GROUP) for row in range(rows)):
        key = request_key(0, purpose="train", prompt_ordinal=i, sample=sample)
        requests.append(Request(tuple(prompts[i]), RolloutId(i, sample), key, new, 1.0, frozenset()))
    cache_tokens = len(prompts) * PROMPT + rows * -(-new // 256) * 256
    where = dict(dtype=torch.bfloat16, device=device, late=late, graphs=graphs)
    engine = Engine(policy.decoder, max_running_requests=rows, cache_tokens=cache_tokens, **where)
    engine.submit(requests)
    while engine.stats.prefill_tokens < len(prompts) * PROMPT:
        engine.step()
    seconds = timed(lambda: [engine.step() for _ in range(steps // 4)], device)
    rollouts = []
    while len(rollouts) < rows:
        rollouts += engine.step()
    return rows * (steps // 4) / seconds, rollouts[:16]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    for flag, of_an_h100 in (("--bandwidth", 3.35e12), ("--flops", 989e12)):
        parser.add_argument(flag, type=float, default=of_an_h100)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=128)
    args = parser.parse_args()
    device = process_group.start()
    raw = QWEN | dict(zip(KEYS.split(), SHAPES[args.shape], strict=True), tie_word_embeddings=True)
    config = config_from_dict(raw)
    with tempfile.TemporaryDirectory() as folder:
        model = Transformer(config).to(torch.bfloat16)
        model.model.embed_tokens.weight.data.mul_(0.05)  # tied: else the next token is all but certain
        write_folder(Path(folder), dict(model.named_parameters()), config=raw, tokenizer_from=None)
        policy = ShardedModel(
            config, Path(folder), dtype=torch.bfloat16, device=device, recompute_layers=True
        )
    count, found = sum(x.numel() for x in policy.compute_weights.values()), {"load_gib": peak_gib(device)}
    kv_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    for rows in args.rows:
        roofline = rows * args.bandwidth / (2 * count + rows * (PROMPT + args.steps / 2) * kv_bytes)
        for mode in MODES:
            speed, rollouts = decode(policy, rows, args.steps, mode, device)
            found |= {f"{mode}_{rows}_tok_s": speed, f"{mode}_{rows}_of_roofline": speed / roofline}
            found[f"{mode}_{rows}_gib"] = peak_gib(device)
    layout = PackedLayout(tuple(len(r.tokens) for r in rollouts), device)
    streams = zip(*((r.tokens, r.loss_mask, r.sample_logprobs) for r in rollouts), strict=True)
    tokens, select, sampled = (torch.cat(stream).to(device) for stream in streams)
    forward = lambda: score(policy.module, tokens, layout, select=select, temperature=1.0)[0]  # noqa: E731
    with torch.no_grad():
        gap = (forward() - sampled)[select].abs()
        prefill = timed(lambda: policy.decoder(tokens, layout.positions, layout), device)
    found |= {"gap_mean": float(gap.mean()), "gap_max": float(gap.max()), "score_gib": peak_gib(device)}
    found["prefill_mfu"] = 2 * count * len(tokens) / prefill / args.flops
    update = timed(lambda: policy.backward(forward().sum(), is_last=True), device)
    found |= {"update_mfu": 6 * count * len(tokens) / update / args.flops, "update_gib": peak_gib(device)}
    policy.step(policy.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0), lr=1e-6, max_grad_norm=1.0)
    found |= {"refresh_s": timed(policy.refresh, device), "optimizer_gib": peak_gib(device)}
    print_result(what=f"minirl_cuda_{args.shape}", tokens=len(tokens), parameters=count, **found)


if __name__ == "__main__":
    main()
    process_group.stop()
