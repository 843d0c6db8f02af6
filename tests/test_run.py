"""A whole run: its files, its determinism, its end by bad numbers, what it compiles, and JAX's switches and cache."""

import json
import math
import os
import resource
import subprocess
import sys
from collections import Counter as Tally
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import (
    FRAMES,
    ROOT,
    SCRIPTS,
    Draw,
    SmallNetwork,
    assert_same,
    counter,
    die_in,
    every_script,
    events_of,
    frames_of,
    initial_state,
    linear,
    load_state,
    only_cartpole,
    random_rollout,
    read_metrics,
    tiny,
    without_times,
)
from jax.experimental.compilation_cache import compilation_cache
from PIL import Image

import ppo_cartpole as ppo

COLUMNS = """frames,seconds,charts/SPS,charts/episodic_return,charts/episodic_length,charts/learning_rate,
charts/clip_coef,losses/policy_loss,losses/value_loss,losses/entropy,losses/approx_kl,losses/clip_fraction,
losses/explained_variance""".replace("\n", "").split(",")


def columns(script):
    return {*COLUMNS, "charts/episodic_score"} if script.__name__ == "ppo_flappy" else {*COLUMNS}


def strict_json(path):
    """The content of a JSON file, in which NaN and Infinity are no numbers."""
    return json.loads(Path(path).read_text(), parse_constant=lambda name: pytest.fail(f"{name} in {path}"))


@every_script
def test_files_and_a_gif_that_moves(finished):
    run_dir = Path(finished[0].run_dir)
    names = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*")}
    event_files = {name for name in names if name.startswith("events.out.tfevents")}
    assert len(event_files) == 1
    assert names - event_files == {"config.json", "metrics.csv", "result.json", "agent.gif", "checkpoint.msgpack"}
    with Image.open(run_dir / "agent.gif") as gif:
        assert gif.n_frames > 1


@every_script
def test_metrics_have_one_row_per_update_of_numbers_in_their_ranges(script, finished):
    rows = read_metrics(finished[0].run_dir)
    assert list(rows[0])[:2] == ["frames", "seconds"] and set(rows[0]) == columns(script)
    assert [int(row["frames"]) for row in rows] == FRAMES
    assert [bool(row["charts/SPS"]) for row in rows] == [False] + 5 * [True]  # the first update compiles
    for row in rows:
        x = {name: float(cell) for name, cell in row.items() if cell}
        assert all(math.isfinite(value) for value in x.values())
        assert x.get("charts/SPS", 1.0) > 0 and x["seconds"] > 0
        assert 0 < x["losses/entropy"] <= math.log(6) + 1e-6
        assert x["losses/approx_kl"] >= -1e-6
        assert 0 <= x["losses/clip_fraction"] <= 1
        assert x["losses/explained_variance"] <= 1


@only_cartpole
def test_episodes_of_cartpole_are_in_the_metrics(script, finished):
    rows = [row for row in read_metrics(finished[0].run_dir) if row["charts/episodic_return"]]
    assert rows
    for row in rows:  # CartPole pays 1 a step, and no pole falls at once
        assert float(row["charts/episodic_return"]) == float(row["charts/episodic_length"]) >= 8


@every_script
def test_tensorboard_has_the_numbers_of_metrics_csv(script, finished):
    events, rows = events_of(finished[0].run_dir), read_metrics(finished[0].run_dir)
    assert set(events) == {name for row in rows for name, cell in row.items() if cell} - {"frames", "seconds"}
    for tag in events:
        table = {int(row["frames"]): float(row[tag]) for row in rows if row[tag]}
        assert len(events[tag]) == len(table)
        assert dict(events[tag]) == pytest.approx(table, rel=1e-4)


def test_an_episode_is_in_the_row_of_the_update_that_ended_it_with_rewards_as_they_were(tmp_path):
    # Counter(5) ends at steps 5, 11, 17 and 23; updates are 4 steps.
    config = tiny(env_id=counter(5), reward_scale=0.5, run_dir=tmp_path / "run")
    assert ppo.train(config)["eval_return_mean"] == 5.0
    cells = [(row["charts/episodic_return"], row["charts/episodic_length"]) for row in read_metrics(config.run_dir)]
    assert cells == [("", ""), ("5", "5"), ("5", "5"), ("", ""), ("5", "5"), ("5", "5")]
    assert events_of(config.run_dir)["charts/episodic_return"] == [(step, 5.0) for step in (16, 24, 40, 48)]


@every_script
def test_result(script, finished):
    config, result = finished
    assert strict_json(Path(config.run_dir, "result.json")) == result
    keys = "env_id seed frames seconds sps eval_return_mean eval_return_std eval_episodes eval_capped versions device"
    assert set(keys.split()) <= set(result)
    assert (result["env_id"], result["seed"], result["frames"]) == (script.Config().env_id, 3, 48)
    assert result["eval_episodes"] == 2
    assert {"jax", "flax", "optax", "gymnasium"} <= set(result["versions"])
    assert result["versions"]["jax"] == jax.__version__
    params = load_state(script, config.run_dir, config).params
    found = script.evaluate(config, params, 2, config.seed)
    expected = (found["returns"].mean(), found["returns"].std(), found["capped"].sum())
    assert expected == (result["eval_return_mean"], result["eval_return_std"], result["eval_capped"])


def test_the_result_of_a_run_of_one_update_is_json_too(script, tmp_path):
    script.train(tiny(script, total_frames=8, run_dir=tmp_path / "run"))
    assert strict_json(tmp_path / "run" / "result.json")["frames"] == 8


@pytest.fixture
def again(script, tmp_path_factory, monkeypatch):
    """(Config, run directory, what was compiled by the end of each update) of the finished run's seed once more."""
    if script not in _again:
        compiled, after_update, record = Tally(), [], script.Recorder.record

        def listener(event, duration, **kwargs):
            compiled.update([event] if "/compile/" in event else [])

        def note(*args):
            record(*args)
            after_update.append(dict(compiled))

        monkeypatch.setattr(script.Recorder, "record", note)
        monkeypatch.chdir(tmp_path_factory.mktemp("again"))
        config = tiny(script, seed=3, eval_episodes=3, eval_max_steps=9, checkpoint_every=5)
        jax.monitoring.register_event_duration_secs_listener(listener)
        try:
            script.train(config)
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
        (run_dir,) = Path("runs").absolute().iterdir()
        _again[script] = config, run_dir, after_update
    return _again[script]


_again = {}


def test_the_same_seed_gives_the_same_run_whatever_the_evaluation(script, finished, again):
    (config, _), (same, run_dir, _) = finished, again
    assert without_times(read_metrics(run_dir)) == without_times(read_metrics(config.run_dir))
    assert_same(load_state(script, run_dir, same), load_state(script, config.run_dir, config))


def test_a_run_without_a_name_goes_under_runs(script, again):
    assert script.__name__ in again[1].name and "seed3" in again[1].name


def test_nothing_is_compiled_after_the_first_update(again):
    assert sum(again[2][0].values()) > 0
    assert again[2] == [again[2][0]] * 6


def test_another_seed_gives_another_run_and_a_clock_that_stands_still_no_division_by_zero(
    script, finished, tmp_path, monkeypatch
):
    clock = {name: getattr(script.time, name) for name in ("time", "time_ns", "strftime", "sleep")}
    monkeypatch.setattr(script, "time", SimpleNamespace(**clock, monotonic=lambda: 5.0))
    script.train(tiny(script, seed=4, run_dir=tmp_path / "run"))
    for row, other_row in zip(read_metrics(finished[0].run_dir), read_metrics(tmp_path / "run"), strict=True):
        assert row["losses/value_loss"] != other_row["losses/value_loss"]


def test_runs_of_neighbouring_seeds_share_no_episode(tmp_path):
    used = []
    for seed in (1, 2):
        Draw.seeds.clear()
        ppo.train(tiny(env_id="Draw-v0", seed=seed, run_dir=tmp_path / str(seed)))
        used += Draw.seeds
    # 2 environments of training, 2 of the evaluation; the picture shows the first of those again.
    assert len(used) == 10
    assert len(set(used)) == 8


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_observations_may_have_any_dtype(tmp_path, dtype):
    assert ppo.train(tiny(env_id=counter(3, dtype=dtype), run_dir=tmp_path / "run"))["eval_return_mean"] == 3.0


def test_one_row_per_update_trains(tmp_path):
    # DLR-RM/stable-baselines3#265: the deviation of a single advantage.
    shape = dict(num_envs=1, num_steps=1, num_minibatches=1, total_frames=3)
    ppo.train(tiny(**shape, env_id=counter(3), run_dir=tmp_path / "run"))
    assert frames_of(tmp_path / "run") == [1, 2, 3]


def test_a_reward_that_is_not_finite_is_laid_to_the_environment(script, command, tmp_path, monkeypatch):
    # In update 2, step 7, environment 1; after the checkpoint of update 1.
    play, rollouts = script.rollout, []

    def with_nan(*args):
        data, *rest = play(*args)
        rollouts.append(None)
        reward = np.array(data.reward)
        reward[2, 1] = np.nan if len(rollouts) == 2 else 0.0
        return data._replace(reward=reward), *rest

    monkeypatch.setattr(script, "rollout", with_nan)
    config = tiny(script, checkpoint_every=1, run_dir=tmp_path / "run")
    code, _, (line,) = command(config=config)
    assert code == 1
    assert "reward of environment 1" in line and "step 7" in line and f"--resume {config.run_dir}" in line
    assert int(load_state(script, config.run_dir, config).update) == 1
    assert not (tmp_path / "run" / "result.json").exists()


@only_cartpole
@pytest.mark.parametrize("reward, words", [("nan", "reward of env"), ("nan obs", "observation of env")])
def test_the_step_of_a_number_that_is_not_finite_is_that_of_the_environment(script, command, tmp_path, reward, words):
    config = tiny(env_id=counter(5, reward=reward), run_dir=tmp_path / "run")
    code, _, (line,) = command(config=config)
    assert code == 1 and words in line and "step 5" in line


def test_a_loss_that_diverges_by_itself_is_told_apart_and_not_saved(script, command, tmp_path, monkeypatch):
    update = script.update

    def diverges(config, apply_fn, optimizer, state, *rest):
        new, metrics = update(config, apply_fn, optimizer, state, *rest)
        return new, metrics | {"finite": state.update < 1}

    monkeypatch.setattr(script, "update", diverges)
    config = tiny(script, checkpoint_every=1, run_dir=tmp_path / "run")
    code, _, (line,) = command(config=config)
    assert code == 1 and "loss or parameters not finite after 16 frames" in line and "environment" not in line
    assert int(load_state(script, config.run_dir, config).update) == 1
    assert frames_of(config.run_dir) == [8, 16]


def test_ctrl_c_ends_with_one_line_that_names_resume_and_130(script, command, tmp_path, monkeypatch):
    play, rollouts = script.rollout, []

    def interrupted(*args):
        rollouts.append(None)
        if len(rollouts) == 4:
            raise KeyboardInterrupt
        return play(*args)

    monkeypatch.setattr(script, "rollout", interrupted)
    config = tiny(script, run_dir=tmp_path / "run")
    code, _, (line,) = command(config=config)
    assert code == 130 and f"--resume {config.run_dir}" in line
    assert frames_of(config.run_dir) == [8, 16, 24]
    assert int(load_state(script, config.run_dir, config).update) == 2


def test_sps_counts_the_frames_of_this_process_after_its_first_update(script, tmp_path, monkeypatch):
    # Stoix#130, mesozoic-labs PR#369: on a clock of 1 second per rollout, SPS is the frames of a rollout.
    now, play = [0.0], script.rollout
    clock = {name: getattr(script.time, name) for name in ("time", "time_ns", "strftime", "sleep")}
    monkeypatch.setattr(script, "time", SimpleNamespace(**clock, monotonic=lambda: now[0]))

    def rollout_of_a_second(*args):
        now[0] += 1.0
        return play(*args)

    monkeypatch.setattr(script, "rollout", rollout_of_a_second)
    config = tiny(script, run_dir=tmp_path / "run")
    die_in(script, config, "save_checkpoint", at=1)
    now[0] += 100.0
    assert script.main(["--resume", config.run_dir]) == 0
    rows = read_metrics(config.run_dir)
    assert [row["charts/SPS"] for row in rows] == ["", "8", "", "8", "8", "8"]
    assert [float(row["seconds"]) for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_a_process_of_its_own_with_default_environment_and_without_jit(tmp_path):
    # From another directory, into a relative one, without a terminal: plain lines, and nothing on stderr.
    flags = "--num-envs 2 --num-steps 2 --num-minibatches 2 --update-epochs 1 --total-frames 10 --run-dir here/run"
    command = [sys.executable, "-W", "error::RuntimeWarning", str(ROOT / "ppo_cartpole.py"), *flags.split()]
    command += ["--eval-episodes", "2", "--eval-max-steps", "2"]
    env = os.environ | {"JAX_DISABLE_JIT": "1"}  # with it: test_checkpoint
    process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert "8 frames" in process.stdout.splitlines()[0]
    assert "greedy return over 2 episodes" in process.stdout.splitlines()[-1]
    assert (tmp_path / "here" / "run" / "result.json").exists()
    assert frames_of(tmp_path / "here" / "run") == [4, 8]


# ------------------------------------------------------------------------- JAX's switches, cache and other devices


SWITCHES = {
    "JAX_DISABLE_JIT": jax.disable_jit,
    "JAX_DEBUG_NANS": partial(jax.debug_nans, True),
    "JAX_DEBUG_INFS": partial(jax.debug_infs, True),
    "JAX_ENABLE_X64": partial(jax.enable_x64, True),
    "JAX_NUMPY_RANK_PROMOTION": partial(jax.numpy_rank_promotion, "raise"),
    "JAX_DEBUG_KEY_REUSE": partial(jax.debug_key_reuse, True),
    "JAX_CHECK_TRACER_LEAKS": jax.checking_leaks,
}


@pytest.mark.parametrize("script, switch", [  # CartPole without jit: above
    ("cartpole", "JAX_DEBUG_NANS"), ("cartpole", "JAX_DEBUG_INFS"), ("atari", "JAX_DEBUG_NANS"),
    ("atari", "JAX_DEBUG_INFS"), ("atari", "JAX_DISABLE_JIT"),
], indirect=["script"])  # fmt: skip
def test_act_and_update_run_under_jaxs_switches(script, switch):
    config = tiny(script, num_steps=2, update_epochs=1)
    rollout, next_obs = random_rollout(script, config)
    rollout = rollout._replace(reward=0 * rollout.reward, value=0 * rollout.value)  # so nothing varies
    with SWITCHES[switch]():
        state = initial_state(script, config)
        _, key = jax.jit(partial(script.act, linear))(state.params, state.key, next_obs)
        run_update = jax.jit(partial(script.update, config, linear, script.make_optimizer(config)))
        _, metrics = run_update(state._replace(key=key), rollout, next_obs)
    assert metrics["finite"]


def abstract_training(name):
    """act and update of a script with its own network, each as (function, arguments), which are shapes."""
    script, space = SCRIPTS[name], (np.float32, 4) if name == "cartpole" else (np.uint8, 84, 84, 4)
    config = tiny(script)
    network, optimizer = script.ActorCritic(3), script.make_optimizer(config)
    obs, rows = (jax.ShapeDtypeStruct((*shape, *space[1:]), space[0]) for shape in ((2,), (4, 2)))
    state = jax.eval_shape(partial(script.init_state, network, optimizer), obs, 0)
    rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_rollout(script, config)[0])
    yield partial(script.act, network.apply), (state.params, state.key, obs)
    yield partial(script.update, config, network.apply, optimizer), (state, rollout._replace(obs=rows), obs)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_act_and_update_lower_for_other_devices_with_the_code_that_only_these_run(name, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: {"cuda": "gpu"}.get(platform, platform))
    for function, arguments in abstract_training(name):
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        assert ("convolution" in text) == (name != "cartpole")


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("switches", [["JAX_ENABLE_X64"], ["JAX_NUMPY_RANK_PROMOTION", "JAX_CHECK_TRACER_LEAKS"]])
def test_networks_are_traced_under_jaxs_switches(name, switches):
    for function, arguments in abstract_training(name):
        with ExitStack() as stack:
            for switch in switches:
                stack.enter_context(SWITCHES[switch]())
            out = jax.jit(function).trace(*arguments).out_info
        assert "float64" not in str(out) or switches == ["JAX_ENABLE_X64"]


@pytest.mark.parametrize("script, switches", [
    ("cartpole", ["JAX_ENABLE_X64"]), ("atari", ["JAX_ENABLE_X64"]),
    ("cartpole", ["JAX_DEBUG_NANS", "JAX_DEBUG_INFS", "JAX_NUMPY_RANK_PROMOTION"]),
], indirect=["script"])  # fmt: skip
def test_whole_runs_work_under_jaxs_switches(script, tmp_path, switches):
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(SWITCHES[switch]())
        config = tiny(script, run_dir=tmp_path / "run")
        die_in(script, config, "save_checkpoint", at=1)
        script.train(script.Config(resume=config.run_dir))
    assert frames_of(config.run_dir) == FRAMES


@pytest.fixture
def no_cache_yet(script, monkeypatch, tmp_path):
    """As if nobody had named a folder for compiled programs. Returns that of XDG_CACHE_HOME."""
    monkeypatch.setattr(script, "ActorCritic", SmallNetwork)
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@only_cartpole
def test_the_command_line_keeps_compiled_programs_in_the_users_cache(script, command, no_cache_yet, tmp_path):
    assert command(config=tiny(script, total_frames=16, run_dir=tmp_path / "run"))[0] == 0
    assert len([path for path in no_cache_yet.rglob("*") if path.is_file()]) >= 3


def test_a_folder_for_compiled_programs_that_the_user_named_stays(script, command, no_cache_yet, tmp_path):
    command("--seed", "-1")
    assert jax.config.jax_compilation_cache_dir == str(no_cache_yet / "ppo-jax")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))  # as JAX_COMPILATION_CACHE_DIR does
    command("--seed", "-1")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")


@only_cartpole
def test_importers_keep_their_settings_of_the_cache(script, tmp_path, monkeypatch):
    changed = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.append(name))
    script.train(tiny(script, run_dir=tmp_path / "run"))
    assert not [name for name in changed if "cache" in name]


@only_cartpole
def test_where_no_folder_for_compiled_programs_can_be_made_a_run_goes_on_without_a_word(
    script, command, no_cache_yet, tmp_path, recwarn
):
    no_cache_yet.write_text("a file, so no folder")
    config = tiny(script, total_frames=16, run_dir=tmp_path / "run")
    code, _, errors = command(config=config)
    assert (code, errors) == (0, [])
    assert not [str(warning.message) for warning in recwarn if "cache" in str(warning.message)]


@pytest.mark.slow
def test_1000_updates_need_no_more_memory_than_100(tmp_path, monkeypatch):
    peaks, record = [], ppo.Recorder.record

    def note(*args):
        record(*args)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    monkeypatch.setattr(ppo.Recorder, "record", note)
    ppo.train(tiny(total_frames=8 * 1000, run_dir=tmp_path / "run"))
    assert peaks[-1] - peaks[100] < 20 * 1024  # KiB
