"""Measure decode, prefill and update of real-size models with random weights, relative to a GPU's limits.

    python benchmarks/cuda_decode.py qwen2.5-1.5b [--requests 64 256 1024] [--kernels FILE]

Groups of 8 requests share prompts of 512 tokens. The decode roofline is the memory bandwidth: a step reads the weights
once, and each request's keys and values once. MFU (model FLOPs utilization) counts 2 x parameters x tokens for prefill
and 6 x for an update. The shape `tiny` also runs on the CPU, to test the program.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile
from workload import PhaseClock, docstring_parser, make_requests, print_result

from minirl.generation.engine import Engine
from minirl.model.config import ModelConfig
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import write_folder
from minirl.ranks import launch, process_group
from minirl.rollouts import SampledSequence
from minirl.run.budget import Sizes, Workload, compute_budget, num_parameters
from minirl.training.batch import pack
from minirl.training.scoring import score_batch
from minirl.training.sharded_model import ShardedModel

COMMON: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
    },
}
# Limits per card: memory bandwidth in bytes/s, and dense bf16 FLOP/s.
LIMITS = {
    "H100": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100": (2.0e12, 312e12),
}
GROUP_SIZE = 8
PROMPT_LENGTH = 512
NUM_SCORED = 16  # rollouts in the prefill and update measurements
NUM_PROFILED = 20  # decode steps in the kernel table
NEEDS_GPU = ("_gib", "_of_plan", "_of_roofline", "_mfu")  # suffixes of figures that mean nothing on the CPU
# Engine options per mode.
MODES = {
    "plain": {"async_decoding": False, "cuda_graphs": False},
    "async": {"async_decoding": True, "cuda_graphs": False},
    "graphs": {"async_decoding": True, "cuda_graphs": True},
}


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the minimum seconds of three runs after a warm-up."""
    clock = PhaseClock(device)
    seconds = []
    for _ in range(4):
        with clock.phase("run"):
            run()
        seconds.append(clock.take()["run"])
    return min(seconds[1:])


def peak_gib(device: torch.device) -> float:
    """Return peak device memory since the last call, in GiB; 0 on the CPU."""
    if device.type == "cpu":
        return 0.0
    peak = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return peak


def random_model(shape: str, device: torch.device) -> Transformer:
    """Make a model with random bf16 weights."""
    with device:
        model = Transformer(config_from_dict(COMMON | SHAPES[shape])).to(torch.bfloat16)
    # With embeddings at full scale and tied to the head, the next token would be almost certain.
    model.model.embed_tokens.weight.data.mul_(0.05)
    return model


def write_random_model(shape: str, folder: Path) -> ModelConfig:
    """Write a model with random bf16 weights to a folder, without a tokenizer."""
    model = random_model(shape, torch.device("cpu"))
    write_folder(folder, dict(model.named_parameters()), config=COMMON | SHAPES[shape])
    return model.config


def make_policy(shape: str, device: torch.device) -> ShardedModel:
    """Make a random model by loading it from a folder, as a run does."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_random_model(shape, Path(folder))
        return ShardedModel(config, Path(folder), dtype=torch.bfloat16, device=device, recompute_layers=True)


def decode(
    model: Transformer,
    num_requests: int,
    steps: int,
    mode: str,
    device: torch.device,
    kernels: Path | None = None,
) -> tuple[float, list[SampledSequence]]:
    """Return decode tokens per second with all requests running, and some of the rollouts.

    Requests have 2 x `steps` new tokens, so that all of them still run while `timed` decodes `steps` tokens each.
    kernels: file for a kernel table of NUM_PROFILED more steps.
    """
    max_new_tokens = 2 * steps
    num_prompts = num_requests // GROUP_SIZE
    prompts = torch.randint(model.config.vocab_size, (num_prompts, PROMPT_LENGTH)).tolist()
    requests = make_requests(
        list(map(tuple, prompts)), first=0, samples=GROUP_SIZE, max_new=max_new_tokens, stop_ids=frozenset()
    )
    own_tokens = -(-max_new_tokens // 256) * 256  # per request, in whole blocks
    engine = Engine(
        model,
        max_running_requests=num_requests,
        cache_tokens=num_prompts * PROMPT_LENGTH + num_requests * own_tokens,
        dtype=torch.bfloat16,
        device=device,
        **MODES[mode],
    )
    engine.submit(requests)
    while engine.stats.prefill_tokens < num_prompts * PROMPT_LENGTH:
        engine.step()
    steps_per_run = steps // 4
    seconds = timed(lambda: [engine.step() for _ in range(steps_per_run)], device)
    rollouts: list[SampledSequence] = []
    if kernels:
        with profile() as profiled:
            for _ in range(NUM_PROFILED):
                rollouts += engine.step()
        unit = "device" if device.type == "cuda" else "cpu"
        table = profiled.key_averages().table(sort_by=f"self_{unit}_time_total", row_limit=60)
        kernels.write_text(f"{NUM_PROFILED} decode steps of {num_requests} requests, {mode}\n{table}\n")
    while len(rollouts) < num_requests:
        rollouts += engine.step()
    return num_requests * steps_per_run / seconds, rollouts[:NUM_SCORED]


def measure_update(
    policy: ShardedModel,
    rollouts: list[SampledSequence],
    num_parameters: int,
    flops: float,
    device: torch.device,
) -> Iterator[dict[str, float]]:
    """Yield the rollouts' logprob gap, MFU of prefill and update, refresh time, and peak memory of each phase."""
    # Compute each prompt once per rollout, without sharing.
    batch = pack(rollouts).to(device)
    batch = batch.replace(sequences=tuple(one._replace(num_prompt_tokens=0) for one in batch.sequences))
    layout, num_tokens = batch.layout(), len(batch.tokens)

    def forward() -> Tensor:
        logprobs, _ = score_batch(policy.module, batch)
        return logprobs

    with torch.no_grad():
        gap = (forward() - batch.sample_logprobs)[batch.loss_mask].abs()
        prefill_s = timed(lambda: policy.decoder(batch.tokens, layout.positions, layout), device)
    yield {"gap_mean": float(gap.mean()), "gap_max": float(gap.max()), "score_gib": peak_gib(device)}
    yield {"tokens": num_tokens, "prefill_mfu": 2 * num_parameters * num_tokens / prefill_s / flops}

    update_s = timed(lambda: policy.backward(forward().sum(), is_last=True), device)
    update_gib = peak_gib(device)
    yield {"update_mfu": 6 * num_parameters * num_tokens / update_s / flops, "update_gib": update_gib}
    yield {"update_of_plan": update_gib * 2**30 / planned_update_bytes(policy, num_tokens)}

    optimizer = policy.make_optimizer(betas=(0.9, 0.95), weight_decay=0.0)
    policy.step(optimizer, lr=1e-6, max_grad_norm=1.0)
    yield {"refresh_s": timed(policy.refresh_compute_weights, device), "optimizer_gib": peak_gib(device)}


def planned_update_bytes(policy: ShardedModel, num_tokens: int) -> float:
    """Return the planned memory of an update before the optimizer has its moments."""
    config = policy.decoder.config
    work = Workload(
        device_type="cuda",
        free_bytes=0.0,
        num_ranks=1,
        dtype=torch.bfloat16,
        trained_models=[config],
        frozen_models={},
        max_sequence_tokens=num_tokens,
        default_microbatch_tokens=num_tokens,
        step_tokens=num_tokens,
        num_requests=1,
    )
    sizes = Sizes(1, num_tokens, num_tokens, recompute_layers=True, shard_gradients=False)
    weights_and_masters = (2 + 4) * num_parameters(config)
    return weights_and_masters + sum(compute_budget(work, sizes).training_bytes.values())


def measure(
    shape: str, requests: Sequence[int], steps: int = 128, *, kernels: Path | None = None
) -> Iterator[dict[str, float]]:
    """Yield all figures of a shape as they are measured.

    kernels: file for a kernel table. If given, only decode in CUDA graphs is measured, without the weights that
    training needs.
    """
    device = process_group.start()
    policy = None if kernels else make_policy(shape, device)
    model = policy.decoder if policy else random_model(shape, device)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    yield {"parameters": num_parameters, "load_gib": peak_gib(device)}
    card = torch.cuda.get_device_name() if device.type == "cuda" else ""
    # Unknown cards are compared with an H100.
    bandwidth, flops = next((limits for name, limits in LIMITS.items() if name in card), LIMITS["H100"])

    # Bytes of one token's bf16 keys and values in all layers.
    token_bytes = (
        4 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
    )
    mean_length = PROMPT_LENGTH + steps / 2
    for num_requests in requests:
        step_bytes = 2 * num_parameters + num_requests * mean_length * token_bytes
        roofline = num_requests * bandwidth / step_bytes
        for mode in ["graphs"] if kernels else MODES:
            speed, rollouts = decode(model, num_requests, steps, mode, device, kernels)
            name = f"{mode}_{num_requests}"
            yield {
                f"{name}_tok_s": speed,
                f"{name}_of_roofline": speed / roofline,
                f"{name}_gib": peak_gib(device),
            }
    if policy:
        yield from measure_update(policy, rollouts, num_parameters, flops, device)


def main() -> None:
    parser = docstring_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        help="numbers of running requests, multiples of 8",
    )
    parser.add_argument("--steps", type=int, default=128, help="decode steps (default: 128)")
    parser.add_argument(
        "--kernels", type=Path, help="file for a kernel table; only decode in CUDA graphs is measured"
    )
    args = parser.parse_args()
    result: dict[str, float] = {}
    for figures in measure(**vars(args)):
        result |= figures
    print_result(what=f"minirl_cuda_{args.shape}", **result)


if __name__ == "__main__":
    launch.run(main)
