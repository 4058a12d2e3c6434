"""A Slurm of two nodes for tests: the daemons of installed packages, on loopback alone.

Both nodes are this machine. Each has namespaces of its own for its host name, for /etc/hosts, and for TMPDIR, a path
that is another folder on each. Processors, memory and GPUs are what the files under `infra/` ask for; the machine need
not have them.
"""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

INFRA = Path(__file__).parents[2] / "infra"
DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = {"node1": "127.0.1.1", "node2": "127.0.1.2"}
SECONDS = 60.0
"""In which daemons answer."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
GresTypes=gpu
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
NODE = "NodeName={name} NodeAddr={address} Port={port} CPUs=32 CoresPerSocket=32 RealMemory=131072 Gres=gpu:8"
ENTERS = """
mount --bind "$1/hosts" /etc/hosts
mount --bind "$1/of-$2" "$1/scratch"
hostname "$2"
slurmd -D -N "$2" -f "$1/slurm.conf" &
wait
"""
"""What makes a process a node: $1 is the folder of this Slurm, $2 the node's name. Its first process
is bash, which takes over those whose parent has ended; with it all of them end."""


def why_not() -> str:
    """Why this machine cannot have a Slurm; empty where it can."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "a node has a host name of its own, for which Slurm's daemons have to be root's"
    tried = subprocess.run(["unshare", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


class Slurm:
    """The daemons, a folder to submit from, and the commands of a user."""

    def __init__(self, folder: Path):
        self.folder, self.project = folder, folder / "project"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(1 + len(NODES))
        nodes = [
            NODE.format(name=name, address=address, port=port)
            for (name, address), port in zip(NODES.items(), ports[1:], strict=True)
        ]
        for name in ("state", "scratch", *(f"of-{name}" for name in NODES)):
            (folder / name).mkdir()
        hosts = [f"{address} {name}" for name, address in NODES.items()]
        (folder / "hosts").write_text("\n".join([Path("/etc/hosts").read_text(), *hosts, ""]))
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(), port=ports[0], user="root", folder=folder, nodes="\n".join(nodes)
            )
        )
        for number in range(8):
            # As /dev/null is; Slurm looks at them alone.
            os.mknod(folder / f"gpu{number}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        # What a user has after `git clone` and `make`: the scripts, and the environment that runs these tests.
        self.project.mkdir()
        (self.project / "infra").symlink_to(INFRA)
        (self.project / ".venv").symlink_to(sys.prefix)
        unset = [n for n in os.environ if n.startswith(("SLURM_", "SBATCH_", "SRUN_", "RLHF_SCRATCH"))]
        self.environment = {name: value for name, value in os.environ.items() if name not in unset}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "TMPDIR": str(folder / "scratch")}

    def start(self) -> None:
        """Starts all daemons, and waits until both nodes are idle."""
        # The folder is this user's alone, which munged takes for a fault.
        munge = ["--force"] + [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "seed", "log")]
        self._start("munged", "munged", "--foreground", f"--socket={self.folder}/munge.socket", *munge)
        self.until(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        self.until(lambda: self.states() == dict.fromkeys(NODES, "idle"), "idle nodes")

    def start_controller(self) -> None:
        """Starts slurmctld, or starts it again."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))

    def start_node(self, name: str) -> None:
        """Starts a node, or starts it again."""
        enter = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._start(name, *enter, "bash", "-euc", ENTERS, "bash", str(self.folder), name)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                # They end with the process of the tests, also where that is killed.
                ["setpriv", "--pdeathsig=KILL", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends all jobs, then the daemons and whatever is left of the nodes; each, whatever becomes of another."""
        with contextlib.ExitStack() as stack:
            for name in self._processes:
                stack.callback(self.kill_node if name in NODES else self.end, name)

    def end(self, name: str) -> None:
        """Ends a daemon, by force where it takes long."""
        process = self._processes[name]
        process.terminate()
        try:
            process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def processes_of(self, node: str) -> list[int]:
        """The processes of a node: those of its namespace."""
        process = self._processes[node]
        if process.poll() is not None:
            return []
        mine = os.readlink("/proc/self/ns/uts"), os.readlink(f"/proc/{process.pid}/ns/uts")
        if mine[0] == mine[1]:
            # It has no namespace yet.
            return [process.pid]
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "uts") == mine[1]:
                    found.append(int(entry.name))
        return found

    def kill_node(self, name: str) -> None:
        """The node's host is gone at once, with all that runs on it."""
        found = self.processes_of(name)
        # Stopped first, that none of them sees another's end.
        for how in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, how)
        self._processes[name].wait()

    def states(self) -> dict[str, str]:
        """State of each node, as `sinfo` says it."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %T"], env=self.environment, capture_output=True, text=True
        )
        return {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}

    def command(self, *command: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
        """Output of a command of Slurm in a folder, the project's if None. Raises AssertionError where it fails."""
        variables = self.environment | dict(environment or {})
        done = subprocess.run(
            command, cwd=folder or self.project, env=variables, capture_output=True, text=True, timeout=5 * SECONDS
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def submit(
        self,
        script: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        **variables: str,
    ) -> int:
        """The number of a job: `sbatch OPTIONS --export=ALL,VARIABLES infra/SCRIPT` in a shell of this environment."""
        export = ",".join(["--export=ALL", *(f"{name}={value}" for name, value in variables.items())])
        given = ["--parsable", f"--output={self.project}/slurm-%j.out", *options, export]
        return int(self.command("sbatch", *given, f"infra/{script}", environment=environment, folder=folder))

    def job(self, number: int) -> dict[str, str]:
        """What `scontrol show job` says."""
        words = self.command("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def output(self, number: int) -> str:
        """What the job has written so far, in all its lives."""
        path = self.project / f"slurm-{number}.out"
        return path.read_text() if path.exists() else ""

    def ends(self, number: int, state: str, seconds: float) -> str:
        """The job's output, once it has ended in this state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.job(number)["JobState"] in ended, f"the end of job {number}", seconds, number)
        assert self.job(number)["JobState"] == state, self.output(number)
        return self.output(number)

    def until(
        self, reached: Callable[[], bool], what: str, seconds: float = SECONDS, number: int | None = None
    ) -> None:
        """Waits for a moment. Raises AssertionError with the daemons' logs, or a job's output, where it stays away."""
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                logs = [path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log"))]
                told = "\n".join(logs) if number is None else self.output(number)
                raise AssertionError(f"waited {seconds:.0f} s for {what}:\n{told}")
            time.sleep(0.5)


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A Slurm of two idle nodes in an empty folder, whose path has to be short: munged's socket is in it."""
    started = Slurm(folder)
    try:
        started.start()
        yield started
    finally:
        started.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
