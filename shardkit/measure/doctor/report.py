"""The result of `doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from shardkit.measure.doctor.checks import Finding
from shardkit.measure.doctor.judgement import Diagnosis, LoopDiagnosis
from shardkit.measure.doctor.profile import Profile
from shardkit.measure.runner.other_load import OtherLoad
from shardkit.measure.runner.spec import Subject


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """Result of `doctor`."""

    subject: Subject | None
    """None if only the machine was checked."""
    findings: list[Finding]
    """Results of the checks of the machine, worst first."""
    load: OtherLoad | None = None
    """CPU use of other processes during the run."""
    profile: Profile | None = None
    diagnosis: Diagnosis | None = None
    loop: LoopDiagnosis | None = None
    """The training loop; None without ``model``, without time, or if it waits for most batches."""
    command: str = ""
    """Next step: a command, or Python code; empty if nothing measured helps."""
    hints: list[str] = field(default_factory=list)
    """Requirements of the command, and uses of its result."""

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values; times in seconds, rates in images/s."""
        return asdict(self)
