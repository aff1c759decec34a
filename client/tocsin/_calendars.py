"""The calls of the client that concern calendars, asynchronous and not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from tocsin import _convert_calendar as convert
from tocsin._convert import timestamp
from tocsin._retry import new_request_id
from tocsin.calendar import Calendar, CalendarApplied, CalendarPreview
from tocsin.v1 import calendar_pb2

if TYPE_CHECKING:
    from tocsin._channel import Pool
    from tocsin._portal import Portal
    from tocsin.client import AsyncClient

PAGE_SIZE = 1000


class AsyncCalendars:
    """What `AsyncClient` has of calendars."""

    _pool: Pool
    timeout: float

    async def create_calendar(
        self, calendar: Calendar, *, request_id: str | None = None, validate_only: bool = False
    ) -> Calendar:
        """Stores a new exclusion calendar; AlreadyExists if there is one of that name."""
        request = calendar_pb2.CreateCalendarRequest(
            calendar=convert.to_calendar(calendar),
            request_id=request_id or new_request_id(),
            validate_only=validate_only,
        )
        response = await self._pool.call(
            lambda s: s.calendars.CreateCalendar, request, within=self.timeout
        )
        return convert.from_calendar(response.calendar)

    async def apply_calendar(
        self, calendar: Calendar, *, request_id: str | None = None, validate_only: bool = False
    ) -> CalendarApplied:
        """Makes the stored calendar what `calendar` says, creating it if need be.

        The jobs that name it are planned anew, a bounded number at a time; `get_calendar` says how
        far that is. Conflict if `calendar.etag` is not 0 and the calendar has changed since, or
        while the last change has not reached all jobs.
        """
        request = calendar_pb2.UpdateCalendarRequest(
            calendar=convert.to_calendar(calendar),
            allow_missing=True,
            request_id=request_id or new_request_id(),
            validate_only=validate_only,
        )
        response = await self._pool.call(
            lambda s: s.calendars.UpdateCalendar, request, within=self.timeout
        )
        return convert.from_applied(response)

    async def get_calendar(self, name: str, *, stale_ok: bool = False) -> Calendar:
        """One calendar, with the progress of its last change."""
        request = calendar_pb2.GetCalendarRequest(name=name, stale_ok=stale_ok)
        response = await self._pool.call(
            lambda s: s.calendars.GetCalendar, request, within=self.timeout
        )
        return convert.from_calendar(response.calendar)

    async def list_calendars(
        self, parent: str = "", *, stale_ok: bool = False
    ) -> AsyncIterator[Calendar]:
        """All calendars of a namespace (or of all) by name, fetched in pages."""
        token = ""
        while True:
            request = calendar_pb2.ListCalendarsRequest(
                parent=parent, page_size=PAGE_SIZE, page_token=token, stale_ok=stale_ok
            )
            page = await self._pool.call(
                lambda s: s.calendars.ListCalendars, request, within=self.timeout
            )
            for calendar in page.calendars:
                yield convert.from_calendar(calendar)
            token = page.next_page_token
            if not token:
                return

    async def delete_calendar(
        self, name: str, *, etag: int = 0, request_id: str | None = None
    ) -> None:
        """Removes a calendar; FailedPrecondition while jobs name it."""
        request = calendar_pb2.DeleteCalendarRequest(
            name=name, etag=etag, request_id=request_id or new_request_id()
        )
        await self._pool.call(lambda s: s.calendars.DeleteCalendar, request, within=self.timeout)

    async def preview_calendar(
        self, what: str | Calendar, *, after: datetime | None = None, count: int = 5
    ) -> CalendarPreview:
        """What a stored calendar (by name) excludes, or one that is not stored."""
        request = calendar_pb2.PreviewCalendarRequest(count=count)
        if isinstance(what, str):
            request.name = what
        else:
            request.calendar.CopyFrom(convert.to_calendar(what))
        if after is not None:
            request.after.CopyFrom(timestamp(after))
        response = await self._pool.call(
            lambda s: s.calendars.PreviewCalendar, request, within=self.timeout
        )
        return convert.from_preview(response)


class Calendars:
    """The same for `Client`."""

    _portal: Portal
    _async: AsyncClient

    def create_calendar(
        self, calendar: Calendar, *, request_id: str | None = None, validate_only: bool = False
    ) -> Calendar:
        """As AsyncClient.create_calendar."""
        return self._portal.run(
            self._async.create_calendar(
                calendar, request_id=request_id, validate_only=validate_only
            )
        )

    def apply_calendar(
        self, calendar: Calendar, *, request_id: str | None = None, validate_only: bool = False
    ) -> CalendarApplied:
        """As AsyncClient.apply_calendar."""
        return self._portal.run(
            self._async.apply_calendar(calendar, request_id=request_id, validate_only=validate_only)
        )

    def get_calendar(self, name: str, *, stale_ok: bool = False) -> Calendar:
        """As AsyncClient.get_calendar."""
        return self._portal.run(self._async.get_calendar(name, stale_ok=stale_ok))

    def list_calendars(self, parent: str = "", *, stale_ok: bool = False) -> Iterator[Calendar]:
        """As AsyncClient.list_calendars."""
        return self._portal.iterate(self._async.list_calendars(parent, stale_ok=stale_ok))

    def delete_calendar(self, name: str, *, etag: int = 0, request_id: str | None = None) -> None:
        """As AsyncClient.delete_calendar."""
        self._portal.run(self._async.delete_calendar(name, etag=etag, request_id=request_id))

    def preview_calendar(
        self, what: str | Calendar, *, after: datetime | None = None, count: int = 5
    ) -> CalendarPreview:
        """As AsyncClient.preview_calendar."""
        return self._portal.run(self._async.preview_calendar(what, after=after, count=count))
