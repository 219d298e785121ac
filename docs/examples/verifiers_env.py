"""Train on an unmodified verifiers 0.4 environment: its tasks become rows, and its rewards become the reward.

pip install verifiers prime && prime env install primeintellect/reverse-text
python docs/examples/verifiers_env.py reverse-text 1000 > rows.jsonl
torchrun train_grpo.py --data rows.jsonl --rollout docs/examples/verifiers_env.py:play --reward episode --chat
"""

import json
import sys

import verifiers.v1 as vf

from minirl.extras.agents.endpoint import serve

# verifiers' chat loop, with the task's tools. Each user turn starts the loop as a local process, in a virtual
# environment that `uv` creates once.
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


@serve
async def play(url, episode):
    """Run the row's environment for one episode with the policy as its model, and return the agents' total reward."""
    row = episode.row.columns
    env = vf.load_environment(vf.resolve_env_config(row["env"]))
    task_type = env.taskset.task_type()
    task = task_type(task_type.data_type().model_validate(row["task"]), env.config.taskset.task)
    policy = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=url))
    async with env.serving():
        played = await env.run_episode(task, policy)
    if not played.ok:
        raise RuntimeError([error.message for part in (played, *played.traces) for error in part.errors])
    return sum(trace.reward for trace in played.traces)


if __name__ == "__main__":
    config = {"taskset": {"id": sys.argv[1]}, "agent": AGENT}
    for task in vf.load_environment(vf.resolve_env_config(config)).taskset.take(int(sys.argv[2])):
        prompt = task.data.prompt_text or "(the environment speaks first)"
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        print(json.dumps({"prompt": prompt, "env": config, "task": data}))
