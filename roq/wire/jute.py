"""ZooKeeper's client protocol in bytes ("jute"), as a server sees it: frames to requests, replies and events to frames. Pure.

    frame      length i32 · body                                              all numbers big-endian
    connect    protocol i32 · zxid seen i64 · time-out ms i32 · session i64 · password · [read-only u8]     the first frame
    connected  protocol i32 · time-out ms i32 · session i64 · password · [read-only u8]     time-out 0: no such session
    request    xid i32 · type i32 · record
    reply      xid i32 · zxid i64 · error i32 · record                        no record if there is an error
    event      as a reply with xid -1: type i32 · state i32 · path
    multi      (type i32 · last u8 · error i32 · record) …                    the last one has no record; multiRead as well

    string, buffer: length i32 (-1: none) · bytes      vector: count i32 (-1: none) · items

Source: ZooKeeper's documentation of its client protocol, and what 3.9 answers. Not covered: four-letter words, sockets.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from roq.errors import FrameError
from roq.wire.zookeeper import (
    Acl,
    AclReply,
    Auth,
    CheckRequest,
    Close,
    ConnectRequest,
    CreateRequest,
    DataReply,
    DeleteRequest,
    EmptyResponse,
    ErrorResponse,
    EventType,
    ExistsRequest,
    GetAcl,
    GetChildren,
    GetData,
    Multi,
    MultiRead,
    NamesReply,
    PathReply,
    PathStat,
    PingRequest,
    Reply,
    Request,
    Results,
    SetAcl,
    SetDataRequest,
    SetWatches,
    Stat,
    StatReply,
    Sync,
    Type,
    Unsupported,
)

T = TypeVar("T")

FRAME_BYTES_MAX = 0xFFFFF  # jute.maxbuffer: what ZooKeeper takes unless it is told otherwise
MULTI_OPS_MAX = 100_000  # a frame has no room for more
STATE_CONNECTED = 3  # in every event
EVENT_XID, PING_XID = -1, -2  # a ping's reply has it whatever the ping had

# --- reading ------------------------------------------------------------------------------------------------------------

_INT, _LONG, _TWO_INTS = struct.Struct("!i"), struct.Struct("!q"), struct.Struct("!ii")
_CONNECT = struct.Struct("!iqiq")
_CONNECTED = struct.Struct("!iiq")
_REPLY = struct.Struct("!iqi")
_EVENT = struct.Struct("!iqiii")
_STAT = struct.Struct("!qqqqiiiqiiq")
_MULTI = struct.Struct("!i?i")
_SIGN, _WRAP = 1 << 31, 1 << 32


class _Reader:
    """Takes a body apart, in order. Every method raises FrameError when the bytes end too early."""

    def __init__(self, body: bytes) -> None:
        self._body, self._at = body, 0

    def _take(self, form: struct.Struct) -> tuple[Any, ...]:
        try:
            values = form.unpack_from(self._body, self._at)
        except struct.error:
            raise FrameError("the frame ends within a number") from None
        self._at += form.size
        return values

    def i32(self) -> int:
        return int(self._take(_INT)[0])

    def i64(self) -> int:
        return int(self._take(_LONG)[0])

    def connect(self) -> tuple[Any, ...]:
        return self._take(_CONNECT)

    def head(self) -> tuple[int, int]:
        xid, kind = self._take(_TWO_INTS)
        return xid, kind

    def multi_head(self) -> tuple[int, bool]:
        kind, last, _ = self._take(_MULTI)
        return kind, last

    def flag(self) -> bool:
        if self.is_empty:
            raise FrameError("the frame ends before a flag")
        self._at += 1
        return self._body[self._at - 1] != 0

    def buffer(self) -> bytes | None:
        size = self.i32()
        if size < 0:
            return None
        end = self._at + size
        if end > len(self._body):
            raise FrameError(f"a buffer of {size} bytes in a frame that has {len(self._body) - self._at} left")
        data = self._body[self._at : end]
        self._at = end
        return data

    def string(self) -> str:
        try:
            return (self.buffer() or b"").decode()
        except UnicodeDecodeError:
            raise FrameError("a string is not UTF-8") from None

    def vector(self, item: Callable[[], T]) -> tuple[T, ...]:
        count = self.i32()
        if count > len(self._body) // 4:  # the smallest item is a length
            raise FrameError(f"a vector of {count} items")
        return tuple(item() for _ in range(count))

    def acl(self) -> Acl:
        return Acl(self.i32(), self.string(), self.string())

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._body)


def parse_connect(body: bytes) -> ConnectRequest:
    """The first frame. Raises FrameError."""
    reader = _Reader(body)
    _, zxid_seen, timeout_ms, session = reader.connect()
    password = reader.buffer() or b""
    return ConnectRequest(zxid_seen, timeout_ms, session, password, None if reader.is_empty else reader.flag())


def parse_request(body: bytes) -> tuple[int, Request]:
    """(xid, request) of any later frame. Raises FrameError."""
    reader = _Reader(body)
    xid, kind = reader.head()
    read = _RECORDS.get(kind)
    return xid, Unsupported(kind) if read is None else read(reader)


def _create(reader: _Reader) -> CreateRequest:
    return CreateRequest(reader.string(), reader.buffer(), reader.vector(reader.acl), reader.i32(), False)


def _create_2(reader: _Reader) -> CreateRequest:
    return _create(reader)._replace(with_stat=True)


def _delete(reader: _Reader) -> DeleteRequest:
    return DeleteRequest(reader.string(), reader.i32())


def _set_data(reader: _Reader) -> SetDataRequest:
    return SetDataRequest(reader.string(), reader.buffer(), reader.i32())


def _check(reader: _Reader) -> CheckRequest:
    return CheckRequest(reader.string(), reader.i32())


def _get_data(reader: _Reader) -> GetData:
    return GetData(reader.string(), reader.flag())


def _operations(reader: _Reader, known: Mapping[int, Callable[[_Reader], T]]) -> tuple[T, ...] | Unsupported:
    ops: list[T] = []
    while True:
        kind, last = reader.multi_head()
        if last:
            return tuple(ops)
        read = known.get(kind)
        if read is None:
            return Unsupported(kind)
        if len(ops) >= MULTI_OPS_MAX:
            raise FrameError(f"a multi of more than {MULTI_OPS_MAX} operations")
        ops.append(read(reader))


def _multi(reader: _Reader) -> Multi | Unsupported:
    ops = _operations(reader, _OPS)
    return ops if isinstance(ops, Unsupported) else Multi(ops)


def _multi_read(reader: _Reader) -> MultiRead | Unsupported:
    reads = _operations(reader, {Type.GET_DATA: _get_data})
    return reads if isinstance(reads, Unsupported) else MultiRead(reads)


def _set_watches(reader: _Reader) -> SetWatches:
    return SetWatches(reader.i64(), *(reader.vector(reader.string) for _ in range(3)))


def _set_watches_2(reader: _Reader) -> SetWatches | Unsupported:
    request = _set_watches(reader)
    lasting = reader.vector(reader.string) + reader.vector(reader.string)  # addWatch, which made them, is not there either
    return Unsupported(Type.SET_WATCHES_2) if lasting else request


def _auth(reader: _Reader) -> Auth:
    reader.i32()
    return Auth(reader.string(), reader.buffer() or b"")


_OPS: dict[int, Callable[[_Reader], CreateRequest | DeleteRequest | SetDataRequest | CheckRequest]] = {
    Type.CREATE: _create,
    Type.CREATE_2: _create_2,
    Type.DELETE: _delete,
    Type.SET_DATA: _set_data,
    Type.CHECK: _check,
}
_RECORDS: dict[int, Callable[[_Reader], Request]] = {
    Type.CREATE: _create,
    Type.CREATE_2: _create_2,
    Type.DELETE: _delete,
    Type.SET_DATA: _set_data,
    Type.EXISTS: lambda reader: ExistsRequest(reader.string(), reader.flag()),
    Type.GET_DATA: _get_data,
    Type.GET_ACL: lambda reader: GetAcl(reader.string()),
    Type.SET_ACL: lambda reader: SetAcl(reader.string(), reader.vector(reader.acl), reader.i32()),
    Type.GET_CHILDREN: lambda reader: GetChildren(reader.string(), reader.flag(), False),
    Type.GET_CHILDREN_2: lambda reader: GetChildren(reader.string(), reader.flag(), True),
    Type.SYNC: lambda reader: Sync(reader.string()),
    Type.PING: lambda reader: PingRequest(),
    Type.CLOSE: lambda reader: Close(),
    Type.MULTI: _multi,
    Type.MULTI_READ: _multi_read,
    Type.AUTH: _auth,
    Type.SET_WATCHES: _set_watches,
    Type.SET_WATCHES_2: _set_watches_2,
}

# --- writing ------------------------------------------------------------------------------------------------------------


def connected(timeout_ms: int, session: int, password: bytes, *, tells_read_only: bool) -> bytes:
    """The frame that answers a Connect. Zeros: there is no such session. tells_read_only: the client spoke of it too."""
    body = _CONNECTED.pack(0, timeout_ms, session) + _buffer(password) + (b"\0" if tells_read_only else b"")
    return _INT.pack(len(body)) + body


def reply(xid: int, zxid: int, answer: Reply) -> bytes:
    """The frame of a reply."""
    code = answer.code if isinstance(answer, ErrorResponse) else 0
    record = b"" if code else _record(answer)
    return b"%b%b%b" % (_INT.pack(_REPLY.size + len(record)), _REPLY.pack(xid, zxid, code), record)


def event(kind: EventType, path: str, zxid: int) -> bytes:
    """The frame that tells a watch of what happened."""
    record = _string(path)
    return b"%b%b%b" % (
        _INT.pack(_EVENT.size + len(record)),
        _EVENT.pack(EVENT_XID, zxid, 0, kind, STATE_CONNECTED),
        record,
    )


def _buffer(data: bytes | None) -> bytes:
    return b"\xff\xff\xff\xff" if data is None else _INT.pack(len(data)) + data


def _string(text: str) -> bytes:
    return _buffer(text.encode())


def _vector(items: Sequence[bytes]) -> bytes:
    return _INT.pack(len(items)) + b"".join(items)


def _stat(stat: Stat) -> bytes:
    return _STAT.pack(*stat[:5], (stat.cversion + _SIGN) % _WRAP - _SIGN, *stat[6:])  # the only counter that may wrap


def _names(names: Iterable[str], stat: Stat | None) -> bytes:
    return _vector([_string(name) for name in names]) + (b"" if stat is None else _stat(stat))


def _record(answer: Reply) -> bytes:
    match answer:
        case StatReply(stat):
            return _stat(stat)
        case DataReply(data, stat):
            return _buffer(data) + _stat(stat)
        case PathStat(path, stat):
            return _string(path) + _stat(stat)
        case PathReply(path):
            return _string(path)
        case NamesReply(names, stat_or_none):
            return _names(names, stat_or_none)
        case AclReply(acl, stat):
            acls = [_INT.pack(entry.perms) + _string(entry.scheme) + _string(entry.id) for entry in acl]
            return _vector(acls) + _stat(stat)
        case Results(replies):
            return b"".join([_result(one) for one in replies]) + _MULTI.pack(-1, True, -1)
        case _:
            return b""


def _result(answer: ErrorResponse | PathReply | PathStat | StatReply | DataReply | EmptyResponse) -> bytes:
    match answer:
        case ErrorResponse(code):
            return _MULTI.pack(Type.ERROR, False, code) + _INT.pack(code)
        case PathReply():
            kind = Type.CREATE
        case PathStat():
            kind = Type.CREATE_2
        case StatReply():
            kind = Type.SET_DATA
        case DataReply():
            kind = Type.GET_DATA
        case EmptyResponse(done):
            kind = done
    return _MULTI.pack(kind, False, 0) + _record(answer)
