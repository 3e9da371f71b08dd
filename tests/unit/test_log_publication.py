"""The list of a log's folder: what a place holds, whatever happens between owner and combiner. One process, several lists."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from roq.errors import Closed
from roq.log.local import LocalLog
from roq.log.local.publication import ANSWER_MAX, HEAD_BYTES, LONG_ROUND_SECONDS, PLACE_BYTES, PLACES, UNKNOWN, PublicationList
from roq.log.local.shared import Word


class Folder:
    """A log, opened as often as asked: each opening is a process of its own to the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: list[LocalLog] = []

    def publications(self) -> PublicationList:
        self.logs.append(LocalLog(self.path))
        publications = self.logs[-1].open_list()
        assert publications is not None
        return publications

    def dies(self, publications: PublicationList) -> None:
        """As the kernel sees it: its descriptors are closed, nothing else happens."""
        self.logs[publications.place].close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    one = Folder(tmp_path / "log")
    yield one
    for log in one.logs:
        log.close()


def test_requests_are_taken_once_and_answered(folder: Folder) -> None:
    asker, other, combiner = (folder.publications() for _ in range(3))
    asker.publish(b"one")
    other.publish(b"two")
    assert combiner.begin()
    assert not asker.begin(), "there is one combiner at a time"
    assert asker.pause(0) > 60, "and everybody sees that there is one"
    assert combiner.count() == 2
    requests = combiner.take()
    assert [request.text for request in requests] == [b"one", b"two"]
    assert asker.answer() is None
    for request in requests:
        combiner.reply(request, request.text.upper())
    assert (asker.answer(), other.answer()) == (b"ONE", b"TWO")
    assert combiner.take() == []
    combiner.end()
    assert combiner.is_ours()
    assert not asker.is_ours()
    assert asker.pause(-1) < 0 < asker.pause(60)


def test_our_own_request_is_not_taken_but_dropped(folder: Folder) -> None:
    combiner = folder.publications()
    combiner.publish(b"mine")
    assert combiner.begin()
    assert combiner.take() == []
    combiner.drop()
    assert combiner.count() == 0
    combiner.end()


def test_what_a_broken_round_took_is_unknown_what_it_did_not_take_is_still_asked(folder: Folder) -> None:
    asker, late, dead, combiner = (folder.publications() for _ in range(4))
    asker.publish(b"taken")
    assert dead.begin()
    assert len(dead.take()) == 1
    late.publish(b"not taken")
    folder.dies(dead)
    assert asker.answer() is None
    assert combiner.begin()
    assert asker.answer() == UNKNOWN
    assert [request.text for request in combiner.take()] == [b"not taken"]
    combiner.end()
    assert late.answer() == UNKNOWN, "a combiner that ends its round leaves nobody without an answer"


def test_a_withdrawn_request_is_never_taken(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    asker.publish(b"one")
    asker.withdraw()
    assert combiner.begin()
    assert combiner.take() == []
    combiner.end()
    asker.publish(b"two")
    assert combiner.begin()
    assert [request.text for request in combiner.take()] == [b"two"]
    combiner.end()


def test_a_half_written_request_is_left_and_an_older_answer_is_not_taken_for_the_new_one(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    asker.publish(b"one")
    memory = combiner._mapped.bytes
    memory[HEAD_BYTES + 8] ^= 1
    assert combiner.begin()
    assert combiner.take() == []
    memory[HEAD_BYTES + 8] ^= 1
    [request] = combiner.take()
    combiner.reply(request, b"first")
    combiner.end()
    assert asker.answer() == b"first"
    asker.publish(b"two")
    assert asker.answer() is None
    combiner._answers[asker.place] = combiner._requests[asker.place]  # the number without its text
    assert asker.answer() is None, "the text is that of the answer before"


def test_an_answer_that_is_too_long_is_unknown(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    for size, answer in ((ANSWER_MAX, bytes(ANSWER_MAX)), (ANSWER_MAX + 1, UNKNOWN)):
        asker.publish(b"?")
        assert combiner.begin()
        combiner.reply(combiner.take()[0], bytes(size))
        combiner.end()
        assert asker.answer() == answer
    assert len(combiner._mapped.bytes) == HEAD_BYTES + PLACES * PLACE_BYTES


def test_a_dead_owners_place_and_request_bother_nobody(folder: Folder) -> None:
    dead, combiner = folder.publications(), folder.publications()
    dead.publish(b"last words")
    assert combiner.begin()
    [request] = combiner.take()
    folder.dies(dead)
    heir = folder.publications()
    assert heir.place == dead.place, "a place is free when its owner is gone"
    heir.publish(b"first words")
    combiner.reply(request, b"to the dead")
    assert heir.answer() is None
    assert [request.text for request in combiner.take()] == [b"first words"]
    combiner.end()


def test_places_are_limited(folder: Folder) -> None:
    for place in range(PLACES):
        assert folder.publications().place == place
    log = LocalLog(folder.path)
    assert log.open_list() is None
    folder.logs[7].close()
    publications = log.open_list()
    assert publications is not None
    assert publications.place == 7
    folder.logs.append(log)


def test_a_list_of_another_boot_or_log_is_empty(folder: Folder) -> None:
    first = folder.publications()
    first.publish(b"long ago")
    folder.dies(first)
    first._mapped.words[Word.COOKIE] += 1
    second = folder.publications()
    assert second.count() == 0
    assert second.begin()
    assert second.take() == []
    second.end()


def test_an_answer_wakes_who_waits_for_it(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    asker.publish(b"?")
    waits = threading.Event()
    took: list[float] = []

    def wait() -> None:
        began = time.monotonic()
        waits.set()
        while asker.answer() is None:
            asker.wait(20)
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    time.sleep(0.1)
    assert combiner.begin()
    combiner.reply(combiner.take()[0], b"!")
    combiner.end()
    thread.join(10)
    assert took
    assert took[0] < 5


def test_a_closed_log_takes_nothing(folder: Folder) -> None:
    publications = folder.publications()
    folder.dies(publications)
    for call in (lambda: publications.publish(b""), publications.begin, publications.withdraw):
        with pytest.raises(Closed):
            call()
    with contextlib.suppress(Closed):
        publications.end()


def test_a_forked_child_is_not_the_combiner(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    asker.publish(b"?")
    assert combiner.begin()
    [request] = combiner.take()
    child = os.fork()
    if child == 0:
        combiner.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert asker.answer() is None
    assert not asker.begin()
    combiner.reply(request, b"!")
    combiner.end()
    assert asker.answer() == b"!"


def test_a_request_that_was_counted_and_not_put_there_is_withdrawn_without_a_trace(folder: Folder) -> None:
    """So a signal may leave it; the text at its place is that of the request before."""
    asker, combiner = folder.publications(), folder.publications()
    asker.publish(b"one")
    asker.withdraw()
    asker._number += 1
    asker.withdraw()
    assert combiner.begin()
    assert combiner.take() == []
    combiner.end()


def test_who_asked_during_a_long_round_is_woken_at_its_end(folder: Folder) -> None:
    asker, combiner = folder.publications(), folder.publications()
    assert combiner.begin()
    assert combiner.take() == []
    asker.publish(b"too late")
    woken = threading.Event()

    def wait() -> None:
        asker.wait(20)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(5):  # the first one may end before that thread waits
        time.sleep(2 * LONG_ROUND_SECONDS)  # the round
        combiner.end()
        if woken.wait(1):
            break
        assert combiner.begin()
    assert woken.is_set()
    thread.join()


def test_a_folder_that_was_moved_away_has_no_list_at_its_old_place(folder: Folder) -> None:
    old = LocalLog(folder.path)
    folder.path.rename(folder.path.with_name("elsewhere"))
    theirs = folder.publications()
    theirs.publish(b"theirs")
    assert old.open_list() is None
    assert theirs.count() == 1, "and theirs is as it was"
    old.close()
