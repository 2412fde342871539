"""`gpurun submit --plan …` and budget long_compute: a job is given away, and a manifest says so to others (the async-job contract).

Everything that can be wrong is found before anything is sent, then the plan is reserved on disk, then the run is begun, and the manifest is
written as soon as the backend has the job and a name for it. What a submit that was cut short left behind is settled first.
"""

from __future__ import annotations

import os
import shlex
import sys

from gpurun import asyncjobs, fsm
from gpurun.asyncjobs import Reservation
from gpurun.config import Cluster, External, Job
from gpurun.errors import ConfigError, GpurunError, RecordError
from gpurun.external import SUBMITTED, Own, Plan, build, printable
from gpurun.messages import TERMINAL
from gpurun.polling import settle_left_overs
from gpurun.records import Record
from gpurun.screen import Screen
from gpurun.stopping import Way

WAITING = "external_job_waiting"
NEEDED = {"plan": "--plan ID", "phase": "--phase N", "verify": "--verify CMD"}


class Submission:
    """One job that is given away for a plan. `check` and `reserve` before the run is begun, `end` after its driver has ended, however it did."""

    def __init__(self, job: Job, external: External, cluster: Cluster, runs_dir: str) -> None:
        """ConfigError when the manifest could not be written."""
        lacking = [key for key in NEEDED if not getattr(external, key)]
        if lacking:
            raise ConfigError(f"{job.path}: to be waited for by others the job needs {', '.join(lacking)}: in [external_job], or as "
                              f"`gpurun submit {os.path.basename(job.path)} {' '.join(NEEDED[key] for key in lacking)}`")
        self._external, self._runs_dir, self._cluster = external, runs_dir, cluster
        self._backend = "slurm" if cluster.slurm is not None else "node"
        self._expected = external.expected or job.outputs
        if not self._expected:
            raise ConfigError(f"{job.path}: the job declares no outputs, so there is nothing that would prove that it is done: add `outputs` to [job]")
        self._project = asyncjobs.find_project(os.getcwd(), runs_dir)
        self._settings = asyncjobs.settings(self._project, os.environ)
        self._reservation: Reservation | None = None

    def check(self, way: Way, screen: Screen, operator: str) -> None:
        """Settles what submits that were cut short have left; then RecordError when the plan has a job that isn't over."""
        settle_left_overs(self._project, way, screen, operator, self._external.plan)
        for one in asyncjobs.read_all(self._project):
            if one.manifest.plan_id == self._external.plan and one.manifest.waiting:
                raise RecordError(f"plan {printable(self._external.plan)} has the job {printable(one.manifest.job_id)}, which is {one.manifest.status} as far as {one.path} knows; "
                                  f"a second one would do the same work. See how it is with `gpurun poll {printable(one.manifest.job_id)}`")
        if self._project.planning and not self._settings.enabled:
            screen.say(f"external_job.enabled isn't set in {self._project.planning}/config.json: GSD itself submits nothing there; this manifest is written all the same")

    def reserve(self, run_id: str) -> None:
        """The plan is this run's from now on, on disk."""
        external = self._external
        plan = Plan(external.plan, external.phase, self._backend, shlex.join(["gpurun", *sys.argv[1:]]), self._expected, external.verify,
                    external.resume or f"gpurun poll {run_id}")
        own = Own(run_id, self._runs_dir, str(self._cluster.path or ""), os.getcwd())
        self._reservation = asyncjobs.reserve(self._project, plan, own)

    def end(self, record: Record, screen: Screen) -> dict[str, str]:
        """Writes the manifest if the backend has the job: what is told of it. {}: it hasn't, or nobody knows (a trace on disk says so then)."""
        reservation = self._reservation
        if reservation is None:
            return {}
        lifecycle = fsm.Run(**record.fsm) if record.fsm else None
        job_id = str(record.backend.get("job_id") or "") if self._backend == "slurm" else record.run_id
        if job_id and (self._backend == "slurm" or record.detached or lifecycle is not None and lifecycle.exit_code is not None):
            trace = reservation.trace
            try:
                path = reservation.write(build(trace.plan, job_id, SUBMITTED, trace.submitted_at, own=trace.own))
            except RecordError as error:
                raise GpurunError(f"the job {printable(job_id)} was submitted (run {record.run_id}) and goes on, and its manifest could not be written: {error}. Once that is "
                                  "set right, `gpurun poll --all` writes it; until then nothing else is submitted for this plan") from None
            if reservation.moved:
                screen.say(f"the manifest of the plan's earlier job, which is over, is in {reservation.moved} now")
            where = os.path.join(self._settings.artifact_dir, job_id) if self._project.planning else os.path.join(self._runs_dir, record.run_id, "outputs")
            return {"job_id": job_id, "run_id": record.run_id, "manifest": path, "artifact_dir": where, "state": WAITING}
        if lifecycle is None or lifecycle.ended or record.state in TERMINAL and not fsm.unsettled(lifecycle):
            reservation.drop()                 # nothing of it runs, and nothing will
        else:
            reservation.release()
            screen.warn(f"whether the job of plan {printable(self._external.plan)} was submitted isn't known here yet: `gpurun poll --all` settles it, and until "
                        "then nothing else is submitted for this plan")
        return {}
