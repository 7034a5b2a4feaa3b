"""Headers of transactions: 37, 39, 323."""

from trimq.protocol.headers.base import I32, I64, Header


class EndTransactionRequestHeader(Header):
    """END_TRANSACTION (37). ``tran_state_table_offset`` is the half message's queue offset."""

    producer_group: str
    tran_state_table_offset: I64
    commit_log_offset: I64
    commit_or_rollback: I32
    msg_id: str
    topic: str | None = None
    from_transaction_check: bool | None = None
    transaction_id: str | None = None


class CheckTransactionStateRequestHeader(Header):
    """CHECK_TRANSACTION_STATE (39), broker to producer."""

    tran_state_table_offset: I64
    commit_log_offset: I64
    topic: str | None = None
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None
    bname: str | None = None
    """The broker's name."""


class ResumeCheckHalfMessageRequestHeader(Header):
    """RESUME_CHECK_HALF_MESSAGE (323). ``msg_id`` is an offset message id."""

    msg_id: str
    topic: str | None = None
