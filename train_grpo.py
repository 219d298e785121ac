"""GRPO: group-relative policy optimization of a language model, arXiv:2402.03300.

    torchrun --standalone --nproc-per-node 2 train_grpo.py              # embedded model and task, on CPU or GPU
    torchrun --nproc-per-node 8 train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --task gsm8k --data train.jsonl --eval-data test.jsonl
    python train_grpo.py --model DIR --data my.jsonl --reward my_reward.py:score

Each step: generate group_size completions of each prompt, reward them, score them under the reference (if there is a
KL term), update on sum over tokens of

    loss_weight * (max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef * KL),   r = exp(new - old)

Where this departs from the paper: (1) the token mean over the whole step replaces the mean of sequence means (DAPO);
(2) no KL term by default; (3) clip_high > clip_low.
`--loss-norm sequence_mean --kl-coef 0.04 --clip-high 0.2` is the paper.
"""

import dataclasses
import random
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro

from minirl import distributed
from minirl.advantages import group_advantages, loss_weights
from minirl.batch import Rollout, RolloutId, exchange, gather_table, plan_updates
from minirl.checkpoint import new_run_folder, runs_root, save_checkpoint
from minirl.data import Prompts, Tokenizer
from minirl.distributed import print0, rank, world_size
from minirl.engine import Engine, Request
from minirl.losses import clipped_policy_loss, kl_penalty
from minirl.metrics import Logger, StepMetrics, add_gap, add_rollouts, add_tokens, console_line, with_rates
from minirl.parallel import ShardedModel, learning_rate
from minirl.rewards import compute_rewards
from minirl.sampling import request_key
from minirl.scoring import score, score_frozen
from minirl.tasks import RewardFunction, Row
from minirl.tasks.load import load_task
from minirl.toy import toy_folder
from minirl.weights import load_replica, read_config, resolve_folder

# torchrun refuses --run, which it takes for an abbreviation of its own --run-path: there --run-name is the one to use.
RunName = Annotated[str | None, tyro.conf.arg(aliases=["--run"])]


@dataclass(frozen=True)
class Config:
    # What to train
    model: str | None = None  # Hugging Face folder or hub id; none: a tiny embedded model
    task: Literal["auto", "sorting", "gsm8k", "jsonl"] = "auto"  # auto: jsonl with --data, else sorting
    data: str | None = None  # JSONL file of training prompts
    eval_data: str | None = None  # JSONL file of held-out prompts
    prompt_field: str = "prompt"  # field of a jsonl row that holds the prompt: text or chat messages
    reward: str | None = None  # file.py:function, called as f(prompts, completions, **columns) -> list of numbers
    chat: bool = False  # wrap text prompts in the model's chat template
    run_name: RunName = None  # folder of the run in ./runs or $MINIRL_RUNS; none: grpo-<time>
    # Generate
    num_steps: int = 300  # steps, each with fresh rollouts
    prompts_per_step: int = 16  # prompts per step, over all ranks
    group_size: int = 8  # completions per prompt
    max_new_tokens: int | None = None  # limit of a completion; none: the task's (sorting 10, gsm8k 512, jsonl 256)
    temperature: float = 1.0  # sampling temperature; logprobs are taken at the same
    max_rows: int = 256  # sequences that a rank decodes at a time
    cache_tokens: int = 65536  # tokens that a rank's key/value cache holds, per layer
    # Update
    lr: float | None = None  # peak learning rate; none: 1e-6, and 2e-4 for the embedded model
    lr_schedule: Literal["constant", "linear"] = "linear"  # after the warm-up
    warmup_updates: int = 5  # optimizer steps of linear warm-up
    num_epochs: int = 1  # passes over a step's rollouts
    num_minibatches: int | None = None  # optimizer steps per pass; none: 1, and 2 for the embedded model
    max_tokens_per_microbatch: int = 8192  # tokens of one forward and backward on a rank
    advantage_norm: Literal["mean", "mean_std"] = "mean_std"  # mean: R - mean (Dr.GRPO); mean_std: also / std (GRPO)
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # DAPO; GRPO; Dr.GRPO
    clip_low: float = 0.2  # ratios below 1 - clip_low lose their gradient if the advantage is negative
    clip_high: float = 0.28  # ratios above 1 + clip_high lose their gradient if the advantage is positive
    kl_coef: float = 0.0  # weight of the KL term in the loss; 0: no reference model is loaded
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # k1 has no gradient in expectation: only to be watched
    max_grad_norm: float = 1.0  # gradient clipping; 0: none
    weight_decay: float = 0.0  # AdamW's
    # Report
    eval_every: int = 50  # steps between greedy evaluations on the held-out rows; 0: only before and after
    eval_rows: int = 256  # held-out rows used, at most
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    # Machine
    seed: int = 0  # of prompts' order and sampling noise
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute; masters are fp32; auto: bfloat16 on cuda
    threads: int = 1  # CPU threads per rank; with more than one, sampled and training logprobs may differ by a rounding
    recompute_layers: bool = False  # recompute activations in backward: less memory, a third more time


def check(config: Config) -> None:
    """Refuse what cannot mean anything, before anything is loaded."""
    positive = (
        "num_steps prompts_per_step max_new_tokens temperature max_rows cache_tokens lr num_epochs num_minibatches"
    )
    for name in (*positive.split(), "max_tokens_per_microbatch", "threads"):
        if (value := getattr(config, name)) is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be greater than 0")
    if config.group_size < 2:
        raise ValueError(f"--group-size {config.group_size}: must be at least 2, the group's mean is the baseline")
    if (config.num_minibatches or 1) > config.prompts_per_step * config.group_size:
        raise ValueError(f"--num-minibatches {config.num_minibatches}: there are fewer rollouts in a step")
    if config.model and not config.data:
        raise ValueError("--model needs --data FILE.jsonl, with --reward FILE.py:FUNCTION or --task gsm8k")


def is_due(every: int, step: int, num_steps: int) -> bool:
    """Whether something that happens every `every` steps (0: only at the end) happens after this step."""
    return step == num_steps or (every > 0 and step % every == 0)


def main(config: Config) -> None:
    check(config)
    files = {"data": config.data, "eval_data": config.eval_data, "reward": config.reward}
    task = load_task(config.task, prompt_field=config.prompt_field, **files)
    device = distributed.start(device=config.device, threads=config.threads)
    auto_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    source = resolve_folder(config.model) if config.model else toy_folder(runs_root())
    shape, tokenizer = read_config(source), Tokenizer(source, chat=config.chat)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    longest = min(shape.max_position_embeddings, config.cache_tokens, config.max_tokens_per_microbatch)
    max_prompt_tokens = longest - max_new_tokens  # longer prompts are left out
    prompts = Prompts(task.train_rows, tokenizer, max_prompt_tokens=max_prompt_tokens, seed=config.seed)
    held_out = Prompts(task.eval_rows[: config.eval_rows], tokenizer, max_prompt_tokens=max_prompt_tokens)
    run = new_run_folder(config.run_name or distributed.agree(time.strftime("grpo-%Y%m%d-%H%M%S")))

    policy = ShardedModel(shape, source, dtype=dtype, device=device, recompute_layers=config.recompute_layers)
    optimizer = policy.make_optimizer(betas=(0.9, 0.95), weight_decay=config.weight_decay)
    reference = load_replica(source, dtype=dtype) if config.kl_coef else None
    engine = Engine(
        policy.module, max_rows=config.max_rows, cache_tokens=config.cache_tokens, dtype=dtype, device=device
    )
    is_exact = config.threads == 1 and shape.is_row_invariant(dtype, device)
    peak_lr = config.lr or (1e-6 if config.model else 2e-4)
    num_minibatches = config.num_minibatches or (1 if config.model else 2)
    updates_per_step = config.num_epochs * num_minibatches
    clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}

    chosen = {"lr": peak_lr, "num_minibatches": num_minibatches, "max_new_tokens": max_new_tokens, "model": str(source)}
    logger = Logger(run, {**dataclasses.asdict(config), **chosen, "command": sys.argv}, wandb_mode=config.wandb)
    print0(f"model {source}, {world_size()} x {device.type} {dtype}, sampled == training logprobs bitwise: {is_exact}")
    print0(f"task {task.name}: {len(prompts.rows)} prompts ({prompts.num_skipped} too long, left out), run {run}")

    def generate(
        source: Prompts, chosen: list[tuple[int, RolloutId]], *, purpose: str, temperature: float
    ) -> list[Rollout]:
        """Rollouts of this rank's (row of `source`, id) pairs, in their order."""
        requests = []
        for row, rollout_id in chosen:
            key = request_key(config.seed, purpose=purpose, prompt=rollout_id.prompt, sample=rollout_id.sample)
            requests.append(
                Request(source.tokens[row], rollout_id, key, max_new_tokens, temperature, tokenizer.stop_ids)
            )
        return engine.generate(requests, weight_version=update)

    def judge(function: RewardFunction, rows: list[Row], rollouts: list[Rollout], texts: list[str]) -> list[float]:
        """Rewards of this rank's rollouts of these rows' prompts, whose completions read `texts`."""
        ids = [rollout.completion for rollout in rollouts]
        return compute_rewards(function, rows, completions=texts, completion_ids=ids)

    def evaluate() -> dict[str, float]:
        """Mean greedy scores over the held-out rows, sharded over ranks (collective)."""
        mine = [(i, RolloutId(i, 0)) for i in range(rank(), len(held_out.rows), world_size())]
        rollouts = generate(held_out, mine, purpose="eval", temperature=0.0)
        texts = [tokenizer.decode(rollout.completion) for rollout in rollouts]
        scores = StepMetrics()
        for name, function in {"reward": task.reward, **task.extra_scores}.items():
            rewards = judge(function, [held_out.rows[i] for i, _ in mine], rollouts, texts)
            scores.add(f"eval/{name}", sum(rewards), len(rewards))
        return scores.reduce()

    update = 0  # optimizer steps taken: the version of the weights
    before = evaluate()
    print0("held-out before training:", before or "no held-out rows; see --eval-data")

    for step in range(1, config.num_steps + 1):
        metrics = StepMetrics()

        with metrics.timer("generate"):
            first = (step - 1) * config.prompts_per_step
            served = prompts.batch(first, config.prompts_per_step)
            wanted = [(row, RolloutId(first + p, s)) for p, row in enumerate(served) for s in range(config.group_size)]
            share = slice(len(wanted) * rank() // world_size(), len(wanted) * (rank() + 1) // world_size())
            rollouts = generate(prompts, wanted[share], purpose="train", temperature=config.temperature)

        with metrics.timer("reward"):
            rows = [prompts.rows[row] for row, _ in wanted[share]]
            texts = [tokenizer.decode(rollout.completion) for rollout in rollouts]
            rewards = judge(task.reward, rows, rollouts, texts)
            table = gather_table(rollouts, rewards)
            grouped = table.reward.view(config.prompts_per_step, config.group_size)
            advantages = group_advantages(grouped, norm=config.advantage_norm).flatten()

        with metrics.timer("score"):
            plan = plan_updates(
                table.num_tokens.tolist(),
                num_minibatches=num_minibatches,
                num_ranks=world_size(),
                max_tokens=config.max_tokens_per_microbatch,
            )
            weights = [
                loss_weights(table.num_loss_tokens[part], norm=config.loss_norm, constant=max_new_tokens)
                for part in plan.minibatches
            ]
            batch = exchange(rollouts, table, plan.rank_of)
            batch = batch.replace(
                advantages=batch.spread(advantages[batch.row].float()),
                loss_weights=batch.spread(torch.cat(weights)[batch.row].float()),
            ).to(device)
            minibatches = plan.of_rank(rank())
            microbatches = [sequences for minibatch in minibatches for sequences in minibatch]
            if updates_per_step > 1:  # with one update, the old policy is the new one and the ratio exactly 1
                scored = None if is_exact else score_frozen(policy.module, batch, microbatches, config.temperature)
                batch = batch.replace(old_logprobs=batch.sample_logprobs if scored is None else scored)
            if reference is not None:
                reference.to(device)
                batch = batch.replace(ref_logprobs=score_frozen(reference, batch, microbatches, config.temperature))
                reference.to("cpu")  # parked until the next step

        with metrics.timer("update"):
            for epoch in range(config.num_epochs):
                order = random.Random(f"{config.seed} {step} {epoch}")
                for minibatch in order.sample(minibatches, len(minibatches)):
                    for i, sequences in enumerate(minibatch):
                        micro = batch.select(sequences)
                        new, entropy = score(
                            policy.module,
                            micro.tokens,
                            micro.layout(),
                            select=micro.loss_mask,
                            temperature=config.temperature,
                        )
                        old = new.detach() if micro.old_logprobs is None else micro.old_logprobs
                        loss = clipped_policy_loss(new, old, micro.advantages, **clip)
                        if reference is not None:
                            loss = loss + config.kl_coef * kl_penalty(new, micro.ref_logprobs, config.kl_estimator)
                        policy.backward((micro.loss_weights * loss).sum(), is_last=i == len(minibatch) - 1)
                        add_tokens(metrics, micro, new.detach(), old, entropy.detach(), **clip)
                        if update % updates_per_step == 0:  # no update yet since these were sampled
                            add_gap(metrics, micro, new.detach())
                    lr = learning_rate(
                        update,
                        config.num_steps * updates_per_step,
                        peak=peak_lr,
                        warmup_updates=config.warmup_updates,
                        schedule=config.lr_schedule,
                    )
                    metrics.add("optim/lr", lr)
                    metrics.add("optim/grad_norm", policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm))
                    update += 1

        with metrics.timer("report"):
            add_rollouts(metrics, rollouts, grouped_rewards=grouped)
            for name, function in task.extra_scores.items():
                metrics.add_values(f"reward/{name}", torch.tensor(judge(function, rows, rollouts, texts)))
            metrics.add("count/epoch", prompts.epoch(first))
            evaluated = evaluate() if is_due(config.eval_every, step, config.num_steps) else {}
            if is_due(config.save_every, step, config.num_steps):
                saved = save_checkpoint(run, step, policy, source=source)
            logger.log_rollouts(step, rollouts, rows, texts, rewards, advantages[share].tolist())
        values = with_rates(metrics.reduce()) | evaluated
        logger.log(step, values)
        print0(console_line(step, config.num_steps, values))

    logger.finish()
    for name, score_before in before.items():
        print0(f"held-out {name}: {score_before:.3f} before, {evaluated[name]:.3f} after")
    print0(f"saved {saved}; load it with AutoModelForCausalLM.from_pretrained({str(saved)!r})")
    distributed.stop()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
