"""Processes that train together, over loopback."""

import contextlib
import socket
import subprocess

from tests.experiments.support import ROOT, command, environment

SECONDS = 60  # in which the others must notice that one is dead


def gone(name="streaming"):
    """What a process says when another one is dead."""
    return (
        f"experiments.{name}: another process of this run has ended, or cannot be reached; the "
        "same commands together go on from the last checkpoint, and TF_CPP_MIN_LOG_LEVEL=0 shows "
        "what XLA knows.\n"
    )


def start(*flags, devices=8, module="tests.experiments.streaming", **variables):
    """A process of a binary, by default of the tiny experiment."""
    own = {
        "JAX_ENABLE_X64": "1",
        "TF_CPP_MIN_LOG_LEVEL": "4",  # a binary that has imported JAX already cannot say so itself
        **variables,
    }
    return subprocess.Popen(
        command(*flags, module=module),
        cwd=ROOT,
        env=environment(devices) | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    """A port that nobody listens at."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def explicit(port, count, number):
    """The flags, and the variables, of a process that is told of the others by flags."""
    address = f"--coordinator_address=localhost:{port}"
    return (address, f"--num_processes={count}", f"--process_id={number}"), {}


def slurm(port, count, number):
    """The same of one that SLURM has started."""
    return (), {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "JAX_COORDINATOR_PORT": str(port),
    }


@contextlib.contextmanager
def started(count, *flags, devices, told=explicit, **variables):
    """So many processes, each with so many devices; none is left over."""
    port, processes = free_port(), []
    for number in range(count):
        own, more = told(port, count, number)
        processes.append(start(*flags, *own, devices=devices, **more, **variables))
    try:
        yield processes
    finally:
        for process in processes:
            with process:  # which closes its pipes
                process.kill()


def ends(processes):
    """Each one's exit code, standard output and standard error."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=SECONDS if ended else None)
        ended.append((process.returncode, out, err))
    return ended


def trained(count, *flags, devices, **variables):
    """The ends of so many processes."""
    with started(count, *flags, devices=devices, **variables) as processes:
        return ends(processes)
