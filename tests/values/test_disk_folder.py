"""The folder for state on the disk: named, or the roomiest of the usual ones; none that is no disk, unless it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from anyfit.values import disk_folder
from anyfit.values.disk_folder import DiskFolder, file_system, why_not

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 22 0:25 / {place}/ram rw,nosuid - tmpfs tmpfs rw
31 22 0:26 / {place}/net\\040work rw - nfs4 server:/home rw
32 31 259:1 /scratch {place}/net\\040work/local rw shared:7 master:1 - xfs /dev/nvme0n1 rw
33 22 0:27 / {place}/shown rw - fuse.sshfs user@host: rw
34 22 0:28 / {place}/twice rw - tmpfs tmpfs rw
35 22 259:2 / {place}/twice rw - btrfs /dev/nvme1n1 rw
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "mountinfo"
    found.write_text(MOUNTS.format(place=str(tmp_path).replace(" ", "\\040")))
    for name in ("ram", "net work/local", "shown", "twice"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(disk_folder.why_not, "__defaults__", (found,))
    return found


def test_a_folder_is_on_the_file_system_that_is_mounted_nearest_above_it(tmp_path: Path, mounts: Path) -> None:
    found = {
        name: file_system(tmp_path / name, mounts)
        for name in ("ram/not/there", "net work/x", "net work/local/x", "shown", "twice", "else", "ramp")
    }
    assert list(found.values()) == ["tmpfs", "nfs4", "xfs", "fuse.sshfs", "btrfs", "ext4", "ext4"]
    (tmp_path / "link").symlink_to(tmp_path / "ram")
    assert file_system(tmp_path / "link" / "x", mounts) == "tmpfs"
    assert file_system(tmp_path, tmp_path / "no such file") == ""


def test_a_named_folder_that_is_no_disk_is_refused_unless_it_may_be(tmp_path: Path, mounts: Path) -> None:
    with pytest.raises(ValueError, match=r"ram lies in memory \(tmpfs\); name a folder on a disk of this machine, or use it"):
        DiskFolder(tmp_path / "ram").found()
    with pytest.raises(ValueError, match=r"net work lies behind a network, or behind another process \(nfs4\)"):
        DiskFolder(tmp_path / "net work").found()
    assert DiskFolder(tmp_path / "ram", any_file_system=True).found() == tmp_path / "ram"
    assert DiskFolder(tmp_path / "net work" / "local").found() == tmp_path / "net work" / "local"


def test_the_usual_folder_is_the_roomiest_disk(tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [tmp_path / name for name in ("ram", "net work", "net work/local", "twice", "else")]
    room = dict(zip(usual, (50, 40, 20, 30, 10), strict=True))
    monkeypatch.setattr(disk_folder, "_usual", lambda: iter(usual))
    monkeypatch.setattr(disk_folder, "free_bytes", lambda folder: room[folder])
    assert DiskFolder().found() == tmp_path / "twice"
    assert DiskFolder(any_file_system=True).found() == tmp_path / "ram"
    del usual[2:]
    with pytest.raises(ValueError, match=r"no folder for optimizer state on a disk: .*ram lies in memory .*net work lies"):
        DiskFolder().found()


def test_a_folder_that_is_still_to_be_made_has_the_room_that_is_above_it(tmp_path: Path) -> None:
    room = disk_folder.free_bytes(tmp_path / "not" / "there")
    assert room == pytest.approx(disk_folder.free_bytes(tmp_path), rel=0.1)
    assert why_not(tmp_path / "not" / "there") == why_not(tmp_path)
