from __future__ import annotations

import pytest

from planetary.core.artifact_label import ArtifactLabel
from planetary.core.errors import TrustError
from planetary.runtime import host
from planetary.runtime.iree_device import check_label

CPUINFO = """processor : 0
vendor_id : GenuineIntel
model : 143
model name : Intel Xeon
cpu MHz : {mhz}
flags : {flags}

processor : 1
vendor_id : GenuineIntel
model : 143
cpu MHz : 999.0
flags : {flags}
"""


def test_a_cpu_is_identified_by_what_it_can_do() -> None:
    one = host.cpu_description(CPUINFO.format(mhz=1000, flags="sse2 avx2 fma"))
    same = host.cpu_description(CPUINFO.format(mhz=3000, flags="avx2 fma sse2"))
    other = host.cpu_description(CPUINFO.format(mhz=1000, flags="sse2 avx2"))
    assert one == same
    assert one != other
    assert "flags: avx2 fma sse2" in one
    assert "MHz" not in one


def test_this_machine_has_a_stable_name() -> None:
    assert host.host_features() == host.host_features()
    assert host.host_features().startswith(f"{host.architecture()}-")
    assert host.target_features("cpu", "host") == host.host_features()
    assert host.target_features("cpu", "baseline") == host.architecture()
    assert host.target_features("cuda", "sm_80") == ""
    assert host.usable_cores() >= 1


def _label(**changes: str) -> ArtifactLabel:
    fields = {
        "iree": "3.13.0",
        "backend": "cpu",
        "target": "host",
        "features": "x86_64-aa",
        "stablehlo": "00",
    }
    return ArtifactLabel(**(fields | changes))


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (_label(iree="3.12.0"), r"iree-base-runtime 3\.12\.0, this process has 3\.13\.0"),
        (_label(features="x86_64-bb"), "binary for another CPU.*x86_64-bb.*x86_64-aa"),
        (_label(target="baseline", features="aarch64"), "binary for another CPU.*aarch64.*x86_64"),
        (_label(backend="cuda", target="sm_80", features=""), "'cuda'.*'cpu'"),
    ],
)
def test_a_module_for_something_else_is_not_loaded(label: ArtifactLabel, says: str) -> None:
    with pytest.raises(TrustError, match=says):
        check_label(label, runtime_version="3.13.0", backend="cpu", features="x86_64-aa")


@pytest.mark.parametrize("label", [_label(), _label(target="baseline", features="x86_64")])
def test_a_module_for_this_machine_is_loaded(label: ArtifactLabel) -> None:
    check_label(label, runtime_version="3.13.0", backend="cpu", features="x86_64-aa")
