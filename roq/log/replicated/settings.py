"""What a log's writer and its repairer are given: quorums, sizes, times, bounds. Defaults in one place."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class LogSettings(BaseModel):
    """Settings of one log's writer. The quorums count when the log is made; later the log's own hold, unless these are higher
    and a new segment finds as many stores: then the log's grow.

    write_quorum: stores that keep each entry; ack_quorum: that must have it before it counts. Losing ack_quorum - 1 stores
    loses nothing; a take-over needs write_quorum - ack_quorum + 1 of them. With fewer hosts than write_quorum the log goes on
    with as many as there are, but never with fewer than ack_quorum.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    write_quorum: int = Field(default=3, ge=1, le=9)
    ack_quorum: int = Field(default=2, ge=1, le=9)
    segment_entries: int = Field(default=200_000, ge=1)
    segment_bytes: int = Field(default=256 * 1024 * 1024, ge=1)
    roll_entries: int = Field(default=1_000, ge=1)  # a snapshot begins a new segment if this one has so many
    window_entries: int = Field(default=200_000, ge=1)  # not acknowledged yet
    window_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    confirm_seconds: float = Field(default=0.005, gt=0)  # idle for so long: followers get the last acknowledgement
    confirm_again_seconds: float = Field(default=1.0, gt=0)  # between two times at which all of them get it
    check_seconds: float = Field(default=0.1, gt=0)
    resend_seconds: float = Field(default=0.5, gt=0)  # a frame unanswered for so long is sent again
    store_seconds: float = Field(default=2.0, gt=0)  # a store silent for so long is replaced
    repair_seconds: float = Field(default=10.0, gt=0)  # a segment some node of which misses entries is closed after so long
    give_up_seconds: float = Field(default=15.0, gt=0)  # too few stores answer for so long: the writer stops
    take_over_seconds: float = Field(default=30.0, gt=0)

    @model_validator(mode="after")
    def _quorums(self) -> LogSettings:
        if self.ack_quorum > self.write_quorum:
            raise ValueError("ack_quorum is at most write_quorum")
        return self


class RepairSettings(BaseModel):
    """Times and bounds of repairs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_seconds: float = Field(default=5.0, gt=0)  # between two rounds
    gone_seconds: float = Field(default=30.0, ge=0)  # a host away for so long is given up
    copies_at_once: int = Field(default=2, ge=1)
    copy_seconds: float = Field(default=600.0, gt=0)
    verify_seconds: float = Field(default=3600.0, gt=0)  # every copy is read and checked again after so long
    garbage_seconds: float = Field(default=60.0, ge=0)  # what nobody names is kept for so long: readers may still be at it
    garbage_every_seconds: float = Field(default=60.0, ge=0)
