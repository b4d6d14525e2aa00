"""The machine: GPU, driver, versions, CPU, commit and date."""

from __future__ import annotations

import subprocess
from datetime import date
from typing import Any

import torch
from gpu_parts.job import Job
from isolation import Progress
from report import machine

from shardkit.system.machine import usable_cpus


def run(values: dict[str, Any], progress: Progress) -> None:
    """Describe the machine, the CPU before the GPU: CUDA may fail to start."""
    job = Job.of(values)
    progress.add("date", remark=str(date.today()))
    progress.add("machine", remark=machine())
    progress.add("cores", usable_cpus())
    progress.add("PyTorch", remark=f"{torch.__version__}, CUDA {torch.version.cuda}")
    progress.add("driver", remark=_driver())
    if job.device.type == "cuda":
        properties = torch.cuda.get_device_properties(job.device)
        memory = properties.total_memory / 2**30
        version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        progress.add("GPU", memory, "GiB", remark=f"{properties.name}, cuDNN {version}")


def _driver() -> str:
    """Return the driver's version, or why it is unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__} of nvidia-smi"
    return done.stdout.split("\n")[0]
