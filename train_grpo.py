"""GRPO and its family: group-relative policy optimization of a language model, arXiv:2402.03300.

    torchrun --standalone --nproc-per-node 2 train_grpo.py              # embedded model and task, on CPU or GPU
    torchrun --nproc-per-node 8 train_grpo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --task gsm8k --data train.jsonl --eval-data test.jsonl
    python train_grpo.py --model DIR --data my.jsonl --reward my_reward.py:score --algorithm dapo

Each step: generate group_size completions of each prompt, reward them, score them under the reference (if there is a
KL term), update on sum over tokens of

    loss_weight * (max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coef * KL),   r = exp(new - old)

Where this departs from the paper (`--algorithm grpo`): (1) the token mean over all completions of an update
replaces the mean of sequence means (DAPO); (2) no KL term by default; (3) clip_high > clip_low.
"""

import dataclasses
import random
import sys
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import tyro

from minirl import distributed, flags, losses, watch
from minirl.advantages import group_advantages, loss_weights, returns_to_go, select_groups, separate_advantages, whiten
from minirl.batch import exchange, gather_by_row, gather_table
from minirl.checkpoint import Checkpoints
from minirl.data import Prompts, Tokenizer
from minirl.distributed import print0, rank, world_size
from minirl.engine import Engine
from minirl.flags import refuse
from minirl.logger import Logger
from minirl.metrics import StepMetrics, add_gap, add_rewards, add_rollouts, add_tokens, derived
from minirl.parallel import ShardedModel, learning_rate
from minirl.plan import plan_updates
from minirl.rewards import judge, load_reward_model, overlong_penalty, weighted
from minirl.runs import open_run, runs_root
from minirl.scoring import score, score_frozen, unparked
from minirl.tasks.load import load_task
from minirl.toy import toy_folder
from minirl.weights import load_replica, read_config, resolve_folder

# torchrun refuses --run, which it takes for an abbreviation of its own --run-path: there --run-name is the one to use.
RunName = Annotated[str | None, tyro.conf.arg(aliases=["--run"])]

ALGORITHMS: dict[str, dict[str, Any]] = {  # what each sets of Config
    "default": {},
    "grpo": dict(loss_norm="sequence_mean", clip_high=0.2, kl_coef=0.04),
    "dr_grpo": dict(advantage_norm="none", loss_norm="constant", clip_high=0.2),
    "dapo": dict(dynamic_sampling=True, overlong_buffer=0.2, drop_truncated=True),
    "rloo": dict(baseline="leave_one_out", advantage_norm="none", clip_high=0.2, kl_reward_coef=0.05)
    | dict(ratio_level="sequence_sum", loss_norm="sequence_mean"),
    "reinforce++": dict(baseline="none", advantage_norm="none", whiten=True, clip_high=0.2)
    | dict(kl_reward_coef=0.01, kl_reward_level="token"),
    "reinforce++_baseline": dict(advantage_norm="none", whiten=True, clip_high=0.2),
    "remax": dict(baseline="greedy", advantage_norm="none", group_size=1),
    "gspo": dict(ratio_level="sequence_mean", loss_norm="sequence_mean", num_minibatches=4)
    | dict(clip_low=3e-4, clip_high=4e-4),
    "cispo": dict(policy_loss="cispo", clip_low=1.0, clip_high=4.0),
}
Algorithm = Literal[tuple(ALGORITHMS)]


@dataclass(frozen=True)
class Config:
    algorithm: Algorithm = "default"  # a preset of the flags below, see ALGORITHMS; flags that are given win
    # What to train
    model: str | None = None  # Hugging Face folder or hub id; none: a tiny embedded model
    task: Literal["auto", "sorting", "gsm8k", "jsonl"] = "auto"  # auto: jsonl with --data, else sorting
    data: str | None = None  # JSONL file of training prompts
    eval_data: str | None = None  # JSONL file of held-out prompts
    prompt_field: str = "prompt"  # field of a jsonl row that holds the prompt: text or chat messages
    long_prompts: Literal["skip", "error", "left"] = "skip"  # that leave no --max-new-tokens; left: cut from the left
    reward: tuple[str, ...] = ()  # file.py:function ... instead of the task's: f(prompts, completions, **columns)
    reward_timeout: float = 60.0  # seconds for a call of a --reward, after which its process is killed
    on_reward_error: Literal["stop", "zero"] = "stop"  # zero: it counts as 0 for up to 5 % of a call's completions
    reward_model: str | None = None  # Hugging Face folder or hub id of a sequence classifier with one label
    reward_weights: tuple[float, ...] = ()  # of each --reward, --reward-model, the overlong penalty; none: 1
    chat: bool = False  # wrap text prompts in the chat template, the policy's and the reward model's
    run_name: RunName = None  # folder of the run in ./runs or $MINIRL_RUNS, also to resume it; none: grpo-<time>
    resume: Literal["auto", "force", "never"] = "auto"  # the run of that name: with the same flags; anyway; never
    # Generate
    num_steps: int = 300  # steps, each with fresh rollouts
    prompts_per_step: int = 16  # prompts per step, over all ranks
    group_size: int = 8  # completions per prompt
    dynamic_sampling: bool = False  # replace groups whose first rewards are all equal by groups of new prompts
    max_refills: int = 10  # rounds of new prompts, at most; then groups of equal rewards fill the step
    max_new_tokens: int | None = None  # limit of a completion; none: the task's (sorting 10, gsm8k 512, jsonl 256)
    temperature: float = 1.0  # sampling temperature; logprobs are taken at the same
    max_rows: int = 256  # sequences that a rank decodes at a time
    cache_tokens: int = 65536  # tokens that a rank's key/value cache holds, per layer
    # Reward
    overlong_buffer: float = 0.0  # last share of --max-new-tokens over which a penalty grows to 1; 0: none
    baseline: Literal["mean", "leave_one_out", "greedy", "none"] = "mean"  # of a group; greedy: of one more rollout
    advantage_norm: Literal["group_std", "batch_std", "none"] = "group_std"  # std that advantages are divided by
    whiten: bool = False  # then shift and scale them to mean 0 and variance 1 over the step's tokens
    separate_rewards: bool = False  # normalise each of several rewards before they are summed, not their sum
    kl_reward_coef: float = 0.0  # weight of the KL term (k1) in the reward
    kl_reward_level: Literal["sequence", "token"] = "sequence"  # summed before the baseline; per token, after it
    # Update
    lr: float | None = None  # peak learning rate; none: 1e-6, and 2e-4 for the embedded model
    lr_schedule: Literal["constant", "linear"] = "linear"  # after the warm-up
    warmup_updates: int = 5  # optimizer steps of linear warm-up
    num_epochs: int = 1  # passes over a step's rollouts
    num_minibatches: int | None = None  # optimizer steps per pass; none: 1, and 2 for the embedded model
    max_tokens_per_microbatch: int = 8192  # tokens of one forward and backward on a rank
    policy_loss: Literal["clip", "cispo"] = "clip"  # PPO's clipped surrogate; clipped weights, all tokens learn
    ratio_level: Literal["token", "sequence_mean", "sequence_sum"] = "token"  # PPO; GSPO; RLOO
    clip_low: float = 0.2  # under the ratio 1 - clip_low tokens of negative advantage have no gradient (cispo: a bound)
    clip_high: float = 0.28  # over the ratio 1 + clip_high those of positive advantage have none (cispo: a bound)
    dual_clip: float = 0.0  # ratios above it lose their gradient if the advantage is negative; 0: none do
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # DAPO; GRPO; Dr.GRPO
    drop_truncated: bool = False  # no loss for completions that --max-new-tokens cut off; the baseline counts them
    entropy_coef: float = 0.0  # weight of the entropy bonus
    kl_coef: float = 0.0  # weight of the KL term in the loss; without KL terms no reference model is loaded
    kl_estimator: Literal["k2", "k3"] = "k3"  # of the KL term in the loss
    old_logprobs: Literal["auto", "sampled", "scored"] = "auto"  # what ratios are to; auto: scored if need be
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """importance weights between old and sampled logprobs: per token or completion, clamped or 0 outside the bounds"""
    correction_low: float = 0.0  # lower bound of importance weights
    correction_high: float = 2.0  # upper bound of importance weights
    max_grad_norm: float = 1.0  # gradient clipping; 0: none
    weight_decay: float = 0.0  # AdamW's
    # Report
    eval_every: int = 50  # steps between greedy evaluations on the held-out rows; 0: only before and after
    eval_rows: int = 256  # held-out rows used, at most
    save_every: int = 50  # steps between checkpoints, from which a run resumes; 0: only at the end
    keep_checkpoints: int = 2  # newest checkpoints to keep, beside the one with the best held-out score; 0: all
    keep_rollouts: int = 0  # newest steps whose rollouts are kept; 0: all
    wandb: Literal["off", "offline", "online"] = "off"  # Weights & Biases
    # Machine
    seed: int = 0  # of prompts' order and sampling noise
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute; masters are fp32; auto: bfloat16 on cuda
    threads: int = 1  # CPU threads per rank; with more than one, sampled and training logprobs may differ by a rounding
    park_frozen: bool = True  # keep reference and reward models in host memory while they are not used
    recompute_layers: bool = False  # recompute activations in backward: less memory, a third more time
    hang_timeout: float = 600  # seconds without progress on any rank after which all leave with a report; 0: never


def check(c: Config) -> None:
    """Refuse what cannot mean anything, before anything is loaded."""
    positive = "num_steps prompts_per_step group_size max_new_tokens temperature max_rows cache_tokens lr num_epochs"
    positive += " num_minibatches max_tokens_per_microbatch threads reward_timeout"
    needs = dict(kl_estimator="kl_coef", max_refills="dynamic_sampling")
    needs |= dict(correction_low="correction", correction_high="correction")
    flags.check_each(dataclasses.asdict(c), dataclasses.asdict(Config()), positive=positive, needs=needs)
    is_grouped, num_minibatches = c.baseline in ("mean", "leave_one_out"), c.num_minibatches or (1 if c.model else 2)
    refuse(is_grouped and c.group_size < 2, f"--group-size {c.group_size}: --baseline {c.baseline} needs at least 2")
    refuse(c.dynamic_sampling and c.group_size < 2, f"--group-size {c.group_size}: --dynamic-sampling needs at least 2")
    no_std = not is_grouped and c.advantage_norm != "none"
    refuse(no_std, f"--baseline {c.baseline}: needs --advantage-norm none; equal rewards have no std (see --whiten)")
    refuse(num_minibatches > c.prompts_per_step * c.group_size, f"--num-minibatches {num_minibatches}: fewer rollouts")
    num_weights = (len(c.reward) + bool(c.reward_model) or 1) + bool(c.overlong_buffer)
    refuse(len(c.reward_weights) not in (0, num_weights), f"--reward-weights: there are {num_weights} rewards")
    refuse(c.model and not c.data, "--model needs --data FILE.jsonl, with --reward, --reward-model or --task gsm8k")
    refuse(c.kl_coef and c.kl_reward_coef, "--kl-coef with --kl-reward-coef: have the KL term in one of the two")
    refuse(c.overlong_buffer > 1, f"--overlong-buffer {c.overlong_buffer}: a share of --max-new-tokens")
    refuse(c.dual_clip and c.dual_clip <= 1, f"--dual-clip {c.dual_clip}: must be greater than 1, or 0 for none")
    refuse(c.dual_clip and c.policy_loss == "cispo", "--dual-clip with --policy-loss cispo, where every token learns")
    is_twice = c.correction != "none" and c.old_logprobs == "sampled"
    refuse(not c.correction_low < c.correction_high, "--correction-low: must be less than --correction-high")
    refuse(is_twice, "--correction with --old-logprobs sampled: the ratio itself corrects for the sampling policy")
    is_usual = (c.baseline, c.advantage_norm, c.whiten) == ("mean", "group_std", False)
    refuse(c.separate_rewards and not is_usual, "--separate-rewards has a baseline, norm and whitening of its own")
    refuse(c.separate_rewards and num_weights < 2, "--separate-rewards: there is only one reward")
    is_scaled = c.kl_reward_coef and c.kl_reward_level == "sequence" and c.advantage_norm == "group_std"
    refuse(is_scaled, "--kl-reward-coef: --advantage-norm group_std would divide it away; use --kl-reward-level token")
    is_mixed = c.kl_reward_coef and c.kl_reward_level == "token" and c.ratio_level != "token"
    refuse(is_mixed, f"--kl-reward-level token: --ratio-level {c.ratio_level} has one ratio for all tokens")


def main(config: Config) -> int:
    check(config)
    files: dict[str, Any] = dict(data=config.data, eval_data=config.eval_data, prompt_field=config.prompt_field)
    files |= dict(reward_timeout=config.reward_timeout, on_reward_error=config.on_reward_error)
    task = load_task(config.task, **files, reward=config.reward, reward_model=config.reward_model)
    device = distributed.start(device=config.device, threads=config.threads, hang_timeout=config.hang_timeout)
    run_name = config.run_name or distributed.agree(time.strftime("grpo-%Y%m%d-%H%M%S"))
    given = dataclasses.asdict(config)
    run = open_run(run_name, given, resume=config.resume)
    auto_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto_dtype if config.dtype == "auto" else getattr(torch, config.dtype)
    where = dict(dtype=dtype, device=device)
    source = resolve_folder(config.model) if config.model else toy_folder(runs_root())
    shape, tokenizer = read_config(source, scalar_head=False), Tokenizer(source, chat=config.chat)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    longest = min(shape.max_position_embeddings, config.cache_tokens, config.max_tokens_per_microbatch)
    room: dict[str, Any] = dict(max_tokens=longest, max_new_tokens=max_new_tokens)
    room |= dict(vocab_size=shape.vocab_size, long_prompts=config.long_prompts)
    prompts = Prompts(task.train_rows, tokenizer, purpose="train", seed=config.seed, **room)
    held_out = Prompts(task.eval_rows[: config.eval_rows], tokenizer, purpose="eval", **room)
    rewards = dict(task.rewards)
    if config.reward_model:
        folder, limit = resolve_folder(config.reward_model, flag="--reward-model"), config.max_tokens_per_microbatch
        how = dict(chat=config.chat, max_tokens=limit, park=config.park_frozen)
        rewards["reward_model"] = load_reward_model(folder, **how, **where)
    if config.overlong_buffer:
        rewards["overlong"] = overlong_penalty(limit=max_new_tokens, buffer=config.overlong_buffer * max_new_tokens)
    functions, reward_weights = weighted(rewards, config.reward_weights, logged=task.extra_scores)

    policy = ShardedModel(shape, source, **where, recompute_layers=config.recompute_layers)
    optimizer = policy.make_optimizer(betas=(0.9, 0.95), weight_decay=config.weight_decay)
    reference = load_replica(source, dtype=dtype) if config.kl_coef or config.kl_reward_coef else None
    engine = Engine(policy.decoder, max_rows=config.max_rows, cache_tokens=config.cache_tokens, **where)
    is_exact = config.threads == 1 and shape.is_row_invariant(dtype, device)
    num_minibatches = config.num_minibatches or (1 if config.model else 2)
    updates_per_step = config.num_epochs * num_minibatches
    old_logprobs = config.old_logprobs
    if old_logprobs == "auto" and updates_per_step > 1:  # with one update, the old policy is the new one: ratio 1
        old_logprobs = "sampled" if is_exact and config.correction == "none" else "scored"
    peak_lr, num_updates = config.lr or (1e-6 if config.model else 2e-4), config.num_steps * updates_per_step
    schedule = dict(warmup_updates=config.warmup_updates, schedule=config.lr_schedule)
    clip, dual_clip = dict(clip_low=config.clip_low, clip_high=config.clip_high), config.dual_clip
    bounds = dict(correction=config.correction, low=config.correction_low, high=config.correction_high)
    is_cispo, num_greedy = config.policy_loss == "cispo", int(config.baseline == "greedy")
    temperature = dict(temperature=config.temperature)

    chosen: dict[str, Any] = dict(lr=peak_lr, num_minibatches=num_minibatches, max_new_tokens=max_new_tokens)
    chosen |= dict(task=task.name, old_logprobs=old_logprobs, dtype=str(dtype), device=device.type)
    chosen |= dict(model=str(source), world_size=world_size(), command=sys.argv)
    models, sources = dict(policy=(policy, optimizer)), dict(policy=source)
    checkpoints = Checkpoints(run, models, sources=sources, keep=config.keep_checkpoints)
    fresh: dict[str, Any] = dict(step=0, update=0, num_served=0, before={}, evaluated={})
    state = checkpoints.restore(config.num_steps) or fresh
    kept_files = dict(after_step=state["step"], keep_rollouts=config.keep_rollouts)
    logger = Logger(run.folder, given | chosen | dict(flags=given), wandb_mode=config.wandb, **kept_files)
    print0(f"model {source}, {world_size()} x {device.type} {dtype}, sampled == training logprobs bitwise: {is_exact}")
    print0(f"task {task.name}: {len(prompts.rows)} prompts, {len(held_out.rows)} held out")
    for note in prompts.notes(per_step=config.prompts_per_step) + held_out.notes():
        print0(f"note: {note}")

    def evaluate() -> dict[str, float]:
        """Mean scores of greedy completions of the held-out rows (collective)."""
        requests = held_out.requests(0, len(held_out.rows), group_size=0, num_greedy=1)
        judged = judge(functions, held_out, engine.generate(requests, weight_version=update))
        metrics = StepMetrics()
        weights = reward_weights * torch.tensor([name != "overlong" for name in functions])
        metrics.add_values("eval/reward", judged.rewards @ weights)
        add_rewards(metrics, "eval", functions, judged.rewards)
        return metrics.reduce()

    update, num_served = state["update"], state["num_served"]  # optimizer steps (weights' version); prompts served
    stopping = 0  # the signal that asks for a stop
    before = state["before"] = state["before"] or evaluate()
    print0("held-out before training:", before or "no held-out rows; see --eval-data")

    for step in range(state["step"] + 1, config.num_steps + 1):
        metrics = StepMetrics(step)

        judged, missing = judge(functions, prompts, []), config.prompts_per_step
        for _ in range(1 + config.dynamic_sampling * config.max_refills):
            with metrics.timer("generate"):
                group = dict(group_size=config.group_size, num_greedy=num_greedy)
                requests = prompts.requests(num_served, missing, **group, **temperature)
                rollouts = engine.generate(requests, weight_version=update)
                num_served += missing
            with metrics.timer("reward"):
                judged += judge(functions, prompts, rollouts)
                metrics.add_total("count/sampled_tokens", sum(len(rollout.completion) for rollout in rollouts))
                table = gather_table(judged.rollouts, judged.rewards)
                groups = table.rewards.view(-1, config.group_size + num_greedy, len(functions))
                kept, missing = select_groups(groups[:, : config.group_size, 0], config.prompts_per_step)
            if not missing:
                break
        stats = engine.take_stats()
        metrics.add("perf/decode_waste", stats.wasted_rows, stats.computed_rows)

        with metrics.timer("score"):
            trained = [p * groups.shape[1] + s for p in kept for s in range(config.group_size)]  # rows of the table
            wanted = set(trained)
            judged = judged.select([i for i, row in enumerate(table.rows_of(judged.rollouts)) if row in wanted])
            table, groups = table.select(trained), groups[kept]
            limits = dict(num_ranks=world_size(), max_tokens=config.max_tokens_per_microbatch)
            plan = plan_updates(table.num_tokens.tolist(), table.prompts, num_minibatches=num_minibatches, **limits)
            minibatches = plan.of_rank(rank())
            microbatches = [sequences for minibatch in minibatches for sequences in minibatch]
            batch = exchange(judged.rollouts, table, plan.rank_of).to(device)
            if old_logprobs == "sampled":
                batch = batch.replace(old_logprobs=batch.sample_logprobs)
            elif old_logprobs == "scored":
                batch = batch.replace(old_logprobs=score_frozen(policy.decoder, batch, microbatches, **temperature))
            if reference is not None:
                with unparked(reference, device, park=config.park_frozen):
                    batch = batch.replace(ref_logprobs=score_frozen(reference, batch, microbatches, **temperature))

            batch = batch.to(torch.device("cpu"))
            logprobs, mask = batch.old_logprobs if old_logprobs == "scored" else batch.sample_logprobs, batch.loss_mask
            totals = groups @ reward_weights  # [P, group_size + num_greedy]
            scores = shaped = totals[:, : config.group_size]
            if config.kl_reward_coef:
                kl = losses.kl_penalty(logprobs, batch.ref_logprobs, "k1")
            if config.kl_reward_coef and config.kl_reward_level == "sequence":
                sums = gather_by_row(batch, losses.sequence_sums(kl, batch.lengths), scores.numel())
                shaped = scores - config.kl_reward_coef * sums.view_as(scores)
            if config.separate_rewards:
                advantages = separate_advantages(groups, reward_weights)
            else:
                baseline = totals[:, -1] if config.baseline == "greedy" else config.baseline
                advantages = group_advantages(shaped, baseline=baseline, norm=config.advantage_norm)
            stream = batch.spread(advantages.flatten()[batch.row])
            if config.kl_reward_coef and config.kl_reward_level == "token":
                to_go = returns_to_go(kl[mask].double(), table.num_loss_tokens[batch.row])
                stream[mask] -= config.kl_reward_coef * to_go
            if config.whiten:
                stream[mask] = whiten(stream[mask])
            keep = ~(table.is_truncated & config.drop_truncated)
            norm = dict(norm=config.loss_norm, constant=max_new_tokens)
            parts = [loss_weights(table.num_loss_tokens[i], keep=keep[i], **norm) for i in plan.minibatches]
            weights = batch.spread(torch.cat(parts)[batch.row])
            batch = batch.replace(advantages=stream.float(), loss_weights=weights.float()).to(device)

        with metrics.timer("report"):  # before the update, which may be refused
            sums = gather_by_row(batch, losses.sequence_sums(batch.advantages, batch.lengths), len(trained))
            mine = (sums / table.num_loss_tokens)[table.rows_of(judged.rollouts)]  # means over the completions' tokens
            logger.log_rollouts(step, judged, functions, reward=judged.rewards @ reward_weights, advantage=mine)

        with metrics.timer("update"):
            for epoch in range(config.num_epochs):
                order = random.Random(f"{config.seed} {step} {epoch}")
                for minibatch in order.sample(minibatches, len(minibatches)):
                    for i, sequences in enumerate(minibatch):
                        micro = batch.select(sequences)
                        layout, spans = micro.layout(), dict(lengths=micro.lengths, loss_mask=micro.loss_mask)
                        new, entropy = score(policy.module, micro.tokens, layout, select=micro.loss_mask, **temperature)
                        old = new.detach() if micro.old_logprobs is None else micro.old_logprobs
                        ratio = losses.importance_ratio(new, old, level=config.ratio_level, **spans)
                        if is_cispo:
                            loss = losses.cispo_loss(new, ratio, micro.advantages, **clip)
                        else:
                            loss = losses.clipped_policy_loss(ratio, micro.advantages, **clip, dual_clip=dual_clip)
                        if config.correction != "none":
                            rho = losses.importance_weights(old, micro.sample_logprobs, lengths=micro.lengths, **bounds)
                            loss = loss * rho
                        if config.kl_coef:
                            kl = losses.kl_penalty(new, micro.ref_logprobs, config.kl_estimator)
                            loss = loss + config.kl_coef * kl
                        objective = (micro.loss_weights * (loss - config.entropy_coef * entropy)).sum()
                        policy.backward(objective, is_last=i == len(minibatch) - 1)
                        metrics.add_total("policy/loss", objective.detach() / updates_per_step)
                        add_tokens(metrics, micro, new, old, ratio, entropy, **clip, is_weight=is_cispo)
                        if update % updates_per_step == 0:  # no update yet since these were sampled
                            add_gap(metrics, micro, new)
                    metrics.refuse_nonfinite(update=update)
                    lr = learning_rate(update, num_updates, peak=peak_lr, **schedule)
                    metrics.add("optim/lr", lr)
                    metrics.add("optim/grad_norm", policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm))
                    update += 1

        with metrics.timer("report"):
            add_rollouts(metrics, judged.rollouts, grouped_rewards=scores)
            add_rewards(metrics, "reward", functions, judged.rewards)
            metrics.add_values("reward/errors", judged.failed)
            metrics.add("count/epoch", prompts.epoch(num_served))
            is_final = step == config.num_steps
            evaluated = evaluate() if is_final or (config.eval_every and step % config.eval_every == 0) else {}
            metrics.add("time/save", checkpoints.take_blocked_s())
        logger.log(step, derived(metrics.reduce()) | evaluated, num_steps=config.num_steps)
        stopping = 0 if is_final else distributed.stop_requested()
        if is_final or stopping or (config.save_every and step % config.save_every == 0):
            state |= dict(step=step, update=update, num_served=num_served, evaluated=evaluated)
            checkpoints.save(state, score=evaluated.get("eval/reward"))
        if stopping:
            break

    saved = checkpoints.finish()
    logger.finish()
    for name, score_after in state["evaluated"].items():
        print0(f"held-out {name}: {before[name]:.3f} before, {score_after:.3f} after")
    print0(f"saved {saved}; load it with AutoModelForCausalLM.from_pretrained({str(saved)!r})")
    return 128 + stopping if stopping else 0


if __name__ == "__main__":
    preset = Config(**flags.chosen_preset("--algorithm", ALGORITHMS))
    watch.run(lambda: main(tyro.cli(Config, description=__doc__, default=preset, console_outputs=rank() == 0)))
