"""What a figure was measured on: the machine, the versions, the memory used, what was cached."""

import contextlib
import os
import platform
import re
import resource
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import tensorflow as tf

from pipelines.resources import num_cores

_PROBES_PER_FILE = 16
_HAS_AFFINITY = hasattr(os, "sched_getaffinity")


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GB and the names of the GPUs."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    gpus = tf.config.list_physical_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    return {
        "cpu": model,
        "cores": num_cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": [detail.get("device_name", "GPU") for detail in details],
    }


def versions() -> dict[str, str]:
    """Versions of what a figure depends on."""
    packages = ("tensorflow", "keras", "tensorflow_datasets")
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in packages}}


def resident_mb() -> float:
    """Memory this process holds now, in MB; its peak where the system does not tell."""
    return _status_mb("VmRSS")


def peak_mb() -> float:
    """The most this process has held since `reset_peak`, in MB."""
    return _status_mb("VmHWM")


def reset_peak() -> None:
    """Starts `peak_mb` anew; without effect where the system has no such thing."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as handle:
        handle.write("5")


def _status_mb(name: str) -> float:
    with contextlib.suppress(OSError), open("/proc/self/status") as handle:
        found = re.search(rf"{name}:\s+(\d+) kB", handle.read())
        if found:
            return int(found.group(1)) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def idle_secs() -> float | None:
    """Seconds that the cores this process may use have idled so far, added up; None if unknown."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)} if _HAS_AFFINITY else set()
    with contextlib.suppress(OSError), open("/proc/stat") as lines:
        rows = [line.split() for line in lines]
        ticks = sum(int(row[4]) + int(row[5]) for row in rows if row[0] in cores)
        return ticks / os.sysconf("SC_CLK_TCK")
    return None


def page_cache_share(paths: Sequence[str]) -> float | None:
    """The share of probed places of files that the system holds in memory; None: cannot be told."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    hits = probes = 0
    for path in paths:
        try:
            with open(path, "rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                for probe in range(min(size, _PROBES_PER_FILE)):
                    probes += 1
                    with contextlib.suppress(BlockingIOError):  # it would have to be read
                        place = size * probe // _PROBES_PER_FILE
                        os.preadv(handle.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
                        hits += 1
        except OSError:  # a remote file, or a file system without this
            return None
    return hits / probes if probes else None
