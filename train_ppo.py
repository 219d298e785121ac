"""PPO with a value model: proximal policy optimization of a language model, arXiv:1707.06347, arXiv:2203.02155.

    torchrun --standalone --nproc-per-node 2 train_ppo.py               # embedded model and task, on CPU or GPU
    torchrun --nproc-per-node 8 train_ppo.py --model Qwen/Qwen2.5-1.5B-Instruct --chat \
        --task gsm8k --data train.jsonl --eval-data test.jsonl
    python train_ppo.py --model DIR --data my.jsonl --reward-model RM_DIR --value-model RM_DIR --kl-reward-coef 0.05

Each step: generate completions, reward them, score them under the reference (if there is a KL term) and the value
model, update both models on sums over tokens of

    loss_weight * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),   r = exp(new - old)
    loss_weight * max((V - R)^2, (V_old + clip(V - V_old, -value_clip, value_clip) - R)^2) / 2

A: generalised advantage estimates, whitened over the step's tokens; R: the estimates + V_old. A token is paid
-kl_reward_coef * (old - ref), a completion's last one its reward too. Policy and value model share no weights.
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
from minirl.advantages import adapted_kl_coef, explained_variance, gae, loss_weights, token_rewards, whiten
from minirl.batch import exchange, gather_by_row, gather_table
from minirl.checkpoint import Checkpoints
from minirl.data import Prompts, Tokenizer
from minirl.distributed import print0, rank, world_size
from minirl.engine import Engine
from minirl.errors import InputError
from minirl.flags import refuse
from minirl.logger import Logger
from minirl.metrics import StepMetrics, add_gap, add_rewards, add_rollouts, add_tokens, derived
from minirl.parallel import ShardedModel, learning_rate
from minirl.plan import plan_updates
from minirl.rewards import judge, load_reward_model, overlong_penalty, weighted
from minirl.runs import open_run, runs_root
from minirl.scoring import predict, predict_frozen, score, score_frozen, unparked
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
    long_prompts: Literal["skip", "error", "left"] = "skip"  # that leave no --max-new-tokens; left: cut from the left
    reward: tuple[str, ...] = ()  # file.py:function ... instead of the task's: f(prompts, completions, **columns)
    reward_timeout: float = 60.0  # seconds for a call of a --reward, after which its process is killed
    on_reward_error: Literal["stop", "zero"] = "stop"  # zero: it counts as 0 for up to 5 % of a call's completions
    reward_model: str | None = None  # Hugging Face folder or hub id of a sequence classifier with one label
    reward_weights: tuple[float, ...] = ()  # of each --reward, --reward-model, the overlong penalty; none: 1
    value_model: str | None = None  # folder or hub id: its trunk, and its scalar head if any; none: the policy's trunk
    chat: bool = False  # wrap text prompts in the chat template, the policy's and the reward model's
    run_name: RunName = None  # folder of the run in ./runs or $MINIRL_RUNS, also to resume it; none: ppo-<time>
    resume: Literal["auto", "force", "never"] = "auto"  # the run of that name: with the same flags; anyway; never
    # Generate
    num_steps: int = 300  # steps, each with fresh rollouts
    prompts_per_step: int = 128  # prompts per step, over all ranks
    group_size: int = 1  # completions per prompt
    max_new_tokens: int | None = None  # limit of a completion; none: the task's (sorting 10, gsm8k 512, jsonl 256)
    temperature: float = 1.0  # sampling temperature; logprobs are taken at the same
    max_rows: int = 256  # sequences that a rank decodes at a time
    cache_tokens: int = 65536  # tokens that a rank's key/value cache holds, per layer
    # Reward
    overlong_buffer: float = 0.0  # last share of --max-new-tokens over which a penalty grows to 1; 0: none
    kl_reward_coef: float = 0.0  # weight of the KL term (k1) in the reward of each token; 0: no reference model
    kl_target: float = 0.0  # nats per completion that the KL coefficient adapts to; 0: the coefficient is fixed
    kl_horizon: float = 10_000  # completions in which it adapts by at most 20 %
    gamma: float = 1.0  # discount per token
    gae_lambda: float = 0.95  # of generalised advantage estimation
    bootstrap_truncated: bool = False  # value the state that --max-new-tokens cut off, not 0 as at an end
    # Update
    lr: float | None = None  # peak learning rate; none: 1e-6, and 2e-4 for the embedded model
    value_lr: float | None = None  # the value model's; none: 1e-5, and 1e-3 for the embedded model
    value_warmup_steps: int = 0  # first steps that update the value model only
    lr_schedule: Literal["constant", "linear"] = "linear"  # after the warm-up
    warmup_updates: int = 5  # optimizer steps of linear warm-up
    num_epochs: int = 1  # passes over a step's rollouts
    num_minibatches: int | None = None  # optimizer steps per pass; none: 1, and 2 for the embedded model
    max_tokens_per_microbatch: int = 8192  # tokens of one forward and backward on a rank
    clip_low: float = 0.2  # ratios below 1 - clip_low lose their gradient if the advantage is negative
    clip_high: float = 0.2  # ratios above 1 + clip_high lose their gradient if the advantage is positive
    value_clip: float = 0.2  # values that moved further from the old ones lose their gradient; 0: none do
    dual_clip: float = 0.0  # ratios above it lose their gradient if the advantage is negative; 0: none do
    loss_norm: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"  # DAPO; GRPO; Dr.GRPO
    drop_truncated: bool = False  # no loss for completions that --max-new-tokens cut off
    entropy_coef: float = 0.0  # weight of the entropy bonus
    old_logprobs: Literal["auto", "sampled", "scored"] = "auto"  # what ratios are to; auto: scored if need be
    correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """importance weights between old and sampled logprobs: per token or completion, clamped or 0 outside the bounds"""
    correction_low: float = 0.0  # lower bound of importance weights
    correction_high: float = 2.0  # upper bound of importance weights
    max_grad_norm: float = 1.0  # gradient clipping, each model by itself; 0: none
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
    positive += " num_minibatches max_tokens_per_microbatch threads reward_timeout value_lr kl_horizon"
    needs = dict(kl_target="kl_reward_coef", kl_horizon="kl_target")
    needs |= dict(correction_low="correction", correction_high="correction")
    flags.check_each(dataclasses.asdict(c), dataclasses.asdict(Config()), positive=positive, needs=needs)
    num_minibatches = c.num_minibatches or (1 if c.model else 2)
    refuse(num_minibatches > c.prompts_per_step * c.group_size, f"--num-minibatches {num_minibatches}: fewer rollouts")
    num_weights = (len(c.reward) + bool(c.reward_model) or 1) + bool(c.overlong_buffer)
    refuse(len(c.reward_weights) not in (0, num_weights), f"--reward-weights: there are {num_weights} rewards")
    refuse(c.model and not c.data, "--model needs --data FILE.jsonl, with --reward, --reward-model or --task gsm8k")
    refuse(c.overlong_buffer > 1, f"--overlong-buffer {c.overlong_buffer}: a share of --max-new-tokens")
    refuse(c.dual_clip and c.dual_clip <= 1, f"--dual-clip {c.dual_clip}: must be greater than 1, or 0 for none")
    is_twice = c.correction != "none" and c.old_logprobs == "sampled"
    refuse(not c.correction_low < c.correction_high, "--correction-low: must be less than --correction-high")
    refuse(is_twice, "--correction with --old-logprobs sampled: the ratio itself corrects for the sampling policy")
    refuse(c.gamma > 1, f"--gamma {c.gamma}: must be at most 1")
    refuse(c.gae_lambda > 1, f"--gae-lambda {c.gae_lambda}: must be at most 1")
    refuse(c.value_warmup_steps >= c.num_steps, f"--value-warmup-steps {c.value_warmup_steps}: all steps of the run")
    unheard = c.bootstrap_truncated and c.drop_truncated
    refuse(unheard, "--bootstrap-truncated with --drop-truncated: those completions have no loss")


def main(config: Config) -> int:
    check(config)
    files: dict[str, Any] = dict(data=config.data, eval_data=config.eval_data, prompt_field=config.prompt_field)
    files |= dict(reward_timeout=config.reward_timeout, on_reward_error=config.on_reward_error)
    task = load_task(config.task, **files, reward=config.reward, reward_model=config.reward_model)
    device = distributed.start(device=config.device, threads=config.threads, hang_timeout=config.hang_timeout)
    run_name = config.run_name or distributed.agree(time.strftime("ppo-%Y%m%d-%H%M%S"))
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
    value_source = resolve_folder(config.value_model, flag="--value-model") if config.value_model else source
    value_shape = dataclasses.replace(read_config(value_source), scalar_head=True)
    words, value_words = (t.backend.get_vocab().items() for t in (tokenizer, Tokenizer(value_source)))
    if not words <= value_words or value_shape.max_position_embeddings < longest:
        raise InputError(f"--value-model {value_source}: must read the policy's tokens, up to {longest} of them")
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
    value = ShardedModel(value_shape, value_source, **where, recompute_layers=config.recompute_layers)
    value_optimizer = value.make_optimizer(betas=(0.9, 0.95), weight_decay=config.weight_decay)
    reference = load_replica(source, dtype=dtype) if config.kl_reward_coef else None
    engine = Engine(policy.decoder, max_rows=config.max_rows, cache_tokens=config.cache_tokens, **where)
    is_exact = config.threads == 1 and shape.is_row_invariant(dtype, device)
    num_minibatches = config.num_minibatches or (1 if config.model else 2)
    updates_per_step = config.num_epochs * num_minibatches
    old_logprobs = config.old_logprobs
    if old_logprobs == "auto" and updates_per_step > 1:  # with one update, the old policy is the new one: ratio 1
        old_logprobs = "sampled" if is_exact and config.correction == "none" else "scored"
    peak_lr, num_updates = config.lr or (1e-6 if config.model else 2e-4), config.num_steps * updates_per_step
    value_peak_lr = config.value_lr or (1e-5 if config.model else 1e-3)
    schedule = dict(warmup_updates=config.warmup_updates, schedule=config.lr_schedule)
    clip, dual_clip = dict(clip_low=config.clip_low, clip_high=config.clip_high), config.dual_clip
    bounds = dict(correction=config.correction, low=config.correction_low, high=config.correction_high)
    temperature = dict(temperature=config.temperature)
    decay = dict(gamma=config.gamma, gae_lambda=config.gae_lambda)

    chosen: dict[str, Any] = dict(
        lr=peak_lr, value_lr=value_peak_lr, num_minibatches=num_minibatches, max_new_tokens=max_new_tokens
    )
    chosen |= dict(task=task.name, old_logprobs=old_logprobs, dtype=str(dtype), device=device.type)
    chosen |= dict(model=str(source), world_size=world_size(), command=sys.argv)
    models = dict(policy=(policy, optimizer), value=(value, value_optimizer))
    sources = dict(policy=source, value=value_source)
    checkpoints = Checkpoints(run, models, sources=sources, keep=config.keep_checkpoints)
    fresh: dict[str, Any] = dict(step=0, update=0, num_served=0, kl_coef=config.kl_reward_coef, before={}, evaluated={})
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
    kl_coef = state["kl_coef"]
    before = state["before"] = state["before"] or evaluate()
    print0("held-out before training:", before or "no held-out rows; see --eval-data")

    for step in range(state["step"] + 1, config.num_steps + 1):
        metrics = StepMetrics(step)

        with metrics.timer("generate"):
            count, group_size = config.prompts_per_step, config.group_size
            requests = prompts.requests(num_served, count, group_size=group_size, **temperature)
            rollouts = engine.generate(requests, weight_version=update)
            num_served += count

        with metrics.timer("reward"):
            judged = judge(functions, prompts, rollouts)
            metrics.add_total("count/sampled_tokens", sum(len(rollout.completion) for rollout in rollouts))
            table = gather_table(judged.rollouts, judged.rewards)
        stats = engine.take_stats()
        metrics.add("perf/decode_waste", stats.wasted_rows, stats.computed_rows)

        with metrics.timer("score"):
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

            values, last_values = predict_frozen(value.decoder, batch, microbatches)

            batch = batch.replace(values=values).to(torch.device("cpu"))
            logprobs, mask = batch.old_logprobs if old_logprobs == "scored" else batch.sample_logprobs, batch.loss_mask
            scores = table.rewards @ reward_weights
            ref_logprobs = logprobs if reference is None else batch.ref_logprobs
            kl = losses.kl_penalty(logprobs, ref_logprobs, "k1")
            counts, old_values = table.num_loss_tokens[batch.row], batch.values[mask].double()
            per_token = token_rewards(scores[batch.row], kl[mask].double(), counts, kl_coef=kl_coef)
            is_cut = table.is_truncated[batch.row] & config.bootstrap_truncated
            bootstrap = torch.where(is_cut, last_values.cpu().double(), 0.0)
            estimates = gae(per_token, old_values, counts, bootstrap=bootstrap, **decay)
            metrics.add("value/explained_var", explained_variance(old_values, estimates + old_values))
            stream, returns = torch.zeros_like(logprobs), torch.zeros_like(logprobs)
            stream[mask], returns[mask] = whiten(estimates).float(), (estimates + old_values).float()
            if reference is not None:
                kl_mean = float(gather_by_row(batch, losses.sequence_sums(kl, batch.lengths), len(scores)).mean())
                metrics.add("policy/kl_ref_completion", kl_mean)
                metrics.add("reward/kl_coef", kl_coef)
            if config.kl_target and step > config.value_warmup_steps:
                towards = dict(target=config.kl_target, num_rollouts=len(scores), horizon=config.kl_horizon)
                kl_coef = adapted_kl_coef(kl_coef, kl_mean, **towards)
            keep = ~(table.is_truncated & config.drop_truncated)
            norm = dict(norm=config.loss_norm, constant=max_new_tokens)
            parts = [loss_weights(table.num_loss_tokens[i], keep=keep[i], **norm) for i in plan.minibatches]
            weights = batch.spread(torch.cat(parts)[batch.row])
            batch = batch.replace(advantages=stream, returns=returns, loss_weights=weights.float()).to(device)

        with metrics.timer("report"):  # before the update, which may be refused
            sums = gather_by_row(batch, losses.sequence_sums(batch.advantages, batch.lengths), len(table.prompt))
            mine = (sums / table.num_loss_tokens)[table.rows_of(judged.rollouts)]  # means over the completions' tokens
            logger.log_rollouts(step, judged, functions, reward=judged.rewards @ reward_weights, advantage=mine)

        with metrics.timer("update"):
            for epoch in range(config.num_epochs):
                order = random.Random(f"{config.seed} {step} {epoch}")
                for minibatch in order.sample(minibatches, len(minibatches)):
                    for i, sequences in enumerate(minibatch):
                        micro = batch.select(sequences)
                        layout, spans = micro.layout(), dict(lengths=micro.lengths, loss_mask=micro.loss_mask)
                        is_last = i == len(minibatch) - 1
                        values, _ = predict(value.module, micro.tokens, layout, select=micro.loss_mask)
                        value_loss = losses.value_loss(values, micro.values, micro.returns, clip=config.value_clip)
                        value_objective = (micro.loss_weights * value_loss).sum()
                        value.backward(value_objective, is_last=is_last)
                        metrics.add_total("value/loss", value_objective.detach() / updates_per_step)
                        clipped = losses.is_value_clipped(values, micro.values, micro.returns, clip=config.value_clip)
                        metrics.add_values("value/clip_frac", clipped[micro.loss_mask])
                        if step <= config.value_warmup_steps:
                            continue
                        new, entropy = score(policy.module, micro.tokens, layout, select=micro.loss_mask, **temperature)
                        old = new.detach() if micro.old_logprobs is None else micro.old_logprobs
                        ratio = losses.importance_ratio(new, old, **spans)
                        loss = losses.clipped_policy_loss(ratio, micro.advantages, **clip, dual_clip=dual_clip)
                        if config.correction != "none":
                            rho = losses.importance_weights(old, micro.sample_logprobs, lengths=micro.lengths, **bounds)
                            loss = loss * rho
                        objective = (micro.loss_weights * (loss - config.entropy_coef * entropy)).sum()
                        policy.backward(objective, is_last=is_last)
                        metrics.add_total("policy/loss", objective.detach() / updates_per_step)
                        add_tokens(metrics, micro, new, old, ratio, entropy, **clip)
                        if update % updates_per_step == 0:  # no update yet since these were sampled
                            add_gap(metrics, micro, new)
                    metrics.refuse_nonfinite(update=update)
                    lr = learning_rate(update, num_updates, peak=value_peak_lr, **schedule)
                    norm_before = value.step(value_optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
                    metrics.add("value/lr", lr)
                    metrics.add("value/grad_norm", norm_before)
                    if step > config.value_warmup_steps:
                        since = config.value_warmup_steps * updates_per_step
                        lr = learning_rate(update - since, num_updates - since, peak=peak_lr, **schedule)
                        norm_before = policy.step(optimizer, lr=lr, max_grad_norm=config.max_grad_norm)
                        metrics.add("optim/lr", lr)
                        metrics.add("optim/grad_norm", norm_before)
                    update += 1

        with metrics.timer("report"):
            add_rollouts(metrics, judged.rollouts, grouped_rewards=scores.view(-1, config.group_size))
            add_rewards(metrics, "reward", functions, judged.rewards)
            metrics.add_values("reward/errors", judged.failed)
            metrics.add("count/epoch", prompts.epoch(num_served))
            is_final = step == config.num_steps
            evaluated = evaluate() if is_final or (config.eval_every and step % config.eval_every == 0) else {}
            metrics.add("time/save", checkpoints.take_blocked_s())
        logger.log(step, derived(metrics.reduce()) | evaluated, num_steps=config.num_steps)
        stopping = 0 if is_final else distributed.stop_requested()
        if is_final or stopping or (config.save_every and step % config.save_every == 0):
            state |= dict(step=step, update=update, num_served=num_served, kl_coef=kl_coef, evaluated=evaluated)
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
    watch.run(lambda: main(tyro.cli(Config, description=__doc__, console_outputs=rank() == 0)))
