"""The numbers of a result on their way to the host, in one copy."""

import torch
from torch import Tensor


class Download:
    """Copies `packed`, `[count]` float64, without waiting."""

    def __init__(self, packed: Tensor) -> None:
        self._host, self._copied = packed, None
        if packed.device.type != "cpu":
            self._host = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(packed.device))

    def wait(self) -> Tensor:
        """The numbers on the host, `[count]` float64. Waits for their copy and for nothing else."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def fetch(self) -> list[float]:
        """The same as a list."""
        numbers: list[float] = self.wait().tolist()
        return numbers
