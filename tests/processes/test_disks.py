"""Full, read-only and unreliable file systems; folders that others own or can write. The caller always gets its kernel."""

from __future__ import annotations

import errno
import os
import subprocess

import helpers_store as h
import pytest

#: Wants the kernel twice, as two ops of one process do; then another look-up, under the policy of a frozen server.
WANTS = """
built = []
def build(of):
    built.append(1)
    return artifact(of, size=int(sys.argv[2]) if len(sys.argv) > 2 else 3000)
found = [store.find_or_build(config(), build) for _ in range(2)]
frozen = store.find(config(), policy="cached")
report(kinds=[f.kind for f in found] + [frozen.kind], built=len(built), right=len({f.artifact.cubin for f in [*found, frozen]}) == 1,
       trace=store.find(config(P=256)).trace, stats=store.stats(), step=found[0].trace[-1][2])
"""

IN_MEMORY = ["jit", "memory", "memory"]


def wants(place, *arguments, **options):
    return h.run(WANTS, str(place), *arguments, env=h.environment(place), **options)


def publish(place, **options):
    assert h.run("report(stored=store.publish(artifact()).stored)", env=h.environment(place), **options)["stored"]


def kept_in_memory(seen, reason):
    assert (seen["kinds"], seen["built"], seen["right"]) == (IN_MEMORY, 1, True)
    [warning] = [w for w in seen["warnings"] if "in memory only" in w]
    assert reason in warning
    assert seen["stats"]["publish_failures"] == 1


def test_full_disk(disk, fault):
    place = disk("256k")
    seen = wants(place / "cache", "1000000")
    kept_in_memory(seen, "No space left on device (ENOSPC)")
    names = {p.name for p in (place / "cache").rglob("*") if not p.is_dir()}
    assert names <= {f"{h.config().key[:2]}.lock"}, "half an entry was left on a full disk"
    (place / "ballast").write_bytes(bytes(200 * 1024))
    with open(place / "ballast", "ab") as file, pytest.raises(OSError):
        file.write(bytes(1 << 20))
        file.flush()
    seen = wants(place / "cache")
    kept_in_memory(seen, "ENOSPC")
    (place / "ballast").unlink()
    assert wants(place / "cache")["kinds"] == ["jit", "cache", "cache"]
    assert wants(place / "cache")["kinds"] == ["cache"] * 3
    fault(
        "disk full (ENOSPC on a real tmpfs)",
        "the kernel is used from memory, one warning says why, no partial entry stays; a hit again once there is room",
    )


def test_no_inodes_left(disk, fault):
    place = disk("1m", nr_inodes="3")
    kept_in_memory(wants(place / "cache"), "ENOSPC")
    fault("no inodes left", "the kernel is used from memory, one warning says why")


def test_read_only_mount(disk, fault):
    place = disk("1m")
    publish(place / "cache")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    assert wants(place / "cache")["kinds"] == ["cache"] * 3, "a hit needs no writing"
    seen = h.run(WANTS.replace("config()", "config(P=128)"), str(place / "cache"), env=h.environment(place / "cache"))
    kept_in_memory(seen, "Read-only file system (EROFS)")
    kept_in_memory(wants(place / "another"), "EROFS")
    fault("cache on a read-only mount", "hits are served; a miss compiles, is used from memory, one warning says why")


def test_a_site_root_on_a_read_only_mount(disk):
    place = disk("1m")
    publish(place / "shared")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    seen = h.run(
        "report(kind=store.find(config()).kind)", env={**h.environment(place / "cache"), "TILEOPS_ARTIFACT_PATH": str(place / "shared")}
    )
    assert seen == {"kind": "site", "warnings": []}


def test_a_disk_that_vanishes(disk, fault):
    place = disk("1m")
    seen = h.run(
        """
import subprocess
assert store.publish(artifact()).stored and store.find(config()).kind == "cache"
subprocess.run(["umount", "-l", sys.argv[1]], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", sys.argv[1]], check=True)
lost = store.find(config()).kind
found = store.find_or_build(config(), artifact)
report(lost=lost, kind=found.kind, again=store.find(config()).kind)
""",
        str(place),
        env=h.environment(place / "cache"),
    )
    assert (seen["lost"], seen["kind"], seen["again"]) == (None, "jit", "memory")
    fault("the cache's disk is unmounted under a running process", "a miss, then the kernel from memory")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("fsync", errno.EIO),
        ("fsync", errno.ENOSPC),
        ("mkdirat", errno.EDQUOT),
        ("mkdirat", errno.EROFS),
        ("renameat", errno.EXDEV),
        ("renameat", errno.EIO),
        ("renameat", errno.ESTALE),
    ],
    ids=lambda value: errno.errorcode.get(value, str(value)) if isinstance(value, int) else value,
)
def test_a_write_that_the_kernel_refuses(tmp_path, fault, call, code):
    publish(tmp_path / "cache")
    scenario = (
        f"import errno; helpers_store.refuse({call!r}, {code})\n"
        + WANTS.replace("config()", "config(P=128)")
        + "assert store.find(config()).kind == 'cache'"
    )
    seen = h.run(scenario, str(tmp_path / "cache"), env=h.environment(tmp_path / "cache"))
    kept_in_memory(seen, errno.errorcode[code])
    assert not [n for n in os.listdir(tmp_path / "cache" / "v1") if n.startswith(".staging")]
    fault(f"{call} fails with {errno.errorcode[code]}", "the kernel is used from memory, one warning says why; other entries are hits")


def test_a_file_system_that_cannot_flush_folders(tmp_path):
    # EINVAL for every flush: some FUSE and network file systems refuse it for folders only, where it is harmless.
    seen = h.run(f"helpers_store.refuse('fsync', {errno.EINVAL})\n" + WANTS, str(tmp_path / "cache"), env=h.environment(tmp_path / "cache"))
    kept_in_memory(seen, "EINVAL")


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY, errno.EIO, errno.EMFILE, errno.EACCES], ids=errno.errorcode.get)
def test_a_read_that_the_kernel_refuses(tmp_path, fault, code):
    publish(tmp_path / "cache")
    scenario = f"""
assert store.find(config()).kind == "cache"
helpers_store.refuse("openat", {code})
lookups = [store.find(config()) for _ in range(2)]
found = store.find_or_build(config(), artifact)
report(kinds=[f.kind for f in lookups], reasons=[s[2] for s in lookups[0].trace], kind=found.kind, again=store.find(config()).kind)
"""
    seen = h.run(scenario, env=h.environment(tmp_path / "cache"))
    assert (seen["kinds"], seen["kind"], seen["again"]) == ([None, None], "jit", "memory")
    assert any(errno.errorcode[code] in reason for reason in seen["reasons"])
    assert h.run(WANTS, str(tmp_path), env=h.environment(tmp_path / "cache"))["kinds"] == ["cache"] * 3, "the good entry was lost"
    fault(
        f"open fails with {errno.errorcode[code]}, for good",
        "a miss with that reason, the kernel from memory; the entry on disk stays good",
    )


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY, errno.ENOENT], ids=errno.errorcode.get)
def test_a_stale_handle_is_looked_at_again(tmp_path, fault, code):
    # The one fault that is played here: an error that a network file system gives once. Every other call is real.
    publish(tmp_path / "cache")
    scenario = f"""
left, seen = [], []
real_open, real_read = os.open, os.read
def once(name):
    if left and str(name).startswith(left[0]):
        left.clear()
        raise OSError({code}, os.strerror({code}), name)
def opening(path, *arguments, **keywords):
    once(path)
    return real_open(path, *arguments, **keywords)
def reading(*arguments):
    once("read")
    return real_read(*arguments)
os.open, os.read = opening, reading
for what in (config().key, "record.json", "kernel.cubin", "read"):
    left[:] = [what]
    found = store.find(config())
    seen.append((found.kind, found.artifact == artifact(), left == []))
report(seen=seen)
"""
    assert h.run(scenario, env=h.environment(tmp_path / "cache")) == {"seen": [["cache", True, True]] * 4, "warnings": []}
    fault(f"{errno.errorcode[code]} once, while the entry or a file in it is opened or read", "looked at again: a hit")


def test_a_cache_that_another_user_owns(public, fault):
    place = public / "cache"
    place.mkdir(0o700)
    os.chown(place, 12345, 12345)
    kept_in_memory(wants(place), "belongs to uid 12345, this process runs as uid 0")
    assert list(place.iterdir()) == []
    os.chown(place, 0, 0)
    assert wants(place)["kinds"] == ["jit", "cache", "cache"]
    os.chown(place / "v1", 12345, 12345)
    seen = wants(place)
    kept_in_memory(seen, "belongs to uid 12345")
    assert any("refused: " in step[2] and "12345" in step[2] for step in seen["trace"])
    os.chown(place / "v1", 0, 0)
    assert wants(place)["kinds"] == ["cache"] * 3
    fault(
        "the cache folder belongs to another user (seen from root)",
        "refused with the uids in the reason; the kernel from memory; a hit once it is ours",
    )


def test_a_cache_of_root_seen_by_a_user(public, fault):
    place = public / "cache"
    publish(place)
    before = h.tree(place)
    place.chmod(0o755)
    seen = wants(place, uid=12345)
    kept_in_memory(seen, "belongs to uid 0")
    assert h.tree(place) == before
    fault("the cache folder belongs to root (seen from a user)", "refused with the uids in the reason; the kernel from memory")


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o1777], ids=oct)
def test_a_cache_that_others_can_write(tmp_path, fault, mode):
    place = tmp_path / "cache"
    publish(place)
    place.chmod(mode)
    seen = wants(place)
    kept_in_memory(seen, f"can be written by other users (mode {mode:04o})")
    assert len(seen["warnings"]) == 2, "one for reading, one for writing"
    place.chmod(0o700)
    (place / "v1").chmod(mode)
    kept_in_memory(wants(place), "can be written by other users")
    (place / "v1").chmod(0o755)
    place.chmod(0o755)
    assert wants(place)["kinds"] == ["cache"] * 3
    fault(
        f"the cache folder has mode {mode:04o}", "refused, the reason names mode and remedy; the kernel from memory; a hit after chmod go-w"
    )


def test_a_folder_without_permission(request, tmp_path, fault):
    # Root may write anywhere, so it runs this as another user; anyone else as itself.
    uid = 12345 if os.geteuid() == 0 else None
    place = (request.getfixturevalue("public") if uid else tmp_path) / "closed"
    place.mkdir(0o500)
    if uid:
        os.chown(place, uid, uid)
    kept_in_memory(wants(place / "cache", uid=uid), "Permission denied (EACCES)")
    kept_in_memory(wants(place, uid=uid), "Permission denied (EACCES)")
    fault("no permission to write the cache folder or the one it should be made in", "the kernel from memory, one warning says why")


@pytest.mark.parametrize("kind", ["file", "fifo", "dangling link", "v1 is a file", "v1 is a link"])
def test_a_cache_path_that_is_no_folder(tmp_path, kind):
    place = tmp_path / "cache"
    if kind == "file":
        place.write_text("")
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "dangling link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir(0o700)
        if kind == "v1 is a file":
            (place / "v1").write_text("")
        else:
            (tmp_path / "elsewhere").mkdir(0o700)
            (place / "v1").symlink_to(tmp_path / "elsewhere")
    kept_in_memory(wants(place), "(E")


def test_a_linked_cache_folder_is_followed(tmp_path):
    # Sites put ~/.cache on scratch disks; what counts is who owns the folder at the other end.
    (tmp_path / "scratch").mkdir(0o700)
    (tmp_path / "cache").symlink_to(tmp_path / "scratch")
    assert wants(tmp_path / "cache")["kinds"] == ["jit", "cache", "cache"]
    assert (tmp_path / "scratch" / "v1").is_dir()


def test_the_folder_is_made_private_whatever_the_umask(tmp_path):
    h.run("os.umask(0); store.publish(artifact()); report()", env=h.environment(tmp_path / "deep" / "cache"))
    modes = {str(p.relative_to(tmp_path / "deep")): p.stat().st_mode & 0o777 for p in (tmp_path / "deep").rglob("*")}
    assert {mode for name, mode in modes.items() if name.endswith((".json", ".cubin"))} == {0o600}
    assert {mode for name, mode in modes.items() if not name.endswith((".json", ".cubin"))} == {0o700}
