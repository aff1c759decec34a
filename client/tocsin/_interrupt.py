"""Raises in the thread of a handler that is to stop, for those who cannot ask now and then.

The exception comes between two steps of Python code: a call that waits in the operating system or
in C returns first. It comes once; after `close` it comes no more.
"""

from __future__ import annotations

import ctypes
import threading

from tocsin.context import Control
from tocsin.errors import ControlFlow

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)

_NOTHING = ctypes.py_object()  # takes back what has not been raised yet


class Interrupt:
    """For the calling thread, from now on until `close`."""

    def __init__(self, control: Control) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._open = True
        self._forget = control.on_stop(self._raise)

    def _raise(self, cause: ControlFlow) -> None:
        with self._lock:
            if self._open and threading.get_ident() != self._thread:
                self._open = False
                _raise_in(self._thread, type(cause))

    def close(self) -> None:
        """What the thread does next is not interrupted, also by what was on its way."""
        with self._lock:
            self._open = False
            _raise_in(self._thread, _NOTHING)
        self._forget()
