"""Many devices and many processes give what one device gives, and do not wait for the dead."""

import inspect
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from conftest import ROOT, SmallNetwork, frames_of, load_state, read_metrics

import ppo_atari as ppo

# 3 updates; each minibatch holds 2 * 8 rows of each of two devices.
SMALL = "--num-envs 4 --num-steps 8 --num-minibatches 2 --update-epochs 2".split()

# ppo_atari.py but for a network that is compiled in a moment, and pictures of a few steps.
PROGRAM = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
import flax.linen as nn, jax, jax.numpy as jnp
import ppo_atari as ppo
{inspect.getsource(SmallNetwork)}
ppo.ActorCritic, ppo.report = SmallNetwork, lambda config, params, run_dir: {{}}
"""
MAIN = """
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(ppo.main())
"""


def small(run_dir, frames=96):
    """The flags of a run of updates of 32 frames."""
    return [*SMALL, "--total-frames", str(frames), "--run-dir", str(run_dir)]


def start(*flags, devices=1, program=PROGRAM + MAIN, **variables):
    """Start a program in a process with this many CPU devices and these environment variables."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", program, *flags]
    return subprocess.Popen(
        command, env=env | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


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


def start_two(*flags):
    """Two processes of one run, [process 0, process 1], which meet on this machine."""
    flags = [*flags, "--distributed", "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    return [start(*flags, "--process-id", str(i)) for i in (0, 1)]


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


def wait_for_updates(run_dir, count, processes):
    """Wait until metrics.csv has `count` rows."""
    deadline = time.monotonic() + 600
    while not (run_dir / "metrics.csv").exists() or len(read_metrics(run_dir)) < count:
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.fixture
def largest_difference(monkeypatch):
    """largest_difference(run_dir, other) of the parameters of two runs."""
    monkeypatch.setattr(ppo, "ActorCritic", SmallNetwork)

    def compare(*run_dirs):
        first, second = (load_state(ppo, run_dir, ppo.load_config(run_dir)).params for run_dir in run_dirs)
        assert not np.array_equal(*(jax.tree.leaves(x)[-1] for x in (first, jax.tree.map(np.zeros_like, first))))
        return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), first, second)))

    return compare


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The run directory of a run on one device."""
    run_dir = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "ActorCritic", SmallNetwork)
        patch.setattr(ppo, "report", lambda *args: {})
        assert ppo.main(small(run_dir)) == 0
    return run_dir


TWO_DEVICES = """
compiled = jax.stages.Lowered.compile
def show(lowered, *args, **kwargs):
    result = compiled(lowered, *args, **kwargs)
    print(*(line for line in result.as_text().splitlines() if any(
        f" {name}(" in line or f" {name}-start(" in line
        for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce"))), sep="\\n")
    return result
jit = jax.jit
def shown(function, **kwargs):
    jitted, programs = jit(function, **kwargs), {}
    def call(*args):
        return programs.setdefault("it", jitted.lower(*args).compile())(*args) if args else jitted()
    return call if getattr(getattr(function, "func", None), "__name__", "") == "update" else jitted
jax.stages.Lowered.compile, jax.jit = show, shown
print("refused:", ppo.main([*sys.argv[1:], "--num-envs", "3", "--total-frames", "960"]))
sys.exit(ppo.main())
"""


def test_two_devices_give_the_parameters_of_one_and_no_observation_changes_its_device(
    one_device, tmp_path, largest_difference
):
    # The compiled update of two devices moves gradients and sums, and never the pictures, which are the only uint8.
    output = finish(start(*small(tmp_path / "run"), devices=2, program=PROGRAM + TWO_DEVICES))
    refusal, code, rest = output.split("\n", 2)
    assert "--num-envs 3" in refusal and "2 devices" in refusal and code == "refused: 2"
    assert "on 2 cpu" in rest
    assert "all-reduce" in rest and "u8[" not in rest
    assert largest_difference(tmp_path / "run", one_device) < 1e-5


def test_two_processes_give_the_parameters_of_one_and_only_the_first_writes_and_speaks(
    one_device, tmp_path, largest_difference
):
    outputs = [finish(process) for process in start_two(*small(tmp_path / "run"))]
    assert "on 2 cpu" in outputs[0] and "frames" not in outputs[1]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert largest_difference(tmp_path / "run", one_device) < 1e-5
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if "tfevents" not in path.name) == [
        "checkpoint.msgpack", "config.json", "metrics.csv", "result.json",
    ]  # fmt: skip
    names = ("frames", "charts/episodic_return", "charts/episodic_length")
    first, second = read_metrics(tmp_path / "run"), read_metrics(one_device)
    assert [[row[name] for name in names] for row in first] == [[row[name] for name in names] for row in second]


def test_a_process_that_is_killed_takes_the_other_with_it_and_both_resume_under_slurm_until_sigterm(tmp_path):
    run_dir = tmp_path / "run"
    processes = start_two(*small(run_dir, frames=2_000_000), "--checkpoint-every", "1")
    wait_for_updates(run_dir, 3, processes)
    processes[1].kill()
    processes[0].communicate(timeout=300)  # raises TimeoutExpired if it goes on waiting
    processes[1].communicate()
    assert processes[0].returncode != 0 and processes[1].returncode == -signal.SIGKILL
    rows = len(frames_of(run_dir))
    processes = start_two_as_slurm_does("--resume", str(run_dir))
    wait_for_updates(run_dir, rows + 3, processes)
    processes[0].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert processes[0].returncode == 130 and f"--resume {run_dir}" in outputs[0], outputs
    assert processes[1].returncode != 0
    found = frames_of(run_dir)
    assert found == list(range(32, found[-1] + 1, 32)) and len(found) >= rows + 3


@pytest.mark.parametrize("error, code", [
    (OSError("the disk is full"), 1), (ValueError("a fault of the script"), 1), (ppo.UsageError("of the user"), 2),
])  # fmt: skip
def test_a_process_that_fails_does_not_wait_for_the_others_on_its_way_out(monkeypatch, capsys, error, code):
    # JAX's own way out of a failed process waits for the other for 300 s, which waits for it.
    def fail(config):
        raise error

    left = []
    monkeypatch.setattr(ppo, "train", fail)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(ppo.os, "_exit", left.append)
    ppo.main([])
    assert left == [code]
    assert str(error) in capsys.readouterr().err


def test_processes_with_unequal_devices_are_refused(tmp_path, monkeypatch):
    # As the second of two processes finds it, with one device where the first has two.
    for name, found in (("local_device_count", 1), ("process_count", 2), ("device_count", 3)):
        monkeypatch.setattr(jax, name, lambda found=found: found)
    for index in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda: index)
        with pytest.raises(ppo.UsageError, match="another number of devices"):
            ppo.train(ppo.Config(num_envs=6, run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("others, expected", [([3, 3, 90], (3.0, 25.0)), ([0, 0, 0], (9.0, 10.0))])
def test_episodes_of_all_processes_are_counted(monkeypatch, others, expected):
    envs = ppo.make_envs(ppo.Config(), 1).env
    gather = "process_allgather"
    monkeypatch.setattr(ppo.multihost_utils, gather, lambda mine: np.stack([mine, np.float32(others)]))
    envs.return_queue.append(9.0)
    envs.length_queue.append(10)
    names = ("charts/episodic_return", "charts/episodic_length")
    assert ppo.finished_games(envs) == dict(zip(names, expected))
    assert not envs.return_queue and not envs.length_queue
    monkeypatch.setattr(ppo.multihost_utils, gather, lambda mine: np.stack([mine, 0 * mine]))
    assert np.isnan([*ppo.finished_games(envs).values()]).all()
