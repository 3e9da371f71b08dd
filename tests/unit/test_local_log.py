"""The local log in one process: layout, damage, versions, trimming.

Full and failing disks, crashes of the machine: test_local_log_crashes.py. Processes and kill -9: integration.
"""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from roq import blocking
from roq.errors import CallError, Closed, InvalidAddress, LogTrimmed, StorageFailed, UnknownFormat
from roq.log.local import LocalLog
from roq.log.local.layout import HEAD, pack, scan, unpack
from roq.log.local.shared import Word
from roq.wire.task import NewTask
from roq.workqueue.log_queue import LogQueue

SMALL = 4096  # bytes of a segment
SECTOR = 512


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def log(folder: Path) -> Iterator[LocalLog]:
    one = LocalLog(folder, segment_bytes=SMALL)
    yield one
    one.close()


def contents(log: LocalLog, after: int = 0, bytes_max: int = 1000) -> list[bytes]:
    found: list[bytes] = []
    while entries := log.read(after, bytes_max):
        found += [entry for _, entry in entries]
        after = entries[-1][0]
    return found


def lose_header(folder: Path) -> None:
    """As after a crash of the machine that did not get the header to the disk."""
    (folder / "header").unlink()


def newest_segment(folder: Path) -> Path:
    return max(folder.glob("*.segment"))


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


# --- layout -----------------------------------------------------------------------------------------------------------


def test_entries_come_back_from_bytes_with_their_positions() -> None:
    entries = [b"", b"a", b"12345678", bytes(100)]
    data = pack(entries, [0, *(crc32(entry) for entry in entries[1:])], 80, 1 << 40)
    found = unpack(data, 80, "x")
    assert [entry for _, entry in found] == entries
    assert [position % 8 for position, _ in found] == [0] * 4
    assert found[-1][0] == 80 + len(data)
    assert [entry for _, entry in unpack(data[:-8], 80, "x")] == entries[:3], "a part of an entry is none"
    with pytest.raises(StorageFailed, match="position 0"):
        unpack(bytes(64), 0, "x")  # zeros are no entry, not even at the beginning
    with pytest.raises(StorageFailed, match="position 88"):
        unpack(data, 88, "x")


@pytest.mark.parametrize("byte", range(32))
def test_any_flipped_bit_of_an_entry_is_seen(byte: int) -> None:
    data = bytearray(pack([b"payload!"], [crc32(b"payload!")], 0, 0))
    assert unpack(bytes(data), 0, "x")
    data[byte] ^= 16
    if byte in (0, 1, 2):
        assert unpack(bytes(data), 0, "x") == [], "an entry that seems longer than the data is none"
    else:
        with pytest.raises(StorageFailed):
            unpack(bytes(data), 0, "x")


def test_scan_finds_the_end_and_what_proves_that_more_was_synced() -> None:
    crc = crc32(b"x" * 16)
    entries = [pack([b"x" * 16], [crc], at, max(at - 40, 0)) for at in (0, 40, 80, 120)]
    whole = bytes(HEAD) + b"".join(entries) + bytes(64)
    assert scan(whole, 0, 0)[:2] == (160, 80)
    torn = bytearray(whole)
    torn[HEAD + 40 + 30] ^= 1
    found = scan(bytes(torn), 0, 0)
    assert found.end == 40
    assert found.proved == 80, "a later entry says that the damaged one was durable"


# --- appending and reading --------------------------------------------------------------------------------------------


def test_what_is_appended_is_read_in_order_over_many_segments(log: LocalLog, folder: Path) -> None:
    wanted = [bytes([number % 256]) * (number % 300) for number in range(300)]
    positions = [log.append([entry]) for entry in wanted]
    assert positions == sorted(set(positions))
    assert contents(log) == contents(log, bytes_max=1) == wanted
    assert contents(log, positions[99]) == wanted[100:]
    assert len(list(folder.glob("*.segment"))) > 5
    log.sync(positions[-1])
    assert log.durable == log.end == positions[-1]
    other = LocalLog(folder)
    assert contents(other) == wanted
    assert other.append([b"more", b"and more"]) == log.end
    assert contents(log, positions[-1]) == [b"more", b"and more"]
    other.close()


def test_an_entry_larger_than_a_segment_fits(log: LocalLog) -> None:
    large = os.urandom(3 * SMALL)
    log.append([large])
    log.append([b"small"])
    log.append([large, large])
    assert contents(log) == [large, b"small", large, large]
    with pytest.raises(CallError):
        log.append([bytes(1 << 20)] * 300)
    assert log.append([b"on"])


def test_wait_returns_when_another_thread_appends_and_when_the_log_is_closed(log: LocalLog, folder: Path) -> None:
    assert not log.wait(0, 0.01)
    other = LocalLog(folder)
    for act in (lambda: other.append([b"x"]), log.close):
        after, began = log.end, time.monotonic()
        timer = threading.Timer(0.1, act)
        timer.start()
        woken = log.wait(after, 5)
        assert 0.05 < time.monotonic() - began < 0.8
        assert woken == (log.end > after)
        timer.join()
    with pytest.raises(Closed):
        log.append([b"x"])
    other.close()


def test_threads_and_openings_of_one_process_exclude_each_other(folder: Path) -> None:
    logs = [LocalLog(folder, segment_bytes=SMALL) for _ in range(3)]

    def work(log: LocalLog, name: int) -> None:
        for number in range(40):
            log.sync(log.append([b"%d %d" % (name, number)] * 2))

    threads = [threading.Thread(target=work, args=(logs[name % 3], name)) for name in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = contents(logs[0])
    assert logs[1].durable == logs[1].end
    for name in range(9):
        mine = [entry for entry in found if entry.startswith(b"%d " % name)]
        assert mine == [b"%d %d" % (name, number) for number in range(40) for _ in range(2)]
    for log in logs:
        log.close()


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_snapshot_trims_and_who_is_behind_is_told(log: LocalLog, folder: Path) -> None:
    positions = [log.append([b"%d" % number]) for number in range(500)]
    with log.upkeep() as mine:
        assert mine
        other = LocalLog(folder)
        with other.upkeep() as theirs:
            assert not theirs
        log.snapshot(positions[399], b"state")
        log.snapshot(positions[400], b"newer state")
    assert log.load_snapshot() == other.load_snapshot() == (positions[400], b"newer state")
    assert contents(other, positions[400]) == [b"%d" % number for number in range(401, 500)]
    for one in (log, other):
        with pytest.raises(LogTrimmed):
            one.read(0)
    other.close()
    log.close()
    lose_header(folder)
    again = LocalLog(folder)
    with pytest.raises(LogTrimmed):
        again.read(0)
    assert contents(again, positions[400])[-1] == b"499"
    again.close()
    max(folder.glob("*.snapshot")).unlink()
    lose_header(folder)
    with pytest.raises(StorageFailed, match="missing"):
        LocalLog(folder)


def test_a_damaged_snapshot_is_refused(log: LocalLog, folder: Path) -> None:
    log.snapshot(log.append([b"x"]), b"state")
    [path] = folder.glob("*.snapshot")
    flip_bit(path, path.stat().st_size - 1)
    with pytest.raises(StorageFailed, match="damaged"):
        log.load_snapshot()
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", 2) + path.read_bytes()[12:])
    with pytest.raises(UnknownFormat):
        log.load_snapshot()


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_torn_tail_is_cut(folder: Path, log: LocalLog) -> None:
    log.sync(log.append([b"kept"]))
    kept = log.end
    log.append([b"torn", b"whole"])  # the disk took the second before the first
    log.close()
    flip_bit(newest_segment(folder), HEAD + kept + 25)
    lose_header(folder)
    again = LocalLog(folder)
    assert contents(again) == [b"kept"]
    assert again.end == again.durable == kept
    again.append([b"next"])
    assert contents(again) == [b"kept", b"next"]
    again.close()
    lose_header(folder)
    again = LocalLog(folder)
    assert contents(again) == [b"kept", b"next"], "nothing of the torn tail comes back behind the new entry"
    again.close()


@pytest.mark.parametrize("proof", ["header", "later entry"])
def test_damage_below_a_durable_mark_is_no_torn_tail(folder: Path, log: LocalLog, proof: str) -> None:
    for number in range(3):
        log.sync(log.append([b"%d" % number * 10]))
    if proof == "later entry":
        log.append([b"tail"])
    flip_bit(newest_segment(folder), HEAD + 40 + 30)
    with pytest.raises(StorageFailed):
        log.read(0)
    log.close()
    before = newest_segment(folder).read_bytes()
    if proof == "header":
        header = bytearray((folder / "header").read_bytes())
        header[8 * Word.BOOT] ^= 1
        (folder / "header").write_bytes(header)
    else:
        lose_header(folder)
    for _ in range(2):
        with pytest.raises(StorageFailed, match="position 40"):
            LocalLog(folder)
    assert newest_segment(folder).read_bytes() == before, "nothing was changed"


@pytest.mark.parametrize("size", [HEAD + 96, 1000, SMALL - 8, SMALL + 800])
def test_a_last_segment_that_was_cut_short_is_no_torn_tail(folder: Path, log: LocalLog, size: int) -> None:
    entries = [b"%d" % number * 50 for number in range(8)]
    if size > SMALL:
        entries.append(b"large" * 1000)
    log.sync(log.append(entries))
    log.close()
    last = newest_segment(folder)
    assert last.stat().st_size > size
    os.truncate(last, size)
    lose_header(folder)
    before = last.read_bytes()
    for _ in range(2):
        with pytest.raises(StorageFailed, match=last.name):
            LocalLog(folder)
    assert last.read_bytes() == before, "nothing was changed"


def test_damage_names_the_file_the_byte_and_what_to_do_at_once_and_puts_go_on(folder: Path) -> None:
    queue = LogQueue(folder)
    queue.put([NewTask(b"first")])
    second = queue._log.end
    queue.put([NewTask(b"second")])
    queue.put([NewTask(b"third")])
    queue.close()
    flip_bit(newest_segment(folder), HEAD + second + 30)
    name = re.escape(f"{newest_segment(folder)} is damaged at byte {HEAD + second} (position {second} of the log)")
    with blocking.open_queue(f"log://{folder}") as again:
        began = time.monotonic()
        for call in (again.status, again.lease, lambda: next(iter(again.leases())), lambda: again.run(print)):
            with pytest.raises(StorageFailed, match=f"{name}.*puts are taken.*good copy"):
                call()
        again.put(b"fourth")
        assert time.monotonic() - began < 20, "not after some time-out"
    flip_bit(newest_segment(folder), HEAD + second + 30)  # a good copy
    with blocking.open_queue(f"log://{folder}") as again:
        assert [task.payload for task in again.lease(count=9)] == [b"first", b"second", b"third", b"fourth"]


def test_damage_in_an_older_segment_is_told_by_its_reader(folder: Path, log: LocalLog) -> None:
    for number in range(100):
        log.append([b"%d" % number * 50])
    log.close()
    first = min(folder.glob("*.segment"))
    flip_bit(first, HEAD + 200)
    again = LocalLog(folder)
    with pytest.raises(StorageFailed, match="damaged"):
        contents(again)
    again.close()
    first.write_bytes(first.read_bytes()[: SMALL // 2])
    again = LocalLog(folder)
    with pytest.raises(StorageFailed, match="damaged"):
        contents(again)
    again.close()
    first.unlink()
    again = LocalLog(folder)
    with pytest.raises(StorageFailed, match="missing"):
        contents(again)
    again.close()


def test_foreign_folders_files_and_versions_are_refused(tmp_path: Path, folder: Path, log: LocalLog) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.txt").write_text("precious")
    with pytest.raises(InvalidAddress, match=r"thesis\.txt"):
        LocalLog(tmp_path / "foreign")
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.txt"], "not even a lock file was made"
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidAddress):
        LocalLog(tmp_path / "file")
    log.append([b"x"])
    (folder / "notes.txt").write_text("may lie here")
    assert LocalLog(folder).read(0)
    form = folder / "FORMAT"
    text = form.read_text()
    form.write_text(text.replace("roq-log 1", "roq-log 2"))
    with pytest.raises(UnknownFormat, match="format 2"):
        LocalLog(folder)
    form.write_text("something else")
    with pytest.raises(StorageFailed):
        LocalLog(folder)
    form.unlink()
    with pytest.raises(InvalidAddress, match="not a log"):
        LocalLog(folder)
    (folder / "notes.txt").unlink()
    with pytest.raises(StorageFailed, match="FORMAT"):
        LocalLog(folder)
    form.write_text(text)
    path = newest_segment(folder)
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", 9) + path.read_bytes()[12:])
    with pytest.raises(UnknownFormat, match="format 9"):
        LocalLog(folder).read(0)


def test_what_a_killed_appender_left_is_wiped(folder: Path, log: LocalLog) -> None:
    log.append([b"before"])
    words = log._words
    words[Word.INTENT] = log.end + 400  # it died after it wrote, before it said so
    fd = os.open(newest_segment(folder), os.O_WRONLY)
    os.pwrite(fd, b"\xff" * 400, HEAD + log.end)
    os.close(fd)
    other = LocalLog(folder)
    other.append([b"after"])
    assert contents(log) == [b"before", b"after"]
    assert not newest_segment(folder).read_bytes()[HEAD + log.end :].strip(b"\0")
    other.close()


def test_a_change_of_segment_is_finished_when_its_process_was_killed(folder: Path, log: LocalLog) -> None:
    log.append([b"before"])
    base = log.end
    log._words[Word.ROLL] = base
    log._segments.create(base, 0)  # it died here: the file is there, nobody was told
    other = LocalLog(folder)
    other.append([b"after"])
    assert other._words[Word.ACTIVE] == base
    other.close()
    log.close()
    lose_header(folder)
    again = LocalLog(folder)
    assert contents(again) == [b"before", b"after"]
    again.close()
