"""Many devices and many processes give what one device gives, and do not wait for the dead."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import ROOT, read_metrics

import ppo_atari as ppo

# 3 updates; each minibatch holds 2 * 8 rows of each of two devices.
SMALL = (
    "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 2 --eval-episodes 1 --eval-max-steps 4".split()
)


def small(run_dir, frames=96):
    """The flags of a run of updates of 32 frames."""
    return [*SMALL, "--total-frames", str(frames), "--run-dir", str(run_dir)]


def start(*flags, devices=1, script=ROOT / "ppo_atari.py", **variables):
    """Start the script in a process with this many CPU devices and these environment variables."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    env |= variables
    command = [sys.executable, str(script), *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port(first=0, last=0):
    """A port from `first` to `last` that nobody listens to on this machine; any by default."""
    for port in range(first, last + 1):
        try:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
                return listener.getsockname()[1]
        except OSError:
            continue
    raise AssertionError("no port is free")


def start_two(*flags, devices=(1, 1), **how):
    """Two processes of one run, [process 0, process 1], which meet on this machine."""
    flags = [*flags, "--distributed", "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    return [start(*flags, "--process-id", str(i), devices=devices[i], **how) for i in (0, 1)]


def start_two_as_slurm_does(*flags):
    """The same, where the cluster says who is who: JAX takes the port from the number of the job."""
    job = free_port(2**16 - 2**12, 2**16 - 1) % 2**12
    slurm = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    ids = [{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in (0, 1)]
    return [start(*flags, "--distributed", **slurm, **who) for who in ids]


def finish(process):
    """The output of a process that ends well."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def params_of(run_dir):
    config = ppo.load_config(run_dir)
    envs = ppo.make_envs(config, 1)
    obs = np.zeros(envs.observation_space.shape, np.uint8)
    like = jax.eval_shape(lambda: ppo.init_state(ppo.make_network(envs), ppo.make_optimizer(config), obs, 0))
    return ppo.load_checkpoint(Path(run_dir), like)[0].params


def largest_difference(run_dir, other):
    differences = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params_of(run_dir), params_of(other))
    return max(jax.tree.leaves(differences))


def columns(run_dir, *names):
    return [[row[name] for name in names] for row in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The run directory of a run on one device."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    finish(start(*small(run_dir)))
    return run_dir


def test_two_devices_give_the_parameters_of_one(one_device, tmp_path):
    output = finish(start(*small(tmp_path / "run"), devices=2))
    assert "2 devices (cpu)" in output
    assert largest_difference(tmp_path / "run", one_device) < 1e-5


def test_two_processes_give_the_parameters_of_one_and_only_the_first_writes_and_speaks(one_device, tmp_path):
    outputs = [finish(process) for process in start_two(*small(tmp_path / "run"))]
    assert "2 devices (cpu)" in outputs[0] and "frames" not in outputs[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert largest_difference(tmp_path / "run", one_device) < 1e-5
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if "tfevents" not in path.name) == [
        "agent.gif", "checkpoints", "config.json", "metrics.csv", "result.json",
    ]  # fmt: skip
    names = ("frames", "charts/episodic_return", "charts/episodic_length")
    assert columns(tmp_path / "run", *names) == columns(one_device, *names)


def test_two_processes_stop_together_at_sigterm_and_resume_under_slurm(tmp_path):
    # Stopped as a cluster does it, at a time when they need not be in the same update.
    run_dir = tmp_path / "run"
    processes = start_two(*small(run_dir, frames=2_000_000), "--checkpoint-every", "1000000")
    wait_for_updates(run_dir, 3, processes)
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [130, 130], outputs
    assert f"--resume {run_dir}" in outputs[0] and "stopped" not in outputs[1]
    frames = int(columns(run_dir, "frames")[-1][0])
    assert int(next((run_dir / "checkpoints").iterdir()).stem) * 32 == frames
    processes = start_two_as_slurm_does("--resume", str(run_dir))
    wait_for_updates(run_dir, frames // 32 + 3, processes)
    for process in processes:
        process.kill()
        process.communicate()
    found = [int(frames) for (frames,) in columns(run_dir, "frames")]
    assert found == list(range(32, found[-1] + 1, 32)) and found[-1] > frames


def wait_for_updates(run_dir, count, processes):
    """Wait until metrics.csv has `count` rows."""
    deadline = time.monotonic() + 600
    while not (run_dir / "metrics.csv").exists() or len(columns(run_dir, "frames")) < count:
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def test_a_process_that_dies_takes_the_other_with_it(tmp_path):
    processes = start_two(*small(tmp_path / "run", frames=2_000_000))
    wait_for_updates(tmp_path / "run", 2, processes)
    processes[1].kill()
    processes[0].communicate(timeout=300)  # raises TimeoutExpired if it goes on waiting
    assert processes[0].returncode != 0
    assert processes[1].wait() == -signal.SIGKILL


def changed_script(tmp_path, change):
    """A program that is ppo_atari.py but for a change."""
    path = tmp_path / "changed.py"
    path.write_text(f"import os, signal, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport ppo_atari as ppo\n")
    with open(path, "a") as file:
        file.write(change + "\nsys.exit(ppo.main(sys.argv[1:]))\n")
    return path


def test_a_process_that_fails_takes_the_other_with_it(tmp_path):
    # JAX's own way out of a failed process waits for the other for 300 s, which waits for it.
    change = """
def fail(*args):
    raise OSError("the disk is full")
ppo.save_checkpoint = fail
"""
    processes = start_two(*small(tmp_path / "run", frames=2_000_000), script=changed_script(tmp_path, change))
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert processes[0].returncode == 1 and "the disk is full" in outputs[0]
    assert processes[1].returncode != 0


def test_sigterm_ends_a_process_that_is_still_compiling(tmp_path):
    change = """
def slow(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(300)
ppo.compile_functions = slow
"""
    flags = ["--distributed", "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "1"]
    flags += ["--process-id", "0", *small(tmp_path / "run")]
    process = start(*flags, script=changed_script(tmp_path, change))
    process.communicate(timeout=200)
    assert process.returncode == -signal.SIGTERM


def test_processes_with_unequal_devices_are_refused(tmp_path):
    processes = start_two(*small(tmp_path / "run"), "--num-envs", "6", devices=(2, 1))
    outputs = [process.communicate(timeout=200)[0] for process in processes]
    assert processes[0].returncode == 2 and "2 devices here" in outputs[0]
    assert processes[1].returncode != 0
    assert not (tmp_path / "run").exists()


def test_episodes_and_interrupts_of_all_processes_are_counted(monkeypatch):
    # The other process: three episodes whose returns sum to 3 and lengths to 90, and an interrupt.
    other = np.float32([3, 1, 3, 90])
    monkeypatch.setattr(ppo.multihost_utils, "process_allgather", lambda mine: np.stack([mine, other]))
    assert ppo.everywhere([(9.0, 10)], []) == ([(3.0, 25.0)], True)
    assert ppo.everywhere([], [signal.SIGTERM]) == ([(1.0, 30.0)], True)
    monkeypatch.setattr(ppo.multihost_utils, "process_allgather", lambda mine: np.stack([mine, 0 * other]))
    assert ppo.everywhere([], []) == ([], False)
    assert ppo.everywhere([(9.0, 10), (5.0, 20)], []) == ([(7.0, 15.0)], False)


def test_environments_that_cannot_be_spread_evenly_are_refused(tmp_path):
    process = start(*small(tmp_path / "run"), devices=3)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2
    assert "--num-envs 4" in output and "3 devices" in output and output.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_no_observation_changes_its_device():
    # The compiled update of two devices moves gradients and sums, and never the pictures, which are the only uint8.
    code = """
import jax, numpy as np, ppo_atari as ppo
config = ppo.Config(num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2, total_frames=96)
envs = ppo.make_envs(config, 4)
compiled = jax.stages.Lowered.compile
def show(lowered, *args, **kwargs):
    result = compiled(lowered, *args, **kwargs)
    print(*(line for line in result.as_text().splitlines() if any(
        f" {name}(" in line or f" {name}-start(" in line
        for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))), sep="\\n")
    return result
jax.stages.Lowered.compile = show
ppo.compile_functions(config, envs)
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "all-reduce" in done.stdout  # of the gradients
    assert "u8[" not in done.stdout
