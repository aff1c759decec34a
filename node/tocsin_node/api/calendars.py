"""CalendarService: exclusion calendars in, what they exclude and how far their changes are out."""

from __future__ import annotations

from typing import Any, cast

from msgspec.structs import replace

from tocsin.v1 import calendar_pb2, calendar_pb2_grpc
from tocsin_node import admission
from tocsin_node.admission import Faults, Refusal, calendar_name
from tocsin_node.api import _convert, status
from tocsin_node.api._deciding import Deciding, Known
from tocsin_node.api._forward import timeout_s
from tocsin_node.api._pages import LOOK_EVERY, Page, Slices, decode_token, encode_token
from tocsin_node.calendar_admission import DAY_S, calendar_spec
from tocsin_node.core import calendars as rules
from tocsin_node.core import wide
from tocsin_node.core.command import Command, DeleteCalendar, SetCalendar
from tocsin_node.core.model import SECOND_MS, Calendar, CalendarSpec, WideKind
from tocsin_node.core.state import State
from tocsin_node.leader.zones import ZoneKeeper
from tocsin_node.replica import Replica
from tocsin_node.schedule import clock_text, exclusion_of, load_zone, local_text

PREVIEW_COUNT_DEFAULT = 5
PREVIEW_COUNT_MAX = 1_000
PREVIEW_S = 10 * 366 * DAY_S  # how far ahead a preview looks
LOOK_DAYS = 200  # of them at a time
_WEEKDAYS = (
    calendar_pb2.WEEKDAY_SUNDAY,
    calendar_pb2.WEEKDAY_MONDAY,
    calendar_pb2.WEEKDAY_TUESDAY,
    calendar_pb2.WEEKDAY_WEDNESDAY,
    calendar_pb2.WEEKDAY_THURSDAY,
    calendar_pb2.WEEKDAY_FRIDAY,
    calendar_pb2.WEEKDAY_SATURDAY,
)


class CalendarService(Deciding, calendar_pb2_grpc.CalendarServiceServicer):
    """Serves from the replica of this node; which calls reach it, the edge decides."""

    def __init__(self, replica: Replica, slices: Slices, zones: ZoneKeeper) -> None:
        super().__init__(replica)
        self._slices = slices
        self._zones = zones

    async def CreateCalendar(  # noqa: N802
        self, request: calendar_pb2.CreateCalendarRequest, context: Any
    ) -> calendar_pb2.CreateCalendarResponse:
        faults = Faults()
        name = calendar_name(request.calendar.name, "calendar.name", faults)
        spec = calendar_spec(request.calendar, faults)
        key = self._key("CreateCalendar", request.request_id, faults, name, spec)
        faults.refuse_if_any()

        def decide() -> Command | Known:
            index = self._repeated(key)
            if index is not None:
                return Known(self._shown(name))
            if name in self._replica.state.calendars:
                message = f"calendar {name} exists; apply it instead to change it"
                raise Refusal("CALENDAR_EXISTS", message, detail={"calendar": name})
            if request.validate_only:
                return Known(definition(name, spec))
            return SetCalendar(key, name, 0, self._by_rules(spec))

        if not request.validate_only:
            await self._zones.know([spec], timeout=timeout_s(context))
        stored = self._answer(await self._change(decide, context))
        return calendar_pb2.CreateCalendarResponse(calendar=stored)

    async def UpdateCalendar(  # noqa: N802
        self, request: calendar_pb2.UpdateCalendarRequest, context: Any
    ) -> calendar_pb2.UpdateCalendarResponse:
        faults = Faults()
        name = calendar_name(request.calendar.name, "calendar.name", faults)
        spec = calendar_spec(request.calendar, faults)
        etag = admission.etag(request.calendar.etag, "calendar.etag", faults)
        key = self._key(
            "UpdateCalendar", request.request_id, faults, name, spec, etag, request.allow_missing
        )
        faults.refuse_if_any()

        def decide() -> Command | Known:
            index = self._repeated(key)
            old = self._replica.state.calendars.get(name)
            if index is not None:
                shown = self._shown(name)
                return Known(_updated(shown, created=shown.uid == index, changed=True))
            if old is None and (etag or not request.allow_missing):
                raise status.of_rejected(rules.not_found(name))
            if old is not None and etag not in (0, old.version):
                message = f"calendar {name} was changed since its etag {etag} was read"
                detail = {"current_etag": str(old.version), "calendar": name}
                raise Refusal("ETAG_MISMATCH", message, detail=detail)
            if old is not None and replace(old.spec, rules="") == spec:
                return Known(_updated(self._shown(name), created=False, changed=False))
            if request.validate_only:
                return Known(_updated(definition(name, spec), created=old is None, changed=True))
            return SetCalendar(key, name, 0 if old is None else old.version, self._by_rules(spec))

        if not request.validate_only:
            await self._zones.know([spec], timeout=timeout_s(context))
        changed = await self._change(decide, context)
        if isinstance(changed, calendar_pb2.UpdateCalendarResponse):
            return changed
        stored = self._answer(changed)
        return _updated(stored, created=stored.uid == stored.etag, changed=True)

    async def DeleteCalendar(  # noqa: N802
        self, request: calendar_pb2.DeleteCalendarRequest, context: Any
    ) -> calendar_pb2.DeleteCalendarResponse:
        faults = Faults()
        name = calendar_name(request.name, "name", faults)
        etag = admission.etag(request.etag, "etag", faults)
        key = self._key("DeleteCalendar", request.request_id, faults, name, etag)
        faults.refuse_if_any()
        await self._change(lambda: DeleteCalendar(key, name, etag), context)
        return calendar_pb2.DeleteCalendarResponse()

    async def GetCalendar(  # noqa: N802
        self, request: calendar_pb2.GetCalendarRequest, context: Any
    ) -> calendar_pb2.GetCalendarResponse:
        faults = Faults()
        name = calendar_name(request.name, "name", faults)
        faults.refuse_if_any()
        await self._fresh(request.stale_ok, context)
        return calendar_pb2.GetCalendarResponse(calendar=self._shown(name))

    async def ListCalendars(  # noqa: N802
        self, request: calendar_pb2.ListCalendarsRequest, context: Any
    ) -> calendar_pb2.ListCalendarsResponse:
        faults = Faults()
        parent = admission.parent(request.parent, "parent", faults, job_allowed=False)
        size = admission.page_size(
            request.page_size,
            faults,
            default=admission.PAGE_SIZE_DEFAULT,
            most=admission.PAGE_SIZE_MAX,
        )
        faults.refuse_if_any()
        parameters = ("ListCalendars", request.parent)
        position = decode_token(request.page_token, *parameters)
        await self._fresh(request.stale_ok, context)
        after = position[1] if position else ""
        response = calendar_pb2.ListCalendarsResponse()
        page, pace = Page(size), self._slices.begin()
        names = sorted(n for n in self._replica.state.calendars if n > after and parent.holds(n))
        for at, name in enumerate(names):
            if at % LOOK_EVERY == 0:
                await pace.look()
            if name not in self._replica.state.calendars:
                continue  # deleted meanwhile
            proto = self._shown(name)
            if not page.takes(proto.ByteSize()):
                last = response.calendars[-1].name
                response.next_page_token = encode_token((0, last), *parameters)
                break
            response.calendars.append(proto)
        return response

    async def PreviewCalendar(  # noqa: N802
        self, request: calendar_pb2.PreviewCalendarRequest, context: Any
    ) -> calendar_pb2.PreviewCalendarResponse:
        faults = Faults()
        spec = calendar_spec(request.calendar, faults)
        name = calendar_name(request.name, "name", faults) if request.name else ""
        if bool(name) == request.HasField("calendar") and not faults.found:
            faults.add("calendar", "give either a calendar to try or the name of a stored one")
        after_ms = self._replica.clock.now_ms()
        if request.HasField("after"):
            after_ms = admission.time_ms(request.after, "after", faults)
        count = request.count or PREVIEW_COUNT_DEFAULT
        if not 1 <= count <= PREVIEW_COUNT_MAX:
            faults.expected("count", request.count, f"1 to {PREVIEW_COUNT_MAX}")
        faults.refuse_if_any()
        if name:
            await self._fresh(False, context)
            spec = self._stored(name).spec
        return await self._preview(self._by_rules(spec), after_ms // SECOND_MS, count)

    async def _preview(
        self, spec: CalendarSpec, after_s: int, count: int
    ) -> calendar_pb2.PreviewCalendarResponse:
        exclusion, zone = exclusion_of([spec]), load_zone(spec.time_zone, spec.rules)
        response = calendar_pb2.PreviewCalendarResponse()
        pace = self._slices.begin()
        time_s, end_s = after_s + 1, after_s + PREVIEW_S
        while time_s <= end_s and len(response.stretches) < count:
            until_s = min(time_s + LOOK_DAYS * DAY_S, end_s)
            from_s = exclusion.next_excluded(time_s, until_s)
            await pace.look()
            if from_s is None:
                time_s = until_s + 1
                continue
            to_s = exclusion.next_allowed(from_s)
            stretch = response.stretches.add(local_from=local_text(zone, from_s))
            _convert.put_time(stretch.from_time, from_s * SECOND_MS)
            stretch.rules.extend(rule for _, rule in exclusion.why(from_s))
            if to_s is None:
                response.warnings.append("from then on it excludes everything: nothing is left")
                break
            stretch.local_to = local_text(zone, to_s)
            _convert.put_time(stretch.to_time, to_s * SECOND_MS)
            time_s = to_s
        if not response.stretches:
            response.warnings.append("it excludes nothing in the next ten years")
        return response

    def _by_rules(self, spec: CalendarSpec) -> CalendarSpec:
        """A calendar with the rules that its zone has in the cluster."""
        return replace(spec, rules=self._replica.state.zones.get(spec.time_zone, ""))

    def _stored(self, name: str) -> Calendar:
        calendar = self._replica.state.calendars.get(name)
        if calendar is None:
            raise status.of_rejected(rules.not_found(name))
        return calendar

    def _shown(self, name: str) -> calendar_pb2.Calendar:
        return shown(self._replica.state, self._stored(name))

    def _answer(self, changed: object) -> calendar_pb2.Calendar:
        """What a command yielded; a repeated one may find the calendar deleted since."""
        if isinstance(changed, calendar_pb2.Calendar):
            return changed
        if changed is None:
            raise Refusal("CALENDAR_NOT_FOUND", "the calendar was deleted since it was stored")
        return shown(self._replica.state, cast("Calendar", changed))


def shown(state: State, stored: Calendar) -> calendar_pb2.Calendar:
    """A calendar as it is now."""
    proto = definition(stored.name, stored.spec)
    proto.uid, proto.etag = stored.uid, stored.version
    _convert.put_time(proto.create_time, stored.create_time_ms)
    _convert.put_time(proto.update_time, stored.update_time_ms)
    proto.job_count = len(state.calendar_jobs.get(stored.name, ()))
    change = wide.latest(state, WideKind.CALENDAR, stored.name)
    if change is not None and change.id >= stored.uid:
        _convert.put_change(proto.change, change)
    return proto


def definition(name: str, spec: CalendarSpec) -> calendar_pb2.Calendar:
    """What the author of a calendar defines, with every default written out."""
    proto = calendar_pb2.Calendar(
        name=name, time_zone=spec.time_zone, crons=spec.crons, description=spec.description
    )
    for dates in spec.dates:
        proto.dates.add(first=dates.first, last=dates.last)
    for window in spec.windows:
        weekdays = [day for number, day in enumerate(_WEEKDAYS) if window.weekdays >> number & 1]
        proto.windows.add(
            weekdays=weekdays, start=clock_text(window.from_s), end=clock_text(window.to_s)
        )
    return proto


def _updated(
    calendar: calendar_pb2.Calendar, *, created: bool, changed: bool
) -> calendar_pb2.UpdateCalendarResponse:
    return calendar_pb2.UpdateCalendarResponse(calendar=calendar, created=created, changed=changed)
