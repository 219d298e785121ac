"""Runs with the real wandb package, offline."""

import json

from minirl.extras.wandb_run import TABLE_CHARS, TABLE_ROWS
from minirl.report import logger


def test_wandb_has_the_variables_completions_and_best_score_also_of_a_resumed_run(monkeypatch, tmp_path):
    """Row 40: a resume continues the same wandb run. The table has the first rollouts by id, with texts truncated."""
    monkeypatch.setattr(logger.dist, "gather_object", lambda mine, gathered: gathered.__setitem__(0, mine))
    variables = {"PROJECT": "sums", "ENTITY": "us", "RUN_GROUP": "seeds", "TAGS": "a"}
    for name, value in (variables | {"DATA_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    record = {"prompt": [{"content": "hi"}], "completion": "y" * 9_999}
    record |= {"rewards": {"short": None, "exact": 1.0}, "advantage": -0.5}
    records = [record | {"id": [i, 0], "row": f"x.jsonl:{i}"} for i in range(40, 0, -1)]
    for after_step, scores, best in ((0, [0.25, 0.75, 0.9], [0.9, 3]), (2, [0.5], [0.75, 2])):
        log = logger.Logger(tmp_path, {"wandb_id": "4a"}, wandb_mode="offline", after_step=after_step)
        for step, score in enumerate(scores, after_step + 1):
            log.log_rollouts(step, records, to_wandb=step == 1)
            log.log(step, {"eval/reward": score}, num_steps=3)
        run = log._wandb.run
        assert [run.id, run.project, run.entity, run.group, *run.tags] == ["4a", *variables.values()]
        assert [run.summary["best/eval_reward"], run.summary["best/step"]] == best
        log.finish()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "row", "prompt", "completion", "short", "exact", "advantage"]
    assert len(content["data"]) == TABLE_ROWS
    assert content["data"][0] == [1, "x.jsonl:1", "[{'content': 'hi'}]", "y" * TABLE_CHARS, None, 1.0, -0.5]
