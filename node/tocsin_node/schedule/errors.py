"""The one error of schedule evaluation: a schedule that must be refused when it is created.

It names the field, the value and what is allowed, so that a caller can show it without adding
words. It does not choose a gRPC code: `reason` is the stable name that the API maps.
"""

from typing import Final, Literal

Reason = Literal["BAD_CRON", "BAD_TIME_ZONE", "FIELD_INVALID"]

# A refused value is quoted in the message; a hostile one must not fill the log.
_QUOTED_VALUE_CHARS_MAX: Final = 64


class BadSchedule(ValueError):
    """A schedule that can never be evaluated as its author meant it.

    Attributes:
        reason: stable name of the kind of fault, for the API's error detail.
        field: what is wrong: "minute", "day_of_week", "time_zone", "every_ms", or "expression"
            when the fault is not inside one field.
        value: the refused value as text, shortened to 64 characters.
        allowed: what may stand there, in words.
    """

    def __init__(
        self, reason: Reason, field: str, value: object, allowed: str, problem: str
    ) -> None:
        self.reason: Final = reason
        self.field: Final = field
        self.value: Final = _shorten(value if isinstance(value, str) else repr(value))
        self.allowed: Final = allowed
        super().__init__(f"{field} {self.value!r}: {problem}; allowed: {allowed}")


def _shorten(text: str) -> str:
    if len(text) <= _QUOTED_VALUE_CHARS_MAX:
        return text
    return text[: _QUOTED_VALUE_CHARS_MAX - 3] + "..."
