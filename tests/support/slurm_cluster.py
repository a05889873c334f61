"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, in a folder and ports of their own.

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge. The daemons see a file of hosts that has
the names of the nodes, in a mount namespace; nothing of the system's own configuration is read or changed.
"""

import os
import shutil
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import waits

NODES = ("node1", "node2")
TOOLS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged", "unshare")

_CONFIG = """\
ClusterName=panther
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is queued again starts after this time: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={ports[0]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
# Time for the processes to save after SIGTERM.
KillWait=120
SchedulerParameters=batch_sched_delay=1,sched_interval=2
AccountingStorageType=accounting_storage/none
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """What this machine lacks, in words; None if a cluster can be started."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "needs root"


class SlurmCluster:
    """Started on entering, ended on leaving: the daemons, and with them their jobs."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self._daemons = []

    def __enter__(self):
        with ExitStack() as open_sockets:
            taken = [open_sockets.enter_context(socket.socket()) for _ in range(3)]
            for one in taken:
                one.bind(("127.0.0.1", 0))
            ports = [one.getsockname()[1] for one in taken]
        host = socket.gethostname().partition(".")[0]
        (self.folder / "state").mkdir()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        (self.folder / "slurm.conf").write_text(_CONFIG.format(host=host, folder=self.folder, ports=ports))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        try:
            own = (f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed"))
            self._start("munged", "--force", "--foreground", f"--socket={self.folder}/munge.socket", *own)
            self._until("munge's socket", (self.folder / "munge.socket").exists)
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            self._until("two idle nodes", lambda: self.call("sinfo", "-h", "-o", "%D %t").strip() == "2 idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        if len(self._daemons) == 2 + len(NODES):  # else there are no jobs
            # slurmd would leave the processes of jobs alone, in sessions of their own.
            for job in self.call("squeue", "--noheader", "--format=%i").split():
                self.call("scancel", "--signal=KILL", "--full", job)
                self.call("scancel", job)
            with suppress(AssertionError):
                self._until("end of the jobs", lambda: not self.call("squeue", "--noheader").strip())
        while self._daemons:
            process = self._daemons.pop()
            process.terminate()
            with suppress(AssertionError):
                waits.until(lambda process=process: process.poll() is not None, "still running", 30)
            process.kill()
            process.wait()

    def call(self, *command):
        """The output of one of Slurm's commands."""
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        done = waits.run(command, env=environment)
        return done.stdout if done.returncode == 0 else done.stderr

    def submit(self, script, *, path):
        """Submit a script from its folder, with ``path`` before PATH; the number of the job."""
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        environment["PATH"] = f"{path}:{environment['PATH']}"
        command = ["sbatch", "--parsable", Path(script).name]
        return waits.run(command, check=True, env=environment, cwd=Path(script).parent).stdout.strip()

    def state(self, job):
        """The fields of a job, by name."""
        assignments = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in assignments if "=" in word)

    def wait(self, job, limit_s=300):
        """The fields of a job that has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self._until(f"the end of job {job}", lambda: self.state(job).get("JobState") in ended, limit_s)
        return self.state(job)

    def _start(self, *command):
        # With a file of hosts that has the names of the nodes, in a namespace of its own.
        inside = 'mount --bind "$0" /etc/hosts && exec "$@"'
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        with open(self.folder / "daemons.txt", "a") as output:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", inside, str(self.folder / "hosts"), *command],
                env=environment, stdout=output, stderr=output,
            )  # fmt: skip
        self._daemons.append(process)

    def _until(self, what, is_there, limit_s=120):
        def is_there_yet():
            dead = [process.args[6] for process in self._daemons if process.poll() is not None]
            assert not dead, f"{dead} ended: {(self.folder / 'daemons.txt').read_text()[-2000:]}"
            return is_there()

        # The processes of jobs are not below those of the tests.
        waits.until(
            is_there_yet,
            lambda: f"no {what}: {self.call('squeue')}",
            limit_s,
            period_s=0.1,
        )
