"""Log records that say which attempt they are from.

    handler = logging.StreamHandler()
    handler.addFilter(AttemptFilter())
    handler.setFormatter(logging.Formatter("%(levelname)s %(attempt_name)s%(message)s"))

A filter on a logger sees only what is logged through that logger; on a handler it sees everything.
"""

from __future__ import annotations

import logging

from tocsin.context import current

__all__ = ["AttemptFilter"]


class AttemptFilter(logging.Filter):
    """Lets every record pass, and adds the attempt whose handler logged it.

    Fields added: `run`, `job`, `attempt`, `fencing_token`, `trace_id`; empty or 0 outside of a
    handler. `attempt_name` is "[run #attempt] " for text formats, or empty.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            context = current()
        except LookupError:
            run, job, attempt, token, trace_id, name = "", "", 0, 0, "", ""
        else:
            run, job, attempt = context.run, context.job, context.attempt
            token, trace_id = context.fencing_token, context.trace_id
            name = f"[{run} #{attempt}] "
        record.run = run
        record.job = job
        record.attempt = attempt
        record.fencing_token = token
        record.trace_id = trace_id
        record.attempt_name = name
        return True
