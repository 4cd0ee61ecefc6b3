"""An adapter that is read when it is first needed, by whichever worker that is."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.read.opening import load
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.formats.opening import Opened

if TYPE_CHECKING:
    from ckpt_tools.moving.arrays import Array


class LazyAdapter:
    """An adapter's tensors, read once.

    Args:
        adapter: From headers.
        opened: The way to its bytes.
    """

    def __init__(self, adapter: Adapter[TensorEntry], opened: Opened) -> None:
        self._adapter = adapter
        self._opened = opened
        self._lock = threading.Lock()
        self._loaded: Adapter[Array] | None = None
        self._settings = ExitStack()

    def get(self) -> Adapter[Array]:
        """Return the loaded adapter.

        Raises:
            CkptError: Its bytes cannot be read, or are damaged.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self._adapter, self._opened)
                self._leave_threads_to_workers()
            return self._loaded

    def replace(self, adapter: Adapter[Array]) -> None:
        """Give another adapter from now on: the same change under other names."""
        self._loaded = adapter

    def close(self) -> None:
        """Give numpy its threads back."""
        self._settings.close()

    def _leave_threads_to_workers(self) -> None:
        """The executor's workers compute side by side: threads of each one's own would wait for each other."""
        from threadpoolctl import threadpool_limits

        self._settings.enter_context(threadpool_limits(1, user_api="blas"))
