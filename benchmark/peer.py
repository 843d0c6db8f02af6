"""CartPole with Stable-Baselines3 or SBX (its JAX twin), with the RL Zoo's settings; for throughput.py.

    python benchmark/peer.py sb3 --seed 1       # in an environment made from benchmark/requirements.txt

Settings: https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml.
Trains, then evaluates 20 greedy episodes, and prints their mean return as JSON.
"""

import argparse
import json


def main():
    parser = argparse.ArgumentParser(description="CartPole with Stable-Baselines3 or SBX")
    parser.add_argument("peer", choices=("sb3", "sbx"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-frames", type=int, default=100_000)
    args = parser.parse_args()

    if args.peer == "sb3":
        from stable_baselines3 import PPO
    else:
        from sbx import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", 8, seed=args.seed),
        n_steps=32,
        n_epochs=20,
        batch_size=256,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        ent_coef=0.0,
        seed=args.seed,
    )
    model.learn(args.total_frames)
    envs = make_vec_env("CartPole-v1", 1, seed=1000 + args.seed)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=20)
    print(json.dumps({"eval_return": float(mean)}))


if __name__ == "__main__":
    main()
