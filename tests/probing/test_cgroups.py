"""Control groups made up as folders: version 1 and 2, nested, unlimited, seen from inside a container."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from anyfit.probing import cgroups, host

GIB = 2**30


@pytest.fixture
def tree(tmp_path: Path):
    """Writes the files of a tree and the process's membership; gives the two paths."""

    def make(membership: str, files: dict[str, str]) -> tuple[Path, Path]:
        root = tmp_path / "cgroup"
        root.mkdir()
        for name, content in files.items():
            file = root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content + "\n")
        member = tmp_path / "self"
        member.write_text(membership + "\n")
        return root, member

    return make


def test_version_2_reads_the_groups_own_limit(tree) -> None:
    where = tree("0::/job", {"job/memory.max": str(8 * GIB), "job/memory.high": "max"})
    assert cgroups.memory_limit_bytes(*where) == 8 * GIB


def test_max_is_no_limit(tree) -> None:
    assert cgroups.memory_limit_bytes(*tree("0::/job", {"job/memory.max": "max"})) == math.inf


def test_the_tightest_limit_on_the_way_to_the_root_counts(tree) -> None:
    files = {
        "slice/memory.max": str(4 * GIB),
        "slice/job/memory.max": str(16 * GIB),
        "slice/job/step/memory.max": "max",
    }
    assert cgroups.memory_limit_bytes(*tree("0::/slice/job/step", files)) == 4 * GIB


def test_a_process_slowed_at_a_limit_is_limited_by_it(tree) -> None:
    where = tree("0::/job", {"job/memory.max": "max", "job/memory.high": str(2 * GIB)})
    assert cgroups.memory_limit_bytes(*where) == 2 * GIB


def test_version_1_reads_the_memory_controllers_tree(tree) -> None:
    membership = "9:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/"
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/docker/abc/memory.limit_in_bytes": str(3 * GIB),
        "cpu,cpuacct/other/memory.limit_in_bytes": str(1 * GIB),
    }
    assert cgroups.memory_limit_bytes(*tree(membership, files)) == 3 * GIB


def test_in_a_container_the_mounted_root_is_the_containers_group(tree) -> None:
    """/proc names the path as the host sees it; below the mount it does not exist."""
    where = tree("4:memory:/kubepods/pod1/abc", {"memory/memory.limit_in_bytes": str(5 * GIB)})
    assert cgroups.memory_limit_bytes(*where) == 5 * GIB


def test_a_membership_above_the_namespace_is_survived(tree) -> None:
    where = tree("0::/../../other", {"memory.max": str(6 * GIB)})
    assert cgroups.memory_limit_bytes(*where) == 6 * GIB


def test_no_control_groups_is_no_limit(tmp_path: Path) -> None:
    assert cgroups.memory_limit_bytes(tmp_path / "none", tmp_path / "nothing") == math.inf
    assert cgroups.cpu_limit(tmp_path / "none", tmp_path / "nothing") == math.inf


def test_garbage_in_a_limit_is_no_limit(tree) -> None:
    assert cgroups.memory_limit_bytes(*tree("0::/job", {"job/memory.max": "lots"})) == math.inf


def test_what_a_group_has_left_is_what_nobody_in_it_took_and_what_files_give_back(tree) -> None:
    stat = f"anon {5 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nworkingset_refault_file 7"
    files = {"job/memory.max": str(8 * GIB), "job/memory.current": str(7 * GIB), "job/memory.stat": stat}
    files |= {"job/inner/memory.max": "max", "job/inner/memory.current": str(6 * GIB)}
    assert cgroups.memory_left_bytes(*tree("0::/job/inner", files)) == 2.5 * GIB


def test_what_a_group_of_version_1_has_left(tree) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    files = {"memory/job/memory.limit_in_bytes": str(8 * GIB), "memory/job/memory.usage_in_bytes": str(7 * GIB)}
    where = tree("4:memory:/job", files | {"memory/job/memory.stat": stat})
    assert cgroups.memory_left_bytes(*where) == 2 * GIB


def test_a_group_without_a_limit_or_whose_use_is_not_known_leaves_all(tree) -> None:
    assert cgroups.memory_left_bytes(*tree("0::/job", {"job/memory.max": str(GIB)})) == math.inf


def test_processor_quotas_of_both_versions(tree, tmp_path: Path) -> None:
    root, member = tree("0::/job\n3:cpu,cpuacct:/job", {"job/cpu.max": "250000 100000", "job/inner/cpu.max": "max 100000"})
    assert cgroups.cpu_limit(root, member) == 2.5
    quota = root / "cpu,cpuacct" / "job"
    quota.mkdir(parents=True)
    (quota / "cpu.cfs_quota_us").write_text("-1\n")
    (quota / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroups.cpu_limit(root, member) == 2.5
    (quota / "cpu.cfs_quota_us").write_text("150000\n")
    assert cgroups.cpu_limit(root, member) == 1.5


def test_the_host_has_no_more_than_its_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    total = host.memory_figure().value
    monkeypatch.setattr(cgroups, "memory_limit_bytes", lambda: total / 2)
    assert host.memory_figure().value == total / 2
    assert "control group" in host.memory_figure().source
    monkeypatch.setattr(cgroups, "cpu_limit", lambda: 0.5)
    assert host.cores() == 1


def test_pinnable_memory_is_a_share_of_the_limit_unless_locking_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_memlock_bytes", lambda: math.inf)
    assert host.pinnable_figure(100 * GIB).value == 75 * GIB
    monkeypatch.setattr(host, "_memlock_bytes", lambda: 8.0 * 2**20)
    monkeypatch.setattr(host, "_pins_beyond", lambda locked: False)
    assert host.pinnable_figure(100 * GIB).value == 8 * 2**20
    monkeypatch.setattr(host, "_pins_beyond", lambda locked: True)
    assert host.pinnable_figure(100 * GIB).value == 75 * GIB
