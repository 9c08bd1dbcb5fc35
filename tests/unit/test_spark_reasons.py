"""What is told of an error of Spark's."""

from __future__ import annotations

from lakebook.spark.session import reason_of


def test_a_reason_tells_no_password_and_no_token_of_an_address() -> None:
    told = reason_of(ValueError("cannot read s3a://me:hush@bucket/a?token=SECRET&sig=MORE (denied)"))
    assert told == "cannot read s3a://***@bucket/a?***&*** (denied)"


def test_a_reason_is_the_innermost_cause_and_one_line() -> None:
    assert reason_of(ValueError("Job aborted\nCaused by: a\n  at x\nCaused by: the disk is full\n at y")) == (
        "the disk is full"
    )
