"""What `infcl-gen doctor` reports: devices, links, versions, what works here, and what to do about the rest."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import re
from collections.abc import Iterator
from typing import Any

from infcl_gen.errors import InfclError
from infcl_gen.hardware.detection import detect, find_device
from infcl_gen.hardware.links import LinkRates, measure
from infcl_gen.version import installed

_MINIMUM = {"torch": ((2, 11), "runs packages"), "triton": ((3, 6), "compiles kernels for GPUs")}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `state` is "ok", "missing", "old" or "broken"; `advice` is empty where it is "ok"."""

    subject: str
    state: str
    detail: str
    advice: str = ""


@dataclasses.dataclass
class Report:
    """What was found, and the bandwidth between GPUs where there are several; `profile` is what they are planned as."""

    findings: list[Finding]
    links: LinkRates | None = None
    profile: str = "FILE.toml"


def examine() -> Report:
    """Everything that is known about this machine. Never raises for something missing: that is a finding."""
    python = Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    report = Report([python, *map(_version, _MINIMUM)])
    if importlib.util.find_spec("torch") is None:
        return report
    try:
        for finding in _torch(report):
            report.findings.append(finding)
    except Exception as error:  # a broken installation shows itself as anything, from OSError to AttributeError
        report.findings.append(Finding("torch", "broken", f"{type(error).__name__}: {error}", "reinstall torch"))
    return report


def _version(name: str) -> Finding:
    least, use = _MINIMUM[name]
    advice = f"install {name} {least[0]}.{least[1]} or newer"
    version = installed(name).get(name)
    if version is None:
        return Finding(name, "missing", f"{name} {use}", advice)
    if tuple(map(int, re.findall(r"[0-9]+", version)[:2])) < least:
        return Finding(name, "old", version, advice)
    return Finding(name, "ok", version)


def _torch(report: Report) -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    found = find_device()
    gpus = 0 if found is None else torch.cuda.device_count()
    if found is None:
        advice = "the cpu target works; for GPUs, a driver and its torch build"
        yield Finding("gpu", "missing", "no GPU that torch can use", advice)
    else:
        for index in range(gpus):
            properties: Any = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.1f} GiB"
            count = f"{properties.multi_processor_count} multiprocessors"
            yield Finding(f"gpu {index}", "ok", f"{properties.name}, {found.arch}, {memory}, {count}")
    try:
        profile = detect()
        report.profile = profile.name
        yield Finding("device profile", "ok", f"{profile.name} ({profile.arch}), used for --device-profile auto")
    except InfclError as error:
        yield Finding("device profile", "missing", str(error), "describe the device in a TOML file")
    if gpus > 1:
        yield _links(torch, report)
    if dist.is_available() and dist.is_gloo_available():
        yield Finding("gloo", "ok", "rings of CPU processes")
    else:
        detail = "rings of CPU processes, and the ranks' agreement"
        yield Finding("gloo", "missing", detail, "install torch with distributed support")
    if gpus and dist.is_available() and dist.is_nccl_available():
        yield Finding("nccl", "ok", "rings of GPUs")
    elif gpus:
        yield Finding("nccl", "missing", "rings of GPUs", "install torch with NCCL")
    yield from _triton(gpus > 0)


def _links(torch: Any, report: Report) -> Finding:
    devices = range(torch.cuda.device_count())
    pairs = [(a, b) for a in devices for b in devices if a != b]
    direct = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    try:
        report.links = links = measure(torch)
    except RuntimeError as error:
        return Finding("links", "broken", " ".join(str(error).split()), "free the GPUs' memory, and try again")
    rate, a, b = links.slowest
    detail = f"{len(direct)} of {len(pairs)} pairs direct; slowest {a} to {b}: {rate:.0f} GB/s"
    detail += f"; each to the next at once: {links.ring:.0f} GB/s"
    if len(direct) == len(pairs):
        return Finding("links", "ok", detail)
    return Finding("links", "missing", detail, "rings work through the host, slower; check the topology")


def _triton(gpu: bool) -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        return
    try:
        from triton.backends import backends
    except Exception as error:
        yield Finding("triton backends", "broken", f"{type(error).__name__}: {error}", "reinstall triton")
        return
    yield Finding("ahead of time", "ok", f"infcl-gen verify --aot can compile for: {', '.join(sorted(backends))}")
    if importlib.util.find_spec("numpy") is None:
        yield Finding("interpreter", "missing", "kernels on the CPU, for tests", "install numpy")
    elif not gpu:
        yield Finding("interpreter", "ok", "TRITON_INTERPRET=1 runs kernels on the CPU, slowly, for tests")
