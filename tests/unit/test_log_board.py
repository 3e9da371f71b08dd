"""The board of a log's folder: what a place holds, whatever happens between owner and clerk. One process, several boards."""

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
from roq.log.local.board import ANSWER_MAX, HEAD_BYTES, LONG_ROUND_SECONDS, PLACE_BYTES, PLACES, UNKNOWN, Board
from roq.log.local.mapped import COOKIE_WORD


class Folder:
    """A log, opened as often as asked: each opening is a process of its own to the others."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs: list[LocalLog] = []

    def board(self) -> Board:
        self.logs.append(LocalLog(self.path))
        board = self.logs[-1].open_board()
        assert board is not None
        return board

    def dies(self, board: Board) -> None:
        """As the kernel sees it: its descriptors are closed, nothing else happens."""
        self.logs[board.place].close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    one = Folder(tmp_path / "log")
    yield one
    for log in one.logs:
        log.close()


def test_requests_are_taken_once_and_answered(folder: Folder) -> None:
    asker, other, clerk = (folder.board() for _ in range(3))
    asker.post(b"one")
    other.post(b"two")
    assert clerk.begin()
    assert not asker.begin(), "there is one clerk at a time"
    assert asker.pause(0) > 60, "and everybody sees that there is one"
    assert clerk.count() == 2
    requests = clerk.take()
    assert [request.text for request in requests] == [b"one", b"two"]
    assert asker.answer() is None
    for request in requests:
        clerk.reply(request, request.text.upper())
    assert (asker.answer(), other.answer()) == (b"ONE", b"TWO")
    assert clerk.take() == []
    clerk.end()
    assert clerk.is_ours()
    assert not asker.is_ours()
    assert asker.pause(-1) < 0 < asker.pause(60)


def test_our_own_request_is_not_taken_but_dropped(folder: Folder) -> None:
    clerk = folder.board()
    clerk.post(b"mine")
    assert clerk.begin()
    assert clerk.take() == []
    clerk.drop()
    assert clerk.count() == 0
    clerk.end()


def test_what_a_broken_round_took_is_unknown_what_it_did_not_take_is_still_asked(folder: Folder) -> None:
    asker, late, dead, clerk = (folder.board() for _ in range(4))
    asker.post(b"taken")
    assert dead.begin()
    assert len(dead.take()) == 1
    late.post(b"not taken")
    folder.dies(dead)
    assert asker.answer() is None
    assert clerk.begin()
    assert asker.answer() == UNKNOWN
    assert [request.text for request in clerk.take()] == [b"not taken"]
    clerk.end()
    assert late.answer() == UNKNOWN, "a clerk that ends its round leaves nobody without an answer"


def test_a_withdrawn_request_is_never_taken(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    asker.post(b"one")
    asker.withdraw()
    assert clerk.begin()
    assert clerk.take() == []
    clerk.end()
    asker.post(b"two")
    assert clerk.begin()
    assert [request.text for request in clerk.take()] == [b"two"]
    clerk.end()


def test_a_half_written_request_is_left_and_an_older_answer_is_not_taken_for_the_new_one(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    asker.post(b"one")
    memory = clerk._mapped.bytes
    memory[HEAD_BYTES + 8] ^= 1
    assert clerk.begin()
    assert clerk.take() == []
    memory[HEAD_BYTES + 8] ^= 1
    [request] = clerk.take()
    clerk.reply(request, b"first")
    clerk.end()
    assert asker.answer() == b"first"
    asker.post(b"two")
    assert asker.answer() is None
    clerk._answers[asker.place] = clerk._requests[asker.place]  # the number without its text
    assert asker.answer() is None, "the text is that of the answer before"


def test_an_answer_that_is_too_long_is_unknown(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    for size, answer in ((ANSWER_MAX, bytes(ANSWER_MAX)), (ANSWER_MAX + 1, UNKNOWN)):
        asker.post(b"?")
        assert clerk.begin()
        clerk.reply(clerk.take()[0], bytes(size))
        clerk.end()
        assert asker.answer() == answer
    assert len(clerk._mapped.bytes) == HEAD_BYTES + PLACES * PLACE_BYTES


def test_a_dead_owners_place_and_request_bother_nobody(folder: Folder) -> None:
    dead, clerk = folder.board(), folder.board()
    dead.post(b"last words")
    assert clerk.begin()
    [request] = clerk.take()
    folder.dies(dead)
    heir = folder.board()
    assert heir.place == dead.place, "a place is free when its owner is gone"
    heir.post(b"first words")
    clerk.reply(request, b"to the dead")
    assert heir.answer() is None
    assert [request.text for request in clerk.take()] == [b"first words"]
    clerk.end()


def test_places_are_limited(folder: Folder) -> None:
    for place in range(PLACES):
        assert folder.board().place == place
    log = LocalLog(folder.path)
    assert log.open_board() is None
    folder.logs[7].close()
    board = log.open_board()
    assert board is not None
    assert board.place == 7
    folder.logs.append(log)


def test_a_board_of_another_boot_or_log_is_empty(folder: Folder) -> None:
    first = folder.board()
    first.post(b"long ago")
    folder.dies(first)
    first._mapped.words[COOKIE_WORD] += 1
    second = folder.board()
    assert second.count() == 0
    assert second.begin()
    assert second.take() == []
    second.end()


def test_an_answer_wakes_who_waits_for_it(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    asker.post(b"?")
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
    assert clerk.begin()
    clerk.reply(clerk.take()[0], b"!")
    clerk.end()
    thread.join(10)
    assert took
    assert took[0] < 5


def test_a_closed_log_takes_nothing(folder: Folder) -> None:
    board = folder.board()
    folder.dies(board)
    for call in (lambda: board.post(b""), board.begin, board.withdraw):
        with pytest.raises(Closed):
            call()
    with contextlib.suppress(Closed):
        board.end()


def test_a_forked_child_is_not_the_clerk(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    asker.post(b"?")
    assert clerk.begin()
    [request] = clerk.take()
    child = os.fork()
    if child == 0:
        clerk.end()
        os._exit(0)
    os.waitpid(child, 0)
    assert asker.answer() is None
    assert not asker.begin()
    clerk.reply(request, b"!")
    clerk.end()
    assert asker.answer() == b"!"


def test_a_request_that_was_counted_and_not_put_there_is_withdrawn_without_a_trace(folder: Folder) -> None:
    """So a signal may leave it; the text at its place is that of the request before."""
    asker, clerk = folder.board(), folder.board()
    asker.post(b"one")
    asker.withdraw()
    asker._number += 1
    asker.withdraw()
    assert clerk.begin()
    assert clerk.take() == []
    clerk.end()


def test_who_asked_during_a_long_round_is_woken_at_its_end(folder: Folder) -> None:
    asker, clerk = folder.board(), folder.board()
    assert clerk.begin()
    assert clerk.take() == []
    asker.post(b"too late")
    woken = threading.Event()

    def wait() -> None:
        asker.wait(20)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for _ in range(5):  # the first one may end before that thread waits
        time.sleep(2 * LONG_ROUND_SECONDS)  # the round
        clerk.end()
        if woken.wait(1):
            break
        assert clerk.begin()
    assert woken.is_set()
    thread.join()


def test_a_folder_that_was_moved_away_has_no_board_at_its_old_place(folder: Folder) -> None:
    old = LocalLog(folder.path)
    folder.path.rename(folder.path.with_name("elsewhere"))
    theirs = folder.board()
    theirs.post(b"theirs")
    assert old.open_board() is None
    assert theirs.count() == 1, "and theirs is as it was"
    old.close()
