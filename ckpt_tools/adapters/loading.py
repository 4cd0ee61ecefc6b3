"""Load an adapter beside other work: torch takes seconds to import, and much of a merge only moves bytes."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ckpt_tools.adapters.adapter import Adapter
from ckpt_tools.adapters.read import load
from ckpt_tools.checkpoint import TensorEntry
from ckpt_tools.opening import Opened

if TYPE_CHECKING:
    import torch


class Loading:
    """An adapter's tensors, on their way.

    Args:
        adapter: From headers.
        opened: The way to its bytes.
    """

    def __init__(self, adapter: Adapter[TensorEntry], opened: Opened) -> None:
        self._adapter = adapter
        self._opened = opened
        self._future: Future[Adapter[torch.Tensor]] = Future()
        self._thread: threading.Thread | None = None
        self._replaced: Adapter[torch.Tensor] | None = None
        self._num_threads = 0

    def start(self) -> None:
        """Begin, in a thread of its own; again does nothing."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._load, name="ckpt-adapter", daemon=True)
        self._thread.start()

    def wait(self) -> Adapter[torch.Tensor]:
        """Return the loaded adapter.

        Raises:
            CkptError: Its bytes cannot be read, or are damaged.
        """
        return self._replaced or self._future.result()

    def replace(self, adapter: Adapter[torch.Tensor]) -> None:
        """Give another adapter to those who wait: the same change under other names."""
        self._replaced = adapter

    def close(self) -> None:
        """Wait for the end, and give torch its threads back."""
        if self._thread is None:
            return
        self._thread.join()
        if self._num_threads:
            import torch

            torch.set_num_threads(self._num_threads)

    def _load(self) -> None:
        try:
            import torch

            # The executor's workers compute side by side: more threads for each would only wait for each other.
            self._num_threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self._future.set_result(load(self._adapter, self._opened))
        except BaseException as error:  # noqa: BLE001 - raised again where the adapter is needed
            self._future.set_exception(error)
