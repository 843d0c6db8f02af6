"""The default settings learn."""

import numpy as np
from conftest import read_metrics

import ppo_cartpole as ppo


def test_cartpole_is_learned(tmp_path):
    # A random agent gets 20, one that always does the same 10; 500 is the maximum.
    config = ppo.Config(total_frames=50_000, run_dir=str(tmp_path / "run"))
    result = ppo.train(config)
    assert result["eval_return_mean"] > 400
    assert result["eval_episodes"] == 20
    rows = read_metrics(config.run_dir)
    returns = [float(row["charts/episodic_return"]) for row in rows if row["charts/episodic_return"]]
    assert np.mean(returns[:3]) < 50
    assert np.mean(returns[-5:]) > 150
    assert float(rows[-1]["losses/entropy"]) < float(rows[0]["losses/entropy"])
